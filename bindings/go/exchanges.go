package devicemesh

// #include "shim.h"
import "C"

import (
	"cmp"
	"context"
	"slices"
)

// Blocks says which elements of a buffer belong to which rank along a dimension.
type Blocks struct {
	// The number of elements of each rank's block, which may be 0.
	Counts []int
	// The element of the buffer where each block begins. nil: the blocks follow each other and fill
	// the buffer.
	Displs []int
}

// AllToAllV sends block i of send to rank i along a dimension, and receives block i of recv from
// it. What rank i sends to rank k is what k expects from i: on cpu other counts are ErrMismatch on
// all ranks, before anything is written; NCCL does not compare them. No block of recv overlaps
// another block of either buffer.
func AllToAllV[T Element](ctx context.Context, m *Mesh, dim string, send []T, sends Blocks, recv []T, receives Blocks) error {
	return m.AllToAllVBuffer(ctx, dim, Of(send), sends, Of(recv), receives, 0)
}

// AllGatherV gathers the send of every rank i in block i of recv. All ranks give the same counts,
// and send has as many elements as this rank's own block: on cpu other counts are ErrMismatch on
// all ranks; NCCL does not compare them. In place when send is this rank's block of recv.
func AllGatherV[T Element](ctx context.Context, m *Mesh, dim string, send, recv []T, receives Blocks) error {
	return m.AllGatherVBuffer(ctx, dim, Of(send), Of(recv), receives, 0)
}

// ReduceScatterV reduces block i of send over all ranks, and leaves it in the recv of rank i. All
// ranks give the same counts, and recv has as many elements as this rank's own block: on cpu other
// counts are ErrMismatch on all ranks; NCCL does not compare them. In place when recv is this
// rank's block of send.
func ReduceScatterV[T Element](ctx context.Context, m *Mesh, dim string, send []T, sends Blocks, recv []T, op Op) error {
	return m.ReduceScatterVBuffer(ctx, dim, Of(send), sends, Of(recv), op, 0)
}

// AllToAllVBuffer is AllToAllV on any memory.
func (m *Mesh) AllToAllVBuffer(ctx context.Context, dim string, send Buffer, sends Blocks, recv Buffer, receives Blocks, stream Stream) error {
	var a arguments
	place := m.along(&a, dim)
	a.same(send, recv)
	out, into := a.blocks("send", send, sends, place), a.blocks("recv", recv, receives, place)
	if place.size == 1 && a.err == nil {
		if sends.Counts[0] != receives.Counts[0] {
			a.refuse("this rank sends %d elements to itself and expects %d", sends.Counts[0], receives.Counts[0])
		}
		a.apart(out, into, 0, 0)
	} else {
		a.apart(out, into, -1, -1)
	}
	along := a.optional("dimension name", dim)
	return m.operation(ctx, &a, dim, []Buffer{send, recv}, stream, func(mesh C.uintptr_t) C.outcome {
		return C.go_all_to_allv(mesh, along, send.at(), out.counts, out.displs, recv.at(),
			into.counts, into.displs, C.int32_t(send.DType), C.uintptr_t(stream))
	})
}

// AllGatherVBuffer is AllGatherV on any memory.
func (m *Mesh) AllGatherVBuffer(ctx context.Context, dim string, send, recv Buffer, receives Blocks, stream Stream) error {
	var a arguments
	place := m.along(&a, dim)
	a.same(send, recv)
	out, into := whole(send), a.blocks("recv", recv, receives, place)
	a.ownBlock("send", send, receives, place)
	a.apart(out, into, 0, place.rank)
	along := a.optional("dimension name", dim)
	return m.operation(ctx, &a, dim, []Buffer{send, recv}, stream, func(mesh C.uintptr_t) C.outcome {
		return C.go_all_gatherv(mesh, along, send.at(), recv.at(),
			into.counts, into.displs, C.int32_t(send.DType), C.uintptr_t(stream))
	})
}

