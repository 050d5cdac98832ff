//! `ncclCommSplit`: the ranks of a communicator make a smaller one for each colour.
//!
//! Every rank of the parent posts its colour and key. The first rank of each colour makes a
//! segment, and the other ranks of that colour join it. This takes three stages, which end two
//! steps of the parent, and then a join.

mod spanning;

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub(crate) use self::spanning::{SpanSplit, child_span};
use crate::admission::Admission;
use crate::blame::Blame;
use crate::call_name::Name;
use crate::collective::{Descriptor, Kind};
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::fork::Private;
use crate::join::{Join, Source};
use crate::operation::Operation;
use crate::poll::{Blocker, Poll};
use crate::process::ProcessId;
use crate::segment::{self, LINE, SLOTS};
use crate::setup::ChildOperation;
use crate::token::random_token;
use crate::turn::Pass;
use crate::types::*;

/// The arguments that each rank of the parent posts for the others, in the cache line of its
/// descriptor. The lines of all ranks lie in a few pages. Each rank's slot lies in pages of its
/// own, which this rank would have to map first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
struct ColorAndKey {
    /// The caller's colour: ranks of one colour form one communicator.
    color: i32,
    /// The caller's key, which orders the ranks of the new communicator.
    key: i32,
}

const _: () = assert!(size_of::<Descriptor>() + size_of::<ColorAndKey>() <= LINE);

/// The most bytes of the reason why there is no segment, which the first rank of a colour gives to
/// the other ranks. The reason has to fit a slot, and the smallest slot has 48 KiB.
const WHY_BYTES: usize = 400;

/// Where the first rank of a colour has put the new segment.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct NewSegment {
    /// `ncclSuccess`, or why there is no segment.
    code: ncclResult_t,
    /// The reason in words, filled up with zeros; empty when there is a segment.
    why: [u8; WHY_BYTES],
    /// The process that holds the segment.
    owner: ProcessId,
    /// The segment's descriptor in that process.
    fd: i32,
    /// The segment's token, which tells this segment from another one at that descriptor.
    token: [u8; 16],
}

/// A split under way.
pub(crate) struct Split {
    /// The communicator that is split.
    parent: Arc<Comm>,
    /// The arguments of this rank.
    color_and_key: ColorAndKey,
    /// The name of the new communicator.
    name: String,
    /// The flag that `ncclCommAbort` raises on the new communicator's handle.
    aborted: Arc<AtomicBool>,
    /// How many of the [`STAGES`] this rank has done. The number becomes 0 again when the call is
    /// withdrawn, because the call then waits for its turn.
    stage: usize,
    /// Whether some ranks may still be in the step that has to end before the next stage.
    waiting: bool,
    /// The call's turn on this rank, and the ranks' agreement that it is this call's turn.
    admission: Admission,
    /// The parent's ranks of this colour, in the order of the new communicator.
    members: Vec<usize>,
    /// The new segment's descriptor, which the first member holds open until all have joined.
    segment: Option<Private<OwnedFd>>,
    /// The joining of the new communicator, once this rank knows where its segment is.
    join: Option<Join>,
}

/// How many stages a split has before the join: post, make the segment, find the segment.
const STAGES: usize = 3;

