//! The atomics and locks of the protocols between the ranks of a host, and between threads.
//!
//! tests/memory_order compiles the files of these protocols, too. There another module `sync` takes
//! the place of this one and exports loom's atomics and locks, which show what a weak memory order
//! may do. So a file of such a protocol takes its atomics from here.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU32, AtomicU64, Ordering, fence};
pub(crate) use std::sync::{Mutex, MutexGuard};
