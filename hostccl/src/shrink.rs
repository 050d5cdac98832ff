//! `ncclCommShrink`: the ranks of a communicator that are left make a smaller one. The first of them makes the segment and says in its own seat
//! where it is; the others look there. Nothing of the parent is needed but its memory, so it may have failed.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::comm::{Blocker, Comm};
use crate::error::{Error, Result};
use crate::fork::Private;
use crate::id::{checksum, random_token};
use crate::join::{Join, Source};
use crate::operation::{Operation, Poll};
use crate::segment::{self, Offer};
use crate::setup::{Child, PATIENCE};
use crate::types::*;
use crate::wait::timeout;

/// A shrinking under way.
pub(crate) struct Shrink {
    parent: Arc<Comm>,
    name: String,
    aborted: Arc<AtomicBool>,
    /// Of the ranks that are left out.
    digest: u64,
    /// Parent's ranks that are left.
    members: Vec<usize>,
    /// Held open by the first of the members until all have joined.
    offered: Option<Private<OwnedFd>>,
    join: Option<Join>,
    since: Instant,
}

impl Shrink {
    /// `abort` ends what is under way on the parent, which may have failed already.
    pub(crate) fn new(
        parent: Arc<Comm>,
        excluded: &[i32],
        abort: bool,
        name: String,
        aborted: Arc<AtomicBool>,
    ) -> Result<Shrink> {
        let mut out = vec![false; parent.nranks];
        for &rank in excluded {
            let place = usize::try_from(rank)
                .ok()
                .and_then(|rank| out.get_mut(rank))
                .ok_or_else(|| Error::argument(format!("excluded rank {rank} is not in 0..{}", parent.nranks)))?;
            *place = true;
        }
        if out[parent.rank] {
            return Err(Error::argument(format!("rank {} calls, but is among the excluded ranks", parent.rank)));
        }
        match abort {
            true => parent.revoke(),
            false => parent.check_open()?,
        }
        let members = (0..parent.nranks).filter(|rank| !out[*rank]).collect();
        let bytes: Vec<u8> = out.iter().map(|out| u8::from(*out)).collect();
        let digest = checksum(&bytes).max(1);
        Ok(Shrink { parent, name, aborted, digest, members, offered: None, join: None, since: Instant::now() })
    }

    /// Makes the segment and tells where it is.
    fn offer(&mut self) -> Result<Source> {
        let token = random_token()?;
        let fd = segment::create(token)?;
        let offer = self.offer_of(self.parent.rank);
        offer.fd.store(fd.as_raw_fd(), Ordering::Relaxed);
        offer.digest.store(self.digest, Ordering::Relaxed);
        for (word, bytes) in offer.token.iter().zip(token.chunks_exact(8)) {
            word.store(u64::from_ne_bytes(bytes.try_into().expect("eight bytes")), Ordering::Relaxed);
        }
        offer.number.set(offer.number.value().wrapping_add(1));
        let source = self.source(self.parent.rank, fd.as_raw_fd(), token)?;
        self.offered = Some(Private::of(fd));
        Ok(source)
    }

    /// Where the first of the members has put the segment; `None` while it has not. It makes the next offer when all have taken this one; offers
    /// for other ranks may come between.
    fn look(&self, first: usize) -> Result<Option<Source>> {
        let offer = self.offer_of(first);
        let number = offer.number.value();
        if number == self.parent.taken(first).load(Ordering::Relaxed)
            || offer.digest.load(Ordering::Relaxed) != self.digest
        {
            return Ok(None);
        }
        let mut token = [0; 16];
        for (word, bytes) in offer.token.iter().zip(token.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        self.parent.taken(first).store(number, Ordering::Relaxed);
        self.source(first, offer.fd.load(Ordering::Relaxed), token).map(Some)
    }

    /// Fails when a member that has not come to the new communicator has left the old one or died: nobody there knows it yet.
    fn check_late(&self) -> Result<()> {
        let Some(child) = self.joined() else { return Ok(()) };
        for late in child.missing(Blocker::Arrivals) {
            let Some(&member) = self.members.get(late) else { continue };
            if let Err(error) = self.parent.check_peer(member) {
                // It may have come between the two looks, and gone on.
                if !child.missing(Blocker::Arrivals).contains(&late) {
                    continue;
                }
                child.fail(error.code(), Some(late), error.message());
                return Err(error);
            }
        }
        Ok(())
    }

    fn source(&self, owner: usize, fd: i32, token: [u8; 16]) -> Result<Source> {
        let gone = || Error::usage(format!("rank {owner} of {} has no process", self.parent.name));
        Ok(Source::Child { owner: self.parent.segment.process(owner).ok_or_else(gone)?, fd, token })
    }

    fn offer_of(&self, rank: usize) -> &Offer {
        &self.parent.segment.seat(rank).offer
    }

    /// This rank's place among the members.
    fn place(&self) -> usize {
        self.members.iter().position(|&rank| rank == self.parent.rank).unwrap_or(0)
    }
}

impl Operation for Shrink {
    fn poll(&mut self) -> Result<Poll> {
        if self.join.is_none() {
            let first = self.members[0];
            let seen = self.offer_of(first).number.value();
            let source = if first == self.parent.rank { Some(self.offer()?) } else { self.look(first)? };
            let Some(source) = source else {
                self.parent.check_peer(first)?;
                let patience = self.parent.patience().or_else(timeout).unwrap_or(PATIENCE);
                if self.since.elapsed() >= patience {
                    let message =
                        format!("{} did not come within {} ms", self.parent.label(first), patience.as_millis());
                    return Err(Error::new(ncclTimeout, message).by(Some(first)));
                }
                return Ok(Poll::Blocked { seen, blocker: Blocker::Offer(first) });
            };
            let (size, place) = (self.members.len() as u32, self.place() as u32);
            let join = Join::new(source, size, place, self.name.clone(), self.aborted.clone());
            self.join = Some(join.out_of(&self.parent, &self.members));
        }
        let Some(join) = &mut self.join else { return Ok(Poll::Done) };
        match join.poll() {
            Ok(Poll::Done) => Ok(Poll::Done),
            Ok(blocked) => self.check_late().map(|()| blocked),
            Err(error) => Err(self.for_parent(error)),
        }
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        self.join.as_ref().and_then(Operation::comm).or(Some(&self.parent))
    }

    fn describe(&self) -> String {
        format!("ncclCommShrink to {} ranks on {}", self.members.len(), self.parent.place())
    }
}

impl Drop for Shrink {
    fn drop(&mut self) {
        // What nobody holds open any more is nothing to take for a rank that comes later.
        if self.offered.is_some() {
            self.offer_of(self.parent.rank).digest.store(0, Ordering::Relaxed);
        }
    }
}

impl Child for Shrink {
    fn joined(&self) -> Option<Arc<Comm>> {
        self.join.as_ref().and_then(Join::joined)
    }

    fn for_parent(&self, error: Error) -> Error {
        match self.join {
            // Of the child, whose ranks are numbered anew.
            Some(_) => {
                let lost = error.lost().and_then(|rank| self.members.get(rank).copied());
                error.by(lost)
            }
            None => error,
        }
    }
}
