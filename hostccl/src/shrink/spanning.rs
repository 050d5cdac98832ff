//! `ncclCommShrink` of a communicator over several hosts.
//!
//! The parent may have failed, so the ranks meet beside its collectives. The first remaining rank
//! of each host leads its host, and the lowest of the leaders is the root. A leader greets the root
//! (`Hello`), and the root answers with the number of the new communicator once all leaders have
//! greeted (`Welcome`). Then each leader makes the segment of its host, and the ranks of the host
//! join it. The leader confirms that. When all have confirmed, the root tells all to go on.
//!
//! An attempt that was given up may have left messages behind. So each attempt of a leader has a
//! random number. The number of an attempt of the root is the number of the new communicator. A
//! letter of another attempt is passed over, and a leader greets again from time to time.

mod letter;
#[cfg(test)]
mod tests;

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use self::letter::{Letter, Post};
use super::begin;
use crate::blame::Blame;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::fork::Private;
use crate::join::{Join, Source};
use crate::operation::Operation;
use crate::poll::{Blocker, Poll};
use crate::segment::{self, Lobby};
use crate::setup::ChildOperation;
use crate::span::Span;
use crate::split::child_span;
use crate::timeout::{self, DEFAULT_TIMEOUT};
use crate::token::random_token;
use crate::types::*;

/// The pause before a leader greets the root again: the first one, and the longest one.
const GREET_AGAIN: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// How often the ranks that are not waited for just now are looked at.
const LOOK: Duration = Duration::from_millis(20);

/// How far a shrink is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The leaders meet the root; the other ranks wait for their leader.
    Meeting,
    /// The ranks of each host join its segment.
    Joining,
    /// The leaders confirm; the other ranks wait for their leader.
    Confirming,
    /// All ranks have joined.
    Over,
}

/// A shrink of a communicator over several hosts under way.
pub(crate) struct SpanShrink {
    /// The communicator that shrinks.
    parent: Arc<Comm>,
    /// The name of the new communicator.
    name: String,
    /// The flag that `ncclCommAbort` raises on the new communicator's handle.
    aborted: Arc<AtomicBool>,
    /// The checksum of the set of excluded ranks. Only ranks that exclude the same set meet.
    digest: u64,
    /// The remaining ranks of the parent, in their order.
    members: Vec<usize>,
    /// The leaders with which this rank exchanges letters: all leaders of other hosts for the root,
    /// the root for another leader, and none for other ranks.
    posts: Vec<Post>,
    /// The random number of this attempt.
    nonce: u64,
    /// The number of the new communicator, once it is known.
    number: Option<u64>,
    /// How far the shrink is.
    stage: Stage,
    /// The new segment's descriptor, which the leader holds open until all have joined.
    segment: Option<Private<OwnedFd>>,
    /// The joining of the new communicator, once this rank knows where its segment is.
    join: Option<Join>,
    /// When this rank last saw progress.
    since: Instant,
    /// When all remaining ranks were looked at last.
    looked: Instant,
    /// When this leader greets again, and the pause after that.
    greets: (Instant, Duration),
}

impl SpanShrink {
    /// Returns a shrink without the `excluded` ranks. With `abort`, it ends the calls that are
    /// under way on the parent, and the parent may have failed.
    pub(crate) fn new(
        parent: Arc<Comm>,
        excluded: &[i32],
        abort: bool,
        name: String,
        aborted: Arc<AtomicBool>,
    ) -> Result<SpanShrink> {
        let (members, digest) = begin(&parent, excluded, abort)?;
        let random = || Ok(u64::from_le_bytes(*random_token()?.first_chunk().expect("a token has 16 bytes")));
        let (nonce, now) = (random()?, Instant::now());
        let mut shrink = SpanShrink {
            parent,
            name,
            aborted,
            digest,
            members,
            posts: Vec::new(),
            nonce,
            number: None,
            stage: Stage::Meeting,
            segment: None,
            join: None,
            since: now,
            looked: now,
            greets: (now, GREET_AGAIN.0),
        };
        if shrink.is_root() {
            let leaders = shrink.leaders();
            shrink.posts = leaders[1..].iter().map(|leader| Post::new(shrink.span(), *leader, digest)).collect();
        } else if shrink.is_leader() {
            shrink.posts = vec![Post::new(shrink.span(), shrink.members[0], digest)];
        }
        Ok(shrink)
    }