impl Split {
    /// Returns a split that has not begun. Fails when the parent takes no more calls.
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
            color_and_key: ColorAndKey { color, key },
            name,
            aborted,
            stage: 0,
            waiting: false,
            admission: Admission::new(call),
            members: Vec::new(),
            segment: None,
            join: None,
        })
    }

    /// Returns the index of the descriptors and slots of the step that is `back` steps before this
    /// one.
    fn index(&self, back: u64) -> usize {
        ((self.parent.step() - back) % SLOTS as u64) as usize
    }

    /// Returns where `rank` posts its colour and key in the step that is `back` steps before this
    /// one.
    fn posted(&self, rank: usize, back: u64) -> *mut ColorAndKey {
        let line = self.parent.segment.descriptor(rank, self.index(back));
        // SAFETY: the line has this room behind the descriptor, as asserted above.
        unsafe { line.add(size_of::<Descriptor>()).cast() }
    }

    /// Returns where `rank`, in the step that is `back` steps before this one, describes the
    /// segment that `rank` has made.
    fn slot(&self, rank: usize, back: u64) -> *mut NewSegment {
        self.parent.segment.data(rank, self.index(back)).cast()
    }

    fn descriptor(&self) -> Descriptor {
        Descriptor::making(Kind::Split, *self.admission.pass.name())
    }

    fn run_stage(&mut self) -> Result<()> {
        let me = self.parent.rank;
        match self.stage {
            0 => {
                self.descriptor().post(&self.parent);
                // SAFETY: in this step only this rank touches the place.
                unsafe { self.posted(me, 0).write(self.color_and_key) };
            }
            1 => {
                if self.color_and_key.color == NCCL_SPLIT_NOCOLOR {
                    return Ok(());
                }
                // SAFETY: every rank wrote its place in the step before, which all ranks have
                // ended.
                let posted = |rank: usize| (unsafe { self.posted(rank, 1).read() }, rank);
                self.members = members((0..self.parent.nranks).map(posted), self.color_and_key.color);
                if self.members.first() == Some(&me) {
                    let made = self.make_segment();
                    // SAFETY: the slot is large enough, and in this step only this rank touches it.
                    unsafe { self.slot(me, 0).write(made) };
                }
            }
            _ => {
                let Some(&first) = self.members.first() else { return Ok(()) };
                // SAFETY: the first member wrote its slot in the step before, which all ranks have
                // ended.
                let made = unsafe { self.slot(first, 1).read() };
                if made.code != ncclSuccess {
                    let why = made.why.split(|byte| *byte == 0).next().unwrap_or_default();
                    let message = format!(
                        "{} could not make shared memory for the new communicator: {}",
                        self.parent.label(first),
                        String::from_utf8_lossy(why)
                    );
                    return Err(Error::new(made.code, message).by(Blame::of([first])));
                }
                let rank = self.members.iter().position(|&rank| rank == me).unwrap_or(0);
                let source = Source::Child { owner: made.owner, owner_rank: 0, fd: made.fd, token: made.token };
                let size = self.members.len() as u32;
                let join = Join::new(source, size, rank as u32, self.name.clone(), self.aborted.clone());
                self.join = Some(join.out_of(&self.parent, &self.members));
            }
        }
        Ok(())
    }

    /// Fails when the parent has failed. The other ranks of the parent may be past the split and
    /// wait for this rank, while this rank waits for members that never join.
    fn check_parent(&self) -> Result<()> {
        self.parent.check_peers(None, &|| self.describe()).map_err(|error| {
            let missing = self.joined().map_or(Vec::new(), |comm| comm.missing(Blocker::Arrivals));
            let missing: Vec<usize> = missing.iter().filter_map(|&rank| self.members.get(rank).copied()).collect();
            self.parent.add_missing_ranks(error, &missing)
        })
    }

    /// Ends the split after the parent has failed with `error`. The split is done if all members
    /// had joined before, because the other members have succeeded then. Otherwise returns `error`.
    fn end_unless_joined(&mut self, error: Error) -> Result<Poll> {
        match self.join.as_mut().map(Join::poll) {
            Some(Ok(Poll::Done)) => Ok(Poll::Done),
            _ => Err(error),
        }
    }

    fn make_segment(&mut self) -> NewSegment {
        let among = self.parent.crowd().ranks as u32;
        let made = random_token().and_then(|token| Ok((token, segment::create_split(token, among)?)));
        match made {
            Ok((token, fd)) => {
                let raw = fd.as_raw_fd();
                self.segment = Some(Private::of(fd));
                NewSegment { code: ncclSuccess, why: [0; WHY_BYTES], owner: ProcessId::current(), fd: raw, token }
            }
            Err(error) => {
                let mut why = [0; WHY_BYTES];
                for (to, from) in why.iter_mut().zip(error.message().bytes()) {
                    *to = from;
                }
                NewSegment { code: error.code(), why, owner: ProcessId { pid: 0, start: 0 }, fd: -1, token: [0; 16] }
            }
        }
    }
}

impl ChildOperation for Split {
    fn name(&self) -> Option<Name> {
        Some(*self.admission.pass.name())
    }

    fn joined(&self) -> Option<Arc<Comm>> {
        self.join.as_ref().and_then(Join::joined)
    }

    /// Returns the parent's error rather than the new communicator's. A member that has died fails
    /// the parent, too, and the parent's error names that member. In the new communicator the
    /// other members only write that they gave up.
    fn for_parent(&self, error: Error) -> Error {
        if let Err(error) = self.check_parent() {
            return error;
        }
        let blame = error.blame().renumbered(|rank| self.members.get(rank).copied());
        error.by(blame)
    }
}

