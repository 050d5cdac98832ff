package devicemesh

// Exchanges with a count for each rank.

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"
)

// between gives the number of elements that go from one rank to another, which may be 0.
func between(from, to int) int {
	return (from*3 + to*5) % 4
}

// rows gives the counts of what rank me sends and receives, and the sums.
func rows(me, n int) (sends, receives []int) {
	for i := range n {
		sends, receives = append(sends, between(me, i)), append(receives, between(i, me))
	}
	return sends, receives
}

// blocksOf gives the values of a buffer's blocks, one after another.
func blocksOf(values []int64, blocks Blocks) (joined []int64) {
	next := 0
	for i, count := range blocks.Counts {
		if blocks.Displs != nil {
			next = blocks.Displs[i]
		}
		joined = append(joined, values[next:next+count]...)
		next += count
	}
	return joined
}

// apartBy gives blocks of these counts with a gap before each, the last one first, and the length
// of their buffer.
func apartBy(gap int, counts []int) (blocks Blocks, length int) {
	blocks = Blocks{Counts: counts, Displs: make([]int, len(counts))}
	for i := len(counts) - 1; i >= 0; i-- {
		blocks.Displs[i] = length + gap
		length += gap + counts[i]
	}
	return blocks, length
}

func TestExchangesWithCounts(t *testing.T) {
	mesh, _ := ranks(t)
	for _, dim := range []string{"tp", "dp"} {
		n, _ := mesh.Size(dim)
		me, _ := mesh.LocalRank(dim)
		out, into := rows(me, n)
		expected := []int64{}
		for i, count := range into {
			for at := range count {
				expected = append(expected, int64(100*i+10*me+at))
			}
		}
		for gap := range 3 {
			sends, length := apartBy(gap, out)
			receives, room := apartBy(gap, into)
			if gap == 0 {
				sends, receives = Blocks{Counts: out}, Blocks{Counts: into}
			}
			send, recv := make([]int64, length), make([]int64, room)
			for i := range recv {
				recv[i] = -1
			}
			next := 0
			for i, count := range out {
				if gap > 0 {
					next = sends.Displs[i]
				}
				for at := range count {
					send[next] = int64(100*me + 10*i + at)
					next++
				}
			}
			call := func(ctx context.Context) error { return AllToAllV(ctx, mesh, dim, send, sends, recv, receives) }
			if gap < 2 {
				must(t, call(background))
			} else {
				// The lists of a group's operation are kept, too.
				must(t, mesh.Group(background, func(ctx context.Context) error {
					must(t, call(ctx))
					runtime.GC()
					runtime.GC()
					return nil
				}))
			}
			equal(t, fmt.Sprintf("all-to-all along %s, gap %d", dim, gap), blocksOf(recv, receives), expected)
			gaps := 0
			for _, value := range recv {
				if value == -1 {
					gaps++
				}
			}
			if gaps != n*gap {
				t.Errorf("%d elements between the blocks are left, expected %d", gaps, n*gap)
			}
		}
	}
}

func TestGathersAndScattersWithCounts(t *testing.T) {
	mesh, _ := ranks(t)
	n, _ := mesh.Size("tp")
	me, _ := mesh.LocalRank("tp")
	counts := make([]int, n)
	for i := range counts {
		counts[i] = (i + 2) % 3
	}
	blocks, room := apartBy(1, counts)
	all := make([]int64, room)
	mine := all[blocks.Displs[me]:][:counts[me]]
	expected, sums := []int64{}, []int64{}
	for i, count := range counts {
		for at := range count {
			expected = append(expected, int64(10*i+at))
			if i == me {
				sums = append(sums, int64(n*(10*i+at)))
			}
		}
	}
	for at := range mine {
		mine[at] = int64(10*me + at)
	}
	// In place: this rank's block is there already.
	must(t, AllGatherV(background, mesh, "tp", mine, all, blocks))
	equal(t, "all-gather in place", blocksOf(all, blocks), expected)
	apart := make([]int64, len(expected))
	must(t, AllGatherV(background, mesh, "tp", append([]int64{}, mine...), apart, Blocks{Counts: counts}))
	equal(t, "all-gather", apart, expected)
	got := make([]int64, counts[me])
	must(t, ReduceScatterV(background, mesh, "tp", apart, Blocks{Counts: counts}, got, Sum))
	equal(t, "reduce-scatter", got, sums)
	must(t, ReduceScatterV(background, mesh, "tp", all, blocks, mine, Sum))
	equal(t, "reduce-scatter in place", mine, sums)
}