    fn span(&self) -> &Span {
        self.parent.span.as_ref().expect("the parent is a communicator over several hosts")
    }

    /// The remaining ranks of this host.
    fn here(&self) -> impl Iterator<Item = usize> {
        self.span().here().iter().copied().filter(|rank| self.members.binary_search(rank).is_ok())
    }

    /// The first remaining rank of this host.
    fn leader(&self) -> usize {
        self.here().next().unwrap_or(self.span().rank)
    }

    fn is_leader(&self) -> bool {
        self.leader() == self.span().rank
    }

    fn is_root(&self) -> bool {
        self.members[0] == self.span().rank
    }

    /// The leaders of all hosts, in ascending order.
    fn leaders(&self) -> Vec<usize> {
        let is_member = |rank: &&usize| self.members.binary_search(rank).is_ok();
        let mut leaders: Vec<usize> =
            self.span().hosts.iter().filter_map(|host| host.iter().find(is_member)).copied().collect();
        leaders.sort_unstable();
        leaders
    }

    /// Goes on with the meeting of the leaders. Returns whether the number is known.
    fn meet(&mut self) -> Result<bool> {
        if self.is_root() {
            for at in 0..self.posts.len() {
                while let Some(letter) = self.posts[at].read()? {
                    self.since = Instant::now();
                    self.take_as_root(at, letter)?;
                }
            }
            if self.number.is_none() && self.posts.iter().all(|post| post.greeted.is_some()) {
                let number = random_token()?;
                let number = u64::from_le_bytes(*number.first_chunk().expect("a token has 16 bytes"));
                self.number = Some(number);
                for post in &mut self.posts {
                    let nonce = post.greeted.unwrap_or_default();
                    post.send(Letter::Welcome { nonce, number });
                }
            }
            return Ok(self.number.is_some());
        }
        let (due, pause) = self.greets;
        if self.number.is_none() && Instant::now() >= due {
            self.greets = (Instant::now() + pause, (pause * 2).min(GREET_AGAIN.1));
            let nonce = self.nonce;
            self.posts[0].send(Letter::Hello { nonce });
        }
        while let Some(letter) = self.posts[0].read()? {
            self.take_as_leader(letter)?;
        }
        Ok(self.number.is_some())
    }

    /// Handles a letter of the leader at that place.
    fn take_as_root(&mut self, at: usize, letter: Letter) -> Result<()> {
        let post = &mut self.posts[at];
        match letter {
            Letter::Hello { nonce } if post.greeted != Some(nonce) => {
                post.greeted = Some(nonce);
                if let Some(number) = self.number {
                    post.send(Letter::Welcome { nonce, number });
                }
            }
            Letter::Confirm { number } if Some(number) == self.number => post.confirmed = true,
            Letter::Failed { attempt, error } if Some(attempt) == post.greeted => return Err(error),
            _ => {}
        }
        Ok(())
    }

    /// Handles a letter of the root.
    fn take_as_leader(&mut self, letter: Letter) -> Result<()> {
        match letter {
            Letter::Welcome { nonce, number } if nonce == self.nonce && self.number.is_none() => {
                (self.number, self.since) = (Some(number), Instant::now());
            }
            Letter::Go { number } if Some(number) == self.number => self.posts[0].confirmed = true,
            Letter::Failed { attempt, error } if attempt == self.nonce => return Err(error),
            _ => {}
        }
        Ok(())
    }

    /// Makes the segment of this host, offers it to the other ranks of the host, and begins to join
    /// it.
    fn make_segment(&mut self, number: u64) -> Result<()> {
        let token = random_token()?;
        let fd = segment::create(token)?;
        Lobby::of(&fd)?.set_number(number);
        let raw = fd.as_raw_fd();
        self.segment = Some(Private::of(fd));
        self.parent.segment.seat(self.parent.rank).offer.write(self.digest, raw, token);
        self.begin_to_join(self.parent.rank, raw, token, number)
    }

