//! Takes the place of the product's module `futex`: a model of the kernel's futexes.
//!
//! A wait compares the word and falls asleep in one atomic step, as in the kernel. Only a wake-up
//! ends a wait, so loom reports a lost wake-up as a deadlock. The kernel's lock orders a wait and a
//! wake-up on a word, and so does the model's lock.

use std::cell::Cell;
use std::time::Duration;

use crate::sync::{AtomicU32, Ordering};

/// The most words that the kernel watches in one call.
pub const WAITV_MAX: usize = 128;

/// A thread that sleeps.
struct Sleeper {
    /// The addresses of the words on which the thread sleeps.
    words: Vec<usize>,
    thread: loom::thread::Thread,
}

loom::lazy_static! {
    static ref SLEEPERS: loom::sync::Mutex<Vec<Sleeper>> = loom::sync::Mutex::new(Vec::new());
}

thread_local! {
    static HAS_WAITV: Cell<bool> = const { Cell::new(true) };
}

/// Prepares the model for an execution. `waitv` says whether the kernel has `futex_waitv`.
pub fn begin(waitv: bool) {
    HAS_WAITV.set(waitv);
    drop(SLEEPERS.lock());
}

/// Whether the kernel of the model has `futex_waitv`.
pub fn has_waitv() -> bool {
    HAS_WAITV.get()
}

/// Sleeps while the word holds `seen`.
pub fn wait(word: &AtomicU32, seen: u32, timeout: Duration) {
    wait_any(std::iter::once((word, seen)), timeout);
}

/// Sleeps while each word holds the value beside it.
pub fn wait_any<'a>(words: impl ExactSizeIterator<Item = (&'a AtomicU32, u32)>, _timeout: Duration) {
    let words: Vec<_> = words.collect();
    let mut sleepers = SLEEPERS.lock().unwrap();
    if words.iter().any(|(word, seen)| word.load(Ordering::Relaxed) != *seen) {
        return;
    }
    let words = words.iter().map(|(word, _)| std::ptr::from_ref(*word).addr()).collect();
    sleepers.push(Sleeper { words, thread: loom::thread::current() });
    drop(sleepers);
    loom::thread::park();
}

/// Wakes all threads that sleep on the word.
pub fn wake(word: &AtomicU32) {
    let address = std::ptr::from_ref(word).addr();
    let mut sleepers = SLEEPERS.lock().unwrap();
    let (woken, others) = sleepers.drain(..).partition(|sleeper: &Sleeper| sleeper.words.contains(&address));
    *sleepers = others;
    let woken: Vec<Sleeper> = woken;
    woken.iter().for_each(|sleeper| sleeper.thread.unpark());
}
