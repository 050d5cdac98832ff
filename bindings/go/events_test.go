package devicemesh

import (
	"context"
	"strings"
	"testing"
	"time"
)

func TestAnEventHandlerThatSetsAnother(t *testing.T) {
	replaced, handled := make(chan error, 1), make(chan *Event, 16)
	must(t, SetEventHandler(func(*Event) {
		replaced <- SetEventHandler(func(event *Event) { handled <- event }, nil)
	}, nil))
	defer func() { must(t, SetEventHandler(nil, nil)) }()
	world := joinAlone(t)
	select {
	case err := <-replaced:
		must(t, err)
	case <-time.After(time.Minute):
		t.Fatal("the first handler got no event")
	}
	must(t, world.Abort())
	for kind := EventKind(0); kind != EventAborted; {
		select {
		case event := <-handled:
			kind = event.Kind
		case <-time.After(time.Minute):
			t.Fatal("the abort did not come")
		}
	}
	must(t, world.Close())
}

func TestEvents(t *testing.T) {
	handled := make(chan *Event, 16)
	must(t, SetEventHandler(func(event *Event) {
		handled <- event
		if event.Kind == EventAborted {
			panic("in the handler")
		}
	}, nil))
	defer func() { must(t, SetEventHandler(nil, nil)) }()
	queue, err := OpenEvents(&EventOptions{Slow: 30 * time.Second})
	must(t, err)
	watching, stop := context.WithCancel(background)
	watched, err := WatchEvents(watching, nil)
	must(t, err)
	// Other tests may have worlds, which the queue begins with.
	for {
		event, err := queue.Next(0)
		must(t, err)
		if event == nil {
			break
		}
	}
	begun := time.Now()
	world := joinAlone(t)
	mesh, err := Init(background, "cpu", []int{1}, nil, &MeshOptions{World: world})
	must(t, err)
	must(t, mesh.Abort())
	joined, err := queue.Next(time.Minute)
	must(t, err)
	if joined.Kind != EventJoined || len(joined.Ranks) != 1 || joined.Ranks[0] != 0 || joined.WorldSize != 1 || joined.Call != -1 {
		t.Errorf("the join is %+v", joined)
	}
	if joined.Time.Before(begun.Add(-time.Minute)) || !strings.HasPrefix(joined.Message, "rank 0 has joined a world of 1 ranks") {
		t.Errorf("the join is %+v", joined)
	}
	aborted, err := queue.Next(time.Minute)
	must(t, err)
	if aborted.Kind != EventAborted || aborted.Group != "mesh" {
		t.Errorf("the abort is %+v", aborted)
	}
	for _, events := range []<-chan *Event{handled, watched} {
		for kind := EventKind(0); kind != EventAborted; {
			select {
			case event := <-events:
				kind = event.Kind
			case <-time.After(time.Minute):
				t.Fatal("the abort did not come")
			}
		}
	}
	stop()
	for range watched {
	}
	if fd, err := queue.FD(); err != nil || fd < 0 {
		t.Errorf("the descriptor is %d: %v", fd, err)
	}
	must(t, queue.Close())
	must(t, queue.Close())
	_, err = queue.Next(0)
	refused(t, err, ErrInvalidHandle, "dm_events")
	_, err = OpenEvents(&EventOptions{Slow: -1})
	refused(t, err, ErrInvalidArgument, "timeout")
	must(t, mesh.Close())
	must(t, world.Close())
	text, err := Metrics()
	must(t, err)
	if !strings.Contains(text, "# TYPE devicemesh_calls_begun_total counter\n") {
		t.Errorf("the metrics are\n%s", text)
	}
}

func TestNilEvents(t *testing.T) {
	var none *Events
	_, err := none.Next(0)
	refused(t, err, ErrInvalidHandle, "")
	_, err = none.FD()
	refused(t, err, ErrInvalidHandle, "")
	must(t, none.Close())
}