/// Returns the ranks of one colour, ordered by key and then by rank.
fn members(posted: impl Iterator<Item = (ColorAndKey, usize)>, color: i32) -> Vec<usize> {
    let mut members: Vec<(i32, usize)> =
        posted.filter(|(posted, _)| posted.color == color).map(|(posted, rank)| (posted.key, rank)).collect();
    members.sort_unstable();
    members.into_iter().map(|(_, rank)| rank).collect()
}

impl Operation for Split {
    fn poll(&mut self) -> Result<Poll> {
        while self.stage < STAGES {
            if self.waiting {
                if let Some(blocked) = self.parent.step_blocked() {
                    return self.parent.check_waiting(blocked);
                }
                self.waiting = false;
                if self.stage == 1 && !self.descriptor().compare(&self.parent)? {
                    self.stage = 0;
                    self.admission.withdraw(&self.parent);
                }
            }
            if self.stage == 0 {
                self.parent.check()?;
                let blocked = self.admission.poll(&self.parent, || "ncclCommSplit".to_owned())?;
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
        // The turn ends here and not with the drop: before the drop the parent's handle says that
        // the split is done, and then the next call may begin.
        self.admission.pass.leave(&self.parent)?;
        match &mut self.join {
            None => Ok(Poll::Done),
            Some(join) => match join.poll() {
                Ok(Poll::Done) => Ok(Poll::Done),
                // A member that died before it joined, or that could not map the segment, is known
                // to the parent only. A split that waits is polled again within 20 ms, so a death
                // is found when the parent is not new any more.
                Ok(blocked) => {
                    let checked = if self.parent.is_new() { self.parent.check() } else { self.check_parent() };
                    checked.map(|()| blocked).or_else(|error| self.end_unless_joined(error))
                }
                Err(error) if join.comm().is_none() => {
                    let error = self.for_parent(error);
                    // The error names the rank that could not join, which may be another rank than
                    // this one.
                    let blame = match error.blame().ranks.is_empty() {
                        true => Blame::of([self.parent.rank]),
                        false => error.blame().clone(),
                    };
                    let message = match error.blame().ranks.is_empty() {
                        true => {
                            format!(
                                "{} could not join its split: {}",
                                self.parent.label(self.parent.rank),
                                error.message()
                            )
                        }
                        false => format!("a split failed: {}", error.message()),
                    };
                    Err(self.parent.fail(error.code(), blame, &message))
                }
                Err(error) => Err(self.for_parent(error)),
            },
        }
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        self.join.as_ref().and_then(Operation::comm).or(Some(&self.parent))
    }

    fn pass(&mut self) -> Option<&mut Pass> {
        Some(&mut self.admission.pass)
    }

    /// The ranks compare their calls at the end of the first step.
    fn is_matched(&self) -> bool {
        self.stage > 1
    }

    fn describe(&self) -> String {
        let ColorAndKey { color, key } = self.color_and_key;
        format!("ncclCommSplit(color {color}, key {key}) on {}", self.parent.own_label())
    }
}

impl Drop for Split {
    fn drop(&mut self) {
        // A failure of the parent has been reported already.
        let _ = self.admission.pass.leave(&self.parent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hosts_of_threads::on_one_host;

    #[test]
    fn a_split_that_all_members_have_joined_succeeds_although_the_parent_has_failed() {
        let ends = on_one_host(3, 3);
        let split = |rank: usize| {
            let color = if rank == 2 { NCCL_SPLIT_NOCOLOR } else { 0 };
            Split::new(ends[rank].clone(), color, 0, "it".to_owned(), Arc::default(), Name::NONE).unwrap()
        };
        let [mut first, mut second, mut third] = [0, 1, 2].map(split);
        let joins = Ok(Poll::Blocked { seen: 1, blocker: Blocker::Arrivals });
        // Rank 1 ends the last step, so it joins first.
        while third.poll().is_ok() && second.poll() != joins {
            first.poll().unwrap();
        }
        let failure = || Error::new(ncclRemoteError, "rank 2 has gone");
        assert_eq!(second.end_unless_joined(failure()), Err(failure()));
        assert_eq!(first.poll(), Ok(Poll::Done));
        assert_eq!(second.end_unless_joined(failure()), Ok(Poll::Done));
    }

    #[test]
    fn members_are_ordered_by_key_then_rank() {
        let posted = [(0, 5), (1, 0), (0, -3), (0, 5), (-1, 0)];
        let posted = || posted.iter().enumerate().map(|(rank, &(color, key))| (ColorAndKey { color, key }, rank));
        assert_eq!(members(posted(), 0), [2, 0, 3]);
        assert_eq!(members(posted(), 1), [1]);
    }
}
