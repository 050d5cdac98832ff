// Package devicemesh is PyTorch's DeviceMesh for Go: a job says "I am (dp=2, tp=4)" and gets, for every dimension of that mesh, a ready communicator: NCCL's
// on GPUs, an embedded host engine elsewhere. It is a thin layer over the C library libdevicemesh, whose header documents every function.
//
//	mesh, err := devicemesh.Init(ctx, "cpu", []int{2, 4}, []string{"dp", "tp"}, nil) // collective: who am I, who are you
//	if err != nil {
//		return err
//	}
//	defer mesh.Close()
//	err = devicemesh.AllReduce(ctx, mesh, "dp", gradients, gradients, devicemesh.Avg) // in place
//
// # Errors
//
// Every failure is an *Error with the library's one line, which names the ranks. errors.Is knows its Status:
//
//	if errors.Is(err, devicemesh.ErrPeerLost) { ... }
//
// Wrong arguments, closed and finalized meshes, and nil ones are errors, never a crash.
//
// # Blocked calls and contexts
//
// A call that waits for other ranks takes a context. It holds an operating system's thread while it waits; other goroutines run on. It ends
// when all ranks came, when a rank is lost, or at the mesh's timeout; when the context is done before that, the mesh is aborted, and the other ranks
// get ErrPeerLost. There is no other way out of a collective: half of one cannot be taken back.
//
// # Goroutines
//
// Everything may be called from several goroutines. Collective calls of one world happen in the same order on every rank, so make those from
// one goroutine.
//
// # Memory
//
// Slices are used where they lie, without a copy, while the call runs. Buffer has the collectives on other memory, a GPU's for example.
package devicemesh

// #cgo CFLAGS: -I${SRCDIR}/../../include
// #cgo LDFLAGS: -L${SRCDIR}/../../target/release -ldevicemesh -Wl,-rpath,${SRCDIR}/../../target/release
import "C"
