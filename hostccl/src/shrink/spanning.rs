//! `ncclCommShrink` of a communicator over several hosts.
//!
//! The parent may have failed, so the ranks meet without the parent's collectives. The first
//! remaining rank of each host leads its host, and the lowest of the leaders is the root. A leader
//! greets the root (`Hello`). Once all leaders have greeted, the root answers with the number of
//! the new communicator (`Welcome`). Then each leader makes the segment of its host, and the ranks
//! of the host join that segment. When all of them have joined, the leader confirms that to the
//! root (`Confirm`). When all leaders have confirmed, the root tells the leaders that all ranks
//! have joined (`Go`).
//!
//! An attempt that was given up may have left messages behind. So each attempt of a leader has a
//! random number. The number of an attempt of the root is the number of the new communicator. A
//! leader ignores letters of another attempt. The root follows the last attempt from which it has
//! read a greeting. A leader greets again from time to time, and the root answers each greeting.

mod leaders;
mod letter;
#[cfg(test)]
mod tests;

use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use self::leaders::{Leaders, Role};
#[cfg(any(test, fuzzing))]
pub(crate) use self::letter::check_letter;
use super::remaining::Remaining;
use crate::blame::Blame;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::fork::Private;
use crate::gathering::span_of;
use crate::join::Source;
use crate::operation::Operation;
use crate::poll::Poll;
use crate::segment::{self, Lobby};
use crate::setup::ChildOperation;
use crate::span::Span;
use crate::split::child_span;
use crate::token::random_token;
use crate::types::ncclRemoteError;

/// The time between two checks of all remaining ranks. The checks include ranks for which this
/// rank does not wait at the moment.
const LOOK: Duration = Duration::from_millis(20);

/// How much longer than its leader a follower waits. So a follower that began earlier than its
/// leader, by at most this time, still gives up after the leader. The follower then reads the
/// leader's reason in the attempt to which the reason belongs, and not in its next attempt.
const AFTER_LEADER: Duration = Duration::from_secs(1);

