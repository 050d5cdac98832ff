package devicemesh

// These tests use stores in Go, and signals and goroutines during calls.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// folderStore is a store in a folder that all ranks see.
type folderStore struct {
	folder string
	calls  atomic.Int64
}

func (s *folderStore) path(key string) string {
	return filepath.Join(s.folder, fmt.Sprintf("%x", key))
}

func (s *folderStore) Set(key string, value []byte) error {
	draft := fmt.Sprintf("%s.%d.%d", s.path(key), os.Getpid(), s.calls.Add(1))
	if err := os.WriteFile(draft, value, 0o600); err != nil {
		return err
	}
	return os.Rename(draft, s.path(key))
}

func (s *folderStore) Get(key string, timeout time.Duration) ([]byte, error) {
	for until := time.Now().Add(timeout); ; time.Sleep(5 * time.Millisecond) {
		value, err := os.ReadFile(s.path(key))
		if err == nil {
			return value, nil
		}
		if time.Now().After(until) {
			return nil, ErrNoKey
		}
	}
}

func (s *folderStore) Add(key string, amount int64) (int64, error) {
	lock, err := os.OpenFile(filepath.Join(s.folder, "lock"), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, err
	}
	defer lock.Close()
	for err = syscall.EINTR; err == syscall.EINTR; {
		err = syscall.Flock(int(lock.Fd()), syscall.LOCK_EX)
	}
	if err != nil {
		return 0, err
	}
	var value int64
	if text, err := s.Get(key, 0); err == nil {
		if value, err = strconv.ParseInt(string(text), 10, 64); err != nil {
			return 0, err
		}
	}
	value += amount
	return value, s.Set(key, []byte(strconv.FormatInt(value, 10)))
}

type brokenStore struct{ err error }

func (s brokenStore) Set(string, []byte) error                  { return s.err }
func (s brokenStore) Get(string, time.Duration) ([]byte, error) { panic("in a store") }
func (s brokenStore) Add(string, int64) (int64, error)          { return 0, s.err }

func TestStoresInGo(t *testing.T) {
	_, folder := ranks(t)
	store := &folderStore{folder: filepath.Join(folder, "store")}
	must(t, os.MkdirAll(store.folder, 0o700))
	world, err := Join(background, "cpu", &WorldOptions{Size: size, Rank: rank, Store: store, Timeout: time.Minute})
	must(t, err)
	where, err := world.Locations(background, fmt.Sprintf("rack%d/host%d", rank%2, rank), time.Minute)
	must(t, err)
	for other, path := range where {
		if path != fmt.Sprintf("rack%d/host%d", other%2, other) {
			t.Error(where)
		}
	}
	must(t, world.Barrier(background, time.Minute))
	mesh := line(t, world, MeshOptions{})
	value := []int{rank}
	must(t, AllReduce(background, mesh, "", value, value, Sum))
	equal(t, "over a store in Go", value, []int{size * (size - 1) / 2})
	must(t, mesh.Finalize(background))
	must(t, mesh.Close())
	if empty := world.store.failure(0, ErrMismatch); empty != nil {
		t.Error("the library stores empty values: ", empty)
	}
	must(t, world.Close())

	broken := errors.New("broken")
	_, err = Join(background, "cpu", &WorldOptions{Size: 2, Store: brokenStore{broken}, Timeout: 5 * time.Second})
	refused(t, err, ErrStore, "broken")
	if !errors.Is(err, broken) {
		t.Errorf("%v is not for the store's reason", err)
	}
}

// keepingStore is a store that cannot remove keys.
type keepingStore struct{ oddStore }

func (keepingStore) Remove(string) error { return errors.New("cannot remove") }

