//! The remaining ranks of a shrink, on one host or on several: their numbers, the offer of a new
//! segment to them, and this rank's join of the new communicator.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::blame::Blame;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::fork::Private;
use crate::host::checksum;
use crate::join::{Join, Source};
use crate::operation::Operation;
use crate::poll::Blocker;
use crate::segment::{self, Lobby, Offer};
use crate::timeout::{self, DEFAULT_TIMEOUT};
use crate::token::random_token;
use crate::types::*;

/// The remaining ranks of a communicator that shrinks.
pub(super) struct Remaining {
    /// The communicator that shrinks.
    pub(super) parent: Arc<Comm>,
    /// The name of the new communicator.
    name: String,
    /// The flag that `ncclCommAbort` raises on the new communicator's handle. Callers get that
    /// handle only when the shrink is done.
    pub(super) aborted: Arc<AtomicBool>,
    /// The checksum of the set of excluded ranks, never 0. Only ranks that exclude the same set
    /// meet.
    pub(super) digest: u64,
    /// The remaining ranks of the parent, in ascending order.
    pub(super) members: Vec<usize>,
    /// The new segment's descriptor, which the rank that made it holds open until all have joined.
    pub(super) segment: Option<Private<OwnedFd>>,
    /// The joining of the new communicator, once this rank knows where its segment is.
    pub(super) join: Option<Join>,
    /// Whether the shrink ends the calls that are under way on the parent when it begins.
    abort: bool,
    /// The number of this attempt among this rank's shrinks that exclude these ranks; 0 before it
    /// has begun.
    attempt: u64,
}

impl Remaining {
    /// Checks the excluded ranks. With `abort`, the parent may have failed, and
    /// [`begin`](Remaining::begin) ends the calls that are under way on it.
    pub(super) fn new(
        parent: Arc<Comm>,
        excluded: &[i32],
        abort: bool,
        name: String,
        aborted: Arc<AtomicBool>,
    ) -> Result<Remaining> {
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
        if !abort && !parent.is_revoked() {
            parent.check_open()?;
        }
        let bytes: Vec<u8> = out.iter().map(|out| u8::from(*out)).collect();
        let (digest, members) = (checksum(&bytes).max(1), (0..nranks).filter(|rank| !out[*rank]).collect());
        let remaining =
            Remaining { parent, name, aborted, digest, members, segment: None, join: None, abort, attempt: 0 };
        // An earlier attempt that excluded the same ranks may have left its failure for the other
        // ranks. A rank that has not read it must not take it for the failure of this attempt. A
        // refusal has the number of its attempt, so it stays.
        remaining.take_back_offer();
        Ok(remaining)
    }

    /// Begins the shrink, unless it has begun. With `abort`, ends the calls that are under way on
    /// the parent. `new` does not do so, because a group may fail before it begins its calls.
    /// Returns whether the shrink had not begun.
    pub(super) fn begin(&mut self) -> bool {
        let begins = self.take_number();
        if begins && self.abort {
            self.parent.end_calls("shrinks");
        }
        begins
    }

    /// Takes the number of this attempt. Returns whether the attempt had none.
    fn take_number(&mut self) -> bool {
        let has_none = self.attempt == 0;
        if has_none {
            self.attempt = self.parent.next_shrink(self.digest);
        }
        has_none
    }

    /// Returns the number of a rank of the parent in the new communicator.
    pub(super) fn new_rank(&self, rank: usize) -> Option<usize> {
        self.members.binary_search(&rank).ok()
    }

    /// Returns the offer of the rank with that seat in the parent.
    pub(super) fn offer(&self, seat: usize) -> &Offer {
        &self.parent.segment.seat(seat).offer
    }

    /// Makes a segment, and writes its location into this rank's seat. `number` is the number of
    /// the new communicator, if the communicator may have ranks on other hosts.
    pub(super) fn make_segment(&mut self, number: Option<u64>) -> Result<(RawFd, [u8; 16])> {
        let token = random_token()?;
        let fd = segment::create(token)?;
        if let Some(number) = number {
            Lobby::of(&fd)?.set_number(number);
        }
        let raw = fd.as_raw_fd();
        self.segment = Some(Private::of(fd));
        self.offer(self.parent.rank).write(self.digest, raw, token);
        Ok((raw, token))
    }

