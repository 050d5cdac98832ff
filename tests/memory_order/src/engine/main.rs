//! The protocols of the host engine. The files with a `#[path]` are the engine's own. The other
//! modules have what these files need of the rest of the engine.

// The files have more than the models use.
#![allow(dead_code)]

use std::process::ExitCode;

use memory_order::check::{self, Kept, Program};
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
#[path = "../../../../hostccl/src/cut.rs"]
mod cut;
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
const WANTED: &str = "the word `wants` orders the cells, too; common_name.rs and `show_others`, which no model has, \
                      use them as well";

/// Why no model runs the code that shares the cells among many calls.
const FEW_CALLS: &str = "the calls of a model fit into the 16 cells of a seat";

/// The orders that no model needs, and the accesses that no model reaches.
const KEPT: &[Kept] = &[
    Kept {
        function: "Places::slow_down",
        code: "if word.compare_exchange(now, NO_TAG, Ordering::Acquire, Ordering::Relaxed).is_ok() {",
        half: "acquire",
        why: "the fence of `Places::tell`, which every caller that waits for its turn reaches later, acquires as well",
    },
    Kept {
        function: "Seat::take",
        code: "if self.claim.compare_exchange(0, 1, Ordering::Relaxed, Ordering::Acquire).is_err() {",
        half: "acquire on failure",
        why: "the number of the process is for a message; the caller cannot tell a number that is not written yet from \
              one that it does not see",
    },
    Kept {
        function: "Pass::remove",
        code: "comm.segment.seat(comm.rank).wanted[cell].store(0, Ordering::SeqCst);",
        half: "release",
        why: WANTED,
    },
    Kept {
        function: "publish",
        code: "seat.wanted[cell].store(entry.tag, Ordering::SeqCst);",
        half: "release",
        why: WANTED,
    },
    Kept {
        function: "wanted_by_all",
        code: "let tags = |rank: usize| comm.segment.seat(rank).wanted.iter().map(|cell| cell.load(Ordering::SeqCst));",
        half: "acquire",
        why: WANTED,
    },
    Kept {
        function: "answer",
        code: "comm.segment.seat(0).wanted.iter().map(|cell| cell.load(Ordering::SeqCst)).filter(|tag| *tag != 0)\
               .collect();",
        half: "any",
        why: FEW_CALLS,
    },
    Kept {
        function: "answer",
        code: "mine.wanted[cell].store(list[hidden].tag, Ordering::SeqCst);",
        half: "any",
        why: FEW_CALLS,
    },
    Kept {
        function: "show_others",
        code: "seat.wanted[cell].store(list[next].tag, Ordering::SeqCst);",
        half: "any",
        why: FEW_CALLS,
    },
    Kept {
        function: "Pass::queue",
        code: "places.mixed.store(true, Ordering::Relaxed);",
        half: "any",
        why: "no model calls twice at the same time under one name; the lock of the entries orders this flag",
    },
];

/// The models that need none of the orders.
const STURDY: &[(&str, &str)] = &[(
    "failure: two at once",
    "it checks that one rank alone claims the failure, for which the exchange needs no order; each rank's fences order \
     the rest as soon as both ranks have sounded the alarm",
)];

fn main() -> ExitCode {
    let models = models::all();
    check::main(&Program { folder: "src/engine", models: &models, kept: KEPT, sturdy: STURDY })
}
