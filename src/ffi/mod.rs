//! The C ABI: argument checks, the handle table, and one guard around every export. The layers
//! below do the work.
//!
//! include/devicemesh.h is generated from the files of this folder (`make header`), so their doc
//! comments are the C documentation. These rules hold for every function. A function that can fail
//! returns a status (a few questions return a value instead, and one value then says "none").
//! Outputs come last and are written on success only, with two exceptions: a length (`len_out`) is
//! written as soon as it is known, and `joining_out` before the join waits. NULL is checked,
//! strings are copied in, and a panic becomes `DM_STATUS_INTERNAL`.

#![allow(rustdoc::broken_intra_doc_links, reason = "these comments are the C header's, where brackets are indices")]
#![allow(non_camel_case_types)]

mod arguments;
mod ask;
mod collectives;
mod communicators;
mod control;
mod dim;
mod errors;
mod events;
mod guard;
mod handles;
mod kinds;
mod life;
mod logging;
mod make;
mod neighbors;
mod operation;
mod options;
mod pointers;
mod ragged;
mod recovery;
mod registry;
mod release;
mod sharding;
mod structs;
mod text;
mod topology;
mod types;
mod views;
mod world;
mod world_info;

pub use ask::*;
pub use collectives::*;
pub use communicators::*;
pub use control::*;
pub use errors::*;
pub use events::*;
pub use life::*;
pub use logging::*;
pub use make::*;
pub use neighbors::*;
pub use ragged::*;
pub use recovery::*;
pub use registry::*;
pub use sharding::*;
pub use structs::*;
pub use text::*;
pub use topology::*;
pub use types::*;
pub use views::*;
pub use world::*;
pub use world_info::*;