    /// Whether `error`, which ends this rank's shrink, is known to this rank alone: the operating
    /// system has refused something, or the error blames no rank. Other ranks may blame this rank
    /// too, because it came too late, and they know that. An abort is known, and so is a failure of
    /// a rank that has joined the new communicator.
    pub(super) fn is_own(&self, error: &Error) -> bool {
        let me = self.parent.whole().0;
        let is_own = match &error.blame().ranks[..] {
            [] => true,
            blamed => error.code() == ncclSystemError && blamed == [me],
        };
        is_own && self.joined().is_none() && self.check_aborted().is_ok()
    }

    /// Tells the other remaining ranks of this host that this rank cannot join them because of an
    /// error with this code. The refusal lies in the memory of the parent, so a process that can
    /// open no more files can still write it. The refusal takes the place of this rank's offer, and
    /// stays until this rank's next offer. A rank that makes this attempt later reads it, too.
    pub(super) fn refuse(&mut self, code: ncclResult_t) {
        self.take_number();
        self.offer(self.parent.rank).refuse(self.digest, self.attempt, code);
    }

    /// Fails when the rank with that seat has refused to join in this attempt, or in a later one,
    /// where that rank has left this attempt before this rank. Refusals of earlier attempts count
    /// no more. Only the rank that has refused knows the reason.
    fn check_refusal(&self, seat: usize) -> Result<()> {
        let Some((attempt, code)) = self.offer(seat).refusal(self.digest) else { return Ok(()) };
        if seat == self.parent.rank || attempt < self.attempt {
            return Ok(());
        }
        let message =
            format!("{} could not join the new communicator: its error has the reason", self.parent.describe(seat));
        Err(Error::new(code, message).by(self.parent.whole_blame(Blame::of([seat]))))
    }

    /// The seat of a rank of the parent on this host; `None` where the rank is on another host.
    fn seat_of(&self, rank: usize) -> Option<usize> {
        self.parent.span.as_ref().map_or(Some(rank), |span| span.seat_of(rank))
    }

    /// Fails when a remaining rank of this host has refused to join, and when a remaining rank of
    /// any host has left the parent or died.
    pub(super) fn check_members(&self) -> Result<()> {
        self.members.iter().filter_map(|rank| self.seat_of(*rank)).try_for_each(|seat| self.check_refusal(seat))?;
        self.lost_member().map_or(Ok(()), Err)
    }

    /// Ends this rank's part of the shrink. Closes its descriptor of the segment, and takes back
    /// the offer, so that a rank that calls the shrink later does not look for the segment. A
    /// refusal stays. Does nothing the second time, when the offer may be that of the next shrink.
    pub(super) fn withdraw(&mut self) {
        if self.segment.take().is_some() {
            self.take_back_offer();
        }
    }

    /// Takes back what this rank offers to these remaining ranks. A refusal stays.
    fn take_back_offer(&self) {
        let own = self.offer(self.parent.rank);
        if own.digest.load(Ordering::Relaxed) == self.digest && own.refusal(self.digest).is_none() {
            own.digest.store(0, Ordering::Relaxed);
        }
    }

    /// Writes another version into this rank's new segment, so that ranks which open it later
    /// refuse it.
    #[cfg(test)]
    pub(super) fn spoil_segment(&self) {
        use std::os::unix::fs::FileExt;
        let fd = self.segment.as_ref().unwrap().try_clone().unwrap();
        std::fs::File::from(fd).write_all_at(&[0; 4], segment::VERSION_AT as u64).unwrap();
    }

    /// Returns the segment that the rank with that seat offers to these remaining ranks. Returns
    /// `None` while there is no such offer, or only one that this rank has taken before. Fails when
    /// that rank refuses to join.
    ///
    /// The rank with that seat makes its next segment for these ranks only after all of them have
    /// taken the present segment. In between, that rank may make segments for other sets of ranks.
    pub(super) fn find_segment(&self, seat: usize) -> Result<Option<(RawFd, [u8; 16])>> {
        self.check_refusal(seat)?;
        let taken = self.parent.segment_taken(seat);
        let offered = self.offer(seat).read(taken.load(Ordering::Relaxed), self.digest);
        let Some((number, fd, token)) = offered.filter(|(_, fd, _)| *fd >= 0) else { return Ok(None) };
        taken.store(number, Ordering::Relaxed);
        Ok(Some((fd, token)))
    }

