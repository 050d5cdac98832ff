//! Turns: which call of this rank is inside a communicator, and which ones wait.
//!
//! A communicator has one place for its collectives. For each peer it has one place for sends to the peer and one for receives from it.
//! One call at a time is inside a place. Calls of several threads under different [names](Name) wait for each other; two calls under one
//! name at the same time are refused, because nobody can know which of them belongs to which call of the other ranks.
//!
//! The order in which threads enter may differ from rank to rank. Collectives then go by what rank 0 picks (module `meeting`). For
//! messages the sender goes by the names that the receiver waits for (module `message`). So each name makes progress whenever it would
//! with a communicator of its own.
//!
//! When the word of a place holds a tag, a single call is inside and no other call waits there. Such a call takes and leaves the place with
//! one atomic operation each. When a second call begins, the word becomes [`SLOW`], and the entries under the lock list the calls.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::comm::{Blocker, Comm};
use crate::error::Result;
use crate::event::Event;
use crate::operation::Poll;
use crate::types::ncclInvalidUsage;

/// The longest name in bytes, the zero at its end included.
pub(crate) const NAME_BYTES: usize = 32;

/// The name under which a call is issued. It is the same on all ranks of the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Name {
    /// The number that tells names apart.
    pub(crate) tag: u64,
    /// The name for messages, filled up with zeros.
    pub(crate) text: [u8; NAME_BYTES],
}

/// The tag of calls without a name, and the word of a place with several calls.
const UNNAMED: u64 = 1;
const SLOW: u64 = u64::MAX;

thread_local! {
    static NEXT: Cell<Name> = const { Cell::new(Name::NONE) };
}

impl Name {
    /// The name of a call to which the caller gave none.
    pub(crate) const NONE: Name = Name { tag: UNNAMED, text: [0; NAME_BYTES] };

    /// Names the calling thread's next operation.
    pub(crate) fn set_next(tag: u64, text: [u8; NAME_BYTES]) {
        let tag = if tag == 0 { UNNAMED } else { tag.clamp(UNNAMED + 1, SLOW - 1) };
        NEXT.set(Name { tag, text });
    }

    /// The name of the operation that the calling thread is about to begin.
    pub(crate) fn take_next() -> Name {
        NEXT.replace(Name::NONE)
    }

    /// " along tp", or nothing for a call without a name.
    pub(crate) fn along(&self) -> String {
        let text = self.text.split(|byte| *byte == 0).next().unwrap_or_default();
        match String::from_utf8_lossy(text) {
            text if text.is_empty() => String::new(),
            text => format!(" along {text}"),
        }
    }
}

/// A place at which calls take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    Collectives,
    To(usize),
    From(usize),
}

impl Place {
    fn index(self, nranks: usize) -> usize {
        match self {
            Place::Collectives => 0,
            Place::To(peer) => 1 + peer,
            Place::From(peer) => 1 + nranks + peer,
        }
    }
}

/// A call that is inside a place or waits there.
#[derive(Debug)]
struct Entry {
    place: usize,
    id: u64,
    tag: u64,
    inside: bool,
    /// Which of this rank's cells in shared memory has the tag.
    cell: Option<usize>,
}

/// The number of the entry of a call that was alone before the second call began. The call that was alone does not know this number.
const ALONE: u64 = 0;

#[derive(Debug, Default)]
struct Entries {
    list: Vec<Entry>,
    last: u64,
}

/// The places of one rank of a communicator.
#[derive(Debug)]
pub(crate) struct Turns {
    /// One word for each place: 0 when no call is there, the tag of the only call, or [`SLOW`].
    words: Box<[AtomicU64]>,
    entries: Mutex<Entries>,
    /// Changes whenever an entry is added, is removed or gets inside.
    pub(crate) changed: Event,
    /// Whether two calls of one name have met here. If they have, no result of this communicator can be relied on.
    mixed: AtomicBool,
}