    /// Looks for the segment that the leader of this host has made, and begins to join it. Returns
    /// whether there is one.
    fn find_segment(&mut self) -> Result<bool> {
        let Some(seat) = self.span().seat_of(self.leader()) else { return Ok(false) };
        let taken = self.parent.segment_taken(seat);
        let offer = &self.parent.segment.seat(seat).offer;
        let Some((number, fd, token)) = offer.read(taken.load(Ordering::Relaxed), self.digest) else {
            return Ok(false);
        };
        taken.store(number, Ordering::Relaxed);
        let Some(owner) = self.parent.segment.process(seat) else { return Ok(false) };
        // The leader may have given the segment up meanwhile, and offers the next one then.
        let Some(opened) = segment::open(owner.pid, fd, token)? else { return Ok(false) };
        let lobby = Lobby::of(&opened)?;
        if let Some(error) = lobby.failure() {
            let blame = error.blame().renumbered(|rank| self.members.get(rank).copied());
            return Err(error.by(blame));
        }
        self.begin_to_join(seat, fd, token, lobby.number())?;
        Ok(true)
    }

    fn begin_to_join(&mut self, seat: usize, fd: i32, token: [u8; 16], number: u64) -> Result<()> {
        let span = self.span();
        let me = self.members.binary_search(&span.rank).unwrap_or(0);
        let owner_rank = self.members.binary_search(&self.leader()).unwrap_or(0);
        let owner = self.parent.segment.process(seat).ok_or_else(|| Error::usage("the leader has no process"))?;
        let source = Source::Child { owner, owner_rank, fd, token };
        let size = self.members.len() as u32;
        let join = Join::new(source, size, me as u32, self.name.clone(), self.aborted.clone());
        let join = join.out_of(&self.parent, &self.members);
        self.join = Some(match child_span(span, &self.members, me, number) {
            Some(child) => join.over(child),
            None => join,
        });
        (self.stage, self.since) = (Stage::Joining, Instant::now());
        Ok(())
    }

    /// Goes on after all ranks of this host have joined. Returns whether all of all hosts have.
    fn confirm(&mut self) -> Result<bool> {
        let Some(child) = self.joined() else { return Ok(true) };
        if !self.is_leader() {
            return Ok(child.segment.header().is_joined());
        }
        let number = self.number.unwrap_or_default();
        if self.is_root() {
            self.meet()?;
            if !self.posts.iter().all(|post| post.confirmed) {
                return Ok(false);
            }
            self.posts.iter_mut().for_each(|post| post.send(Letter::Go { number }));
        } else {
            while let Some(letter) = self.posts[0].read()? {
                self.take_as_leader(letter)?;
            }
            if !self.posts[0].confirmed {
                return Ok(false);
            }
        }
        child.segment.header().set_joined();
        Ok(true)
    }

    /// Fails when a remaining rank has left the parent or died, when the new communicator has
    /// failed, and when the time is up.
    fn check(&mut self) -> Result<()> {
        if self.aborted.load(Ordering::Acquire) {
            return Err(Error::aborted());
        }
        if self.looked.elapsed() >= LOOK {
            self.looked = Instant::now();
            match self.joined() {
                // Its ranks may leave the parent now.
                Some(child) => child.check_peers(None, &String::new).map_err(|error| self.of_parent(error))?,
                None => self.members.iter().try_for_each(|rank| self.parent.check_rank(*rank))?,
            }
        }
        let limit = self.parent.timeout().or_else(timeout::from_environment).unwrap_or(DEFAULT_TIMEOUT);
        if self.since.elapsed() < limit {
            return Ok(());
        }
        let missing: Vec<usize> = match (self.stage, self.is_root()) {
            (Stage::Meeting, true) => {
                self.posts.iter().filter(|post| post.greeted.is_none()).map(|post| post.rank).collect()
            }
            (_, true) => self.posts.iter().filter(|post| !post.confirmed).map(|post| post.rank).collect(),
            (_, false) if self.is_leader() => vec![self.members[0]],
            (_, false) => vec![self.leader()],
        };
        let message = format!("{} did not come within {} ms", self.parent.labels.ranks(&missing), limit.as_millis());
        Err(Error::new(ncclTimeout, message).by(Blame::of(missing)))
    }

    /// Returns an error of the new communicator with the parent's ranks.
    fn of_parent(&self, error: Error) -> Error {
        let blame = error.blame().renumbered(|rank| self.members.get(rank).copied());
        error.by(blame)
    }

