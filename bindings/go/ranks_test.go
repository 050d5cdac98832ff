package devicemesh

// The tests here, in ends_test.go and in stores_test.go need several processes: run them under
// `devicemesh run -n N`, for any N. Every rank runs every test.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

var rank, size int

// ranks gives a mesh (dp, tp) over all ranks, and a folder of this run that they share.
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
		folder, err = os.MkdirTemp("", "devicemesh-go-")
		must(t, err)
		t.Cleanup(func() {
			// A world that was given up may still write its last word into the folder.
			for until := time.Now().Add(30 * time.Second); os.RemoveAll(folder) != nil; time.Sleep(5 * time.Millisecond) {
				if time.Now().After(until) {
					t.Errorf("%s cannot be removed: %v", folder, os.RemoveAll(folder))
					return
				}
			}
		})
	}
	name := make([]uint8, 1000)
	copy(name, folder)
	all := flat(t, mesh, "everybody")
	must(t, Broadcast(background, all, "", name, 0))
	t.Cleanup(func() {
		// No rank leaves, and rank 0 keeps the folder, while another rank still works.
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

// private gives a world of the test's own, so that ending its meshes does not end those of other
// tests.
func private(t *testing.T, folder, name string) *World {
	t.Helper()
	world, err := Join(background, "cpu", &WorldOptions{Size: size, Rank: rank, InitMethod: "file://" + filepath.Join(folder, name), Timeout: time.Minute})
	must(t, err)
	t.Cleanup(func() { world.Close() })
	return world
}

// A waitedFor is a context that begins when a call first waits for it. A call looks whether its
// context is done before that, so it has begun when this context ends. A context that begins before
// the call may be done already on a busy machine, and the call is not begun then.
type waitedFor struct {
	begin func() context.Context
	once  sync.Once
	inner atomic.Pointer[context.Context]
	begun chan struct{}
}

func contextWaitedFor(begin func() context.Context) *waitedFor {
	return &waitedFor{begin: begin, begun: make(chan struct{})}
}

// doneAfter gives a context that ends with this cause so long after a call has begun to wait for
// it. Without a cause it is the context's deadline that passes.
func doneAfter(t *testing.T, pause time.Duration, why error) context.Context {
	t.Helper()
	return contextWaitedFor(func() context.Context {
		if why == nil {
			ctx, cancel := context.WithTimeout(background, pause)
			t.Cleanup(cancel)
			return ctx
		}
		ctx, cancel := context.WithCancelCause(background)
		time.AfterFunc(pause, func() { cancel(why) })
		return ctx
	})
}

func (c *waitedFor) now() context.Context {
	if inner := c.inner.Load(); inner != nil {
		return *inner
	}
	return background
}

func (c *waitedFor) Done() <-chan struct{} {
	c.once.Do(func() {
		inner := c.begin()
		c.inner.Store(&inner)
		close(c.begun)
	})
	return c.now().Done()
}

func (c *waitedFor) Err() error                  { return c.now().Err() }
func (c *waitedFor) Value(key any) any           { return c.now().Value(key) }
func (c *waitedFor) Deadline() (time.Time, bool) { return c.now().Deadline() }

// line makes a mesh over all ranks. Its timeout may be short. On a busy machine all ranks may run
// into the deadline here, and all try again.
func line(t *testing.T, world *World, options MeshOptions) *Mesh {
	t.Helper()
	options.World = world
	mesh, err := Init(background, "cpu", []int{size}, []string{"x"}, &options)
	for tries := 1; errors.Is(err, ErrTimeout) && tries < 20; tries++ {
		mesh, err = Init(background, "cpu", []int{size}, []string{"x"}, &options)
	}
	must(t, err)
	// A mesh that the collector closes later would end the world while its folder is removed.
	t.Cleanup(func() { mesh.Close() })
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
	checkSum(t, mesh, func(value int) Float8E4M3 { return ToFloat8E4M3(float32(value)) })
	checkSum(t, mesh, func(value int) Float8E5M2 { return ToFloat8E5M2(float32(value)) })
	checkSum(t, mesh, func(value int) gradient { return gradient(value) })
	group, err := mesh.GroupRanks("dp")
	must(t, err)
	values := []float64{float64(rank)}
	must(t, AllReduce(background, mesh, "dp", values, values, Avg))
	equal(t, "the average", values, []float64{float64(sumOf(group)) / float64(len(group))})
	must(t, AllReduce[float32](background, mesh, "dp", nil, nil, Sum))
}

func TestSumsOfEightBitFloats(t *testing.T) {
	mesh, _ := ranks(t)
	n, _ := mesh.Size("tp")
	if n&(n-1) != 0 {
		return
	}
	// 1 as E4M3 and E5M2. Each doubling adds 1 to the exponent, which follows 3 or 2 bits of
	// mantissa.
	doublings := bits.TrailingZeros(uint(n))
	for _, each := range []struct {
		dtype     DType
		one, step uint8
	}{{DTypeFloat8E4M3, 0x38, 8}, {DTypeFloat8E5M2, 0x3c, 4}} {
		dtype, one, step := each.dtype, each.one, each.step
		values := []uint8{one, one + step}
		buffer := Of(values)
		buffer.DType = dtype
		must(t, mesh.AllReduceBuffer(background, "tp", buffer, buffer, Sum, 0))
		added := step * uint8(doublings)
		equal(t, fmt.Sprint("type ", dtype), values, []uint8{one + added, one + step + added})
	}
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
	must(t, mesh.Check(""))
	for _, dim := range []string{"tp", ""} {
		must(t, mesh.StreamWait(background, dim, 0, time.Minute))
	}
	refused(t, mesh.StreamWait(background, "tp", Stream(8), 0), ErrInvalidArgument, "stream")
	refused(t, mesh.StreamWait(background, "tp", 0, -1), ErrInvalidArgument, "timeout")
	// CUDA has streams that are no addresses, and Go looks at the pointers on a stack that grows.
	for depth := range 128 {
		ended := make(chan error)
		go func() {
			ended <- atDepth(depth, func() error {
				return mesh.AllReduceBuffer(background, "tp", Of(to), Of(to), Sum, Stream(2))
			})
		}()
		refused(t, <-ended, ErrInvalidArgument, "stream")
	}
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
	own, err := tp.Flatten(background, "own", CallOptions{Timeout: time.Minute, Dims: []DimOptions{{OwnComm: true, CommName: "mine"}}})
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
		mesh.AllReduceBuffer(background, "tp", Of(four), Of(make([]int32, 4)), Sum, 0), mesh.AllReduceBuffer(background, "tp", ofNoType, ofNoType, Sum, 0),
		mesh.AllReduceBuffer(background, "tp", Buffer{Count: 4, DType: DTypeFloat32}, Of(four), Sum, 0),
		mesh.AllReduceBuffer(background, "tp", Buffer{Count: -1}, Buffer{Count: -1}, Sum, 0), AllReduce(background, mesh, "", four, four, Sum),
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

// atDepth runs call below that many frames, which leave less and less of the goroutine's stack.
func atDepth(depth int, call func() error) error {
	var room [64]byte
	if depth == 0 {
		return call()
	}
	err := atDepth(depth-1, call)
	runtime.KeepAlive(&room)
	return err
}
