//! Communicators of a mesh: which ones a root mesh has, when they are made, with whom they are shared, and how they end.
//!
//! - [`Domain`]: the communicators of one world, by the ranks they join; what two meshes can share is kept here.
//! - `Communicator`: one communicator of this rank, made or still to be made.
//! - [`RootComms`]: what a root mesh owns: its dimensions' communicators, its agreement scope, its life (abort, finalize).
//! - [`View`]: a mesh view with its dimensions' communicators at hand. This is what a `dm_mesh` handle names.
//! - [`Element`] and [`Operator`]: what its typed collectives take.
//! - [`Memory`], [`Buffer`] and [`Collective`]: collectives whose element type is known only when the program runs, on the host and on devices.

mod beside;
mod buffers;
mod communicator;
mod default_world;
mod dims;
mod domain;
mod elements;
mod gate;
mod groups;
mod life;
mod making;
#[cfg(feature = "cudarc")]
mod on_stream;
mod operations;
mod options;
mod root;
mod shrink;
mod slices;
mod view;

pub use buffers::{Buffer, BufferAt, Collective, Memory};
pub(crate) use default_world::DefaultWorld;
pub use domain::{Domain, DomainOptions};
pub use elements::{Element, Operator};
pub(crate) use groups::refuse as refuse_in_group;
#[cfg(feature = "cudarc")]
pub use on_stream::{DeviceBuffer, OnStream};
pub use operations::Operands;
pub(crate) use operations::Shape;
pub use options::{DimOptions, MeshOptions};
pub use root::RootComms;
pub(crate) use view::DimComms;
pub use view::View;
