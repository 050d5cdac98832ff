//! The peers of a rank: for which of them the rank waits, and which of them have left or died.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::blame::Blame;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::poll::{Blocker, Poll};
use crate::process::Process;
use crate::types::*;

/// When no further peer has ended for this long, no more ends are expected.
const QUIET: Duration = Duration::from_millis(50);

/// The longest time for which a call that has found a peer's end waits for the ends of others.
const LONGEST_SETTLING: Duration = Duration::from_millis(250);

/// The pause between two looks at the peers while a call waits for further ends.
const LOOK: Duration = Duration::from_millis(5);

/// The most ranks that a message describes one by one.
const MOST_DESCRIBED: usize = 8;

impl Comm {
    /// Fails when a peer's process has ended, or when this rank waits for a peer that has left the
    /// communicator. `blocked` is what the operation waits for and the value that it saw in the
    /// blocker's word; a peer that ends right after it has done its part harms nobody. `call`
    /// describes the operation.
    pub(crate) fn check_peers(&self, blocked: Option<(Blocker, u32)>, call: &dyn Fn() -> String) -> Result<()> {
        let check = || match blocked {
            None => self.check(),
            Some((blocker, seen)) => self.check_waiting(Poll::Blocked { seen, blocker }).map(drop),
        };
        check()?;
        // A peer does its part before it leaves. So this value is up to date when it is read after
        // the peer's state.
        let still_blocked = || blocked.is_none_or(|(blocker, seen)| self.event(blocker).value() == seen);
        self.check_remote(blocked, &still_blocked, call)?;
        let mut processes: Vec<Arc<Process>> = Vec::new();
        let mut ranks = Vec::new();
        for rank in 0..self.nranks {
            let Some(id) = self.segment.process(rank) else { continue };
            if self.has_left(rank) {
                if blocked.is_some_and(|(blocker, _)| self.waits_for(rank, blocker)) && still_blocked() {
                    let message = format!("{} has destroyed its communicator", self.describe(rank));
                    return Err(self.fail_in(ncclRemoteError, Blame::of([rank]), &message, &call()));
                }
            } else if id.pid != self.own_process.pid {
                processes.push(self.peer_processes[rank].get_or_init(|| Process::watch(id)).clone());
                ranks.push(rank);
            }
        }
        let mut dead = self.take_dead(&mut processes, &mut ranks, Process::first_dead_in_turn);
        if dead.is_empty() || !still_blocked() {
            return Ok(());
        }
        // Processes that were ended together end one right after the other. All of them are
        // reported, so this rank waits until no further one has ended for a moment.
        let (mut last, end) = (Instant::now(), Instant::now() + LONGEST_SETTLING);
        while !processes.is_empty() && last.elapsed() < QUIET && Instant::now() < end {
            check()?;
            std::thread::sleep(LOOK);
            let more = self.take_dead(&mut processes, &mut ranks, Process::first_dead);
            if !more.is_empty() {
                last = Instant::now();
                dead.extend(more);
            }
        }
        // The other ranks may have done their parts meanwhile. Then this call is polled again, and
        // the next call that waits finds the processes dead. The word of a wire changes with
        // everything that comes, so its change does not show that this call can continue.
        let is_wire = matches!(blocked, Some((Blocker::Wire { .. } | Blocker::RemoteMessage { .. }, _)));
        if !is_wire && !still_blocked() {
            return Ok(());
        }
        dead.sort_unstable();
        Err(self.fail_dead(&dead, &call()))
    }

    /// Returns the seats of the ranks whose processes have ended, and that had not left.
    pub(crate) fn dead_seats(&self) -> Vec<usize> {
        let (mut processes, mut ranks) = (Vec::new(), Vec::new());
        for rank in (0..self.nranks).filter(|rank| !self.has_left(*rank)) {
            if let Some(id) = self.segment.process(rank).filter(|id| id.pid != self.own_process.pid) {
                processes.push(self.peer_processes[rank].get_or_init(|| Process::watch(id)).clone());
                ranks.push(rank);
            }
        }
        let mut dead = self.take_dead(&mut processes, &mut ranks, Process::first_dead);
        dead.sort_unstable();
        dead
    }

