package devicemesh

// In these tests ranks disagree, do not come, give up or are lost.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestDisagreement(t *testing.T) {
	_, folder := ranks(t)
	if size == 1 {
		return
	}
	shape := []int{size, 1}
	if rank == 0 {
		shape = []int{1, size}
	}
	_, err := Init(background, "cpu", shape, []string{"a", "b"}, nil)
	refused(t, err, ErrMismatch, fmt.Sprintf("rank 0 called dm_init(shape=(1, %d), names=(a, b))", size))
	refused(t, err, ErrMismatch, fmt.Sprintf("dm_init(shape=(%d, 1), names=(a, b))", size))

	// Ranks pass buffers of different sizes, so the collective fails on all. This mesh has a world
	// of its own.
	mesh := line(t, private(t, folder, "sizes"), MeshOptions{})
	err = AllReduce(background, mesh, "", make([]float32, 1000+rank), make([]float32, 1000+rank), Sum)
	var failed *Error
	if !errors.As(err, &failed) || failed.CCLResult == 0 {
		t.Errorf("sizes that differ: %v", err)
	}
}

func TestAPeerThatDoesNotCome(t *testing.T) {
	_, folder := ranks(t)
	if size == 1 {
		return
	}
	world := private(t, folder, "late")
	mesh := line(t, world, MeshOptions{Timeout: 2 * time.Second})
	if rank == 0 {
		err := AllReduce(background, mesh, "", []int{1}, []int{0}, Sum)
		var late interface{ Timeout() bool }
		if !errors.Is(err, ErrTimeout) || !errors.As(err, &late) || !late.Timeout() {
			t.Error(err)
		}
	}
	must(t, world.Barrier(background, 0))
}

func TestContextsEndBlockedCalls(t *testing.T) {
	_, folder := ranks(t)
	if size == 1 {
		return
	}
	why := errors.New("enough")
	cancelled := func(err error) {
		t.Helper()
		refused(t, err, ErrAborted, "enough")
		if !errors.Is(err, why) || !errors.Is(err, context.Canceled) {
			t.Errorf("%v is not for the reason given, or not the context's", err)
		}
	}
	within := func() context.Context {
		ctx, cancel := context.WithCancelCause(background)
		time.AfterFunc(200*time.Millisecond, func() { cancel(why) })
		return ctx
	}
	world := private(t, folder, "contexts")
	// The other ranks go on when rank 0's call has ended. By then rank 0 has told the store that
	// it leaves.
	after := func(step string, ended func()) {
		t.Helper()
		file := filepath.Join(folder, "ended "+step)
		if rank == 0 {
			ended()
			must(t, os.WriteFile(file, nil, 0o600))
			return
		}
		for until := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			if _, err := os.Stat(file); err == nil {
				return
			} else if time.Now().After(until) {
				t.Fatal(err)
			}
		}
	}
	for at, call := range []func(context.Context, *Mesh) error{
		func(ctx context.Context, mesh *Mesh) error { return AllReduce(ctx, mesh, "", []int{1}, []int{0}, Sum) },
		func(ctx context.Context, mesh *Mesh) error {
			return mesh.Group(ctx, func(ctx context.Context) error { return Recv(ctx, mesh, "", []int{0}, 1-min(1, rank)) })
		},
		func(ctx context.Context, mesh *Mesh) error { _, err := mesh.Flatten(ctx, "f"); return err },
		func(ctx context.Context, mesh *Mesh) error { return mesh.Finalize(ctx) },
	} {
		mesh := line(t, world, MeshOptions{Dims: []DimOptions{{OwnComm: true}}})
		after(fmt.Sprint(at), func() { cancelled(call(within(), mesh)) })
		if rank == 0 {
			refused(t, AllReduce(background, mesh, "", []int{1}, []int{0}, Sum), ErrAborted, "")
		} else {
			refused(t, call(background, mesh), ErrPeerLost, "rank 0")
		}
		must(t, world.Barrier(background, 0))
	}
	must(t, world.Barrier(background, 0))
	if rank == 0 {
		cancelled(world.Barrier(within(), 0))
	}
	if rank == 1 {
		_, err := Join(within(), "cpu", &WorldOptions{Size: 2, Rank: 1, InitMethod: "file://" + filepath.Join(folder, "nobody"), Timeout: 5 * time.Second})
		cancelled(err)
	}
}

func TestShrink(t *testing.T) {
	_, folder := ranks(t)
	if size == 1 {
		return
	}
	world := private(t, folder, "shrink")
	mesh := line(t, world, MeshOptions{})
	if rank < size-1 {
		left, err := mesh.Shrink(background, "x", []int{size - 1})
		if errors.Is(err, ErrPeerLost) {
			left, err = mesh.Shrink(background, "x", []int{size - 1})
		}
		must(t, err)
		value := []int{1}
		must(t, AllReduce(background, left, "", value, value, Sum))
		equal(t, "the ranks that are left", value, []int{size - 1})
	}
	_, err := mesh.Shrink(background, "x", nil)
	if err == nil {
		t.Error("no rank was lost")
	}
}
