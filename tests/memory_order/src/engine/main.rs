//! The protocols of the host engine. The files with a `#[path]` are the engine's own. The other
//! modules have what these files need of the rest of the engine.

// The files have more than the models use.
#![allow(dead_code)]

use std::process::ExitCode;

use memory_order::check::{self, Kept, Model};
use memory_order::{futex, plain, sync};

#[path = "../../../../hostccl/src/admission.rs"]
mod admission;
#[path = "../../../../hostccl/src/blame.rs"]
mod blame;
#[path = "../../../../hostccl/src/call_name.rs"]
mod call_name;
mod comm;
mod common_name;
#[path = "../../../../hostccl/src/crowd.rs"]
mod crowd;
mod error;
#[path = "../../../../hostccl/src/event.rs"]
mod event;
#[path = "../../../../hostccl/src/flow.rs"]
mod flow;
mod labels;
#[path = "../../../../hostccl/src/message.rs"]
mod message;
mod models;
#[path = "../../../../hostccl/src/operation.rs"]
mod operation;
#[path = "../../../../hostccl/src/places.rs"]
mod places;
#[path = "../../../../hostccl/src/poll.rs"]
mod poll;
mod process;
mod segment;
#[path = "../../../../hostccl/src/turn.rs"]
mod turn;
mod types;

/// Why the cells of a seat keep their order.
const WANTED: &str = "the word `wants` orders the cells, too; common_name.rs and `show_others`, which no model has, use them as well";

/// Why no model runs the code that shares the cells among many calls.
const FEW_CALLS: &str = "the calls of a model fit into the 16 cells of a seat";

/// The orders that no model needs.
const KEPT: &[Kept] = &[
    Kept {
        function: "Places::slow_down",
        code: "compare_exchange(now, NO_TAG",
        half: "acquire",
        why: "the fence of `Places::tell`, which every caller that waits for its turn reaches later, acquires as well",
    },
    Kept {
        function: "Pass::remove",
        code: "wanted[cell].store(0, Ordering::SeqCst)",
        half: "release",
        why: WANTED,
    },
    Kept {
        function: "publish",
        code: "wanted[cell].store(entry.tag, Ordering::SeqCst)",
        half: "release",
        why: WANTED,
    },
    Kept {
        function: "wanted_by_all",
        code: "cell.load(Ordering::SeqCst)",
        half: "acquire",
        why: WANTED,
    },
    Kept {
        function: "answer",
        code: "wanted",
        half: "any",
        why: FEW_CALLS,
    },
    Kept {
        function: "show_others",
        code: "wanted",
        half: "any",
        why: FEW_CALLS,
    },
];

fn main() -> ExitCode {
    let models: Vec<Model> = models::all();
    check::main(&models, KEPT)
}
