package devicemesh

// These tests pass contexts that are nil or done, and close handles while calls use them.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

type layer struct {
	name string
	next *layer
	bias [4]float32
}

func TestMemoryOfObjectsWithPointers(t *testing.T) {
	mesh, _ := ranks(t)
	n, _ := mesh.Size("tp")
	one := &layer{name: "one", next: &layer{name: "two"}, bias: [4]float32{1, 2, 3, 4}}
	must(t, AllReduce(background, mesh, "tp", one.bias[:], one.bias[:], Sum))
	must(t, mesh.Group(background, func(ctx context.Context) error {
		return AllReduce(ctx, mesh, "tp", one.bias[:2], one.next.bias[2:], Sum)
	}))
	runtime.GC()
	runtime.GC()
	k := float32(n)
	equal(t, "in place", one.bias[:], []float32{k, 2 * k, 3 * k, 4 * k})
	equal(t, "from one to the other", one.next.bias[:], []float32{0, 0, k * k, 2 * k * k})
}

func TestNilContexts(t *testing.T) {
	mesh, _ := ranks(t)
	world, err := Join(background, "cpu", &WorldOptions{Size: 1, Offline: true})
	must(t, err)
	defer world.Close()
	value := []int{1}
	results := []error{
		AllReduce(nil, mesh, "tp", value, value, Sum), Send(nil, mesh, "tp", value, 0), mesh.Finalize(nil), world.Barrier(nil, 0),
		mesh.Group(nil, func(context.Context) error { t.Error("a group began"); return nil }),
	}
	add := func(_ any, err error) { results = append(results, err) }
	add(Join(nil, "cpu", nil))
	add(Init(nil, "cpu", []int{size}, nil, nil))
	add(Deserialize(nil, "{", nil))
	add(mesh.Flatten(nil, "x"))
	add(mesh.Unflatten(nil, "tp", []int{1, 1}, nil))
	add(mesh.Reshape(nil, []int{size}, nil))
	add(mesh.SliceRange(nil, "tp", 0, 1, 1))
	add(mesh.Shrink(nil, "tp", nil))
	add(mesh.Comm(nil, "tp"))
	add(world.Locations(nil, "", 0))
	for at, err := range results {
		if !errors.Is(err, ErrInvalidArgument) {
			t.Errorf("call %d: %v", at, err)
		}
	}
	// If a pin were lost, a later collection would kill the process.
	for range 3 {
		runtime.GC()
		time.Sleep(time.Millisecond)
	}
	must(t, AllReduce(background, mesh, "tp", value, value, Sum))
}

func TestContextsThatAreDone(t *testing.T) {
	mesh, folder := ranks(t)
	world := private(t, folder, "done")
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(background)
	cancel(why)
	value := []int{1}
	for at, err := range []error{
		AllReduce(ctx, mesh, "ep", value, value, Sum), AllReduce(ctx, mesh, "tp", value, value, Op(-1)), AllReduce(ctx, mesh, "tp", value, nil, Sum),
		Send(ctx, mesh, "tp", value, size), AllReduce(ctx, nil, "tp", value, value, Sum), world.Barrier(ctx, -1),
	} {
		if !errors.Is(err, ErrInvalidArgument) && !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrInvalidHandle) {
			t.Errorf("wrong argument %d: %v", at, err)
		}
	}
	results := []error{
		AllReduce(ctx, mesh, "tp", value, value, Sum), mesh.Finalize(ctx), world.Barrier(ctx, 0),
		mesh.Group(ctx, func(ctx context.Context) error { return AllReduce(ctx, mesh, "tp", value, value, Sum) }),
	}
	add := func(_ any, err error) { results = append(results, err) }
	add(Join(ctx, "cpu", nil))
	add(Init(ctx, "cpu", []int{size}, nil, nil))
	add(mesh.Flatten(ctx, "x"))
	add(mesh.Shrink(ctx, "tp", nil))
	add(mesh.Comm(ctx, "tp"))
	add(world.Locations(ctx, "", 0))
	for at, err := range results {
		if !errors.Is(err, why) || !errors.Is(err, context.Canceled) || errors.Is(err, ErrAborted) {
			t.Errorf("call %d: %v", at, err)
		}
	}
	// No rank has begun an operation, and nothing was aborted.
	must(t, world.Barrier(background, 0))
	n, _ := mesh.Size("tp")
	must(t, mesh.Check("tp"))
	must(t, AllReduce(background, mesh, "tp", value, value, Sum))
	equal(t, "the sum", value, []int{n})
}

func TestACallIsEndedUntilItReturns(t *testing.T) {
	var ends atomic.Int32
	ctx, cancel := context.WithCancel(background)
	limit := time.Now().Add(20 * time.Second)
	// The first ends come too early to end anything.
	must(t, until(ctx, func() { ends.Add(1) }, func() error {
		cancel()
		for ends.Load() < 3 {
			if time.Now().After(limit) {
				return fmt.Errorf("the call was ended %d times", ends.Load())
			}
			time.Sleep(time.Millisecond)
		}
		return nil
	}))
	before := ends.Load()
	time.Sleep(4 * endEvery)
	equal(t, "ends after the call", []int32{ends.Load()}, []int32{before})
}

// endedBy gives a context, and a function that ends it when a call has begun to wait for it.
func endedBy(why error) (context.Context, func()) {
	inner, cancel := context.WithCancelCause(background)
	ctx := contextWaitedFor(func() context.Context { return inner })
	return ctx, func() {
		<-ctx.begun
		cancel(why)
	}
}

