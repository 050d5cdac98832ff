package devicemesh

// In these tests ranks disagree, do not come, give up or are lost.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
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
	// A group waits for its context several times, and on a busy machine the context may be done
	// between two of them. The error says then that the call was not begun, and nothing was ended.
	ended := func(call func(ctx context.Context) error) {
		t.Helper()
		err := call(doneAfter(t, 200*time.Millisecond, why))
		for tries := 1; err != nil && strings.Contains(err.Error(), "the call was not begun") && tries < 20; tries++ {
			err = call(doneAfter(t, 200*time.Millisecond, why))
		}
		cancelled(err)
	}
	world := private(t, folder, "contexts")
	// The other ranks go on when rank 0's call has ended. By then rank 0 has told the store that
	// it leaves.
	after := func(step string, first func()) {
		t.Helper()
		file := filepath.Join(folder, "ended "+step)
		if rank == 0 {
			first()
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
		after(fmt.Sprint(at), func() { ended(func(ctx context.Context) error { return call(ctx, mesh) }) })
		if rank == 0 {
			refused(t, AllReduce(background, mesh, "", []int{1}, []int{0}, Sum), ErrAborted, "")
		} else {
			refused(t, call(background, mesh), ErrPeerLost, "rank 0")
		}
		must(t, world.Barrier(background, 0))
	}
	must(t, world.Barrier(background, 0))
	if rank == 0 {
		ended(func(ctx context.Context) error { return world.Barrier(ctx, 0) })
	}
	if rank == 1 {
		options := WorldOptions{Size: 2, Rank: 1, InitMethod: "file://" + filepath.Join(folder, "nobody"), Timeout: time.Minute}
		ended(func(ctx context.Context) error { _, err := Join(ctx, "cpu", &options); return err })
	}
}

// together returns when all ranks have called it. It goes through the default world.
func together(t *testing.T, mesh *Mesh) {
	t.Helper()
	must(t, AllReduce(background, mesh, "everybody", []int{1}, []int{0}, Sum))
}

func TestTimeoutsOfOneCall(t *testing.T) {
	everybody, folder := ranks(t)
	if size == 1 {
		return
	}
	others := []int{}
	for other := range size - 1 {
		others = append(others, other+1)
	}
	mesh := line(t, private(t, folder, "one call"), MeshOptions{})
	short := CallOptions{Timeout: 100 * time.Millisecond}
	// All ranks make these calls in this order.
	for at, call := range []func(options ...CallOptions) (*Mesh, error){
		func(options ...CallOptions) (*Mesh, error) { return mesh.Flatten(background, "f", options...) },
		func(options ...CallOptions) (*Mesh, error) {
			return mesh.Unflatten(background, "x", []int{size, 1}, []string{"a", "b"}, options...)
		},
		func(options ...CallOptions) (*Mesh, error) {
			return mesh.Reshape(background, []int{1, size}, []string{"c", "d"}, options...)
		},
		func(options ...CallOptions) (*Mesh, error) {
			return mesh.SliceRange(background, "x", 1, 1, 1, options...)
		},
	} {
		if rank == 0 {
			_, err := call(short)
			var failed *Error
			if !errors.As(err, &failed) || !failed.Timeout() || failed.Waited < short.Timeout || failed.Call < 0 || len(failed.Lost) > 0 {
				t.Fatalf("call %d: got %#v", at, err)
			}
			equal(t, fmt.Sprint("the late ranks of call ", at), failed.Ranks, others)
		}
		together(t, everybody)
		if rank > 0 {
			// A rank that comes too late is told so once.
			_, err := call()
			refused(t, err, ErrTimeout, "rank 0")
		}
		made, err := call(CallOptions{Timeout: time.Minute})
		must(t, err)
		must(t, made.Close())
	}
	if rank == 0 {
		refused(t, mesh.Finalize(background, short), ErrTimeout, "")
	}
	together(t, everybody)
	if rank > 0 {
		refused(t, mesh.Finalize(background), ErrTimeout, "rank 0")
	}
	together(t, everybody)
	// The mesh is as before.
	value := []int{1}
	must(t, AllReduce(background, mesh, "", value, value, Sum))
	equal(t, "the sum", value, []int{size})
	must(t, mesh.Finalize(background, CallOptions{Timeout: time.Minute}))
}

func TestFinalizingWorlds(t *testing.T) {
	everybody, folder := ranks(t)
	world := private(t, folder, "finalized")
	mesh, other := line(t, world, MeshOptions{}), line(t, world, MeshOptions{Dims: []DimOptions{{OwnComm: true}}})
	other.Close()
	refused(t, world.Finalize(nil, 0), ErrInvalidArgument, "nil")
	refused(t, FinalizeDefaultWorlds(nil, 0), ErrInvalidArgument, "nil")
	refused(t, world.Finalize(background, -1), ErrInvalidArgument, "timeout")
	refused(t, FinalizeDefaultWorlds(background, -1), ErrInvalidArgument, "timeout")
	if rank == 0 && size > 1 {
		err := world.Finalize(background, 100*time.Millisecond)
		refused(t, err, ErrTimeout, "rank")
	}
	together(t, everybody)
	if rank > 0 {
		refused(t, world.Finalize(background, 0), ErrTimeout, "rank 0")
	}
	together(t, everybody)
	must(t, AllReduce(background, mesh, "", []int{1}, []int{0}, Sum))
	must(t, world.Finalize(background, 0))
	refused(t, AllReduce(background, mesh, "", []int{1}, []int{0}, Sum), ErrAborted, "")
	refused(t, world.Barrier(background, 0), ErrAborted, "")
	refused(t, world.Finalize(background, 0), ErrAborted, "")
	if size > 1 {
		ended := private(t, folder, "given up")
		if rank == 0 {
			err := ended.Finalize(doneAfter(t, 100*time.Millisecond, nil), 0)
			refused(t, err, ErrAborted, "deadline exceeded")
		}
		together(t, everybody)
		if rank > 0 {
			refused(t, ended.Finalize(background, 0), ErrPeerLost, "rank 0")
		}
	}
	// The default world can be joined anew.
	together(t, everybody)
	must(t, FinalizeDefaultWorlds(background, 0))
	refused(t, AllReduce(background, everybody, "everybody", []int{1}, []int{0}, Sum), ErrAborted, "")
	again, err := Init(background, "cpu", []int{size}, []string{"everybody"}, nil)
	must(t, err)
	defer again.Close()
	together(t, again)
}

