package devicemesh

// #include "shim.h"
import "C"

import (
	"context"
	"encoding/json"
	"runtime"
	"slices"
	"unsafe"
)

// A Mesh is one rank's view of an n-dimensional array of ranks, with a communicator for every
// dimension. All methods may be called from several goroutines. Views share the communicators of
// their root mesh.
//
// A method with a context waits for other ranks. When the context is done meanwhile, the mesh is
// aborted as by Abort, and the error is ErrAborted and the context's: the other ranks cannot go on
// either. With a context that is done before the call, nothing is begun and nothing aborted: the
// error is the context's.
//
// dim is a dimension's name, also a flattened one's. "" is the only dimension of a 1-D mesh.
type Mesh struct {
	lasting
	world *World
	names []string
	free  runtime.Cleanup
}

// Init makes a mesh, which gives every dimension of this rank a ready communicator. Collective
// over the world, also for ranks outside a mesh that is smaller. Ranks lie in it row-major. names
// nil: dim_0, dim_1 ...
//
// Before any communicator is made, the ranks agree that they all asked for the same; ErrMismatch
// says who did not. When ctx is done first, the world is aborted, as by World.Abort or
// AbortDefaultWorlds.
func Init(ctx context.Context, deviceType string, shape []int, names []string, options *MeshOptions) (*Mesh, error) {
	var a arguments
	a.checkCounts(options, shape)
	kind, world := a.optional("device type", deviceType), worldOf(options)
	sizes, labels, ndim := a.shapeAndNames(shape, names)
	made := a.init(options, 0)
	return a.meshOf(ctx, world, func(out *C.uintptr_t) C.outcome { return C.go_init(kind, sizes, ndim, labels, made, out) })
}

// FromComms makes a mesh over communicators (ncclComm_t) that exist already, one for each
// dimension. Local. They stay the caller's and must outlive the mesh, unless own: then they are
// destroyed when it is finalized or aborted. Without a world only local calls and collectives on
// it work.
func FromComms(deviceType string, shape []int, names []string, comms []Comm, own bool, options *MeshOptions) (*Mesh, error) {
	var a arguments
	a.checkCounts(options, shape)
	a.count("communicators", len(comms), true, len(shape))
	var flags C.uint32_t
	if own {
		flags = C.DM_INIT_OWN_COMMS
	}
	array := make([]C.uintptr_t, len(comms)+1)
	for i, comm := range comms {
		array[i] = C.uintptr_t(comm)
	}
	kind := a.optional("device type", deviceType)
	sizes, labels, ndim := a.shapeAndNames(shape, names)
	made := a.init(options, flags)
	return a.mesh(context.Background(), worldOf(options), nil, func(out *C.uintptr_t) C.outcome {
		return C.go_from_comms(kind, sizes, ndim, labels, &array[0], made, out)
	})
}

// Deserialize makes the mesh that a text of Serialize says. Collective over the world, on the same
// terms as Init. options.Ranks is nil.
func Deserialize(ctx context.Context, text string, options *MeshOptions) (*Mesh, error) {
	var a arguments
	if options != nil && len(options.Dims) > 0 {
		// The library reads as many as the text has dimensions; what is wrong with the text it
		// says itself.
		var parts struct{ Shape []json.Number }
		if json.Unmarshal([]byte(text), &parts) == nil {
			a.count("options", len(options.Dims), true, len(parts.Shape))
		}
	}
	line, made, world := a.text("text", text), a.init(options, 0), worldOf(options)
	return a.meshOf(ctx, world, func(out *C.uintptr_t) C.outcome { return C.go_deserialize(line, made, out) })
}

// Lookup gives the view that was registered under that name, also by another language in this
// process.
func Lookup(name string) (*Mesh, error) {
	var a arguments
	label := a.text("name", name)
	return a.mesh(context.Background(), nil, nil, func(out *C.uintptr_t) C.outcome { return C.go_lookup(label, out) })
}

// Register keeps the view under a name for Lookup.
func (m *Mesh) Register(name string) error {
	if m.token() == 0 {
		// To the library, that would remove the name.
		return &Error{Status: ErrInvalidHandle, Message: "the mesh is nil; Unregister removes a name"}
	}
	var a arguments
	label := a.text("name", name)
	return m.call(&a, func(mesh C.uintptr_t) C.outcome { return C.go_register(mesh, label) })
}

// Unregister removes a name.
func Unregister(name string) error {
	var a arguments
	label := a.text("name", name)
	return a.call(func() C.outcome { return C.go_register(0, label) })
}

// meshOf makes a call of a world, nil for a default one, that makes a mesh.
func (a *arguments) meshOf(ctx context.Context, world *World, call func(out *C.uintptr_t) C.outcome) (*Mesh, error) {
	if world != nil {
		if !world.hold() {
			return nil, noWorld
		}
		defer world.release()
	}
	return a.mesh(ctx, world, world.end, call)
}