impl Turns {
    pub(crate) fn new(nranks: usize) -> Turns {
        Turns {
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

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self) {
        self.changed.count();
        self.changed.wake();
    }

    /// Makes the entries list the calls at a place.
    fn slow_down(&self, place: usize, entries: &mut Entries) {
        let word = &self.words[place];
        loop {
            let now = word.load(Ordering::Acquire);
            if now == SLOW {
                return;
            }
            if word.compare_exchange(now, SLOW, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                if now != 0 {
                    entries.list.push(Entry { place, id: ALONE, tag: now, inside: true, cell: None });
                }
                return;
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    Nothing,
    /// The place's word holds this call's tag, or the entry with the number [`ALONE`] is this call's.
    Word,
    /// The entry with that number is this call's.
    Entry(u64),
}

/// A call's right to be inside a place, or its wait for that right. The owner calls [`leave`](Pass::leave) before dropping the pass.
#[derive(Debug)]
pub(crate) struct Pass {
    place: Place,
    name: Name,
    held: Held,
}

impl Pass {
    pub(crate) fn new(place: Place, name: Name) -> Pass {
        Pass { place, name, held: Held::Nothing }
    }

    pub(crate) fn name(&self) -> &Name {
        &self.name
    }

    /// Returns `None` once this call is inside, else what it waits for. Refuses a second call under the same name; `call` describes this
    /// call in the error.
    #[inline]
    pub(crate) fn enter(&mut self, comm: &Comm, call: impl FnOnce() -> String) -> Result<Option<Poll>> {
        match self.held {
            Held::Word => return Ok(None),
            Held::Nothing => {
                let word = &comm.turns.words[self.place.index(comm.nranks)];
                if word.compare_exchange(0, self.name.tag, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                    self.held = Held::Word;
                    return Ok(None);
                }
                self.queue(comm, call)?;
            }
            Held::Entry(_) => {}
        }
        Ok(self.inside(comm))
    }

    #[cold]
    fn queue(&mut self, comm: &Comm, call: impl FnOnce() -> String) -> Result<()> {
        let (turns, place) = (&comm.turns, self.place.index(comm.nranks));
        let mut entries = turns.lock();
        turns.slow_down(place, &mut entries);
        if entries.list.iter().any(|entry| entry.place == place && entry.tag == self.name.tag) {
            turns.mixed.store(true, Ordering::SeqCst);
            drop(entries);
            let message = format!(
                "two threads of {} call{} at the same time, one of them {}: nobody can know which call of the other ranks belongs to which thread; let one thread at a time call, or give each a dimension of its own (DM_DIM_OWN_COMM)",
                comm.label(comm.rank),
                self.name.along(),
                call()
            );
            return Err(comm.fail(ncclInvalidUsage, None, &message));
        }
        entries.last += 1;
        let id = entries.last;
        entries.list.push(Entry { place, id, tag: self.name.tag, inside: false, cell: None });
        self.held = Held::Entry(id);
        publish(comm, &mut entries);
        drop(entries);
        turns.tell();
        // The call that is inside may wait for this one.
        match self.place {
            Place::Collectives => {}
            Place::To(peer) => drop(comm.segment.channel(comm.rank, peer).order.change()),
            Place::From(peer) => drop(comm.segment.channel(peer, comm.rank).order.change()),
        }
        Ok(())
    }

    #[cold]
    fn inside(&self, comm: &Comm) -> Option<Poll> {
        let (turns, place) = (&comm.turns, self.place.index(comm.nranks));
        let seen = turns.changed.value();
        let mut entries = turns.lock();
        let taken = entries.list.iter().any(|entry| entry.place == place && entry.inside);
        let first = entries.list.iter_mut().find(|entry| entry.place == place && (!taken || entry.inside));
        match first.filter(|entry| Held::Entry(entry.id) == self.held) {
            Some(mine) => {
                mine.inside = true;
                None
            }
            None => Some(Poll::Blocked { seen, blocker: Blocker::Turn }),
        }
    }

    /// Gives this call, which is inside, an entry whose tag the other ranks can see.
    pub(crate) fn list(&mut self, comm: &Comm) {
        let (turns, place) = (&comm.turns, self.place.index(comm.nranks));
        let mut entries = turns.lock();
        turns.slow_down(place, &mut entries);
        if self.held == Held::Word {
            entries.last += 1;
            let id = entries.last;
            let mine = entries.list.iter_mut().find(|entry| entry.place == place && entry.id == ALONE);
            if let Some(mine) = mine {
                mine.id = id;
            }
            self.held = Held::Entry(id);
        }
        publish(comm, &mut entries);
    }

    /// Lets the waiting call with that tag inside in place of this call, which then waits for its next turn. Returns whether there is such
    /// a call.
    pub(crate) fn hand_over(&mut self, comm: &Comm, tag: u64) -> bool {
        self.list(comm);
        let place = self.place.index(comm.nranks);
        let mut entries = comm.turns.lock();
        let Some(next) = entries.list.iter().position(|entry| entry.place == place && entry.tag == tag) else {
            return false;
        };
        for entry in entries.list.iter_mut().filter(|entry| entry.place == place) {
            entry.inside = false;
        }
        entries.list[next].inside = true;
        drop(entries);
        comm.turns.tell();
        true
    }

    /// The tags of the calls that wait for their turn behind this one, which is inside.
    pub(crate) fn waiting_tags(&self, comm: &Comm) -> Vec<u64> {
        let place = self.place.index(comm.nranks);
        let entries = comm.turns.lock();
        entries.list.iter().filter(|entry| entry.place == place && !entry.inside).map(|entry| entry.tag).collect()
    }

    /// Ends this call's stay, or its wait. Fails when its result may belong to another call of the same name.
    #[inline]
    pub(crate) fn leave(&mut self, comm: &Comm) -> Result<()> {
        match std::mem::replace(&mut self.held, Held::Nothing) {
            Held::Nothing => return Ok(()),
            Held::Word => {
                let word = &comm.turns.words[self.place.index(comm.nranks)];
                if word.compare_exchange(self.name.tag, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                    return Ok(());
                }
                self.remove(comm, ALONE);
            }
            Held::Entry(id) => self.remove(comm, id),
        }
        match comm.turns.mixed.load(Ordering::SeqCst) {
            true => comm.check(),
            false => Ok(()),
        }
    }

    #[cold]
    fn remove(&self, comm: &Comm, id: u64) {
        let (turns, place) = (&comm.turns, self.place.index(comm.nranks));
        let mut entries = turns.lock();
        if let Some(mine) = entries.list.iter().position(|entry| entry.place == place && entry.id == id) {
            if let Some(cell) = entries.list.remove(mine).cell {
                comm.segment.seat(comm.rank).wanted[cell].store(0, Ordering::SeqCst);
                publish(comm, &mut entries);
            }
        }
        if !entries.list.iter().any(|entry| entry.place == place) {
            turns.words[place].store(0, Ordering::Release);
        }
        drop(entries);
        turns.tell();
    }
}

/// Writes the tags of this rank's collectives to its cells, as far as there is room.
fn publish(comm: &Comm, entries: &mut Entries) {
    let seat = comm.segment.seat(comm.rank);
    let collectives = Place::Collectives.index(comm.nranks);
    let mut told = false;
    for entry in entries.list.iter_mut().filter(|entry| entry.place == collectives && entry.cell.is_none()) {
        let free = seat.wanted.iter().position(|cell| cell.load(Ordering::Relaxed) == 0);
        let Some(cell) = free else { break };
        // A call that is alone does not get here: its tag is not needed before ranks withdraw their calls.
        seat.wanted[cell].store(entry.tag, Ordering::SeqCst);
        entry.cell = Some(cell);
        told = true;
    }
    if told {
        comm.segment.header().wants.count();
        comm.segment.header().wants.wake();
    }
}
