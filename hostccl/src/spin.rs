//! The time before a thread sleeps. It polls the words that it waits for, and then yields its
//! processor.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Polls `changed` for as long as a sleep and a wake-up would take, then yields. Returns whether
/// `changed` has answered true. `ranks` is the number of ranks on this machine that may want a
/// processor.
pub(crate) fn spin_then_yield(ranks: impl IntoIterator<Item = usize>, changed: impl Fn() -> bool) -> bool {
    let oversubscribed = ranks.into_iter().any(|ranks| ranks > processors());
    SPINNING.poll(oversubscribed, &changed) || YIELDING.poll(&Limits::words(oversubscribed), &changed)
}

/// Polls a wire for at most 50 us, and yields in between. Each poll is a system call, so it is not
/// repeated as often as [`spin_then_yield`] reads a word.
///
/// A rank that shares its processor with others polls just as long. The kernel delivers a message
/// on the sender's processor, and wakes a sleeping receiver there, because the kernel expects the
/// sender to sleep soon. So ranks that always sleep gather on one processor while another one is
/// idle. Ranks that yield stay runnable, so the kernel spreads them.
pub(crate) fn poll_wire(changed: impl Fn() -> bool) -> bool {
    changed() || YIELDING.poll(&Limits::WIRE, changed)
}

/// The processors on which this thread may run. A launcher that binds each rank to one processor
/// makes this 1. Then the ranks outnumber the processors, and no rank polls for long.
fn processors() -> usize {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    *PROCESSORS.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Polls the words again and again.
///
/// Spinning pays when the peer runs on another processor and is about to finish: then it lasts
/// about as long as a system call. It is lost time when the ranks outnumber the processors, or when
/// two of them share a processor all the same. So the number of polls grows with each success and
/// shrinks with each failure.
struct Spinning {
    /// How many polls the next wait makes. The counter is a hint: threads may overwrite each
    /// other's.
    polls: AtomicU32,
}

static SPINNING: Spinning = Spinning { polls: AtomicU32::new(MAX_POLLS) };
const MIN_POLLS: u32 = 20;
const MAX_POLLS: u32 = 200;

impl Spinning {
    fn poll(&self, oversubscribed: bool, changed: impl Fn() -> bool) -> bool {
        let poll = |times: u32| {
            (0..times).any(|_| {
                std::hint::spin_loop();
                changed()
            })
        };
        if oversubscribed {
            return poll(MIN_POLLS);
        }
        let times = self.polls.load(Ordering::Relaxed);
        let seen = poll(times);
        let next = if seen { times + times / 8 } else { times - times / 8 };
        self.polls.store(next.clamp(MIN_POLLS, MAX_POLLS), Ordering::Relaxed);
        seen
    }
}

/// Gives the processor to other threads, and polls the words in between.
///
/// Where ranks share processors, the thread that runs next is most likely the rank for which this
/// one waits. It ends the step in a fraction of the time that a sleep and a wake-up take. But where
/// another program keeps the processors busy, that program runs for its whole time slice, which is
/// far longer than a sleep. So a slow yield is followed by waits without any, more of them each
/// time it happens again.
///
/// Where there is a processor for each rank, a yield that no other thread takes returns at once.
/// Then polling for about as long as a wake-up from an idle processor takes delays nobody. Once
/// another thread has run, this rank sleeps, and the kernel wakes it on a processor that is free.
/// Where the ranks outnumber the processors, the rank sleeps early, so that an idle processor can
/// take a waiting rank.
struct Yielding {
    /// How many waits are left that do not yield. The counter is a hint: threads may overwrite each
    /// other's.
    waits_without: AtomicU32,
    /// How many waits the next slow yield costs. This is a hint, too.
    cost_of_slow: AtomicU32,
}

static YIELDING: Yielding = Yielding { waits_without: AtomicU32::new(0), cost_of_slow: AtomicU32::new(MIN_COST) };
/// A wait for words in memory ends after this number of yields in which other threads ran.
const MAX_TAKEN: u32 = 2;
/// A yield that no other thread took is quicker than this: one system call, and no switch.
const QUICK_YIELD: Duration = Duration::from_nanos(1500);
/// A yield that lasts longer than this was taken by a program that keeps the processor.
const SLOW_YIELD: Duration = Duration::from_micros(500);
/// The longest time for which a thread polls while no other thread wants its processor.
const LONGEST_POLL: Duration = Duration::from_micros(50);
const MIN_COST: u32 = 64;
const MAX_COST: u32 = 16_384;

/// The limits of one wait that polls and yields.
struct Limits {
    /// The longest time from the first to the last yield; `None` where only the yields count.
    time: Option<Duration>,
    /// The number of yields in which other threads ran, after which the wait ends.
    taken: u32,
    /// Whether each yield counts towards `taken`, however quick it was.
    is_each_taken: bool,
}

impl Limits {
    /// The limits of a wait for a message.
    const WIRE: Limits = Limits { time: Some(LONGEST_POLL), taken: u32::MAX, is_each_taken: false };

    /// The limits of a wait for words in memory.
    fn words(oversubscribed: bool) -> Limits {
        let time = if oversubscribed { None } else { Some(LONGEST_POLL) };
        Limits { time, taken: MAX_TAKEN, is_each_taken: oversubscribed }
    }
}

impl Yielding {
    fn poll(&self, limits: &Limits, changed: impl Fn() -> bool) -> bool {
        let without = self.waits_without.load(Ordering::Relaxed);
        if without > 0 {
            self.waits_without.store(without - 1, Ordering::Relaxed);
            return false;
        }
        let began = Instant::now();
        let (mut before, mut taken) = (began, 0);
        while taken < limits.taken && limits.time.is_none_or(|most| before.duration_since(began) < most) {
            std::thread::yield_now();
            let after = Instant::now();
            let took = after.duration_since(before);
            before = after;
            taken += u32::from(limits.is_each_taken || took > QUICK_YIELD);
            let slow = took > SLOW_YIELD;
            let cost = self.cost_of_slow.load(Ordering::Relaxed);
            if slow {
                self.waits_without.store(cost, Ordering::Relaxed);
                self.cost_of_slow.store((cost * 2).min(MAX_COST), Ordering::Relaxed);
            }
            let changed = changed();
            if changed && !slow && cost > MIN_COST {
                self.cost_of_slow.store(cost - 1, Ordering::Relaxed);
            }
            if changed || slow {
                return changed;
            }
        }
        false
    }
}
