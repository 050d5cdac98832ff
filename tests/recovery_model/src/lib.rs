//! A model of the protocol by which a job recovers from lost ranks (docs/recovery.md), and a
//! checker that looks at every state that the model can reach.
//!
//! A state is what the store holds, and where each process stands. One transition is one operation
//! of one process on the store, or one event outside the protocol: a process dies, the store
//! notices a death, a deadline passes, a new process starts. The checker makes every transition in
//! every order. A process that makes no transition for a while is a slow rank, so slow and hung
//! ranks need no event of their own.
//!
//! | file | content |
//! |---|---|
//! | job.rs | what a checked job has: its ranks, its options, how much goes wrong, and planted mistakes |
//! | state.rs | the store and the processes |
//! | protocol.rs | the protocol: the next operation of each process |
//! | events.rs | everything else that can happen |
//! | properties.rs | what must hold in every state, and in states in which nothing more happens; what runs can come to |
//! | library.rs | the comparison of the model's proposals with those of the library |
//! | checker.rs | the search, which knows nothing of the protocol |
//!
//! The model leaves out what does not change which ranks go on together: the data in collectives,
//! the making of communicators between the decision and the verdict, and time. A deadline may pass
//! whenever a rank waits. Reading the list of losses and the notes of the ranks that are here is
//! one transition. Two reads one after the other are no other case: they see what one read would
//! have seen if the store had noticed the later losses a moment later.

mod checker;
mod events;
mod job;
mod library;
mod properties;
mod protocol;
mod state;

pub use checker::{Checked, Violation};
pub use job::{Job, Mistake, NO_SEAT, Silent};
pub use properties::{Goal, Property};

/// Visits every state that the job can reach. Returns how many there are, or a shortest way to a
/// state that breaks one of the properties.
pub fn check(job: &Job, properties: &[Property]) -> Result<Checked, Violation> {
    checker::check(&events::Run { job, properties })
}
