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

// A Store is a key-value service of the program's own (etcd, Redis ...) where the ranks meet. Its
// methods are called from threads of the library, several at once, each on a goroutine of its own.
// Keys are short printable ASCII, values at most 8 MiB. An error, a panic, or a method that ends
// its goroutine (runtime.Goexit, as a test's FailNow does) ends the call that needed the store at
// once with ErrStore and is that error's Cause. ErrNoKey of Get is no failure: the library asks
// again until the call's deadline.
type Store interface {
	// Set stores value under key, replacing what was there.
	Set(key string, value []byte) error
	// Get gives the value of key. It waits up to timeout for the key, and then gives ErrNoKey. With
	// a timeout of 0 it looks once.
	Get(key string, timeout time.Duration) ([]byte, error)
	// Add adds amount to the integer under key (0 when there is none), atomically over all ranks,
	// and gives the sum. The integer is the value of the key, in decimal digits: Get gives it, and
	// Remove removes it.
	Add(key string, amount int64) (int64, error)
}

// A Remover is a Store that can also remove keys. In a Store that is no Remover the library's keys
// stay: some kilobytes for each collective call.
type Remover interface {
	// Remove removes key. A key that does not exist is no error.
	Remove(key string) error
}

// A CompareSetter is a Store in which ranks can decide together, so that a job over it can recover
// from lost ranks (Mesh.Recover). The stores of all ranks are CompareSetters, or none is.
type CompareSetter interface {
	// CompareSet stores value under key if the value there is expected, atomically over all ranks,
	// and gives the value that stands then. An empty expected value means that the key is not there.
	CompareSet(key string, expected, value []byte) ([]byte, error)
}

// ErrNoKey is the error that a Store's Get returns when the key did not come in time.
var ErrNoKey = errors.New("devicemesh: no such key yet")

// callbackStore is a Store behind the C callbacks. They find it by its handle until the library
// drops it.
type callbackStore struct {
	store  Store
	handle cgo.Handle

	lock  sync.Mutex
	count int   // The number of errors that were noted.
	last  noted // The last failure of any method but Remove.
	empty noted // The last Get that gave an empty value without an error.
}

// noted is an error of a store and its number among those that were noted, from 1.
type noted struct {
	err    error
	number int
}

func newCallbackStore(store Store) *callbackStore {
	if store == nil {
		return nil
	}
	made := &callbackStore{store: store}
	made.handle = cgo.NewHandle(made)
	return made
}

// drop forgets a store whose world was not made. If the world was made, the library calls
// goStoreDrop.
func (s *callbackStore) drop() {
	if s != nil {
		s.handle.Delete()
	}
}

// noted gives the number of errors that were noted by now.
func (s *callbackStore) noted() int {
	if s == nil {
		return 0
	}
	s.lock.Lock()
	defer s.lock.Unlock()
	return s.count
}

// note keeps an error.
func (s *callbackStore) note(kept *noted, err error) {
	s.lock.Lock()
	defer s.lock.Unlock()
	s.count++
	*kept = noted{err, s.count}
}

// failure gives the store's error that explains a call's failure with this status, or nil. began is
// what noted gave when the call began: an earlier error explains nothing.
func (s *callbackStore) failure(began int, status Status) error {
	s.lock.Lock()
	defer s.lock.Unlock()
	switch {
	case status == ErrStore && s.last.number > began:
		return s.last.err
	case (status == ErrStore || status == ErrMismatch) && s.empty.number > began:
		// The library stores no empty values. It takes an empty value for a broken message of
		// another rank, or for a call that differs.
		return s.empty.err
	}
	return nil
}

// answer makes one call of the store, and gives the result for the library.
func (s *callbackStore) answer(call func() error) C.int32_t {
	return s.told(apart("store", call))
}

// The result of a call of the store that has failed: any number but 0 and DM_STORE_NOT_YET.
const storeIsBroken = -1

// told notes the error of a call of the store, and gives the result for the library.
func (s *callbackStore) told(err error) C.int32_t {
	if err == nil {
		return 0
	}
	s.note(&s.last, err)
	return storeIsBroken
}

// apart runs a callback of the program on a goroutine of its own. A panic and the end of that
// goroutine become errors, because neither may unwind the library's frames below this one.
func apart(what string, call func() error) (err error) {
	ended := make(chan struct{})
	go func() {
		returned := false
		defer close(ended)
		defer func() {
			if panicked := recover(); panicked != nil {
				err = fmt.Errorf("the %s panicked: %v", what, panicked)
			} else if !returned {
				err = fmt.Errorf("the %s ended its goroutine (runtime.Goexit)", what)
			}
		}()
		err = call()
		returned = true
	}()
	<-ended
	return err
}

// got notes an empty value for a key.
func (s *callbackStore) got(key string, value []byte) {
	if len(value) == 0 {
		s.note(&s.empty, fmt.Errorf("the store gave an empty value for key %q; where there is no such key, Get answers ErrNoKey", key))
	}
}

// remove removes a key, and gives the result for the library. No call fails because a key stays, so
// an error is not noted.
func (s *callbackStore) remove(key string) C.int32_t {
	remover, ok := s.store.(Remover)
	if ok && apart("store", func() error { return remover.Remove(key) }) != nil {
		return storeIsBroken
	}
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
	s, name := storeOf(handle), C.GoString(key)
	var found []byte
	err := apart("store", func() (err error) {
		found, err = s.store.Get(name, time.Duration(milliseconds)*time.Millisecond)
		return err
	})
	if errors.Is(err, ErrNoKey) {
		return C.DM_STORE_NOT_YET
	}
	if err == nil {
		s.got(name, found)
		*length = C.size_t(len(found))
		copy(unsafe.Slice((*byte)(value), capacity), found)
	}
	return s.told(err)
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

//export goStoreCompareSet
func goStoreCompareSet(handle C.uintptr_t, key *C.char, expected unsafe.Pointer, expectedLength C.size_t, value unsafe.Pointer, length C.size_t, stands unsafe.Pointer, capacity C.size_t, standsLength *C.size_t) C.int32_t {
	s, name := storeOf(handle), C.GoString(key)
	return s.answer(func() error {
		setter, ok := s.store.(CompareSetter)
		if !ok {
			return fmt.Errorf("the store has no CompareSet")
		}
		wanted := append([]byte(nil), unsafe.Slice((*byte)(expected), expectedLength)...)
		found, err := setter.CompareSet(name, wanted, append([]byte(nil), unsafe.Slice((*byte)(value), length)...))
		if err == nil {
			*standsLength = C.size_t(len(found))
			copy(unsafe.Slice((*byte)(stands), capacity), found)
		}
		return err
	})
}

//export goStoreRemove
func goStoreRemove(handle C.uintptr_t, key *C.char) C.int32_t {
	return storeOf(handle).remove(C.GoString(key))
}

//export goStoreDrop
func goStoreDrop(handle C.uintptr_t) {
	cgo.Handle(handle).Delete()
}