    /// Returns this rank's join of the new communicator.
    pub(super) fn join(&self, source: Source) -> Join {
        let (size, rank) = (self.members.len() as u32, self.new_rank(self.parent.whole().0).unwrap_or(0) as u32);
        let join = Join::new(source, size, rank, self.name.clone(), self.aborted.clone());
        join.out_of(&self.parent, &self.members)
    }

    /// Returns the new communicator once this rank has joined it.
    pub(super) fn joined(&self) -> Option<Arc<Comm>> {
        self.join.as_ref().and_then(Join::joined)
    }

    /// Fails when this rank has aborted the parent. Nobody has the handle of the new communicator
    /// before the shrink ends, so `ncclCommAbort` on the parent has to end it.
    pub(super) fn check_aborted(&self) -> Result<()> {
        if self.aborted.load(Ordering::Acquire) { Err(Error::aborted()) } else { self.parent.check_aborted() }
    }

    /// Returns an error of this rank as the other ranks should read it. After an abort, that error
    /// says that this rank aborted, because the others did not. An error that
    /// only this rank knows, and that blames no rank, blames this rank in the returned form.
    pub(super) fn for_others(&self, error: &Error) -> Error {
        let me = || Blame::of([self.parent.whole().0]);
        match self.check_aborted() {
            Ok(()) if error.blame().ranks.is_empty() && self.is_own(error) => {
                let message = format!("{}: {}", self.parent.describe(self.parent.rank), error.message());
                Error::new(error.code(), message).by(me())
            }
            Ok(()) => error.clone(),
            Err(_) => Error::new(ncclRemoteError, self.parent.told_of_abort()).by(me()),
        }
    }

    /// Fails when this rank has aborted the parent, and when a member that has not joined the new
    /// communicator has refused to join, has left the parent or died. The new communicator notices
    /// none of these events.
    pub(super) fn check_missing_members(&self) -> Result<()> {
        self.check_aborted()?;
        let Some(child) = self.joined() else { return Ok(()) };
        let missing =
            || child.missing(Blocker::Arrivals).into_iter().filter_map(|rank| self.members.get(rank).copied());
        missing().filter_map(|rank| self.seat_of(rank)).try_for_each(|seat| self.check_refusal(seat))?;
        match self.parent.first_lost(&missing().collect::<Vec<_>>()) {
            // Between the two checks the member may have joined, and may then have left the parent.
            Some((member, error)) if missing().any(|missing| missing == member) => Err(error),
            _ => Ok(()),
        }
    }

    /// Returns the error of the first member that has left the parent or died, if there is one.
    pub(super) fn lost_member(&self) -> Option<Error> {
        self.parent.first_lost(&self.members).map(|(_, error)| error)
    }

    /// Returns an error of the new communicator with the blamed ranks renumbered: each rank gets
    /// its number in the parent.
    pub(super) fn in_parent(&self, error: Error) -> Error {
        let blame = error.blame().renumbered(|rank| self.members.get(rank).copied());
        error.by(blame)
    }

    /// Returns an error as the ranks of the parent know it. While the new communicator is made,
    /// the error has the ranks of the new communicator, whose numbers differ from the parent's.
    pub(super) fn for_parent(&self, error: Error) -> Error {
        if self.join.is_some() { self.in_parent(error) } else { error }
    }

    /// Returns the ranks that an error of the parent blames, with their numbers in the new
    /// communicator.
    pub(super) fn blame_in_child(&self, error: &Error) -> Blame {
        error.blame().renumbered(|rank| self.new_rank(rank))
    }

    /// Returns how long this rank waits for another one.
    pub(super) fn limit(&self) -> Duration {
        self.parent.timeout().or_else(timeout::from_environment).unwrap_or(DEFAULT_TIMEOUT)
    }

    /// Returns the error of a shrink that these ranks of the parent did not join in time.
    pub(super) fn did_not_come(&self, missing: Vec<usize>) -> Error {
        let message = self.parent.did_not_come(&missing, self.limit().as_millis());
        Error::new(ncclTimeout, message).by(Blame::of(missing))
    }

    /// Returns the new communicator if it exists, even if not all ranks have joined it. Otherwise
    /// returns the parent.
    pub(super) fn comm(&self) -> Option<&Arc<Comm>> {
        self.join.as_ref().and_then(Operation::comm).or(Some(&self.parent))
    }

    pub(super) fn describe(&self) -> String {
        format!("ncclCommShrink to {} ranks on {}", self.members.len(), self.parent.own_label())
    }
}

impl Drop for Remaining {
    fn drop(&mut self) {
        self.withdraw();
    }
}
