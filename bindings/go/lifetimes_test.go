package devicemesh

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestClosedAndNil(t *testing.T) {
	mesh := offline(t)
	tp, err := mesh.Slice("tp")
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := tp.Close(); err != nil {
			t.Fatal(err)
		}
	}
	expect(t, 8)(mesh.Size(""))
	var none *Mesh
	values := []float32{1}
	for _, m := range []*Mesh{tp, none, {}} {
		results := []error{
			m.Abort(), m.Check("tp"), m.Finalize(background), m.Register("x"), AllGatherV(background, m, "tp", values, values, Blocks{Counts: []int{1}}),
			AllReduce(background, m, "tp", values, values, Sum),
			AllGather(background, m, "tp", values, make([]float32, 4)), Broadcast(background, m, "tp", values, 0),
			m.Group(background, func(context.Context) error { t.Error("a group of no mesh began"); return nil }),
		}
		add := func(_ any, err error) { results = append(results, err) }
		add(m.Size(""))
		add(m.Shape())
		add(m.Ranks())
		add(m.GroupRanks(""))
		add(m.ReplicaGroups(""))
		add(m.Rank())
		add(m.Hash())
		add(m.Serialize())
		results = append(results, m.Barrier(background, "tp", 0))
		add(m.AllGatherBytes(background, "tp", nil, 0))
		add(m.BroadcastBytes(background, "tp", []byte{1}, 0, 0))
		add(m.World())
		add(m.CoordinateOf(0))
		add(m.TranslateWorldRank("tp", 0))
		add(m.LostRanks())
		add(m.Recovery())
		add(m.Equal(mesh))
		add(mesh.Equal(m))
		add(m.Slice("tp"))
		add(m.Clone())
		add(m.Root())
		add(m.Flatten(background, ""))
		add(m.Shrink(background, "tp", []int{1}))
		add(m.Comm(background, ""))
		add(m.Proc("ncclAllReduce"))
		add(Concatenate(m))
		for at, err := range results {
			if !errors.Is(err, ErrInvalidHandle) || !strings.Contains(err.Error(), "not a live dm_mesh") {
				t.Errorf("call %d of mesh %v: %v", at, m, err)
			}
		}
		_ = m.String()
	}
	if none.Close() != nil || none.Names() != nil {
		t.Error("a nil mesh has something")
	}

	world, err := Join(background, "cpu", &WorldOptions{Size: 1, Offline: true})
	if err != nil {
		t.Fatal(err)
	}
	world.Close()
	world.Close()
	var nowhere *World
	for _, w := range []*World{world, nowhere} {
		_, err := w.Rank()
		refused(t, err, ErrInvalidHandle, "")
		refused(t, w.Barrier(background, 0), ErrInvalidHandle, "")
		_, err = w.Locations(background, "", 0)
		refused(t, err, ErrInvalidHandle, "")
		_, err = w.Info()
		refused(t, err, ErrInvalidHandle, "")
		_, err = w.AllGatherBytes(background, nil, 0)
		refused(t, err, ErrInvalidHandle, "")
		_, err = w.BroadcastBytes(background, nil, 0, 0)
		refused(t, err, ErrInvalidHandle, "")
		refused(t, w.Abort(), ErrInvalidHandle, "not a live dm_world")
		refused(t, w.Finalize(background, 0), ErrInvalidHandle, "not a live dm_world")
	}
	_, err = Init(background, "cpu", []int{1}, nil, &MeshOptions{World: world})
	refused(t, err, ErrInvalidHandle, "dm_world")
}

// Each goroutine repeats a failure of its own, while the others make it change threads. The reason
// that it gets shows whether the reason was read on the thread of the call.
func TestReasonsAreNeverMixedUp(t *testing.T) {
	mesh := offline(t)
	var group sync.WaitGroup
	for id := range 64 {
		group.Add(1)
		go func() {
			defer group.Done()
			name := fmt.Sprintf("dimension-%d.", id)
			for round := range 500 {
				var err error
				status, part := ErrNotFound, name
				switch (id + round) % 4 {
				case 0:
					_, err = mesh.Size(name)
				case 1:
					_, err = mesh.GroupRanks(name)
				case 2:
					_, err = mesh.Slice("tp", name)
				default:
					status, part = ErrInvalidArgument, fmt.Sprint(1000+id)
					_, err = mesh.TranslateRank("tp", 1000+id)
				}
				if !errors.Is(err, status) || !strings.Contains(err.Error(), part) {
					t.Errorf("goroutine %d got %v, expected %v with %q", id, err, status, part)
					return
				}
				if round%8 == 0 {
					runtime.Gosched()
				}
			}
		}()
	}
	group.Wait()
}

func TestMeshesThatNothingRefersToAreClosed(t *testing.T) {
	mesh := offline(t)
	forget := func() []*Mesh {
		for range 1000 {
			if _, err := mesh.Slice("tp"); err != nil {
				t.Fatal(err)
			}
		}
		return nil
	}
	forget()
	last, err := mesh.Slice("tp")
	if err != nil {
		t.Fatal(err)
	}
	handle := &Mesh{lasting: lasting{handle: last.handle}}
	runtime.KeepAlive(last)
	last = nil
	until := time.Now().Add(30 * time.Second)
	for {
		if _, err := handle.Size(""); errors.Is(err, ErrInvalidHandle) {
			return
		}
		if time.Now().After(until) {
			t.Fatal("the handle lives on")
		}
		runtime.GC()
		time.Sleep(time.Millisecond)
	}
}
