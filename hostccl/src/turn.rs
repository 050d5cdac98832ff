//! Turns: which call of this rank is inside a communicator, and which ones wait.
//!
//! Calls of several threads under different [names](Name) wait for each other. Two calls under one
//! name at the same time are refused, because nobody can know which of them belongs to which call
//! of the other ranks. The module `places` has the words and lists behind this.
//!
//! The order in which threads enter may differ from rank to rank. For collectives, rank 0 then
//! decides which name goes first (module `admission`). For messages, the receiver tells the sender
//! the names for which it waits, and the sender sends a message of such a name first (module
//! `message`). So each name makes progress as if it had a communicator of its own.

use std::time::{Duration, Instant};

use crate::blame::Blame;
use crate::call_name::Name;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::places::{ALONE, Entries, Entry, Place};
use crate::poll::{Blocker, Poll};
use crate::sync::Ordering;
use crate::types::ncclInvalidUsage;

/// How long the cells of rank 0 show the same collectives when no rank has answered with a common
/// name. This time is longer than the longest sleep of a rank that waits.
const SHOWN: Duration = Duration::from_millis(150);

/// How a call holds its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    /// The call has not tried to enter, or has left.
    Nothing,
    /// The call entered alone. If others came later, its entry has the number [`ALONE`].
    Word,
    /// The entry with that number is this call's.
    Entry(u64),
}

/// A call's right to be inside a place, or its wait for that right. The owner calls
/// [`leave`](Pass::leave) before dropping the pass.
#[derive(Debug)]
pub(crate) struct Pass {
    /// The place that the call enters.
    place: Place,
    /// The name under which the call is issued.
    name: Name,
    /// How the call holds its turn, or its place among those that wait.
    held: Held,
}

impl Pass {
    /// Returns the pass of a call that has not tried to enter.
    pub(crate) fn new(place: Place, name: Name) -> Pass {
        Pass { place, name, held: Held::Nothing }
    }

    pub(crate) fn name(&self) -> &Name {
        &self.name
    }

    /// Returns `None` once this call is inside, and otherwise what it waits for. Refuses a second
    /// call under the same name; `call` describes this call in the error.
    #[inline]
    pub(crate) fn enter(&mut self, comm: &Comm, call: impl FnOnce() -> String) -> Result<Option<Poll>> {
        match self.held {
            Held::Word => return Ok(None),
            Held::Nothing => {
                let word = &comm.places.words[self.place.index(comm.nranks)];
                if word.compare_exchange(0, self.name.tag, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                    self.held = Held::Word;
                    return Ok(None);
                }
                self.queue(comm, call)?;
            }
            Held::Entry(_) => {}
        }
        Ok(self.inside(comm))
    }

    /// Adds this call to the entries of its place.
    #[cold]
    fn queue(&mut self, comm: &Comm, call: impl FnOnce() -> String) -> Result<()> {
        let (places, place) = (&comm.places, self.place.index(comm.nranks));
        let mut entries = places.lock();
        places.slow_down(place, &mut entries);
        if entries.list.iter().any(|entry| entry.place == place && entry.tag == self.name.tag) {
            places.mixed.store(true, Ordering::Relaxed);
            drop(entries);
            return Err(self.fail_mixed(comm, &format!(", one of them {}", call())));
        }
        entries.last += 1;
        let id = entries.last;
        entries.list.push(Entry { place, id, tag: self.name.tag, inside: false, cell: None });
        self.held = Held::Entry(id);
        publish(comm, &mut entries);
        drop(entries);
        places.tell();
        // The call that is inside may wait for this one.
        match self.place {
            Place::Collectives => {}
            Place::To(peer) => drop(comm.segment.channel(comm.rank, peer).order.change()),
            Place::From(peer) => drop(comm.segment.channel(peer, comm.rank).order.change()),
        }
        Ok(())
    }

