//! The ranks on other hosts: which of them have left, ended or fallen silent, and what they say.
//!
//! A connection that breaks does not say whether one process has ended or the whole host is gone.
//! So a rank that loses a connection waits a moment before it blames anybody. Other ranks on the
//! lost rank's host learn from process descriptors which process has ended, and tell the other
//! hosts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::blame::Blame;
use crate::comm::Comm;
use crate::desk::{self, Member};
use crate::error::{Error, Result};
use crate::event::Watch;
use crate::notice::Said;
use crate::poll::Blocker;
use crate::remote::{Remote, State, Suspicion, Waits};
use crate::span::Span;
use crate::types::*;
use crate::wire::here;
use crate::wire::{Lost, Notice, Peer};

/// How long a rank that has lost a process waits for news, where no other process of the lost
/// process's host can tell why.
const ALONE: Duration = Duration::from_millis(50);
/// How long a rank waits when other ranks of the lost process's host can tell why.
const OTHERS_TELL: Duration = Duration::from_millis(250);
/// How long a rank waits when the lost process's connection fell silent. The rank asks the other
/// processes of that host meanwhile whether they are there. Without an answer the whole host counts
/// as lost. The kernel sends a lost packet again after 200 ms at the earliest, and both the
/// question and the answer may need that.
const OTHERS_ANSWER: Duration = Duration::from_millis(450);
/// After its first loss, a rank waits at most this long for reports from other hosts that have also
/// lost processes, so that one error blames all lost ranks.
const ALL_HOSTS_TELL: Duration = Duration::from_millis(700);
/// The pause between two looks at the news while a rank waits for such reports.
const LOOK: Duration = Duration::from_millis(5);
/// How often a rank asks the rank for which it waits whether that rank is still there.
const ASK_AGAIN: Duration = Duration::from_secs(1);

impl Comm {
    /// The span, and what this rank knows of the ranks on other hosts.
    fn elsewhere(&self) -> Option<(&Span, &Remote)> {
        self.span.as_ref().zip(self.remote.as_ref())
    }

    /// Connects to the process of the next host that this rank watches, if it watches one.
    pub(crate) fn watch_next_host(&self) {
        let Some((span, _)) = self.elsewhere() else { return };
        if let Some(peer) = span.watched() {
            span.wire.notify(peer, span.comm, &Said::Hello.encode());
        }
    }

    /// Fails when an operation waits for a rank of another host that has left. `call` describes the
    /// operation. Fails, too, when a process of another host is lost, and that host has had the
    /// time to tell why.
    pub(crate) fn check_remote(
        &self,
        blocked: Option<(Blocker, u32)>,
        still_blocked: &dyn Fn() -> bool,
        call: &dyn Fn() -> String,
    ) -> Result<()> {
        let Some((span, remote)) = self.elsewhere() else { return Ok(()) };
        self.judge(call)?;
        let (Blocker::Wire { from, .. } | Blocker::RemoteMessage { peer: from, .. }) = (match blocked {
            Some((blocker, _)) => blocker,
            None => return Ok(()),
        }) else {
            return Ok(());
        };
        if remote.has_left(from) && still_blocked() {
            return Err(self.fail_left(from, &call()));
        }
        // A rank that left before there was a connection could not tell this rank.
        if let Some(peer) = span.peers[from] {
            if self.may_ask(from, ASK_AGAIN) {
                self.ask(from, peer);
            }
        }
        Ok(())
    }

    /// Fails when this rank has aborted the communicator, or when `rank` of the whole communicator
    /// has left it or is lost. Another failure of the communicator does not count.
    pub(crate) fn check_rank(&self, rank: usize) -> Result<()> {
        let Some((span, remote)) = self.elsewhere() else { return self.check_peer(rank) };
        let Some(peer) = span.peers[rank] else {
            return span.seat_of(rank).map_or(Ok(()), |seat| self.check_peer(seat));
        };
        self.check_aborted()?;
        remote.desk.take();
        if remote.has_left(rank) {
            let message = format!("{} has destroyed its communicator", self.describe_rank(rank));
            return Err(Error::new(ncclRemoteError, message).by(Blame::of([rank])));
        }
        match span.wire.lost(peer) {
            None => Ok(()),
            Some(lost) => {
                let message = format!("{} cannot be reached: {}", self.describe_rank(rank), lost.why);
                Err(Error::new(ncclRemoteError, message).by(Blame::of_lost([rank])))
            }
        }
    }

    /// Returns "rank 3 on beta" for a rank of another host, and what
    /// [`describe`](Comm::describe) returns for one of this host.
    pub(crate) fn describe_rank(&self, rank: usize) -> String {
        match self.span.as_ref().map_or(Some(rank), |span| span.seat_of(rank)) {
            Some(seat) => self.describe(seat),
            None => self.labels.rank(rank, None),
        }
    }

