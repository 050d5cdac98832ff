//! Handles are tokens of kind, slot and generation, never addresses. Looking one up takes no lock.
//! A stale, freed or made-up handle gives an error, never undefined behaviour.
//!
//! A token is `kind (16 bits) | generation (24) | slot (24)`. No user-space address of a 64-bit
//! machine has these kinds in its upper 16 bits, so a pointer passed by mistake is never taken for
//! a handle. A slot's generation grows with each reuse, and a slot whose generations are used up is
//! retired.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, PoisonError, Weak};

use crossbeam_epoch::{self as epoch, Atomic, Owned, Shared};

use crate::error::{Error, Result, Status};
use crate::sync::{AtomicPtr, Mutex};

const _: () = assert!(size_of::<usize>() == 8, "handles pack kind, generation and slot into 64 bits");

const SLOT_BITS: u32 = 24;
const GENERATION_BITS: u32 = 24;
const KIND_SHIFT: u32 = SLOT_BITS + GENERATION_BITS;
const MASK: usize = (1 << SLOT_BITS) - 1;

/// Slots of the first chunk; each further chunk doubles what there is.
const FIRST_CHUNK: usize = 64;
const CHUNKS: usize = (SLOT_BITS - FIRST_CHUNK.trailing_zeros() + 1) as usize;

/// The thing that a handle names. `F` is read in place, and `T` is handed out as an `Arc`. Neither
/// takes a lock.
struct Entry<F, T> {
    /// The handle. A lookup compares it, because the slot may hold a later entry.
    token: usize,
    /// The part that is read in place.
    fast: F,
    /// The value, of which lookups hand out an `Arc`.
    value: Weak<T>,
    /// The handle's own `Arc` of the value. It is taken when the handle is freed, so that the
    /// handle's hold on the value ends at once. The entry itself stays while readers may look at
    /// it.
    owner: Mutex<Option<Arc<T>>>,
}

/// A place for one entry.
struct Slot<F, T> {
    /// The entry of the live handle; NULL where there is none.
    entry: Atomic<Entry<F, T>>,
}

