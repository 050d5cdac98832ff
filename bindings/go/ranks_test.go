package devicemesh

// What needs several processes: run under `devicemesh run -n N`, for any N. Every rank runs every test.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

var rank, size int

// ranks is a mesh (dp, tp) over all ranks, and a folder of this run that they share.
func ranks(t *testing.T) (*Mesh, string) {
	t.Helper()
	var err error
	if rank, err = strconv.Atoi(os.Getenv("RANK")); err != nil {
		t.Skip("needs a launcher: devicemesh run -n 4 -- go test .")
	}
	size, _ = strconv.Atoi(os.Getenv("WORLD_SIZE"))
	rows := min(2, size)
	mesh, err := Init(background, "cpu", []int{rows, size / rows}, []string{"dp", "tp"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	folder := ""
	if rank == 0 {
		folder = t.TempDir()
	}
	name := make([]uint8, 1000)
	copy(name, folder)
	all := flat(t, mesh, "everybody")
	must(t, Broadcast(background, all, "", name, 0))
	t.Cleanup(func() {
		// Nobody leaves, and rank 0's folder stays, while another rank is still at work.
		again, err := Init(background, "cpu", []int{size}, []string{"last"}, nil)
		if err == nil {
			again.Close()
		} else if !t.Failed() {
			t.Error(err)
		}
		mesh.Close()
	})
	return mesh, string(bytes.TrimRight(name, "\x00"))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func flat(t *testing.T, mesh *Mesh, name string) *Mesh {
	t.Helper()
	made, err := mesh.Flatten(background, name)
	must(t, err)
	return made
}

// private is a world whose meshes end without those of the other tests.
func private(t *testing.T, folder, name string) *World {
	t.Helper()
	world, err := Join(background, "cpu", &WorldOptions{Size: size, Rank: rank, InitMethod: "file://" + filepath.Join(folder, name), Timeout: time.Minute})
	must(t, err)
	t.Cleanup(func() { world.Close() })
	return world
}

func line(t *testing.T, world *World, options MeshOptions) *Mesh {
	t.Helper()
	options.World = world
	mesh, err := Init(background, "cpu", []int{size}, []string{"x"}, &options)
	must(t, err)
	return mesh
}

func sumOf(values []int) (sum int) {
	for _, value := range values {
		sum += value
	}
	return sum
}

func equal[T comparable](t *testing.T, what string, got, expected []T) {
	t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(expected) {
		t.Errorf("%s: got %v, expected %v", what, got, expected)
	}
}

func checkSum[T Element](t *testing.T, mesh *Mesh, convert func(int) T) {
	t.Helper()
	n, _ := mesh.Size("tp")
	me, _ := mesh.LocalRank("tp")
	send, recv := []T{convert(me + 1), convert(2)}, make([]T, 2)
	must(t, AllReduce(background, mesh, "tp", send, recv, Sum))
	equal(t, fmt.Sprintf("%T", send), recv, []T{convert(n * (n + 1) / 2), convert(2 * n)})
	equal(t, "what was sent", send, []T{convert(me + 1), convert(2)})
}

func number[T int8 | uint8 | int32 | uint32 | int64 | uint64 | int | uint | float32 | float64](value int) T {
	return T(value)
}

type gradient float32

func TestAllReduceOfEveryType(t *testing.T) {
	mesh, _ := ranks(t)
	checkSum(t, mesh, number[int8])
	checkSum(t, mesh, number[uint8])
	checkSum(t, mesh, number[int32])
	checkSum(t, mesh, number[uint32])
	checkSum(t, mesh, number[int64])
	checkSum(t, mesh, number[uint64])
	checkSum(t, mesh, number[int])
	checkSum(t, mesh, number[uint])
	checkSum(t, mesh, number[float32])
	checkSum(t, mesh, number[float64])
	checkSum(t, mesh, func(value int) Float16 { return ToFloat16(float32(value)) })
	checkSum(t, mesh, func(value int) BFloat16 { return ToBFloat16(float32(value)) })
	checkSum(t, mesh, func(value int) gradient { return gradient(value) })
	group, err := mesh.GroupRanks("dp")
	must(t, err)
	values := []float64{float64(rank)}
	must(t, AllReduce(background, mesh, "dp", values, values, Avg))
	equal(t, "the average", values, []float64{float64(sumOf(group)) / float64(len(group))})
	must(t, AllReduce[float32](background, mesh, "dp", nil, nil, Sum))
}

func TestCollectives(t *testing.T) {
	mesh, _ := ranks(t)
	tp, err := mesh.Slice("tp")
	must(t, err)
	n, _ := tp.Size("")
	me, _ := tp.LocalRank("")
	gathered, expected := make([]int32, 2*n), []int32{}
	for i := range n {
		expected = append(expected, int32(i), 7)
	}
	must(t, AllGather(background, tp, "", []int32{int32(me), 7}, gathered))
	equal(t, "all-gather", gathered, expected)
	whole, block := make([]float32, 2*n), make([]float32, 2)
	for i := range whole {
		whole[i] = float32(i)
	}
	must(t, ReduceScatter(background, tp, "tp", whole, block, Sum))
	equal(t, "reduce-scatter", block, []float32{float32(2 * me * n), float32((2*me + 1) * n)})
	value := []int{rank}
	last, err := tp.TranslateRank("", n-1)
	must(t, err)
	must(t, Broadcast(background, tp, "", value, n-1))
	equal(t, "broadcast", value, []int{last})
	out := []int{-1}
	if me == n-1 {
		must(t, Reduce(background, tp, "", []int{me + 1}, out, Max, n-1))
		equal(t, "reduce", out, []int{n})
	} else {
		must(t, Reduce(background, tp, "", []int{me + 1}, nil, Max, n-1))
	}
	to, from := make([]int64, n), make([]int64, n)
	for i := range n {
		to[i], whole[i] = int64(10*me+i), 0
	}
	must(t, AllToAll(background, tp, "", to, from))
	for i := range n {
		to[i] = int64(10*i + me)
	}
	equal(t, "all-to-all", from, to)
	must(t, mesh.Check("tp"))
	comm, err := mesh.Comm(background, "tp")
	must(t, err)
	again, err := tp.Comm(background, "")
	must(t, err)
	proc, err := mesh.Proc("ncclAllReduce")
	if comm == 0 || comm != again || proc == nil || err != nil {
		t.Error(comm, again, proc, err)
	}
	adopted, err := FromComms("cpu", []int{n}, []string{"y"}, []Comm{comm}, false, nil)
	must(t, err)
	equal(t, "the value", value, []int{last})
	must(t, AllReduce(background, adopted, "y", value, value, Min))
	equal(t, "over an adopted communicator", value, []int{last})
}

func TestSendsAndReceivesInAGroup(t *testing.T) {
	mesh, _ := ranks(t)
	n, _ := mesh.Size("tp")
	me, _ := mesh.LocalRank("tp")
	got := make([]int, 2)
	for round := range 50 {
		must(t, mesh.Group(background, func(ctx context.Context) error {
			must(t, Send(ctx, mesh, "tp", []int{me, round}, (me+1)%n))
			return mesh.Group(ctx, func(ctx context.Context) error {
				runtime.GC() // moves and frees what nobody keeps
				return Recv(ctx, mesh, "tp", got, (me+n-1)%n)
			})
		}))
		equal(t, "from the left", got, []int{(me + n - 1) % n, round})
	}
	stopped := errors.New("stopped")
	if err := mesh.Group(background, func(context.Context) error { return stopped }); err != stopped {
		t.Error(err)
	}
	must(t, mesh.Group(background, func(ctx context.Context) error {
		refusal := make(chan error)
		go func() { refusal <- Send(ctx, mesh, "tp", got, 0) }()
		refused(t, <-refusal, ErrInvalidArgument, "another goroutine")
		return nil
	}))
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was lost")
			}
		}()
		_ = mesh.Group(background, func(context.Context) error { panic("in a group") })
	}()
	must(t, AllReduce(background, mesh, "tp", got, got, Sum))
}

