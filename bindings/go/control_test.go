package devicemesh

// Barriers and bytes, and the worlds that meshes have.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"
)

type envelope struct {
	next *envelope
	seal [4]byte
}

func TestBytes(t *testing.T) {
	mesh, folder := ranks(t)
	world := private(t, folder, "bytes")
	n, _ := mesh.Size("tp")
	me, _ := mesh.LocalRank("tp")
	must(t, mesh.Barrier(background, "tp", 0))
	// The lengths differ, and rank 0 gives nothing.
	all, err := mesh.AllGatherBytes(background, "tp", bytes.Repeat([]byte{byte(me)}, 1000*me), time.Minute)
	must(t, err)
	if len(all) != n {
		t.Fatalf("got %d elements of %d ranks", len(all), n)
	}
	for i, each := range all {
		if each == nil || !bytes.Equal(each, bytes.Repeat([]byte{byte(i)}, 1000*i)) {
			t.Errorf("rank %d gave %d bytes", i, len(each))
		}
	}
	var given []byte
	if me == n-1 {
		given = []byte("a seed")
	}
	got, err := mesh.BroadcastBytes(background, "tp", given, n-1, 0)
	must(t, err)
	equal(t, "the seed", got, []byte("a seed"))
	// The bytes may lie in an object with pointers.
	letter := &envelope{next: &envelope{}, seal: [4]byte{1, 2, 3, byte(rank)}}
	all, err = world.AllGatherBytes(background, letter.seal[:], 0)
	must(t, err)
	for i, each := range all {
		equal(t, "a seal", each, []byte{1, 2, 3, byte(i)})
	}
	got, err = world.BroadcastBytes(background, letter.seal[:0], 0, 0)
	must(t, err)
	if got == nil || len(got) != 0 {
		t.Errorf("got %v for nothing", got)
	}
	_, err = mesh.BroadcastBytes(background, "tp", nil, n, 0)
	refused(t, err, ErrInvalidArgument, "root")
	_, err = mesh.AllGatherBytes(background, "ep", nil, 0)
	refused(t, err, ErrNotFound, "ep")
	must(t, world.Barrier(background, 0))
}

func TestContextsEndTheControlPlane(t *testing.T) {
	everybody, folder := ranks(t)
	if size == 1 {
		return
	}
	why := errors.New("enough")
	for at, call := range []func(ctx context.Context, mesh *Mesh, world *World) error{
		func(ctx context.Context, mesh *Mesh, _ *World) error { return mesh.Barrier(ctx, "", 0) },
		func(ctx context.Context, mesh *Mesh, _ *World) error {
			_, err := mesh.AllGatherBytes(ctx, "x", []byte("data"), 0)
			return err
		},
		func(ctx context.Context, mesh *Mesh, _ *World) error {
			_, err := mesh.BroadcastBytes(ctx, "x", nil, 1, 0)
			return err
		},
		func(ctx context.Context, _ *Mesh, world *World) error {
			_, err := world.AllGatherBytes(ctx, []byte("data"), 0)
			return err
		},
		func(ctx context.Context, _ *Mesh, world *World) error {
			_, err := world.BroadcastBytes(ctx, nil, 1, 0)
			return err
		},
	} {
		world := private(t, folder, fmt.Sprint("control ", at))
		mesh := line(t, world, MeshOptions{})
		done, cancel := context.WithCancelCause(background)
		cancel(why)
		if err := call(done, mesh, world); !errors.Is(err, why) || errors.Is(err, ErrAborted) {
			t.Errorf("call %d with a context that is done: %v", at, err)
		}
		refused(t, call(nil, mesh, world), ErrInvalidArgument, "nil")
		if rank == 0 {
			err := call(doneAfter(t, 100*time.Millisecond, why), mesh, world)
			refused(t, err, ErrAborted, "enough")
			if !errors.Is(err, why) || !errors.Is(err, context.Canceled) {
				t.Errorf("call %d: %v", at, err)
			}
		}
		together(t, everybody)
		if rank > 0 {
			refused(t, call(background, mesh, world), ErrPeerLost, "rank 0")
		}
		together(t, everybody)
	}
}

func TestWorldsOfMeshes(t *testing.T) {
	mesh, folder := ranks(t)
	// The default world, by two ways.
	world, err := mesh.World()
	must(t, err)
	defer world.Close()
	info, err := world.Info()
	must(t, err)
	if info.Rank != rank || info.Size != size || info.DeviceType != "cpu" || info.Device != -1 || info.Library == "" || info.CCLVersion == 0 ||
		info.NumHosts != 1 || info.Host != 0 || info.LocalRank != rank || info.LocalSize != size {
		t.Errorf("got %+v", info)
	}
	expect(t, 0)(world.Waiting())
	same, err := DefaultWorld(background, "cpu", 0)
	must(t, err)
	expect(t, info)(same.Info())
	must(t, same.Close())
	_, err = same.Info()
	refused(t, err, ErrInvalidHandle, "")
	must(t, world.Barrier(background, 0))
	// A world outlives its first handle and its meshes.
	own := private(t, folder, "of a mesh")
	line := line(t, own, MeshOptions{})
	again, err := line.World()
	must(t, err)
	must(t, own.Close())
	must(t, line.Close())
	must(t, again.Barrier(background, 0))
	must(t, again.Finalize(background, 0))
	expect(t, rank)(again.Rank())
	must(t, again.Close())
	_, err = line.World()
	refused(t, err, ErrInvalidHandle, "")
	// A default world that was left can be joined anew.
	together(t, mesh)
	must(t, AbortDefaultWorlds())
	refused(t, world.Barrier(background, 0), ErrAborted, "")
	joined, err := DefaultWorld(background, "cpu", time.Minute)
	must(t, err)
	defer joined.Close()
	must(t, joined.Barrier(background, 0))
	if size > 1 {
		adopted, err := FromComms("cpu", []int{1}, nil, nil, false, nil)
		if err == nil {
			adopted.Close()
			t.Error("no communicators for a dimension")
		}
	}
	_, err = DefaultWorld(nil, "cpu", 0)
	refused(t, err, ErrInvalidArgument, "nil")
}