    fn fail_left(&self, rank: usize, call: &str) -> Error {
        let message = format!("{} has destroyed its communicator", self.describe_rank(rank));
        self.fail_whole(ncclRemoteError, Blame::of([rank]), &message, call)
    }

    /// Whether the last question to the rank is at least that long ago, so that this rank may ask
    /// again.
    pub(crate) fn may_ask(&self, rank: usize, within: Duration) -> bool {
        let Some((_, remote)) = self.elsewhere() else { return false };
        remote.lock().asked.get(&rank).is_none_or(|asked| asked.elapsed() >= within)
    }

    /// Asks the process of a rank what the rank waits for.
    pub(crate) fn ask(&self, rank: usize, peer: Peer) {
        let Some((span, remote)) = self.elsewhere() else { return };
        remote.lock().asked.insert(rank, Instant::now());
        span.wire.notify(peer, span.comm, &Said::Ask { to: rank }.encode());
    }

    /// Ends the communicator because a rank of another host cannot be reached any more, after a
    /// moment in which it waits for news from the lost rank's host. `rank` is a rank of the whole
    /// communicator, and `call` describes the operation that met the loss.
    pub(crate) fn fail_lost(&self, rank: usize, lost: &Lost, call: &str) -> Error {
        let describe = || call.to_owned();
        if let Some((span, remote)) = self.elsewhere() {
            remote.desk.take();
            if remote.has_left(rank) {
                return self.fail_left(rank, call);
            }
            if let Some(peer) = span.peers[rank] {
                self.lose(peer);
            }
            let end = Instant::now() + 2 * OTHERS_ANSWER;
            while Instant::now() < end {
                if let Err(error) = self.check().and_then(|()| self.judge(&describe)) {
                    return error;
                }
                if remote.has_left(rank) {
                    return self.fail_left(rank, call);
                }
                let moved = span.wire.moved();
                let seen = moved.value();
                span.wire.progress();
                span.wire.sleep(&[Watch { event: moved, seen }], LOOK);
            }
        }
        let message = format!("{} cannot be reached: {}", self.labels.rank(rank, None), lost.why);
        self.fail_whole(ncclRemoteError, Blame::of_lost([rank]), &message, call)
    }

    /// Fails when processes of other hosts are lost, and each of these hosts has had the time to
    /// tell why.
    fn judge(&self, call: &dyn Fn() -> String) -> Result<()> {
        let Some((span, remote)) = self.elsewhere() else { return Ok(()) };
        let mut state = remote.lock();
        let State { suspicions, heard, .. } = &mut *state;
        let mut found = Vec::new();
        suspicions.retain(|host, suspicion| {
            let losses = self.losses(*host, suspicion, heard.get(host).copied());
            let is_kept = losses.is_some();
            found.extend(losses);
            is_kept
        });
        let Some(first) = suspicions.values().map(|suspicion| suspicion.since).min() else { return Ok(()) };
        drop(state);
        let now = Instant::now();
        let is_due = |losses: &Losses| now >= losses.due;
        if now < first + ALL_HOSTS_TELL && !found.iter().all(is_due) {
            return Ok(());
        }
        found.retain(is_due);
        if found.is_empty() {
            return Ok(());
        }
        let message = found.iter().map(|losses| &losses.message[..]).collect::<Vec<_>>().join("; ");
        let blame = Blame::of_lost(found.into_iter().flat_map(|losses| losses.ranks));
        debug_assert!(blame.ranks.iter().all(|rank| span.peers[*rank].is_some()));
        Err(self.fail_whole(ncclRemoteError, blame, &message, &call()))
    }

    /// Returns the ranks of a suspected host that are lost, or `None` where none is. `heard` is
    /// when a process of that host was heard last.
    fn losses(&self, host: usize, suspicion: &Suspicion, heard: Option<Instant>) -> Option<Losses> {
        let (span, remote) = self.elsewhere()?;
        let (mut ended, mut silent, mut whole) = (Vec::new(), Vec::new(), Vec::new());
        let mut why = [None, None];
        for &rank in span.hosts[host].iter().filter(|rank| !remote.has_left(**rank)) {
            let lost = span.peers[rank].and_then(|peer| span.wire.lost(peer));
            whole.push(rank);
            if let Some(lost) = lost {
                if lost.ended {
                    ended.push(rank)
                } else {
                    silent.push(rank)
                }
                why[usize::from(!lost.ended)].get_or_insert(lost.why);
            }
        }
        let lost = ended.len() + silent.len();
        let others_tell = lost > 0 && lost < whole.len();
        // A host from which another process was heard has not fallen silent as a whole.
        let has_answered = heard.is_some_and(|heard| suspicion.silent_since.is_some_and(|since| heard > since));
        let due = match suspicion.silent_since {
            // Another thread is about to note the silence.
            None if !silent.is_empty() => Instant::now() + OTHERS_ANSWER,
            Some(since) if others_tell && !silent.is_empty() && !has_answered => since + OTHERS_ANSWER,
            _ if others_tell => suspicion.since + OTHERS_TELL,
            _ => suspicion.since + ALONE,
        };
        let [why_ended, why_silent] = why;
        if let Some(why) = why_silent {
            let ranks = if has_answered { silent } else { whole };
            let message = format!("{}: {why}", self.labels.ranks(&ranks));
            return Some(Losses { ranks, due, message });
        }
        let have = if ended.len() == 1 { "has" } else { "have" };
        let message = format!("{} {have} gone: {}", self.labels.ranks(&ended), why_ended?);
        Some(Losses { ranks: ended, due, message })
    }
}

