//! Communicators of a mesh: which ones a root mesh has, when they are made, with whom they are
//! shared, and how they end.
//!
//! - [`World`]: a world with its communicators; what two meshes can share is kept here.
//! - `Communicator`: one communicator of this rank, made or still to be made.
//! - [`RootComms`]: a root mesh with its communicators, its agreement scope and its life (abort,
//!   finalize).
//! - `Call`: a collective call, from its turn to its end. call.rs says what "collective" means
//!   here.
//! - [`View`]: a mesh view with its dimensions' communicators at hand. This is what a `dm_mesh`
//!   handle names.
//! - [`Element`] and [`Operator`]: what its collectives over slices take.
//!
//! A file imports files of lower layers only, and within a layer only files to its left:
//!
//! ```text
//! 7  what a program calls     operations  view_groups  slices  default_world
//! 6  collective calls         lazy  view  new_dims  create  shrink  end
//! 5  their work               maker  dims
//! 4  the ritual of a call     call
//! 3  who calls                world  root
//! 2  sets of communicators    ending  groups  sharing
//! 1  one communicator         failure  communicator
//! 0  tools                    gate  background  polling  names  options
//! ```

mod background;
mod call;
mod communicator;
mod create;
mod default_world;
mod dims;
mod end;
mod ending;
mod failure;
mod gate;
mod groups;
mod lazy;
mod maker;
mod names;
mod new_dims;
mod operations;
mod options;
mod polling;
mod root;
mod sharing;
mod shrink;
mod slices;
mod view;
mod view_groups;
mod world;

pub(crate) use create::adopted_position;
pub(crate) use default_world::{abort_default_worlds, default_world};
pub(crate) use groups::{end_in_vain as end_group_in_vain, refuse as refuse_in_group};
pub use operations::Operands;
pub(crate) use operations::Shape;
pub use options::{DimOptions, MeshOptions};
pub use root::RootComms;
pub use slices::{Element, Operator};
pub(crate) use view::DimComms;
pub use view::View;
pub use world::{World, WorldOptions};
