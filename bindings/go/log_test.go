package devicemesh

import (
	"bytes"
	"context"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// pages keeps what a logger writes.
type pages struct {
	lock sync.Mutex
	text bytes.Buffer
}

func (p *pages) Write(line []byte) (int, error) {
	p.lock.Lock()
	defer p.lock.Unlock()
	return p.text.Write(line)
}

func (p *pages) String() string {
	p.lock.Lock()
	defer p.lock.Unlock()
	return p.text.String()
}

// calling is a handler that does something with each record.
type calling struct {
	slog.Handler
	call func(record slog.Record)
}

func (c calling) Handle(_ context.Context, record slog.Record) error {
	c.call(record)
	return nil
}

func joinAlone(t *testing.T) *World {
	t.Helper()
	world, err := Join(background, "cpu", &WorldOptions{Size: 1, InitMethod: "file://" + t.TempDir() + "/store", Timeout: time.Minute})
	must(t, err)
	return world
}

func TestLogger(t *testing.T) {
	defer func() { must(t, SetLogger(nil)) }()
	var written pages
	must(t, SetLogger(slog.New(slog.NewTextHandler(&written, &slog.HandlerOptions{Level: slog.LevelDebug}))))
	world := joinAlone(t)
	mesh, err := Init(background, "cpu", []int{1}, nil, &MeshOptions{World: world})
	must(t, err)
	must(t, mesh.Abort())
	must(t, mesh.Close())
	must(t, world.Close())
	runtime.GC()
	text := written.String()
	for _, part := range []string{"level=DEBUG", "level=INFO", `msg="rank 0: `} {
		if !strings.Contains(text, part) {
			t.Errorf("%q is not in the log:\n%s", part, text)
		}
	}
	// The logger's level is asked.
	var errorsOnly pages
	must(t, SetLogger(slog.New(slog.NewTextHandler(&errorsOnly, &slog.HandlerOptions{Level: slog.LevelError}))))
	joinAlone(t).Close()
	if text := errorsOnly.String(); strings.Contains(text, "INFO") || strings.Contains(text, "DEBUG") {
		t.Errorf("the log has\n%s", text)
	}
	// A handler that calls local functions, and one that panics.
	base := slog.NewTextHandler(&errorsOnly, &slog.HandlerOptions{Level: slog.LevelDebug})
	offline := offline(t)
	var count atomic.Int64
	must(t, SetLogger(slog.New(calling{base, func(slog.Record) {
		number := count.Add(1)
		_, err := offline.Size("ep")
		refused(t, err, ErrNotFound, "ep")
		if number%2 == 0 {
			panic("in the handler")
		}
	}})))
	joinAlone(t).Close()
	if count.Load() < 2 {
		t.Errorf("the handler was called %d times", count.Load())
	}
	must(t, SetLogger(nil))
	before := written.String()
	joinAlone(t).Close()
	if written.String() != before {
		t.Error("something was logged without a logger")
	}
}

// A handler that calls SetLogger while another goroutine's SetLogger waits for that handler.
func TestLoggerIsSetInsideHandler(t *testing.T) {
	defer func() { must(t, SetLogger(nil)) }()
	var quiet, last pages
	second := slog.New(slog.NewTextHandler(&quiet, &slog.HandlerOptions{Level: slog.LevelDebug}))
	// The level differs, so it is also seen which call chooses the level.
	third := slog.New(slog.NewTextHandler(&last, &slog.HandlerOptions{Level: slog.LevelInfo}))
	outer, inner := make(chan error, 1), make(chan error, 1)
	var once sync.Once
	base := slog.NewTextHandler(&pages{}, &slog.HandlerOptions{Level: slog.LevelDebug})
	must(t, SetLogger(slog.New(calling{base, func(slog.Record) {
		once.Do(func() {
			go func() { outer <- SetLogger(second) }()
			// The call sets the logger, and then waits for this handler.
			for chosenLogger.Load() != second {
				runtime.Gosched()
			}
			inner <- SetLogger(third)
		})
	}})))
	joinAlone(t).Close()
	must(t, <-inner)
	must(t, <-outer)
	joinAlone(t).Close()
	if chosenLogger.Load() != third || last.String() == "" {
		t.Error("the logger that was set last gets no records")
	}
}