/// Ranks of another host that are lost.
struct Losses {
    /// The ranks, of the whole communicator.
    ranks: Vec<usize>,
    /// When their host has had the time to tell why.
    due: Instant,
    /// The losses in words.
    message: String,
}

impl Member for Comm {
    fn hear(&self, notice: &Notice) {
        let Some((span, remote)) = self.elsewhere() else { return };
        let is_at = |rank: usize| span.peers[rank] == Some(notice.from);
        let Some(first) = (0..span.nranks).find(|rank| is_at(*rank)) else { return };
        let Some(said) = Said::decode(&notice.text, span.nranks) else { return };
        remote.lock().heard.insert(span.host_of[first], Instant::now());
        match said {
            Said::Failed { code, blame, message, call } => {
                self.fail_as_told(code, blame, &message, &call, Some(notice.from));
            }
            Said::Left(rank) if is_at(rank) => {
                remote.note_left(rank);
            }
            Said::Waits { rank, millis } if is_at(rank) => {
                let said = Instant::now();
                let until = said + Duration::from_millis(u64::from(millis));
                remote.lock().waits.insert(rank, Waits { said, until });
            }
            Said::Ask { to } if to == span.rank => {
                let answer = if self.has_left(self.rank) {
                    Said::Left(to)
                } else if self.seat_waits(self.rank) {
                    Said::Waits { rank: to, millis: self.millis_left() }
                } else {
                    return;
                };
                span.wire.notify(notice.from, span.comm, &answer.encode());
            }
            Said::Ping => span.wire.notify(notice.from, span.comm, &Said::Pong.encode()),
            Said::Left(_) | Said::Waits { .. } | Said::Ask { .. } | Said::Hello | Said::Pong => {}
        }
    }

    fn lose(&self, peer: Peer) {
        let Some((span, remote)) = self.elsewhere() else { return };
        let at_peer = (0..span.nranks).filter(|rank| span.peers[*rank] == Some(peer));
        let Some(rank) = at_peer.filter(|rank| !remote.has_left(*rank)).last() else { return };
        let (host, now) = (span.host_of[rank], Instant::now());
        let is_silent = span.wire.lost(peer).is_some_and(|lost| !lost.ended);
        let mut state = remote.lock();
        let suspicion = state.suspicions.entry(host).or_insert(Suspicion { since: now, silent_since: None });
        let is_first_silent = is_silent && suspicion.silent_since.is_none();
        if is_first_silent {
            suspicion.silent_since = Some(now);
        }
        drop(state);
        // Any answer shows that the host has not fallen silent.
        if is_first_silent {
            for other in span.processes_on(host).into_iter().filter(|other| *other != peer) {
                span.wire.notify(other, span.comm, &Said::Ping.encode());
            }
        }
    }

    fn is_gone(&self) -> bool {
        self.has_left(self.rank)
    }

    fn tick(&self) {
        let Some((_, remote)) = self.elsewhere() else { return };
        if let Some(error) = self.written_failure() {
            self.tell_other_hosts(&error, false, None);
            return;
        }
        if self.has_left(self.rank) || self.judge(&String::new).is_err() {
            return;
        }
        // Processes that were ended together end one right after the other, so this rank tells when
        // no further one has ended between two ticks.
        let dead = self.dead_seats();
        let before = std::mem::replace(&mut remote.lock().dead_at_tick, dead.len());
        if !dead.is_empty() && before == dead.len() {
            self.fail_dead(&dead, "");
        }
    }
}

/// Registers a communicator for the news of its wire, if it has ranks on other hosts.
pub(crate) fn register(comm: &Arc<Comm>) {
    let Some((span, remote)) = comm.elsewhere() else { return };
    here::on_tick(desk::tick);
    let member: Arc<dyn Member> = comm.clone();
    remote.desk.register(span.comm, &member);
    // The wire reports each loss once, so this communicator learns of earlier losses here.
    let mut peers = span.processes();
    peers.retain(|peer| span.wire.lost(*peer).is_some());
    peers.into_iter().for_each(|peer| comm.lose(peer));
    comm.watch_next_host();
}

#[cfg(test)]
mod tests;
