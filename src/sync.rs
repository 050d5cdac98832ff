//! The atomics and locks of the table of handles.
//!
//! tests/memory_order compiles the table, too. There another module `sync` takes the place of this
//! one and exports loom's atomics and locks, which show what a weak memory order may do.

pub(crate) use std::sync::Mutex;
pub(crate) use std::sync::atomic::AtomicPtr;
