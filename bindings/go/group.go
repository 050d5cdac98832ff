package devicemesh

// #include "shim.h"
import "C"

import (
	"context"
	"runtime"
)

// group is a group of operations that a thread has begun. Their buffers stay where they are until it ends.
type group struct {
	thread C.long
	pins   runtime.Pinner
}

type groupKey struct{}

func groupOf(ctx context.Context) *group {
	found, _ := ctx.Value(groupKey{}).(*group)
	return found
}

// take keeps the buffers of one operation.
func (g *group) take(buffers []Buffer) error {
	if C.go_thread() != g.thread {
		return invalid("an operation with the context of a group, but from another goroutine; a group belongs to the one that began it")
	}
	for _, buffer := range buffers {
		if buffer.Address != nil {
			g.pins.Pin(buffer.Address)
		}
	}
	return nil
}

// Group runs the operations of body together, so that no order of sends and receives blocks. They are those made by this goroutine with the context that
// body gets; they have their results when Group returns. Groups nest: only the outermost end runs them.
//
// What was begun is run even when body fails, as the other ranks wait for it. body's error comes first.
func (m *Mesh) Group(ctx context.Context, body func(ctx context.Context) error) (err error) {
	// The library keeps the group with the thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	begun := groupOf(ctx)
	if begun == nil {
		begun = &group{thread: C.go_thread()}
		defer begun.pins.Unpin()
	} else if err := begun.take(nil); err != nil {
		return err
	}
	if err := m.call(&arguments{}, func(mesh C.uintptr_t) C.outcome { return C.go_group_start(mesh) }); err != nil {
		return err
	}
	defer func() {
		ended := m.collective(ctx, &arguments{}, func(mesh C.uintptr_t) C.outcome { return C.go_group_end(mesh) })
		if err == nil {
			err = ended
		}
	}()
	return body(context.WithValue(ctx, groupKey{}, begun))
}
