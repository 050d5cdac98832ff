package devicemesh

// #include "shim.h"
import "C"

import (
	"fmt"
	"math"
	"runtime"
	"strings"
	"time"
	"unsafe"
)

// arguments holds the Go memory that C uses during one call: strings, arrays, buffers, and the
// pointers between them. The memory is pinned only while the call runs, because a runtime.Pinner
// that is lost without Unpin after a panic kills the process at a later collection. The first
// wrong argument is kept as the error.
type arguments struct {
	used []unsafe.Pointer
	err  error
}

// use has memory pinned during the call.
func (a *arguments) use(memory unsafe.Pointer) {
	if memory != nil {
		a.used = append(a.used, memory)
	}
}

// pin pins what the call uses.
func (a *arguments) pin(pins *runtime.Pinner) {
	for _, memory := range a.used {
		pins.Pin(memory)
	}
}

func (a *arguments) refuse(format string, values ...any) {
	if a.err == nil {
		a.err = invalid(format, values...)
	}
}

// fail keeps another call's error as this one's.
func (a *arguments) fail(err error) {
	if a.err == nil {
		a.err = err
	}
}

// text gives a C string.
func (a *arguments) text(what, value string) *C.char {
	if strings.IndexByte(value, 0) >= 0 {
		a.refuse("%s %q has a NUL in it", what, value)
		return nil
	}
	bytes := make([]byte, len(value)+1)
	copy(bytes, value)
	a.use(unsafe.Pointer(&bytes[0]))
	return (*C.char)(unsafe.Pointer(&bytes[0]))
}

// optional gives a C string, or NULL for the empty string.
func (a *arguments) optional(what, value string) *C.char {
	if value == "" {
		return nil
	}
	return a.text(what, value)
}

// texts gives an array of C strings, or NULL for a nil slice.
func (a *arguments) texts(what string, values []string) **C.char {
	if values == nil {
		return nil
	}
	// The array has one element more, so that an array without strings has an address too.
	array := make([]*C.char, len(values)+1)
	for i, value := range values {
		array[i] = a.text(what, value)
	}
	a.use(unsafe.Pointer(&array[0]))
	return &array[0]
}

// counts gives an array of size_t: numbers of elements, or a tensor's shape.
func (a *arguments) counts(what string, values []int) *C.size_t {
	array := make([]C.size_t, len(values)+1)
	for i, value := range values {
		if value < 0 {
			a.refuse("%s[%d] is %d", what, i, value)
		}
		array[i] = C.size_t(value)
	}
	a.use(unsafe.Pointer(&array[0]))
	return &array[0]
}

// int32s gives an array of int32_t, or NULL for a nil slice.
func (a *arguments) int32s(what string, values []int) *C.int32_t {
	if values == nil {
		return nil
	}
	array := make([]C.int32_t, len(values)+1)
	for i, value := range values {
		array[i] = a.int32(fmt.Sprintf("%s[%d]", what, i), value)
	}
	a.use(unsafe.Pointer(&array[0]))
	return &array[0]
}

// shape gives the sizes of dimensions. A nil slice has no dimensions.
func (a *arguments) shape(sizes []int) *C.int32_t {
	return a.int32s("shape", append([]int{}, sizes...))
}

func (a *arguments) int32(what string, value int) C.int32_t {
	if value < math.MinInt32 || value > math.MaxInt32 {
		a.refuse("%s is %d, which has more than 32 bits", what, value)
	}
	return C.int32_t(value)
}

// milliseconds gives a timeout in milliseconds, rounded up. 0 is the default.
func (a *arguments) milliseconds(timeout time.Duration) C.int64_t {
	if timeout < 0 {
		a.refuse("the timeout is %v", timeout)
	}
	rounded := timeout / time.Millisecond
	if timeout%time.Millisecond != 0 {
		rounded++
	}
	return C.int64_t(rounded)
}

// call makes a call with these arguments and then releases them. It makes no call if an argument
// is wrong.
func (a *arguments) call(function func() C.outcome) error {
	return a.asked(func() error { return failure(function()) })
}

// asked calls question, and keeps its arguments until question returns.
func (a *arguments) asked(question func() error) error {
	if a.err != nil {
		return a.err
	}
	var pins runtime.Pinner
	defer pins.Unpin()
	a.pin(&pins)
	return question()
}

// listed gets a list from the library. It asks again when the list is longer than the buffer.
func listed[T any](ask func(buffer *T, capacity C.size_t, length *C.size_t) C.outcome) ([]T, error) {
	buffer := make([]T, 16)
	for {
		var length C.size_t
		result := ask(&buffer[0], C.size_t(len(buffer)), &length)
		if result.status == C.DM_STATUS_BUFFER_TOO_SMALL {
			C.go_drop_outcome(result)
			buffer = make([]T, length)
			continue
		}
		if err := failure(result); err != nil {
			return nil, err
		}
		return buffer[:length], nil
	}
}

// textOf gets a string from the library.
func textOf(ask func(text *C.char, capacity C.size_t, length *C.size_t) C.outcome) (string, error) {
	bytes, err := listed(ask)
	if err != nil {
		return "", err
	}
	return C.GoString(&bytes[0]), nil
}

func ints[T ~int32 | ~int64 | ~uint64](values []T) []int {
	numbers := make([]int, len(values))
	for i, value := range values {
		numbers[i] = int(value)
	}
	return numbers
}
