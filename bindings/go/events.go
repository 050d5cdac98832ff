package devicemesh

// #include "shim.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"
)

// An EventKind says what has happened. A newer library may give other values.
type EventKind int32

// The kinds of events.
const (
	// This rank has joined its world, or ranks have joined in a recovery and need the state of the
	// training.
	EventJoined EventKind = C.DM_EVENT_JOINED
	// A call of this rank has waited for EventOptions.Slow.
	EventSlow EventKind = C.DM_EVENT_SLOW
	// Ranks are lost.
	EventLost EventKind = C.DM_EVENT_LOST
	// A rank has aborted a mesh, or this rank has aborted its world.
	EventAborted EventKind = C.DM_EVENT_ABORTED
	// Recover or Shrink has given the mesh with which the job goes on.
	EventRecovered EventKind = C.DM_EVENT_RECOVERED
)

// An Event says what has happened to ranks of this process's worlds.
type Event struct {
	Kind      EventKind
	Rank      int       // This process's rank in the world, or in the communicator of a slow call without a world.
	WorldSize int       // The number of ranks of the world, or of that communicator.
	Epoch     int64     // The epoch of the world, or of the mesh that the event is about.
	Time      time.Time // When this process has noticed it.
	// The world ranks that the event is about: the ranks that have joined, the ranks for which the
	// call waits (as far as the recordings of this host show it), the ranks that are lost, the ranks
	// that have aborted, or the ranks that were lost or left out in a recovery.
	Ranks []int
	// The group of a slow call ("mesh/tp"), or the mesh. "" where the event is about the world.
	Group string
	// The dimension of a slow call. "": it has none.
	Dimension string
	// The work of a slow call: "all-reduce" and the like, or the text of a call like Flatten.
	Operation string
	// The number of a slow call in its group, from 1. -1 for other events.
	Call int64
	// How long a slow call has waited. 0 for other events.
	Waited time.Duration
	// How many events were left out before this one because the queue was full.
	Dropped uint64
	Message string // All of it in one line.
}

// EventOptions say what a handler or a queue of events gets. The zero value is the default.
type EventOptions struct {
	// The time after which a waiting call is slow. The call gives an event then, and another one
	// whenever the time that it has waited has doubled. 0: 10 s.
	Slow time.Duration
}

// The handler of SetEventHandler.
var chosenHandler atomic.Pointer[func(*Event)]

// The thread to which the goroutine of the running handler is locked. 0: no handler runs.
var handlerThread atomic.Int64

// The calls that a running handler has the library's thread make.
var handlerCalls = make(chan func())

// SetEventHandler makes the library call handler for each event of this process, in place of an
// earlier handler. A nil handler removes the earlier one. nil options are the defaults.
//
// One event comes at a time, on a goroutine of its own. The handler may call Abort, SetEventHandler
// and the local functions of this package, but no collective ones. The handler should return soon,
// because nothing is noticed while it runs. A panic of the handler is reported on stderr.
//
// The call waits for a running call of an earlier handler, unless that handler itself makes the
// call. After 5 s the call gives ErrTimeout, and the new handler is set all the same. So a handler
// that waits for another goroutine's SetEventHandler waits for 5 s.
func SetEventHandler(handler func(event *Event), options *EventOptions) error {
	var a arguments
	chosen := options.forC(&a)
	if a.err != nil || handler == nil {
		return a.setEventHandler(false, chosen)
	}
	// The first event may come before the call returns.
	earlier := chosenHandler.Swap(&handler)
	err := a.setEventHandler(true, chosen)
	if err != nil && !errors.Is(err, ErrTimeout) {
		// The library has kept the earlier handler. After a timeout it has the new one.
		chosenHandler.CompareAndSwap(&handler, earlier)
	}
	return err
}

// setEventHandler makes the call of the library. For a running handler the library's thread makes
// it: on another thread the library would wait until the handler has returned.
func (a *arguments) setEventHandler(given bool, chosen *C.dm_event_options) error {
	call := func() error {
		return a.call(func() C.outcome { return C.go_set_event_handler(C.bool(given), chosen) })
	}
	// No goroutine but the handler's runs on its thread. This goroutine stays on one thread, so it
	// does not come to the handler's thread between the two questions.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if running := handlerThread.Load(); running == 0 || running != int64(C.go_thread()) {
		return call()
	}
	result := make(chan error, 1)
	handlerCalls <- func() { result <- call() }
	return <-result
}

