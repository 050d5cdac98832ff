package devicemesh

// #include "shim.h"
import "C"

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
)

// group collects the operations of one outermost Group. They are passed to the library when body
// has returned without an error.
type group struct {
	thread C.long
	ctx    context.Context // The context that body gets. Nothing but this value joins the group.
	calls  []*operation

	// The first operation that was refused, by any goroutine.
	lock sync.Mutex
	err  error
}

// operation is one collective, checked and ready to be made.
type operation struct {
	mesh      *Mesh
	dim       string
	arguments *arguments
	function  func(mesh C.uintptr_t) C.outcome
}

type groupKey struct{}

func groupOf(ctx context.Context) *group {
	found, _ := ctx.Value(groupKey{}).(*group)
	return found
}

// The groups whose body runs now. The key is the thread to which the goroutine of body is locked.
var (
	bodies     sync.Map
	bodyNumber atomic.Int64
)

// bodyHere gives the group whose body this goroutine runs, or nil.
func bodyHere() *group {
	if bodyNumber.Load() == 0 {
		return nil
	}
	// No goroutine but the body's runs on its thread.
	found, _ := bodies.Load(C.go_thread())
	body, _ := found.(*group)
	return body
}

// refuse keeps the first refusal of an operation. The end of the group returns it.
func (g *group) refuse(err error) error {
	g.lock.Lock()
	defer g.lock.Unlock()
	if g.err == nil {
		g.err = err
	}
	return err
}

func (g *group) refusal() error {
	g.lock.Lock()
	defer g.lock.Unlock()
	return g.err
}

// groupFor gives the group that an operation with this context joins, or nil.
func groupFor(ctx context.Context) (*group, error) {
	here := bodyHere()
	if err := wrong(ctx); err != nil {
		if here != nil {
			_ = here.refuse(err)
		}
		return nil, err
	}
	given := groupOf(ctx)
	switch {
	case given == nil && here == nil:
		return nil, nil
	case given == nil:
		return nil, here.refuse(invalid("an operation inside a Group, but with another context: use the one that the group's function gets"))
	case given == here && ctx == here.ctx:
		return given, nil
	case given == here:
		// The operations are made together when body has returned, so that nothing could end this
		// one alone.
		return nil, here.refuse(invalid("an operation inside a Group, but with a context that is derived from the group's: use the one that the group's " +
			"function gets; a deadline or a cancellation belongs to the context that is given to Group"))
	case here != nil:
		return nil, here.refuse(invalid("an operation inside a Group, but with the context of another group"))
	default:
		return nil, given.refuse(invalid("an operation with the context of a Group, but from another goroutine, or after the group has ended; only the goroutine that began a group adds to it"))
	}
}

// Group runs the operations of body together, so that no order of sends and receives blocks. An
// operation belongs to the group when the goroutine of body makes it with the context that body
// gets. Operations are only collected while body runs, so the program must not change their
// buffers meanwhile. The results are there when Group returns. Groups nest, and only the end of
// the outermost group runs the operations. All operations are run, or none. When body fails or
// panics, or when an operation was refused (also if body ignored that), nothing is run and Group
// returns the error. The other ranks then wait for this one until their timeout. An operation or a
// Group inside body takes exactly the context that body gets. Any other context is refused, also
// one that is derived from it: a deadline or a cancellation holds for all operations together and
// belongs to ctx. Calls that are no operations (Flatten, Barrier ...) are made at once, with any
// context. When ctx is done before the operations are made, body still runs, none of its
// operations is made, and the error is the context's own. When ctx is done while they are made,
// their meshes are aborted and the error is ErrAborted. A thread of the package makes the
// operations, so a stream must mean the same on every thread (not cudaStreamPerThread).
func (m *Mesh) Group(ctx context.Context, body func(ctx context.Context) error) error {
	outer, err := groupFor(ctx)
	if err == nil && body == nil {
		err = invalid("the group's function is nil; pass the function that makes the group's operations")
	}
	if err == nil {
		err = m.canGroup()
	}
	if outer != nil {
		return outer.nest(ctx, err, body)
	}
	if err != nil {
		return err
	}
	collected, err := collect(ctx, body)
	if err != nil {
		return err
	}
	return m.run(ctx, collected)
}

