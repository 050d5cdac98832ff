package devicemesh

// #include "shim.h"
import "C"

import (
	"fmt"
	"sync"
	"unsafe"
)

// DeviceProc gives the address of the function of that name ("ncclMemAlloc" ...) in the library
// that meshes of deviceType will get, before there is a mesh. Mesh.Proc knows the library of a
// world whose options name one.
func DeviceProc(deviceType, symbol string) (unsafe.Pointer, error) {
	var a arguments
	var proc unsafe.Pointer
	kind, name := a.optional("device type", deviceType), a.text("symbol", symbol)
	err := a.call(func() C.outcome { return C.go_get_device_proc(kind, name, &proc) })
	return proc, err
}

// The resolver of SetCCLResolver, and the first panic of it.
var resolving struct {
	change sync.Mutex // SetCCLResolver holds it for the whole call.

	lock     sync.Mutex
	resolve  func(name string) unsafe.Pointer
	panicked error
}

// SetCCLResolver makes the NCCL that is linked into the program the library of device type cuda.
// resolve gives the address of NCCL's function of a name, or nil where the program has none of that
// name. It is called here and by Proc, from any goroutine, until the process ends. nil takes an
// earlier resolver back. Call SetCCLResolver before anything else of device type cuda or "".
// Without it the library loads a shared NCCL, and a communicator of that copy crashes in the
// functions that the program links.
//
// ErrLibrary names a function that is missing. ErrInvalidState says that device type cuda is in use
// already.
func SetCCLResolver(resolve func(name string) unsafe.Pointer) error {
	resolving.change.Lock()
	defer resolving.change.Unlock()
	replace := func(next func(name string) unsafe.Pointer) (before func(name string) unsafe.Pointer) {
		resolving.lock.Lock()
		defer resolving.lock.Unlock()
		before, resolving.resolve = resolving.resolve, next
		return before
	}
	before := replace(resolve)
	err := failure(C.go_set_ccl_resolver(C.bool(resolve != nil)))
	if err == nil {
		return nil
	}
	replace(before)
	resolving.lock.Lock()
	defer resolving.lock.Unlock()
	if failed, ok := err.(*Error); ok {
		failed.Cause, resolving.panicked = resolving.panicked, nil
	}
	return err
}

//export goResolve
func goResolve(name *C.char) (address unsafe.Pointer) {
	resolving.lock.Lock()
	resolve := resolving.resolve
	resolving.lock.Unlock()
	if resolve == nil {
		return nil
	}
	wanted := C.GoString(name)
	// A panic must not unwind the library's frames, which called this function.
	if err := apart("resolver", func() error { address = resolve(wanted); return nil }); err != nil {
		resolving.lock.Lock()
		defer resolving.lock.Unlock()
		if resolving.panicked == nil {
			resolving.panicked = fmt.Errorf("%s: %w", wanted, err)
		}
		return nil
	}
	return address
}