//export goEvent
func goEvent(told *C.dm_event) {
	handler := chosenHandler.Load()
	if handler == nil {
		return
	}
	event, ended := eventOf(told), make(chan error, 1)
	go func() {
		// A panic must not unwind the library's frames, which called goEvent.
		ended <- apart("event handler", func() error {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			handlerThread.Store(int64(C.go_thread()))
			defer handlerThread.Store(0)
			(*handler)(event)
			return nil
		})
	}()
	for {
		select {
		case call := <-handlerCalls:
			call()
		case err := <-ended:
			if err != nil {
				fmt.Fprintf(os.Stderr, "devicemesh: %v at the event: %s\n", err, event.Message)
			}
			return
		}
	}
}

// Events is a queue of this process's events, for programs with a loop of their own. It holds 256
// events; Event.Dropped says how many were left out. Close frees it.
type Events struct {
	lasting
}

// OpenEvents opens a queue that keeps the events from now on. nil options are the defaults. Local.
func OpenEvents(options *EventOptions) (*Events, error) {
	var a arguments
	opened := &Events{}
	chosen := options.forC(&a)
	if err := a.call(func() C.outcome { return C.go_events_open(chosen, &opened.handle) }); err != nil {
		return nil, err
	}
	return opened, nil
}

// Next gives the next event, or nil where none comes within timeout. 0 does not wait. Local.
func (e *Events) Next(timeout time.Duration) (*Event, error) {
	var a arguments
	milliseconds := a.milliseconds(timeout)
	if e != nil && e.hold() {
		defer e.free(e.release)
	}
	told := &C.dm_event{struct_size: C.sizeof_dm_event}
	// The strings of the library belong to the thread until its next call.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := a.call(func() C.outcome { return C.go_events_next(e.token(), milliseconds, told) }); err != nil {
		return nil, err
	}
	if told.kind == C.DM_EVENT_NONE {
		return nil, nil
	}
	return eventOf(told), nil
}

// FD gives the descriptor that is readable while there are events, for poll and epoll. Read nothing
// from it. Close closes it. Local.
func (e *Events) FD() (int, error) {
	var fd C.int32_t
	err := failure(C.go_events_fd(e.token(), &fd))
	return int(fd), err
}

// Close closes the queue. A Next that waits on another goroutine goes on until an event comes or
// its timeout has passed. The queue is freed then.
func (e *Events) Close() error {
	if e != nil {
		e.free(e.close)
	}
	return nil
}

// token gives the handle. It is 0, which the library refuses, for nil or closed Events.
func (e *Events) token() C.uintptr_t {
	if e == nil {
		return 0
	}
	return e.lasting.token()
}

// free frees the handle where ended says that nobody uses it any more.
func (e *Events) free(ended func() bool) {
	if ended() {
		C.go_events_free(e.handle)
	}
}

// WatchEvents gives the events of this process from now on, until ctx is done. Then the channel is
// closed. nil options are the defaults. Local.
func WatchEvents(ctx context.Context, options *EventOptions) (<-chan *Event, error) {
	if err := wrong(ctx); err != nil {
		return nil, err
	}
	opened, err := OpenEvents(options)
	if err != nil {
		return nil, err
	}
	events := make(chan *Event)
	go func() {
		defer close(events)
		defer opened.Close()
		for ctx.Err() == nil {
			event, err := opened.Next(watchSlice)
			if err != nil {
				return
			}
			if event == nil {
				continue
			}
			select {
			case events <- event:
			case <-ctx.Done():
			}
		}
	}()
	return events, nil
}

// How long WatchEvents takes at most to see that its context is done.
const watchSlice = 100 * time.Millisecond

// Metrics gives the counters of this process as text for Prometheus: its worlds, and for each group
// of ranks how many calls this rank has begun and for how long the oldest one runs. Local.
func Metrics() (string, error) {
	return textOf(func(text *C.char, capacity C.size_t, length *C.size_t) C.outcome {
		return C.go_metrics(text, capacity, length)
	})
}

func (options *EventOptions) forC(a *arguments) *C.dm_event_options {
	if options == nil {
		options = &EventOptions{}
	}
	chosen := &C.dm_event_options{struct_size: C.sizeof_dm_event_options, slow_ms: a.milliseconds(options.Slow)}
	a.use(unsafe.Pointer(chosen))
	return chosen
}

// eventOf copies an event.
func eventOf(told *C.dm_event) *Event {
	return &Event{
		Kind: EventKind(told.kind), Rank: int(told.rank), WorldSize: int(told.world_size), Epoch: int64(told.epoch),
		Time: time.Unix(0, int64(told.time_ns)), Ranks: copied(told.ranks, told.num_ranks), Group: C.GoString(told.group),
		Dimension: C.GoString(told.dim), Operation: C.GoString(told.operation), Call: int64(told.call),
		Waited:  time.Duration(max(0, float64(told.waited_seconds)) * float64(time.Second)),
		Dropped: uint64(told.dropped), Message: C.GoString(told.message),
	}
}
