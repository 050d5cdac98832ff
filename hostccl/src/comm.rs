//! One rank's membership in a communicator: its segment, its failure, its steps, and the words that
//! it waits on.

mod ending;
mod growth;
mod steps;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::blame::Blame;
use crate::crowd::Crowd;
use crate::error::{Error, FAILED_EARLIER, Result};
use crate::event::{Event, Watch};
use crate::host::checksum;
use crate::id::Id;
use crate::interrupt::Interrupt;
use crate::labels::Labels;
use crate::places::Places;
use crate::poll::{Blocker, Poll};
use crate::process::{Process, ProcessId};
use crate::rails::Rails;
use crate::recorder::OwnedChannel;
use crate::remote::Remote;
use crate::segment::Segment;
use crate::span::Span;
use crate::timeout;
use crate::types::*;
use crate::wire::Peer;

/// How long a communicator counts as new ([`Comm::is_new`]).
const NEW: Duration = Duration::from_millis(50);

/// One rank's end of a communicator. The handle and the calls under way share it, so the memory
/// stays mapped while a call runs.
#[derive(Debug)]
pub(crate) struct Comm {
    /// The shared memory of the communicator.
    pub(crate) segment: Segment,
    /// The seat of this rank in the segment. It is the rank, unless there is a `span`.
    pub(crate) rank: usize,
    /// The number of seats. It is the number of ranks, unless there is a `span`.
    pub(crate) nranks: usize,
    /// The ranks on other hosts; `None` where all ranks share this segment.
    pub(crate) span: Option<Span>,
    /// The rails between the hosts; `None` where there is no `span`.
    pub(crate) rails: Option<Box<Rails>>,
    /// This rank's knowledge of the ranks on other hosts; `None` where there is no `span`.
    pub(crate) remote: Option<Remote>,
    /// How many ranks share this machine, and how many processors they have, as known when this
    /// communicator was made. Both numbers count this communicator, or the larger communicator from
    /// which it was made.
    born: Crowd,
    /// This is `born`, with the processors of all ranks of this host counted in. It is empty until
    /// all ranks of this host have arrived.
    crowd: OnceLock<Crowd>,
    /// How messages name the communicator and its ranks.
    pub(crate) labels: Labels,
    /// The calls of this rank that are under way, so that calls of several threads take turns.
    pub(crate) places: Places,
    /// How many steps this rank has ended. Only a call that is inside the collectives' place
    /// changes it.
    step: AtomicU64,
    /// For each rank, the number of the last segment that it offered for a shrink and that this
    /// rank has joined or passed over.
    segments_taken: Vec<AtomicU32>,
    /// How many shrinks this rank has begun, by the checksum of the excluded ranks.
    shrinks_begun: Mutex<HashMap<u64, u64>>,
    /// Raised by `ncclCommAbort`, which may happen before the communicator exists.
    aborted: Arc<AtomicBool>,
    /// Raised by `ncclCommFinalize`: new operations are refused.
    finalized: AtomicBool,
    /// Raised by this rank's `ncclCommRevoke`. From then on the communicator can only be split,
    /// shrunk or freed.
    revoked: AtomicBool,
    /// The id that this rank has made for the growth of the communicator, until the id is used.
    growth: Mutex<Option<Id>>,
    /// The rank of the whole communicator that this rank has itself found lost or late, where the
    /// segment names another rank or none; -1 for none.
    found_lost: AtomicI32,
    /// This rank's own failure, whole. It is set where this rank failed first, or where another
    /// rank was still writing its failure. From then on all errors of this rank tell of this
    /// failure.
    local_failure: OnceLock<Error>,
    /// How long a wait without progress may last, in milliseconds. With 0, `HOSTCCL_TIMEOUT_MS`
    /// applies.
    timeout_millis: AtomicU64,
    /// A question of the library that embeds the engine, which may end blocked calls; empty where
    /// none is set.
    interrupt: OnceLock<Interrupt>,
    /// When this rank joined the communicator.
    joined: Instant,
    /// For each rank, its process. An entry is filled when this rank first looks at the peer.
    pub(crate) peer_processes: Vec<OnceLock<Arc<Process>>>,
    /// The process of this rank.
    pub(crate) own_process: ProcessId,
    /// The communicator in the recording of this process, for calls without a name.
    pub(crate) raw_group: OwnedChannel,
}

