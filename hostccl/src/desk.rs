//! The news of a process: the notices and losses that its wire reports, and the communicators that
//! they concern.
//!
//! A wire has one [`Desk`]. The desk knows the ends of communicators that are on the wire, as
//! [`Member`]s, and hands each of them the news that concerns it. A thread takes the news when it
//! waits on the wire or asks a communicator for its failure. The wire's thread takes them at each
//! tick.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt::Debug;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use crate::notice::Said;
use crate::wire::{Notice, Peer, Wire};

/// How long the desk keeps notices about a communicator that this process has not registered. A
/// peer may be ahead in the join of the communicator.
const KEPT_FOR: Duration = Duration::from_secs(60);
/// The most notices that are kept for communicators that are not registered.
const MOST_KEPT: usize = 256;
/// The most times that a thread which wants the latest news lets the wire make progress.
const PASSES: usize = 4;
/// The most ranks for which a desk remembers that they have left their communicators. The desk
/// cannot tell a communicator that it has forgotten from one that this process is about to join, so
/// it answers no question about either.
const MOST_LEFT: usize = 16 << 10;

/// One end of a communicator that has ranks on other hosts.
pub(crate) trait Member: Send + Sync {
    /// Takes a notice about the communicator.
    fn hear(&self, notice: &Notice);

    /// Learns that a process cannot be reached any more. The process may have nothing to do with
    /// this communicator.
    fn lose(&self, peer: Peer);

    /// Whether this end has left the communicator.
    fn is_gone(&self) -> bool;

    /// Looks for events that no notice reports: the end of a process of this host, and a failure
    /// that a rank of this host has written. It is called about ten times a second.
    fn tick(&self);
}

/// The news of one wire.
pub(crate) struct Desk {
    /// The wire.
    wire: Arc<dyn Wire>,
    /// Held by the thread that takes news, because only one thread at a time may do so.
    reading: Mutex<()>,
    /// The value of the wire's word when a thread last took the news.
    seen: AtomicU32,
    /// The members, and the notices that are kept.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The members by the numbers of their communicators. Several threads of this process may be
    /// ranks of one communicator.
    members: HashMap<u64, Vec<Weak<dyn Member>>>,
    /// Notices about communicators that have no member yet, with the times at which they came.
    kept: VecDeque<(Instant, Notice)>,
    /// The ranks of this process that have left their communicators, with the numbers of the
    /// communicators, in the order in which they left.
    left: VecDeque<(u64, usize)>,
    /// The entries of `left`, to find one quickly.
    left_by_key: HashSet<(u64, usize)>,
}

impl Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").finish_non_exhaustive()
    }
}

/// A list of all desks.
fn desks() -> MutexGuard<'static, Vec<Weak<Desk>>> {
    static DESKS: OnceLock<Mutex<Vec<Weak<Desk>>>> = OnceLock::new();
    DESKS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

