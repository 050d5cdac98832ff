package devicemesh

// #include "shim.h"
import "C"

import (
	"context"
)

// The methods here run collectives on any memory. The functions of the same names without "Buffer"
// take slices. On cpu a call returns when the result is there, and stream is 0. On cuda a call
// returns when the work is on the stream, and the memory must stay until the work is done.

// AllReduceBuffer reduces over all ranks along a dimension. Every rank gets the result, with equal
// bits. send and recv may be one buffer (in place).
func (m *Mesh) AllReduceBuffer(ctx context.Context, dim string, send, recv Buffer, op Op, stream Stream) error {
	var a arguments
	a.sameCount(send, recv)
	a.op(op)
	a.apartOrSame(send, recv, 0)
	along := a.optional("dimension name", dim)
	return m.operation(ctx, &a, dim, []Buffer{send, recv}, stream, func(mesh C.uintptr_t) C.outcome {
		return C.go_all_reduce(mesh, along, send.at(), recv.at(), C.size_t(send.Count), C.int32_t(send.DType),
			C.int32_t(op), C.uintptr_t(stream))
	})
}

// ReduceBuffer reduces over all ranks along the dimension. The recv of rank root gets the result.
// The recv of the other ranks is not used.
func (m *Mesh) ReduceBuffer(ctx context.Context, dim string, send, recv Buffer, op Op, root int, stream Stream) error {
	var a arguments
	place := m.along(&a, dim)
	a.op(op)
	buffers := []Buffer{send}
	if place.rank == root {
		a.sameCount(send, recv)
		a.apartOrSame(send, recv, 0)
		buffers = append(buffers, recv)
	}
	along, to := a.optional("dimension name", dim), a.member("root", root, place)
	return m.operation(ctx, &a, dim, buffers, stream, func(mesh C.uintptr_t) C.outcome {
		return C.go_reduce(mesh, along, send.at(), recv.at(), C.size_t(send.Count), C.int32_t(send.DType),
			C.int32_t(op), to, C.uintptr_t(stream))
	})
}

// BroadcastBuffer copies the send of rank root along the dimension to every rank's recv. The
// others' send is not used.
func (m *Mesh) BroadcastBuffer(ctx context.Context, dim string, send, recv Buffer, root int, stream Stream) error {
	var a arguments
	place := m.along(&a, dim)
	buffers := []Buffer{recv}
	if place.rank == root {
		a.sameCount(send, recv)
		a.apartOrSame(send, recv, 0)
		buffers = append(buffers, send)
	}
	along, from := a.optional("dimension name", dim), a.member("root", root, place)
	return m.operation(ctx, &a, dim, buffers, stream, func(mesh C.uintptr_t) C.outcome {
		return C.go_broadcast(mesh, along, send.at(), recv.at(), C.size_t(recv.Count), C.int32_t(recv.DType), from, C.uintptr_t(stream))
	})
}

// AllGatherBuffer gathers the send of every rank in recv, in rank order.
func (m *Mesh) AllGatherBuffer(ctx context.Context, dim string, send, recv Buffer, stream Stream) error {
	var a arguments
	place := m.along(&a, dim)
	a.times("recv", recv, "send", send, place.size)
	a.apartOrSame(send, recv, place.rank*max(0, send.Count))
	along := a.optional("dimension name", dim)
	return m.operation(ctx, &a, dim, []Buffer{send, recv}, stream, func(mesh C.uintptr_t) C.outcome {
		return C.go_all_gather(mesh, along, send.at(), recv.at(), C.size_t(send.Count), C.int32_t(send.DType), C.uintptr_t(stream))
	})
}

// ReduceScatterBuffer reduces over all ranks and leaves block i of the result in the recv of rank
// i.
func (m *Mesh) ReduceScatterBuffer(ctx context.Context, dim string, send, recv Buffer, op Op, stream Stream) error {
	var a arguments
	place := m.along(&a, dim)
	a.times("send", send, "recv", recv, place.size)
	a.op(op)
	a.apartOrSame(recv, send, place.rank*max(0, recv.Count))
	along := a.optional("dimension name", dim)
	return m.operation(ctx, &a, dim, []Buffer{send, recv}, stream, func(mesh C.uintptr_t) C.outcome {
		return C.go_reduce_scatter(mesh, along, send.at(), recv.at(), C.size_t(recv.Count), C.int32_t(recv.DType),
			C.int32_t(op), C.uintptr_t(stream))
	})
}

// AllToAllBuffer sends block i of send to rank i, and receives block i of recv from rank i. send
// and recv may be one buffer on cpu, and along a dimension of size 1.
func (m *Mesh) AllToAllBuffer(ctx context.Context, dim string, send, recv Buffer, stream Stream) error {
	var a arguments
	a.sameCount(send, recv)
	size := max(1, m.along(&a, dim).size)
	if send.Count%size != 0 {
		a.refuse("send has %d elements, which %d ranks do not share evenly", send.Count, size)
	}
	a.apartOrSame(send, recv, 0)
	if size > 1 && overlap(send, recv) && m.onCUDA() {
		a.refuse("send and recv overlap: an all-to-all on cuda is never in place, so let them lie apart")
	}
	along := a.optional("dimension name", dim)
	return m.operation(ctx, &a, dim, []Buffer{send, recv}, stream, func(mesh C.uintptr_t) C.outcome {
		return C.go_all_to_all(mesh, along, send.at(), recv.at(), C.size_t(send.Count/size), C.int32_t(send.DType), C.uintptr_t(stream))
	})
}

