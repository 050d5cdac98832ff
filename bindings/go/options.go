package devicemesh

// #include "shim.h"
import "C"

import (
	"math"
	"time"
	"unsafe"
)

// MeshOptions are wishes for a mesh. The zero value, or nil, is the default everywhere.
type MeshOptions struct {
	// The world whose ranks the mesh has. nil: the process's default one, joined from the
	// launcher's environment at first use.
	World *World
	// World ranks, row-major in the mesh's shape. nil: 0 .. n-1.
	Ranks []int
	// Wishes for the dimensions, one for each. nil: none.
	Dims []DimOptions
	// How long each collective call of the mesh may take. 0: as long as the world's.
	Timeout time.Duration
	// Make a dimension's communicator at its first use, which is then collective over this rank's
	// group along it.
	Lazy bool
}

// DimOptions are wishes for one dimension's communicator.
type DimOptions struct {
	// Never share the communicator with one over the same ranks.
	OwnComm bool
	// The communicator's name in the library's logs. "": "mesh_" and the dimension's name.
	CommName string
	// An ncclConfig_t in C memory, copied. nil: none.
	NCCLConfig unsafe.Pointer
}

// init is the C struct of these options.
func (a *arguments) init(o *MeshOptions, flags C.uint32_t) *C.dm_init_options {
	if o == nil {
		o = &MeshOptions{}
	}
	if o.Lazy {
		flags |= C.DM_INIT_LAZY
	}
	options := &C.dm_init_options{struct_size: C.sizeof_dm_init_options, flags: flags, timeout_ms: a.milliseconds(o.Timeout)}
	if o.World != nil {
		token := o.World.token()
		if token == 0 {
			// To the library, NULL is the default world.
			a.fail(noWorld)
		}
		// Before there are pointers in it, which are not pinned yet.
		C.go_set_world(options, token)
	}
	options.ranks, options.dim_options = a.int32s("ranks", o.Ranks), a.dims(o.Dims)
	a.use(unsafe.Pointer(options))
	return options
}

// dims is the array of options for dimensions; NULL for none.
func (a *arguments) dims(wishes []DimOptions) *C.dm_dim_options {
	if len(wishes) == 0 {
		return nil
	}
	array := make([]C.dm_dim_options, len(wishes))
	for i, wish := range wishes {
		array[i].struct_size = C.sizeof_dm_dim_options
		array[i].nccl_config = wish.NCCLConfig
		array[i].comm_name = a.optional("the communicator's name", wish.CommName)
		if wish.OwnComm {
			array[i].flags = C.DM_DIM_OWN_COMM
		}
	}
	a.use(unsafe.Pointer(&array[0]))
	return &array[0]
}

func (a *arguments) shapeAndNames(shape []int, names []string) (*C.size_t, **C.char, C.size_t) {
	a.count("names", len(names), names != nil, len(shape))
	return a.sizes("shape", shape), a.texts("dimension name", names), C.size_t(len(shape))
}

// count refuses a list that is not as long as the shape: C would read past its end.
func (a *arguments) count(what string, length int, given bool, expected int) {
	if given && length != expected {
		a.refuse("there are %d %s for %d dimensions", length, what, expected)
	}
}

// product is the number of elements of a shape, -1 where an int cannot hold it.
func product(shape []int) int {
	n := 1
	for _, size := range shape {
		if size < 0 || (size > 0 && n > math.MaxInt/size) {
			return -1
		}
		n *= size
	}
	return n
}

// checkCounts refuses lists of the options that are not as long as the shape wants them.
func (a *arguments) checkCounts(o *MeshOptions, shape []int) {
	if o == nil {
		return
	}
	a.count("options", len(o.Dims), len(o.Dims) > 0, len(shape))
	if o.Ranks != nil && len(o.Ranks) != product(shape) {
		a.refuse("there are %d ranks for a mesh of shape %v", len(o.Ranks), shape)
	}
}

func worldOf(o *MeshOptions) *World {
	if o == nil {
		return nil
	}
	return o.World
}
