//! PyTorch's DeviceMesh without Python. A job names the shape of its mesh, for example
//! (replicate=2, shard=4), and gets a ready communicator for every dimension of the mesh. It does
//! so through a stable C ABI, or from Rust as below.
//!
//! ```
//! use std::sync::Arc;
//! use devicemesh::comm::{World, WorldOptions, Operator, View};
//!
//! let world = Arc::new(World::join("cpu", &WorldOptions::default())?);           // collective: who am I, who are you
//! let ranks = world.size();
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
//! [`comm::World`] is the world that this process joins, under torchrun, an MPI launcher, Slurm or
//! `devicemesh run`, or alone ([`rendezvous`]). [`comm::View`] is a mesh with its communicators. A
//! Rust program needs nothing of the C ABI.
//!
//! | wanted | where |
//! |---|---|
//! | a mesh's shape, ranks, coordinates and groups, without a job or communicators | [`mesh::Mesh`], and [`layout`] below it |
//! | a world with options (rank and size by hand, a store, a library, deadlines) | [`comm::WorldOptions::new`] with [`rendezvous::JoinOptions::ranked`] |
//! | ranks of another order, as an n-dimensional array | [`comm::View::from_rank_array`]; [`mesh::Mesh::from_rank_array`] and [`mesh::Mesh::rank_array`] |
//! | lazy communicators and other options | [`mesh::MeshSpec`], [`comm::MeshOptions`] and [`comm::RootComms::create`] |
//! | slices, flattened dimensions, ranges, other shapes, going on after a rank has died | [`comm::View`] |
//! | going on after losses with spares in the places of lost ranks | [`comm::View::recover`] with [`comm::RecoverOptions`], [`comm::RootComms::recovered`] |
//! | collectives over slices in host memory | [`comm::View::all_reduce`] and its neighbours: safe, on device type cpu |
//! | collectives over buffers of bytes, in host memory or on a device | [`comm::Memory`], [`comm::View::collective`]: safe, with every data type |
//! | collectives over cudarc's device memory | `comm::View::on_stream`, with the feature `cudarc`: safe, on device type cuda (examples/all_reduce.rs) |
//! | barriers, and bytes from rank to rank through the store | [`comm::View::barrier`], [`comm::View::all_gather_bytes`] and the functions of [`comm::World`] with these names |
//! | the communicator itself, and other device memory | [`comm::View::comm`], [`comm::View::operate`]: what a closure does with it is `unsafe` |
//! | the block of a tensor that a rank holds | [`sharding`] |
//! | a function or a queue that gets events: slow calls, lost ranks, aborts, recoveries | [`events`] |
//! | the counters of the process for Prometheus | [`metrics::text`] |
//! | rank arrays that keep the dimensions with the most traffic inside a host | [`topology`] |
//!
//! Options, specifications and enums may grow. So make options and specifications by their
//! constructors or `default()`, set the fields that differ, and match enums with a wildcard.
//!
//! # What is unsafe
//!
//! Safe code cannot make the library read or write memory that is not there. So these calls are
//! `unsafe`: an operation of [`ccl::Library`] on raw memory; [`comm::RootComms::adopt`], which
//! takes communicators on your word; and naming a library ([`ccl::open`],
//! [`comm::WorldOptions::library`]), because its code runs in this process. `DM_CCL_LIBRARY` in
//! the environment names one too: whoever sets it vouches for it, as with LD_PRELOAD. Raw
//! communicators are made, polled and ended inside this crate alone.
//!
//! # Threads
//!
//! Everything is `Send` and `Sync`, except [`comm::Memory`] and its buffers, which stay on their
//! thread. Calls that make something (a mesh, a flattened dimension ...) happen in one order on
//! every rank. So do the collectives along one dimension. Never let two threads call along one
//! dimension without an order of their own, because nobody can know which call belongs to which
//! call of the other ranks. Calls that overlap get [`error::Status::Mismatch`], but results before
//! that may be mixed without an error. A group ([`comm::View::group_start`]) belongs to its thread
//! and to the library of its mesh.
//!
//! # The end
//!
//! A communicator ends by [`comm::RootComms::finalize`] or [`comm::RootComms::abort`] alone. A
//! program that joins worlds, makes meshes and only drops them keeps the memory of every
//! communicator until the process ends, because raw pointers to it may be in use. Call `finalize`
//! also before a normal exit, else other ranks may see [`error::Status::PeerLost`].
//!
//! # Errors
//!
//! Every function that can fail returns [`error::Result`]. Its error has a [`error::Status`] and
//! one line with the values. Every wait has a deadline. A panic is a bug, with one exception: a
//! few questions that give a plain value take an index and panic where there is nothing at it, as
//! a slice does. The documentation of these questions says so under "Panics". A panic of a
//! [`rendezvous::store::Store`] or of a closure that the caller gave passes through to the caller.
//! The version of this API is the crate's: below 1.0 a minor version may break it. Modules are
//! listed from the boundary to NCCL upwards in the project's ARCHITECTURE.md; [`ffi`] is the C
//! ABI, for C.

