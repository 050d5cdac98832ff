// Data-parallel training in Go: every rank fits the same line to its own part of the data, and the
// gradients are averaged over the ranks. Start it with
//
//	devicemesh run -n 4 -- go run ./examples/dataparallel
package main

import (
	"context"
	"fmt"
	"log"
	"math"
	"math/rand/v2"
	"os"
	"os/signal"

	"libdevicemesh/devicemesh"
)

const (
	samples = 1000 // The number of samples of each rank.
	steps   = 400
	rate    = 0.3
)

func main() {
	log.SetFlags(0)
	// Ctrl-C ends a blocked collective, too.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := train(ctx); err != nil {
		log.Fatal(err)
	}
}

func train(ctx context.Context) error {
	world, err := devicemesh.Join(ctx, "cpu", nil)
	if err != nil {
		return err
	}
	defer world.Close()
	size, err := world.Size()
	if err != nil {
		return err
	}
	mesh, err := devicemesh.Init(ctx, "cpu", []int{size}, []string{"dp"}, &devicemesh.MeshOptions{World: world})
	if err != nil {
		return err
	}
	defer mesh.Close()
	rank, err := mesh.LocalRank("dp")
	if err != nil {
		return err
	}

	// The data is y = 3x - 1. Rank r has the values of x in its own part of -1 .. 1.
	random := rand.New(rand.NewPCG(1, uint64(rank)))
	xs, ys := make([]float64, samples), make([]float64, samples)
	for i := range xs {
		xs[i] = -1 + 2*(float64(rank)+random.Float64())/float64(size)
		ys[i] = 3*xs[i] - 1 + 0.01*random.NormFloat64()
	}
	// All ranks start with rank 0's weights.
	weights := []float64{random.Float64(), random.Float64()}
	if err := devicemesh.Broadcast(ctx, mesh, "dp", weights, 0); err != nil {
		return err
	}
	for step := range steps {
		sums := make([]float64, 3) // The gradient and the loss.
		for i, x := range xs {
			off := weights[0]*x + weights[1] - ys[i]
			sums[0] += 2 * off * x / samples
			sums[1] += 2 * off / samples
			sums[2] += off * off / samples
		}
		if err := devicemesh.AllReduce(ctx, mesh, "dp", sums, sums, devicemesh.Avg); err != nil {
			return err
		}
		weights[0] -= rate * sums[0]
		weights[1] -= rate * sums[1]
		if rank == 0 && (step+1)%100 == 0 {
			fmt.Printf("step %d  loss %.5f\n", step+1, sums[2])
		}
	}

	// Every rank has the same line, bit by bit.
	all := make([]float64, 2*size)
	if err := devicemesh.AllGather(ctx, mesh, "dp", weights, all); err != nil {
		return err
	}
	for i, weight := range all {
		if math.Float64bits(weight) != math.Float64bits(weights[i%2]) {
			return fmt.Errorf("rank %d has %v, rank %d has %v", i/2, all[i/2*2:i/2*2+2], rank, weights)
		}
	}
	if rank == 0 {
		fmt.Printf("y = %.2f x %+.2f on all %d ranks\n", weights[0], weights[1], size)
	}
	return mesh.Finalize(ctx)
}
