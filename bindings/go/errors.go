package devicemesh

// #include "shim.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

// A Status says in which way a call failed. Each Status is an error that errors.Is finds:
//
//	if errors.Is(err, devicemesh.ErrPeerLost) { ... }
type Status int32

// The ways in which a call can fail.
const (
	// An argument is out of range, repeated or contradicts another.
	ErrInvalidArgument Status = C.DM_STATUS_INVALID_ARGUMENT
	// The mesh or world was closed.
	ErrInvalidHandle Status = C.DM_STATUS_INVALID_HANDLE
	// No dimension, symbol or registered mesh has that name.
	ErrNotFound Status = C.DM_STATUS_NOT_FOUND
	// The calling rank is not part of this mesh.
	ErrNotMember Status = C.DM_STATUS_NOT_MEMBER
	// The answer is longer than the buffer for it.
	ErrBufferTooSmall Status = C.DM_STATUS_BUFFER_TOO_SMALL
	// Ranks disagree about a collective call; the message says which rank asked for what.
	ErrMismatch Status = C.DM_STATUS_MISMATCH
	// A deadline passed; the message names the ranks that never came.
	ErrTimeout Status = C.DM_STATUS_TIMEOUT
	// The rendezvous store is unreachable, broke the protocol or refused this rank.
	ErrStore Status = C.DM_STATUS_STORE
	// The communicator library failed; Error.CCLResult has its code.
	ErrCCL Status = C.DM_STATUS_CCL
	// The device driver failed; Error.DeviceError has its code.
	ErrDevice Status = C.DM_STATUS_DEVICE
	// There is no usable communicator library. The message lists what was tried.
	ErrLibrary Status = C.DM_STATUS_LIBRARY
	// The call is not available for this device type, world or library version. The message says
	// what to do instead.
	ErrUnsupported Status = C.DM_STATUS_UNSUPPORTED
	// The mesh was aborted or finalized, or its world aborted.
	ErrAborted Status = C.DM_STATUS_ABORTED
	// A rank died or left; the message names it where known.
	ErrPeerLost Status = C.DM_STATUS_PEER_LOST
	// The library has a bug.
	ErrInternal Status = C.DM_STATUS_INTERNAL
	// This process has no more handles, memory, descriptors or threads; the message names the limit
	// and how to raise it.
	ErrExhausted Status = C.DM_STATUS_EXHAUSTED
	// The arguments are right, but the call may not be made now. The message says what comes first.
	ErrInvalidState Status = C.DM_STATUS_INVALID_STATE
)

// Error gives the status's C name, for example "DM_STATUS_TIMEOUT".
func (s Status) Error() string {
	return C.GoString(C.dm_status_name(C.dm_status(s)))
}

// An Error is the failure of a call of the library. A program needs no text to go on without the
// ranks that are lost (Mesh.Shrink):
//
//	var failed *devicemesh.Error
//	if errors.As(err, &failed) && len(failed.Lost) > 0 { ... }
type Error struct {
	Status  Status
	Message string // One line, with the values and the ranks.

	// The world ranks that the failure is about, in ascending order: those that were lost, aborted,
	// did not come, failed, or made another call than the others. At most 512.
	Ranks []int
	// Those of Ranks that are lost: their processes have ended, they left the world (World.Abort,
	// World.Close), or their hosts fell silent.
	Lost []int
	// The name of the dimension along which the call was made. "": the call has no dimension.
	Dimension string
	// How long the call waited for other ranks. 0: it did not wait.
	Waited time.Duration
	// The number of the collective call, as the message shows it ("as call 7"). -1: it has no
	// number.
	Call int64

	// The codes of the layers below (ncclResult_t, CUresult, errno); 0 where those were not
	// involved.
	CCLResult, DeviceError int
	OSError                syscall.Errno

	// Why the call ended: the context's cause, where the context ended the call, or the error of
	// the program's own Store. Often nil.
	Cause error
}

// Error gives the library's message.
func (e *Error) Error() string {
	switch {
	case e.Cause == nil:
		return e.Message
	case e.Message == "":
		return e.Cause.Error()
	}
	return fmt.Sprintf("%s: %v", e.Message, e.Cause)
}

