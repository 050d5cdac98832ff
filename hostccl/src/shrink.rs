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

/// A shrink of a communicator on one host, under way.
pub(crate) struct Shrink {
    /// The remaining ranks, with their new segment and this rank's join.
    remaining: Remaining,
    /// When the call began.
    since: Instant,
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
        Ok(Shrink { remaining, since: Instant::now() })
    }

    /// Returns where the new segment is. Returns `None` while the first member has not made the
    /// segment.
    fn segment(&mut self, first: usize) -> Result<Option<Source>> {
        let found = match first == self.remaining.parent.rank {
            true => Some(self.remaining.make_segment(None)?),
            false => self.remaining.find_segment(first),
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
    /// communicator has left the parent or died. Ends the new communicator then.
    fn check_missing_members(&self) -> Result<()> {
        self.remaining.check_missing_members().inspect_err(|error| {
            if let Some(child) = self.joined() {
                let error = self.remaining.for_others(error);
                child.fail(error.code(), self.remaining.blame_in_child(&error), error.message());
            }
        })
    }
}

impl Operation for Shrink {
    fn poll(&mut self) -> Result<Poll> {
        if self.remaining.begin() {
            self.since = Instant::now();
        }
        if self.remaining.join.is_none() {
            let first = self.remaining.members[0];
            let seen = self.remaining.offer(first).number.value();
            let Some(source) = self.segment(first)? else {
                // The first member may have given up because of another member that is lost.
                self.remaining.lost_member().map_or(Ok(()), Err)?;
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
                Err(self.remaining.lost_member().unwrap_or_else(|| self.for_parent(error)))
            }
            Err(error) => Err(self.for_parent(error)),
        }
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
        self.remaining.withdraw();
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
}