func TestWrongBlocks(t *testing.T) {
	mesh, folder := ranks(t)
	n, _ := mesh.Size("tp")
	one := make([]int, n)
	for i := range one {
		one[i] = 1
	}
	with := func(list []int, value int) Blocks {
		changed := append([]int{}, list...)
		changed[n-1] = value
		return Blocks{Counts: changed}
	}
	data, other, good := make([]float32, n), make([]float32, n), Blocks{Counts: one}
	from := func(displs ...int) Blocks {
		for len(displs) < n {
			displs = append(displs, len(displs))
		}
		return Blocks{Counts: one, Displs: displs[len(displs)-n:]}
	}
	unknown := Of(data)
	unknown.DType = 99
	for name, each := range map[string]error{
		"too few counts":         AllToAllV(background, mesh, "tp", data, Blocks{Counts: one[1:]}, other, good),
		"no counts":              AllToAllV(background, mesh, "tp", data, good, other, Blocks{}),
		"a negative count":       AllToAllV(background, mesh, "tp", data, with(one, -1), other, good),
		"a large count":          AllToAllV(background, mesh, "tp", data, with(one, 1<<62), other, good),
		"a count past the end":   AllToAllV(background, mesh, "tp", data, with(one, 2), other, good),
		"a rest":                 AllToAllV(background, mesh, "tp", data, good, make([]float32, n+1), good),
		"too many displacements": AllToAllV(background, mesh, "tp", data, Blocks{Counts: one, Displs: make([]int, n+1)}, other, good),
		"a block past the end":   AllToAllV(background, mesh, "tp", data, good, other, from(n)),
		"a negative place":       AllToAllV(background, mesh, "tp", data, good, other, from(-1)),
		"a wrong length":         AllGatherV(background, mesh, "tp", make([]float32, 2), other, good),
		"no room":                ReduceScatterV(background, mesh, "tp", data, good, nil, Sum),
		"another type":           mesh.AllGatherVBuffer(background, "tp", Of([]int32{1}), Of(other), good, 0),
		"an unknown type":        mesh.AllToAllVBuffer(background, "tp", unknown, good, unknown, good, 0),
		"a negative operator":    ReduceScatterV(background, mesh, "tp", data, good, other[:1], -1),
	} {
		if !errors.Is(each, ErrInvalidArgument) || each.Error() == "" {
			t.Errorf("%s: %v", name, each)
		}
	}
	if n > 1 {
		refused(t, AllToAllV(background, mesh, "tp", data, good, data, good), ErrInvalidArgument, "overlap")
		refused(t, AllToAllV(background, mesh, "tp", data, good, other, Blocks{Counts: one, Displs: make([]int, n)}), ErrInvalidArgument, "overlap")
		// Blocks that are only sent may overlap.
		must(t, AllToAllV(background, mesh, "tp", data, Blocks{Counts: one, Displs: make([]int, n)}, other, good))
	} else {
		refused(t, AllToAllV(background, mesh, "tp", data, good, make([]float32, 2), Blocks{Counts: []int{2}}), ErrInvalidArgument, "to itself")
		must(t, AllToAllV(background, mesh, "tp", data, good, data, good))
	}
	// A refused exchange leaves nothing of its group.
	value := []int{1}
	err := mesh.Group(background, func(ctx context.Context) error {
		must(t, AllReduce(ctx, mesh, "tp", value, value, Sum))
		_ = AllGatherV(ctx, mesh, "tp", data, other, with(one, 9))
		return nil
	})
	refused(t, err, ErrInvalidArgument, "but the block of rank")
	must(t, AllReduce(background, mesh, "tp", value, value, Sum))
	equal(t, "the next all-reduce", value, []int{n})
	if size == 1 {
		return
	}
	// Counts that do not fit together are a mismatch on all ranks, which names both.
	line := line(t, private(t, folder, "counts"), MeshOptions{})
	counts := make([]int, size)
	if rank == 0 {
		counts[1] = 3
	}
	err = AllToAllV(background, line, "", make([]int, 3*(1-min(1, rank))), Blocks{Counts: counts}, []int{}, Blocks{Counts: make([]int, size)})
	var failed *Error
	if !errors.As(err, &failed) || failed.Status != ErrMismatch || failed.Dimension != "x" || len(failed.Ranks) == 0 || len(failed.Lost) > 0 {
		t.Errorf("got %#v", err)
	}
}

func TestContextsEndExchanges(t *testing.T) {
	_, folder := ranks(t)
	if size == 1 {
		return
	}
	world := private(t, folder, "exchanges")
	mesh := line(t, world, MeshOptions{})
	counts := make([]int, size)
	exchange := func(ctx context.Context) error {
		return AllToAllV(ctx, mesh, "", []int{}, Blocks{Counts: counts}, []int{}, Blocks{Counts: counts})
	}
	if rank == 0 {
		err := exchange(doneAfter(t, 200*time.Millisecond, nil))
		refused(t, err, ErrAborted, "")
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	}
	must(t, world.Barrier(background, 0))
	if rank > 0 {
		err := exchange(background)
		var failed *Error
		if !errors.As(err, &failed) || failed.Status != ErrPeerLost || fmt.Sprint(failed.Ranks, failed.Lost) != "[0] []" {
			t.Errorf("got %#v", err)
		}
	}
	must(t, world.Barrier(background, 0))
}
