//! NCCL's C API over host memory on one machine.

mod api;
mod body;
mod collective;
mod comm;
mod config;
mod copy;
mod error;
mod event;
mod functions;
mod group;
mod handle;
mod id;
mod join;
mod message;
mod operation;
mod process;
pub mod reduce;
mod segment;
mod setup;
mod split;
pub mod types;
mod wait;

pub use api::*;
