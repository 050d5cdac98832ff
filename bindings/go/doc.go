// Package devicemesh is PyTorch's DeviceMesh for Go: a job says "I am (dp=2, tp=4)" and gets, for
// every dimension of that mesh, a ready communicator: NCCL's on GPUs, an embedded host engine
// elsewhere. It is a thin layer over the C library libdevicemesh, whose header documents every
// function.
//
//	mesh, err := devicemesh.Init(ctx, "cpu", []int{2, 4}, []string{"dp", "tp"}, nil) // collective: who am I, who are you
//	if err != nil {
//		return err
//	}
//	defer mesh.Close() // frees the handle alone
//	err = devicemesh.AllReduce(ctx, mesh, "dp", gradients, gradients, devicemesh.Avg) // in place
//	if err != nil {
//		return err
//	}
//	return mesh.Finalize(ctx) // collective: ends the communicators
//
// A communicator ends by Finalize or Abort alone, of the mesh or of its world. A program that joins
// worlds, makes meshes and only closes them keeps the memory of every communicator until
// World.Finalize or the end of the process. Call Finalize also before a normal exit, else other
// ranks may see ErrPeerLost.
//
// # Ranks
//
// A world rank is a process's number in the world. A rank along a dimension is its number in its
// group along that dimension: its coordinate there, and what Send, Recv and root arguments take.
// Neighbor gives the latter. TranslateRank and TranslateWorldRank make one of the other.
//
// # Errors
//
// Every failure is an *Error with the library's one line, which names the ranks. One case is
// different: when the context was done before the call, the error is the context's own. errors.Is
// knows the Status of an *Error:
//
//	if errors.Is(err, devicemesh.ErrPeerLost) { ... }
//
// errors.As gives as data which ranks the failure is about, which of them are lost, the dimension,
// how long the call waited, and the number of the call. Mesh.Shrink goes on without the ranks that
// are lost.
//
// Wrong arguments, closed and finalized meshes, and nil ones are errors, never a crash.
//
// # Blocked calls and contexts
//
// A call that waits for other ranks takes a context. It holds an operating system's thread while
// it waits; other goroutines run on. The call ends when all ranks have come, when a rank is lost,
// or at the mesh's timeout. When the context is done before that, the mesh is aborted: this rank
// gets ErrAborted, and the other ranks get ErrPeerLost. A collective cannot be left in another
// way, because half of it cannot be undone.
//
// Arguments are checked first, then the context. When the context is done before the call, the
// call begins nothing and aborts nothing. The error is then the context's own (errors.Is finds
// context.Canceled and the cause) and not an *Error. The other ranks are not told, and wait for
// this one until their timeout. A nil context gives ErrInvalidArgument.
//
// CallOptions.Timeout bounds one call that makes dimensions or ends a mesh. Such a call fails with
// ErrTimeout where ranks do not come, and leaves the mesh as it was.
//
// When another goroutine calls Close, a blocked call goes on, and its context can still end it.
//
// # Groups
//
// Mesh.Group collects operations and makes them when its function has returned nil. When the
// function fails or panics, or when an operation was refused, none of them is made. Operations
// inside the function take exactly the context that the function gets. An operation with another
// context is refused, also with a context that is derived from it: the deadline or the
// cancellation of a group belongs to the context that is given to Group. When that context is done
// before the operations are made, none of them is made, and the error is the context's own.
//
// # Goroutines
//
// Everything may be called from several goroutines. Calls that make something (Init, Flatten,
// Finalize ...) happen in one order on every rank, so make those of one world from one goroutine.
// The same holds for the collectives along one dimension. Never let two goroutines call along one
// dimension without an order of their own, because nobody can know which call belongs to which
// call of the other ranks. Calls that overlap are refused with ErrMismatch, but results before
// that may be mixed without an error.
//
// # Memory
//
// Slices are used where they lie, without a copy, while the call runs: also a part of an array or
// a struct that holds pointers. They are pinned during the call, and in a group until Group
// returns. The send and the receive buffer must not overlap, or must be exactly in place as the
// header says. Any other overlap is refused. A Buffer is other memory, for example a GPU's.
package devicemesh

// #cgo CFLAGS: -I${SRCDIR}/../../include
// #cgo LDFLAGS: -L${SRCDIR}/../../target/release -ldevicemesh -Wl,-rpath,${SRCDIR}/../../target/release
import "C"
