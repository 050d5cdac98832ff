//! `ncclCommSplit`: every rank of the parent says its colour and key, the first of each colour makes a segment, the others
//! of that colour join it. Three steps of the parent, then a join.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::collective::Descriptor;
use crate::comm::{Blocker, Comm};
use crate::error::{Error, Result};
use crate::fork::Private;
use crate::id::random_token;
use crate::join::{Join, Source};
use crate::meeting::Meeting;
use crate::operation::{Operation, Poll};
use crate::process::ProcessId;
use crate::segment::{self, SLOTS};
use crate::setup::Child;
use crate::turn::Name;
use crate::types::*;

/// What a rank of the parent asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
struct Ask {
    color: i32,
    key: i32,
}

/// The most bytes of a reason that the first rank of a colour tells the others. The smallest slot has 64 KiB.
const WHY_BYTES: usize = 400;

/// Where the first rank of a colour has put the new segment.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Offer {
    /// `ncclSuccess`, or why there is none.
    code: ncclResult_t,
    /// Why there is none, in words, filled up with zeros.
    why: [u8; WHY_BYTES],
    owner: ProcessId,
    fd: i32,
    token: [u8; 16],
}

/// A split under way.
pub(crate) struct Split {
    parent: Arc<Comm>,
    ask: Ask,
    name: String,
    aborted: Arc<AtomicBool>,
    stage: usize,
    waiting: bool,
    meeting: Meeting,
    /// Parent's ranks of this colour, in the new order.
    members: Vec<usize>,
    /// Held open by the first of the members until all have joined.
    offered: Option<Private<OwnedFd>>,
    join: Option<Join>,
}

impl Split {
    pub(crate) fn new(
        parent: Arc<Comm>,
        color: i32,
        key: i32,
        name: String,
        aborted: Arc<AtomicBool>,
        call: Name,
    ) -> Result<Split> {
        parent.check_open()?;
        Ok(Split {
            parent,
            ask: Ask { color, key },
            name,
            aborted,
            stage: 0,
            waiting: false,
            meeting: Meeting::new(call),
            members: Vec::new(),
            offered: None,
            join: None,
        })
    }

    /// Data of `rank`'s slot of the step `back` steps before this one.
    fn slot<T>(&self, rank: usize, back: u64) -> *mut T {
        self.parent.segment.data(rank, ((self.parent.step() - back) % SLOTS as u64) as usize).cast()
    }

    fn run_stage(&mut self) -> Result<()> {
        let me = self.parent.rank;
        match self.stage {
            0 => {
                Descriptor::split(*self.meeting.pass.name()).post(&self.parent);
                // SAFETY: in this step only this rank touches its slot, which is larger than this.
                unsafe { self.slot::<Ask>(me, 0).write(self.ask) };
            }
            1 => {
                if self.ask.color == NCCL_SPLIT_NOCOLOR {
                    return Ok(());
                }
                // SAFETY: every rank wrote its own in the step before.
                let asks = (0..self.parent.nranks).map(|rank| (unsafe { self.slot::<Ask>(rank, 1).read() }, rank));
                self.members = members(asks, self.ask.color);
                if self.members.first() == Some(&me) {
                    let offer = self.offer();
                    // SAFETY: as in stage 0.
                    unsafe { self.slot::<Offer>(me, 0).write(offer) };
                }
            }
            _ => {
                let Some(&first) = self.members.first() else { return Ok(()) };
                // SAFETY: the first of the members wrote it in the step before.
                let offer = unsafe { self.slot::<Offer>(first, 1).read() };
                if offer.code != ncclSuccess {
                    let why = offer.why.split(|byte| *byte == 0).next().unwrap_or_default();
                    let message = format!(
                        "{} could not make shared memory for the new communicator: {}",
                        self.parent.label(first),
                        String::from_utf8_lossy(why)
                    );
                    return Err(Error::new(offer.code, message));
                }
                let rank = self.members.iter().position(|&rank| rank == me).unwrap_or(0);
                let source = Source::Child { owner: offer.owner, fd: offer.fd, token: offer.token };
                let size = self.members.len() as u32;
                let join = Join::new(source, size, rank as u32, self.name.clone(), self.aborted.clone());
                self.join = Some(join.out_of(&self.parent, &self.members));
            }
        }
        Ok(())
    }

