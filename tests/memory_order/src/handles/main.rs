//! The table of handles. The file with a `#[path]` is the library's own.

// The file has more than the models use.
#![allow(dead_code)]

// The table takes its epochs from crossbeam_epoch. The module `epoch` has what that crate promises.
extern crate self as crossbeam_epoch;

mod epoch;
mod error;
#[path = "../../../../src/ffi/handles.rs"]
mod handles;
mod models;

use std::process::ExitCode;

use memory_order::check::{self, Program};
use memory_order::sync;

pub use self::epoch::{Atomic, Guard, Owned, Shared, pin};

fn main() -> ExitCode {
    let (models, kept, sturdy) = (models::MODELS, models::KEPT, models::STURDY);
    check::main(&Program { folder: "src/handles", models, kept, sturdy })
}