    /// Fails when a member that has not joined the new communicator has left the parent or died.
    /// The new communicator cannot know that yet.
    fn check_missing_members(&self) -> Result<()> {
        let Some(child) = self.joined() else { return Ok(()) };
        for missing in child.missing(Blocker::Arrivals) {
            let Some(&member) = self.members.get(missing) else { continue };
            if let Err(error) = self.parent.check_rank(member) {
                // The member may have joined between the two looks, and left the parent then.
                if child.missing(Blocker::Arrivals).contains(&missing) {
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Tells the other ranks that the shrink has failed. `error` has the parent's ranks.
    fn tell(&mut self, error: &Error) {
        let blame = error.blame().renumbered(|rank| self.members.binary_search(&rank).ok());
        let (root, nonce) = (self.is_root(), self.nonce);
        for post in &mut self.posts {
            if let Some(attempt) = if root { post.greeted } else { Some(nonce) } {
                post.send(Letter::Failed { attempt, error: error.clone() });
                post.flush();
            }
        }
        if let Some(child) = self.joined() {
            child.fail_whole(error.code(), blame, error.message(), "");
        } else if self.is_leader() && self.segment.is_none() {
            // The other ranks of this host read the reason in the segment for which they wait.
            let Ok((token, fd)) = random_token().and_then(|token| Ok((token, segment::create(token)?))) else { return };
            if let Ok(lobby) = Lobby::of(&fd) {
                lobby.fail(&error.clone().by(blame));
            }
            self.parent.segment.seat(self.parent.rank).offer.write(self.digest, fd.as_raw_fd(), token);
            self.span().kept.lock().unwrap_or_else(PoisonError::into_inner).push(Private::of(fd));
        }
    }

    fn advance(&mut self) -> Result<Poll> {
        loop {
            match self.stage {
                Stage::Meeting if self.is_leader() => {
                    if !self.meet()? {
                        break;
                    }
                    self.make_segment(self.number.unwrap_or_default())?;
                }
                Stage::Meeting => {
                    if !self.find_segment()? {
                        break;
                    }
                }
                Stage::Joining => {
                    let Some(join) = &mut self.join else { return Ok(Poll::Done) };
                    match join.poll() {
                        Ok(Poll::Done) => {}
                        Ok(blocked) => return self.check_missing_members().map(|()| blocked),
                        Err(error) => {
                            let error = self.of_parent(error);
                            let mut members = self.members.iter();
                            return Err(members
                                .find_map(|member| self.parent.check_rank(*member).err())
                                .unwrap_or(error));
                        }
                    }
                    (self.stage, self.since) = (Stage::Confirming, Instant::now());
                    if let (true, false, Some(number)) = (self.is_leader(), self.is_root(), self.number) {
                        self.posts[0].send(Letter::Confirm { number });
                    }
                }
                Stage::Confirming => {
                    if !self.confirm()? {
                        break;
                    }
                    self.stage = Stage::Over;
                }
                Stage::Over => {
                    // A letter that is dropped before it has gone does not arrive.
                    if self.posts.iter_mut().all(Post::has_sent) {
                        return Ok(Poll::Done);
                    }
                    break;
                }
            }
        }
        self.span().wire.progress();
        match self.check() {
            Ok(()) => Ok(Poll::Outside),
            // A rank that has ended may have let this one go before.
            Err(error) if self.stage == Stage::Confirming => match self.confirm() {
                Ok(true) => Ok(Poll::Done),
                _ => Err(error),
            },
            Err(error) => Err(error),
        }
    }
}

impl Operation for SpanShrink {
    fn poll(&mut self) -> Result<Poll> {
        let polled = self.advance();
        polled.inspect_err(|error| self.tell(error))
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        self.join.as_ref().and_then(Operation::comm).or(Some(&self.parent))
    }

    fn describe(&self) -> String {
        format!("ncclCommShrink to {} ranks on {}", self.members.len(), self.parent.own_label())
    }
}

impl Drop for SpanShrink {
    fn drop(&mut self) {
        // This rank holds the segment open no longer, so a rank that comes later must not look for
        // it.
        if self.segment.is_some() {
            self.parent.segment.seat(self.parent.rank).offer.digest.store(0, Ordering::Relaxed);
        }
    }
}

impl ChildOperation for SpanShrink {
    fn joined(&self) -> Option<Arc<Comm>> {
        self.join.as_ref().and_then(Join::joined)
    }

    fn for_parent(&self, error: Error) -> Error {
        if self.join.is_some() { self.of_parent(error) } else { error }
    }
}
