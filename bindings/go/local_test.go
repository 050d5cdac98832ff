package devicemesh

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"
)

var background = context.Background()

// offline gives a mesh of 8 ranks in an offline world, where this process is rank 6.
func offline(t *testing.T) *Mesh {
	t.Helper()
	world, err := Join(background, "cpu", &WorldOptions{Size: 8, Rank: 6, Offline: true})
	if err != nil {
		t.Fatal(err)
	}
	mesh, err := Init(background, "cpu", []int{2, 4}, []string{"dp", "tp"}, &MeshOptions{World: world})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mesh.Close(); world.Close() })
	return mesh
}

// expect checks a value that comes with an error.
func expect[T any](t *testing.T, expected T) func(T, error) {
	t.Helper()
	return func(got T, err error) {
		t.Helper()
		if err != nil || !reflect.DeepEqual(got, expected) {
			t.Errorf("got %v, %v; expected %v", got, err, expected)
		}
	}
}

// refused checks an error's status and a part of its message.
func refused(t *testing.T, err error, status Status, part string) {
	t.Helper()
	var failed *Error
	if !errors.Is(err, status) || !errors.As(err, &failed) || failed.Status != status || !strings.Contains(err.Error(), part) {
		t.Errorf("got %v; expected %v with %q", err, status, part)
	}
}

func TestQueries(t *testing.T) {
	mesh := offline(t)
	expect(t, []int{2, 4})(mesh.Shape())
	expect(t, 8)(mesh.Size(""))
	expect(t, 4)(mesh.Size("tp"))
	expect(t, 6)(mesh.Rank())
	expect(t, 2)(mesh.LocalRank("tp"))
	expect(t, []int{1, 2})(mesh.Coordinate())
	expect(t, []int{0, 1, 2, 3, 4, 5, 6, 7})(mesh.Ranks())
	expect(t, []int{4, 5, 6, 7})(mesh.GroupRanks("tp"))
	expect(t, [][]int{{0, 4}, {1, 5}, {2, 6}, {3, 7}})(mesh.ReplicaGroups("dp"))
	expect(t, 2)(mesh.TranslateRank("dp", 0))
	expect(t, 0)(mesh.TranslateWorldRank("dp", 2))
	expect(t, 3)(mesh.TranslateWorldRank("tp", 7))
	_, err := mesh.TranslateWorldRank("tp", 3)
	refused(t, err, ErrNotMember, "3")
	expect(t, []int{0, 3})(mesh.CoordinateOf(3))
	_, err = mesh.CoordinateOf(8)
	refused(t, err, ErrNotMember, "8")
	// Rank 6 is rank 2 along tp. Its neighbour there is rank 3 along tp, and rank 7 of the world.
	expect(t, 3)(mesh.Neighbor("tp", 1, false))
	expect(t, 7)(mesh.TranslateRank("tp", 3))
	expect(t, RankNone)(mesh.Neighbor("tp", 2, false))
	expect(t, "cpu")(mesh.DeviceType())
	expect(t, true)(mesh.IsMember())
	half, err := mesh.Submesh(0, "tp")
	must(t, err)
	defer half.Close()
	expect(t, false)(half.IsMember())
	expect(t, 0)(mesh.Neighbor("tp", 2, true))
	expect(t, []int{})(mesh.LostRanks())
	if names := mesh.Names(); !reflect.DeepEqual(names, []string{"dp", "tp"}) {
		t.Error(names)
	}
	if text := fmt.Sprint(mesh); text != "DeviceMesh((dp=2, tp=4), 'cpu', stride=(4, 1))" {
		t.Error(text)
	}
	world, err := mesh.World()
	if err != nil {
		t.Fatal(err)
	}
	defer world.Close()
	expect(t, 6)(world.Rank())
	expect(t, WorldInfo{Rank: 6, Size: 8, LocalRank: 6, LocalSize: 8, NumHosts: 1, Device: -1, DeviceType: "cpu"})(world.Info())
	if Version() < 100 {
		t.Error(Version())
	}
}

