//! Sums along both dimensions of a (replicate, shard) mesh, from Rust without the C ABI and without
//! `unsafe`. The elements lie on the GPU, as cudarc's `CudaSlice`, where there is a driver and
//! NCCL; in host memory elsewhere.
//!
//! ```sh
//! cargo build --bin devicemesh --example all_reduce --features cudarc
//! target/debug/devicemesh run -n 4 -- target/debug/examples/all_reduce
//! ```

#![forbid(unsafe_code)]

use std::error::Error;
use std::sync::Arc;

use devicemesh::ccl;
use devicemesh::comm::{Operator, View, World, WorldOptions};
use devicemesh::cudarc::driver::{CudaContext, CudaSlice, CudaStream};

const COUNT: usize = 1 << 20;

/// Elements where the device type wants them, and the stream that they are used on.
enum Memory {
    Host(Vec<f32>),
    Device(CudaSlice<f32>, Arc<CudaStream>),
}

impl Memory {
    /// Allocates on the device that the library has chosen for this rank.
    fn new(world: &World, value: f32) -> Result<Memory, Box<dyn Error>> {
        let Some(device) = world.device() else { return Ok(Memory::Host(vec![value; COUNT])) };
        let stream = CudaContext::new(device)?.new_stream()?;
        Ok(Memory::Device(stream.clone_htod(&vec![value; COUNT])?, stream))
    }

    /// Sums over this rank's group along a dimension, in place.
    fn sum_along(&mut self, mesh: &View, dim: &str) -> devicemesh::error::Result<()> {
        match self {
            Memory::Host(values) => mesh.all_reduce(dim, values, Operator::Sum),
            Memory::Device(slice, stream) => mesh.on_stream(stream)?.all_reduce(dim, slice, Operator::Sum),
        }
    }

    /// A copy of the elements. On the GPU it waits for what the stream has to do before.
    fn values(&self) -> Result<Vec<f32>, Box<dyn Error>> {
        match self {
            Memory::Host(values) => Ok(values.clone()),
            Memory::Device(slice, stream) => {
                let values = stream.clone_dtoh(slice)?;
                stream.synchronize()?;
                Ok(values)
            }
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let has_gpu = ccl::has_device() && ccl::for_device("cuda").is_ok();
    let device_type = if has_gpu { "cuda" } else { "cpu" };
    let world = Arc::new(World::join(device_type, &WorldOptions::default())?);
    let mut memory = Memory::new(&world, 1.0)?;
    let (rank, size) = (world.rank(), world.size());
    let replicas = if size % 2 == 0 { 2 } else { 1 };
    let mesh = View::init(&world, &[replicas, size / replicas], &["replicate", "shard"])?;
    for dim in ["replicate", "shard"] {
        memory.sum_along(&mesh, dim)?;
    }
    // Each element was 1: the sum over the shards and the replicas is the number of ranks.
    let values = memory.values()?;
    let wrong = values.iter().filter(|value| **value != size as f32).count();
    println!("rank {rank} on {device_type}: {COUNT} elements are {}, {wrong} are not {size}", values[0]);
    mesh.root_comms().finalize()?;
    if wrong > 0 { Err(format!("{wrong} wrong sums").into()) } else { Ok(()) }
}
