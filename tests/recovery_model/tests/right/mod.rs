//! The check of a job without a mistake in all of its states.

use recovery_model::{Job, Property, Silent, check};

/// Checks the job with both things that a deadline can do to silent ranks. Where no deadline
/// passes, both jobs have the same states, so only the first one is checked. It is the stricter
/// one: there no rank that lives may count as lost.
pub(crate) fn is_right(job: Job) {
    let both = [Silent::Fails, Silent::LeftOut];
    for &silent in if job.deadlines > 0 { &both[..] } else { &both[..1] } {
        match check(&Job { silent, ..job.clone() }, &Property::ALL) {
            Ok(checked) => println!("{} states, {} transitions, {silent:?}", checked.states, checked.transitions),
            Err(violation) => panic!("{silent:?}: {violation}"),
        }
    }
}