impl Desk {
    /// Returns the desk of a wire. All communicators on the wire share it.
    pub(crate) fn of(wire: &Arc<dyn Wire>) -> Arc<Desk> {
        let mut desks = desks();
        desks.retain(|desk| desk.strong_count() > 0);
        let all: Vec<Arc<Desk>> = desks.iter().filter_map(Weak::upgrade).collect();
        let is_of = |desk: &&Arc<Desk>| std::ptr::addr_eq(Arc::as_ptr(&desk.wire), Arc::as_ptr(wire));
        let known = all.iter().find(is_of).cloned();
        let desk = known.unwrap_or_else(|| {
            let desk = Arc::new(Desk {
                wire: wire.clone(),
                reading: Mutex::new(()),
                // It differs from the word, so that the first look takes the news that has come
                // already.
                seen: AtomicU32::new(wire.moved().value().wrapping_sub(1)),
                state: Mutex::default(),
            });
            desks.push(Arc::downgrade(&desk));
            desk
        });
        // `all` may hold the last reference to another desk, and so to the wire of that desk. The
        // drop of a wire waits for the wire's thread, which locks the list of desks. So the list is
        // unlocked first.
        drop(desks);
        drop(all);
        desk
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a member, and hands it the notices that came before.
    pub(crate) fn register(&self, comm: u64, member: &Arc<dyn Member>) {
        let mut state = self.lock();
        let now = Instant::now();
        state.members.retain(|_, list| {
            list.retain(|member| member.strong_count() > 0);
            !list.is_empty()
        });
        state.members.entry(comm).or_default().push(Arc::downgrade(member));
        state.kept.retain(|(came, _)| now.duration_since(*came) < KEPT_FOR);
        // The notices stay for other threads of this process that are about to join.
        let kept: Vec<Notice> =
            state.kept.iter().filter(|(_, notice)| notice.comm == comm).map(|(_, notice)| notice.clone()).collect();
        drop(state);
        kept.iter().for_each(|notice| member.hear(notice));
    }

    /// Notes that a rank of this process has left a communicator. The desk tells this to peers that
    /// ask about the rank, even after the communicator was freed.
    pub(crate) fn note_left(&self, comm: u64, rank: usize) {
        let mut state = self.lock();
        if state.left.len() == MOST_LEFT {
            if let Some(oldest) = state.left.pop_front() {
                state.left_by_key.remove(&oldest);
            }
        }
        if state.left_by_key.insert((comm, rank)) {
            state.left.push_back((comm, rank));
        }
    }

    /// Whether this process has an end of a communicator on this wire that it has not left. When
    /// two threads leave and then ask, at least one of them gets the answer no.
    pub(crate) fn has_live_members(&self) -> bool {
        // A member that has left says so before its thread takes the lock here.
        self.members(None).iter().any(|member| !member.is_gone())
    }

    /// Whether a rank of this process has left a communicator.
    pub(crate) fn has_left(&self, comm: u64, rank: usize) -> bool {
        self.lock().left_by_key.contains(&(comm, rank))
    }

    /// Takes the news that has reached this machine, also what nobody has read from the wire yet.
    /// It reads from the wire at most [`PASSES`] times, so news behind a long message may be left
    /// for a later call. If another thread is taking news, this function returns when that thread
    /// has handed it over.
    pub(crate) fn catch_up(&self) {
        // One pass reads only a part of the bytes that have arrived, and bytes of a long message
        // may go on arriving.
        let _ = (0..PASSES).find(|_| !self.wire.progress());
        // The list is declared before the lock is taken, as `read` requires.
        let mut told = Vec::new();
        let _reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        self.read(&mut told);
    }

    /// Takes the wire's news, unless nothing has moved on the wire since a thread last took it, or
    /// another thread is taking it now.
    pub(crate) fn take(&self) {
        if self.seen.load(Ordering::Acquire) == self.wire.moved().value() {
            return;
        }
        let mut told = Vec::new();
        let _reading = match self.reading.try_lock() {
            Ok(reading) => reading,
            Err(TryLockError::Poisoned(reading)) => reading.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        self.read(&mut told);
    }

    /// Takes the wire's news and hands it over, unless nothing has moved since a thread last took
    /// the news. The caller has locked `reading`. The list `told` keeps the members alive until the
    /// lock is released, because the drop of a member may take that lock. So the caller declares
    /// the list before it takes the lock: variables are dropped in the reverse order.
    fn read(&self, told: &mut Vec<Arc<dyn Member>>) {
        let moved = self.wire.moved().value();
        if self.seen.load(Ordering::Acquire) == moved {
            return;
        }
        self.seen.store(moved, Ordering::Release);
        let (notices, lost) = self.wire.news();
        for notice in notices {
            let members = self.members(Some(notice.comm));
            members.iter().for_each(|member| member.hear(&notice));
            if members.is_empty() {
                self.keep(notice);
            }
            told.extend(members);
        }
        if !lost.is_empty() {
            let members = self.members(None);
            lost.iter().for_each(|(peer, _)| members.iter().for_each(|member| member.lose(*peer)));
            told.extend(members);
        }
    }

    /// Returns the members of one communicator, or of all.
    fn members(&self, comm: Option<u64>) -> Vec<Arc<dyn Member>> {
        let state = self.lock();
        let of_comm = |number: u64| comm.is_none_or(|comm| comm == number);
        let lists = state.members.iter().filter(|(number, _)| of_comm(**number));
        lists.flat_map(|(_, list)| list.iter().filter_map(Weak::upgrade)).collect()
    }

    /// Answers or keeps a notice about a communicator that has no member here.
    fn keep(&self, notice: Notice) {
        match Said::decode(&notice.text, usize::MAX) {
            Some(Said::Ask { to }) if self.has_left(notice.comm, to) => {
                self.wire.notify(notice.from, notice.comm, &Said::Left(to).encode());
            }
            Some(Said::Failed { .. } | Said::Left(_)) => {
                let mut state = self.lock();
                // A member may have registered since the desk looked for members.
                let members = state.members.get(&notice.comm).into_iter().flatten();
                let members: Vec<Arc<dyn Member>> = members.filter_map(Weak::upgrade).collect();
                if members.is_empty() {
                    if state.kept.len() == MOST_KEPT {
                        state.kept.pop_front();
                    }
                    state.kept.push_back((Instant::now(), notice));
                    return;
                }
                drop(state);
                members.iter().for_each(|member| member.hear(&notice));
            }
            _ => {}
        }
    }
}

/// Takes the news of all wires, and lets each member look at its host. The wire's thread calls this
/// about ten times a second.
pub(crate) fn tick() {
    let desks: Vec<Arc<Desk>> = desks().iter().filter_map(Weak::upgrade).collect();
    for desk in desks {
        desk.take();
        desk.members(None).iter().for_each(|member| member.tick());
    }
}
