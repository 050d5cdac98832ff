package devicemesh

// #include "shim.h"
import "C"

import (
	"context"
	"sync/atomic"
	"time"
	"unsafe"
)

// WorldOptions say how to join a world. The zero value, or nil, takes everything from the
// launcher's environment.
type WorldOptions struct {
	// Size is the number of ranks, Rank this process's rank, and LocalRank its rank on its host,
	// from which its device follows. If Size is 0, all three come from the launcher's environment.
	// Ranks that leave LocalRank at 0 get the numbers that no other rank of their host has, the
	// lowest world rank first.
	Size, Rank, LocalRank int
	// The index of the device on which communicators are made, among those that this process sees.
	// nil: the local rank modulo the number of devices. Name the device where the program uses
	// another one: Join runs on a goroutine of its own, so it does not see which device is current
	// on the caller's thread. It is an error on cpu.
	Device *int
	// How long the joining may take, and after it each call of the world that has no timeout of
	// its own. It does not bound work on a CUDA stream. 0: 10 minutes.
	Timeout time.Duration
	// Where the ranks meet: "env://" (as ""), "tcp://host:port" (rank 0 serves) or "file:///path".
	InitMethod string
	// A communicator library with NCCL's C API, by path or SONAME. "": the environment's, or the
	// usual one.
	CCLLibrary string
	// A key-value service of the program's own instead of InitMethod's.
	Store Store
	// The world has no rendezvous and no communicators. It serves layouts and plans for any rank
	// of any world.
	Offline bool
	// Whether this process joins a running job in the place of a lost rank, or a new world. The
	// zero value leaves it to the environment variable DM_JOIN.
	Join JoinWay
}

// A JoinWay says whether a process joins a running job.
type JoinWay uint32

const (
	// JoinAuto: DM_JOIN says it. Without it, the process joins a running job where the earlier
	// process of this rank is known to be lost.
	JoinAuto JoinWay = C.DM_JOIN_AUTO
	// JoinNew: a new world, with all its ranks.
	JoinNew JoinWay = C.DM_JOIN_NEW
	// JoinRunning: the running job, where there is one.
	JoinRunning JoinWay = C.DM_JOIN_RUNNING
)

// A World is this process's place in a job: its rank, and the store where the ranks meet. All
// methods may be called from several goroutines. The garbage collector does not close a World,
// because other ranks would notice that at an arbitrary moment.
type World struct {
	lasting
	store *callbackStore
}

// noWorld is the error of a mesh that is to be made in a closed world. The call must not reach the
// library, where no world in the options means a default world.
var noWorld = refusal(ErrInvalidHandle, "the world was closed or never joined: it is not a live dm_world")

// Join joins a world. Collective over it, except with Offline. deviceType is "cuda", "cpu", or ""
// for what this machine has.
//
// When ctx is done first, Join returns at once. The library ends and undoes the joining soon after.
func Join(ctx context.Context, deviceType string, options *WorldOptions) (*World, error) {
	if err := wrong(ctx); err != nil {
		return nil, err
	}
	if err := done(ctx); err != nil {
		return nil, err
	}
	if options == nil {
		options = &WorldOptions{}
	}
	// A store in Go may block in a way that nothing can end. So the joining runs on a goroutine of
	// its own.
	type joined struct {
		world *World
		err   error
	}
	result := make(chan joined, 1)
	copied, early := *options, new(uintptr)
	go func() {
		world, err := join(deviceType, &copied, early)
		result <- joined{world, err}
	}()
	select {
	case made := <-result:
		return made.world, made.err
	case <-ctx.Done():
		go func() {
			for {
				// The library gives a token for aborting from the beginning of the joining to its
				// end.
				if token := atomic.LoadUintptr(early); token != 0 {
					C.go_drop_outcome(C.go_world_abort(C.uintptr_t(token)))
				}
				select {
				case made := <-result:
					made.world.Close()
					return
				case <-time.After(time.Millisecond):
				}
			}
		}()
		failed := refusal(ErrAborted, "joining the world was given up")
		failed.Cause = causeOf(ctx)
		return nil, failed
	}
}

// join joins a world. Meanwhile early holds the token that aborts the joining.
func join(deviceType string, options *WorldOptions, early *uintptr) (*World, error) {
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
		join:        C.uint32_t(options.Join),
	}
	made.joining_out = (**C.dm_world)(unsafe.Pointer(early))
	a.use(unsafe.Pointer(early))
	if options.Offline {
		made.flags |= C.DM_WORLD_OFFLINE
	}
	if options.Device != nil {
		made.flags |= C.DM_WORLD_DEVICE
		made.device = a.int32("the device", *options.Device)
	}
	if world.store != nil {
		callbacks := new(C.dm_store_callbacks)
		_, decides := options.Store.(CompareSetter)
		C.go_store_callbacks(callbacks, C.uintptr_t(world.store.handle), C.bool(decides))
		a.use(unsafe.Pointer(callbacks))
		made.store = callbacks
	}
	kind := a.optional("device type", deviceType)
	err := a.call(func() C.outcome { return C.go_world_init(kind, made, &world.handle) })
	if err != nil {
		err = world.explain(0, err)
		world.store.drop()
		return nil, err
	}
	return world, nil
}