/// An entry, its slot, and the pointer in the slot.
type Found<'t, 'g, F, T> = (&'g Entry<F, T>, &'t Slot<F, T>, Shared<'g, Entry<F, T>>);

/// The slots that a new handle can take.
struct Free {
    /// Slots of freed handles, each with its next generation.
    slots: Vec<(usize, usize)>,
    /// How many slots were ever used. The slots from this number on are free too.
    used: usize,
}

/// All handles of one kind.
pub(super) struct Table<F, T> {
    /// The upper 16 bits of every token of this table.
    kind: usize,
    /// The name of such a handle's type in messages.
    noun: &'static str,
    /// The slots, in chunks that are allocated when they are needed and never freed.
    chunks: [AtomicPtr<Slot<F, T>>; CHUNKS],
    /// The slots that a new handle can take.
    free: Mutex<Free>,
}

impl<F: Send + Sync + 'static, T: Send + Sync + 'static> Table<F, T> {
    /// An empty table. `kind` is not zero, differs from that of other tables (kinds.rs), and is no
    /// prefix of an address (its top bit and some other upper bit differ).
    pub(super) const fn new(kind: u16, noun: &'static str) -> Table<F, T> {
        Table {
            kind: kind as usize,
            noun,
            chunks: [const { AtomicPtr::new(std::ptr::null_mut()) }; CHUNKS],
            free: Mutex::new(Free { slots: Vec::new(), used: 0 }),
        }
    }

    /// A new handle.
    pub(super) fn insert(&self, fast: F, value: Arc<T>) -> Result<usize> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let (slot, generation) = match free.slots.pop() {
            Some(known) => known,
            None if free.used <= MASK => {
                free.used += 1;
                (free.used - 1, 0)
            }
            None => {
                let message =
                    format!("{} handles of type {} are alive, which is the limit: free some", MASK + 1, self.noun);
                return Err(Error::new(Status::Exhausted, message));
            }
        };
        let token = self.kind << KIND_SHIFT | generation << SLOT_BITS | slot;
        let entry = Entry { token, fast, value: Arc::downgrade(&value), owner: Mutex::new(Some(value)) };
        self.place(slot).entry.store(Owned::new(entry), Release);
        Ok(token)
    }

    /// Looks at a handle's fast part in place.
    #[inline]
    pub(super) fn with<R>(&self, token: usize, look: impl FnOnce(&F) -> R) -> Result<R> {
        let guard = epoch::pin();
        match self.entry(token, &guard) {
            Some((entry, ..)) => Ok(look(&entry.fast)),
            None => Err(self.unknown(token)),
        }
    }

    /// Returns the value that a handle names.
    pub(super) fn get(&self, token: usize) -> Result<Arc<T>> {
        let guard = epoch::pin();
        let value = self.entry(token, &guard).and_then(|(entry, ..)| entry.value.upgrade());
        value.ok_or_else(|| self.unknown(token))
    }

    /// Ends a handle and gives what it named to the caller, outside of any lock.
    pub(super) fn remove(&self, token: usize) -> Result<Arc<T>> {
        let guard = epoch::pin();
        let (entry, place, shared) = self.entry(token, &guard).ok_or_else(|| self.unknown(token))?;
        // Exactly one thread unlinks the entry, and that thread ends the handle. The pointer cannot
        // be that of a later entry, because this entry's memory is not used again while this thread
        // is pinned. A lookup that finds no entry reads nothing else, and the next entry of the
        // slot comes after the lock of `free`. So nothing relies on the order of this exchange.
        let unlinked = place.entry.compare_exchange(shared, Shared::null(), Relaxed, Relaxed, &guard);
        unlinked.map_err(|_| self.unknown(token))?;
        let value = entry.owner.lock().unwrap_or_else(PoisonError::into_inner).take();
        // SAFETY: this thread alone has unlinked the entry just now. So only threads that were
        // pinned before can still reach the entry.
        unsafe { guard.defer_destroy(shared) };
        let generation = (token >> SLOT_BITS & MASK) + 1;
        if generation <= MASK {
            self.free.lock().unwrap_or_else(PoisonError::into_inner).slots.push((token & MASK, generation));
        }
        guard.flush();
        value.ok_or_else(|| self.unknown(token))
    }

    /// The entry of a live handle.
    #[inline]
    fn entry<'g>(&self, token: usize, guard: &'g epoch::Guard) -> Option<Found<'_, 'g, F, T>> {
        if token >> KIND_SHIFT != self.kind {
            return None;
        }
        let (chunk, at) = locate(token & MASK);
        let slots = self.chunks[chunk].load(Acquire);
        if slots.is_null() {
            return None;
        }
        // SAFETY: a chunk is allocated whole and never freed, and `at` is within it by the
        // construction of `locate`.
        let slot = unsafe { &*slots.add(at) };
        let shared = slot.entry.load(Acquire, guard);
        // SAFETY: entries are destroyed only after every thread that was pinned at their unlinking
        // is unpinned.
        let entry = unsafe { shared.as_ref() }?;
        (entry.token == token).then_some((entry, slot, shared))
    }

    /// Returns the slot. Allocates its chunk where it is missing. The caller holds the lock of
    /// `free`.
    fn place(&self, slot: usize) -> &Slot<F, T> {
        let (chunk, at) = locate(slot);
        let mut slots = self.chunks[chunk].load(Relaxed);
        if slots.is_null() {
            let fresh: Vec<Slot<F, T>> = (0..chunk_len(chunk)).map(|_| Slot { entry: Atomic::null() }).collect();
            slots = Box::leak(fresh.into_boxed_slice()).as_mut_ptr();
            self.chunks[chunk].store(slots, Release);
        }
        // SAFETY: as in `entry`.
        unsafe { &*slots.add(at) }
    }

    #[cold]
    fn unknown(&self, token: usize) -> Error {
        Error::new(
            Status::InvalidHandle,
            format!("{token:#x} is not a live {}: it is NULL, was freed, or was never given out", self.noun),
        )
    }
}

/// Returns the chunk of a slot and its index there. Chunk 0 has `FIRST_CHUNK` slots, and each
/// later chunk has as many as all chunks before it.
#[inline]
fn locate(slot: usize) -> (usize, usize) {
    if slot < FIRST_CHUNK {
        return (0, slot);
    }
    let chunk = (slot / FIRST_CHUNK).ilog2() as usize + 1;
    (chunk, slot - (FIRST_CHUNK << (chunk - 1)))
}

