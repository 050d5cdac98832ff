package devicemesh

// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"runtime/cgo"
	"sync"
	"time"
	"unsafe"
)

// A Store is a key-value service of the program's own (etcd, Redis ...) where the ranks meet. Its methods are called from threads of the
// library, several at once. Keys are short printable ASCII, values at most 8 MiB. An error, or a panic, ends the call that needed the store with ErrStore
// and is that error's Cause.
type Store interface {
	// Set stores value under key, replacing what was there.
	Set(key string, value []byte) error
	// Get is the value of key; it waits up to timeout for it and answers ErrNoKey when it did not come.
	Get(key string, timeout time.Duration) ([]byte, error)
	// Add adds amount to the integer under key (0 when there is none), atomically over all ranks, and gives the sum.
	Add(key string, amount int64) (int64, error)
}

// A Remover is a Store that can also remove keys. Where a Store is none, what the library has stored stays there: some kilobytes for each collective call.
type Remover interface {
	// Remove removes key; it is no error when it is not there.
	Remove(key string) error
}

// ErrNoKey is what a Store's Get answers when the key did not come in time.
var ErrNoKey = errors.New("devicemesh: no such key yet")

// callbackStore is a Store behind the C callbacks, which know it by its handle until the library drops it.
type callbackStore struct {
	store  Store
	handle cgo.Handle

	lock sync.Mutex
	last error
}

func newCallbackStore(store Store) *callbackStore {
	if store == nil {
		return nil
	}
	made := &callbackStore{store: store}
	made.handle = cgo.NewHandle(made)
	return made
}

// drop forgets a store whose world was not made; of one that was made, the library says so itself.
func (s *callbackStore) drop() {
	if s != nil {
		s.handle.Delete()
	}
}

func (s *callbackStore) failure() error {
	s.lock.Lock()
	defer s.lock.Unlock()
	return s.last
}

// answer runs one callback. A panic must not cross the library.
func (s *callbackStore) answer(call func() error) (code C.int32_t) {
	var err error
	defer func() {
		if panicked := recover(); panicked != nil {
			err = fmt.Errorf("the store panicked: %v", panicked)
		}
		if err != nil {
			code = 1
			if !errors.Is(err, ErrNoKey) {
				s.lock.Lock()
				s.last = err
				s.lock.Unlock()
			}
		}
	}()
	err = call()
	return 0
}

func storeOf(handle C.uintptr_t) *callbackStore {
	return cgo.Handle(handle).Value().(*callbackStore)
}

//export goStoreSet
func goStoreSet(handle C.uintptr_t, key *C.char, value unsafe.Pointer, length C.size_t) C.int32_t {
	s := storeOf(handle)
	return s.answer(func() error {
		copied := make([]byte, length)
		copy(copied, unsafe.Slice((*byte)(value), length))
		return s.store.Set(C.GoString(key), copied)
	})
}

//export goStoreGet
func goStoreGet(handle C.uintptr_t, key *C.char, value unsafe.Pointer, capacity C.size_t, length *C.size_t, milliseconds C.int64_t) C.int32_t {
	s := storeOf(handle)
	return s.answer(func() error {
		found, err := s.store.Get(C.GoString(key), time.Duration(milliseconds)*time.Millisecond)
		if err != nil {
			return err
		}
		*length = C.size_t(len(found))
		copy(unsafe.Slice((*byte)(value), capacity), found)
		return nil
	})
}

//export goStoreAdd
func goStoreAdd(handle C.uintptr_t, key *C.char, amount C.int64_t, sum *C.int64_t) C.int32_t {
	s := storeOf(handle)
	return s.answer(func() error {
		added, err := s.store.Add(C.GoString(key), int64(amount))
		*sum = C.int64_t(added)
		return err
	})
}

//export goStoreRemove
func goStoreRemove(handle C.uintptr_t, key *C.char) C.int32_t {
	s := storeOf(handle)
	return s.answer(func() error {
		if remover, ok := s.store.(Remover); ok {
			return remover.Remove(C.GoString(key))
		}
		return nil
	})
}

//export goStoreDrop
func goStoreDrop(handle C.uintptr_t) {
	cgo.Handle(handle).Delete()
}