// holds returns when a call has the handle. The call gives its error to `blocked` when it returns.
func holds(t *testing.T, handle *lasting, blocked <-chan error) {
	t.Helper()
	for handle.state.Load() == 0 {
		select {
		case err := <-blocked:
			t.Fatalf("the call did not block: %v", err)
		case <-time.After(time.Millisecond):
		}
	}
}

func TestClosingDuringACall(t *testing.T) {
	why := errors.New("enough")
	_, folder := ranks(t)
	if size == 1 {
		return
	}
	world := private(t, folder, "closing")
	mesh := line(t, world, MeshOptions{Dims: []DimOptions{{OwnComm: true}}})
	// end is called when the handle is closed and the call still blocks.
	closing := func(ctx context.Context, end func()) error {
		again, err := mesh.Clone()
		must(t, err)
		blocked := make(chan error)
		value := []int{1}
		go func() { blocked <- AllReduce(ctx, again, "", value, value, Sum) }()
		holds(t, &again.lasting, blocked)
		must(t, again.Close())
		refused(t, AllReduce(background, again, "", value, value, Sum), ErrInvalidHandle, "")
		_, err = again.Size("")
		refused(t, err, ErrInvalidHandle, "")
		end()
		must(t, world.Barrier(background, 0))
		err = <-blocked
		if err == nil && value[0] != size {
			t.Errorf("the sum is %d", value[0])
		}
		if _, err := (&Mesh{lasting: lasting{handle: again.handle}}).Size(""); !errors.Is(err, ErrInvalidHandle) {
			t.Errorf("the handle was not freed: %v", err)
		}
		return err
	}
	// A blocked call goes on when its handle is closed.
	value := []int{1}
	if rank == 0 {
		must(t, closing(background, func() {}))
	} else {
		must(t, world.Barrier(background, 0))
		must(t, AllReduce(background, mesh, "", value, value, Sum))
	}
	// Its context still ends it.
	if rank == 0 {
		ctx, end := endedBy(why)
		err := closing(ctx, end)
		refused(t, err, ErrAborted, "")
		if !errors.Is(err, why) {
			t.Error(err)
		}
	} else {
		must(t, world.Barrier(background, 0))
	}
	must(t, world.Barrier(background, 0))
	if rank > 0 {
		refused(t, AllReduce(background, mesh, "", value, value, Sum), ErrPeerLost, "rank 0")
	}
	must(t, world.Barrier(background, 0))
	// A world behaves like a mesh.
	other, err := Join(background, "cpu", &WorldOptions{Size: size, Rank: rank, InitMethod: "file://" + folder + "/closed", Timeout: time.Minute})
	must(t, err)
	if rank == 0 {
		ctx, end := endedBy(why)
		blocked := make(chan error)
		go func() { blocked <- other.Barrier(ctx, 0) }()
		holds(t, &other.lasting, blocked)
		must(t, other.Close())
		end()
		refused(t, <-blocked, ErrAborted, "enough")
	}
	must(t, world.Barrier(background, 0))
	if rank > 0 {
		refused(t, other.Barrier(background, 0), ErrPeerLost, "rank 0")
	}
	must(t, world.Barrier(background, 0))
	must(t, other.Close())
}

// tasks gives the numbers of goroutines and threads.
func tasks(t *testing.T) (goroutines, threads int) {
	t.Helper()
	folder, err := os.ReadDir("/proc/self/task")
	must(t, err)
	return runtime.NumGoroutine(), len(folder)
}

func TestJoiningIsGivenUpSoon(t *testing.T) {
	folder := t.TempDir()
	blocking := &folderStore{folder: t.TempDir()}
	for name, options := range map[string]WorldOptions{
		"tcp, serving": {InitMethod: "tcp://127.0.0.1:0"}, "tcp, nobody serves": {Rank: 1, InitMethod: "tcp://127.0.0.1:1"},
		"file": {InitMethod: "file://" + folder + "/store"}, "a store in Go": {Store: blocking},
	} {
		if options.InitMethod == "tcp://127.0.0.1:0" {
			// The kernel chose this port, and it is free again.
			options.InitMethod = "tcp://127.0.0.1:" + freePort(t)
		}
		options.Size, options.Timeout = 2, 10*time.Minute
		before, _ := tasks(t)
		for range 8 {
			ctx := doneAfter(t, 50*time.Millisecond, nil)
			began := time.Now()
			_, err := Join(ctx, "cpu", &options)
			refused(t, err, ErrAborted, "given up")
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			if took := time.Since(began); took > 30*time.Second {
				t.Errorf("%s: giving up took %v", name, took)
			}
		}
		// The goroutines must end. The runtime keeps the threads that were inside the library for
		// later use.
		for until := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			now, threads := tasks(t)
			if now <= before {
				t.Logf("%s: %d threads", name, threads)
				break
			}
			if time.Now().After(until) {
				t.Fatalf("%s: %d goroutines before, %d now", name, before, now)
			}
		}
	}
}

func freePort(t *testing.T) string {
	t.Helper()
	socket, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	must(t, err)
	defer syscall.Close(socket)
	must(t, syscall.Bind(socket, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	name, err := syscall.Getsockname(socket)
	must(t, err)
	return strconv.Itoa(name.(*syscall.SockaddrInet4).Port)
}