func TestFlattenedAndOtherViews(t *testing.T) {
	mesh, _ := ranks(t)
	value := []int{rank}
	must(t, AllReduce(background, flat(t, mesh, "all"), "", value, value, Sum))
	must(t, AllReduce(background, mesh, "all", []int{1}, value[:1:1], Sum))
	equal(t, "along the flattened dimension", value, []int{size})
	tp, err := mesh.Slice("tp")
	must(t, err)
	own, err := tp.Flatten(background, "own", DimOptions{OwnComm: true, CommName: "mine"})
	must(t, err)
	first, _ := mesh.Comm(background, "tp")
	second, _ := own.Comm(background, "own")
	if first == second {
		t.Error("the communicator is shared")
	}
	n, _ := tp.Size("")
	me, _ := tp.LocalRank("")
	part, err := mesh.SliceRange(background, "tp", n-1, 1, 1)
	must(t, err)
	if _, err := part.Coordinate(); me == n-1 {
		must(t, err)
	} else {
		refused(t, err, ErrNotMember, "")
	}
	text, err := mesh.Serialize()
	must(t, err)
	made, err := Deserialize(background, text, &MeshOptions{Lazy: true, Dims: []DimOptions{{}, {OwnComm: true}}})
	must(t, err)
	must(t, AllReduce(background, made, "tp", value, value, Max))
	must(t, made.Finalize(background))
	for _, err := range []error{AllReduce(background, made, "tp", value, value, Max), made.Finalize(background), made.Check("tp")} {
		refused(t, err, ErrAborted, "finalized")
	}
	_, err = made.Flatten(background, "more")
	refused(t, err, ErrAborted, "finalized")
	_, err = made.Slice("tp")
	refused(t, err, ErrAborted, "finalized")
	must(t, made.Abort())
}