pub mod ccl;
pub mod comm;
mod digest;
pub mod error;
pub mod events;
pub mod ffi;
pub mod layout;
pub mod logging;
pub mod mesh;
pub mod metrics;
#[doc(hidden)]
pub mod printable;
mod rank_list;
mod recorder;
pub mod rendezvous;
pub mod sharding;
#[cfg(test)]
mod starved;
mod sync;
pub mod topology;
pub mod wait;

/// The arrays that [`mesh::Mesh::from_rank_array`] takes and [`mesh::Mesh::rank_array`] gives, in
/// the version that this crate uses.
pub use ndarray;

/// Device memory and streams for [`comm::OnStream`], in the version that this crate uses.
#[cfg(feature = "cudarc")]
pub use cudarc;

/// Safe code that must not compile.
///
/// ```compile_fail,E0133
/// let library = devicemesh::ccl::open("libnccl.so.2");
/// ```
/// ```compile_fail,E0133
/// let options = devicemesh::comm::WorldOptions::default().library("libnccl.so.2");
/// ```
/// ```compile_fail,E0616
/// let mut options = devicemesh::comm::WorldOptions::default();
/// options.library = Some("libnccl.so.2".to_owned());
/// ```
/// ```compile_fail,E0133
/// use devicemesh::{ccl, comm::RootComms, error::Result, mesh::Mesh};
/// fn adopt(library: std::sync::Arc<ccl::Library>, mesh: Mesh, comm: ccl::RawComm) {
///     let _ = RootComms::adopt(None, library, mesh, &[comm], true, std::time::Duration::from_secs(1));
/// }
/// ```
/// ```compile_fail,E0624
/// fn end(library: &devicemesh::ccl::Library, comm: devicemesh::ccl::RawComm) {
///     let _ = library.destroy(comm);
/// }
/// ```
/// ```compile_fail,E0624
/// fn end(library: &devicemesh::ccl::Library, comm: devicemesh::ccl::RawComm) {
///     let _ = library.abort(comm);
/// }
/// ```
/// ```compile_fail,E0624
/// fn ask(library: &devicemesh::ccl::Library, comm: devicemesh::ccl::RawComm) {
///     let _ = library.poll(comm);
/// }
/// ```
/// ```compile_fail,E0624
/// fn end(library: &devicemesh::ccl::Library, comm: devicemesh::ccl::RawComm) {
///     let _ = library.finalize(comm);
/// }
/// ```
/// A match without a wildcard, and a struct without `..`, would break when something is added:
/// ```compile_fail,E0004
/// match devicemesh::comm::Operator::Sum {
///     devicemesh::comm::Operator::Sum | devicemesh::comm::Operator::Product => {}
///     devicemesh::comm::Operator::Max | devicemesh::comm::Operator::Min | devicemesh::comm::Operator::Average => {}
/// }
/// ```
/// ```compile_fail,E0639
/// let options = devicemesh::comm::MeshOptions { lazy: true, dims: Vec::new(), timeout: None };
/// ```
/// A borrowed slice cannot be sent and received at once:
/// ```compile_fail,E0502
/// fn gather(mesh: &devicemesh::comm::View, values: &mut [f32]) {
///     let _ = mesh.all_gather("dp", &values[..1], values);
/// }
/// ```
#[cfg(doctest)]
pub mod refused_by_the_compiler {}

/// The code of docs/rust.md compiles.
#[cfg(all(doctest, feature = "cudarc"))]
#[doc = include_str!("../docs/rust.md")]
pub mod page_for_rust {}
