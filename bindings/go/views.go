package devicemesh

// #include "shim.h"
import "C"

import (
	"context"
	"runtime"
)

// view is a call that makes a mesh of this one. It waits for nobody.
func (m *Mesh) view(a *arguments, function func(mesh C.uintptr_t, out *C.uintptr_t) C.outcome) (*Mesh, error) {
	defer runtime.KeepAlive(m)
	return a.mesh(context.Background(), m.itsWorld(), nil, func(out *C.uintptr_t) C.outcome { return function(m.token(), out) })
}

// made is the same for a call that waits for other ranks.
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

// Flatten makes one dimension out of all of this view's, with a communicator. Collective over the
// root mesh. name "": the dimensions' names joined with "_".
func (m *Mesh) Flatten(ctx context.Context, name string, options ...DimOptions) (*Mesh, error) {
	var a arguments
	if len(options) > 1 {
		a.refuse("there are %d options for one dimension", len(options))
	}
	label, wishes := a.optional("dimension name", name), a.dims(options)
	return m.made(ctx, &a, func(mesh C.uintptr_t, out *C.uintptr_t) C.outcome { return C.go_flatten(mesh, label, wishes, out) })
}

// Unflatten is the view with one dimension replaced by several, whose sizes multiply to its size.
// Collective over the root mesh. options: none, or one for each.
func (m *Mesh) Unflatten(ctx context.Context, dim string, sizes []int, names []string, options ...DimOptions) (*Mesh, error) {
	var a arguments
	a.count("options", len(options), len(options) > 0, len(sizes))
	along, wishes := a.text("dimension name", dim), a.dims(options)
	lengths, labels, n := a.shapeAndNames(sizes, names)
	return m.made(ctx, &a, func(mesh C.uintptr_t, out *C.uintptr_t) C.outcome {
		return C.go_unflatten(mesh, along, lengths, labels, n, wishes, out)
	})
}

// Reshape is all ranks of this view under another shape, each dimension with a communicator.
// Collective over the root mesh. A name that exists already must mean the same groups. options:
// none, or one for each.
func (m *Mesh) Reshape(ctx context.Context, sizes []int, names []string, options ...DimOptions) (*Mesh, error) {
	var a arguments
	a.count("options", len(options), len(options) > 0, len(sizes))
	wishes := a.dims(options)
	lengths, labels, n := a.shapeAndNames(sizes, names)
	return m.made(ctx, &a, func(mesh C.uintptr_t, out *C.uintptr_t) C.outcome {
		return C.go_reshape(mesh, lengths, labels, n, wishes, out)
	})
}

// SliceRange is the view with a dimension restricted to its indices start, start + step ...,
// length of them. Collective over the root mesh, also for the ranks at other indices, whose mesh
// answers ErrNotMember where membership matters.
func (m *Mesh) SliceRange(ctx context.Context, dim string, start, length, step int) (*Mesh, error) {
	var a arguments
	along := a.optional("dimension name", dim)
	first, count, stride := a.size("start", start), a.size("length", length), a.size("step", step)
	return m.made(ctx, &a, func(mesh C.uintptr_t, out *C.uintptr_t) C.outcome {
		return C.go_slice_range(mesh, along, first, count, stride, out)
	})
}

// Shrink is the mesh without those indices along a dimension that hold a lost rank, for going on
// after a rank has died: whole replicas go. It ends this mesh.
//
// Collective over the ranks that are not lost, also those whose replica goes; they get a mesh that
// they are not in. When it fails because another rank died meanwhile, call it again on the same
// mesh. When ctx is done meanwhile, the world is aborted, unless it was closed before: then the
// call ends by the timeout.
func (m *Mesh) Shrink(ctx context.Context, dim string, lostRanks []int) (*Mesh, error) {
	var a arguments
	defer runtime.KeepAlive(m)
	along, lost, n := a.optional("dimension name", dim), a.int32s("the lost rank", lostRanks), C.size_t(len(lostRanks))
	world := m.itsWorld()
	if world != nil && world.hold() {
		defer world.release()
	}
	return a.mesh(ctx, world, world.end, func(out *C.uintptr_t) C.outcome { return C.go_shrink(m.token(), along, lost, n, out) })
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

// Root is the mesh that this is a view of.
func (m *Mesh) Root() (*Mesh, error) {
	return m.view(&arguments{}, func(mesh C.uintptr_t, out *C.uintptr_t) C.outcome { return C.go_root(mesh, out) })
}

// Clone is another handle of the same view, closed on its own.
func (m *Mesh) Clone() (*Mesh, error) {
	return m.view(&arguments{}, func(mesh C.uintptr_t, out *C.uintptr_t) C.outcome { return C.go_clone(mesh, out) })
}

// SubmeshCount is how many parallel copies of the named dimensions there are over the ranks of the
// root mesh.
func (m *Mesh) SubmeshCount(names ...string) (int, error) {
	var a arguments
	var count C.size_t
	labels, n := a.texts("dimension name", names), C.size_t(len(names))
	err := m.call(&a, func(mesh C.uintptr_t) C.outcome { return C.go_submesh_count(mesh, labels, n, &count) })
	return int(count), err
}

// Submesh is one of them, by index, ordered by their first rank's place.
func (m *Mesh) Submesh(index int, names ...string) (*Mesh, error) {
	var a arguments
	at, labels, n := a.size("index", index), a.texts("dimension name", names), C.size_t(len(names))
	return m.view(&a, func(mesh C.uintptr_t, out *C.uintptr_t) C.outcome { return C.go_submesh(mesh, labels, n, at, out) })
}