func TestOldErrorsOfAStoreExplainNothing(t *testing.T) {
	world := &World{store: newCallbackStore(keepingStore{})}
	defer world.store.drop()
	cause := func(began int) error { return world.explain(began, refusal(ErrStore, "broken")).(*Error).Cause }
	if world.store.remove("key") == 0 {
		t.Error("the store has removed a key")
	}
	if why := cause(0); why != nil {
		t.Errorf("a key that stays explains a failure: %v", why)
	}
	earlier, later := errors.New("earlier"), errors.New("later")
	world.store.told(earlier)
	began := world.noted()
	if why := cause(began); why != nil {
		t.Errorf("a call that began after the error failed for %v", why)
	}
	world.store.told(later)
	if why := cause(began); why != later {
		t.Errorf("the call failed for %v", why)
	}
}

// oddStore calls the given functions in its methods. Otherwise it is a store without keys.
type oddStore struct{ set, get, add func() }

func does(odd func()) {
	if odd != nil {
		odd()
	}
}

func (s oddStore) Set(string, []byte) error { does(s.set); return nil }

func (s oddStore) Get(string, time.Duration) ([]byte, error) {
	if does(s.get); s.get != nil {
		return nil, nil
	}
	return nil, ErrNoKey
}

func (s oddStore) Add(_ string, amount int64) (int64, error) { does(s.add); return amount, nil }

// joinOdd joins a world of two ranks through this store, which must fail.
func joinOdd(t *testing.T, rank int, timeout time.Duration, store Store) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(background, 2*time.Minute)
	defer cancel()
	world, err := Join(ctx, "cpu", &WorldOptions{Size: 2, Rank: rank, Store: store, Timeout: timeout})
	if err == nil {
		world.Close()
		t.Error("a world was joined by no store")
	}
	return err
}

func TestStoresThatEndTheirGoroutine(t *testing.T) {
	for rank := range 2 {
		both := oddStore{set: runtime.Goexit, add: runtime.Goexit}
		refused(t, joinOdd(t, rank, 30*time.Second, both), ErrStore, "the store ended its goroutine (runtime.Goexit)")
	}
	// FailNow of a test inside the store ends a goroutine in this way too. A Get that fails in
	// another way than with ErrNoKey ends the call at once.
	began := time.Now()
	refused(t, joinOdd(t, 1, 10*time.Minute, oddStore{get: runtime.Goexit}), ErrStore, "the store ended its goroutine (runtime.Goexit)")
	refused(t, joinOdd(t, 1, 10*time.Minute, oddStore{get: func() { panic("in Get") }}), ErrStore, "the store panicked: in Get")
	if took := time.Since(began); took > 2*time.Minute {
		t.Errorf("a broken store ended the calls after %v", took)
	}
	// Without an error the key is only late.
	refused(t, joinOdd(t, 1, time.Second, oddStore{}), ErrTimeout, "")
}

func TestStoresWithEmptyValues(t *testing.T) {
	for rank := range 2 {
		err := joinOdd(t, rank, 30*time.Second, oddStore{get: func() {}})
		// The status depends on the key whose value is empty.
		known, text := errors.Is(err, ErrStore) || errors.Is(err, ErrMismatch), fmt.Sprint(err)
		if !known || !strings.Contains(text, "the store gave an empty value for key ") || strings.HasPrefix(text, ":") {
			t.Errorf("rank %d: got %v", rank, err)
		}
	}
}

