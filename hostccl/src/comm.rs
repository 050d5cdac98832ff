//! One rank's membership in a communicator: its segment, its peers, and how the rank waits for them.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::collective::{self, Descriptor};
use crate::error::{Error, FAILED_EARLIER, Result};
use crate::event::{self, Event, Watch};
use crate::meeting;
use crate::message;
use crate::operation::Poll;
use crate::process::{Process, ProcessId};
use crate::segment::Segment;
use crate::turn::Turns;
use crate::types::*;

/// What messages call the ranks of a communicator, by rank: their ranks in a larger set. Empty: as they are numbered in the communicator.
pub(crate) type Names = Arc<OnceLock<Box<[i32]>>>;

/// How a process that has ended is told: nobody but its parent learns whether it exited or was killed.
const GONE: &str = "has gone (its process exited or was killed)";

/// A rank's end of a communicator. Shared by its handle and the calls under way, which keep the memory mapped.
#[derive(Debug)]
pub(crate) struct Comm {
    pub(crate) segment: Segment,
    pub(crate) rank: usize,
    pub(crate) nranks: usize,
    /// How many ranks are known to share this machine: of this communicator, or of the one that it was made of.
    pub(crate) crowd: usize,
    /// How messages call it.
    pub(crate) name: String,
    pub(crate) names: Names,
    /// Which calls of this rank are inside, so that calls of several threads take turns.
    pub(crate) turns: Turns,
    /// The steps this rank has ended. Changed only with the collectives' turn.
    step: AtomicU64,
    /// By rank: the last of its offers that this rank has taken.
    taken: Vec<AtomicU32>,
    /// Raised by `ncclCommAbort`, also before the communicator exists.
    aborted: Arc<AtomicBool>,
    finalized: AtomicBool,
    /// Whom this rank has found dead, gone or late itself, where the segment says something else or nothing; -1 nobody.
    found: AtomicI32,
    /// The failure of this rank that came while another rank was writing down its own: it stands until that one is there.
    unwritten: OnceLock<Error>,
    /// How long a wait without progress may last, in milliseconds; 0: as the process's environment says.
    patience: AtomicU64,
    watched: Vec<OnceLock<Arc<Process>>>,
    me: ProcessId,
}

/// What a blocked operation waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blocker {
    /// Ranks that have not come yet.
    Arrivals,
    /// Ranks that have not ended this step.
    Step(u64),
    /// The next bytes from a rank.
    From(usize),
    /// A rank's taking of the bytes sent to it, or a reason to send another message first: a change of the channel's `order`, which held
    /// that value.
    To { peer: usize, order: u32 },
    /// This thread's turn behind other threads of this rank. They have deadlines, so this wait needs none.
    Turn,
    /// A message of that rank under another name than the one in the ring, or another thread of this rank, for which the one in the ring is.
    Other(usize),
    /// Calls of all ranks under one name, of which this rank is the judge: those of that step have different ones.
    Wants(u64),
    /// Rank 0's word which of the names in that step goes first.
    Verdict(u64),
    /// A rank's making of a smaller communicator. The failure of this one does not end the wait: the operation looks itself what does.
    Offer(usize),
}

impl Comm {
    pub(crate) fn new(
        segment: Segment,
        rank: usize,
        crowd: usize,
        name: String,
        aborted: Arc<AtomicBool>,
        me: ProcessId,
    ) -> Comm {
        let nranks = segment.layout().nranks;
        Comm {
            segment,
            rank,
            nranks,
            crowd: crowd.max(nranks),
            name,
            names: Names::default(),
            turns: Turns::new(nranks),
            step: AtomicU64::new(0),
            taken: (0..nranks).map(|_| AtomicU32::new(0)).collect(),
            aborted,
            finalized: AtomicBool::new(false),
            found: AtomicI32::new(-1),
            unwritten: OnceLock::new(),
            patience: AtomicU64::new(0),
            watched: (0..nranks).map(|_| OnceLock::new()).collect(),
            me,
        }
    }

    /// The error that ended the communicator, if any; three loads when there is none.
    pub(crate) fn check(&self) -> Result<()> {
        if self.aborted.load(Ordering::Acquire) {
            return Err(Error::aborted());
        }
        self.failure().map_or(Ok(()), Err)
    }

