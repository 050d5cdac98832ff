package devicemesh

// #include "shim.h"
import "C"

import "sync/atomic"

// lasting is a handle of the library. It is freed when it was closed and no blocked call uses it
// any more, because aborting a blocked call also needs the handle.
type lasting struct {
	handle C.uintptr_t
	// The number of calls that hold the handle, plus the constant closed when it is closed.
	state atomic.Int64
}

const closed = 1 << 62

// token gives the handle for a call that does not wait for other ranks. It is 0, which the library
// refuses, when the handle was closed.
func (l *lasting) token() C.uintptr_t {
	if l.state.Load()&closed != 0 {
		return 0
	}
	return l.handle
}

// hold keeps the handle from being freed until release. It returns false for a closed handle,
// which needs no release.
func (l *lasting) hold() bool {
	for {
		state := l.state.Load()
		if state&closed != 0 {
			return false
		}
		if l.state.CompareAndSwap(state, state+1) {
			return true
		}
	}
}

// release undoes hold. It returns whether the caller must free the handle now.
func (l *lasting) release() bool {
	return l.state.Add(-1) == closed
}

// close closes the handle. It returns whether the caller must free the handle now.
func (l *lasting) close() bool {
	return l.state.Or(closed) == 0
}
