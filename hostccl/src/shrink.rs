//! `ncclCommShrink`: the remaining ranks of a communicator make a smaller one.
//!
//! The first of the remaining ranks makes the new segment and writes into its own seat where it is.
//! The others look there. Only the memory of the parent is needed, so the parent may have failed.

mod spanning;

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

pub(crate) use self::spanning::SpanShrink;
use crate::blame::Blame;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::fork::Private;
use crate::host::checksum;
use crate::join::{Join, Source};
use crate::operation::Operation;
use crate::poll::{Blocker, Poll};
use crate::segment::{self, Offer};
use crate::setup::ChildOperation;
use crate::timeout::{self, DEFAULT_TIMEOUT};
use crate::token::random_token;
use crate::types::*;

/// A shrink under way.
pub(crate) struct Shrink {
    /// The communicator that shrinks.
    parent: Arc<Comm>,
    /// The name of the new communicator.
    name: String,
    /// The flag that `ncclCommAbort` raises on the new communicator's handle.
    aborted: Arc<AtomicBool>,
    /// The checksum of the set of excluded ranks, never 0. Only ranks that exclude the same set
    /// meet.
    digest: u64,
    /// The remaining ranks of the parent, in their order.
    members: Vec<usize>,
    /// The new segment's descriptor, which the first member holds open until all have joined.
    segment: Option<Private<OwnedFd>>,
    /// The joining of the new communicator, once this rank knows where its segment is.
    join: Option<Join>,
    /// When the call began.
    since: Instant,
}

/// Checks the excluded ranks, and ends the calls that are under way on the parent if `abort` says
/// so. Returns the remaining ranks and the checksum of the excluded ones.
fn begin(parent: &Comm, excluded: &[i32], abort: bool) -> Result<(Vec<usize>, u64)> {
    let (me, nranks) = parent.whole();
    let mut out = vec![false; nranks];
    for &rank in excluded {
        let place = usize::try_from(rank)
            .ok()
            .and_then(|rank| out.get_mut(rank))
            .ok_or_else(|| Error::argument(format!("excluded rank {rank} is not in 0..{nranks}")))?;
        *place = true;
    }
    if out[me] {
        return Err(Error::argument(format!("rank {me} calls, but is among the excluded ranks")));
    }
    match abort {
        true => parent.revoke(),
        false => parent.check_open()?,
    }
    let bytes: Vec<u8> = out.iter().map(|out| u8::from(*out)).collect();
    Ok(((0..nranks).filter(|rank| !out[*rank]).collect(), checksum(&bytes).max(1)))
}

impl Shrink {
    /// Returns a shrink without the `excluded` ranks. With `abort`, it ends the calls that are
    /// under way on the parent, and the parent may have failed.
    pub(crate) fn new(
        parent: Arc<Comm>,
        excluded: &[i32],
        abort: bool,
        name: String,
        aborted: Arc<AtomicBool>,
    ) -> Result<Shrink> {
        let (members, digest) = begin(&parent, excluded, abort)?;
        Ok(Shrink { parent, name, aborted, digest, members, segment: None, join: None, since: Instant::now() })
    }

    /// Makes the new segment, and writes into this rank's seat where it is.
    fn make_segment(&mut self) -> Result<Source> {
        let token = random_token()?;
        let fd = segment::create(token)?;
        let offer = self.offer_of(self.parent.rank);
        offer.write(self.digest, fd.as_raw_fd(), token);
        let source = self.source(self.parent.rank, fd.as_raw_fd(), token)?;
        self.segment = Some(Private::of(fd));
        Ok(source)
    }

    /// Returns where the first member has put the new segment, or `None` while it has not.
    ///
    /// The first member makes its next segment when all members have taken this one. Between the
    /// two it may make segments for other sets of ranks.
    fn find_segment(&self, first: usize) -> Result<Option<Source>> {
        let taken = self.parent.segment_taken(first);
        let offered = self.offer_of(first).read(taken.load(Ordering::Relaxed), self.digest);
        let Some((number, fd, token)) = offered else { return Ok(None) };
        taken.store(number, Ordering::Relaxed);
        self.source(first, fd, token).map(Some)
    }

