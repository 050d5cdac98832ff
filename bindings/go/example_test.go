package devicemesh_test

import (
	"context"
	"errors"
	"fmt"

	"libdevicemesh/devicemesh"
)

// This job has one process. Under a launcher it has as many ranks as the launcher started.
func Example() {
	ctx := context.Background()
	mesh, err := devicemesh.Init(ctx, "cpu", []int{1, 1}, []string{"dp", "tp"}, nil)
	if err != nil {
		panic(err)
	}
	defer mesh.Close()
	gradients := []float32{1, 2, 3}
	if err := devicemesh.AllReduce(ctx, mesh, "dp", gradients, gradients, devicemesh.Avg); err != nil {
		panic(err)
	}
	fmt.Println(mesh.Names(), gradients)

	_, err = mesh.Size("ep")
	fmt.Println(errors.Is(err, devicemesh.ErrNotFound))
	// Output:
	// [dp tp] [1 2 3]
	// true
}

// One process computes layouts and plans as rank 6 of 8, without a job.
func ExampleMesh_LocalShard() {
	ctx := context.Background()
	world, err := devicemesh.Join(ctx, "cpu", &devicemesh.WorldOptions{Size: 8, Rank: 6, Offline: true})
	if err != nil {
		panic(err)
	}
	defer world.Close()
	mesh, err := devicemesh.Init(ctx, "cpu", []int{2, 4}, []string{"fsdp", "tp"}, &devicemesh.MeshOptions{World: world})
	if err != nil {
		panic(err)
	}
	shape, offset, err := mesh.LocalShard([]devicemesh.Placement{devicemesh.Shard(0, 1), devicemesh.Shard(0, 0)}, []int{16}, -1)
	fmt.Println(shape, offset, err)
	// Output: [2] [10] <nil>
}