    /// Returns `None` when this call, which has an entry, is inside, and otherwise what it waits
    /// for.
    #[cold]
    fn inside(&self, comm: &Comm) -> Option<Poll> {
        let (places, place) = (&comm.places, self.place.index(comm.nranks));
        let seen = places.changed.value();
        let mut entries = places.lock();
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
        let (places, place) = (&comm.places, self.place.index(comm.nranks));
        let mut entries = places.lock();
        places.slow_down(place, &mut entries);
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

    /// Gives the turn of this call to the waiting call with that tag. This call then waits for its
    /// next turn. Returns whether there is such a call.
    pub(crate) fn hand_over(&mut self, comm: &Comm, tag: u64) -> bool {
        self.list(comm);
        let place = self.place.index(comm.nranks);
        let mut entries = comm.places.lock();
        let Some(next) = entries.list.iter().position(|entry| entry.place == place && entry.tag == tag) else {
            return false;
        };
        for entry in entries.list.iter_mut().filter(|entry| entry.place == place) {
            entry.inside = false;
        }
        entries.list[next].inside = true;
        drop(entries);
        comm.places.tell();
        true
    }

    /// The tags of the calls that wait for their turn behind this one, which is inside.
    pub(crate) fn waiting_tags(&self, comm: &Comm) -> Vec<u64> {
        let place = self.place.index(comm.nranks);
        let entries = comm.places.lock();
        entries.list.iter().filter(|entry| entry.place == place && !entry.inside).map(|entry| entry.tag).collect()
    }

    /// Ends this call's turn, or its wait for the turn. Fails when the call's result may belong to
    /// another call of the same name.
    #[inline]
    pub(crate) fn leave(&mut self, comm: &Comm) -> Result<()> {
        match std::mem::replace(&mut self.held, Held::Nothing) {
            Held::Nothing => return Ok(()),
            Held::Word => {
                let word = &comm.places.words[self.place.index(comm.nranks)];
                if word.compare_exchange(self.name.tag, 0, Ordering::Release, Ordering::Relaxed).is_ok() {
                    return Ok(());
                }
                self.remove(comm, ALONE);
            }
            Held::Entry(id) => self.remove(comm, id),
        }
        // The thread that sets the flag holds the lock of the entries. `remove` has just taken that
        // lock, so a relaxed load is enough.
        match comm.places.mixed.load(Ordering::Relaxed) {
            true => Err(self.end_mixed(comm)),
            false => Ok(()),
        }
    }

    /// Returns the error of a call whose result may belong to another call.
    #[cold]
    fn end_mixed(&self, comm: &Comm) -> Error {
        // The thread that set the flag may not have failed the communicator yet.
        comm.check().err().unwrap_or_else(|| self.fail_mixed(comm, ""))
    }

    /// Fails the communicator because two threads call under this name at the same time. `which`
    /// says which calls these are.
    #[cold]
    fn fail_mixed(&self, comm: &Comm, which: &str) -> Error {
        let message = format!(
            "two threads of {} call{} at the same time{which}: nobody can know which call of the other ranks belongs to which thread; let one thread at a time call, or give each a dimension of its own (DM_DIM_OWN_COMM)",
            comm.label(comm.rank),
            self.name.along(),
        );
        comm.fail(ncclInvalidUsage, Blame::of([comm.rank]), &message)
    }

    /// Removes the entry of this call.
    #[cold]
    fn remove(&self, comm: &Comm, id: u64) {
        let (places, place) = (&comm.places, self.place.index(comm.nranks));
        let mut entries = places.lock();
        if let Some(mine) = entries.list.iter().position(|entry| entry.place == place && entry.id == id) {
            if let Some(cell) = entries.list.remove(mine).cell {
                comm.segment.seat(comm.rank).wanted[cell].store(0, Ordering::SeqCst);
                publish(comm, &mut entries);
            }
        }
        if !entries.list.iter().any(|entry| entry.place == place) {
            places.words[place].store(0, Ordering::Release);
        }
        drop(entries);
        places.tell();
    }
}

/// Returns the tags of this rank's collectives, in the order in which they began.
pub(crate) fn collectives(comm: &Comm) -> Vec<u64> {
    let place = Place::Collectives.index(comm.nranks);
    comm.places.lock().list.iter().filter(|entry| entry.place == place).map(|entry| entry.tag).collect()
}

/// Shows those of this rank's collectives that rank 0 shows. Without this, a rank that has more
/// calls than cells might never show the call for which all other ranks wait.
///
/// Rank 0 has as many cells as this rank. So this rank has a cell for each tag of rank 0.
#[cold]
pub(crate) fn answer(comm: &Comm) {
    let (mine, place) = (comm.segment.seat(comm.rank), Place::Collectives.index(comm.nranks));
    let mut entries = comm.places.lock();
    let list = &mut entries.list;
    if list.iter().all(|entry| entry.place != place || entry.cell.is_some()) {
        return;
    }
    let asked: Vec<u64> =
        comm.segment.seat(0).wanted.iter().map(|cell| cell.load(Ordering::SeqCst)).filter(|tag| *tag != 0).collect();
    // Finds a shown entry that rank 0 does not show, or a hidden one that rank 0 shows.
    let find = |list: &[Entry], shown: bool| {
        let fits = |entry: &Entry| entry.cell.is_some() == shown && asked.contains(&entry.tag) != shown;
        list.iter().position(|entry| entry.place == place && fits(entry))
    };
    let mut told = false;
    while let (Some(spare), Some(hidden)) = (find(list, true), find(list, false)) {
        let Some(cell) = list[spare].cell.take() else { break };
        list[hidden].cell = Some(cell);
        mine.wanted[cell].store(list[hidden].tag, Ordering::SeqCst);
        told = true;
    }
    if told {
        comm.segment.header().wants.count();
        comm.segment.header().wants.wake();
    }
}

/// Lets rank 0's cells show other collectives, where rank 0 has more collectives than cells. Each
/// other rank that has more collectives than cells shows the collectives that rank 0 shows. So the
/// ranks find each common name after some rounds, however many names there are.
#[cold]
pub(crate) fn show_others(comm: &Comm) {
    let (seat, place) = (comm.segment.seat(comm.rank), Place::Collectives.index(comm.nranks));
    let mut entries = comm.places.lock();
    let Entries { list, shown_since, shown_up_to, .. } = &mut *entries;
    let mut hidden: Vec<usize> =
        (0..list.len()).filter(|index| list[*index].place == place && list[*index].cell.is_none()).collect();
    if hidden.is_empty() {
        *shown_since = None;
        return;
    }
    if shown_since.get_or_insert_with(Instant::now).elapsed() < SHOWN {
        return;
    }
    *shown_since = Some(Instant::now());
    // Every collective is shown in turn: those that began after the one that was shown last go
    // first.
    hidden.sort_by_key(|index| (list[*index].id <= *shown_up_to, list[*index].id));
    let shown: Vec<usize> =
        (0..list.len()).filter(|index| list[*index].place == place && list[*index].cell.is_some()).collect();
    for (next, last) in hidden.into_iter().zip(shown) {
        let Some(cell) = list[last].cell.take() else { continue };
        *shown_up_to = list[next].id;
        list[next].cell = Some(cell);
        seat.wanted[cell].store(list[next].tag, Ordering::SeqCst);
    }
    drop(entries);
    // The ranks that wait for the decision look at the cells when they wake.
    comm.segment.header().verdict.wake();
}

/// Writes the tags of this rank's collectives to its cells, as far as there is room.
fn publish(comm: &Comm, entries: &mut Entries) {
    let seat = comm.segment.seat(comm.rank);
    let collectives = Place::Collectives.index(comm.nranks);
    let mut told = false;
    for entry in entries.list.iter_mut().filter(|entry| entry.place == collectives && entry.cell.is_none()) {
        let free = seat.wanted.iter().position(|cell| cell.load(Ordering::Relaxed) == 0);
        let Some(cell) = free else { break };
        // A call that is alone has no entry, so its tag is not shown. Other ranks need the tag only
        // once the ranks withdraw their calls, and then the call gets an entry (`Pass::list`).
        seat.wanted[cell].store(entry.tag, Ordering::SeqCst);
        entry.cell = Some(cell);
        told = true;
    }
    if told {
        comm.segment.header().wants.count();
        comm.segment.header().wants.wake();
    }
}
