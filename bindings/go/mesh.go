package devicemesh

// #include "shim.h"
import "C"

import (
	"context"
	"runtime"
	"slices"
	"time"
	"unsafe"
)

// A Mesh is one rank's view of an n-dimensional array of ranks, with a communicator for every
// dimension. All methods may be called from several goroutines. Views share the communicators of
// their root mesh.
//
// A method with a context waits for other ranks. When the context is done meanwhile, the mesh is
// aborted as by Abort, because the other ranks cannot go on either. errors.Is then finds
// ErrAborted and the context's error. When the context is done before the call, the call begins
// nothing and aborts nothing, and the error is the context's. dim is the name of a dimension,
// which may be a flattened one. "" names the only dimension of a 1-D mesh (for Size, Check and
// StreamWait the whole view).
type Mesh struct {
	lasting
	world *World
	names []string
	free  runtime.Cleanup
}

// Init makes a mesh, which gives every dimension of this rank a ready communicator. Collective
// over the world: ranks outside a smaller mesh call it too. Ranks lie in the mesh row-major. When
// names is nil, the dimensions are dim_0, dim_1 ... Before any communicator is made, the ranks
// compare their calls. If the calls differ, all ranks get ErrMismatch, which says which rank asked
// for what. When ctx is done first, the world is aborted, as by World.Abort or AbortDefaultWorlds.
func Init(ctx context.Context, deviceType string, shape []int, names []string, options *MeshOptions) (*Mesh, error) {
	var a arguments
	kind, world := a.optional("device type", deviceType), worldOf(options)
	sizes, ndim, labels := a.shapeAndNames(shape, names)
	made := a.init(options, 0)
	return a.meshOf(ctx, world, func(out *C.uintptr_t) C.outcome { return C.go_init(kind, sizes, ndim, labels, made, out) })
}

// FromComms makes a mesh over communicators (ncclComm_t) that exist already, one for each
// dimension. Local. If own is false, they stay the caller's and must outlive the mesh. If own is
// true, they are destroyed when the mesh is finalized or aborted. Without a world only local calls
// and collectives on the mesh work.
func FromComms(deviceType string, shape []int, names []string, comms []Comm, own bool, options *MeshOptions) (*Mesh, error) {
	var a arguments
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
	sizes, ndim, labels := a.shapeAndNames(shape, names)
	made := a.init(options, flags)
	return a.mesh(context.Background(), worldOf(options), nil, func(out *C.uintptr_t) C.outcome {
		return C.go_from_comms(kind, sizes, ndim, labels, &array[0], made, out)
	})
}

