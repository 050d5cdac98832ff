//! The ranks that have ended a mesh by dm_abort. The abort itself is local. Afterwards no call on
//! the mesh may wait for these ranks. On a library with streams, dm_recover and dm_shrink leave the
//! same note before they abort kernels.
//!
//! The key `<mesh>/left` gives these ranks numbers, and `<mesh>/left/<k>` holds the rank with the
//! number k. Every wait of a call on the mesh waits for the next of these keys, too (waiting.rs).
//! So an abort ends the wait in whatever step of the call it falls, and whether or not the aborting
//! rank has begun the call.
//!
//! The file notes.rs has the rules for such notes. The notes and their count stay in the store for
//! as long as any rank is in the epoch of the mesh. If the notes were removed earlier, a rank that
//! ends the mesh later would begin again with the number 1, where ranks that have read the first
//! note do not look any more.
//!
//! The next call of the aborting rank begins when its note is written. So another rank that
//! compares a call on the mesh with that next call finds the note (deciding.rs).
//!
//! On a library with streams the note also comes before the abort itself, because a kernel of NCCL
//! that is aborted lets its peers go on with what lies in their buffers. A rank whose work on a
//! stream has ended therefore asks for notes before it takes the results for right.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::cleanup::WorldKeys;
use super::notes::{add_note, fill_gaps, note_key};
use crate::error::Result;
use crate::rendezvous::store::Store;
use crate::wait::Wait;

/// How long the thread that writes the note may take. No caller waits for it.
const TELL: Duration = Duration::from_secs(10);

/// The ranks of one mesh that have ended it by dm_abort, as far as this rank knows.
pub struct Departures {
    /// The store that has the notes.
    store: Arc<dyn Store>,
    /// The keys of the mesh begin with this prefix, which also names the mesh.
    prefix: String,
    /// The number of the epoch of the mesh.
    epoch: u64,
    /// This process's rank.
    me: i32,
    /// The notes that this rank has read so far.
    known: Mutex<Known>,
    /// The keys of the world, to which this value adds the keys that this rank has written.
    leftovers: Arc<WorldKeys>,
}

/// The notes that this rank has read.
#[derive(Default)]
struct Known {
    /// The ranks that have ended the mesh.
    ranks: Vec<i32>,
    /// How many notes were read. Gaps and unreadable notes count, too.
    read: usize,
}

impl Departures {
    /// Watches the mesh of that epoch whose keys begin with `prefix`.
    pub(in crate::rendezvous) fn new(
        store: Arc<dyn Store>,
        prefix: String,
        epoch: u64,
        me: i32,
        leftovers: &Arc<WorldKeys>,
    ) -> Departures {
        Departures { store, prefix, epoch, me, known: Mutex::default(), leftovers: Arc::clone(leftovers) }
    }

    /// Tells the other ranks of the mesh that this one has ended it. Does not wait for the store: a
    /// thread writes the note, and `None` says that no thread could be started. This rank's next
    /// call begins when the note is written.
    pub fn tell(self: &Arc<Self>) -> Option<JoinHandle<()>> {
        let (departures, writing) = (Arc::clone(self), self.leftovers.begin_writing());
        let tell = move || {
            departures.write(&Wait::after(TELL));
            drop(writing);
        };
        // Without a thread the others find this rank missing at their deadlines.
        hostccl::thread::spawn("dm-farewell", tell).ok()
    }

    /// Writes the note. Where the store fails, the others find this rank missing at their
    /// deadlines.
    fn write(&self, wait: &Wait) {
        let (list, mine) = (self.list(), self.me.to_string());
        let wrote = |key| self.leftovers.note_of_epoch(self.epoch, key);
        let written = add_note(&*self.store, &list, mine.as_bytes(), wait, &wrote);
        let _ = written.and_then(|number| fill_gaps(&*self.store, &list, number, wait, &wrote));
    }

    /// Returns the key that counts the notes.
    fn list(&self) -> String {
        list_of(&self.prefix)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the name of the mesh, which is equal on all its ranks.
    pub(super) fn mesh(&self) -> &str {
        &self.prefix
    }

    /// Returns the key of the next note, and its number.
    pub(super) fn next(&self) -> (usize, String) {
        let number = self.known().read + 1;
        (number, note_key(&self.list(), number))
    }

    /// Returns the other ranks that have ended the mesh, as far as the store knows by now.
    pub fn others(&self, wait: &Wait) -> Result<Vec<i32>> {
        self.catch_up(wait)?;
        Ok(self.all(|rank| rank != self.me))
    }

    /// Reads the notes that the store has by now.
    pub(super) fn catch_up(&self, wait: &Wait) -> Result<()> {
        loop {
            let (number, key) = self.next();
            match self.store.try_get(&key, wait)? {
                Some(value) => self.note(number, &value),
                None => return Ok(()),
            }
        }
    }

    /// Notes `value`, which the store had under the key of note `number`.
    pub(super) fn note(&self, number: usize, value: &[u8]) {
        let rank = rank_in(value);
        let mut known = self.known();
        // Several threads may have waited for the same note. Only the first one counts it.
        if known.read + 1 == number {
            known.read = number;
            known.ranks.extend(rank);
        }
    }

    /// Whether any rank has ended the mesh, as far as the store knows by now.
    pub fn are_any(&self, wait: &Wait) -> Result<bool> {
        self.catch_up(wait).map(|()| !self.known().ranks.is_empty())
    }

    /// Returns the ranks that have ended the mesh and for which `is_missed` holds, in ascending
    /// order.
    pub(super) fn all(&self, is_missed: impl Fn(i32) -> bool) -> Vec<i32> {
        let mut ranks: Vec<i32> = self.known().ranks.iter().copied().filter(|rank| is_missed(*rank)).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}

/// Returns the ranks that have ended the mesh of that name, as far as the store knows by now.
pub(super) fn read(store: &dyn Store, mesh: &str, wait: &Wait) -> Result<Vec<i32>> {
    let mut ranks = Vec::new();
    for number in 1_usize.. {
        let Some(value) = store.try_get(&note_key(&list_of(mesh), number), wait)? else { break };
        ranks.extend(rank_in(&value));
    }
    Ok(ranks)
}

/// Returns the key that counts the notes of the mesh of that name.
fn list_of(mesh: &str) -> String {
    format!("{mesh}/left")
}

/// Returns the rank that a note tells of; `None` for a gap and for an unreadable note.
fn rank_in(note: &[u8]) -> Option<i32> {
    String::from_utf8_lossy(note).trim().parse().ok().filter(|rank| *rank >= 0)
}
