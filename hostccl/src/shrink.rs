//! `ncclCommShrink`: the remaining ranks of a communicator make a smaller one.
//!
//! The first of the remaining ranks makes the new segment, and writes the location of the segment
//! into its own seat. The other ranks read the location there. The shrink needs only the memory of
//! the parent, so the parent may have failed.

mod remaining;
mod spanning;

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use self::remaining::Remaining;
pub(crate) use self::spanning::SpanShrink;
#[cfg(any(test, fuzzing))]
pub(crate) use self::spanning::check_letter;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::join::Source;
use crate::operation::Operation;
use crate::poll::{Blocker, Poll};
use crate::setup::ChildOperation;
use crate::types::ncclRemoteError;

/// A shrink of a communicator on one host, under way.
pub(crate) struct Shrink {
    /// The remaining ranks, with their new segment and this rank's join.
    remaining: Remaining,
    /// When the call began.
    since: Instant,
    /// Whether the other ranks wait for this one: the shrink has begun, and it has not ended.
    is_awaited: bool,
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
        let remaining = Remaining::new(parent, excluded, abort, name, aborted)?;
        Ok(Shrink { remaining, since: Instant::now(), is_awaited: false })
    }

    /// Returns where the new segment is. Returns `None` while the first member has not made the
    /// segment. Fails when the first member cannot make it.
    fn segment(&mut self, first: usize) -> Result<Option<Source>> {
        let found = match first == self.remaining.parent.rank {
            true => Some(self.remaining.make_segment(None)?),
            false => self.remaining.find_segment(first)?,
        };
        found.map(|(fd, token)| self.source(first, fd, token)).transpose()
    }

    fn source(&self, owner: usize, fd: RawFd, token: [u8; 16]) -> Result<Source> {
        let parent = &self.remaining.parent;
        let gone = || Error::usage(format!("rank {owner} of {} has no process", parent.name()));
        let owner = parent.segment.process(owner).ok_or_else(gone)?;
        Ok(Source::Child { owner, owner_rank: 0, fd, token })
    }

    /// Fails when this rank has aborted the parent, and when a member that has not joined the new
    /// communicator has refused to join, has left the parent or died. Ends the new communicator
    /// then.
    fn check_missing_members(&self) -> Result<()> {
        self.remaining.check_missing_members().inspect_err(|error| {
            if let Some(child) = self.joined() {
                let error = self.remaining.for_others(error);
                child.fail(error.code(), self.remaining.blame_in_child(&error), error.message());
            }
        })
    }
}

impl Shrink {
    fn advance(&mut self) -> Result<Poll> {
        if self.remaining.begin() {
            self.since = Instant::now();
        }
        if self.remaining.join.is_none() {
            let first = self.remaining.members[0];
            let seen = self.remaining.offer(first).number.value();
            let Some(source) = self.segment(first)? else {
                // The first member may have given up because of another member.
                self.remaining.check_members()?;
                if self.since.elapsed() >= self.remaining.limit() {
                    return Err(self.remaining.did_not_come(vec![first]));
                }
                return Ok(Poll::Blocked { seen, blocker: Blocker::NewSegment(first) });
            };
            self.remaining.join = Some(self.remaining.join(source));
        }
        let Some(join) = &mut self.remaining.join else { return Ok(Poll::Done) };
        match join.poll() {
            Ok(Poll::Done) => Ok(Poll::Done),
            Ok(blocked) => self.check_missing_members().map(|()| blocked),
            // The first member may have given up because it knew of a lost member.
            Err(error) if join.comm().is_none() => {
                Err(self.remaining.check_members().err().unwrap_or_else(|| self.for_parent(error)))
            }
            Err(error) => Err(self.for_parent(error)),
        }
    }

    /// Tells the other ranks that this rank gives the shrink up, if they wait for this rank. Where
    /// this rank has joined the new communicator, or has aborted, they learn of that elsewhere.
    fn leave(&mut self) {
        let is_awaited = std::mem::take(&mut self.is_awaited);
        if is_awaited && self.joined().is_none() && self.remaining.check_aborted().is_ok() {
            self.remaining.refuse(ncclRemoteError);
        }
    }
}

impl Operation for Shrink {
    fn poll(&mut self) -> Result<Poll> {
        self.is_awaited = true;
        let polled = self.advance();
        self.is_awaited = polled.as_ref().is_ok_and(|poll| *poll != Poll::Done);
        polled.inspect_err(|error| {
            if self.remaining.is_own(error) {
                self.remaining.refuse(error.code());
            }
        })
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        self.remaining.comm()
    }

    fn describe(&self) -> String {
        self.remaining.describe()
    }
}

impl ChildOperation for Shrink {
    fn joined(&self) -> Option<Arc<Comm>> {
        self.remaining.joined()
    }

    fn for_parent(&self, error: Error) -> Error {
        self.remaining.for_parent(error)
    }

    fn withdraw(&mut self) {
        self.leave();
        self.remaining.withdraw();
    }