    /// Fails when the parent has. Its other ranks may be ahead and miss this one, which waits for members that do not come.
    fn check_parent(&self) -> Result<()> {
        self.parent.check_peers(None, &|| self.describe()).map_err(|error| {
            let late = self.joined().map_or(Vec::new(), |comm| comm.missing(Blocker::Arrivals));
            let late: Vec<usize> = late.iter().filter_map(|&rank| self.members.get(rank).copied()).collect();
            self.parent.while_missing(error, &late)
        })
    }

    fn offer(&mut self) -> Offer {
        let made = random_token().and_then(|token| Ok((token, segment::create(token)?)));
        match made {
            Ok((token, fd)) => {
                let raw = fd.as_raw_fd();
                self.offered = Some(Private::of(fd));
                Offer { code: ncclSuccess, why: [0; WHY_BYTES], owner: ProcessId::current(), fd: raw, token }
            }
            Err(error) => {
                let mut why = [0; WHY_BYTES];
                for (to, from) in why.iter_mut().zip(error.message().bytes()) {
                    *to = from;
                }
                Offer { code: error.code(), why, owner: ProcessId { pid: 0, start: 0 }, fd: -1, token: [0; 16] }
            }
        }
    }
}

impl Child for Split {
    fn name(&self) -> Option<Name> {
        Some(*self.meeting.pass.name())
    }

    fn joined(&self) -> Option<Arc<Comm>> {
        self.join.as_ref().and_then(Join::joined)
    }

    /// A dead member fails both, and what the others say of it in the child ("gave up joining") is not what happened.
    fn for_parent(&self, error: Error) -> Error {
        if let Err(error) = self.check_parent() {
            return error;
        }
        let lost = error.lost().and_then(|rank| self.members.get(rank).copied());
        error.by(lost)
    }
}

/// The ranks of one colour by key, ties by rank.
fn members(asks: impl Iterator<Item = (Ask, usize)>, color: i32) -> Vec<usize> {
    let mut members: Vec<(i32, usize)> =
        asks.filter(|(ask, _)| ask.color == color).map(|(ask, rank)| (ask.key, rank)).collect();
    members.sort_unstable();
    members.into_iter().map(|(_, rank)| rank).collect()
}

const STAGES: usize = 3;

impl Operation for Split {
    fn poll(&mut self) -> Result<Poll> {
        while self.stage < STAGES {
            if self.waiting {
                if let Some(blocked) = self.parent.step_blocked() {
                    self.parent.check()?;
                    return Ok(blocked);
                }
                self.waiting = false;
                if self.stage == 1 && !Descriptor::split(*self.meeting.pass.name()).compare(&self.parent)? {
                    self.stage = 0;
                    self.meeting.withdraw(&self.parent);
                }
            }
            if self.stage == 0 {
                self.parent.check()?;
                let blocked = self.meeting.poll(&self.parent, || "ncclCommSplit".to_owned())?;
                if let Some(blocked) = blocked {
                    return Ok(blocked);
                }
            }
            self.run_stage()?;
            self.stage += 1;
            if self.stage < STAGES {
                self.parent.end_step();
                self.waiting = true;
            }
        }
        // The parent's handle says that the split is done before this operation is dropped: the next one may begin then.
        self.meeting.pass.leave(&self.parent)?;
        match &mut self.join {
            None => Ok(Poll::Done),
            Some(join) => match join.poll() {
                Ok(Poll::Done) => Ok(Poll::Done),
                // A member that has died on its way there, or could not even map the segment, is known to the parent alone.
                Ok(blocked) => self.check_parent().map(|()| blocked),
                Err(error) if join.comm().is_none() => {
                    let message = format!(
                        "{} could not join its split: {}",
                        self.parent.label(self.parent.rank),
                        error.message()
                    );
                    Err(self.parent.fail(error.code(), self.for_parent(error).lost(), &message))
                }
                Err(error) => Err(self.for_parent(error)),
            },
        }
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        self.join.as_ref().and_then(Operation::comm).or(Some(&self.parent))
    }

    fn describe(&self) -> String {
        format!("ncclCommSplit(color {}, key {}) on {}", self.ask.color, self.ask.key, self.parent.place())
    }
}

impl Drop for Split {
    fn drop(&mut self) {
        // What failed here has its error already.
        let _ = self.meeting.pass.leave(&self.parent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_ordered_by_key_then_rank() {
        let asks = [(0, 5), (1, 0), (0, -3), (0, 5), (-1, 0)];
        let asks = || asks.iter().enumerate().map(|(rank, &(color, key))| (Ask { color, key }, rank));
        assert_eq!(members(asks(), 0), [2, 0, 3]);
        assert_eq!(members(asks(), 1), [1]);
    }
}
