//! The places of a communicator at which calls of this rank take turns, and the calls that are
//! there.
//!
//! A communicator has one place for its collectives. For each peer it has one place for sends to
//! the peer and one for receives from the peer. One call at a time is inside a place. The module
//! `turn` has the rules by which calls enter and leave.
//!
//! When the word of a place holds a tag, a single call is inside and no other call waits there.
//! Such a call takes and leaves the place with one atomic operation each. When a second call
//! begins, the word becomes [`NO_TAG`], and the entries under the lock list the calls.

use std::sync::PoisonError;
use std::time::Instant;

use crate::call_name::NO_TAG;
use crate::event::Event;
use crate::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering};

/// A place at which calls take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    /// The place of the collectives of all ranks.
    Collectives,
    /// The place of the sends to that rank.
    To(usize),
    /// The place of the receives from that rank.
    From(usize),
}

impl Place {
    /// The index of the place's word in [`Places::words`].
    pub(crate) fn index(self, nranks: usize) -> usize {
        match self {
            Place::Collectives => 0,
            Place::To(peer) => 1 + peer,
            Place::From(peer) => 1 + nranks + peer,
        }
    }
}

/// A call that is inside a place or waits there.
#[derive(Debug)]
pub(crate) struct Entry {
    /// The index of the place.
    pub(crate) place: usize,
    /// The number of the call, unique among the calls of this rank, or [`ALONE`].
    pub(crate) id: u64,
    /// The tag of the call's name.
    pub(crate) tag: u64,
    /// Whether the call is inside. At most one call of each place is.
    pub(crate) inside: bool,
    /// The cell of this rank's seat that shows the tag to rank 0. `None` while no cell is free.
    pub(crate) cell: Option<usize>,
}

/// The number of the entry of a call that was alone before the second call began. That call does
/// not know that it has an entry; it looks for this number when it leaves.
pub(crate) const ALONE: u64 = 0;

/// The calls at the places that have several of them.
#[derive(Debug, Default)]
pub(crate) struct Entries {
    /// The calls in the order in which they began.
    pub(crate) list: Vec<Entry>,
    /// The number that the last entry got.
    pub(crate) last: u64,
    /// On seat 0 of a host (rank 0 where there is one host): since when its cells show the same
    /// tags. `None` while all its collectives have fitted into the cells.
    pub(crate) shown_since: Option<Instant>,
    /// On seat 0: the number of the last entry that got a cell from another entry.
    pub(crate) shown_up_to: u64,
}

/// The places of one rank of a communicator.
#[derive(Debug)]
pub(crate) struct Places {
    /// One word for each place: 0 when no call is there, the tag of the only call, or [`NO_TAG`].
    pub(crate) words: Box<[AtomicU64]>,
    /// The calls at the places whose word is [`NO_TAG`].
    entries: Mutex<Entries>,
    /// Changes whenever an entry is added, is removed or gets inside.
    pub(crate) changed: Event,
    /// Whether two calls of one name have met here. If they have, no result of this communicator
    /// can be relied on.
    pub(crate) mixed: AtomicBool,
}

impl Places {
    /// Returns the empty places of a rank in a communicator of `nranks`.
    pub(crate) fn new(nranks: usize) -> Places {
        Places {
            words: (0..=2 * nranks).map(|_| AtomicU64::new(0)).collect(),
            entries: Mutex::default(),
            changed: Event::default(),
            mixed: AtomicBool::new(false),
        }
    }

    /// Whether a call of this rank is under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.words.iter().any(|word| word.load(Ordering::Acquire) != 0)
    }

    /// Whether a collective of this rank is under way or waits for its turn.
    pub(crate) fn has_collective(&self) -> bool {
        self.words[0].load(Ordering::Acquire) != 0
    }

    /// Locks the list of calls.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the threads that wait for a change of the entries.
    pub(crate) fn tell(&self) {
        self.changed.count();
        self.changed.wake();
    }

    /// Makes the entries list the calls at a place.
    pub(crate) fn slow_down(&self, place: usize, entries: &mut Entries) {
        let word = &self.words[place];
        loop {
            let now = word.load(Ordering::Relaxed);
            if now == NO_TAG {
                return;
            }
            if word.compare_exchange(now, NO_TAG, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                if now != 0 {
                    entries.list.push(Entry { place, id: ALONE, tag: now, inside: true, cell: None });
                }
                return;
            }
        }
    }
}