    /// Ends the communicator because the processes of the ranks with these seats have ended.
    pub(crate) fn fail_dead(&self, dead: &[usize], call: &str) -> Error {
        self.fail_in(ncclRemoteError, Blame::of_lost(dead.iter().copied()), &self.have_gone(dead), call)
    }

    /// Takes the processes that have ended, which `first_dead` finds, out of a list. Returns the
    /// ranks of those that have not left the communicator in good order.
    fn take_dead(
        &self,
        processes: &mut Vec<Arc<Process>>,
        ranks: &mut Vec<usize>,
        first_dead: fn(&[Arc<Process>]) -> Option<usize>,
    ) -> Vec<usize> {
        let mut dead = Vec::new();
        while let Some(index) = first_dead(processes) {
            processes.swap_remove(index);
            let rank = ranks.swap_remove(index);
            // The peer may have left after its process was put on the list.
            if !self.has_left(rank) {
                dead.push(rank);
            }
        }
        dead
    }

    /// Returns "rank 3 (pid 4711) has gone (its process exited or was killed)". Only the parent of
    /// a process learns whether it exited or was killed.
    fn have_gone(&self, ranks: &[usize]) -> String {
        match ranks {
            [rank] => format!("{} has gone (its process exited or was killed)", self.describe(*rank)),
            _ => {
                let each: Vec<String> = ranks.iter().take(MOST_DESCRIBED).map(|rank| self.describe(*rank)).collect();
                let more = ranks.len() - each.len();
                let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                format!("{}{more} have gone (their processes exited or were killed)", each.join(", "))
            }
        }
    }

    /// Fails when this rank has aborted the communicator, or when the rank with the seat `peer` has
    /// left the communicator or died. Another failure of the communicator does not count.
    pub(crate) fn check_peer(&self, peer: usize) -> Result<()> {
        self.check_aborted()?;
        if self.has_left(peer) {
            let message = format!("{} has destroyed its communicator", self.describe(peer));
            return Err(Error::new(ncclRemoteError, message).by(self.whole_blame(Blame::of([peer]))));
        }
        let Some(id) = self.segment.process(peer).filter(|id| id.pid != self.own_process.pid) else { return Ok(()) };
        let process = self.peer_processes[peer].get_or_init(|| Process::watch(id));
        match Process::first_dead(std::slice::from_ref(process)) {
            Some(_) => {
                let blame = self.whole_blame(Blame::of_lost([peer]));
                Err(Error::new(ncclRemoteError, self.have_gone(&[peer])).by(blame))
            }
            None => Ok(()),
        }
    }

