//! The data that the tests of hostccl send, and the results that they expect, computed by plain
//! loops.
//!
//! This crate is apart from the tests because `make test` optimises this crate and not the tests.
//! The tests make hundreds of millions of elements. No public function of this crate is generic or
//! takes a closure, because such a function would be compiled with the test that calls it.

mod bytes;
pub mod numbers;
mod reference;
pub mod small;

pub use bytes::pattern;
pub use reference::{reduced, sample};