// mesh makes a call that makes a mesh. With end, it waits for other ranks.
func (a *arguments) mesh(ctx context.Context, world *World, end func(), call func(out *C.uintptr_t) C.outcome) (*Mesh, error) {
	made := &Mesh{world: world}
	run := func() error { return a.call(func() C.outcome { return call(&made.handle) }) }
	if a.err != nil {
		return nil, a.err
	}
	err := error(nil)
	if end == nil {
		err = run()
	} else {
		err = until(ctx, end, run)
	}
	if err != nil {
		return nil, world.explain(err)
	}
	// While nobody else has the handle: the names are borrowed from it.
	for i := range int(C.go_ndim(made.handle)) {
		made.names = append(made.names, C.GoString(C.go_dim_name(made.handle, C.size_t(i))))
	}
	made.free = runtime.AddCleanup(made, func(handle C.uintptr_t) { C.go_free(handle) }, made.handle)
	return made, nil
}

// token is the handle, 0 (which the library refuses) for nil and once it was closed.
func (m *Mesh) token() C.uintptr_t {
	if m == nil {
		return 0
	}
	return m.lasting.token()
}

// release undoes hold.
func (m *Mesh) release() {
	if m.lasting.release() {
		C.go_free(m.handle)
	}
}

// abort ends the mesh, which is held.
func (m *Mesh) abort() {
	C.go_drop_outcome(C.go_abort(m.handle))
}

func (m *Mesh) itsWorld() *World {
	if m == nil {
		return nil
	}
	return m.world
}

// call makes a call that waits for nobody.
func (m *Mesh) call(a *arguments, function func(mesh C.uintptr_t) C.outcome) error {
	defer runtime.KeepAlive(m)
	return a.call(func() C.outcome { return function(m.token()) })
}

// collective makes a call that waits for other ranks. A Close meanwhile does not take its handle
// away.
func (m *Mesh) collective(ctx context.Context, a *arguments, function func(mesh C.uintptr_t) C.outcome) error {
	if a.err != nil || m == nil || !m.hold() {
		return m.call(a, function)
	}
	defer m.release()
	call := func() error { return a.call(func() C.outcome { return function(m.handle) }) }
	return m.world.explain(until(ctx, m.abort, call))
}

// Close frees the handle; communicators and other views live on. A second Close does nothing. The
// error is always nil.
//
// It does not wait. A call of another goroutine that is blocked goes on, and ends as it would
// have: when the ranks came, at the timeout, or when its context is done. Abort, of another view
// of the mesh, ends it at once. Later calls answer ErrInvalidHandle.
//
// A mesh that nothing refers to any more is closed by itself. That ends no communicator: Finalize
// and Abort do.
func (m *Mesh) Close() error {
	if m != nil {
		m.free.Stop()
		if m.lasting.close() {
			C.go_free(m.handle)
		}
	}
	return nil
}

// Check is the asynchronous error of a dimension's communicator, nil while it is well. It does not
// wait.
func (m *Mesh) Check(dim string) error {
	var a arguments
	along := a.optional("dimension name", dim)
	return m.call(&a, func(mesh C.uintptr_t) C.outcome { return C.go_check(mesh, along) })
}

// Abort ends the root mesh on this rank at once: every call that is blocked in any of its views
// returns, with ErrAborted here and ErrPeerLost on the ranks that wait for this one.
func (m *Mesh) Abort() error {
	return m.call(&arguments{}, func(mesh C.uintptr_t) C.outcome { return C.go_abort(mesh) })
}

// Finalize waits for outstanding work and destroys the communicators of the root mesh. Collective
// over it; every view answers ErrAborted from then on.
func (m *Mesh) Finalize(ctx context.Context) error {
	return m.collective(ctx, &arguments{}, func(mesh C.uintptr_t) C.outcome { return C.go_finalize(mesh) })
}

// Names are those of the dimensions, in order. A closed mesh still knows them.
func (m *Mesh) Names() []string {
	if m == nil {
		return nil
	}
	return slices.Clone(m.names)
}

// World is the one that the mesh was made in, nil for a default one.
func (m *Mesh) World() *World {
	return m.itsWorld()
}

// A Comm is an ncclComm_t, for a function of Mesh.Proc. It is a token or an address and never to
// be followed.
type Comm uintptr

// Comm is the raw communicator of this rank's group along a dimension. It lives until Finalize or
// Abort, whatever is closed. With MeshOptions.Lazy the first call for a dimension is collective
// over this rank's group.
func (m *Mesh) Comm(ctx context.Context, dim string) (Comm, error) {
	var a arguments
	var comm C.uintptr_t
	along := a.optional("dimension name", dim)
	err := m.collective(ctx, &a, func(mesh C.uintptr_t) C.outcome { return C.go_get_comm(mesh, along, &comm) })
	return Comm(comm), err
}

// Proc is the function of that name ("ncclAllReduce" ...) in the library that made the
// communicators. It stays valid until the end of the process.
func (m *Mesh) Proc(symbol string) (unsafe.Pointer, error) {
	var a arguments
	var proc unsafe.Pointer
	name := a.text("symbol", symbol)
	err := m.call(&a, func(mesh C.uintptr_t) C.outcome { return C.go_get_proc(mesh, name, &proc) })
	return proc, err
}
