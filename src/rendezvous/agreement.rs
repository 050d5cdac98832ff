//! Agreement: either every rank of a scope made the same call, or every rank learns which ranks did
//! not.
//!
//! A call has a number s in its scope, and the keys of the call begin with `<prefix>/<s>/`. Each
//! rank leaves the text of its call under `here/<position>`. All other ranks read the text of
//! position 0, compare it with theirs, and count themselves in. A rank whose text differs counts
//! itself among the dissenters too. The last rank to be counted writes the verdict "agreed", or
//! wakes the first dissenter. The first dissenter waits a moment for other dissenters and writes
//! "mismatch" with the calls of both sides. A rank whose deadline passes writes "timeout" with the
//! ranks that are missing. A rank that learns of a lost rank writes "lost". The verdict is written
//! once (compare-and-set), and every rank waits for it and returns what it says. Each rank needs a
//! constant number of store operations, except the rank that names the missing ones.
//!
//! A rank that has ended a mesh by dm_abort may make its next call under the number of a call on
//! that mesh. So the ranks compare the meshes of their calls before they compare the texts
//! (departures.rs). Where a rank has ended one of the meshes, the verdict is "lost" for the ranks
//! of that call, and the other ranks go on to the next number.
//!
//! The work of the call follows. A second verdict at `<prefix>/<s>/end/` ends the call: either all
//! ranks got through, or the verdict is the first failure.
//!
//! A rank may come to a call that the others have given up, or refuse its own call. late.rs and
//! [`Scope::tell_refusal`] bring the ranks back to one number, so that the next calls of all ranks
//! meet.
//!
//! After ranks were lost, the others agree on who is lost (survivors.rs). A job that recovers goes
//! from epoch to epoch by decisions (recovery.rs).
//!
//! Keys that a call left in the store are removed when the next call is agreed (cleanup.rs), so the
//! store stays small.

mod bytes;
mod cleanup;
mod comparing;
mod deadlock;
mod deciding;
mod decision;
mod departures;
mod exchange;
mod late;
mod members;
mod missing;
mod notes;
mod order;
mod proposal;
mod readers;
mod recovery;
mod reports;
mod round;
mod scope;
mod sharing;
mod survivors;
mod suspects;
#[cfg(test)]
mod tests;
mod verdict;
mod waiting;

pub(crate) use bytes::check_len;
pub(super) use cleanup::{ScopeKeys, WorldKeys};
pub use decision::{Decision, Decisions, Epoch, Failure, Replicas, Why};
pub use departures::Departures;
pub(super) use exchange::has_first_call_failed;
pub(super) use members::Members;
pub(super) use notes::{add_note, fill_gaps, note_key};
pub(crate) use order::check_order;
pub use proposal::{Knock, Passed, Seen, Terms};
pub use recovery::{Arrival, Made, Outcome, Recovery, Request, mesh_text};
pub(super) use recovery::{AtDoor, Note, count_waiting, decided_at, door_note, ended, now};
pub(super) use round::Membership;
pub use round::Round;
pub use scope::Scope;
pub(crate) use scope::{begun_by_this_thread, note_begun_by_this_thread};
pub use survivors::AgreedLosses;
pub use suspects::TakenForLost;