/// The stages of a shrink.
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
    /// The remaining ranks, with the new segment of this host and this rank's join of the new
    /// communicator.
    remaining: Remaining,
    /// The meeting of the leaders.
    leaders: Leaders,
    /// The present stage of the shrink.
    stage: Stage,
    /// When the stage began.
    since: Instant,
    /// When this rank last checked all remaining ranks.
    looked: Instant,
    /// Whether the other ranks wait for this one: the shrink has begun, it has not ended, and this
    /// rank has not told them of a failure.
    is_awaited: bool,
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
        let remaining = Remaining::new(parent, excluded, abort, name, aborted)?;
        let span = span_of(&remaining.parent);
        let is_member = |rank: &&usize| remaining.new_rank(**rank).is_some();
        let mut first: Vec<usize> = span.hosts.iter().filter_map(|host| host.iter().find(is_member)).copied().collect();
        first.sort_unstable();
        let leaders = Leaders::new(&remaining.parent, &first, remaining.digest)?;
        let now = Instant::now();
        Ok(SpanShrink { remaining, leaders, stage: Stage::Meeting, since: now, looked: now, is_awaited: false })
    }

    fn span(&self) -> &Span {
        span_of(&self.remaining.parent)
    }

    /// The first remaining rank of this host.
    fn leader(&self) -> usize {
        let mut here = self.span().here().iter().copied();
        here.find(|rank| self.remaining.new_rank(*rank).is_some()).unwrap_or(self.span().rank)
    }

    fn is_leader(&self) -> bool {
        self.leaders.role != Role::Follower
    }

    fn enter(&mut self, stage: Stage) {
        (self.stage, self.since) = (stage, Instant::now());
    }

    /// Makes the segment of this host, offers it to the other ranks of the host, and begins to join
    /// it.
    fn make_segment(&mut self, number: u64) -> Result<()> {
        let (fd, token) = self.remaining.make_segment(Some(number))?;
        self.begin_to_join(self.remaining.parent.rank, fd, token, number)
    }

    /// Looks for the segment that the leader of this host has made, and begins to join it. Returns
    /// whether there is one.
    fn find_segment(&mut self) -> Result<bool> {
        let Some(seat) = self.span().seat_of(self.leader()) else { return Ok(false) };
        let Some((fd, token)) = self.remaining.find_segment(seat)? else { return Ok(false) };
        let Some(owner) = self.remaining.parent.segment.process(seat) else { return Ok(false) };
        // The leader may have given up this segment meanwhile. In that case the leader offers
        // another segment later.
        let Some(opened) = segment::open(owner.pid, fd, token)? else { return Ok(false) };
        let lobby = Lobby::of(&opened)?;
        if let Some(error) = lobby.failure() {
            return Err(self.remaining.in_parent(error));
        }
        self.begin_to_join(seat, fd, token, lobby.number())?;
        Ok(true)
    }

    fn begin_to_join(&mut self, seat: usize, fd: RawFd, token: [u8; 16], number: u64) -> Result<()> {
        let (remaining, span) = (&self.remaining, self.span());
        let me = remaining.new_rank(span.rank).unwrap_or(0);
        let owner_rank = remaining.new_rank(self.leader()).unwrap_or(0);
        let owner = remaining.parent.segment.process(seat).ok_or_else(|| Error::usage("the leader has no process"))?;
        let join = remaining.join(Source::Child { owner, owner_rank, fd, token });
        self.remaining.join = Some(match child_span(span, &remaining.members, me, number) {
            Some(child) => join.over(child),
            None => join,
        });
        self.enter(Stage::Joining);
        Ok(())
    }

    /// Takes the next step after all ranks of this host have joined. Returns whether all ranks of
    /// all hosts have joined.
    fn confirm(&mut self) -> Result<bool> {
        let Some(child) = self.joined() else { return Ok(true) };
        if !self.is_leader() {
            return Ok(child.segment.header().is_joined());
        }
        let all = self.leaders.all_confirmed()?;
        if all {
            child.segment.header().set_joined();
        }
        Ok(all)
    }

    /// Fails when this rank has aborted the parent, when a remaining rank has left the parent or
    /// died, when the new communicator has failed, and when the time is up.
    fn check(&mut self) -> Result<()> {
        let remaining = &self.remaining;
        remaining.check_aborted()?;
        if self.looked.elapsed() >= LOOK {
            self.looked = Instant::now();
            match remaining.joined() {
                // The ranks of the new communicator may leave the parent now, so only the new
                // communicator is checked.
                Some(child) => child.check_peers(None, &String::new).map_err(|error| remaining.in_parent(error))?,
                None => remaining.check_members()?,
            }
        }
        let more = if self.is_leader() { Duration::ZERO } else { AFTER_LEADER };
        if self.since.max(self.leaders.heard).elapsed() < remaining.limit().saturating_add(more) {
            return Ok(());
        }
        Err(remaining.did_not_come(if self.is_leader() { self.leaders.missing() } else { vec![self.leader()] }))
    }

    /// Tells the other ranks that the shrink has failed. `error` has the parent's ranks.
    fn tell(&mut self, error: &Error) {
        let is_own = self.remaining.is_own(error);
        self.tell_as(error, is_own);
    }

    /// Does what [`tell`](SpanShrink::tell) does. `is_own` says whether only this rank knows of the
    /// failure.
    fn tell_as(&mut self, error: &Error, is_own: bool) {
        let error = &self.remaining.for_others(error);
        self.leaders.tell(error);
        let blame = self.remaining.blame_in_child(error);
        if let Some(child) = self.joined() {
            child.fail_whole(error.code(), blame, error.message(), "");
            return;
        }
        // The other ranks of this host look for a segment in the leader's seat. They read the
        // reason in that segment. Where the leader can make no segment for the reason, or has
        // offered one that it cannot join, they read its refusal.
        let offers_reason = self.is_leader() && self.remaining.segment.is_none();
        let is_offered = offers_reason && self.offer_reason(&error.clone().by(blame)).is_ok();
        if !is_offered && (is_own || offers_reason) {
            self.remaining.refuse(error.code());
        }
    }

    /// Offers a segment in which the other ranks of this host read `error`.
    fn offer_reason(&self, error: &Error) -> Result<()> {
        let token = random_token()?;
        let fd = segment::create(token)?;
        Lobby::of(&fd)?.fail(error);
        let offer = self.remaining.offer(self.remaining.parent.rank);
        offer.write(self.remaining.digest, fd.as_raw_fd(), token);
        let mut kept = self.span().kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.insert(self.remaining.digest, Private::of(fd));
        Ok(())
    }

    /// Tells the other ranks that this rank gives the shrink up, if they wait for this rank.
    fn leave(&mut self) {
        if std::mem::take(&mut self.is_awaited) {
            let remaining = &self.remaining;
            let failure = remaining.joined().and_then(|child| child.check().err());
            let is_own = remaining.joined().is_none() && remaining.check_aborted().is_ok();
            let error = failure.map(|error| remaining.in_parent(error)).unwrap_or_else(|| {
                let parent = &remaining.parent;
                let message = format!("{} gave up shrinking", parent.describe(parent.rank));
                Error::new(ncclRemoteError, message).by(Blame::of([parent.whole().0]))
            });
            self.tell_as(&error, is_own);
        }
    }

    fn advance(&mut self) -> Result<Poll> {
        loop {
            match self.stage {
                Stage::Meeting if self.is_leader() => {
                    let Some(number) = self.leaders.meet()? else { break };
                    self.make_segment(number)?;
                }
                Stage::Meeting => {
                    if !self.find_segment()? {
                        break;
                    }
                }
                Stage::Joining => {
                    let Some(join) = &mut self.remaining.join else { return Ok(Poll::Done) };
                    match join.poll() {
                        Ok(Poll::Done) => {}
                        Ok(blocked) => return self.remaining.check_missing_members().map(|()| blocked),
                        Err(error) => {
                            let error = self.remaining.in_parent(error);
                            return Err(self.remaining.lost_member().unwrap_or(error));
                        }
                    }
                    self.enter(Stage::Confirming);
                    self.leaders.confirm();
                }
                Stage::Confirming => {
                    if !self.confirm()? {
                        break;
                    }
                    self.stage = Stage::Over;
                }
                Stage::Over if self.leaders.has_sent() => return Ok(Poll::Done),
                Stage::Over => break,
            }
        }
        self.span().wire.progress();
        match self.check() {
            Ok(()) => Ok(Poll::Outside),
            // The lost rank may have told this rank, before it ended, that all ranks have joined.
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
        self.is_awaited = true;
        if self.remaining.begin() {
            self.since = Instant::now();
        }
        let polled = self.advance().inspect_err(|error| self.tell(error));
        self.is_awaited = polled.as_ref().is_ok_and(|poll| *poll != Poll::Done);
        polled
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        self.remaining.comm()
    }

    fn describe(&self) -> String {
        self.remaining.describe()
    }
}

impl ChildOperation for SpanShrink {
    fn joined(&self) -> Option<Arc<Comm>> {
        self.remaining.joined()
    }

    fn for_parent(&self, error: Error) -> Error {
        self.remaining.for_parent(error)
    }

    fn child_failed(&mut self, error: Error) -> Error {
        let error = self.for_parent(error);
        self.tell(&error);
        self.is_awaited = false;
        error
    }

    fn withdraw(&mut self) {
        self.leave();
        self.remaining.withdraw();
    }

    fn refuse(&mut self, error: &Error) {
        // The leader of this host tells the other hosts.
        self.remaining.refuse(error.code());
    }
}

impl Drop for SpanShrink {
    /// An abort drops a shrink that no thread drives.
    fn drop(&mut self) {
        self.leave();
    }
}