// DefaultWorld gives the default world of a device type, the one that Init joins where its options
// name none. It joins that world first, from the launcher's environment, where this process is not
// in it: collective then, local otherwise. timeout bounds the joining, and 0 means 10 minutes.
// Close frees the handle, and this process stays in the default world. After AbortDefaultWorlds,
// FinalizeDefaultWorlds, or an Abort or Finalize of this world, the next call joins anew, with all
// ranks. A join takes the current device of the calling goroutine's thread, where it has one, so
// lock the goroutine to its thread (runtime.LockOSThread) before the device is chosen. When ctx is
// done first, the default worlds are aborted as by AbortDefaultWorlds.
func DefaultWorld(ctx context.Context, deviceType string, timeout time.Duration) (*World, error) {
	var a arguments
	world := &World{}
	kind, limit := a.optional("device type", deviceType), a.milliseconds(timeout)
	if a.err != nil {
		return nil, a.err
	}
	err := until(ctx, (*World)(nil).end, func() error {
		return a.call(func() C.outcome { return C.go_default_world(kind, limit, &world.handle) })
	})
	if err != nil {
		return nil, err
	}
	return world, nil
}

// WorldInfo says who this process is in a world, where it runs, and what makes its communicators.
type WorldInfo struct {
	Rank, Size int // This process's rank, and the number of ranks.
	// This rank's number among the ranks of its host, and their number. In an offline world all
	// ranks count as ranks of one host.
	LocalRank, LocalSize int
	// The number of this host, 0 to NumHosts - 1, in the order of the lowest rank on each.
	Host, NumHosts int
	// The index of this rank's device, among those that this process sees. -1: on cpu, in an
	// offline world, and beside RCCL where the options name none.
	Device int
	// The version of the communicator library as ncclGetVersion gives it (22707 is 2.27.7). 0 in an
	// offline world.
	CCLVersion int
	DeviceType string // "cuda" or "cpu".
	// The communicator library: its path or SONAME, or the name of the embedded host engine. "" in
	// an offline world.
	Library string
	// The epoch in which this process is: 0 until a recovery has given a mesh.
	Epoch int64
	// The number of processes that have joined the world under this rank before this one.
	Ticket int64
}

// Info says who this process is in the world. Local. It answers after the world has ended, too.
func (w *World) Info() (WorldInfo, error) {
	var a arguments
	info := &C.dm_world_info{struct_size: C.sizeof_dm_world_info}
	// The strings belong to the world, which another goroutine may close.
	token := C.uintptr_t(0)
	if w != nil && w.hold() {
		defer w.release()
		token = w.handle
	}
	if err := a.call(func() C.outcome { return C.go_world_get_info(token, info) }); err != nil {
		return WorldInfo{}, err
	}
	return WorldInfo{
		Rank: int(info.rank), Size: int(info.size), LocalRank: int(info.local_rank), LocalSize: int(info.local_size),
		Host: int(info.host), NumHosts: int(info.num_hosts), Device: int(info.device), CCLVersion: int(info.ccl_version),
		DeviceType: C.GoString(info.device_type), Library: C.GoString(info.library),
		Epoch: int64(info.epoch), Ticket: int64(info.ticket),
	}, nil
}

// Waiting gives the number of processes that wait to join the running job. The next Mesh.Recover
// lets them in where there is a place. Local, and cheap enough for every step. Ranks may get
// different numbers for a moment, so they agree before they call Recover for it.
func (w *World) Waiting() (int, error) {
	var a arguments
	count := new(C.int32_t)
	token := C.uintptr_t(0)
	if w != nil && w.hold() {
		defer w.release()
		token = w.handle
	}
	err := a.call(func() C.outcome { return C.go_waiting(token, count) })
	return int(*count), err
}

// Close frees the world. Its meshes keep what they need of it, and communicators live on. A second
// Close does nothing. The error is always nil.
//
// It does not wait. A call of another goroutine that is blocked in the world goes on, and its
// context can end it as before; the world is freed when the last such call has returned. Later
// calls answer ErrInvalidHandle.
func (w *World) Close() error {
	if w != nil && w.lasting.close() {
		C.go_world_free(w.handle)
	}
	return nil
}

// token gives the handle. It is 0, which the library refuses, for a nil or closed World.
func (w *World) token() C.uintptr_t {
	if w == nil {
		return 0
	}
	return w.lasting.token()
}

