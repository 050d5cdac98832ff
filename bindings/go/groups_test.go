package devicemesh

// A group runs all of its operations or none, on memory that stays where it is.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"
	"testing"
	"time"
)

// litter allocates slices, which the runtime may put where freed buffers lay, and returns them for
// inspection.
func litter(count, length int) [][]float32 {
	all := make([][]float32, count)
	for i := range all {
		all[i] = filled(length, -1)
	}
	return all
}

func filled(length int, value float32) []float32 {
	values := make([]float32, length)
	for i := range values {
		values[i] = value
	}
	return values
}

func others(values []float32, expected float32) (count int) {
	for _, value := range values {
		if value != expected {
			count++
		}
	}
	return count
}

func TestBuffersOfAGroupAreKept(t *testing.T) {
	mesh, _ := ranks(t)
	n, _ := mesh.Size("tp")
	me, _ := mesh.LocalRank("tp")
	const length = 4096
	got, litters := make([]float32, length), [][]float32(nil)
	must(t, mesh.Group(background, func(ctx context.Context) error {
		must(t, Send(ctx, mesh, "tp", filled(length, 42), (me+1)%n))
		must(t, Recv(ctx, mesh, "tp", got, (me+n-1)%n))
		sums := filled(length, 1)
		must(t, AllReduce(ctx, mesh, "dp", sums, sums, Sum))
		runtime.GC()
		runtime.GC()
		litters = litter(200, length)
		return nil
	}))
	if wrong := others(got, 42); wrong > 0 {
		t.Errorf("%d of %d elements are wrong, the first is %v", wrong, length, got[0])
	}
	for _, each := range litters {
		if wrong := others(each, -1); wrong > 0 {
			t.Fatalf("%d foreign elements were written over", wrong)
		}
	}
}