    /// Whether the rank with that seat has freed its communicator.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.departure(rank) != 0
    }

    /// Returns 0 if the rank with that seat has not freed its communicator. Otherwise returns 1 for
    /// the first rank that did so, 2 for the second one, and so on.
    fn departure(&self, seat: usize) -> u32 {
        self.segment.seat(seat).left.load(Ordering::Acquire)
    }

    /// Returns which of these ranks of the whole communicator has left it or is lost, and its
    /// error. Of several such ranks it is the first one, because the others may have given up
    /// because of the first one. A rank that has died counts as the first one, and so does a rank
    /// of another host, whose place in the order is not known.
    pub(crate) fn first_lost(&self, ranks: &[usize]) -> Option<(usize, Error)> {
        let seat = |rank| self.span.as_ref().map_or(Some(rank), |span| span.seat_of(rank));
        let place = |rank| seat(rank).map_or(0, |seat| self.departure(seat));
        let lost = || ranks.iter().filter_map(|rank| Some((*rank, self.check_rank(*rank).err()?)));
        lost().next()?;
        // A rank that looked sound just now may have ended before the one that was found.
        lost().min_by_key(|(rank, _)| place(*rank))
    }

    /// Whether the blocker goes away only by something that the rank with this seat has not done
    /// yet.
    fn waits_for(&self, rank: usize, blocker: Blocker) -> bool {
        match blocker {
            Blocker::Arrivals => self.segment.process(rank).is_none(),
            Blocker::OtherSeats(_) if rank == self.rank => false,
            // With two ranks, the other rank ends its step by writing the word that this rank
            // watches.
            Blocker::Step(step) if self.other_of_two() == Some(rank) => self.event(blocker).value() != step as u32,
            Blocker::Step(step) | Blocker::OtherSeats(step) => {
                (self.segment.seat(rank).step.value().wrapping_sub(step as u32) as i32) < 0
            }
            // A sender that has left does not take its message back.
            Blocker::From(peer) | Blocker::To { peer, .. } | Blocker::NewSegment(peer) | Blocker::OtherCall(peer) => {
                peer == rank
            }
            // The ranks cannot agree on a name without a call of every rank.
            Blocker::CommonName(_) | Blocker::Decision(_) | Blocker::HostNames { .. } => rank != self.rank,
            // These calls wait for another thread of this rank, or for a rank of another host.
            Blocker::Turn | Blocker::Wire { .. } | Blocker::RemoteMessage { .. } => false,
        }
    }

    /// Returns the ranks of the whole communicator that keep this one waiting.
    pub(crate) fn missing(&self, blocker: Blocker) -> Vec<usize> {
        match blocker {
            Blocker::Wire { from, .. } | Blocker::RemoteMessage { peer: from, .. } => vec![from],
            _ => self.missing_seats(blocker).into_iter().map(|seat| self.labels.of_seat(seat)).collect(),
        }
    }

    /// Returns the seats of the ranks of this host that keep this one waiting.
    pub(crate) fn missing_seats(&self, blocker: Blocker) -> Vec<usize> {
        match blocker {
            Blocker::CommonName(_) | Blocker::Decision(_) | Blocker::HostNames { .. } => Vec::new(),
            _ => (0..self.nranks).filter(|&rank| self.waits_for(rank, blocker)).collect(),
        }
    }

    /// Says that the ranks `missing` of the whole communicator did not come within so many
    /// milliseconds. A rank may have come, and then have been stopped before it did its part. The
    /// list is empty then, and nobody knows which rank it is.
    pub(crate) fn did_not_come(&self, missing: &[usize], millis: u128) -> String {
        match missing {
            [] => format!("all ranks came, but one of them did not do its part within {millis} ms: it may be stopped"),
            _ => format!("{} did not come within {millis} ms", self.labels.ranks(missing)),
        }
    }

    /// Adds the ranks for which this rank waits to the timeout error of another rank, which ended
    /// this rank's wait. The other rank may have waited for a third rank, or even for this rank.
    pub(crate) fn add_missing(&self, error: Error, blocker: Blocker) -> Error {
        self.add_missing_ranks(error, &self.missing(blocker))
    }

    /// Does what [`add_missing`](Comm::add_missing) does, where the missing ranks are known.
    pub(crate) fn add_missing_ranks(&self, error: Error, missing: &[usize]) -> Error {
        let Some(&first) = missing.first() else { return error };
        // Over several hosts, the rank that failed has asked the rank that it blames. So its error
        // names the right rank, unless the error blames this rank.
        if self.span.is_some() && !error.blame().ranks.contains(&self.whole().0) {
            return error;
        }
        if error.code() != ncclTimeout || error.blame().ranks.iter().any(|rank| missing.contains(rank)) {
            return error;
        }
        self.note_lost(first);
        let message = format!("{} did not come here either: {}", self.labels.ranks(missing), error.message());
        Error::new(ncclTimeout, message).by(Blame::of(missing.iter().copied()))
    }
}
