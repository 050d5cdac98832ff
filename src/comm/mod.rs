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
//! - The control plane (control.rs): barriers, and bytes that travel through the store.
//! - [`Element`] and [`Operator`]: the element types and reductions of a view's typed collectives.
//! - [`Memory`], [`Buffer`] and [`Collective`]: collectives whose element type is known only when
//!   the program runs, on the host and on devices.
//!
//! A file imports files of lower layers only, and within a layer only files to its left:
//!
//! ```text
//! 7  what a program calls     operations  order  control  ragged  check  lost  view_groups  slices  buffers  collective  on_stream  stream_wait  default_world
//! 6  collective calls         certificate  lazy  view  new_dims  create  shrink  end  world_end  next_mesh  newcomer  recover_turns  recover
//! 5  their work               maker  dims
//! 4  the steps of a call      call_log  call
//! 3  who calls                world  root
//! 2  sets of communicators    ending  groups  sharing  recovered  recovering
//! 1  one communicator         world_device  handle  failure  communicator
//! 0  tools                    gate  background  refusal  polling  names  elements  options  path  turn  world_options
//! ```

mod background;
mod buffers;
mod call;
mod call_log;
mod certificate;
mod check;
mod collective;
mod communicator;
mod control;
mod create;
mod default_world;
mod dims;
mod elements;
mod end;
mod ending;
mod failure;
mod gate;
mod groups;
mod handle;
mod lazy;
mod lost;
mod maker;
mod names;
mod new_dims;
mod newcomer;
mod next_mesh;
#[cfg(feature = "cudarc")]
mod on_stream;
mod operations;
mod options;
mod order;
mod path;
mod polling;
mod ragged;
mod recover;
mod recover_turns;
mod recovered;
mod recovering;
mod refusal;
mod root;
mod sharing;
mod shrink;
mod slices;
mod stream_wait;
mod turn;
#[cfg(test)]
pub(crate) mod two_ranks;
mod view;
mod view_groups;
mod world;
mod world_device;
mod world_end;
mod world_options;

pub use buffers::{Buffer, BufferAt, Memory};
pub use collective::Collective;
pub(crate) use create::adopted_position;
pub(crate) use default_world::{abort_default_worlds, default_world, default_world_to_tell, finalize_default_worlds};
pub use elements::{Element, Operator};
pub(crate) use groups::{end_in_vain as end_group_in_vain, refuse as refuse_in_group};
#[cfg(feature = "cudarc")]
pub use on_stream::{DeviceBuffer, OnStream};
pub(crate) use operations::BufferShape;
pub use operations::Operands;
pub use options::{CallOptions, DimOptions, MeshOptions, RecoverOptions};
pub(crate) use ragged::{Counts, Exchange};
pub use recovered::Recovered;
pub use root::RootComms;
pub use view::View;
pub(crate) use view::{Along, DimComms};
pub use world::World;
pub use world_options::WorldOptions;
