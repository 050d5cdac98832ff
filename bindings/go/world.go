package devicemesh

// #include "shim.h"
import "C"

import (
	"context"
	"sync"
	"time"
	"unsafe"
)

// WorldOptions say how to join a world. The zero value, or nil, takes everything from the launcher's environment.
type WorldOptions struct {
	// The number of ranks, this process's rank and its device index in its host. Size 0: all three come from the environment.
	Size, Rank, LocalRank int
	// Every wait of the library ends by then. 0: 10 minutes.
	Timeout time.Duration
	// Where the ranks meet: "env://" (as ""), "tcp://host:port" (rank 0 serves) or "file:///path".
	InitMethod string
	// A communicator library with NCCL's C API, by path or SONAME. "": the environment's, or the usual one.
	CCLLibrary string
	// A key-value service of the program's own instead of InitMethod's.
	Store Store
	// No rendezvous and no communicators: layouts and plans for any rank of any world.
	Offline bool
}

// A World is this process's place in a job: its rank, and the store where the ranks meet. All methods may be called from several goroutines.
//
// It is not closed by itself when nothing refers to it: other ranks would notice, at a moment that nobody chose.
type World struct {
	handle C.uintptr_t
	store  *callbackStore

	// Held while the world is freed, and while what it owns is read.
	lock sync.Mutex
}

// Join joins a world. Collective over it, except with Offline. deviceType is "cuda", "cpu", or "" for what this machine has.
//
// When ctx is done first, Join returns at once. What it was doing ends by the timeout at the latest, and is undone.
func Join(ctx context.Context, deviceType string, options *WorldOptions) (*World, error) {
	if err := ctx.Err(); err != nil {
		return nil, &Error{Status: ErrAborted, Message: "the world was not joined", Cause: context.Cause(ctx)}
	}
	if options == nil {
		options = &WorldOptions{}
	}
	// A world that is still being joined has no handle to abort, so a goroutine waits for it.
	type joined struct {
		world *World
		err   error
	}
	result := make(chan joined, 1)
	copied := *options
	go func() {
		world, err := join(deviceType, &copied)
		result <- joined{world, err}
	}()
	select {
	case made := <-result:
		return made.world, made.err
	case <-ctx.Done():
		go func() {
			if made := <-result; made.world != nil {
				made.world.Close()
			}
		}()
		return nil, &Error{Status: ErrAborted, Message: "joining the world was given up", Cause: context.Cause(ctx)}
	}
}

func join(deviceType string, options *WorldOptions) (*World, error) {
	var a arguments
	world := &World{store: newCallbackStore(options.Store)}
	made := &C.dm_world_options{
		struct_size: C.sizeof_dm_world_options,
		world_size:  a.int32("the world's size", options.Size),
		rank:        a.int32("the rank", options.Rank),
		local_rank:  a.int32("the local rank", options.LocalRank),
		timeout_ms:  a.milliseconds(options.Timeout),
		init_method: a.optional("the init method", options.InitMethod),
		ccl_library: a.optional("the communicator library", options.CCLLibrary),
	}
	if options.Offline {
		made.flags = C.DM_WORLD_OFFLINE
	}
	if world.store != nil {
		callbacks := new(C.dm_store_callbacks)
		C.go_store_callbacks(callbacks, C.uintptr_t(world.store.handle))
		a.pins.Pin(callbacks)
		made.store = callbacks
	}
	kind := a.optional("device type", deviceType)
	err := a.call(func() C.outcome { return C.go_world_init(kind, made, &world.handle) })
	if err != nil {
		err = world.explain(err)
		world.store.drop()
		return nil, err
	}
	return world, nil
}

// Close frees the world. Its meshes keep what they need of it; communicators live on. A second Close does nothing. The error is always nil.
func (w *World) Close() error {
	if w != nil {
		w.lock.Lock()
		defer w.lock.Unlock()
		C.go_world_free(w.handle)
	}
	return nil
}

// token is the handle, 0 (which the library refuses) for nil.
func (w *World) token() C.uintptr_t {
	if w == nil {
		return 0
	}
	return w.handle
}

// explain adds what the program's own store answered to an error that came of it.
func (w *World) explain(err error) error {
	if failed, ok := err.(*Error); ok && w != nil && w.store != nil && failed.Status == ErrStore && failed.Cause == nil {
		failed.Cause = w.store.failure()
	}
	return err
}

// end aborts the world: the default ones for nil.
func (w *World) end() {
	C.go_drop_outcome(C.go_world_abort(w.token()))
}

// Rank is this process's rank, 0 to Size - 1.
func (w *World) Rank() (int, error) {
	var rank C.int32_t
	err := failure(C.go_world_rank(w.token(), &rank))
	return int(rank), err
}

// Size is the number of ranks.
func (w *World) Size() (int, error) {
	var size C.int32_t
	err := failure(C.go_world_size(w.token(), &size))
	return int(size), err
}

// Barrier returns when every rank has called it. timeout 0: the world's. When ctx is done first, the world is aborted as by Abort.
func (w *World) Barrier(ctx context.Context, timeout time.Duration) error {
	var a arguments
	limit := a.milliseconds(timeout)
	return w.explain(w.collective(ctx, func() error {
		return a.call(func() C.outcome { return C.go_world_barrier(w.token(), limit) })
	}))
}

// Locations are where the ranks are, in their order, for PlanRanks. Collective over the world. location is this rank's, far to near
// ("rack1/host3/nvl0"); "": the name of its host. When ctx is done first, the world is aborted as by Abort.
func (w *World) Locations(ctx context.Context, location string) ([]string, error) {
	var a arguments
	var paths **C.char
	own := a.optional("location", location)
	err := w.collective(ctx, func() error {
		return a.call(func() C.outcome { return C.go_world_locations(w.token(), own, &paths) })
	})
	if err != nil {
		return nil, w.explain(err)
	}
	// The list is the world's, which another goroutine may close.
	w.lock.Lock()
	defer w.lock.Unlock()
	size, err := w.Size()
	if err != nil {
		return nil, err
	}
	locations := make([]string, size)
	for i, path := range unsafe.Slice(paths, size) {
		locations[i] = C.GoString(path)
	}
	return locations, nil
}

// Abort ends this rank's part in the world at once: every blocked call of it returns with ErrAborted, and its meshes are aborted. Other ranks that wait
// for this one get ErrPeerLost.
func (w *World) Abort() error {
	if w.token() == 0 {
		// To the library, that would be the default ones.
		return &Error{Status: ErrInvalidHandle, Message: "the world is nil; AbortDefaultWorlds aborts the default ones"}
	}
	return failure(C.go_world_abort(w.handle))
}

// AbortDefaultWorlds aborts the worlds that Init joins by itself, also while one is being joined. This process joins no other then.
func AbortDefaultWorlds() error {
	return failure(C.go_world_abort(0))
}

// collective is a call that the world's end ends; a nil world's fails by itself.
func (w *World) collective(ctx context.Context, call func() error) error {
	if w.token() == 0 {
		return call()
	}
	return until(ctx, w.end, call)
}
