//! Meetings: how the ranks agree on whose turn it is when they issue collectives under different names in different orders.
//!
//! The ranks that find calls under different names in one step withdraw these calls. Rank 0 then picks a name under which every rank has
//! a call. Each rank keeps the names of its waiting calls in shared memory for rank 0 ([`Seat::wanted`](crate::segment::Seat)).

use std::sync::atomic::Ordering;

use crate::comm::{Blocker, Comm};
use crate::error::{Error, Result};
use crate::operation::Poll;
use crate::turn::{Name, Pass, Place};
use crate::types::ncclInvalidUsage;

/// The state of a collective before its first step with the other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// It has no turn yet.
    Outside,
    /// It may put down its description.
    Open,
    /// It was withdrawn; the other ranks have to end the empty step that follows. The number is the step of the descriptions.
    Clearing(u64),
    /// Rank 0 has to say which name goes first.
    Deciding(u64),
}

/// The admission of a collective: its turn on this rank, and the agreement of all ranks on whose turn it is.
///
/// The ranks put down descriptions in step `s` and compare them in step `s + 1`. When the names differ, all of them end step `s + 1`
/// without touching a slot. After that nobody writes to the slots of a withdrawn call any more. In step `s + 2` the ranks continue with
/// the name that rank 0 has chosen.
#[derive(Debug)]
pub(crate) struct Meeting {
    pub(crate) pass: Pass,
    at: At,
}

impl Meeting {
    pub(crate) fn new(name: Name) -> Meeting {
        Meeting { pass: Pass::new(Place::Collectives, name), at: At::Outside }
    }

    /// Returns `None` when this call may put down its description in the current step, else what it waits for.
    #[inline]
    pub(crate) fn poll(&mut self, comm: &Comm, call: impl FnOnce() -> String) -> Result<Option<Poll>> {
        if self.at == At::Open || comm.nranks == 1 {
            return Ok(None);
        }
        if self.at != At::Outside {
            if let Some(blocked) = self.decide(comm) {
                return Ok(Some(blocked));
            }
        }
        if self.at == At::Outside {
            if let Some(blocked) = self.pass.enter(comm, call)? {
                return Ok(Some(blocked));
            }
            self.at = At::Open;
        }
        Ok(None)
    }

    /// Withdraws the call. All ranks do so when they find different names in the step before this one.
    #[cold]
    pub(crate) fn withdraw(&mut self, comm: &Comm) {
        self.pass.list(comm);
        self.at = At::Clearing(comm.step() - 1);
        comm.end_step();
    }

    #[cold]
    fn decide(&mut self, comm: &Comm) -> Option<Poll> {
        if let At::Clearing(posted) = self.at {
            if let Some(blocked) = comm.step_blocked() {
                return Some(blocked);
            }
            self.at = At::Deciding(posted);
        }
        let At::Deciding(posted) = self.at else { return None };
        let (header, step) = (comm.segment.header(), comm.step() as u32);
        let verdict = header.verdict.value();
        if verdict != step {
            if comm.rank != 0 {
                return Some(Poll::Blocked { seen: verdict, blocker: Blocker::Verdict(posted) });
            }
            let seen = header.wants.value();
            let Some(tag) = wanted_by_all(comm) else {
                return Some(Poll::Blocked { seen, blocker: Blocker::Wants(posted) });
            };
            header.verdict_tag.store(tag, Ordering::Relaxed);
            header.verdict.set(step);
        }
        let tag = header.verdict_tag.load(Ordering::Relaxed);
        self.at = if tag == self.pass.name().tag || !self.pass.hand_over(comm, tag) { At::Open } else { At::Outside };
        None
    }
}

/// Returns a tag under which every rank has a call.
fn wanted_by_all(comm: &Comm) -> Option<u64> {
    let tags = |rank: usize| comm.segment.seat(rank).wanted.iter().map(|cell| cell.load(Ordering::SeqCst));
    let all_want = |tag: &u64| (1..comm.nranks).all(|rank| tags(rank).any(|other| other == *tag));
    tags(0).filter(|tag| *tag != 0).find(all_want)
}

/// Why a call that comes too late to be told apart from another one fails.
pub(crate) const SHARED: &str = "which share one communicator; call along them in one order on all ranks, or give one of them a communicator of its own (DM_DIM_OWN_COMM)";

/// The error of calls that ended because they shared a communicator.
pub(crate) fn apart(comm: &Comm, calls: &str, millis: u128) -> Error {
    comm.fail(ncclInvalidUsage, None, &format!("{calls}, {SHARED}: nothing that fits came within {millis} ms"))
}