// Timeout says whether a deadline passed, as net.Error does.
func (e *Error) Timeout() bool {
	return e.Status == ErrTimeout
}

// Unwrap gives the status, the errno and the cause, so that errors.Is finds each.
func (e *Error) Unwrap() []error {
	below := []error{e.Status}
	if e.OSError != 0 {
		below = append(below, e.OSError)
	}
	if e.Cause != nil {
		below = append(below, e.Cause)
	}
	return below
}

// failure gives the error of a call, or nil.
func failure(result C.outcome) error {
	if result.status == C.DM_STATUS_OK {
		return nil
	}
	defer C.go_drop_outcome(result)
	failed := refusal(Status(result.status), C.GoString(result.message))
	failed.CCLResult, failed.DeviceError = int(result.ccl_result), int(result.device_error)
	failed.OSError = syscall.Errno(result.os_error)
	failed.Dimension, failed.Call = C.GoString(result.dim), int64(result.call)
	// A longer wait than a Duration can hold does not exist.
	failed.Waited = time.Duration(max(0, float64(result.waited_seconds)) * float64(time.Second))
	// The lost ranks follow the ranks in one list.
	all := ints(unsafe.Slice(result.ranks, result.num_ranks+result.num_lost))
	failed.Ranks, failed.Lost = slices.Clip(all[:result.num_ranks]), all[result.num_ranks:]
	return failed
}

// refusal gives an error that this package has found itself.
func refusal(status Status, message string) *Error {
	return &Error{Status: status, Message: message, Call: -1}
}

func invalid(format string, values ...any) error {
	return refusal(ErrInvalidArgument, fmt.Sprintf(format, values...))
}

// wrong refuses a nil context.
func wrong(ctx context.Context) error {
	if ctx == nil {
		return invalid("the context is nil; pass context.Background() for a call that only the timeout ends")
	}
	return nil
}

// done gives the error of a call that does not begin because its context is done, or nil. It is
// the context's error and not an *Error, because nothing was ended.
func done(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	return fmt.Errorf("devicemesh: the call was not begun: %w", causeOf(ctx))
}

// causeOf gives an error that errors.Is finds as both the context's own error and its cause.
func causeOf(ctx context.Context) error {
	cause := context.Cause(ctx)
	if errors.Is(cause, ctx.Err()) {
		return cause
	}
	return fmt.Errorf("%w (%w)", cause, ctx.Err())
}

// The pause between two calls of end in until.
const endEvery = 5 * time.Millisecond

// until makes a call that may wait for other ranks. When ctx is done meanwhile, until calls end,
// which makes the call return. It calls end again and again until the call has returned, because an
// end that comes before the library has begun a join ends nothing. When ctx is done before, until
// makes no call and returns an error. end is never called after the call has returned, and until
// returns only when end has.
func until(ctx context.Context, end func(), call func() error) error {
	if err := wrong(ctx); err != nil {
		return err
	}
	if err := done(ctx); err != nil {
		return err
	}
	if ctx.Done() == nil {
		return call()
	}
	var ending sync.Mutex // Held while end runs.
	isOver, returned := false, make(chan struct{})
	endOnce := func() bool {
		ending.Lock()
		defer ending.Unlock()
		if !isOver {
			end()
		}
		return !isOver
	}
	stop := context.AfterFunc(ctx, func() {
		for endOnce() {
			select {
			case <-returned:
				return
			case <-time.After(endEvery):
			}
		}
	})
	err := func() error {
		defer func() {
			stop()
			close(returned)
			ending.Lock()
			isOver = true
			ending.Unlock()
		}()
		return call()
	}()
	if failed, ok := err.(*Error); ok && failed.Cause == nil && ctx.Err() != nil && failed.Status == ErrAborted {
		failed.Cause = causeOf(ctx)
	}
	return err
}

// Version gives the version of the loaded library: 10000 * major + 100 * minor + patch.
func Version() int {
	return int(C.dm_version())
}
