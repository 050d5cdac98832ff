//! A rank's knowledge of the ranks of its communicator that are on other hosts, and its messages to
//! and from these ranks.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::call_name::Name;
use crate::desk::Desk;
use crate::error::Error;
use crate::notice::Said;
use crate::span::Span;
use crate::wire::Peer;

/// The longest time for which a rank that frees its communicator waits until its messages are safe.
const LINGER: Duration = Duration::from_secs(2);
/// The longest time for which a rank that frees a failed communicator waits until its messages are
/// safe.
const FAILED_LINGER: Duration = Duration::from_millis(50);
/// How many times a rank that frees its communicator looks whether its messages are safe before
/// the rank begins to sleep between two looks. An acknowledgement takes tens of microseconds.
const SHORT_LOOKS: u32 = 50;
/// The longest sleep between two such looks.
const FLUSH_SLICE: Duration = Duration::from_millis(1);

/// A message under way between this rank and one of another host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RemoteCall {
    /// Whether this rank sends.
    pub(crate) sends: bool,
    /// The other rank, in the whole communicator.
    pub(crate) peer: usize,
    /// The name under which the message is sent or received.
    pub(crate) name: Name,
}

impl RemoteCall {
    /// Whether the message has that direction, peer and tag.
    pub(crate) fn is(&self, sends: bool, peer: usize, tag: u64) -> bool {
        (self.sends, self.peer, self.name.tag) == (sends, peer, tag)
    }

    fn is_like(&self, other: &RemoteCall) -> bool {
        self.is(other.sends, other.peer, other.name.tag)
    }
}

/// This rank's knowledge of the ranks on other hosts.
#[derive(Debug)]
pub(crate) struct Remote {
    /// The news of the process's wire.
    pub(crate) desk: Arc<Desk>,
    /// Whether this rank has told the other hosts that the communicator has failed.
    told: AtomicBool,
    /// For each rank of the whole communicator, whether it has freed its communicator. Only the
    /// entries of ranks on other hosts are ever set.
    left: Box<[AtomicBool]>,
    /// The part that changes.
    state: Mutex<State>,
}

/// A host that has lost processes.
#[derive(Debug)]
pub(crate) struct Suspicion {
    /// When the first of the losses was noticed.
    pub(crate) since: Instant,
    /// When the first process was lost without a sign from its host that the process has ended. At
    /// that time the other processes of the host were asked whether they are alive.
    pub(crate) silent_since: Option<Instant>,
}

/// The last report of a rank that waits for another rank.
#[derive(Debug)]
pub(crate) struct Waits {
    /// When the rank reported that it waits.
    pub(crate) said: Instant,
    /// The later of two ends: the end of the rank's own time, and the end of the time of the ranks
    /// for which it waits.
    pub(crate) until: Instant,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    /// The hosts with lost processes for which this rank has not failed the communicator yet.
    pub(crate) suspicions: BTreeMap<usize, Suspicion>,
    /// For each host, when a process of the host was last heard. The key is the host. The map is
    /// empty while no process of another host has been suspected.
    pub(crate) heard: HashMap<usize, Instant>,
    /// The last report of each rank that has reported that it waits for another rank.
    pub(crate) waits: HashMap<usize, Waits>,
    /// When each rank was asked last what it waits for.
    pub(crate) asked: HashMap<usize, Instant>,
    /// The later of two times, as this rank noted it last: the end of its own timeout, and the end
    /// of the timeouts of the ranks for which it waits. `None` while it does not wait.
    pub(crate) waits_until: Option<Instant>,
    /// For each seat of this host, the value of the word that says whether the rank of the seat
    /// waits, and when this rank first saw that value.
    pub(crate) seat_waits: HashMap<usize, (u32, Instant)>,
    /// How many processes of this host had ended at the last tick.
    pub(crate) dead_at_tick: usize,
    /// The messages of this rank that are under way to and from other hosts.
    pub(crate) calls: Vec<RemoteCall>,
}

impl Remote {
    /// Returns what a rank knows at the start of a communicator.
    pub(crate) fn new(span: &Span) -> Remote {
        Remote {
            desk: Desk::of(&span.wire),
            told: AtomicBool::new(false),
            left: (0..span.nranks).map(|_| AtomicBool::new(false)).collect(),
            state: Mutex::default(),
        }
    }

