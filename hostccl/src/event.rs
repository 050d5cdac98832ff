//! Sleeps until a word in shared memory changes.
//!
//! An [`Event`] is a word together with the number of threads that sleep on it, so that a change on
//! which nobody sleeps costs no system call. No wake-up is lost: a sleeper first counts itself,
//! then reads the word, and lets the kernel compare it. The thread that changes the word first
//! changes the word, then reads the count. Each of the two threads has a sequentially consistent
//! fence between its two accesses, so at least one of them sees the other. docs/memory-order.md
//! names, for each memory order, a model that fails without it.
//!
//! # Doorbells
//! A thread sleeps on several words by `futex_waitv`, which takes at most 128 words and needs Linux
//! 5.16. Where this call cannot be used, the thread sleeps on one word in the segment, the doorbell
//! of its rank. The thread marks each word that it watches with its doorbell. A thread that changes
//! a word rings the doorbells with which that word is marked.
//!
//! The sleeper reads its doorbell, marks the words, and then reads the words. It sleeps only while
//! the doorbell still holds the value that the sleeper has read. The thread that changes a word
//! first changes the word, and then takes the marks off. The sleeper has a sequentially consistent
//! fence between its marks and its reads, and the other thread has one between its change and its
//! look at the marks. So either the sleeper sees the change, or the other thread sees the mark. In
//! the second case the other thread changes the doorbell after the sleeper has read it. Then the
//! sleeper does not fall asleep, or it wakes.
//!
//! A mark stays until the word changes, also when its sleeper no longer waits. Then the change
//! rings the doorbell for nobody, or wakes a thread of that rank that watches other words and
//! sleeps again. The sleeper takes no marks off, because another thread of the same rank may rely
//! on them.
//!
//! A process may be killed after it has taken the marks off and before it has rung. Then the
//! sleepers wake at the ends of their slices, when they check their peers anyway, and mark the
//! words again.

#[cfg(test)]
mod tests;

use std::cell::UnsafeCell;
use std::ops::Deref;
use std::time::Duration;

use crate::futex;
use crate::sync::{AtomicBool, AtomicI64, AtomicU32, Ordering, fence, fetch_for_writing, store_and_fence};

/// A word to sleep on, alone on its cache line.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct Event {
    /// The word.
    value: AtomicU32,
    /// How many threads of all processes sleep on the word.
    sleepers: AtomicU32,
    /// The doorbells to ring when the word changes, as bits. A thread that watches the word sets
    /// its bit, and the thread that rings clears the bits.
    bells: AtomicU32,
    /// The distance in bytes from this event to the first doorbell. It is the same in every
    /// mapping, because the event and the doorbells are in one segment. It is set before `bells`.
    to_bells: AtomicI64,
    /// The rest of the cache line.
    beside: Beside,
}

/// An event with two cache lines of its own. Intel's processors fetch cache lines in pairs. If the
/// second line held another word, a read of this event would also take that word's line away from
/// the rank that writes it.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(crate) struct LoneEvent(Event);

impl Deref for LoneEvent {
    type Target = Event;

    fn deref(&self) -> &Event {
        &self.0
    }
}

/// Bytes in the cache line of a word. A thread writes them, and then sets the word. The thread that
/// reads the word reads the bytes without another cache miss.
#[repr(C)]
#[derive(Debug, Default)]
struct Beside(UnsafeCell<[u64; BESIDE / 8]>);

/// How many bytes there are beside a word.
pub(crate) const BESIDE: usize = 40;

// SAFETY: the threads that use the bytes take turns, and the word orders these turns. They touch
// the bytes only through a raw pointer.
unsafe impl Sync for Beside {}

impl Event {
    /// The [`BESIDE`] bytes beside the word, at an address that is a multiple of 8. The event
    /// itself does not touch them.
    pub(crate) fn beside(&self) -> *mut u8 {
        self.beside.0.get().cast()
    }

    /// Asks the processor for the cache line of the word, because this thread will write to it
    /// soon.
    #[inline]
    pub(crate) fn fetch(&self) {
        fetch_for_writing(std::ptr::from_ref(self).cast());
    }

    /// Reads the word. The caller then also sees all memory that was written before the word was
    /// set.
    pub(crate) fn value(&self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    /// Sets the word and wakes the threads that sleep on it.
    pub(crate) fn set(&self, value: u32) {
        store_and_fence(&self.value, value);
        self.wake_after_fence();
    }

    /// Sets the word and wakes nobody. A thread that reads the value sees what was written before.
    pub(crate) fn store(&self, value: u32) {
        self.value.store(value, Ordering::Release);
    }

    /// Adds one to the word and returns the new value. It wakes nobody.
    pub(crate) fn count(&self) -> u32 {
        self.value.fetch_add(1, Ordering::AcqRel).wrapping_add(1)
    }

    /// Adds one to the word, wakes the threads that sleep on it, and returns the new value.
    pub(crate) fn change(&self) -> u32 {
        let value = self.count();
        self.wake();
        value
    }

    /// Wakes every sleeper of any process, whether or not the word has changed.
    pub(crate) fn wake(&self) {
        fence(Ordering::SeqCst);
        self.wake_after_fence();
    }

    /// Wakes the sleepers as [`wake`](Event::wake) does. The caller has already made a fence after
    /// its change of the word.
    fn wake_after_fence(&self) {
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            futex::wake(&self.value);
        }
        if self.bells.load(Ordering::Relaxed) != 0 {
            self.ring();
        }
    }

