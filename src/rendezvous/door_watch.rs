//! Counts the newcomers at the door of the job, for dm_waiting (docs/recovery.md, "The door").
//!
//! A program may ask in every step, so an answer must cost nothing while nobody is at the door. The
//! library leaves one WAIT for the next note of the door unanswered at the store. A question reads
//! a coarse clock, and looks at the socket of that WAIT at most once in [`LOOK`]. A store that
//! answers each question at once (a folder, or the caller's own store) is asked at most once in
//! [`ASK`].

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, TryLockError};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::agreement::{Note, count_waiting, door_note};
use super::current_epoch::CurrentEpoch;
use super::losses::Losses;
use super::open_wait::{ASK, OpenWait, SHORT};
use super::store::Store;
use crate::error::Result;
use crate::wait::Wait;

/// The shortest time between two looks at the socket.
const LOOK: Duration = Duration::from_millis(10);

/// Watches the door of one world.
#[derive(Default)]
pub(super) struct DoorWatch {
    /// The time of the coarse clock, in nanoseconds, from which on a question looks again. 0 while
    /// nobody has asked.
    next: AtomicU64,
    /// The number of newcomers that wait, as of the last look.
    count: AtomicI32,
    /// Held by the thread that looks.
    looking: Mutex<Looking>,
}

/// The findings of the looks at the door.
#[derive(Default)]
struct Looking {
    /// The open question for the next note.
    next: OpenWait,
    /// How many notes were read. Gaps count.
    read: usize,
    /// The notes of the newcomers that have knocked, in their order.
    knocked: Vec<Note>,
    /// The time of the coarse clock from which on the store may be asked again.
    may_ask: u64,
}

/// The world whose door is watched.
#[derive(Clone, Copy)]
pub(super) struct Door<'a> {
    /// The store that has the notes.
    pub(super) store: &'a dyn Store,
    /// The keys of the world begin with this prefix.
    pub(super) prefix: &'a str,
    /// The processes that are known to be lost.
    pub(super) losses: &'a Losses,
    /// The epoch in which this process is. The epoch says how many notes were read for its
    /// decision.
    pub(super) epoch: &'a CurrentEpoch,
    /// Returns the number of seats of the mesh in epoch 0, where the process knows that mesh.
    pub(super) seats_at_start: &'a dyn Fn() -> Option<usize>,
}

impl DoorWatch {
    /// Returns how many newcomers wait at the door, as far as this process knows. Waits only for
    /// the store's answer where it asks the store, and [`SHORT`] at most for each note.
    pub(super) fn count(&self, door: Door<'_>) -> i32 {
        let now = coarse_now();
        if now < self.next.load(Ordering::Relaxed) {
            return self.count.load(Ordering::Relaxed);
        }
        let mut looking = match self.looking.try_lock() {
            Ok(looking) => looking,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Another thread looks now.
            Err(TryLockError::WouldBlock) => return self.count.load(Ordering::Relaxed),
        };
        looking.look(door, now);
        let count = looking.waiting(door);
        self.count.store(count, Ordering::Relaxed);
        let next = if looking.next.is_open() { now + nanos(LOOK) } else { looking.may_ask };
        self.next.store(next, Ordering::Relaxed);
        count
    }

    /// Makes the next question look again, because this process has gone on to another epoch.
    pub(super) fn look_again(&self) {
        self.next.store(0, Ordering::Relaxed);
    }
}

impl Looking {
    fn look(&mut self, door: Door<'_>, now: u64) {
        let has_news = self.next.has_come();
        let somebody_waits = self.waiting(door) > 0;
        if has_news || (now >= self.may_ask && (!self.next.is_open() || somebody_waits)) {
            // While somebody is at the door, the store is also asked about losses once in ASK.
            self.may_ask = now + nanos(ASK);
            // A newcomer that has died does not wait any more. A later look finds what this one
            // misses because the store does not answer.
            let _ = self.ask(door);
        }
    }

    fn ask(&mut self, door: Door<'_>) -> Result<()> {
        let short = || Wait::after(SHORT);
        if !self.next.is_open() {
            // All notes together may take no longer than one note may.
            let wait = short();
            while let Some(note) = door.store.try_get(&door_note(door.prefix, self.read + 1), &wait)? {
                self.read += 1;
                self.knocked.extend(Note::read(self.read, &String::from_utf8_lossy(&note)));
            }
            self.next.begin(door.store, &door_note(door.prefix, self.read + 1), &short())?;
        }
        match self.waiting(door) {
            0 => Ok(()),
            _ => door.losses.refresh(&short()),
        }
    }

    /// Returns how many of those that have knocked are a reason to recover.
    fn waiting(&self, door: Door<'_>) -> i32 {
        if self.knocked.is_empty() {
            return 0;
        }
        let epoch = door.epoch.get();
        let is_out = |process| epoch.in_mesh.contains(&process) || door.losses.any(|lost| lost == process);
        let at_start = if epoch.number == 0 { (door.seats_at_start)() } else { None };
        let seats = at_start.unwrap_or(epoch.seats);
        i32::try_from(count_waiting(&self.knocked, (epoch.door, seats), is_out)).unwrap_or(i32::MAX)
    }
}

/// Returns the time of a clock that is cheap to read and moves on every few milliseconds, in
/// nanoseconds.
fn coarse_now() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    // The monotonic clock is above 0, and `next` begins with 0. So the first question always looks.
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::store::MemoryStore;

    /// In epoch 0 the world may be larger than the mesh. dm_recover refuses what dm_waiting does
    /// not count (`Recovery::is_due`), so both count by the seats of the mesh.
    #[test]
    fn a_newcomer_beyond_the_mesh_of_the_start_does_not_count_alone() {
        let store = MemoryStore::new();
        // The mesh has two ranks for each index. The newcomer of the next seat is not there.
        let note = "9:1 3\n2 2\nsame\nwhole";
        store.set(&door_note("p", 1), note.as_bytes(), &Wait::after(SHORT)).unwrap();
        let losses = Losses::none(std::sync::Arc::new(store.clone()), "p");
        let count = |seats: Option<usize>| {
            let (epoch, seats_at_start) = (CurrentEpoch::at_door("p", 8), move || seats);
            let (losses, seats_at_start) = (&losses, &seats_at_start);
            DoorWatch::default().count(Door { store: &store, prefix: "p", losses, epoch: &epoch, seats_at_start })
        };
        assert_eq!([Some(2), Some(4), None].map(count), [0, 1, 1]);
    }
}
