package devicemesh

// #include "shim.h"
import "C"

import (
	"bytes"
	"context"
	"time"
	"unsafe"
)

// The calls here go through the store, so they work on every device type, use no communicator, and
// cost some round trips. They are for seeds, IPC handles, names of files and configuration. They
// count as calls that make something: make those of one world in one order on every rank.

// Barrier returns when every rank of this rank's group along a dimension has called it. Collective
// over that group. A timeout of 0 means the mesh's. It says nothing about work on devices.
func (m *Mesh) Barrier(ctx context.Context, dim string, timeout time.Duration) error {
	var a arguments
	along, limit := a.optional("dimension name", dim), a.milliseconds(timeout)
	return m.collective(ctx, &a, func(mesh C.uintptr_t) C.outcome { return C.go_barrier(mesh, along, limit) })
}

// AllGatherBytes gives what every rank of this rank's group along a dimension gave: element i is
// from rank i along it. Collective over that group. The lengths may differ and may be 0. A rank
// gives at most 8 MiB, and all ranks together 64 MiB. A timeout of 0 means the mesh's.
func (m *Mesh) AllGatherBytes(ctx context.Context, dim string, data []byte, timeout time.Duration) ([][]byte, error) {
	var a arguments
	var buffers C.uintptr_t
	along, given, limit := a.optional("dimension name", dim), a.bytes(data), a.milliseconds(timeout)
	err := m.collective(ctx, &a, func(mesh C.uintptr_t) C.outcome {
		return C.go_all_gather_bytes(mesh, along, given.at(), C.size_t(given.Count), limit, &buffers)
	})
	return taken(buffers, err)
}

// BroadcastBytes gives every rank along a dimension the data of its rank root. Collective over this
// rank's group along the dimension. The data of the other ranks is not used. The length is at most
// 8 MiB. A timeout of 0 means the mesh's.
func (m *Mesh) BroadcastBytes(ctx context.Context, dim string, data []byte, root int, timeout time.Duration) ([]byte, error) {
	var a arguments
	var buffers C.uintptr_t
	along, given, limit, from := a.optional("dimension name", dim), a.bytes(data), a.milliseconds(timeout), a.int32("root", root)
	err := m.collective(ctx, &a, func(mesh C.uintptr_t) C.outcome {
		return C.go_broadcast_bytes(mesh, along, given.at(), C.size_t(given.Count), from, limit, &buffers)
	})
	return theOne(taken(buffers, err))
}

// AllGatherBytes gives what every rank of the world gave: element i is from world rank i.
// Collective over the world. It has the limits of Mesh.AllGatherBytes. A timeout of 0 means the
// world's. When ctx is done first, the world is aborted as by Abort.
func (w *World) AllGatherBytes(ctx context.Context, data []byte, timeout time.Duration) ([][]byte, error) {
	var a arguments
	var buffers C.uintptr_t
	given, limit := a.bytes(data), a.milliseconds(timeout)
	err := w.collective(ctx, &a, func(world C.uintptr_t) C.outcome {
		return C.go_world_all_gather_bytes(world, given.at(), C.size_t(given.Count), limit, &buffers)
	})
	return taken(buffers, err)
}

// BroadcastBytes gives every rank of the world the data of world rank root. Collective over the
// world. The data of the other ranks is not used. The length is at most 8 MiB. A timeout of 0 means
// the world's. When ctx is done first, the world is aborted as by Abort.
func (w *World) BroadcastBytes(ctx context.Context, data []byte, root int, timeout time.Duration) ([]byte, error) {
	var a arguments
	var buffers C.uintptr_t
	given, limit, from := a.bytes(data), a.milliseconds(timeout), a.int32("root", root)
	err := w.collective(ctx, &a, func(world C.uintptr_t) C.outcome {
		return C.go_world_broadcast_bytes(world, given.at(), C.size_t(given.Count), from, limit, &buffers)
	})
	return theOne(taken(buffers, err))
}

// bytes gives the memory of bytes, and has it pinned during the call.
func (a *arguments) bytes(data []byte) Buffer {
	given := Of(data)
	a.use(given.Address)
	return given
}

// taken copies the bytes of a result of the library, and frees the result.
func taken(buffers C.uintptr_t, err error) ([][]byte, error) {
	if err != nil {
		return nil, err
	}
	defer C.go_buffers_free(buffers)
	copies := make([][]byte, C.go_buffers_count(buffers))
	for i := range copies {
		var data unsafe.Pointer
		var length C.size_t
		if err := failure(C.go_buffers_get(buffers, C.size_t(i), &data, &length)); err != nil {
			return nil, err
		}
		copies[i] = bytes.Clone(unsafe.Slice((*byte)(data), length))
	}
	return copies, nil
}

// theOne gives the only element of a broadcast's result.
func theOne(all [][]byte, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	return all[0], nil
}