    /// Takes the marks off this event, and rings the doorbells that they name.
    #[cold]
    fn ring(&self) {
        let marks = self.bells.swap(0, Ordering::Acquire);
        let distance = self.to_bells.load(Ordering::Relaxed) as isize;
        let first = std::ptr::from_ref(self).addr().wrapping_add_signed(distance);
        for number in (0..BELLS).filter(|number| marks >> number & 1 == 1) {
            // SAFETY: a sleeper set the distance before its mark. Its doorbells are in the segment
            // of this event, which is mapped here as a whole, or in a mapping of this process that
            // lives as long as the event. The address of each mapping was exposed when it was made.
            // A doorbell is never marked with a doorbell, so `ring` does not call itself again.
            let bell = unsafe { &*std::ptr::with_exposed_provenance::<Event>(first).add(number) };
            bell.change();
        }
    }
}

/// Whether a thread sleeps on descriptors, in epoll. A thread that changes a word must then wake
/// that thread through a descriptor.
#[derive(Debug, Default)]
pub(crate) struct Asleep(AtomicBool);

impl Asleep {
    /// Notes that this thread is about to sleep. After this call the thread reads the words for
    /// which it waits, and it sleeps only where none has changed.
    pub(crate) fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
        // Without the fence, this thread could read the words before other threads see the flag.
        // Then each of the two threads would miss what the other has done.
        fence(Ordering::SeqCst);
    }

    /// Notes that the thread is awake.
    pub(crate) fn end(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Whether the thread sleeps, or is about to. A thread that has changed a word asks this after
    /// [`Event::change`] or [`Event::set`], which contain the second fence of the pair.
    pub(crate) fn is(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// How many doorbells a segment has. Ranks share them where there are more ranks.
pub(crate) const BELLS: usize = 16;

/// The doorbell of a rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bell<'a> {
    /// All doorbells of the segment.
    pub(crate) all: &'a [Event; BELLS],
    /// The rank.
    pub(crate) rank: usize,
}

impl Bell<'_> {
    /// Sleeps until a watched word changes, somebody calls [`Event::wake`] on one, or the time is
    /// up. The words are in the segment of the doorbell, or belong to this process and to the
    /// [`Comm`](crate::comm::Comm) of the doorbell's mapping.
    fn sleep(&self, watches: &[Watch<'_>], timeout: Duration) {
        let (number, first) = (self.rank % BELLS, std::ptr::from_ref(self.all).expose_provenance());
        let bell = &self.all[number];
        let seen = bell.value.load(Ordering::Relaxed);
        bell.sleepers.fetch_add(1, Ordering::Relaxed);
        for Watch { event, .. } in watches {
            let distance = first.wrapping_sub(std::ptr::from_ref(*event).addr()) as i64;
            event.to_bells.store(distance, Ordering::Relaxed);
            event.bells.fetch_or(1 << number, Ordering::Release);
        }
        fence(Ordering::SeqCst);
        if watches.iter().all(|watch| watch.event.value.load(Ordering::Relaxed) == watch.seen) {
            futex::wait(&bell.value, seen, timeout);
        }
        bell.sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One condition of a sleep: the word holds `seen`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Watch<'a> {
    /// The word.
    pub(crate) event: &'a Event,
    /// The value that the caller has seen in the word.
    pub(crate) seen: u32,
}

/// Sleeps until a watched word differs from what was seen, somebody calls [`Event::wake`] on one,
/// or the time is up. It may return earlier.
///
/// `bell` is the doorbell of this thread's rank, where that doorbell serves all of the words. Where
/// there is none and the kernel cannot watch all words, the thread sleeps for at most
/// [`POLL_SLICE`].
pub(crate) fn sleep(watches: &[Watch<'_>], bell: Option<Bell<'_>>, timeout: Duration) {
    if let Some(bell) = bell.filter(|_| !is_watched_by_kernel(watches.len())) {
        return bell.sleep(watches, timeout);
    }
    for watch in watches {
        watch.event.sleepers.fetch_add(1, Ordering::Relaxed);
    }
    fence(Ordering::SeqCst);
    if watches.iter().all(|watch| watch.event.value.load(Ordering::Relaxed) == watch.seen) {
        match watches {
            [] => std::thread::sleep(timeout),
            [one] => futex::wait(&one.event.value, one.seen, timeout),
            many => wait_many(many, timeout),
        }
    }
    for watch in watches {
        watch.event.sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether the kernel can watch that number of words in one call.
fn is_watched_by_kernel(words: usize) -> bool {
    words <= 1 || words <= futex::WAITV_MAX && futex::has_waitv()
}

/// How long a thread sleeps on one of many words where the kernel cannot watch them all, and where
/// the words have no common doorbell.
const POLL_SLICE: Duration = Duration::from_millis(1);

fn wait_many(watches: &[Watch<'_>], timeout: Duration) {
    match is_watched_by_kernel(watches.len()) {
        true => futex::wait_any(watches.iter().map(|watch| (&watch.event.value, watch.seen)), timeout),
        false => futex::wait(&watches[0].event.value, watches[0].seen, timeout.min(POLL_SLICE)),
    }
}