func TestGroupsRunAsAWholeOrNotAtAll(t *testing.T) {
	mesh, _ := ranks(t)
	stopped := errors.New("stopped")
	value, big := []int{1}, make([]float32, 100)
	sum := func(ctx context.Context) { must(t, AllReduce(ctx, mesh, "tp", value, value, Sum)) }
	var left context.Context
	for name, each := range map[string]struct {
		body   func(ctx context.Context) error
		status error
		part   string
	}{
		"an error":   {func(ctx context.Context) error { sum(ctx); return stopped }, stopped, "stopped"},
		"no context": {func(ctx context.Context) error { sum(ctx); return AllReduce(nil, mesh, "tp", value, value, Sum) }, ErrInvalidArgument, "nil"},
		"another context": {func(ctx context.Context) error {
			sum(ctx)
			return AllReduce(background, mesh, "tp", value, value, Sum)
		}, ErrInvalidArgument, "another context"},
		"a group with another context": {func(ctx context.Context) error {
			sum(ctx)
			return mesh.Group(background, func(context.Context) error { t.Error("it began"); return nil })
		}, ErrInvalidArgument, "another context"},
		"a derived context": {func(ctx context.Context) error {
			sum(ctx)
			derived, cancel := context.WithCancel(ctx)
			cancel()
			return AllReduce(derived, mesh, "tp", value, value, Sum)
		}, ErrInvalidArgument, "derived from the group's"},
		"a derived deadline": {func(ctx context.Context) error {
			derived, cancel := context.WithTimeout(ctx, time.Hour)
			defer cancel()
			sum(ctx)
			_ = Recv(derived, mesh, "tp", value, 0)
			return nil
		}, ErrInvalidArgument, "derived from the group's"},
		"a group with a derived context": {func(ctx context.Context) error {
			sum(ctx)
			derived := context.WithValue(ctx, t, "a value")
			return mesh.Group(derived, func(context.Context) error { t.Error("it began"); return nil })
		}, ErrInvalidArgument, "derived from the group's"},
		"an ignored nil context": {func(ctx context.Context) error {
			sum(ctx)
			_ = AllReduce(nil, mesh, "tp", value, value, Sum)
			return nil
		}, ErrInvalidArgument, "nil"},
		"a group without a function": {func(ctx context.Context) error {
			sum(ctx)
			_ = mesh.Group(ctx, nil)
			return nil
		}, ErrInvalidArgument, "function is nil"},
		"an ignored refusal": {func(ctx context.Context) error {
			sum(ctx)
			_ = AllReduce(ctx, mesh, "tp", value, value, Op(77))
			return nil
		}, ErrInvalidArgument, "op is 77"},
		"an unknown dimension": {func(ctx context.Context) error { sum(ctx); _ = Send(ctx, mesh, "ep", value, 0); return nil }, ErrNotFound, "ep"},
		"an unknown peer":      {func(ctx context.Context) error { sum(ctx); _ = Send(ctx, mesh, "tp", value, size); return nil }, ErrInvalidArgument, "peer is"},
		"overlap": {func(ctx context.Context) error {
			sum(ctx)
			_ = AllReduce(ctx, mesh, "tp", big[:99], big[1:], Sum)
			return nil
		}, ErrInvalidArgument, "overlap"},
		"a stream on cpu": {func(ctx context.Context) error {
			sum(ctx)
			_ = mesh.AllReduceBuffer(ctx, "tp", Of(value), Of(value), Sum, Stream(8))
			return nil
		}, ErrInvalidArgument, "no streams"},
		"another goroutine": {func(ctx context.Context) error {
			sum(ctx)
			refusal := make(chan error)
			go func() { refusal <- AllReduce(ctx, mesh, "tp", []int{1}, []int{1}, Sum) }()
			refused(t, <-refusal, ErrInvalidArgument, "another goroutine")
			return nil
		}, ErrInvalidArgument, "another goroutine"},
		"a group within": {func(ctx context.Context) error {
			sum(ctx)
			_ = mesh.Group(ctx, func(ctx context.Context) error { sum(ctx); return stopped })
			return nil
		}, stopped, "stopped"},
		"a panic within": {func(ctx context.Context) error {
			defer func() { _ = recover() }()
			sum(ctx)
			return mesh.Group(ctx, func(ctx context.Context) error { sum(ctx); panic("within") })
		}, ErrInvalidArgument, "panicked"},
		"a mesh that is closed meanwhile": {func(ctx context.Context) error {
			other, err := mesh.Clone()
			must(t, err)
			must(t, AllReduce(ctx, other, "tp", value, value, Sum))
			return other.Close()
		}, ErrInvalidHandle, "dm_mesh"},
	} {
		err := mesh.Group(background, func(ctx context.Context) error { left = ctx; return each.body(ctx) })
		if !errors.Is(err, each.status) {
			t.Errorf("%s: got %v, expected %v", name, err, each.status)
		} else if each.status != stopped {
			refused(t, err, each.status.(Status), each.part)
		}
		if value[0] != 1 || big[1] != 0 {
			t.Fatalf("%s: something of the group was run", name)
		}
		refused(t, AllReduce(left, mesh, "tp", value, value, Sum), ErrInvalidArgument, "after the group has ended")
	}
	func() {
		defer func() {
			if recover() != "in a group" {
				t.Error("the panic was lost")
			}
		}()
		_ = mesh.Group(background, func(ctx context.Context) error { sum(ctx); panic("in a group") })
	}()
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		_ = mesh.Group(background, func(ctx context.Context) error { sum(ctx); runtime.Goexit(); return nil })
	}()
	<-finished
	if value[0] != 1 {
		t.Fatal("something of a group that was left was run")
	}
	refused(t, mesh.Group(background, nil), ErrInvalidArgument, "function is nil")
	// In this case the context is done before the operations are made.
	for _, used := range []bool{true, false} {
		ctx, cancel := context.WithCancel(background)
		err := mesh.Group(ctx, func(ctx context.Context) error {
			if used {
				sum(ctx)
			}
			cancel()
			return nil
		})
		if !errors.Is(err, context.Canceled) || errors.Is(err, ErrAborted) || value[0] != 1 {
			t.Errorf("a group whose context was cancelled inside, with operations %v: %v, %v", used, err, value)
		}
	}
	// None of these groups has left anything behind.
	n, _ := mesh.Size("tp")
	sum(background)
	equal(t, "the next all-reduce", value, []int{n})
	must(t, mesh.Group(background, func(ctx context.Context) error { return nil }))
	must(t, mesh.Group(background, func(ctx context.Context) error { sum(ctx); return nil }))
	equal(t, "the next group", value, []int{n * n})
}