    /// Locks the part that changes.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether that rank of another host has freed its communicator.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.left.get(rank).is_some_and(|left| left.load(Ordering::Acquire))
    }

    /// Notes that a rank of another host has freed its communicator.
    pub(crate) fn note_left(&self, rank: usize) {
        if let Some(left) = self.left.get(rank) {
            left.store(true, Ordering::Release);
        }
    }

    /// Tells the processes on other hosts that the communicator has failed, unless this rank has
    /// told them. `call` is the call that met the failure. With `all`, the rank has found the
    /// failure itself and tells all processes. Without `all`, the rank passes the failure on to
    /// the processes to which connections exist, and to one process of each host to which no
    /// connection exists. `told_by` is the process that has told this rank of the failure.
    pub(crate) fn tell_failure(&self, span: &Span, error: &Error, call: &str, all: bool, told_by: Option<Peer>) {
        if self.told.swap(true, Ordering::AcqRel) {
            return;
        }
        let said = Said::Failed {
            code: error.code(),
            blame: error.blame().clone(),
            message: error.message().to_owned(),
            call: call.to_owned(),
        };
        let text = said.encode();
        for host in (0..span.hosts.len()).filter(|host| *host != span.host()) {
            let peers = span.processes_on(host);
            let connected = peers.iter().filter(|peer| all || span.wire.connected(**peer));
            let mut told: Vec<Peer> = connected.copied().collect();
            if told.is_empty() {
                told.extend(peers.get(span.rank % peers.len().max(1)));
            }
            for peer in told.into_iter().filter(|peer| Some(*peer) != told_by) {
                span.wire.notify(peer, span.comm, &text);
            }
        }
        span.wire.progress();
    }

    /// Tells the processes to which there are connections that this rank has freed its
    /// communicator. A process without a connection asks this rank when that process waits for
    /// this rank. The process that watches this one is told in any case, because the watcher makes
    /// a connection of its own accord. Then this function waits until everything that this rank
    /// has sent is safe, because this process may end now. `has_failed` says whether the
    /// communicator has failed. The caller has noted in this rank's seat that it has left.
    pub(crate) fn tell_left(&self, span: &Span, has_failed: bool) {
        self.desk.note_left(span.comm, span.rank);
        let text = Said::Left(span.rank).encode();
        let (processes, watcher) = (span.processes(), span.watcher());
        for peer in processes.iter().filter(|peer| Some(**peer) == watcher || span.wire.connected(**peer)) {
            span.wire.notify(*peer, span.comm, &text);
        }
        // While this process has other communicators, it keeps running, and its kernel sends lost
        // data again. The rank that leaves the last communicator waits until the data of all
        // communicators have arrived. A rank whose communicator has failed waits only a short
        // time, because the ranks for which it waits may have caused the failure.
        let is_last = !self.desk.has_live_members();
        let is_safe = || match is_last {
            true => span.wire.has_all_arrived(),
            false => processes.iter().all(|peer| span.wire.is_flushed(*peer)),
        };
        let has_failed = has_failed || self.told.load(Ordering::Acquire);
        let end = Instant::now() + if has_failed { FAILED_LINGER } else { LINGER };
        for look in 0_u32.. {
            let seen = span.wire.moved().value();
            span.wire.progress();
            if is_safe() || Instant::now() >= end {
                return;
            }
            match look < SHORT_LOOKS {
                true => std::thread::yield_now(),
                false => span.wire.sleep_on_wire(seen, &[], FLUSH_SLICE),
            }
        }
    }

    /// Begins a message. Returns false where another message between the same ranks, in the same
    /// direction and under the same name is under way.
    pub(crate) fn begin(&self, call: RemoteCall) -> bool {
        let mut state = self.lock();
        let is_free = !state.calls.iter().any(|other| other.is_like(&call));
        if is_free {
            state.calls.push(call);
        }
        is_free
    }

    /// Ends a message.
    pub(crate) fn end(&self, call: RemoteCall) {
        self.lock().calls.retain(|other| !other.is_like(&call));
    }

    /// Whether a message to or from another host is under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.calls_under_way() > 0
    }

    /// How many messages to and from other hosts are under way.
    pub(crate) fn calls_under_way(&self) -> usize {
        self.lock().calls.len()
    }
}
