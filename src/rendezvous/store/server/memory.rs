//! Gives memory back to the system after the server has freed much of it.

use std::time::{Duration, Instant};

/// Memory is given back when the server keeps this many bytes less than it has kept before. Less
/// memory is not given back, because giving it back means to look at all free memory of the
/// process. Much more memory is not given back at once, because the clients wait meanwhile.
const MUCH: usize = 64 << 20;

/// The shortest time between two returns of memory.
const PAUSE: Duration = Duration::from_millis(100);

/// Counts the memory that the server keeps for its clients, to know when to give memory back.
pub(super) struct KeptMemory {
    /// The most bytes that were kept since memory was given back.
    most: usize,
    /// How many bytes are kept now.
    now: usize,
    /// When memory was given back the last time.
    given_back: Instant,
}

impl KeptMemory {
    pub(super) fn new() -> KeptMemory {
        KeptMemory { most: 0, now: 0, given_back: Instant::now() }
    }

    /// Notes how many bytes are kept now.
    pub(super) fn note(&mut self, kept: usize) {
        (self.now, self.most) = (kept, self.most.max(kept));
    }

    /// Returns when memory may be given back, if there is much to give back.
    pub(super) fn next_return(&self) -> Option<Instant> {
        (self.most - self.now >= MUCH).then(|| self.given_back + PAUSE)
    }

    /// Gives memory back if there is much of it and the last time is long enough ago.
    pub(super) fn give_back(&mut self) {
        if self.next_return().is_some_and(|moment| moment <= Instant::now()) {
            trim();
            (self.most, self.given_back) = (self.now, Instant::now());
        }
    }
}

/// Gives the free memory of this process back. The allocator of glibc keeps what was freed, also
/// where it is far more than the process needs otherwise.
#[cfg(target_env = "gnu")]
fn trim() {
    // SAFETY: the call takes no pointers, and any thread may make it at any time.
    unsafe { libc::malloc_trim(0) };
}

/// Other C libraries have no such call.
#[cfg(not(target_env = "gnu"))]
fn trim() {}
