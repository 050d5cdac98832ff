package devicemesh

// The layers below: the communicator library, the operating system.

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"
)

func TestErrorsOfTheLayersBelow(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Join(background, "cpu", &WorldOptions{Size: 2, InitMethod: "file://" + file + "/in/it", Timeout: time.Second})
	refused(t, err, ErrStore, file)
	if !errors.Is(err, syscall.ENOTDIR) {
		t.Errorf("%v should be ENOTDIR", err)
	}
	cause := errors.New("the cause")
	failed := &Error{Status: ErrTimeout, Message: "late", Cause: cause}
	if !failed.Timeout() || !errors.Is(failed, cause) || errors.Is(failed, ErrStore) || failed.Error() != "late: the cause" {
		t.Error(failed)
	}
	if text := Status(99).Error(); text != "DM_STATUS_UNKNOWN" {
		t.Error(text)
	}
}

func TestFunctionsOfTheLibrary(t *testing.T) {
	for _, name := range []string{"ncclAllReduce", "ncclMemAlloc"} {
		proc, err := DeviceProc("cpu", name)
		if proc == nil || err != nil {
			t.Error(name, proc, err)
		}
	}
	_, err := DeviceProc("cpu", "ncclNothing")
	refused(t, err, ErrNotFound, "ncclNothing")
	_, err = DeviceProc("xpu", "ncclAllReduce")
	refused(t, err, ErrInvalidArgument, "xpu")

	// A resolver that lacks functions, one that panics, and one that ends its goroutine.
	var asked atomic.Int64
	for part, resolve := range map[string]func(string) unsafe.Pointer{
		"nccl":                func(string) unsafe.Pointer { asked.Add(1); return nil },
		"resolver panicked":   func(string) unsafe.Pointer { panic("at once") },
		"ended its goroutine": func(string) unsafe.Pointer { runtime.Goexit(); return nil },
	} {
		refused(t, SetCCLResolver(resolve), ErrLibrary, part)
	}
	if asked.Load() == 0 {
		t.Error("the resolver was not asked")
	}
	if err := SetCCLResolver(nil); err != nil {
		t.Error(err)
	}
}