// Deserialize makes a mesh from a text of Serialize. Collective over the world, as Init is.
// options.Ranks must be nil.
func Deserialize(ctx context.Context, text string, options *MeshOptions) (*Mesh, error) {
	var a arguments
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

// Register keeps the view under a name for Lookup. It replaces an earlier view of that name.
func (m *Mesh) Register(name string) error {
	var a arguments
	label := a.text("name", name)
	return m.call(&a, func(mesh C.uintptr_t) C.outcome { return C.go_register(mesh, label) })
}

// Unregister forgets the view that was registered under that name.
func Unregister(name string) error {
	var a arguments
	label := a.text("name", name)
	return a.call(func() C.outcome { return C.go_unregister(label) })
}

// meshOf makes a call of a world (nil: a default one) that makes a mesh.
func (a *arguments) meshOf(ctx context.Context, world *World, call func(out *C.uintptr_t) C.outcome) (*Mesh, error) {
	if world != nil {
		if !world.hold() {
			return nil, noWorld
		}
		defer world.release()
	}
	return a.mesh(ctx, world, world.end, call)
}

// mesh makes a call that makes a mesh. If end is not nil, the call waits for other ranks, and end
// aborts it.
func (a *arguments) mesh(ctx context.Context, world *World, end func(), call func(out *C.uintptr_t) C.outcome) (*Mesh, error) {
	made := &Mesh{world: world}
	run := func() error { return a.call(func() C.outcome { return call(&made.handle) }) }
	if a.err != nil {
		return nil, a.err
	}
	began, err := world.noted(), error(nil)
	if end == nil {
		err = run()
	} else {
		err = until(ctx, end, run)
	}
	if err != nil {
		return nil, world.explain(began, err)
	}
	// The names are read while nobody else has the handle, because they are borrowed from it.
	for i := range int(C.go_ndim(made.handle)) {
		made.names = append(made.names, C.GoString(C.go_dim_name(made.handle, C.size_t(i))))
	}
	made.free = runtime.AddCleanup(made, func(handle C.uintptr_t) { C.go_free(handle) }, made.handle)
	return made, nil
}

// token gives the handle. It is 0, which the library refuses, for a nil or closed Mesh.
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

// abort aborts the mesh, which the caller holds.
func (m *Mesh) abort() {
	C.go_drop_outcome(C.go_abort(m.handle))
}

func (m *Mesh) itsWorld() *World {
	if m == nil {
		return nil
	}
	return m.world
}

// call makes a call that does not wait for other ranks.
func (m *Mesh) call(a *arguments, function func(mesh C.uintptr_t) C.outcome) error {
	defer runtime.KeepAlive(m)
	return a.call(func() C.outcome { return function(m.token()) })
}

// collective makes a call that waits for other ranks. A Close meanwhile does not free the handle.
func (m *Mesh) collective(ctx context.Context, a *arguments, function func(mesh C.uintptr_t) C.outcome) error {
	if a.err != nil || m == nil || !m.hold() {
		return m.call(a, function)
	}
	defer m.release()
	call := func() error { return a.call(func() C.outcome { return function(m.handle) }) }
	began := m.world.noted()
	return m.world.explain(began, until(ctx, m.abort, call))
}

// Close frees the handle. Communicators and other views live on. A second Close does nothing. The
// error is always nil. It does not wait. A blocked call of another goroutine goes on, and ends
// when the ranks come, at the timeout, or when its context is done. Abort of another view of the
// mesh ends it at once. Later calls return ErrInvalidHandle. The garbage collector closes a mesh
// that nothing refers to any more. That ends no communicator. Only Finalize and Abort do.
func (m *Mesh) Close() error {
	if m != nil {
		m.free.Stop()
		if m.lasting.close() {
			C.go_free(m.handle)
		}
	}
	return nil
}

// Check gives the asynchronous error of a dimension's communicator, or nil. "" asks all
// communicators of the mesh whose ranks are all in this view, those of flattened dimensions too;
// the first error counts. Check does not wait, and makes no communicator.
func (m *Mesh) Check(dim string) error {
	var a arguments
	along := a.optional("dimension name", dim)
	return m.call(&a, func(mesh C.uintptr_t) C.outcome { return C.go_check(mesh, along) })
}

// StreamWait returns when the work on a stream is done, where cudaStreamSynchronize would wait for
// ever for a rank that is lost. It asks the communicator of a dimension ("": all of the mesh that
// exist) and the store meanwhile, and gives ErrPeerLost, ErrTimeout (0: the mesh's timeout) or
// ErrCCL. A failure leaves the work on the stream, and Abort ends it; so does ctx when it is done.
// On cpu a collective is done when it returns: stream is 0, and the call returns at once, with
// what Check gives.
func (m *Mesh) StreamWait(ctx context.Context, dim string, stream Stream, timeout time.Duration) error {
	var a arguments
	along, limit := a.optional("dimension name", dim), a.milliseconds(timeout)
	return m.collective(ctx, &a, func(mesh C.uintptr_t) C.outcome {
		return C.go_stream_wait(mesh, along, C.uintptr_t(stream), limit)
	})
}

// Abort ends the root mesh on this rank at once. Every call that is blocked in any of its views
// returns ErrAborted. Ranks that wait for this one get ErrPeerLost.
func (m *Mesh) Abort() error {
	return m.call(&arguments{}, func(mesh C.uintptr_t) C.outcome { return C.go_abort(mesh) })
}

// Finalize waits for outstanding work and destroys the communicators of the root mesh. Collective
// over the root mesh. From then on every view returns ErrAborted. World.Finalize ends all meshes of
// a world.
func (m *Mesh) Finalize(ctx context.Context, options ...CallOptions) error {
	var a arguments
	chosen := a.callOptions(options)
	return m.collective(ctx, &a, func(mesh C.uintptr_t) C.outcome { return C.go_finalize(mesh, chosen) })
}

// LostRanks gives the world ranks of the mesh that are known to be lost by now, in ascending order,
// for Shrink. Local. It asks the store and the communicators, and waits for half a second at most
// where they do not answer. Other ranks may learn of a loss a moment earlier or later. The mesh may
// have been aborted.
func (m *Mesh) LostRanks() ([]int, error) {
	defer runtime.KeepAlive(m)
	ranks, err := listed(func(ranks *C.int32_t, capacity C.size_t, length *C.size_t) C.outcome {
		return C.go_lost_ranks(m.token(), ranks, capacity, length)
	})
	return ints(ranks), err
}

// Names gives the names of the dimensions, in order. A closed mesh still knows them.
func (m *Mesh) Names() []string {
	if m == nil {
		return nil
	}
	return slices.Clone(m.names)
}

// World gives a new handle of the world that the mesh is in, also when Init joined that world by
// itself. Close it: the world lives on as long as one of its handles or meshes does. It works for
// each view of the mesh, and after the mesh has ended. ErrUnsupported: the mesh has no world
// (FromComms).
func (m *Mesh) World() (*World, error) {
	world := &World{}
	if joined := m.itsWorld(); joined != nil {
		world.store = joined.store
	}
	err := m.call(&arguments{}, func(mesh C.uintptr_t) C.outcome { return C.go_get_world(mesh, &world.handle) })
	if err != nil {
		return nil, err
	}
	return world, nil
}

// worldOfCall gives a handle of the mesh's world with which a call can be ended. The caller closes
// the handle. The World that made the mesh does not serve here: the program may have closed it, and
// a mesh of Lookup does not know it. Where the mesh has no world, the handle is empty, and the
// call fails at once.
func (m *Mesh) worldOfCall() *World {
	if world, err := m.World(); err == nil {
		return world
	}
	return &World{}
}

// A Comm is an ncclComm_t, for a function of Mesh.Proc. Never dereference it.
type Comm uintptr

// Comm gives the raw communicator of this rank's group along a dimension. It lives until Finalize
// or Abort, and Close does not end it. With MeshOptions.Lazy the first call for a dimension is
// collective over this rank's group.
func (m *Mesh) Comm(ctx context.Context, dim string) (Comm, error) {
	var a arguments
	var comm C.uintptr_t
	along := a.optional("dimension name", dim)
	err := m.collective(ctx, &a, func(mesh C.uintptr_t) C.outcome { return C.go_get_comm(mesh, along, &comm) })
	return Comm(comm), err
}

// Proc gives the address of the function of that name ("ncclAllReduce" ...) in the library that
// made the communicators. It stays valid until the end of the process.
func (m *Mesh) Proc(symbol string) (unsafe.Pointer, error) {
	var a arguments
	var proc unsafe.Pointer
	name := a.text("symbol", symbol)
	err := m.call(&a, func(mesh C.uintptr_t) C.outcome { return C.go_get_proc(mesh, name, &proc) })
	return proc, err
}