// release undoes hold.
func (w *World) release() {
	if w.lasting.release() {
		C.go_world_free(w.handle)
	}
}

// noted gives what explain needs to know of the beginning of a call.
func (w *World) noted() int {
	if w == nil {
		return 0
	}
	return w.store.noted()
}

// explain adds the error of the program's own store to an error that the store has caused. began is
// what noted gave when the call began.
func (w *World) explain(began int, err error) error {
	if failed, ok := err.(*Error); ok && w != nil && w.store != nil && failed.Cause == nil {
		failed.Cause = w.store.failure(began, failed.Status)
	}
	return err
}

// end aborts the world, which the caller holds. For nil it aborts the default worlds. A world that
// was never joined has no handle, and must not be mistaken for nil.
func (w *World) end() {
	switch {
	case w == nil:
		C.go_drop_outcome(C.go_default_world_abort())
	case w.handle != 0:
		C.go_drop_outcome(C.go_world_abort(w.handle))
	}
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

// Barrier returns when every rank has called it. A timeout of 0 means the world's. When ctx is
// done first, the world is aborted as by Abort.
func (w *World) Barrier(ctx context.Context, timeout time.Duration) error {
	var a arguments
	limit := a.milliseconds(timeout)
	return w.collective(ctx, &a, func(world C.uintptr_t) C.outcome { return C.go_world_barrier(world, limit) })
}

// Locations gives the locations of all ranks, in rank order, for PlanRanks. Collective over the
// world. location is this rank's own, from far to near ("rack1/host3/nvl0"). "" means the name of
// its host. A timeout of 0 means the world's. When ctx is done first, the world is aborted as by
// Abort.
func (w *World) Locations(ctx context.Context, location string, timeout time.Duration) ([]string, error) {
	var a arguments
	var paths **C.char
	own, limit := a.optional("location", location), a.milliseconds(timeout)
	// The list belongs to the world, which another goroutine may close.
	if w != nil && w.hold() {
		defer w.release()
	}
	// A recovery of another goroutine can make the world larger after the list was made, so the size
	// is asked before. Where that fails, the call itself gives the error.
	var size C.int32_t
	sizeErr := failure(C.go_world_size(w.token(), &size))
	err := w.collective(ctx, &a, func(world C.uintptr_t) C.outcome { return C.go_world_locations(world, own, limit, &paths) })
	if err == nil {
		err = sizeErr
	}
	if err != nil {
		return nil, err
	}
	locations := make([]string, size)
	for i, path := range unsafe.Slice(paths, size) {
		locations[i] = C.GoString(path)
	}
	return locations, nil
}

// Abort ends this rank's part in the world at once: every blocked call of it returns with
// ErrAborted, and its meshes are aborted. Other ranks that wait for this one get ErrPeerLost.
func (w *World) Abort() error {
	return failure(C.go_world_abort(w.token()))
}

// Finalize ends the world in order: it waits for the outstanding work of all its meshes on all
// ranks, destroys their communicators, also those of meshes that were closed, and ends the meshes
// and the world. Collective over the world. A timeout of 0 means the world's. From then on every
// call of the world and its meshes returns ErrAborted; Close still frees them. When a rank never
// makes the call, the others get ErrTimeout, and the world is as before. When ctx is done first,
// the world is aborted as by Abort.
func (w *World) Finalize(ctx context.Context, timeout time.Duration) error {
	var a arguments
	limit := a.milliseconds(timeout)
	return w.collective(ctx, &a, func(world C.uintptr_t) C.outcome { return C.go_world_finalize(world, limit) })
}

// AbortDefaultWorlds aborts the worlds that Init joins by itself, also while one is being joined.
// A later Init joins a new default world.
func AbortDefaultWorlds() error {
	return failure(C.go_default_world_abort())
}

// FinalizeDefaultWorlds ends the worlds that Init joins by itself, as World.Finalize does.
// Collective over them. A later Init joins a new default world. When ctx is done first, they are
// aborted as by AbortDefaultWorlds.
func FinalizeDefaultWorlds(ctx context.Context, timeout time.Duration) error {
	var a arguments
	limit := a.milliseconds(timeout)
	call := func() error { return a.call(func() C.outcome { return C.go_default_world_finalize(limit) }) }
	if a.err != nil {
		return a.err
	}
	return until(ctx, (*World)(nil).end, call)
}

// collective makes a call that ends when the world ends. On a nil or closed world the call fails.
func (w *World) collective(ctx context.Context, a *arguments, function func(world C.uintptr_t) C.outcome) error {
	if w == nil || a.err != nil || !w.hold() {
		return a.call(func() C.outcome { return function(0) })
	}
	defer w.release()
	call := func() error { return a.call(func() C.outcome { return function(w.handle) }) }
	began := w.noted()
	return w.explain(began, until(ctx, w.end, call))
}