func TestListsLongerThanTheFirstBuffer(t *testing.T) {
	world, err := Join(background, "cpu", &WorldOptions{Size: 1000, Rank: 0, Offline: true})
	if err != nil {
		t.Fatal(err)
	}
	defer world.Close()
	ranks := make([]int, 1000)
	for i := range ranks {
		ranks[i] = 999 - i
	}
	mesh, err := Init(background, "cpu", []int{1000}, nil, &MeshOptions{World: world, Ranks: ranks})
	if err != nil {
		t.Fatal(err)
	}
	defer mesh.Close()
	expect(t, ranks)(mesh.Ranks())
	expect(t, 999)(mesh.LocalRank(""))
	text, err := mesh.Serialize()
	if err != nil {
		t.Fatal(err)
	}
	again, err := Deserialize(background, text, &MeshOptions{World: world, Dims: []DimOptions{{}}})
	if err != nil {
		t.Fatal(err)
	}
	expect(t, true)(again.Equal(mesh))
	hash, _ := mesh.Hash()
	expect(t, hash)(again.Hash())
	_, err = Deserialize(background, text, &MeshOptions{World: world, Dims: make([]DimOptions, 2)})
	refused(t, err, ErrInvalidArgument, "num_dim_options is 2, but the mesh has 1 dimension")
	_, err = Deserialize(background, "{", &MeshOptions{World: world})
	refused(t, err, ErrInvalidArgument, "not the text of a mesh")
}

func TestViews(t *testing.T) {
	mesh := offline(t)
	view := func(made *Mesh, err error) string {
		if err != nil {
			return err.Error()
		}
		defer made.Close()
		return made.String()
	}
	tp, _ := mesh.Slice("tp")
	dp, _ := mesh.Slice("dp")
	for _, each := range [][2]string{
		{view(mesh.Slice("tp", "dp")), "DeviceMesh((tp=4, dp=2), 'cpu', stride=(1, 4))"},
		{view(mesh.Slice()), "DeviceMesh((), 'cpu', stride=())"},
		{view(mesh.Flatten(background, "all")), "DeviceMesh((all=8), 'cpu', stride=(1,))"},
		{view(mesh.Unflatten(background, "tp", []int{2, 2}, []string{"a", "b"}, CallOptions{Dims: []DimOptions{{}, {OwnComm: true, CommName: "b"}}})),
			"DeviceMesh((dp=2, a=2, b=2), 'cpu', stride=(4, 2, 1))"},
		{view(mesh.Reshape(background, []int{8, 1}, []string{"ep", "one"})), "DeviceMesh((ep=8, one=1), 'cpu', stride=(1, ()))"},
		{view(mesh.SliceRange(background, "tp", 2, 2, 1)), "DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1))"},
		{view(Concatenate(tp, dp)), "DeviceMesh((tp=4, dp=2), 'cpu', stride=(1, 4))"},
		{view(tp.Root()), mesh.String()},
		{view(mesh.Clone()), mesh.String()},
		{view(mesh.Submesh(1, "tp")), tp.String()},
	} {
		if strings.ReplaceAll(each[0], ",)", ")") != strings.ReplaceAll(each[1], ",)", ")") {
			t.Errorf("got %s, expected %s", each[0], each[1])
		}
	}
	expect(t, 2)(mesh.SubmeshCount("tp"))
	if err := tp.Register("go/tp"); err != nil {
		t.Fatal(err)
	}
	found, err := Lookup("go/tp")
	if err != nil {
		t.Fatal(err)
	}
	expect(t, true)(found.Equal(tp))
	if err := Unregister("go/tp"); err != nil {
		t.Fatal(err)
	}
	_, err = Lookup("go/tp")
	refused(t, err, ErrNotFound, "go/tp")
	refused(t, Unregister("go/tp"), ErrNotFound, "go/tp")
}