    fn failure(&self) -> Option<Error> {
        self.segment.header().failure.error().or_else(|| self.unwritten.get().cloned())
    }

    /// Fails when this rank has aborted it, or `peer` has left it or died, whatever else has become of the communicator.
    pub(crate) fn check_peer(&self, peer: usize) -> Result<()> {
        if self.aborted.load(Ordering::Acquire) {
            return Err(Error::aborted());
        }
        if self.segment.seat(peer).left.load(Ordering::Acquire) != 0 {
            let message = format!("{} has destroyed its communicator", self.describe(peer));
            return Err(Error::new(ncclRemoteError, message).by(Some(peer)));
        }
        let Some(id) = self.segment.process(peer).filter(|id| id.pid != self.me.pid) else { return Ok(()) };
        let process = self.watched[peer].get_or_init(|| Process::watch(id));
        match Process::first_dead(std::slice::from_ref(process)) {
            Some(_) => Err(Error::new(ncclRemoteError, format!("{} {GONE}", self.describe(peer))).by(Some(peer))),
            None => Ok(()),
        }
    }

    /// The error that ended the communicator, for a call that has not begun: it says that it was another call that failed.
    pub(crate) fn check_before(&self) -> Result<()> {
        self.check().map_err(|error| match self.failure() {
            None => error,
            Some(_) => {
                let call = self.segment.header().failure.call();
                let during = call.map_or_else(String::new, |call| format!(", in {call}"));
                let message = format!("{} {}{during}: {}", self.name, FAILED_EARLIER, error.message());
                Error::new(error.code(), message).by(error.lost())
            }
        })
    }

    /// Whether new operations may start.
    pub(crate) fn check_open(&self) -> Result<()> {
        self.check_before()?;
        if self.finalized.load(Ordering::Acquire) {
            return Err(Error::usage(format!("{} is finalized", self.name)));
        }
        Ok(())
    }

    /// Ends the communicator for all ranks and returns what ended it: this, unless something else came first.
    pub(crate) fn fail(&self, code: ncclResult_t, rank: Option<usize>, message: &str) -> Error {
        self.fail_in(code, rank, message, "")
    }

    /// The same for a failure that `call` of this rank met, which later calls tell.
    fn fail_in(&self, code: ncclResult_t, rank: Option<usize>, message: &str, call: &str) -> Error {
        let header = self.segment.header();
        header.fail(code, rank.map(|rank| rank as u32), message, call);
        header.failure.error().unwrap_or_else(|| {
            // Another rank is just writing its failure down, or has died over it.
            self.unwritten.get_or_init(|| Error::new(code, message).by(rank)).clone()
        })
    }

    /// How long a wait of this communicator without any progress may last, where that was set for it.
    pub(crate) fn patience(&self) -> Option<Duration> {
        let millis = self.patience.load(Ordering::Relaxed);
        (millis > 0).then(|| Duration::from_millis(millis))
    }

    pub(crate) fn set_patience(&self, millis: u64) {
        self.patience.store(millis, Ordering::Relaxed);
    }

    /// The rank found dead, gone or late.
    pub(crate) fn lost_rank(&self) -> Option<usize> {
        let found = usize::try_from(self.found.load(Ordering::Relaxed)).ok();
        found.or_else(|| self.failure()?.lost())
    }

