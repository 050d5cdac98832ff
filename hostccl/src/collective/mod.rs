//! Collectives: calls that all ranks of a communicator make together, in steps.
//!
//! # Steps
//! A rank numbers its steps from the communicator's first collective to its last. In a step, the
//! rank works on staging slots in shared memory. To end the step, it counts itself in at the
//! barrier; the rank that comes last opens the next step for all. So each step costs one wait and
//! at most one wake-up.
//!
//! A communicator of exactly two ranks, both on one host, has no barrier. Each rank has two words,
//! and uses them in turn. A word holds the number of the last step that its rank has ended with
//! that word. A rank waits until the other rank's word has the number of the step. The call's
//! description and up to 16 bytes of data lie in the cache line of the word. So a small call moves
//! one cache line in each direction. Scatter, and calls in which each rank has its own count, use
//! slots here, too.
//!
//! # Pipeline
//! A collective of `n` chunks is a pipeline of stages, one stage for each step. Chunk `i` uses the
//! slots of the step that is `i` steps after the collective's first. The last stage of a
//! collective and the first stage of the next one share a step.
//!
//! A stage has two parts. The critical work comes before the rank counts itself in: the peers wait
//! for it. The overlapped work comes after the rank has counted itself in, and before the rank
//! waits: the rank copies out what is ready and copies the next chunk in. So a rank that shares its
//! processor, or is late for a moment, delays nobody while there is other work to do.
//!
//! # Slots
//! The owner of a slot of step `s` writes it after all ranks have ended step `s - 2`, and before
//! the owner ends step `s`. The other ranks read it after all have ended step `s`, and read the
//! parts that a rank has reduced after all have ended step `s + 1`. No rank that has ended step `s
//! + 3` reads it. So five slots, used in turn, are enough.
//!
//! # What rank `r` does with a chunk
//! | collective | work |
//! |---|---|
//! | all-reduce, reduce | copies the chunk in; reduces part `r`; copies the other parts out (in a reduce, the root only) |
//! | all-reduce, small | copies the chunk in; reduces all of it, in the same order on every rank |
//! | reduce-scatter | copies all parts in; reduces part `r` into the result |
//! | all-gather, all-to-all, gather | copies its own data in; copies the other ranks' data out |
//! | broadcast, scatter | the root copies the chunk in; the others copy it out |
//! | all-to-all-v, all-gather-v, reduce-scatter-v | see the module `ragged` |
//!
//! # Agreement
//! In the first step, every rank posts a description of its call. In the second step, every rank
//! compares all descriptions. Calls that do not fit together fail on all ranks, with their values.
//! Calls under different names are withdrawn, and then tried again one after the other (module
//! `admission`).

mod call;
mod copy;
mod descriptor;
mod moves;
mod operation;
mod part;
mod pipeline;
mod ragged;
mod stages;

pub(crate) use self::call::{Call, Kind, Reduction};
pub(crate) use self::descriptor::{Descriptor, different_names, fail_different_calls, keep_difference};
pub(crate) use self::operation::Collective;
pub(crate) use self::part::Part;
pub(crate) use self::pipeline::part;
pub(crate) use self::ragged::{Ragged, fail_different_counts};