// ReduceScatterVBuffer is ReduceScatterV on any memory.
func (m *Mesh) ReduceScatterVBuffer(ctx context.Context, dim string, send Buffer, sends Blocks, recv Buffer, op Op, stream Stream) error {
	var a arguments
	place := m.along(&a, dim)
	a.same(send, recv)
	a.op(op)
	out, into := a.blocks("send", send, sends, place), whole(recv)
	a.ownBlock("recv", recv, sends, place)
	a.apart(out, into, place.rank, 0)
	along := a.optional("dimension name", dim)
	return m.operation(ctx, &a, dim, []Buffer{send, recv}, stream, func(mesh C.uintptr_t) C.outcome {
		return C.go_reduce_scatterv(mesh, along, send.at(), out.counts, out.displs, recv.at(),
			C.int32_t(recv.DType), C.int32_t(op), C.uintptr_t(stream))
	})
}

// span is the memory of one rank's block: its first byte and the byte after it.
type span struct{ first, end uintptr }

// blockList is a checked Blocks, as C takes it.
type blockList struct {
	counts, displs *C.size_t
	spans          []span
}

// whole gives a buffer that is one block.
func whole(b Buffer) blockList {
	at := uintptr(b.Address)
	return blockList{spans: []span{{at, at + b.bytes()}}}
}

// blocks gives the C arrays of the blocks of a buffer. It refuses blocks that do not lie in the
// buffer, because C does not know its length.
func (a *arguments) blocks(what string, of Buffer, blocks Blocks, along place) blockList {
	var list blockList
	element := of.DType.size()
	switch {
	case a.err != nil:
		return list
	case element == 0:
		a.refuse("%s has elements of type %d, whose size is not known here: send the bytes (DTypeUint8)", what, of.DType)
	case len(blocks.Counts) != along.size:
		a.refuse("%s has %d counts, but the dimension has %d ranks", what, len(blocks.Counts), along.size)
	case blocks.Displs != nil && len(blocks.Displs) != along.size:
		a.refuse("%s has %d displacements, but the dimension has %d ranks", what, len(blocks.Displs), along.size)
	}
	if a.err != nil {
		return list
	}
	next := 0
	for rank, count := range blocks.Counts {
		start := next
		// A block without elements lies nowhere.
		if blocks.Displs != nil && count != 0 {
			start = blocks.Displs[rank]
		}
		if count < 0 || start < 0 || start > of.Count || count > of.Count-start {
			a.refuse("%s has %d elements, but the block of rank %d has %d from element %d on", what, of.Count, rank, count, start)
			return list
		}
		next = start + count
		first := uintptr(of.Address) + uintptr(start)*element
		list.spans = append(list.spans, span{first, first + uintptr(count)*element})
	}
	list.counts = a.counts("count", blocks.Counts)
	if blocks.Displs == nil {
		if next != of.Count {
			a.refuse("%s has %d elements, but its blocks have %d", what, of.Count, next)
		}
		return list
	}
	starts := make([]int, along.size)
	for rank := range starts {
		starts[rank] = max(0, blocks.Displs[rank])
	}
	list.displs = a.counts("displacement", starts)
	return list
}

// ownBlock refuses a buffer whose length is not that of this rank's block.
func (a *arguments) ownBlock(what string, b Buffer, blocks Blocks, along place) {
	if a.err == nil && b.Count != blocks.Counts[along.rank] {
		a.refuse("%s has %d elements, but the block of this rank, %d, has %d", what, b.Count, along.rank, blocks.Counts[along.rank])
	}
}

// apart refuses a block of recv that overlaps another block of either buffer. In a call in place,
// the block `sent` of send is the block `received` of recv; -1 means that no such call exists.
func (a *arguments) apart(send, recv blockList, sent, received int) {
	if a.err != nil {
		return
	}
	inPlace := sent >= 0 && send.spans[sent] == recv.spans[received]
	type use struct {
		span
		written bool
	}
	var uses []use
	for index, each := range send.spans {
		if !inPlace || index != sent {
			uses = append(uses, use{each, false})
		}
	}
	for _, each := range recv.spans {
		uses = append(uses, use{each, true})
	}
	uses = slices.DeleteFunc(uses, func(each use) bool { return each.first == each.end })
	slices.SortFunc(uses, func(one, other use) int { return cmp.Compare(one.first, other.first) })
	var readEnd, writtenEnd uintptr
	for _, each := range uses {
		if each.first < writtenEnd || each.written && each.first < readEnd {
			a.refuse("a block of recv overlaps another block of send or recv: let them lie apart, or call exactly in place (send is this rank's own block)")
			return
		}
		if each.written {
			writtenEnd = max(writtenEnd, each.end)
		} else {
			readEnd = max(readEnd, each.end)
		}
	}
}