// nest runs the body of an inner group, unless the inner group was refused.
func (g *group) nest(ctx context.Context, refused error, body func(ctx context.Context) error) error {
	// This error stays when body panics and the outer group's body recovers.
	outcome := invalid("a group within this one panicked")
	defer func() {
		if outcome != nil {
			_ = g.refuse(outcome)
		}
	}()
	if refused == nil {
		refused = body(ctx)
	}
	outcome = refused
	return outcome
}

// canGroup gives the reason why no group can begin on this mesh, or nil.
func (m *Mesh) canGroup() error {
	return m.call(&arguments{}, func(mesh C.uintptr_t) C.outcome { return C.go_group_check(mesh) })
}

// collect runs body with the goroutine locked to its thread, because bodyHere finds the group by
// the thread.
func collect(ctx context.Context, body func(ctx context.Context) error) ([]*operation, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	begun := &group{thread: C.go_thread()}
	begun.ctx = context.WithValue(ctx, groupKey{}, begun)
	bodies.Store(begun.thread, begun)
	bodyNumber.Add(1)
	defer func() {
		bodyNumber.Add(-1)
		bodies.Delete(begun.thread)
	}()
	err := body(begun.ctx)
	if err == nil {
		err = begun.refusal()
	}
	return begun.calls, err
}

// run makes the operations of a group. The library keeps the group with the thread.
func (m *Mesh) run(ctx context.Context, calls []*operation) error {
	var meshes []*Mesh
	for _, call := range calls {
		// A wrong call is refused before the group begins. A lazy mesh makes its communicators now.
		if _, err := call.mesh.Comm(ctx, call.dim); err != nil {
			return err
		}
		if !contains(meshes, call.mesh) {
			meshes = append(meshes, call.mesh)
		}
	}
	if len(calls) == 0 {
		return done(ctx)
	}
	for _, mesh := range meshes {
		if !mesh.hold() {
			return mesh.canGroup()
		}
		defer mesh.release()
	}
	end := func() {
		for _, mesh := range meshes {
			mesh.abort()
		}
	}
	began := make([]int, len(meshes))
	for i, mesh := range meshes {
		began[i] = mesh.itsWorld().noted()
	}
	err := until(ctx, end, func() error { return onOwnThread(func() error { return issue(meshes, calls, end) }) })
	for i, mesh := range meshes {
		err = mesh.itsWorld().explain(began[i], err)
	}
	return err
}

// onOwnThread calls function on a goroutine that is locked to its thread. When function fails, the
// thread ends with the goroutine: an abort with operations queued on cuda leaves the group of the
// thread open for good, and all later operations of that thread would fail.
func onOwnThread(function func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := function()
		if err == nil {
			runtime.UnlockOSThread()
		}
		result <- err
	}()
	return <-result
}

// issue makes the calls of a group between its start and its end, on a thread that does nothing
// else meanwhile. The caller holds the meshes.
func issue(meshes []*Mesh, calls []*operation, end func()) (err error) {
	var pins runtime.Pinner
	defer pins.Unpin()
	for _, call := range calls {
		call.arguments.pin(&pins)
	}
	note := func(failed error) {
		if err == nil {
			err = failed
		}
	}
	// Meshes may have different libraries, each with groups of its own. Groups of one library nest.
	for _, mesh := range meshes {
		if note(failure(C.go_group_start(mesh.handle))); err != nil {
			break
		}
		defer func() { note(failure(C.go_group_end(mesh.handle))) }()
	}
	for _, call := range calls {
		if err != nil {
			break
		}
		note(failure(call.function(call.mesh.handle)))
	}
	if failed, ok := err.(*Error); ok && failed.CCLResult == 0 {
		// A communicator library that refuses an operation runs nothing of its group. If
		// libdevicemesh itself refuses one, the communicator library would run the others, so the
		// meshes are aborted.
		end()
	}
	return err
}

func contains(meshes []*Mesh, wanted *Mesh) bool {
	for _, mesh := range meshes {
		if mesh == wanted {
			return true
		}
	}
	return false
}
