//! PyTorch's DeviceMesh without Python: a job says "I am (replicate=2, shard=4)" and gets, for every dimension of that
//! mesh, a ready communicator, through a stable C ABI.

pub mod ccl;
pub mod comm;
pub mod digest;
pub mod error;
pub mod ffi;
pub mod layout;
pub mod mesh;
pub mod rendezvous;
pub mod sharding;
pub mod topology;
pub mod wait;