fn chunk_len(chunk: usize) -> usize {
    if chunk == 0 { FIRST_CHUNK } else { FIRST_CHUNK << (chunk - 1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> &'static Table<usize, String> {
        Box::leak(Box::new(Table::new(0xd3ff, "thing")))
    }

    #[test]
    fn a_freed_handle_stays_dead_when_its_slot_is_used_again() {
        let table = table();
        let first = table.insert(1, Arc::new("first".into())).unwrap();
        assert_eq!(*table.remove(first).unwrap(), "first");
        let second = table.insert(2, Arc::new("second".into())).unwrap();
        assert_eq!(first & MASK, second & MASK, "the slot is reused");
        assert_ne!(first, second);
        assert_eq!(table.get(first).unwrap_err().status(), Status::InvalidHandle);
        assert_eq!(table.remove(first).unwrap_err().status(), Status::InvalidHandle);
        assert_eq!(*table.get(second).unwrap(), "second");
    }

    #[test]
    fn a_freed_handle_is_dead_though_what_it_named_lives_on() {
        let table = table();
        let value = Arc::new("kept".to_owned());
        let token = table.insert(1, Arc::clone(&value)).unwrap();
        assert!(Arc::ptr_eq(&table.get(token).unwrap(), &value));
        drop(table.remove(token).unwrap());
        assert_eq!(table.get(token).unwrap_err().status(), Status::InvalidHandle);
        assert_eq!(Arc::strong_count(&value), 1, "the handle's own share is gone at once");
    }

    #[test]
    fn of_threads_that_free_one_handle_one_ends_it() {
        let table = table();
        let start = std::sync::Barrier::new(3);
        for round in 0..500 {
            let token = table.insert(round, Arc::new(round.to_string())).unwrap();
            let ended = std::thread::scope(|scope| {
                let end = || {
                    start.wait();
                    let ended = table.remove(token).is_ok();
                    // Whoever came second finds it dead, not half freed.
                    (ended, table.get(token).is_err() && table.with(token, |_| ()).is_err())
                };
                let threads: Vec<_> = (0..3).map(|_| scope.spawn(end)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
            });
            assert_eq!(ended.iter().filter(|(ended, _)| *ended).count(), 1);
            assert!(ended.iter().all(|(_, dead)| *dead));
        }
    }

    #[test]
    fn made_up_tokens_are_refused() {
        let table = table();
        let real = table.insert(1, Arc::new("x".into())).unwrap();
        let local = 0u8;
        for token in [0, 1, usize::MAX, real + 1, real ^ 1 << 63, real + (1 << SLOT_BITS), &raw const local as usize] {
            assert_eq!(table.get(token).unwrap_err().status(), Status::InvalidHandle, "{token:#x}");
        }
    }

    #[test]
    fn slots_lie_in_chunks_without_gap_or_overlap() {
        let mut expected = (0, 0);
        for slot in 0..100_000 {
            if expected.1 == chunk_len(expected.0) {
                expected = (expected.0 + 1, 0);
            }
            assert_eq!(locate(slot), expected, "slot {slot}");
            expected.1 += 1;
        }
        assert!(locate(MASK).0 < CHUNKS);
    }

    #[test]
    fn readers_see_whole_entries_while_handles_come_and_go() {
        let table = table();
        let stop = std::sync::atomic::AtomicBool::new(false);
        let current = Mutex::new(table.insert(7, Arc::new("7".into())).unwrap());
        std::thread::scope(|scope| {
            let (stop, current) = (&stop, &current);
            for _ in 0..2 {
                scope.spawn(move || {
                    while !stop.load(Acquire) {
                        let token = *current.lock().unwrap();
                        match table.with(token, |fast| *fast) {
                            Ok(fast) => assert_eq!(fast % 7, 0),
                            Err(error) => assert_eq!(error.status(), Status::InvalidHandle),
                        }
                    }
                });
            }
            for round in 2..5000 {
                let fresh = table.insert(7 * round, Arc::new(String::new())).unwrap();
                let old = std::mem::replace(&mut *current.lock().unwrap(), fresh);
                table.remove(old).unwrap();
            }
            stop.store(true, Release);
        });
    }
}