// Go preempts goroutines by SIGURG, so its threads are interrupted in futexes, polls and reads.
// This test sends signals to all threads all the time.
func TestSignalsDuringCalls(t *testing.T) {
	_, folder := ranks(t)
	stop := make(chan struct{})
	var storm, work sync.WaitGroup
	var sent atomic.Int64
	storm.Add(1)
	go func() {
		defer storm.Done()
		for {
			select {
			case <-stop:
				return
			case <-time.After(200 * time.Microsecond):
			}
			threads, _ := os.ReadDir("/proc/self/task")
			for _, thread := range threads {
				id, _ := strconv.Atoi(thread.Name())
				_, _, _ = syscall.RawSyscall(syscall.SYS_TGKILL, uintptr(os.Getpid()), uintptr(id), uintptr(syscall.SIGURG))
				sent.Add(1)
			}
		}
	}()
	// There are two worlds. A goroutine of each makes its calls, and other goroutines compute
	// meanwhile.
	worlds := []*World{private(t, folder, "signals"), private(t, folder, "signals too")}
	if port := os.Getenv("MASTER_PORT"); port != "" {
		served, err := Join(background, "cpu", nil)
		must(t, err)
		defer served.Close()
		worlds = append(worlds, served)
	}
	for index, world := range worlds {
		work.Add(1)
		go func() {
			defer work.Done()
			for round := range 4 {
				mesh, err := Init(background, "cpu", []int{size}, []string{"x"}, &MeshOptions{World: world, Dims: []DimOptions{{OwnComm: true}}})
				if err != nil {
					t.Errorf("world %d, round %d: %v", index, round, err)
					return
				}
				large := make([]float32, 200_000)
				for range 10 {
					for i := range large {
						large[i] = 1
					}
					if err := AllReduce(background, mesh, "", large, large, Sum); err != nil {
						t.Errorf("world %d, round %d: %v", index, round, err)
						return
					}
					for i, value := range large {
						if value != float32(size) {
							t.Errorf("world %d, round %d: element %d is %v, expected %d", index, round, i, value, size)
							return
						}
					}
				}
				if err := errors.Join(world.Barrier(background, 0), mesh.Finalize(background), mesh.Close()); err != nil {
					t.Errorf("world %d, round %d: %v", index, round, err)
					return
				}
			}
		}()
	}
	work.Wait()
	close(stop)
	storm.Wait()
	// One rank alone waits for nobody, and may be done at once.
	if size > 1 && sent.Load() < 100 {
		t.Errorf("only %d signals were sent", sent.Load())
	}
	t.Logf("%d signals", sent.Load())
}

func TestManyGoroutinesOnOneMesh(t *testing.T) {
	mesh, _ := ranks(t)
	n, _ := mesh.Size("tp")
	var group sync.WaitGroup
	for id := range 32 {
		group.Add(1)
		go func() {
			defer group.Done()
			for range 200 {
				view, err := mesh.Slice("tp")
				if err != nil {
					t.Error(err)
					return
				}
				name := fmt.Sprintf("dimension-%d.", id)
				if _, err := view.Comm(background, name); !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), name) {
					t.Errorf("goroutine %d got %v", id, err)
				}
				if got, err := view.Size("tp"); got != n || err != nil {
					t.Error(got, err)
				}
				view.Close()
			}
		}()
	}
	// Meanwhile this goroutine makes the collectives.
	for range 50 {
		value := []int{1}
		if err := AllReduce(background, mesh, "tp", value, value, Sum); err != nil || value[0] != n {
			t.Error(value, err)
			break
		}
	}
	group.Wait()
}

// Nothing says which goroutine's call belongs to which call of another rank. Calls that overlap get
// an error, and no call hangs. The sums of calls that do not overlap may be mixed
// (docs/threads.md), so this test does not compare them.
func TestTwoGoroutinesOnOneDimension(t *testing.T) {
	_, folder := ranks(t)
	world := private(t, folder, "goroutines")
	mesh := line(t, world, MeshOptions{Timeout: 2 * time.Second, Dims: []DimOptions{{OwnComm: true}}})
	var group sync.WaitGroup
	for tag := 1; tag <= 2; tag++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for round := range 500 {
				value := []int{1_000_000*tag + round}
				if err := AllReduce(background, mesh, "x", value, value, Sum); err != nil {
					var failed *Error
					if !errors.As(err, &failed) || failed.Message == "" {
						t.Error(err)
					}
					return
				}
			}
		}()
	}
	group.Wait()
	must(t, world.Barrier(background, 0))
}
