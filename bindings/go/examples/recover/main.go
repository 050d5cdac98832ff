// A job that heals, in Go: any rank may be killed at any time, and comes back as a new process.
//
//	devicemesh run -n 3 --restart rank --max-restarts 5 -- recover 400
//
// The ranks fit a line to data, and each takes its share of every batch. A rank that is killed is
// started again, and gets the weights from another rank. The others wait for it, so the result is
// that of a job that nobody disturbs.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"
	"os"
	"strconv"
	"time"

	"libdevicemesh/devicemesh"
)

const (
	samples = 64
	rate    = 0.5
	replace = time.Minute // How long the ranks wait for a process in the place of a lost one.
)

// training has the weights after the last step, and those before it, because the other ranks may
// be one step apart when a rank is lost.
type training struct {
	step            int64
	weights, before [2]float64
}

func main() {
	log.SetFlags(0)
	steps := int64(400)
	if len(os.Args) > 1 {
		steps, _ = strconv.ParseInt(os.Args[1], 10, 64)
	}
	say("is process %d", os.Getpid())
	err := run(context.Background(), steps)
	if errors.Is(err, devicemesh.ErrInvalidState) && os.Getenv("DM_JOIN") == "running" {
		// The exit code is 0, because the launcher would take any other code for a failed rank.
		say("comes too late: %v", err)
	} else if err != nil {
		log.Fatalf("rank %s: %v", os.Getenv("RANK"), err)
	}
}

func say(format string, values ...any) {
	fmt.Printf("rank %s %s\n", os.Getenv("RANK"), fmt.Sprintf(format, values...))
}

func run(ctx context.Context, steps int64) error {
	world, err := devicemesh.Join(ctx, "cpu", nil)
	if err != nil {
		return err
	}
	defer world.Close()
	size, err := strconv.Atoi(os.Getenv("DM_MESH_SIZE"))
	if err != nil {
		return err
	}
	mesh, err := devicemesh.Init(ctx, "cpu", []int{size}, []string{"dp"}, &devicemesh.MeshOptions{World: world})
	if err != nil {
		return err
	}
	recovery, err := mesh.Recovery()
	if err != nil {
		return err
	}
	var state training
	hasState := !recovery.HasJoined
	for {
		done, err := state.goOn(ctx, mesh, world, recovery, &hasState, steps)
		if done {
			break
		}
		letsIn := err == nil
		if err != nil {
			say("notices: %v", err)
		}
		next, err := mesh.Recover(ctx, &devicemesh.RecoverOptions{Replace: replace, HasState: hasState})
		if errors.Is(err, devicemesh.ErrAborted) {
			break // The others had agreed on the end of the job before a rank was lost.
		} else if errors.Is(err, devicemesh.ErrInvalidState) && letsIn {
			continue // The process that waited to join is lost by now.
		} else if err != nil {
			return err
		}
		mesh.Close()
		mesh = next
		if recovery, err = mesh.Recovery(); err != nil {
			return err
		}
		hasState = hasState && !recovery.HasJoined
		say("is in epoch %d", recovery.Epoch)
	}
	mesh.Close()
	say("is done: y = %.3f x %+.3f after step %d", state.weights[0], state.weights[1], state.step)
	return nil
}

// goOn trains in the mesh of one epoch. It returns whether the job has ended. When it returns
// false without an error, a process waits to join.
func (t *training) goOn(ctx context.Context, mesh *devicemesh.Mesh, world *devicemesh.World, recovery devicemesh.Recovery, hasState *bool, steps int64) (bool, error) {
	if recovery.Epoch > 0 {
		if err := t.share(ctx, mesh, recovery, *hasState); err != nil {
			return false, err
		}
		*hasState = true
	}
	done, err := t.train(ctx, mesh, world, steps)
	if err != nil || !done {
		return false, err
	}
	err = world.Finalize(ctx, 0)
	return err == nil, err
}

// train trains until the end, or until a process waits to join. It returns whether the training is
// done.
func (t *training) train(ctx context.Context, mesh *devicemesh.Mesh, world *devicemesh.World, steps int64) (bool, error) {
	for t.step < steps {
		if err := t.advance(ctx, mesh); err != nil {
			return false, err
		}
		if t.step%50 == 0 {
			say("is at step %d", t.step)
			count, err := world.Waiting()
			if err != nil {
				return false, err
			}
			waiting := []int32{int32(count)}
			if err := devicemesh.AllReduce(ctx, mesh, "dp", waiting, waiting, devicemesh.Sum); err != nil {
				return false, err
			}
			if waiting[0] > 0 && t.step < steps {
				return false, nil
			}
		}
		time.Sleep(time.Millisecond)
	}
	return true, nil
}

// advance makes one step on this rank's share of the samples of y = 3x - 1.
func (t *training) advance(ctx context.Context, mesh *devicemesh.Mesh) error {
	rank, err := mesh.LocalRank("dp")
	if err != nil {
		return err
	}
	size, err := mesh.Size("dp")
	if err != nil {
		return err
	}
	sums := make([]float64, 2)
	for i := rank; i < samples; i += size {
		x := 2*float64(i)/(samples-1) - 1
		off := t.weights[0]*x + t.weights[1] - (3*x - 1)
		sums[0] += off * x / samples
		sums[1] += off / samples
	}
	if err := devicemesh.AllReduce(ctx, mesh, "dp", sums, sums, devicemesh.Sum); err != nil {
		return err
	}
	t.before = t.weights
	t.weights[0] -= rate * sums[0]
	t.weights[1] -= rate * sums[1]
	t.step++
	return nil
}

// share brings the ranks to one state after a recovery. They go back to the last step that all
// have done, and the ranks that have joined get the weights.
func (t *training) share(ctx context.Context, mesh *devicemesh.Mesh, recovery devicemesh.Recovery, hasState bool) error {
	first := []int64{math.MaxInt64}
	if hasState {
		first[0] = t.step
	}
	if err := devicemesh.AllReduce(ctx, mesh, "dp", first, first, devicemesh.Min); err != nil {
		return err
	}
	if hasState && t.step > first[0] {
		t.weights = t.before
	}
	t.step = first[0]
	if len(recovery.JoinedRanks) == 0 {
		return nil
	}
	return devicemesh.Broadcast(ctx, mesh, "dp", t.weights[:], recovery.StateRoot)
}
