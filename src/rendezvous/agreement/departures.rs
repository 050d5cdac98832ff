//! The ranks that have ended a mesh by dm_abort. The abort itself is local. Afterwards no call on
//! the mesh may wait for these ranks.
//!
//! The key `<mesh>/left` gives these ranks numbers, and `<mesh>/left/<k>` holds the rank with the
//! number k. Every wait of a call on the mesh waits for the next of these keys, too (waiting.rs). So
//! an abort ends the wait in whatever step of the call it falls, and whether or not the aborting rank
//! has begun the call.
//!
//! The notes are read in order. A rank that dies before it has written the note of its number leaves
//! a gap, and nobody would read the later notes. So each rank fills the gaps before its own number
//! ([`GAP`]). A slow rank may find its own number filled. It takes a new number then.
//!
//! The next call of the aborting rank begins when its note is written. So another rank that compares
//! a call on the mesh with that next call finds the note (deciding.rs).

use std::fmt::Display;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::cleanup::{ScopeKeys, WorldKeys};
use super::members::Members;
use crate::error::Result;
use crate::rendezvous::store::Store;
use crate::wait::{Deadline, Wait};

/// How long the thread that writes the note may take. No caller waits for it.
const TELL: Duration = Duration::from_secs(10);

/// This text stands in place of a note that nobody has written.
const GAP: &[u8] = b"-";

/// How long a rank that has a number may take to write its note before others take it for dead.
const MOMENT: Duration = Duration::from_millis(250);

/// How many numbers before its own a rank looks at for gaps.
const LOOKED_BACK: i64 = 64;

/// The ranks of one mesh that have ended it by dm_abort, as far as this rank knows.
pub struct Departures {
    /// The store that has the notes.
    store: Arc<dyn Store>,
    /// The keys of the mesh begin with this prefix, which also names the mesh.
    prefix: String,
    /// This process's rank.
    me: i32,
    /// The notes that this rank has read so far.
    known: Mutex<Known>,
    /// The keys that this rank has written. They are removed like the keys of a scope.
    left: ScopeKeys,
}

/// The notes that this rank has read.
#[derive(Default)]
struct Known {
    /// The ranks that have ended the mesh.
    ranks: Vec<i32>,
    /// How many notes were read. Gaps and unreadable notes count.
    read: usize,
}

impl Departures {
    /// Watches the mesh of the ranks `members`, whose keys begin with `prefix`.
    pub(in crate::rendezvous) fn new(
        store: Arc<dyn Store>,
        prefix: String,
        me: i32,
        members: &Members,
        leftovers: &Arc<WorldKeys>,
    ) -> Departures {
        Departures { store, prefix, me, known: Mutex::default(), left: ScopeKeys::new(members, leftovers) }
    }

    /// Tells the other ranks of the mesh that this one has ended it. Does not wait for the store: a
    /// thread writes the note. This rank's next call begins when the note is written.
    pub fn tell(self: &Arc<Self>) {
        let (departures, writing) = (Arc::clone(self), self.left.begin_writing());
        let tell = move || {
            departures.write(&Wait::after(TELL));
            drop(writing);
        };
        // Without a thread the others find this rank missing at their deadlines.
        let _ = hostccl::thread::spawn("dm-farewell", tell);
    }

    /// Writes the note under the next free number.
    fn write(&self, wait: &Wait) {
        let (count, mine) = (format!("{}/left", self.prefix), self.me.to_string());
        while !wait.deadline.passed() {
            let Ok(number) = self.store.add(&count, 1, wait) else { return };
            if number == 1 {
                self.left.note([count.clone()]);
            }
            let key = note_key(&self.prefix, number);
            let stands = self.store.set_once(&key, mine.as_bytes(), wait);
            if stands.as_ref().is_ok_and(|stands| stands != mine.as_bytes()) {
                // Another rank has taken this one for dead.
                continue;
            }
            // A store that fails may have the note all the same.
            self.left.note([key]);
            return self.fill_gaps(number, wait);
        }
    }

    /// Fills the gaps before that number, so that the note of that number is read.
    fn fill_gaps(&self, number: i64, wait: &Wait) {
        let earlier: Vec<String> =
            ((number - LOOKED_BACK).max(1)..number).map(|number| note_key(&self.prefix, number)).collect();
        let Ok(present) = self.store.present(&earlier, wait) else { return };
        let moment = wait.with_deadline(Deadline::after(MOMENT.min(wait.deadline.left())));
        for (key, _) in earlier.into_iter().zip(present).filter(|(_, is_there)| !is_there) {
            if self.store.get(&key, &moment).is_err() {
                let stands = self.store.set_once(&key, GAP, wait);
                self.left.note(stands.is_ok_and(|stands| stands == GAP).then_some(key));
            }
        }
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
        (number, note_key(&self.prefix, number))
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

    /// Notes what the key of that number held.
    pub(super) fn note(&self, number: usize, value: &[u8]) {
        let rank = rank_in(value);
        let mut known = self.known();
        // Several threads may have waited for the same note. Only the first one counts it.
        if known.read + 1 == number {
            known.read = number;
            known.ranks.extend(rank);
        }
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
        let Some(value) = store.try_get(&note_key(mesh, number), wait)? else { break };
        ranks.extend(rank_in(&value));
    }
    Ok(ranks)
}

/// Returns the key of the note of that number.
fn note_key(mesh: &str, number: impl Display) -> String {
    format!("{mesh}/left/{number}")
}

/// Returns the rank that a note tells of; `None` for a gap and for an unreadable note.
fn rank_in(note: &[u8]) -> Option<i32> {
    String::from_utf8_lossy(note).trim().parse().ok().filter(|rank| *rank >= 0)
}