    fn note(&self, rank: Option<usize>) {
        let rank = rank.map_or(-1, |rank| rank as i32);
        let _ = self.found.compare_exchange(-1, rank, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Ends the calls of all ranks, for going on with fewer.
    pub(crate) fn revoke(&self) {
        self.fail(ncclRemoteError, None, &format!("{} shrinks the communicator", self.describe(self.rank)));
    }

    /// The last offer of `rank` that this one has taken.
    pub(crate) fn taken(&self, rank: usize) -> &AtomicU32 {
        &self.taken[rank]
    }

    /// The steps this rank has ended.
    pub(crate) fn step(&self) -> u64 {
        self.step.load(Ordering::Relaxed)
    }

    /// Ends this rank's current step: what it wrote in it is there for the peers once all have ended it.
    pub(crate) fn end_step(&self) {
        let step = self.step() + 1;
        self.step.store(step, Ordering::Relaxed);
        self.segment.seat(self.rank).step.store(step as u32);
        let header = self.segment.header();
        if header.barrier_count.count() as usize == self.nranks {
            // Nobody counts for the next step before the barrier is set.
            header.barrier_count.store(0);
            header.barrier.set(step as u32);
        }
    }

    /// Whether some rank has not ended the step that this rank ended last: `None`, or what to wait for.
    pub(crate) fn step_blocked(&self) -> Option<Poll> {
        let step = self.step();
        // Nobody can be a step ahead of this rank, so equality is enough and wrapping harmless.
        let seen = self.segment.header().barrier.value();
        (seen != step as u32).then_some(Poll::Blocked { seen, blocker: Blocker::Step(step) })
    }

    /// The word that changes when the blocker goes away.
    pub(crate) fn event(&self, blocker: Blocker) -> &Event {
        match blocker {
            Blocker::Arrivals => &self.segment.header().arrived,
            Blocker::Step(_) => &self.segment.header().barrier,
            Blocker::From(peer) => &self.segment.channel(peer, self.rank).head,
            Blocker::To { peer, .. } => &self.segment.channel(self.rank, peer).tail,
            Blocker::Turn => &self.turns.changed,
            Blocker::Other(peer) => &self.segment.channel(peer, self.rank).order,
            Blocker::Wants(_) => &self.segment.header().wants,
            Blocker::Verdict(_) => &self.segment.header().verdict,
            Blocker::Offer(peer) => &self.segment.seat(peer).offer.number,
        }
    }

    /// A second word that changes when the blocker goes away, and what it held.
    pub(crate) fn second_event(&self, blocker: Blocker) -> Option<Watch<'_>> {
        let Blocker::To { peer, order } = blocker else { return None };
        Some(Watch { event: &self.segment.channel(self.rank, peer).order, seen: order })
    }

    /// "rank 3 (pid 4711)", or "rank 7 (rank 3 of mesh_tp, pid 4711)" where ranks have names.
    pub(crate) fn describe(&self, rank: usize) -> String {
        let pid = self.segment.process(rank).map(|process| format!("pid {}", process.pid));
        self.label_with(rank, pid)
    }

    /// "rank 3", or "rank 7 (rank 3 of mesh_tp)" where ranks have names.
    pub(crate) fn label(&self, rank: usize) -> String {
        self.label_with(rank, None)
    }

    /// Where this rank is: "rank 3 of mesh_tp", or "rank 7 (rank 3 of mesh_tp)".
    pub(crate) fn place(&self) -> String {
        match self.renamed(self.rank) {
            Some(_) => self.label(self.rank),
            None => format!("rank {} of {}", self.rank, self.name),
        }
    }

    /// What a communicator of these ranks calls them.
    pub(crate) fn names_of(&self, members: &[usize]) -> Names {
        let names = Names::default();
        if let Some(known) = self.names.get() {
            let _ = names.set(members.iter().filter_map(|&rank| known.get(rank).copied()).collect());
        }
        names
    }

    /// The name of a rank, where it is not its number.
    fn renamed(&self, rank: usize) -> Option<i32> {
        let name = self.names.get()?.get(rank).copied();
        name.filter(|name| usize::try_from(*name) != Ok(rank))
    }

    fn label_with(&self, rank: usize, pid: Option<String>) -> String {
        let number = self.renamed(rank).map(|_| format!("rank {rank} of {}", self.name));
        let aside: Vec<String> = number.into_iter().chain(pid).collect();
        let name = self.renamed(rank).unwrap_or(rank as i32);
        match aside.is_empty() {
            true => format!("rank {name}"),
            false => format!("rank {name} ({})", aside.join(", ")),
        }
    }

    /// "ranks 1, 2 and 40 more", or "ranks 5, 6 (ranks 1, 2 of mesh_tp)" where they have names.
    fn list(&self, ranks: &[usize]) -> String {
        let names: Vec<i32> = ranks.iter().map(|&rank| self.renamed(rank).unwrap_or(rank as i32)).collect();
        let numbers: Vec<i32> = ranks.iter().map(|&rank| rank as i32).collect();
        match names == numbers {
            true => list(&numbers),
            false => format!("{} ({} of {})", list(&names), list(&numbers), self.name),
        }
    }

    /// A rank that is inside a collective which this rank has not begun, with that call: it waits for this rank. `None` while this rank has a
    /// collective of its own under way.
    pub(crate) fn ahead(&self) -> Option<(usize, String)> {
        if self.turns.has_collective() {
            return None;
        }
        let step = self.step();
        let is_ahead = |rank: &usize| self.segment.seat(*rank).step.value().wrapping_sub(step as u32) as i32 > 0;
        let rank = (0..self.nranks).find(is_ahead)?;
        // A collective that another thread has begun meanwhile explains the step, too.
        (!self.turns.has_collective()).then(|| (rank, Descriptor::of(self, rank, step).to_string()))
    }

    /// Ends the communicator where a rank waits in a collective that this one will not make, as it is at `call` instead: both sides learn it.
    pub(crate) fn refuse_ahead(&self, call: &str) -> Result<()> {
        self.check_before()?;
        let Some((rank, theirs)) = self.ahead() else { return Ok(()) };
        let me = self.label(self.rank);
        let message = format!("{} is in {theirs}, which {me} does not call: {me} is in {call}", self.describe(rank));
        Err(self.fail_in(ncclInvalidUsage, None, &message, &theirs))
    }

    /// Fails when a peer's process has ended, or when one that has left its communicator is waited for: `blocked` is what
    /// an operation waits for and the value it saw there. A peer that ends right after it has done its part harms nobody.
    ///
    /// `call` is what the operation is called.
    pub(crate) fn check_peers(&self, blocked: Option<(Blocker, u32)>, call: &dyn Fn() -> String) -> Result<()> {
        self.check()?;
        // Read after the peer's state, this is up to date: a peer leaves after it has done its part.
        let still_blocked = || blocked.is_none_or(|(blocker, seen)| self.event(blocker).value() == seen);
        let left = |rank: usize| self.segment.seat(rank).left.load(Ordering::Acquire) != 0;
        let mut processes: Vec<Arc<Process>> = Vec::new();
        let mut ranks = Vec::new();
        for rank in 0..self.nranks {
            let Some(id) = self.segment.process(rank) else { continue };
            if left(rank) {
                if blocked.is_some_and(|(blocker, _)| self.needs(rank, blocker)) && still_blocked() {
                    let message = format!("{} has destroyed its communicator", self.describe(rank));
                    return Err(self.fail_in(ncclRemoteError, Some(rank), &message, &call()));
                }
            } else if id.pid != self.me.pid {
                processes.push(self.watched[rank].get_or_init(|| Process::watch(id)).clone());
                ranks.push(rank);
            }
        }
        while let Some(index) = Process::first_dead(&processes) {
            // It may have left in good order between our two looks.
            if !left(ranks[index]) {
                if !still_blocked() {
                    return Ok(());
                }
                let message = format!("{} {GONE}", self.describe(ranks[index]));
                return Err(self.fail_in(ncclRemoteError, Some(ranks[index]), &message, &call()));
            }
            processes.swap_remove(index);
            ranks.swap_remove(index);
        }
        Ok(())
    }

    /// Whether the blocker goes away only by something that `rank` has not done yet.
    fn needs(&self, rank: usize, blocker: Blocker) -> bool {
        match blocker {
            Blocker::Arrivals => self.segment.process(rank).is_none(),
            Blocker::Step(step) => (self.segment.seat(rank).step.value().wrapping_sub(step as u32) as i32) < 0,
            Blocker::From(peer) | Blocker::To { peer, .. } | Blocker::Offer(peer) => peer == rank,
            // Every rank has a call of its own there.
            Blocker::Wants(_) | Blocker::Verdict(_) => rank != self.rank,
            Blocker::Turn | Blocker::Other(_) => false,
        }
    }

    /// The ranks that keep this one waiting.
    pub(crate) fn missing(&self, blocker: Blocker) -> Vec<usize> {
        match blocker {
            Blocker::Wants(_) | Blocker::Verdict(_) => Vec::new(),
            _ => (0..self.nranks).filter(|&rank| self.needs(rank, blocker)).collect(),
        }
    }

    /// Ends the communicator because this rank has waited for too long.
    pub(crate) fn expire(&self, blocker: Blocker, timeout: Duration, call: &str) -> Error {
        let millis = timeout.as_millis();
        match blocker {
            Blocker::Wants(posted) | Blocker::Verdict(posted) => {
                return meeting::apart(self, &collective::posted(self, posted), millis);
            }
            Blocker::To { peer, .. } if self.segment.channel(self.rank, peer).expects.name().is_some() => {
                return meeting::apart(self, &message::named(self, self.rank, peer), millis);
            }
            Blocker::Other(peer) => return meeting::apart(self, &message::named(self, peer, self.rank), millis),
            Blocker::To { peer, .. } if self.has_sent(peer) => {
                let message = format!(
                    "{} and {} both send to each other and neither receives, for {millis} ms: put the send and the receive of each into one group",
                    self.label(self.rank),
                    self.label(peer)
                );
                return self.fail_in(ncclInvalidUsage, None, &message, call);
            }
            _ => {}
        }
        let late = self.missing(blocker);
        let sending = late.iter().find(|rank| matches!(blocker, Blocker::Step(_)) && self.has_sent(**rank));
        let sending =
            sending.map_or_else(String::new, |rank| format!(" ({} is in a send to this rank)", self.label(*rank)));
        let message = format!("{} did not come within {millis} ms{sending}", self.list(&late));
        self.while_waiting(self.fail_in(ncclTimeout, late.first().copied(), &message, call), blocker)
    }

    /// Whether a message of `peer` to this rank lies there that nobody takes.
    fn has_sent(&self, peer: usize) -> bool {
        let channel = self.segment.channel(peer, self.rank);
        peer != self.rank && channel.head.value() != channel.tail.value()
    }

    /// An error that ended a wait of this rank. When the time was up for another rank first, that one may have waited for somebody else, even
    /// for this rank: it learns here whom it waits for itself.
    pub(crate) fn while_waiting(&self, error: Error, blocker: Blocker) -> Error {
        self.while_missing(error, &self.missing(blocker))
    }

    /// The same, where it is known whom this rank waits for.
    pub(crate) fn while_missing(&self, error: Error, late: &[usize]) -> Error {
        let Some(&first) = late.first() else { return error };
        if error.code() != ncclTimeout || error.lost().is_some_and(|rank| late.contains(&rank)) {
            return error;
        }
        self.note(Some(first));
        let message = format!("{} has not come here either: {}", self.list(late), error.message());
        Error::new(ncclTimeout, message).by(Some(first))
    }

    /// Waits until no call of this rank is under way and refuses later ones.
    pub(crate) fn finalize(&self) {
        self.finalized.store(true, Ordering::Release);
        while self.turns.is_busy() {
            let changed = &self.turns.changed;
            event::sleep(&[Watch { event: changed, seen: changed.value() }], Duration::from_millis(1));
        }
    }

    /// Tells the peers that this rank takes part no longer.
    pub(crate) fn leave(&self) {
        self.segment.seat(self.rank).left.store(1, Ordering::SeqCst);
        let header = self.segment.header();
        // Who waits for this rank looks around when woken.
        header.alarm.wake();
        header.barrier.wake();
        header.arrived.wake();
        header.wants.wake();
        header.verdict.wake();
    }

    /// Ends all calls on all ranks. The caller has raised the flag that this communicator was made with.
    pub(crate) fn abort(&self) {
        let message = format!("{} aborted its communicator", self.describe(self.rank));
        if self.nranks > 1 {
            self.fail(ncclRemoteError, Some(self.rank), &message);
        }
        self.leave();
    }
}

/// "ranks 1, 2 and 40 more".
fn list(ranks: &[i32]) -> String {
    let shown: Vec<String> = ranks.iter().take(8).map(i32::to_string).collect();
    let more =
        if ranks.len() > shown.len() { format!(" and {} more", ranks.len() - shown.len()) } else { String::new() };
    format!("rank{} {}{more}", if ranks.len() == 1 { "" } else { "s" }, shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment;

    #[test]
    fn a_failure_stands_while_another_rank_is_still_writing_its_own() {
        let fd = segment::create([3; 16]).unwrap();
        let segment = Segment::map(&fd, 2, 0).unwrap();
        let comm = Comm::new(segment, 0, 0, "it".to_owned(), Arc::default(), ProcessId::current());
        assert!(comm.segment.header().failure.begin(), "as the other rank does");
        assert!(comm.check().is_ok());
        assert_eq!(comm.fail(ncclInvalidUsage, None, "one").message(), "one");
        assert_eq!(comm.check().unwrap_err().message(), "one");
        assert_eq!(comm.fail(ncclRemoteError, Some(1), "two").message(), "one", "the first failure stays");
    }
}
