package devicemesh

// #include "shim.h"
import "C"

import "sync/atomic"

// lasting is a handle of the library that is freed once it was closed and no blocked call uses it
// any more: ending such a call takes the handle, too.
type lasting struct {
	handle C.uintptr_t
	// How many calls hold the handle; closed is added when it is closed.
	state atomic.Int64
}

const closed = 1 << 62

// token is the handle for a call that waits for nobody. It is 0, which the library refuses, once
// the handle was closed.
func (l *lasting) token() C.uintptr_t {
	if l.state.Load()&closed != 0 {
		return 0
	}
	return l.handle
}

// hold keeps the handle from being freed until release. It answers false for a closed one, which
// needs no release.
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

// release undoes hold. It answers whether the handle is to be freed now.
func (l *lasting) release() bool {
	return l.state.Add(-1) == closed
}

// close answers whether the handle is to be freed now.
func (l *lasting) close() bool {
	return l.state.Or(closed) == 0
}