impl Comm {
    /// Returns the end of `rank` in the communicator of a mapped segment.
    pub(crate) fn new(
        segment: Segment,
        rank: usize,
        crowd: Crowd,
        labels: Labels,
        aborted: Arc<AtomicBool>,
        own_process: ProcessId,
        span: Option<Span>,
    ) -> Comm {
        let nranks = segment.layout().nranks;
        Comm {
            segment,
            rank,
            nranks,
            rails: span.as_ref().map(|span| Box::new(Rails::new(span))),
            remote: span.as_ref().map(Remote::new),
            span,
            born: Crowd { ranks: crowd.ranks.max(nranks), ..crowd },
            crowd: OnceLock::new(),
            labels,
            places: Places::new(nranks),
            step: AtomicU64::new(0),
            segments_taken: (0..nranks).map(|_| AtomicU32::new(0)).collect(),
            shrinks_begun: Mutex::default(),
            aborted,
            finalized: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            growth: Mutex::default(),
            found_lost: AtomicI32::new(-1),
            local_failure: OnceLock::new(),
            timeout_millis: AtomicU64::new(0),
            interrupt: OnceLock::new(),
            joined: Instant::now(),
            peer_processes: (0..nranks).map(|_| OnceLock::new()).collect(),
            own_process,
            raw_group: OwnedChannel::default(),
        }
    }

    /// Whether this rank joined the communicator less than 50 ms ago. A split of a new communicator
    /// does not check whether the peers' processes live, because most splits end soon and the first
    /// check opens a descriptor of each process.
    pub(crate) fn is_new(&self) -> bool {
        self.joined.elapsed() < NEW
    }

    /// How many ranks are known to share this machine, and how many processors they have.
    pub(crate) fn crowd(&self) -> Crowd {
        let header = self.segment.header();
        if self.crowd.get().is_none() && header.arrived.value() as usize != self.nranks {
            return self.born;
        }
        *self
            .crowd
            .get_or_init(|| self.born.with_processors((0..self.nranks).map(|rank| &self.segment.seat(rank).processors)))
    }

    /// Whether the ranks on this machine outnumber their processors.
    pub(crate) fn is_crowded(&self) -> bool {
        self.crowd().is_crowded()
    }

    /// A number that is equal on all ranks of the communicator, and that no other communicator has.
    pub(crate) fn key(&self) -> u64 {
        match &self.span {
            Some(span) => span.comm,
            None => checksum(&self.segment.token()),
        }
    }

    /// This rank in the whole communicator, and the number of its ranks.
    pub(crate) fn whole(&self) -> (usize, usize) {
        self.span.as_ref().map_or((self.rank, self.nranks), |span| (span.rank, span.nranks))
    }

    /// The name of the communicator.
    pub(crate) fn name(&self) -> &str {
        &self.labels.comm_name
    }

