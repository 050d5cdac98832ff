package devicemesh

// #include "shim.h"
import "C"

import "runtime"

// Shape gives the sizes of the dimensions, in order.
func (m *Mesh) Shape() ([]int, error) {
	defer runtime.KeepAlive(m)
	sizes, err := listed(func(sizes *C.int32_t, capacity C.size_t, length *C.size_t) C.outcome {
		return C.go_shape(m.token(), sizes, capacity, length)
	})
	return ints(sizes), err
}

// Size gives the number of ranks along a dimension. "" means the whole view.
func (m *Mesh) Size(dim string) (int, error) {
	var a arguments
	var size C.int32_t
	along := a.optional("dimension name", dim)
	err := m.call(&a, func(mesh C.uintptr_t) C.outcome { return C.go_size(mesh, along, &size) })
	return int(size), err
}

// DeviceType gives "cuda" or "cpu": where the buffers of the mesh's collectives lie.
func (m *Mesh) DeviceType() (string, error) {
	var kind *C.char
	err := m.call(&arguments{}, func(mesh C.uintptr_t) C.outcome { return C.go_device_type(mesh, &kind) })
	return C.GoString(kind), err
}

// IsMember says whether this process's rank is in the view. It never gives ErrNotMember, and
// answers also when the mesh has ended.
func (m *Mesh) IsMember() (bool, error) {
	var member C.bool
	err := m.call(&arguments{}, func(mesh C.uintptr_t) C.outcome { return C.go_is_member(mesh, &member) })
	return bool(member), err
}

// Rank gives this process's rank in the world, also when it is not in the mesh.
func (m *Mesh) Rank() (int, error) {
	var rank C.int32_t
	err := m.call(&arguments{}, func(mesh C.uintptr_t) C.outcome { return C.go_rank(mesh, &rank) })
	return int(rank), err
}

// LocalRank gives this rank's coordinate along a dimension, which is also its rank in that
// dimension's communicator.
func (m *Mesh) LocalRank(dim string) (int, error) {
	var a arguments
	var rank C.int32_t
	along := a.optional("dimension name", dim)
	err := m.call(&a, func(mesh C.uintptr_t) C.outcome { return C.go_get_local_rank(mesh, along, &rank) })
	return int(rank), err
}

// Coordinate gives this rank's coordinates in the view, one for each dimension.
func (m *Mesh) Coordinate() ([]int, error) {
	defer runtime.KeepAlive(m)
	coordinate, err := listed(func(coordinate *C.int32_t, capacity C.size_t, length *C.size_t) C.outcome {
		return C.go_get_coordinate(m.token(), coordinate, capacity, length)
	})
	return ints(coordinate), err
}

// CoordinateOf gives the coordinates in the view of any of its ranks, by world rank.
func (m *Mesh) CoordinateOf(worldRank int) ([]int, error) {
	var a arguments
	var coordinate []C.int32_t
	rank := a.int32("the world rank", worldRank)
	err := m.asked(&a, func() (err error) {
		coordinate, err = listed(func(coordinate *C.int32_t, capacity C.size_t, length *C.size_t) C.outcome {
			return C.go_coordinate_of(m.token(), rank, coordinate, capacity, length)
		})
		return err
	})
	return ints(coordinate), err
}

// Ranks gives the world ranks of the view, row-major in its shape.
func (m *Mesh) Ranks() ([]int, error) {
	defer runtime.KeepAlive(m)
	ranks, err := listed(func(ranks *C.int32_t, capacity C.size_t, length *C.size_t) C.outcome {
		return C.go_ranks(m.token(), ranks, capacity, length)
	})
	return ints(ranks), err
}

// GroupRanks gives the world ranks of this rank's group along a dimension, in the order of their
// ranks in the communicator.
func (m *Mesh) GroupRanks(dim string) ([]int, error) {
	var a arguments
	var ranks []C.int32_t
	along := a.optional("dimension name", dim)
	err := m.asked(&a, func() (err error) {
		ranks, err = listed(func(ranks *C.int32_t, capacity C.size_t, length *C.size_t) C.outcome {
			return C.go_group_ranks(m.token(), along, ranks, capacity, length)
		})
		return err
	})
	return ints(ranks), err
}

