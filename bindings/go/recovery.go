package devicemesh

// #include "shim.h"
import "C"

import (
	"context"
	"runtime"
	"time"
	"unsafe"
)

// RecoverOptions say how a job recovers from lost ranks. All fields but Timeout and HasState must
// be the same on all ranks that call. The zero value of each field is its default.
type RecoverOptions struct {
	// The dimension of replicas: an index of it that cannot be filled is left out with all its
	// ranks. "": the outermost dimension.
	Dim string
	// How long the call may take. 0: as long as the mesh's calls. A rank that is not in the mesh
	// waits without a limit.
	Timeout time.Duration
	// How long to wait for processes that can take the places of lost ranks, once all living ranks
	// are here.
	Replace time.Duration
	// After which time the ranks are left out that are not known to be lost and have not called.
	// 0: never. It needs MinSize.
	Silent time.Duration
	// The least size of Dim with which the job goes on. 0: 1.
	MinSize int
	// This rank, which has joined, has received the state of the training.
	HasState bool
	// The job goes on also where no rank that is left has the state of some shard.
	AnyState bool
	// Options of the dimensions, one for each. nil: those that the dimensions had.
	Dims []DimOptions
	// The outermost dimension may get more indices, when new processes fill them.
	Grow bool
	// The greatest size of the outermost dimension with Grow. 0: no limit.
	MaxSize int
}

// Recovery says what the recovery that made a mesh has come to.
type Recovery struct {
	Epoch         int64 // The epoch of the mesh. The job starts in epoch 0.
	PreviousEpoch int64 // The epoch of the mesh that this rank had before; -1 where it had none.
	LostRanks     []int // The world ranks that were lost or left out since that epoch.
	JoinedRanks   []int // The world ranks of the mesh that need the state of the training.
	// This rank's coordinate in the mesh before and in the mesh; nil where it had none.
	OldCoordinate, NewCoordinate []int
	// The rank along the dimension of replicas that has the state of this rank's shard; RankNone
	// where no rank has it.
	StateRoot int
	HasJoined bool // Whether this rank is one of JoinedRanks.
}

// Recover gives the mesh with which the job goes on after ranks were lost: in its full shape where
// spares take the places of the lost ranks, and smaller along options.Dim where they cannot. This
// mesh and all others of its world end. Recovery of the result says more. nil options are the
// defaults.
//
// Collective over the ranks of the world that live. A rank that is not in the mesh waits in the
// call until it gets a place, and gets ErrAborted when the job has ended. When ctx is done
// meanwhile, the world is aborted.
func (m *Mesh) Recover(ctx context.Context, options *RecoverOptions) (*Mesh, error) {
	var a arguments
	defer runtime.KeepAlive(m)
	if options == nil {
		options = &RecoverOptions{}
	}
	var flags C.uint32_t
	if options.HasState {
		flags |= C.DM_RECOVER_HAS_STATE
	}
	if options.AnyState {
		flags |= C.DM_RECOVER_ANY_STATE
	}
	if options.Grow {
		flags |= C.DM_RECOVER_GROW
	}
	chosen := &C.dm_recover_options{
		struct_size:     C.sizeof_dm_recover_options,
		flags:           flags,
		min_size:        a.int32("MinSize", options.MinSize),
		dim:             a.optional("dimension name", options.Dim),
		timeout_ms:      a.milliseconds(options.Timeout),
		replace_ms:      a.milliseconds(options.Replace),
		silent_ms:       a.milliseconds(options.Silent),
		dim_options:     a.dims(options.Dims),
		num_dim_options: C.size_t(len(options.Dims)),
		max_size:        a.int32("MaxSize", options.MaxSize),
	}
	a.use(unsafe.Pointer(chosen))
	world := m.worldOfCall()
	defer world.Close()
	return a.mesh(ctx, m.itsWorld(), world.end, func(out *C.uintptr_t) C.outcome {
		return C.go_recover(m.token(), chosen, out)
	})
}

// Recovery says what the recovery that made this mesh has come to. Local. For a mesh that no
// recovery made, nobody was lost and nobody has joined.
func (m *Mesh) Recovery() (Recovery, error) {
	var a arguments
	told := &C.dm_recovery{struct_size: C.sizeof_dm_recovery}
	// The lists belong to the mesh, which another goroutine may close.
	token := C.uintptr_t(0)
	if m != nil && m.hold() {
		defer m.release()
		token = m.handle
	}
	if err := a.call(func() C.outcome { return C.go_get_recovery(token, told) }); err != nil {
		return Recovery{}, err
	}
	return Recovery{
		Epoch: int64(told.epoch), PreviousEpoch: int64(told.previous_epoch),
		LostRanks: copied(told.lost_ranks, told.num_lost), JoinedRanks: copied(told.joined_ranks, told.num_joined),
		OldCoordinate: copied(told.old_coordinate, told.ndim), NewCoordinate: copied(told.new_coordinate, told.ndim),
		StateRoot: int(told.state_root), HasJoined: told.has_joined != 0,
	}, nil
}

// copied gives the elements of an array that a mesh owns; nil for NULL.
func copied(first *C.int32_t, count C.size_t) []int {
	if first == nil {
		return nil
	}
	numbers := make([]int, count)
	for i, number := range unsafe.Slice(first, int(count)) {
		numbers[i] = int(number)
	}
	return numbers
}