    /// Fails when a member that has not joined the new communicator has left the parent or died.
    /// The new communicator cannot know that yet.
    fn check_missing_members(&self) -> Result<()> {
        let Some(child) = self.joined() else { return Ok(()) };
        for missing in child.missing(Blocker::Arrivals) {
            let Some(&member) = self.members.get(missing) else { continue };
            if let Err(error) = self.parent.check_peer(member) {
                // The member may have joined between the two looks, and left the parent then.
                if !child.missing(Blocker::Arrivals).contains(&missing) {
                    continue;
                }
                let blame = error.blame().renumbered(|rank| self.members.iter().position(|member| *member == rank));
                child.fail(error.code(), blame, error.message());
                return Err(error);
            }
        }
        Ok(())
    }

    fn source(&self, owner: usize, fd: i32, token: [u8; 16]) -> Result<Source> {
        let gone = || Error::usage(format!("rank {owner} of {} has no process", self.parent.name()));
        let owner = self.parent.segment.process(owner).ok_or_else(gone)?;
        Ok(Source::Child { owner, owner_rank: 0, fd, token })
    }

    fn offer_of(&self, rank: usize) -> &Offer {
        &self.parent.segment.seat(rank).offer
    }

    /// Returns the rank of this process in the new communicator.
    fn new_rank(&self) -> usize {
        self.members.iter().position(|&rank| rank == self.parent.rank).unwrap_or(0)
    }
}

impl Operation for Shrink {
    fn poll(&mut self) -> Result<Poll> {
        if self.join.is_none() {
            let first = self.members[0];
            let seen = self.offer_of(first).number.value();
            let source = if first == self.parent.rank { Some(self.make_segment()?) } else { self.find_segment(first)? };
            let Some(source) = source else {
                self.parent.check_peer(first)?;
                let limit = self.parent.timeout().or_else(timeout::from_environment).unwrap_or(DEFAULT_TIMEOUT);
                if self.since.elapsed() >= limit {
                    let message = format!("{} did not come within {} ms", self.parent.label(first), limit.as_millis());
                    return Err(Error::new(ncclTimeout, message).by(Blame::of([first])));
                }
                return Ok(Poll::Blocked { seen, blocker: Blocker::NewSegment(first) });
            };
            let (size, rank) = (self.members.len() as u32, self.new_rank() as u32);
            let join = Join::new(source, size, rank, self.name.clone(), self.aborted.clone());
            self.join = Some(join.out_of(&self.parent, &self.members));
        }
        let Some(join) = &mut self.join else { return Ok(Poll::Done) };
        match join.poll() {
            Ok(Poll::Done) => Ok(Poll::Done),
            Ok(blocked) => self.check_missing_members().map(|()| blocked),
            // The first member may have given up because it knew of a lost member.
            Err(error) if join.comm().is_none() => {
                let mut members = self.members.iter();
                Err(members.find_map(|member| self.parent.check_peer(*member).err()).unwrap_or(self.for_parent(error)))
            }
            Err(error) => Err(self.for_parent(error)),
        }
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        self.join.as_ref().and_then(Operation::comm).or(Some(&self.parent))
    }

    fn describe(&self) -> String {
        format!("ncclCommShrink to {} ranks on {}", self.members.len(), self.parent.own_label())
    }
}

impl Drop for Shrink {
    fn drop(&mut self) {
        // This rank holds the segment open no longer, so a rank that comes later must not look for
        // it.
        if self.segment.is_some() {
            self.offer_of(self.parent.rank).digest.store(0, Ordering::Relaxed);
        }
    }
}

impl ChildOperation for Shrink {
    fn joined(&self) -> Option<Arc<Comm>> {
        self.join.as_ref().and_then(Join::joined)
    }

    fn for_parent(&self, error: Error) -> Error {
        match self.join {
            // The error names a rank of the new communicator, whose ranks have other numbers.
            Some(_) => {
                let blame = error.blame().renumbered(|rank| self.members.get(rank).copied());
                error.by(blame)
            }
            None => error,
        }
    }
}