// ReplicaGroups gives all groups along a dimension, as XLA's replica groups: each rank of the root
// mesh is in exactly one.
func (m *Mesh) ReplicaGroups(dim string) ([][]int, error) {
	var a arguments
	var ranks []C.int32_t
	along := a.optional("dimension name", dim)
	err := m.asked(&a, func() (err error) {
		ranks, err = listed(func(ranks *C.int32_t, capacity C.size_t, length *C.size_t) C.outcome {
			return C.go_replica_groups(m.token(), along, ranks, capacity, length)
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	size, err := m.Size(dim)
	if err != nil {
		return nil, err
	}
	var groups [][]int
	for at := 0; at < len(ranks); at += size {
		groups = append(groups, ints(ranks[at:at+size]))
	}
	return groups, nil
}

// asked asks this mesh a question.
func (m *Mesh) asked(a *arguments, question func() error) error {
	defer runtime.KeepAlive(m)
	return a.asked(question)
}

// TranslateRank gives the world rank of the member with rank dimRank along a dimension, in this
// rank's group along it. TranslateWorldRank is the way back.
func (m *Mesh) TranslateRank(dim string, dimRank int) (int, error) {
	var a arguments
	var rank C.int32_t
	along, member := a.optional("dimension name", dim), a.int32("the rank along the dimension", dimRank)
	err := m.call(&a, func(mesh C.uintptr_t) C.outcome { return C.go_translate_rank(mesh, along, member, &rank) })
	return int(rank), err
}

// TranslateWorldRank gives the rank along a dimension of a world rank in this rank's group along
// it: the number that Send, Recv and root arguments take. It gives ErrNotMember for a rank of
// another group.
func (m *Mesh) TranslateWorldRank(dim string, worldRank int) (int, error) {
	var a arguments
	var rank C.int32_t
	along, member := a.optional("dimension name", dim), a.int32("the world rank", worldRank)
	err := m.call(&a, func(mesh C.uintptr_t) C.outcome { return C.go_translate_world_rank(mesh, along, member, &rank) })
	return int(rank), err
}

// RankNone is no rank: what Neighbor gives past the end of a dimension.
const RankNone = C.DM_RANK_NONE

// Neighbor gives the rank along a dimension that lies offset steps from this rank. Send and Recv
// take it as it is; TranslateRank makes a world rank of it. Past the end it gives RankNone, or with
// wrap continues from the other end.
func (m *Mesh) Neighbor(dim string, offset int, wrap bool) (int, error) {
	var a arguments
	var rank C.int32_t
	along, steps := a.optional("dimension name", dim), a.int32("the offset", offset)
	err := m.call(&a, func(mesh C.uintptr_t) C.outcome { return C.go_neighbor(mesh, along, steps, C.bool(wrap), &rank) })
	return int(rank), err
}

// Equal says whether two views have equal ranks, shapes, names and device types.
func (m *Mesh) Equal(other *Mesh) (bool, error) {
	var equal C.bool
	defer runtime.KeepAlive(other)
	err := m.call(&arguments{}, func(mesh C.uintptr_t) C.outcome { return C.go_equal(mesh, other.token(), &equal) })
	return bool(equal), err
}

// Hash gives a hash of what Equal compares. Equal views have equal hashes, on every rank and in
// every run.
func (m *Mesh) Hash() (uint64, error) {
	var hash C.uint64_t
	err := m.call(&arguments{}, func(mesh C.uintptr_t) C.outcome { return C.go_hash(mesh, &hash) })
	return uint64(hash), err
}

// String gives the view as PyTorch prints it, DeviceMesh((dp=2, tp=4), 'cuda', stride=(4, 1)), or
// the error of a mesh that has none.
func (m *Mesh) String() string {
	defer runtime.KeepAlive(m)
	text, err := textOf(func(text *C.char, capacity C.size_t, length *C.size_t) C.outcome {
		return C.go_describe(m.token(), text, capacity, length)
	})
	if err != nil {
		return "DeviceMesh(" + err.Error() + ")"
	}
	return text
}

// Serialize gives the view as one line of JSON. Deserialize makes the mesh again from it: from a
// checkpoint, in another job, or in another language.
func (m *Mesh) Serialize() (string, error) {
	defer runtime.KeepAlive(m)
	return textOf(func(text *C.char, capacity C.size_t, length *C.size_t) C.outcome {
		return C.go_serialize(m.token(), text, capacity, length)
	})
}