// No text is read here: which ranks are lost is data.
func TestShrink(t *testing.T) {
	everybody, folder := ranks(t)
	if size == 1 {
		return
	}
	world := private(t, folder, "shrink")
	mesh, again := line(t, world, MeshOptions{}), line(t, world, MeshOptions{})
	_, err := line(t, private(t, folder, "nobody lost"), MeshOptions{}).Shrink(background, "x", nil)
	refused(t, err, ErrInvalidState, "lost")
	if rank == size-1 {
		must(t, world.Abort())
	}
	together(t, everybody)
	if rank < size-1 {
		err := AllReduce(background, mesh, "", []int{1}, []int{0}, Sum)
		var failed *Error
		if !errors.As(err, &failed) || failed.Status != ErrPeerLost || failed.Dimension != "x" {
			t.Fatalf("got %#v", err)
		}
		gone := []int{size - 1}
		equal(t, "the ranks of the error", failed.Ranks, gone)
		equal(t, "the lost ranks of the collective's error", failed.Lost, gone)
		if err := world.Barrier(background, 0); !errors.As(err, &failed) || failed.Status != ErrPeerLost || failed.Dimension != "" {
			t.Fatalf("got %#v", err)
		}
		equal(t, "the lost ranks of the error", failed.Lost, gone)
		expect(t, gone)(mesh.LostRanks())
		for _, lost := range [][]int{failed.Lost, nil} {
			if lost == nil {
				// The survivors agree on who is lost.
				mesh = again
			}
			left, err := mesh.Shrink(background, "x", lost, CallOptions{Timeout: time.Minute, Dims: []DimOptions{{OwnComm: true}}})
			must(t, err)
			defer left.Close()
			value := []int{1}
			must(t, AllReduce(background, left, "", value, value, Sum))
			equal(t, "the ranks that are left", value, []int{size - 1})
		}
	}
	together(t, everybody)
}

// The context ends Shrink and Recover also when the program has closed its World, and on a mesh of
// Lookup, and leaves the default world alone.
func TestContextsEndCallsOfMeshesWithoutAWorld(t *testing.T) {
	everybody, folder := ranks(t)
	if size < 3 {
		return
	}
	wait := 30 * time.Second
	for at, call := range []func(context.Context, *Mesh) (*Mesh, error){
		func(ctx context.Context, mesh *Mesh) (*Mesh, error) {
			return mesh.Shrink(ctx, "x", nil, CallOptions{Timeout: wait})
		},
		func(ctx context.Context, mesh *Mesh) (*Mesh, error) {
			return mesh.Recover(ctx, &RecoverOptions{Timeout: wait})
		},
	} {
		for _, found := range []bool{false, true} {
			world := private(t, folder, fmt.Sprint("no world ", at, found))
			mesh := line(t, world, MeshOptions{})
			if rank == size-1 {
				must(t, world.Abort())
			}
			together(t, everybody)
			if rank == 0 {
				refused(t, world.Barrier(background, 0), ErrPeerLost, "")
				if found {
					must(t, mesh.Register("found"))
					var err error
					mesh, err = Lookup("found")
					must(t, err)
					defer mesh.Close()
					must(t, Unregister("found"))
				}
				must(t, world.Close())
				// The other ranks do not call.
				_, err := call(doneAfter(t, 100*time.Millisecond, nil), mesh)
				if !errors.Is(err, ErrAborted) || !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("call %d, of a mesh from Lookup %v: %v", at, found, err)
				}
			}
			together(t, everybody)
		}
	}
}

func TestRecover(t *testing.T) {
	everybody, folder := ranks(t)
	if size == 1 {
		return
	}
	world := private(t, folder, "recover")
	mesh := line(t, world, MeshOptions{})
	_, err := mesh.Recover(background, nil)
	refused(t, err, ErrInvalidState, "nothing to recover")
	together(t, everybody)
	if rank == size-1 {
		must(t, world.Abort())
	}
	together(t, everybody)
	if rank < size-1 {
		refused(t, world.Barrier(background, 0), ErrPeerLost, "")
		options := RecoverOptions{Dim: "x", Timeout: time.Minute, MinSize: 1, HasState: true, Dims: []DimOptions{{OwnComm: true}}}
		next, err := mesh.Recover(background, &options)
		must(t, err)
		defer next.Close()
		told, err := next.Recovery()
		must(t, err)
		equal(t, "the lost ranks", told.LostRanks, []int{size - 1})
		equal(t, "the coordinate", told.NewCoordinate, []int{rank})
		if told.Epoch != 1 || told.PreviousEpoch != 0 || told.JoinedRanks != nil || told.StateRoot != 0 || told.HasJoined {
			t.Fatalf("got %#v", told)
		}
		value := []int{1}
		must(t, AllReduce(background, next, "", value, value, Sum))
		equal(t, "the ranks that are left", value, []int{size - 1})
		must(t, world.Finalize(background, 0))
	}
	together(t, everybody)
}