    fn refuse(&mut self, error: &Error) {
        self.remaining.refuse(error.code());
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::config::Config;
    use crate::handle::{self, Handle};
    use crate::hosts_of_threads::on_one_host;
    use crate::setup::ChildInit;
    use crate::types::ncclInvalidUsage;

    #[test]
    fn the_drop_of_a_shrink_that_is_done_leaves_the_offer_of_the_next_one() {
        let parent = on_one_host(2, 2).swap_remove(0);
        let handle = |comm: Option<&Arc<Comm>>| {
            let handle = Arc::new(Handle::new(0, 2, 0, Config::default()));
            comm.into_iter().for_each(|comm| handle.set_comm(Ok(comm.clone())));
            handle
        };
        let shrink = || Shrink::new(parent.clone(), &[1], false, "it".to_owned(), Arc::default()).unwrap();
        let (parent_handle, mut token) = (handle(Some(&parent)), null_mut());
        // SAFETY: the place for the token outlives the call.
        let mut done = unsafe {
            let of_child = handle(None);
            ChildInit::new(Box::new(shrink()), parent_handle.clone(), parent.clone(), of_child, &raw mut token)
        };
        done.begin();
        assert_eq!(done.poll(), Ok(Poll::Done));
        assert!(!parent_handle.in_progress(), "the program may shrink again");
        let mut next = shrink();
        next.remaining.make_segment(None).unwrap();
        drop(done);
        let offered = || parent.segment.seat(0).offer.digest.load(Ordering::Relaxed);
        assert_eq!(offered(), next.remaining.digest);
        drop(next);
        assert_eq!(offered(), 0, "a shrink that was given up");
        handle::remove(token).unwrap();
    }

    /// A shrink that excludes no rank.
    fn shrink_of(end: &Arc<Comm>) -> Shrink {
        Shrink::new(end.clone(), &[], true, "it".to_owned(), Arc::default()).unwrap()
    }

    #[test]
    fn a_member_that_cannot_join_is_named_to_the_others() {
        let ends = on_one_host(3, 3);
        let shrink = |rank: usize| shrink_of(&ends[rank]);
        let [mut first, mut second, mut third] = [0, 1, 2].map(shrink);
        let is_blocked = |polled: Result<Poll>| matches!(polled, Ok(Poll::Blocked { .. }));
        assert!(is_blocked(first.poll()) && is_blocked(second.poll()));
        first.remaining.spoil_segment();
        let error = third.poll().unwrap_err();
        assert!(error.message().contains("another version"), "{}", error.message());
        for other in [&mut first, &mut second] {
            let error = other.poll().unwrap_err();
            assert_eq!((error.code(), &error.blame().ranks[..]), (ncclInvalidUsage, &[2][..]), "{}", error.message());
        }
        drop((first, second, third));

        // The first member refuses after it has offered its segment, and nobody reads that.
        let mut first = shrink(0);
        let (fd, token) = first.remaining.make_segment(None).unwrap();
        first.remaining.join = Some(first.remaining.join(first.source(0, fd, token).unwrap()));
        first.remaining.spoil_segment();
        assert!(first.poll().is_err());
        drop(first);
        let mut second = shrink(1);
        let error = second.poll().unwrap_err();
        assert_eq!((error.code(), &error.blame().ranks[..]), (ncclInvalidUsage, &[0][..]), "{}", error.message());
        drop(second);

        // No refusal ends the next attempt.
        let [mut second, mut first, mut third] = [1, 0, 2].map(shrink);
        assert!(is_blocked(second.poll()) && is_blocked(first.poll()) && is_blocked(second.poll()));
        assert_eq!(third.poll(), Ok(Poll::Done));
        assert_eq!((first.poll(), second.poll()), (Ok(Poll::Done), Ok(Poll::Done)));
    }

    #[test]
    fn a_refusal_reaches_a_member_that_comes_later_and_ends_no_later_attempt() {
        let ends = on_one_host(3, 3);
        let shrink = |rank: usize| shrink_of(&ends[rank]);
        let blames = |shrink: &mut Shrink| shrink.poll().map_err(|error| error.blame().ranks.clone());
        let [mut first, mut third] = [0, 2].map(shrink);
        assert!(first.poll().is_ok());
        first.remaining.spoil_segment();
        assert!(third.poll().is_err());
        drop(third);
        // The member that has refused begins its next attempt before anybody has read the refusal.
        let mut third = shrink(2);
        assert!(third.poll().is_ok());
        assert_eq!(blames(&mut first), Err(vec![2]));
        drop(first);
        // This member begins the attempt that has failed.
        let mut second = shrink(1);
        assert_eq!(blames(&mut second), Err(vec![2]));
        drop(second);
        // The second attempt fails in the same way, also for the member that comes late.
        let mut first = shrink(0);
        assert!(first.poll().is_ok());
        first.remaining.spoil_segment();
        assert!(third.poll().is_err());
        assert_eq!(blames(&mut first), Err(vec![2]));
        drop((first, third));
        let mut again = shrink(2);
        assert!(again.poll().is_ok());
        let mut second = shrink(1);
        assert_eq!(blames(&mut second), Err(vec![2]));
        drop(second);
        let [mut first, mut second] = [0, 1].map(shrink);
        assert!(first.poll().is_ok() && second.poll().is_ok());
        assert_eq!(again.poll(), Ok(Poll::Done));
        assert_eq!((first.poll(), second.poll()), (Ok(Poll::Done), Ok(Poll::Done)));
    }

    #[test]
    fn a_shrink_that_is_given_up_or_cannot_begin_is_told_to_the_others() {
        let ends = on_one_host(2, 2);
        let shrink = |rank: usize| shrink_of(&ends[rank]);
        for cannot_begin in [false, true] {
            let [mut first, mut second] = [0, 1].map(shrink);
            match cannot_begin {
                true => second.refuse(&Error::usage("no thread")),
                false => assert!(second.poll().is_ok()),
            }
            second.withdraw();
            let error = first.poll().and_then(|_| first.poll()).unwrap_err();
            assert_eq!(&error.blame().ranks[..], [1], "{}", error.message());
            drop((first, second));
        }
        // A shrink that was dropped before it began has told nobody.
        drop(shrink(1));
        let [mut first, mut second] = [0, 1].map(shrink);
        assert!(first.poll().is_ok());
        assert_eq!((second.poll(), first.poll()), (Ok(Poll::Done), Ok(Poll::Done)));
    }
}