// SendBuffer sends to rank peer along the dimension. That rank must receive. Put the sends and
// receives of one exchange into a Group.
func (m *Mesh) SendBuffer(ctx context.Context, dim string, send Buffer, peer int, stream Stream) error {
	var a arguments
	along, to := a.optional("dimension name", dim), a.member("peer", peer, m.along(&a, dim))
	return m.operation(ctx, &a, dim, []Buffer{send}, stream, func(mesh C.uintptr_t) C.outcome {
		return C.go_send(mesh, along, send.at(), C.size_t(send.Count), C.int32_t(send.DType), to, C.uintptr_t(stream))
	})
}

// RecvBuffer receives from rank peer along the dimension. That rank must send as many elements.
func (m *Mesh) RecvBuffer(ctx context.Context, dim string, recv Buffer, peer int, stream Stream) error {
	var a arguments
	along, from := a.optional("dimension name", dim), a.member("peer", peer, m.along(&a, dim))
	return m.operation(ctx, &a, dim, []Buffer{recv}, stream, func(mesh C.uintptr_t) C.outcome {
		return C.go_recv(mesh, along, recv.at(), C.size_t(recv.Count), C.int32_t(recv.DType), from, C.uintptr_t(stream))
	})
}

// place is this rank's coordinate along a dimension, and the number of ranks along it.
type place struct{ rank, size int }

// along asks the library for the place. An error becomes the error of the operation.
func (m *Mesh) along(a *arguments, dim string) place {
	rank, err := m.LocalRank(dim)
	size := 0
	if err == nil {
		size, err = m.Size(dim)
	}
	if err != nil {
		a.fail(err)
	}
	return place{rank, size}
}

// operation makes one collective along dim, or adds it to the group of ctx. The memory of a Go
// object is passed as an integer and pinned meanwhile: cgo would refuse a pointer into an object
// that itself holds pointers.
func (m *Mesh) operation(ctx context.Context, a *arguments, dim string, buffers []Buffer, stream Stream,
	function func(mesh C.uintptr_t) C.outcome) error {
	for _, buffer := range buffers {
		a.buffer(buffer, m)
	}
	group, err := groupFor(ctx)
	if err != nil {
		return err
	}
	if group == nil {
		if ctx.Err() != nil {
			// The library is not asked, so a wrong dimension is found here.
			m.along(a, dim)
		}
		return m.collective(ctx, a, function)
	}
	m.along(a, dim)
	// The library checks the stream too late for a group, when it makes the operation.
	if a.err == nil && stream != 0 && !m.onCUDA() {
		a.refuse("stream is given, but device type cpu has no streams: pass 0")
	}
	if a.err != nil {
		return group.refuse(a.err)
	}
	group.calls = append(group.calls, &operation{m, dim, a, function})
	return nil
}

// AllReduce reduces over all ranks along a dimension. Every rank gets the result in recv, with
// equal bits. send and recv may be one slice (in place).
func AllReduce[T Element](ctx context.Context, m *Mesh, dim string, send, recv []T, op Op) error {
	return m.AllReduceBuffer(ctx, dim, Of(send), Of(recv), op, 0)
}

// Reduce reduces over all ranks along the dimension. The recv of rank root gets the result. The
// recv of the other ranks is not used and may be nil.
func Reduce[T Element](ctx context.Context, m *Mesh, dim string, send, recv []T, op Op, root int) error {
	return m.ReduceBuffer(ctx, dim, Of(send), Of(recv), op, root, 0)
}

// Broadcast copies the values of rank root along the dimension to all its ranks, in place.
func Broadcast[T Element](ctx context.Context, m *Mesh, dim string, values []T, root int) error {
	return m.BroadcastBuffer(ctx, dim, Of(values), Of(values), root, 0)
}

// AllGather gathers the send of every rank in recv, in rank order.
func AllGather[T Element](ctx context.Context, m *Mesh, dim string, send, recv []T) error {
	return m.AllGatherBuffer(ctx, dim, Of(send), Of(recv), 0)
}

// ReduceScatter reduces over all ranks and leaves block i of the result in the recv of rank i.
func ReduceScatter[T Element](ctx context.Context, m *Mesh, dim string, send, recv []T, op Op) error {
	return m.ReduceScatterBuffer(ctx, dim, Of(send), Of(recv), op, 0)
}

// AllToAll sends block i of send to rank i, and receives block i of recv from rank i.
func AllToAll[T Element](ctx context.Context, m *Mesh, dim string, send, recv []T) error {
	return m.AllToAllBuffer(ctx, dim, Of(send), Of(recv), 0)
}

// Send sends to rank peer along the dimension. That rank must receive. Put the sends and receives
// of one exchange into a Group.
func Send[T Element](ctx context.Context, m *Mesh, dim string, values []T, peer int) error {
	return m.SendBuffer(ctx, dim, Of(values), peer, 0)
}

// Recv receives from rank peer along the dimension. That rank must send as many elements.
func Recv[T Element](ctx context.Context, m *Mesh, dim string, values []T, peer int) error {
	return m.RecvBuffer(ctx, dim, Of(values), peer, 0)
}
