package devicemesh

// #include "shim.h"
import "C"

import (
	"math"
	"unsafe"
)

// A Placement says what one mesh dimension does with a tensor. The zero value replicates the
// tensor. Shard splits a dimension of the tensor. Partial says that each rank holds a part of a
// sum.
type Placement struct {
	placement C.dm_placement
}

// Shard splits a dimension of the tensor. When several mesh dimensions shard one tensor dimension,
// a lower order splits first. Equal orders split in the order of the mesh.
func Shard(tensorDim, order int) Placement {
	// A value that does not fit becomes a dimension that no tensor has, so the library refuses it.
	fit := func(value int) C.int32_t { return C.int32_t(max(math.MinInt32, min(math.MaxInt32, value))) }
	return Placement{C.dm_placement{kind: C.DM_SHARD, tensor_dim: fit(tensorDim), order: fit(order)}}
}

// Replicate says that every rank along the mesh dimension holds the same.
func Replicate() Placement {
	return Placement{}
}

// Partial says that every rank along the mesh dimension holds a part of a sum, or of another
// reduction, that is still to be made. Each part has the whole shape.
func Partial() Placement {
	return Placement{C.dm_placement{kind: C.DM_PARTIAL}}
}

// LocalShard gives the shape and the offset of one rank's block of a tensor. worldRank is a rank of
// the mesh, and -1 means this process's. Local. placements has one element for each dimension of
// the mesh.
func (m *Mesh) LocalShard(placements []Placement, tensorShape []int, worldRank int) (shape, offset []int, err error) {
	var a arguments
	array := make([]C.dm_placement, len(placements)+1)
	for i, placement := range placements {
		array[i] = placement.placement
	}
	lengths, ndim, whose := a.counts("the tensor's shape", tensorShape), len(tensorShape), a.int32("the rank", worldRank)
	local, start := make([]C.size_t, ndim+1), make([]C.size_t, ndim+1)
	err = m.call(&a, func(mesh C.uintptr_t) C.outcome {
		return C.go_local_shard(mesh, &array[0], C.size_t(len(placements)), lengths, C.size_t(ndim), whose, &local[0], &start[0])
	})
	if err != nil {
		return nil, nil, err
	}
	return ints(local[:ndim]), ints(start[:ndim]), nil
}

// PlanRanks gives ranks for MeshOptions.Ranks. They keep the dimensions with the most traffic
// inside the closest domains of the machine. The report is a line of JSON that says what each
// dimension crosses. Local. locations are the ranks' paths (World.Locations). traffic has a weight
// for each dimension. nil means that later dimensions have more traffic.
func PlanRanks(locations []string, shape []int, traffic []uint32) (ranks []int, report string, err error) {
	var a arguments
	a.count("weights", len(traffic), traffic != nil, len(shape))
	n := product(shape)
	if n < 0 || n > len(locations) {
		a.refuse("the shape %v has more ranks than there are locations, %d", shape, len(locations))
		n = 0
	}
	if locations == nil {
		locations = []string{}
	}
	answer := make([]C.int32_t, n+1)
	options := &C.dm_plan_options{
		struct_size: C.sizeof_dm_plan_options,
		world_size:  a.int32("the number of locations", len(locations)),
		locations:   a.texts("location", locations),
		shape:       a.shape(shape),
		ndim:        C.size_t(len(shape)),
	}
	a.use(unsafe.Pointer(options))
	if len(traffic) > 0 {
		weights := make([]C.uint32_t, len(traffic))
		for i, weight := range traffic {
			weights[i] = C.uint32_t(weight)
		}
		a.use(unsafe.Pointer(&weights[0]))
		options.traffic = &weights[0]
	}
	err = a.asked(func() error {
		report, err = textOf(func(text *C.char, capacity C.size_t, length *C.size_t) C.outcome {
			return C.go_plan_ranks(options, &answer[0], text, capacity, length)
		})
		return err
	})
	if err != nil {
		return nil, "", err
	}
	return ints(answer[:n]), report, nil
}
