//! The admission of a collective: its turn on this rank, and the agreement of all ranks on whose
//! turn it is.
//!
//! The order in which threads enter may differ from rank to rank. So the ranks may find calls under
//! different names in one step. Then they withdraw these calls, and rank 0 decides which name goes
//! first. It chooses a name under which every rank has a call. On a communicator over several hosts
//! the seats 0 of the hosts find such a name together (module `common_name`).

use std::sync::Arc;

use crate::call_name::Name;
use crate::comm::Comm;
use crate::common_name;
use crate::error::Result;
use crate::flow::Flow;
use crate::places::Place;
use crate::poll::{Blocker, Poll};
use crate::sync::Ordering;
use crate::turn::{self, Pass};

/// The state of a collective before its first step with the other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The call has no turn yet.
    Outside,
    /// The call may post its description.
    Open,
    /// The call was withdrawn, and the other ranks have to end the empty step that follows. The
    /// number is the step in which the descriptions were posted.
    Clearing(u64),
    /// Rank 0 has to decide which name goes first. The number is the step in which the descriptions
    /// were posted.
    Deciding(u64),
}

/// The admission of one collective.
///
/// The ranks post descriptions in step `s` and compare them in step `s + 1`. When the names differ,
/// all of them end step `s + 1` without touching a slot. After that nobody writes to the slots of a
/// withdrawn call any more. In step `s + 2` the ranks continue with the name that rank 0 has
/// chosen.
pub(crate) struct Admission {
    /// The call's turn on this rank.
    pub(crate) pass: Pass,
    /// The stage that the admission has reached.
    stage: Stage,
    /// On seat 0 of a host: the search for a name that the calls of all hosts have.
    search: Option<Flow<'static, u64>>,
}

impl Admission {
    /// Returns the admission of a call that has no turn yet.
    pub(crate) fn new(name: Name) -> Admission {
        Admission { pass: Pass::new(Place::Collectives, name), stage: Stage::Outside, search: None }
    }

    /// Returns `None` when this call may post its description in the current step, and otherwise
    /// what it waits for. `call` describes the call, for errors.
    #[inline]
    pub(crate) fn poll(&mut self, comm: &Arc<Comm>, call: impl FnOnce() -> String) -> Result<Option<Poll>> {
        if self.stage == Stage::Open || comm.nranks == 1 && comm.span.is_none() {
            return Ok(None);
        }
        if self.stage != Stage::Outside {
            if let Some(blocked) = self.decide(comm)? {
                return Ok(Some(blocked));
            }
        }
        if self.stage == Stage::Outside {
            if let Some(blocked) = self.pass.enter(comm, call)? {
                return Ok(Some(blocked));
            }
            self.stage = Stage::Open;
        }
        Ok(None)
    }

    /// Withdraws the call. All ranks do so when they find different names in the step before this
    /// one.
    #[cold]
    pub(crate) fn withdraw(&mut self, comm: &Comm) {
        self.pass.list(comm);
        self.stage = Stage::Clearing(comm.step() - 1);
        comm.end_step();
    }

    /// Withdraws the call. All ranks do so when the hosts have found different names. The seats of
    /// this host posted their calls in the step `posted`.
    #[cold]
    pub(crate) fn withdraw_from_hosts(&mut self, comm: &Comm, posted: u64) {
        self.pass.list(comm);
        if comm.nranks == 1 {
            // Each decision has a step of its own.
            comm.end_step();
        }
        self.stage = Stage::Deciding(posted);
    }

    /// Waits for the decision which name goes first; rank 0 makes it. Returns `None` once it is
    /// made.
    #[cold]
    fn decide(&mut self, comm: &Arc<Comm>) -> Result<Option<Poll>> {
        if let Stage::Clearing(posted) = self.stage {
            if let Some(blocked) = comm.step_blocked() {
                return Ok(Some(blocked));
            }
            self.stage = Stage::Deciding(posted);
        }
        let Stage::Deciding(posted) = self.stage else { return Ok(None) };
        let (header, step) = (comm.segment.header(), comm.step() as u32);
        let verdict = header.verdict.value();
        if verdict != step {
            if comm.rank != 0 {
                turn::answer(comm);
                return Ok(Some(Poll::Blocked { seen: verdict, blocker: Blocker::Decision(posted) }));
            }
            let found = match comm.span {
                None => find_common(comm, posted),
                Some(_) => {
                    let name = *self.pass.name();
                    let search = || Flow::new(common_name::agree(comm.clone(), posted, name));
                    self.search.get_or_insert_with(search).poll()?
                }
            };
            let tag = match found {
                Ok(tag) => tag,
                Err(blocked) => return Ok(Some(blocked)),
            };
            self.search = None;
            header.verdict_tag.store(tag, Ordering::Relaxed);
            header.verdict.set(step);
        }
        let tag = header.verdict_tag.load(Ordering::Relaxed);
        self.stage =
            if tag == self.pass.name().tag || !self.pass.hand_over(comm, tag) { Stage::Open } else { Stage::Outside };
        Ok(None)
    }
}

/// Returns a tag under which every rank of this host has a call, or what to wait for.
fn find_common(comm: &Comm, posted: u64) -> std::result::Result<u64, Poll> {
    let seen = comm.segment.header().wants.value();
    wanted_by_all(comm).ok_or_else(|| {
        turn::show_others(comm);
        Poll::Blocked { seen, blocker: Blocker::CommonName(posted) }
    })
}

/// Returns a tag under which every rank has a call, or `None`. Only rank 0 calls this function,
/// because it knows all its own calls. Another rank may have more calls than cells to show them in.
/// Such a rank shows the calls that rank 0 shows.
fn wanted_by_all(comm: &Comm) -> Option<u64> {
    let tags = |rank: usize| comm.segment.seat(rank).wanted.iter().map(|cell| cell.load(Ordering::SeqCst));
    let all_want = |tag: &u64| (1..comm.nranks).all(|rank| tags(rank).any(|other| other == *tag));
    turn::collectives(comm).into_iter().find(all_want)
}