func TestPlanning(t *testing.T) {
	mesh := offline(t)
	shape, offset, err := mesh.LocalShard([]Placement{Shard(0, 1), Shard(0, 0)}, []int{16, 3}, -1)
	if err != nil || !reflect.DeepEqual([][]int{shape, offset}, [][]int{{2, 3}, {10, 0}}) {
		t.Error(shape, offset, err)
	}
	shape, offset, err = mesh.LocalShard([]Placement{Partial(), Replicate()}, []int{16, 3}, 1)
	if err != nil || !reflect.DeepEqual([][]int{shape, offset}, [][]int{{16, 3}, {0, 0}}) {
		t.Error(shape, offset, err)
	}
	_, _, err = mesh.LocalShard([]Placement{{}}, []int{16}, -1)
	refused(t, err, ErrInvalidArgument, "num_placements is 1")
	_, _, err = mesh.LocalShard([]Placement{Shard(1<<40, 0), {}}, []int{16}, -1)
	refused(t, err, ErrInvalidArgument, "2147483647")
	locations := []string{"a", "b", "a", "b", "a", "b", "a", "b"}
	ranks, report, err := PlanRanks(locations, []int{2, 4}, []uint32{1, 10})
	if err != nil || !reflect.DeepEqual(ranks, []int{0, 2, 4, 6, 1, 3, 5, 7}) || !strings.Contains(report, `"crossing_groups":[0]`) {
		t.Error(ranks, report, err)
	}
	_, _, err = PlanRanks(locations, []int{math.MaxInt, 2}, nil)
	refused(t, err, ErrInvalidArgument, "more ranks than there are locations, 8")
	_, _, err = PlanRanks(nil, []int{1}, nil)
	refused(t, err, ErrInvalidArgument, "locations, 0")
	_, _, err = PlanRanks(locations, []int{2, 4}, []uint32{1})
	refused(t, err, ErrInvalidArgument, "1 weights for 2 dimensions")
}

// A group would be under way when the library refuses this.
func TestAllToAllOnCUDAIsNotInPlace(t *testing.T) {
	world, err := Join(background, "cuda", &WorldOptions{Size: 2, Offline: true})
	if err != nil {
		t.Fatal(err)
	}
	defer world.Close()
	mesh, err := Init(background, "cuda", []int{2}, nil, &MeshOptions{World: world})
	if err != nil {
		t.Fatal(err)
	}
	values := []float32{1, 2}
	refused(t, AllToAll(background, mesh, "", values, values), ErrInvalidArgument, "never in place")
	refused(t, AllToAll(background, mesh, "", values, []float32{0, 0}), ErrUnsupported, "offline")
}

func TestTimeouts(t *testing.T) {
	for timeout, expected := range map[time.Duration]int64{
		0: 0, 1: 1, time.Millisecond: 1, time.Millisecond + 1: 2, math.MaxInt64: math.MaxInt64/int64(time.Millisecond) + 1,
	} {
		var a arguments
		if got := int64(a.milliseconds(timeout)); got != expected || a.err != nil {
			t.Errorf("%v: got %d, %v, expected %d", timeout, got, a.err, expected)
		}
	}
}

