package devicemesh

// #include "shim.h"
import "C"

import (
	"context"
	"runtime"
)

// view makes a call that makes a mesh from this one, and that waits for no other rank.
func (m *Mesh) view(a *arguments, function func(mesh C.uintptr_t, out *C.uintptr_t) C.outcome) (*Mesh, error) {
	defer runtime.KeepAlive(m)
	return a.mesh(context.Background(), m.itsWorld(), nil, func(out *C.uintptr_t) C.outcome { return function(m.token(), out) })
}

// made makes a call that makes a mesh from this one, and that waits for other ranks.
func (m *Mesh) made(ctx context.Context, a *arguments, function func(mesh C.uintptr_t, out *C.uintptr_t) C.outcome) (*Mesh, error) {
	if m == nil || !m.hold() {
		return m.view(a, function)
	}
	defer m.release()
	return a.mesh(ctx, m.world, m.abort, func(out *C.uintptr_t) C.outcome { return function(m.handle, out) })
}

// Slice is a view of the named dimensions, in the order given. Local; it shares the communicators.
func (m *Mesh) Slice(names ...string) (*Mesh, error) {
	var a arguments
	labels, n := a.texts("dimension name", names), C.size_t(len(names))
	return m.view(&a, func(mesh C.uintptr_t, out *C.uintptr_t) C.outcome { return C.go_slice(mesh, labels, n, out) })
}

// Flatten makes one dimension, with a communicator, out of all dimensions of this view. Collective
// over the root mesh. The default for an empty name is the dimensions' names joined with "_".
func (m *Mesh) Flatten(ctx context.Context, name string, options ...CallOptions) (*Mesh, error) {
	var a arguments
	label, chosen := a.optional("dimension name", name), a.callOptions(options)
	return m.made(ctx, &a, func(mesh C.uintptr_t, out *C.uintptr_t) C.outcome { return C.go_flatten(mesh, label, chosen, out) })
}

// Unflatten gives the view with one dimension replaced by several, whose sizes multiply to its
// size. Collective over the root mesh.
func (m *Mesh) Unflatten(ctx context.Context, dim string, sizes []int, names []string, options ...CallOptions) (*Mesh, error) {
	var a arguments
	along, chosen := a.text("dimension name", dim), a.callOptions(options)
	lengths, n, labels := a.shapeAndNames(sizes, names)
	return m.made(ctx, &a, func(mesh C.uintptr_t, out *C.uintptr_t) C.outcome {
		return C.go_unflatten(mesh, along, lengths, n, labels, chosen, out)
	})
}

// Reshape gives all ranks of this view another shape, with a communicator for each dimension.
// Collective over the root mesh. A name that exists already must mean equal groups.
func (m *Mesh) Reshape(ctx context.Context, sizes []int, names []string, options ...CallOptions) (*Mesh, error) {
	var a arguments
	chosen := a.callOptions(options)
	lengths, n, labels := a.shapeAndNames(sizes, names)
	return m.made(ctx, &a, func(mesh C.uintptr_t, out *C.uintptr_t) C.outcome {
		return C.go_reshape(mesh, lengths, n, labels, chosen, out)
	})
}

// SliceRange is the view with a dimension restricted to its indices start, start + step ...,
// length of them. Collective over the root mesh, also for the ranks at other indices, whose mesh
// answers ErrNotMember where membership matters.
func (m *Mesh) SliceRange(ctx context.Context, dim string, start, length, step int, options ...CallOptions) (*Mesh, error) {
	var a arguments
	along, chosen := a.optional("dimension name", dim), a.callOptions(options)
	first, count, stride := a.int32("start", start), a.int32("length", length), a.int32("step", step)
	return m.made(ctx, &a, func(mesh C.uintptr_t, out *C.uintptr_t) C.outcome {
		return C.go_slice_range(mesh, along, first, count, stride, chosen, out)
	})
}

// Shrink gives the mesh without the indices along a dimension that hold a lost rank, so that a job
// can go on after a rank has died. Whole replicas leave the mesh. Without lostRanks the survivors
// agree on who is lost, and all of them leave out the same ranks; ErrInvalidState says that no rank
// is lost (this mesh has ended all the same: make it anew with Init). Otherwise lostRanks are world
// ranks, the same on every rank (LostRanks, Error.Lost). The new mesh inherits the timeout and the
// options of this one; CallOptions.Dims replaces the options of the dimensions. Shrink ends this
// mesh.
//
// Collective over the ranks that are not lost. A rank whose replica leaves also calls Shrink, and
// gets a mesh that it is not in. When Shrink fails because another rank died meanwhile, call it
// again on this mesh. When ctx is done meanwhile, the world is aborted.
func (m *Mesh) Shrink(ctx context.Context, dim string, lostRanks []int, options ...CallOptions) (*Mesh, error) {
	var a arguments
	defer runtime.KeepAlive(m)
	along, lost, n := a.optional("dimension name", dim), a.int32s("lostRanks", lostRanks), C.size_t(len(lostRanks))
	chosen := a.callOptions(options)
	world := m.worldOfCall()
	defer world.Close()
	return a.mesh(ctx, m.itsWorld(), world.end, func(out *C.uintptr_t) C.outcome {
		return C.go_shrink(m.token(), along, lost, n, chosen, out)
	})
}

// Concatenate puts views of one root mesh side by side: a view with the dimensions of all of them,
// in order. Local.
func Concatenate(meshes ...*Mesh) (*Mesh, error) {
	var a arguments
	var world *World
	defer runtime.KeepAlive(meshes)
	tokens := make([]C.uintptr_t, len(meshes)+1)
	for i, mesh := range meshes {
		tokens[i] = mesh.token()
		world = mesh.itsWorld()
	}
	return a.mesh(context.Background(), world, nil, func(out *C.uintptr_t) C.outcome {
		return C.go_concatenate(&tokens[0], C.size_t(len(meshes)), out)
	})
}

// Root gives the mesh of which this is a view.
func (m *Mesh) Root() (*Mesh, error) {
	return m.view(&arguments{}, func(mesh C.uintptr_t, out *C.uintptr_t) C.outcome { return C.go_root(mesh, out) })
}

// Clone gives another handle of this view. It is closed separately.
func (m *Mesh) Clone() (*Mesh, error) {
	return m.view(&arguments{}, func(mesh C.uintptr_t, out *C.uintptr_t) C.outcome { return C.go_clone(mesh, out) })
}

// SubmeshCount gives the number of parallel copies of the named dimensions over the ranks of the
// root mesh.
func (m *Mesh) SubmeshCount(names ...string) (int, error) {
	var a arguments
	var count C.int32_t
	labels, n := a.texts("dimension name", names), C.size_t(len(names))
	err := m.call(&a, func(mesh C.uintptr_t) C.outcome { return C.go_submesh_count(mesh, labels, n, &count) })
	return int(count), err
}

// Submesh gives one parallel copy of the named dimensions. The copies are ordered by the position
// of their first rank.
func (m *Mesh) Submesh(index int, names ...string) (*Mesh, error) {
	var a arguments
	at, labels, n := a.int32("index", index), a.texts("dimension name", names), C.size_t(len(names))
	return m.view(&a, func(mesh C.uintptr_t, out *C.uintptr_t) C.outcome { return C.go_submesh(mesh, labels, n, at, out) })
}
