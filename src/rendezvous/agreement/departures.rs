//! The ranks that have ended a mesh by dm_abort. The abort itself is local. Afterwards no call on
//! the mesh may wait for these ranks.
//!
//! The key `<mesh>/left` counts these ranks, and `<mesh>/left/<k>` holds the k-th one. Every wait
//! of a call on the mesh waits for the next of these keys, too (waiting.rs). So an abort ends the
//! wait in any step of the call, whether or not the aborting rank has begun the call.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::cleanup::{ScopeKeys, WorldKeys};
use super::members::Members;
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
    /// How many notes were read. Notes without a valid rank count, too.
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

    /// Tells the other ranks of the mesh that this rank has ended the mesh. Does not wait for the
    /// store, because a thread of its own writes the note.
    pub fn tell(self: &Arc<Self>) {
        let departures = Arc::clone(self);
        let tell = move || departures.write(&Wait::after(TELL));
        // If no thread can be started, the others find this rank missing at their deadlines.
        let _ = hostccl::thread::spawn("dm-farewell", tell);
    }

    fn write(&self, wait: &Wait) {
        let count = format!("{}/left", self.prefix);
        let Ok(number) = self.store.add(&count, 1, wait) else { return };
        let key = format!("{count}/{number}");
        let _ = self.store.set(&key, self.me.to_string().as_bytes(), wait);
        self.left.note((number == 1).then_some(count).into_iter().chain([key]));
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
        (number, format!("{}/left/{number}", self.prefix))
    }

    /// Notes what the key of that number held.
    pub(super) fn note(&self, number: usize, value: &[u8]) {
        let rank: Option<i32> = String::from_utf8_lossy(value).trim().parse().ok();
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
