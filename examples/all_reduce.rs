//! The Rust crate without the C ABI: joins the world, makes a (replicate, shard) mesh and sums along both dimensions. On the GPU where there is a driver and
//! NCCL, with memory and stream by cudarc; in host memory elsewhere.
//!
//! ```sh
//! cargo build --bin devicemesh --example all_reduce
//! target/debug/devicemesh run -n 4 -- target/debug/examples/all_reduce
//! ```

use std::error::Error;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use devicemesh::ccl;
use devicemesh::comm::{MeshOptions, Operands, RootComms, View, World, WorldOptions};
use devicemesh::mesh::{Mesh, MeshSpec};

const COUNT: usize = 1 << 20;

/// Elements where the device type wants them, and what they are to be used on.
enum Memory {
    Host(Vec<f32>),
    Device(CudaSlice<f32>, Arc<CudaStream>),
}

impl Memory {
    /// The device is chosen here, before the world is joined: the library takes what is current.
    fn new(value: f32) -> Result<Memory, Box<dyn Error>> {
        // Not before: cudarc needs a driver that has every function it knows.
        if !(ccl::has_device() && ccl::for_device("cuda").is_ok()) {
            return Ok(Memory::Host(vec![value; COUNT]));
        }
        let local_rank: usize = std::env::var("LOCAL_RANK").ok().and_then(|rank| rank.parse().ok()).unwrap_or(0);
        let device = CudaContext::new(local_rank % CudaContext::device_count()?.max(1) as usize)?;
        device.bind_to_thread()?;
        let stream = device.new_stream()?;
        Ok(Memory::Device(stream.clone_htod(&vec![value; COUNT])?, stream))
    }

    fn device_type(&self) -> &'static str {
        match self {
            Memory::Host(_) => "cpu",
            Memory::Device(..) => "cuda",
        }
    }

    /// Address and stream, as communicator libraries want them.
    fn place(&mut self) -> (*mut c_void, *mut c_void) {
        match self {
            Memory::Host(values) => (values.as_mut_ptr().cast(), std::ptr::null_mut()),
            Memory::Device(slice, stream) => (slice.device_ptr(stream).0 as *mut c_void, stream.cu_stream().cast()),
        }
    }

    fn values(&self) -> Result<Vec<f32>, Box<dyn Error>> {
        match self {
            Memory::Host(values) => Ok(values.clone()),
            Memory::Device(slice, stream) => Ok(stream.clone_dtoh(slice)?),
        }
    }
}

/// Sums float32 over this rank's group along a dimension, in place.
fn sum(mesh: &View, index: usize, memory: &mut Memory) -> devicemesh::error::Result<()> {
    const FLOAT32: i32 = 7;
    const SUM: i32 = 0;
    let (at, stream) = memory.place();
    let operands = Operands::new(COUNT, FLOAT32, stream);
    mesh.operate("all_reduce", index, operands, &[("values", at.cast_const())], |library, comm| {
        // SAFETY: COUNT elements lie there until the stream is done, which `values` waits for.
        unsafe { library.all_reduce(at, at, COUNT, FLOAT32, SUM, comm, stream) }
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut memory = Memory::new(1.0)?;
    let device_type = memory.device_type();
    let domain = Arc::new(World::join(device_type, &WorldOptions::default())?);
    let (rank, size) = (domain.rank(), domain.size());
    let replicas = if size % 2 == 0 { 2 } else { 1 };
    let shape = [replicas, size / replicas];
    let spec = MeshSpec::new(device_type, &shape, size, rank).names(&["replicate", "shard"]);
    let mesh = View::of_root(RootComms::create(&domain, Mesh::new(&spec)?, &MeshOptions::default())?);
    for index in 0..2 {
        sum(&mesh, index, &mut memory)?;
    }
    // Ones, summed over the shards and then over the replicas.
    let values = memory.values()?;
    let wrong = values.iter().filter(|value| **value != size as f32).count();
    println!("rank {rank} on {device_type}: {COUNT} elements are {}, {wrong} are not {size}", values[0]);
    mesh.root_comms().finalize()?;
    if wrong > 0 { Err(format!("{wrong} wrong sums").into()) } else { Ok(()) }
}