// also gives a function that calls another function first.
func also[In, Out any](first func(), function func(In) Out) func(In) Out {
	return func(in In) Out { first(); return function(in) }
}

// threadOfAbortedGroup gives the thread on which a group ran that a context has aborted.
func threadOfAbortedGroup(t *testing.T) int {
	t.Helper()
	world, err := Join(background, "cpu", &WorldOptions{Size: 1})
	must(t, err)
	defer world.Close()
	mesh, err := Init(background, "cpu", []int{1}, nil, &MeshOptions{World: world})
	must(t, err)
	value := []int{1}
	calls, err := collect(background, func(ctx context.Context) error { return AllReduce(ctx, mesh, "", value, value, Sum) })
	must(t, err)
	ctx, cancel := context.WithCancel(background)
	thread := 0
	calls[0].function = also(func() {
		thread = syscall.Gettid()
		cancel()
		// The mesh answers ErrAborted when the context has ended it.
		for mesh.Check("") == nil {
			time.Sleep(time.Millisecond)
		}
	}, calls[0].function)
	refused(t, mesh.run(ctx, calls), ErrAborted, "")
	return thread
}

// On cuda an abort with operations queued makes a thread useless, so no thread outlives a group that
// was aborted. This test needs no cuda, because the thread ends on cpu, too.
func TestThreadsOfAbortedGroupsEnd(t *testing.T) {
	thread := threadOfAbortedGroup(t)
	if thread == os.Getpid() {
		// Go cannot end the main thread. When a goroutine that is locked to the main thread
		// ends, Go does not use that thread again. So the next group runs on another thread.
		thread = threadOfAbortedGroup(t)
	}
	if thread == os.Getpid() {
		t.Fatal("two groups that were aborted ran on the main thread")
	}
	for until := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(fmt.Sprint("/proc/self/task/", thread)); os.IsNotExist(err) {
			return
		}
		if time.Now().After(until) {
			t.Fatal("the thread of a group that was aborted lives on")
		}
	}
}

// An operation of another goroutine is not part of the group.
func TestOtherGoroutinesBesideAGroup(t *testing.T) {
	mesh, _ := ranks(t)
	n, _ := mesh.Size("tp")
	m, _ := mesh.Size("dp")
	inside, beside := []int{1}, []int{1}
	must(t, mesh.Group(background, func(ctx context.Context) error {
		must(t, AllReduce(ctx, mesh, "tp", inside, inside, Sum))
		finished := make(chan error)
		go func() { finished <- AllReduce(background, mesh, "dp", beside, beside, Sum) }()
		return <-finished
	}))
	equal(t, "inside and beside", []int{inside[0], beside[0]}, []int{n, m})
}

func TestGroupsOverSeveralMeshes(t *testing.T) {
	mesh, folder := ranks(t)
	world := private(t, folder, "groups")
	lazy := line(t, world, MeshOptions{Lazy: true})
	one, two := []int{rank}, []int{1}
	n, _ := mesh.Size("tp")
	must(t, mesh.Group(background, func(ctx context.Context) error {
		must(t, AllReduce(ctx, lazy, "", one, one, Sum))
		return AllReduce(ctx, mesh, "tp", two, two, Sum)
	}))
	equal(t, "both sums", []int{one[0], two[0]}, []int{size * (size - 1) / 2, n})
}
