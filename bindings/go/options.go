package devicemesh

// #include "shim.h"
import "C"

import (
	"math"
	"time"
	"unsafe"
)

// MeshOptions are the options of a mesh. The zero value of each field is its default, and nil
// means all defaults.
type MeshOptions struct {
	// The world whose ranks the mesh has. nil: the process's default world, which the first use
	// joins from the launcher's environment.
	World *World
	// World ranks, row-major in the mesh's shape. nil: 0 .. n-1.
	Ranks []int
	// Options of the dimensions, one for each. nil: all defaults.
	Dims []DimOptions
	// How long each collective call of the mesh may take. 0: as long as the world's.
	Timeout time.Duration
	// Make a dimension's communicator at its first use. The first use is then collective over this
	// rank's group along the dimension.
	Lazy bool
}

// DimOptions are the options of one dimension's communicator.
type DimOptions struct {
	// Do not share the communicator with other dimensions over the same ranks.
	OwnComm bool
	// The communicator's name in the library's logs. "": "mesh_" and the dimension's name.
	CommName string
	// The address of an ncclConfig_t in C memory, which the call copies. nil: none.
	NCCLConfig unsafe.Pointer
}

// CallOptions are the options of a collective call that gives a mesh new dimensions, or ends it.
// Such a call takes at most one of them. Without it everything is the default.
type CallOptions struct {
	// How long the call may take. When it takes longer, it fails with ErrTimeout; a context that is
	// done aborts the mesh instead. 0: as long as the mesh's calls.
	Timeout time.Duration
	// Options of the dimensions that the call makes, one for each. nil: all defaults.
	Dims []DimOptions
}

// callOptions gives the C struct of the options of a call, or NULL.
func (a *arguments) callOptions(given []CallOptions) *C.dm_call_options {
	if len(given) > 1 {
		a.refuse("there are %d CallOptions for one call", len(given))
	}
	if len(given) == 0 {
		return nil
	}
	wishes := given[0].Dims
	options := &C.dm_call_options{
		struct_size:     C.sizeof_dm_call_options,
		timeout_ms:      a.milliseconds(given[0].Timeout),
		dim_options:     a.dims(wishes),
		num_dim_options: C.size_t(len(wishes)),
	}
	a.use(unsafe.Pointer(options))
	return options
}

// init gives the C struct of these options.
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
			// The library would take NULL for the default world.
			a.fail(noWorld)
		}
		// This C call comes before the struct holds pointers, because those are not pinned yet.
		C.go_set_world(options, token)
	}
	options.ranks, options.num_ranks = a.int32s("ranks", o.Ranks), C.size_t(len(o.Ranks))
	options.dim_options, options.num_dim_options = a.dims(o.Dims), C.size_t(len(o.Dims))
	a.use(unsafe.Pointer(options))
	return options
}

// dims gives the C array of options for dimensions, or NULL.
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

func (a *arguments) shapeAndNames(shape []int, names []string) (*C.int32_t, C.size_t, **C.char) {
	a.count("names", len(names), names != nil, len(shape))
	return a.shape(shape), C.size_t(len(shape)), a.texts("dimension name", names)
}

// count refuses a list with another length than the shape, because C would read past its end.
func (a *arguments) count(what string, length int, given bool, expected int) {
	if given && length != expected {
		a.refuse("there are %d %s for %d dimensions", length, what, expected)
	}
}

// product gives the number of elements of a shape, or -1 if an int cannot hold it.
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

func worldOf(o *MeshOptions) *World {
	if o == nil {
		return nil
	}
	return o.World
}
