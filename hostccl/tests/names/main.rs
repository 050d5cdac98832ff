//! Calls of several threads on one communicator. Calls under different names pair name by name.
//! Calls under one name are refused.

#[path = "../common/mod.rs"]
mod common;
#[macro_use]
mod named;

mod collectives;
mod messages;
mod refusals;
mod timeouts;