func TestWrongBuffers(t *testing.T) {
	mesh, _ := ranks(t)
	n, _ := mesh.Size("tp")
	me, _ := mesh.LocalRank("tp")
	four, five := make([]float32, 4), make([]float32, 5)
	ofNoType := Of(four)
	ofNoType.DType = 99
	for at, err := range []error{
		AllReduce(background, mesh, "tp", four, five, Sum), AllReduce(background, mesh, "tp", four, nil, Sum),
		AllGather(background, mesh, "tp", four, make([]float32, 4*n+1)), AllGather(background, mesh, "tp", four, make([]float32, 5*n)),
		ReduceScatter(background, mesh, "tp", make([]float32, 5*n), four, Sum), Broadcast(background, mesh, "tp", four, n),
		Broadcast(background, mesh, "tp", four, -1), Broadcast(background, mesh, "tp", four, 1<<40), Send(background, mesh, "tp", four, n),
		Reduce(background, mesh, "tp", four, five, Sum, me), AllReduce(background, mesh, "tp", four, four, 77),
		mesh.AllReduceBuffer(background, "tp", Of(four), Of(make([]int32, 4)), Sum, nil), mesh.AllReduceBuffer(background, "tp", ofNoType, ofNoType, Sum, nil),
		mesh.AllReduceBuffer(background, "tp", Buffer{Count: 4, DType: DTypeFloat32}, Of(four), Sum, nil),
		mesh.AllReduceBuffer(background, "tp", Buffer{Count: -1}, Buffer{Count: -1}, Sum, nil), AllReduce(background, mesh, "", four, four, Sum),
		AllReduce(background, mesh, "t\x00p", four, four, Sum), AllGather(background, mesh, "", four, four),
	} {
		if !errors.Is(err, ErrInvalidArgument) || err.Error() == "" {
			t.Errorf("case %d: %v", at, err)
		}
	}
	refused(t, AllReduce(background, mesh, "ep", four, four, Sum), ErrNotFound, "ep")
	refused(t, AllGather(background, mesh, "ep", four, four), ErrNotFound, "ep")
	if n > 1 {
		refused(t, AllToAll(background, mesh, "tp", make([]float32, n+1), make([]float32, n+1)), ErrInvalidArgument, "do not share evenly")
	}
	must(t, AllReduce(background, mesh, "tp", four, four, Sum))
}

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

	// Buffers of different sizes, in a world of its own: the collective fails on all.
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
		if !errors.Is(err, why) {
			t.Errorf("%v is not for the reason given", err)
		}
	}
	within := func() context.Context {
		ctx, cancel := context.WithCancelCause(background)
		time.AfterFunc(200*time.Millisecond, func() { cancel(why) })
		return ctx
	}
	world := private(t, folder, "contexts")
	// The other ranks go on once rank 0's call was ended: by then it has said that it leaves.
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
	// A context that is done already ends the mesh, too, as it would a moment later.
	mesh := line(t, world, MeshOptions{Dims: []DimOptions{{OwnComm: true}}})
	if rank == 0 {
		ctx, cancel := context.WithCancelCause(background)
		cancel(why)
		cancelled(AllReduce(ctx, mesh, "", []int{1}, []int{0}, Sum))
	} else {
		refused(t, AllReduce(background, mesh, "", []int{1}, []int{0}, Sum), ErrPeerLost, "rank 0")
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

// folderStore is a store for the test, in a folder that all ranks see.
type folderStore struct {
	folder string
	calls  atomic.Int64
}

func (s *folderStore) path(key string) string {
	return filepath.Join(s.folder, fmt.Sprintf("%x", key))
}

func (s *folderStore) Set(key string, value []byte) error {
	draft := fmt.Sprintf("%s.%d.%d", s.path(key), os.Getpid(), s.calls.Add(1))
	if err := os.WriteFile(draft, value, 0o600); err != nil {
		return err
	}
	return os.Rename(draft, s.path(key))
}

func (s *folderStore) Get(key string, timeout time.Duration) ([]byte, error) {
	for until := time.Now().Add(timeout); ; time.Sleep(5 * time.Millisecond) {
		value, err := os.ReadFile(s.path(key))
		if err == nil {
			return value, nil
		}
		if time.Now().After(until) {
			return nil, ErrNoKey
		}
	}
}

func (s *folderStore) Add(key string, amount int64) (int64, error) {
	lock, err := os.OpenFile(filepath.Join(s.folder, "lock"), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, err
	}
	defer lock.Close()
	for err = syscall.EINTR; err == syscall.EINTR; {
		err = syscall.Flock(int(lock.Fd()), syscall.LOCK_EX)
	}
	if err != nil {
		return 0, err
	}
	var value int64
	if text, err := s.Get(key, 0); err == nil {
		if value, err = strconv.ParseInt(string(text), 10, 64); err != nil {
			return 0, err
		}
	}
	value += amount
	return value, s.Set(key, []byte(strconv.FormatInt(value, 10)))
}

type brokenStore struct{ err error }

func (s brokenStore) Set(string, []byte) error                  { return s.err }
func (s brokenStore) Get(string, time.Duration) ([]byte, error) { panic("in a store") }
func (s brokenStore) Add(string, int64) (int64, error)          { return 0, s.err }

func TestStoresInGo(t *testing.T) {
	_, folder := ranks(t)
	store := &folderStore{folder: filepath.Join(folder, "store")}
	must(t, os.MkdirAll(store.folder, 0o700))
	world, err := Join(background, "cpu", &WorldOptions{Size: size, Rank: rank, Store: store, Timeout: time.Minute})
	must(t, err)
	where, err := world.Locations(background, fmt.Sprintf("rack%d/host%d", rank%2, rank))
	must(t, err)
	for other, path := range where {
		if path != fmt.Sprintf("rack%d/host%d", other%2, other) {
			t.Error(where)
		}
	}
	must(t, world.Barrier(background, time.Minute))
	mesh := line(t, world, MeshOptions{})
	value := []int{rank}
	must(t, AllReduce(background, mesh, "", value, value, Sum))
	equal(t, "over a store in Go", value, []int{size * (size - 1) / 2})
	must(t, mesh.Finalize(background))
	must(t, mesh.Close())
	must(t, world.Close())

	broken := errors.New("broken")
	_, err = Join(background, "cpu", &WorldOptions{Size: 2, Store: brokenStore{broken}, Timeout: 5 * time.Second})
	refused(t, err, ErrStore, "broken")
	if !errors.Is(err, broken) {
		t.Errorf("%v is not for the store's reason", err)
	}
}

// Go preempts goroutines by SIGURG, so its threads are interrupted in futexes, polls and reads. Here all the time, on all threads.
func TestSignalsDuringCalls(t *testing.T) {
	_, folder := ranks(t)
	stop := make(chan struct{})
	var storm, work sync.WaitGroup
	var sent atomic.Int64
	storm.Add(1)
	go func() {
		defer storm.Done()
		for {
			select {
			case <-stop:
				return
			case <-time.After(200 * time.Microsecond):
			}
			threads, _ := os.ReadDir("/proc/self/task")
			for _, thread := range threads {
				id, _ := strconv.Atoi(thread.Name())
				_, _, _ = syscall.RawSyscall(syscall.SYS_TGKILL, uintptr(os.Getpid()), uintptr(id), uintptr(syscall.SIGURG))
				sent.Add(1)
			}
		}
	}()
	// Worlds by both kinds of store, each with a goroutine that makes its calls, and goroutines that compute beside them.
	worlds := []*World{private(t, folder, "signals"), private(t, folder, "signals too")}
	if port := os.Getenv("MASTER_PORT"); port != "" {
		served, err := Join(background, "cpu", nil)
		must(t, err)
		defer served.Close()
		worlds = append(worlds, served)
	}
	for index, world := range worlds {
		work.Add(1)
		go func() {
			defer work.Done()
			for round := range 4 {
				mesh, err := Init(background, "cpu", []int{size}, []string{"x"}, &MeshOptions{World: world, Dims: []DimOptions{{OwnComm: true}}})
				if err != nil {
					t.Errorf("world %d, round %d: %v", index, round, err)
					return
				}
				large := make([]float32, 200_000)
				for range 10 {
					for i := range large {
						large[i] = 1
					}
					if err := AllReduce(background, mesh, "", large, large, Sum); err != nil {
						t.Errorf("world %d, round %d: %v", index, round, err)
						return
					}
					for i, value := range large {
						if value != float32(size) {
							t.Errorf("world %d, round %d: element %d is %v, expected %d", index, round, i, value, size)
							return
						}
					}
				}
				if err := errors.Join(world.Barrier(background, 0), mesh.Finalize(background)); err != nil {
					t.Errorf("world %d, round %d: %v", index, round, err)
					return
				}
			}
		}()
	}
	work.Wait()
	close(stop)
	storm.Wait()
	if sent.Load() < 100 {
		t.Errorf("only %d signals were sent", sent.Load())
	}
	t.Logf("%d signals", sent.Load())
}

func TestManyGoroutinesOnOneMesh(t *testing.T) {
	mesh, _ := ranks(t)
	n, _ := mesh.Size("tp")
	var group sync.WaitGroup
	for id := range 32 {
		group.Add(1)
		go func() {
			defer group.Done()
			for range 200 {
				view, err := mesh.Slice("tp")
				if err != nil {
					t.Error(err)
					return
				}
				name := fmt.Sprintf("dimension-%d.", id)
				if _, err := view.Comm(background, name); !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), name) {
					t.Errorf("goroutine %d got %v", id, err)
				}
				if got, err := view.Size("tp"); got != n || err != nil {
					t.Error(got, err)
				}
				view.Close()
			}
		}()
	}
	// Meanwhile one makes the collectives.
	for range 50 {
		value := []int{1}
		if err := AllReduce(background, mesh, "tp", value, value, Sum); err != nil || value[0] != n {
			t.Error(value, err)
			break
		}
	}
	group.Wait()
}
