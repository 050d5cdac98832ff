package devicemesh

// #include "shim.h"
import "C"

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// The logger of SetLogger.
var (
	settingLogger sync.Mutex // Held while SetLogger changes the values below.
	loggerCalls   uint64     // How many calls of SetLogger have begun.
	newestMost    int        // The level that the newest of these calls gives the library.
	newestIsSet   bool       // Whether the newest of these calls has a logger.
	chosenLogger  atomic.Pointer[slog.Logger]
)

// The levels of the library's log, by DM_LOG_ERROR - 1 and so on.
var levels = [...]slog.Level{slog.LevelError, slog.LevelWarn, slog.LevelInfo, slog.LevelDebug}

// SetLogger gives the library's log to a logger: joining, each agreement of the ranks, each
// communicator with its cost, losses, aborts, deadlines that come near. It replaces what the
// environment variable DM_LOG has set. A message begins with the rank ("rank 3: ..."). nil logs
// nothing.
//
// The library makes the records that the logger takes now (Logger.Enabled): call SetLogger again
// when the logger's level has changed. The handler is called from any goroutine, from several at
// once. It may call Abort and the local functions of this package, but no collective ones, and must
// not end its goroutine. What such calls log is dropped. A panic of the handler is reported on
// stderr.
func SetLogger(logger *slog.Logger) error {
	most := C.DM_LOG_OFF
	if logger != nil {
		for at, level := range levels {
			if logger.Enabled(context.Background(), level) {
				most = at + 1
			}
		}
	}
	settingLogger.Lock()
	loggerCalls++
	mine, before := loggerCalls, chosenLogger.Load()
	newestMost, newestIsSet = most, logger != nil
	if logger != nil {
		// The first record may come before dm_set_log returns.
		chosenLogger.Store(logger)
	}
	settingLogger.Unlock()
	// dm_set_log waits for running handlers, and a handler may call SetLogger. So the lock is free.
	err := failure(C.go_set_log(C.int32_t(most), C.bool(logger != nil)))
	settingLogger.Lock()
	defer settingLogger.Unlock()
	if mine != loggerCalls {
		// A call that began later chooses the logger, and may have reached the library first.
		for again := uint64(0); again != loggerCalls; {
			again = loggerCalls
			most, isSet := newestMost, newestIsSet
			settingLogger.Unlock()
			C.go_set_log(C.int32_t(most), C.bool(isSet))
			settingLogger.Lock()
		}
		return err
	}
	if failed, ok := err.(*Error); ok && failed.Status != ErrTimeout {
		chosenLogger.Store(before)
	} else {
		chosenLogger.Store(logger)
	}
	return err
}

//export goLog
func goLog(level C.int32_t, message *C.char) {
	logger := chosenLogger.Load()
	if logger == nil || level < 1 || int(level) > len(levels) {
		return
	}
	text := C.GoString(message)
	// A panic must not unwind the library's frames, which called this function.
	defer func() {
		if panicked := recover(); panicked != nil {
			fmt.Fprintf(os.Stderr, "devicemesh: the logger panicked (%v) at the record: %s\n", panicked, text)
		}
	}()
	ctx, handler, chosen := context.Background(), logger.Handler(), levels[level-1]
	if handler.Enabled(ctx, chosen) {
		// The record has no place in the source: the library's would be of no use.
		if err := handler.Handle(ctx, slog.NewRecord(time.Now(), chosen, text, 0)); err != nil {
			fmt.Fprintf(os.Stderr, "devicemesh: the logger failed (%v) at the record: %s\n", err, text)
		}
	}
}
