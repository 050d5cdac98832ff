//! PyTorch's DeviceMesh without Python: a job says "I am (replicate=2, shard=4)" and gets, for every dimension of that
//! mesh, a ready communicator, through a stable C ABI, or from Rust as below.
//!
//! # From Rust
//!
//! Nothing of the C ABI is needed: [`comm::Domain`] is the world that this process joins (torchrun, MPI launchers, Slurm, `devicemesh run`, or a process
//! alone: [`rendezvous`]), [`comm::View`] a mesh with its communicators.
//!
//! ```
//! use std::sync::Arc;
//! use devicemesh::comm::{Domain, DomainOptions, Operator, View};
//!
//! let world = Arc::new(Domain::join("cpu", &DomainOptions::default())?);           // collective: who am I, who are you
//! let ranks = world.world().size();
//! let mesh = View::init(&world, &[ranks, 1], &["replicate", "shard"])?;            // collective: every dimension gets a communicator
//!
//! let mut gradients = vec![1.0f32; 1000];
//! mesh.all_reduce("replicate", &mut gradients, Operator::Sum)?;                    // collective over the ranks along that dimension
//! assert_eq!(gradients, vec![ranks as f32; 1000]);
//!
//! let shard = mesh.slice(&["shard"])?;                                             // a view; nothing is made
//! assert_eq!((shard.mesh().shape(), shard.mesh().local_rank(0)?), (vec![1], 0));
//! assert_eq!(mesh.slice(&["pipeline"]).err().unwrap().status(), devicemesh::error::Status::NotFound);
//! mesh.root_comms().finalize()?;                                                   // collective
//! # Ok::<(), devicemesh::error::Error>(())
//! ```
//!
//! | wanted | where |
//! |---|---|
//! | a mesh's shape, ranks, coordinates and groups, without a job or communicators | [`mesh::Mesh`], and [`layout`] below it |
//! | a world with options (rank and size by hand, a store, a library, deadlines) | [`comm::DomainOptions`] with [`rendezvous::JoinOptions`] |
//! | ranks of another order, lazy communicators | [`mesh::MeshSpec`], [`comm::MeshOptions`] and [`comm::RootComms::create`] |
//! | slices, flattened dimensions, ranges, other shapes, going on after a rank has died | [`comm::View`] |
//! | collectives over slices in host memory | [`comm::View::all_reduce`] and its neighbours: safe, on device type cpu |
//! | the communicator itself, and NCCL on device memory | [`comm::View::comm`], [`comm::View::operate`]: what a closure does with it is `unsafe` (examples/all_reduce.rs) |
//! | the block of a tensor that a rank holds | [`sharding`] |
//! | rank arrays that keep chatty dimensions close | [`topology`] |
//!
//! Everything fallible gives [`error::Result`]: a [`error::Status`] and one line that carries the values. Every wait has a deadline. A panic is a bug.
//! The version of this API is the crate's: below 1.0 a minor version may break it. Modules are listed from the boundary to NCCL upwards in the
//! project's ARCHITECTURE.md; [`ffi`] is the C ABI, for C.

pub mod ccl;
pub mod comm;
pub mod digest;
pub mod error;
pub mod ffi;
pub mod layout;
pub mod mesh;
pub mod printable;
pub mod rendezvous;
pub mod sharding;
pub mod topology;
pub mod wait;