    /// Fails with the error that ended the communicator. While there is none, this check costs four
    /// loads. In a communicator over several hosts, it first handles the news of other hosts.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        match self.is_sound() {
            true => Ok(()),
            false => self.check_whole(),
        }
    }

    /// Returns `blocked`, the answer of an operation that waits. Fails with the error that ended
    /// the communicator, unless the blocker's word has changed. The operation is then polled again.
    /// Another rank may have completed this call and then ended the communicator, so this call may
    /// still succeed.
    ///
    /// Such a rank read or wrote the last value of the word before it wrote its failure, with
    /// `Release`. This rank reads the failure with `Acquire` before it reads the word again. So
    /// this rank sees that value.
    #[inline]
    pub(crate) fn check_waiting(&self, blocked: Poll) -> Result<Poll> {
        match self.is_sound() {
            true => Ok(blocked),
            false => self.check_whole_waiting(blocked),
        }
    }

    /// Does what [`check_waiting`](Comm::check_waiting) does where something may have ended the
    /// communicator.
    fn check_whole_waiting(&self, blocked: Poll) -> Result<Poll> {
        self.check_whole().map(|()| blocked).or_else(|error| match blocked {
            Poll::Blocked { seen, blocker } if self.event(blocker).value() != seen => {
                self.check_aborted().map(|()| blocked)
            }
            _ => Err(error),
        })
    }

    /// Whether nothing has ended the communicator. On several hosts the answer is `false`, because
    /// the news of other hosts must be read first.
    #[inline]
    fn is_sound(&self) -> bool {
        let has_failed = self.local_failure.get().is_some() || self.segment.header().failure.is_set();
        !has_failed && self.remote.is_none() && !self.aborted.load(Ordering::Acquire)
    }

    /// Does what [`check`](Comm::check) does where something may have ended the communicator.
    fn check_whole(&self) -> Result<()> {
        self.check_aborted()?;
        if let Some(remote) = &self.remote {
            remote.desk.take();
        }
        self.failure().map_or(Ok(()), Err)
    }

    /// Fails when this rank has aborted the communicator.
    #[inline]
    pub(crate) fn check_aborted(&self) -> Result<()> {
        if self.aborted.load(Ordering::Acquire) { Err(Error::aborted()) } else { Ok(()) }
    }

    /// Raises the flag of `ncclCommAbort`, as the handle does before [`abort`](Comm::abort).
    #[cfg(test)]
    pub(crate) fn raise_abort(&self) {
        self.aborted.store(true, Ordering::Release);
    }

    fn failure(&self) -> Option<Error> {
        let error = self.written_failure()?;
        let is_late = error.code() == ncclTimeout && error.blame().ranks.contains(&self.whole().0);
        if !is_late {
            return Some(error);
        }
        // The others waited too long for this rank, and the failure blames it. So on this rank the
        // error says that this rank itself came too late.
        let blame = error.blame().clone();
        let message = format!("{} came too late; the others were told: {}", self.own_label(), error.message());
        Some(Error::new(ncclTimeout, message).by(blame))
    }

    /// Fails as [`check`](Comm::check) does, for a call that has not begun: the error says that an
    /// earlier call failed.
    #[inline]
    pub(crate) fn check_before_call(&self) -> Result<()> {
        match self.is_sound() {
            true => Ok(()),
            false => self.check_whole_before_call(),
        }
    }

    fn check_whole_before_call(&self) -> Result<()> {
        self.check_whole().map_err(|error| match self.failure() {
            None => error,
            Some(_) => {
                let call = self.segment.header().failure.call();
                let during = call.map_or_else(String::new, |call| format!(", in {call}"));
                let message = format!("{} {}{during}: {}", self.name(), FAILED_EARLIER, error.message());
                Error::new(error.code(), message).by(error.blame().clone())
            }
        })
    }

    /// Handles the news of other hosts that has arrived at this machine. Every call does this
    /// when it begins, because a call must not succeed after another rank's call has failed.
    #[inline]
    pub(crate) fn catch_up(&self) {
        if let Some(remote) = &self.remote {
            remote.desk.catch_up();
        }
    }

    /// Fails unless new operations may start.
    #[inline]
    pub(crate) fn check_open(&self) -> Result<()> {
        if self.is_revoked() {
            return Err(Error::usage(format!(
                "{} was revoked by ncclCommRevoke: destroy or abort it, or make others of it by ncclCommSplit or ncclCommShrink",
                self.name()
            )));
        }
        self.catch_up();
        self.check_before_call()?;
        if self.finalized.load(Ordering::Acquire) {
            return Err(Error::usage(format!("{} is finalized", self.name())));
        }
        Ok(())
    }

    /// Whether this rank has revoked the communicator.
    pub(crate) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }

    /// Ends the communicator for all ranks. Returns the error that ended it: this one, or an
    /// earlier one. `blame` has seats.
    pub(crate) fn fail(&self, code: ncclResult_t, blame: Blame, message: &str) -> Error {
        self.fail_in(code, blame, message, "")
    }

    /// Does what [`fail`](Comm::fail) does for a failure that `call` of this rank met. Later calls
    /// name `call` in their errors.
    pub(crate) fn fail_in(&self, code: ncclResult_t, blame: Blame, message: &str, call: &str) -> Error {
        self.fail_whole(code, self.whole_blame(blame), message, call)
    }

    /// Returns a blame of ranks of the whole communicator for a blame of seats.
    pub(crate) fn whole_blame(&self, blame: Blame) -> Blame {
        match self.span {
            None => blame,
            Some(_) => blame.renumbered(|seat| Some(self.labels.of_seat(seat))),
        }
    }

    /// Does what [`fail_in`](Comm::fail_in) does, where `blame` has ranks of the whole
    /// communicator.
    pub(crate) fn fail_whole(&self, code: ncclResult_t, blame: Blame, message: &str, call: &str) -> Error {
        self.fail_as_told(code, blame, message, call, None)
    }

    /// Does what [`fail_whole`](Comm::fail_whole) does. `told_by` is the process of another host
    /// that has told of the failure; `None` where this host has found the failure.
    pub(crate) fn fail_as_told(
        &self,
        code: ncclResult_t,
        blame: Blame,
        message: &str,
        call: &str,
        told_by: Option<Peer>,
    ) -> Error {
        let is_first = self.segment.header().fail(code, &blame, message, call);
        let error = self.written_failure().filter(|_| !is_first).unwrap_or_else(|| {
            // The segment has this failure. Or another rank is writing its failure now, or has died
            // while it wrote.
            self.local_failure.get_or_init(|| Error::new(code, message).by(blame)).clone()
        });
        self.tell_other_hosts(&error, told_by.is_none(), told_by);
        error
    }

    /// Tells the other hosts of the failure that ended the communicator, unless this rank has.
    /// [`Remote::tell_failure`] has the meaning of `all` and `told_by`.
    pub(crate) fn tell_other_hosts(&self, error: &Error, all: bool, told_by: Option<Peer>) {
        if let (Some(span), Some(remote)) = (&self.span, &self.remote) {
            let call = self.segment.header().failure.call().unwrap_or_default();
            remote.tell_failure(span, error, &call, all, told_by);
        }
    }

    /// The failure, with the message of the rank that found it. Other ranks may have only a part of
    /// that message. `None` while there is no failure. A rank that failed while another rank was
    /// writing its failure keeps its own failure, so that all errors of this rank report one
    /// failure.
    pub(crate) fn written_failure(&self) -> Option<Error> {
        self.local_failure.get().cloned().or_else(|| self.segment.header().failure.error())
    }

    /// How long a wait without any progress may last, where `hostcclCommSetTimeout` has set it.
    pub(crate) fn timeout(&self) -> Option<Duration> {
        timeout::from_millis(self.timeout_millis.load(Ordering::Relaxed))
    }

    /// Sets how long a wait without any progress may last, in milliseconds. With 0,
    /// `HOSTCCL_TIMEOUT_MS` applies.
    pub(crate) fn set_timeout(&self, millis: u64) {
        self.timeout_millis.store(millis, Ordering::Relaxed);
    }

    /// Sets the question that may end blocked calls. Where a question is set already, that question
    /// stays.
    pub(crate) fn set_interrupt(&self, interrupt: Interrupt) {
        let _ = self.interrupt.set(interrupt);
    }

    /// The question that may end blocked calls; `None` where none is set.
    pub(crate) fn interrupt(&self) -> Option<&Interrupt> {
        self.interrupt.get()
    }

    /// The rank that was found lost or late.
    pub(crate) fn lost_rank(&self) -> Option<usize> {
        let found = usize::try_from(self.found_lost.load(Ordering::Relaxed)).ok();
        found.or_else(|| self.failure()?.lost())
    }

    /// Notes that this rank has itself found `rank` late. The first rank that is noted stays.
    pub(crate) fn note_lost(&self, rank: usize) {
        let _ = self.found_lost.compare_exchange(-1, rank as i32, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The number of the last new segment of `rank` that this rank has joined or passed over.
    pub(crate) fn segment_taken(&self, rank: usize) -> &AtomicU32 {
        &self.segments_taken[rank]
    }

    /// Returns the number of this rank's next shrink that excludes the ranks with this checksum.
    /// The ranks that shrink together count alike, unless a call of one of them has failed before
    /// it began.
    pub(crate) fn next_shrink(&self, digest: u64) -> u64 {
        let mut begun = self.shrinks_begun.lock().unwrap_or_else(PoisonError::into_inner);
        let number = begun.entry(digest).or_default();
        *number += 1;
        *number
    }

    /// Returns the other rank if the communicator has two ranks, both on one host. Such ranks use
    /// no common counter. Each waits for a word of the other one, because a counter that both
    /// change would move between their caches more often.
    #[inline]
    pub(crate) fn other_of_two(&self) -> Option<usize> {
        (self.nranks == 2 && self.span.is_none()).then(|| 1 - self.rank)
    }

    /// Returns the word that holds the number of `step` once all ranks have ended it. This rank has
    /// ended it already.
    fn step_event(&self, step: u64) -> &Event {
        match self.other_of_two() {
            Some(other) => self.segment.seat(other).end_of(step),
            None => &self.segment.header().steps.ended,
        }
    }

    /// The word that changes when the blocker goes away.
    pub(crate) fn event(&self, blocker: Blocker) -> &Event {
        match blocker {
            Blocker::Arrivals => &self.segment.header().arrived,
            Blocker::Step(step) => self.step_event(step),
            Blocker::OtherSeats(_) => &self.segment.header().steps.count,
            Blocker::From(peer) => &self.segment.channel(peer, self.rank).head,
            Blocker::To { peer, .. } => &self.segment.channel(self.rank, peer).tail,
            Blocker::Turn => &self.places.changed,
            Blocker::OtherCall(peer) => &self.segment.channel(peer, self.rank).order,
            Blocker::CommonName(_) | Blocker::HostNames { .. } => &self.segment.header().wants,
            Blocker::Decision(_) => &self.segment.header().verdict,
            Blocker::Wire { .. } | Blocker::RemoteMessage { .. } => {
                self.span.as_ref().expect("a wait for another host has a span").wire.moved()
            }
            Blocker::NewSegment(peer) => &self.segment.seat(peer).offer.number,
        }
    }

    /// Returns a second word that changes when the blocker goes away, and the value that the
    /// operation saw in that word.
    pub(crate) fn second_event(&self, blocker: Blocker) -> Option<Watch<'_>> {
        match (blocker, &self.span) {
            (Blocker::To { peer, order }, _) => {
                Some(Watch { event: &self.segment.channel(self.rank, peer).order, seen: order })
            }
            (Blocker::HostNames { moved, .. }, Some(span)) => Some(Watch { event: span.wire.moved(), seen: moved }),
            _ => None,
        }
    }

    /// Whether this rank may have several calls under way that move bytes to other hosts.
    pub(crate) fn has_several_calls(&self) -> bool {
        let messages = self.remote.as_ref().map_or(0, Remote::calls_under_way);
        messages + usize::from(self.places.has_collective()) > 1
    }

    /// Returns "rank 3 (pid 4711)", or "rank 7 (rank 3 of mesh_tp, pid 4711)", for a seat.
    pub(crate) fn describe(&self, rank: usize) -> String {
        self.labels.rank(self.labels.of_seat(rank), self.segment.process(rank).map(|process| process.pid))
    }

    /// Returns "rank 3", or "rank 7 (rank 3 of mesh_tp)", for a seat.
    pub(crate) fn label(&self, rank: usize) -> String {
        self.labels.rank(self.labels.of_seat(rank), None)
    }

    /// Returns "rank 3 of mesh_tp", or "rank 7 (rank 3 of mesh_tp)", for this rank.
    pub(crate) fn own_label(&self) -> String {
        self.labels.rank_in_comm(self.whole().0)
    }
}