func TestWrongArguments(t *testing.T) {
	mesh := offline(t)
	world, err := mesh.World()
	if err != nil {
		t.Fatal(err)
	}
	defer world.Close()
	mustFail := func(status Status, part string) func(any, error) {
		t.Helper()
		return func(_ any, err error) { t.Helper(); refused(t, err, status, part) }
	}
	init := func(shape []int, names []string, options MeshOptions) (*Mesh, error) {
		options.World = world
		return Init(background, "cpu", shape, names, &options)
	}
	bad := func(made *Mesh, err error) (any, error) { return made, err }
	mustFail(ErrNotFound, "ep")(mesh.Size("ep"))
	mustFail(ErrNotFound, "dp, tp")(mesh.LocalRank("ep"))
	mustFail(ErrInvalidArgument, "2 dimensions")(mesh.LocalRank(""))
	mustFail(ErrInvalidArgument, `"t\x00p" has a NUL`)(mesh.Size("t\x00p"))
	mustFail(ErrInvalidArgument, `has a NUL`)(mesh.GroupRanks("t\x00p"))
	mustFail(ErrInvalidArgument, "")(mesh.Size("\xff\xfe"))
	mustFail(ErrInvalidArgument, "more than 32 bits")(mesh.TranslateRank("tp", 1<<40))
	mustFail(ErrInvalidArgument, "4")(mesh.TranslateRank("tp", 4))
	mustFail(ErrInvalidArgument, "shape[1] is -4")(bad(init([]int{2, -4}, nil, MeshOptions{})))
	mustFail(ErrInvalidArgument, "1 names for 2 dimensions")(bad(init([]int{2, 4}, []string{"a"}, MeshOptions{})))
	mustFail(ErrInvalidArgument, "a")(bad(init([]int{2, 4}, []string{"a", "a"}, MeshOptions{})))
	mustFail(ErrInvalidArgument, "")(bad(init([]int{2, 4}, []string{"a", ""}, MeshOptions{})))
	mustFail(ErrInvalidArgument, "num_ranks is 3")(bad(init([]int{2, 4}, nil, MeshOptions{Ranks: []int{0, 1, 2}})))
	mustFail(ErrInvalidArgument, "32 bits")(bad(init([]int{1 << 40, 1 << 40}, nil, MeshOptions{Ranks: []int{0}})))
	mustFail(ErrInvalidArgument, "")(bad(init([]int{1 << 40, 1 << 40}, nil, MeshOptions{})))
	mustFail(ErrInvalidArgument, "num_dim_options is 1")(bad(init([]int{2, 4}, nil, MeshOptions{Dims: make([]DimOptions, 1)})))
	mustFail(ErrInvalidArgument, "timeout")(bad(init([]int{2, 4}, nil, MeshOptions{Timeout: -time.Second})))
	mustFail(ErrInvalidArgument, "xpu")(bad(Init(background, "xpu", []int{2}, nil, &MeshOptions{World: world})))
	mustFail(ErrInvalidArgument, "num_dim_options is 2")(bad(mesh.Flatten(background, "f", CallOptions{Dims: make([]DimOptions, 2)})))
	mustFail(ErrInvalidArgument, "2 CallOptions")(bad(mesh.Flatten(background, "f", CallOptions{}, CallOptions{})))
	mustFail(ErrInvalidArgument, "num_dim_options is 1")(nil, mesh.Finalize(background, CallOptions{Dims: make([]DimOptions, 1)}))
	mustFail(ErrInvalidArgument, "timeout")(nil, mesh.Finalize(background, CallOptions{Timeout: -time.Second}))
	mustFail(ErrInvalidArgument, "num_dim_options is 1")(bad(mesh.Shrink(background, "dp", []int{1}, CallOptions{Dims: make([]DimOptions, 1)})))
	mustFail(ErrInvalidArgument, "3 names")(bad(mesh.Unflatten(background, "tp", []int{2, 2}, []string{"a", "b", "c"})))
	mustFail(ErrInvalidArgument, "index is -1")(bad(mesh.Submesh(-1, "tp")))
	mustFail(ErrInvalidArgument, "1 communicators")(bad(FromComms("cpu", []int{2, 4}, nil, []Comm{1}, false, nil)))
	mustFail(ErrCCL, "no live communicator")(bad(FromComms("cpu", []int{2}, nil, []Comm{1}, false, nil)))
	mustFail(ErrInvalidArgument, "")(bad(Concatenate()))
	mustFail(ErrUnsupported, "offline")(mesh.Comm(background, "tp"))
	mustFail(ErrUnsupported, "offline")(mesh.Proc("ncclAllReduce"))
	refused(t, AllReduce(background, mesh, "tp", []float32{1}, []float32{1}, Sum), ErrUnsupported, "offline")
	refused(t, mesh.Register(""), ErrInvalidArgument, "name")
	_, err = Join(background, "cpu", &WorldOptions{Size: 2, Rank: 2})
	refused(t, err, ErrInvalidArgument, "2")
	_, err = Join(background, "cpu", &WorldOptions{Size: 1, InitMethod: "file://\x00"})
	refused(t, err, ErrInvalidArgument, "NUL")
	_, err = Join(background, "cpu", &WorldOptions{Size: 1 << 40})
	refused(t, err, ErrInvalidArgument, "32 bits")
	device := 0
	_, err = Join(background, "cpu", &WorldOptions{Size: 1, Device: &device})
	refused(t, err, ErrInvalidArgument, "device")
	refused(t, mesh.Barrier(background, "tp", 0), ErrUnsupported, "DM_WORLD_OFFLINE")
	mustFail(ErrUnsupported, "DM_WORLD_OFFLINE")(mesh.AllGatherBytes(background, "tp", nil, 0))
	mustFail(ErrUnsupported, "DM_WORLD_OFFLINE")(world.BroadcastBytes(background, nil, 0, 0))
	mustFail(ErrInvalidArgument, "timeout")(world.AllGatherBytes(background, nil, -1))
	mustFail(ErrInvalidArgument, "xpu")(DefaultWorld(background, "xpu", 0))
	mustFail(ErrInvalidArgument, "timeout")(DefaultWorld(background, "cpu", -1))
}
