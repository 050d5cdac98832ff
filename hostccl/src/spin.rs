//! Polls and yields before a thread sleeps. The thread polls the words that it waits for, and then
//! yields its processor.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The kind of call that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A meeting of the ranks of several hosts. Each rank does little before it waits again.
    Meeting,
    /// A message between two ranks of a host.
    Message,
    /// Any other call.
    Other,
}

impl Purpose {
    fn yielding(self) -> &'static Yielding {
        match self {
            Purpose::Meeting => &YIELDING_IN_MEETINGS,
            Purpose::Message | Purpose::Other => &YIELDING,
        }
    }
}

/// Polls `changed` for as long as a sleep and a wake-up would take, then yields. Returns whether
/// `changed` has answered true. `oversubscribed` says whether the ranks on this machine outnumber
/// their processors. `look` reads a clock. Its last call is fewer than [`POLLS_A_LOOK`] polls
/// before the poll that answers true, so the caller takes that reading for the end of the wait. A
/// short wait does not call `look`.
pub(crate) fn spin_then_yield(
    oversubscribed: bool,
    purpose: Purpose,
    changed: impl Fn() -> bool,
    look: impl Fn(),
) -> bool {
    SPINNING.poll(oversubscribed, &changed, &look)
        || purpose.yielding().poll(&Limits::words(oversubscribed, purpose), || {
            look();
            changed()
        })
}

/// Polls a wire for at most 50 us, and yields between two polls. Time in which another thread had
/// the processor does not count. Each poll is a system call, so polls are less frequent than the
/// reads of [`spin_then_yield`].
///
/// A rank that shares its processor with others polls just as long. The kernel delivers a message
/// on the sender's processor, and wakes a sleeping receiver there, because the kernel expects the
/// sender to sleep soon. So ranks that always sleep gather on one processor while another one is
/// idle. Ranks that yield stay runnable, so the kernel spreads them.
pub(crate) fn poll_wire(purpose: Purpose, changed: impl Fn() -> bool) -> bool {
    changed() || purpose.yielding().poll(&Limits::wire(purpose), changed)
}

/// Polls the words again and again.
///
/// Spinning pays when the peer runs on another processor and is about to finish, because then the
/// spinning lasts about as long as a system call. Spinning is lost time when the ranks outnumber
/// the processors, or when two ranks share a processor although there are enough processors. So
/// the number of polls grows with each success and shrinks with each failure.
struct Spinning {
    /// How many polls the next wait makes. The counter is a hint: threads may overwrite each
    /// other's values.
    polls: AtomicU32,
}

static SPINNING: Spinning = Spinning { polls: AtomicU32::new(MAX_POLLS) };
/// The least and the largest number of polls of one wait.
const MIN_POLLS: u32 = 20;
const MAX_POLLS: u32 = 200;
/// The number of polls for each look at a clock. A look takes about as long as a poll with its
/// pause, so a rank that looked at every poll would slow down a rank that runs on the same core.
const POLLS_A_LOOK: u32 = 8;

impl Spinning {
    fn poll(&self, oversubscribed: bool, changed: impl Fn() -> bool, look: impl Fn()) -> bool {
        let poll = |times: u32| {
            (1..=times).any(|number| {
                std::hint::spin_loop();
                if number % POLLS_A_LOOK == 0 {
                    look();
                }
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
/// one waits. That rank ends the step in a fraction of the time that a sleep and a wake-up take.
/// But where another program keeps the processors busy, that program runs for its whole time
/// slice, which is far longer than a sleep. So after a slow yield the next waits do not yield. The
/// number of such waits grows with each further slow yield.
///
/// Where there is a processor for each rank, a yield that no other thread takes returns at once.
/// Then the thread can poll for as long as a wake-up from an idle processor lasts, and delays
/// nobody. Once another thread has run, this rank sleeps, and the kernel wakes it on a processor
/// that is free. Where the ranks outnumber the processors, a rank in a collective sleeps early, so
/// that an idle processor can take a waiting rank. A rank that waits for a message yields more
/// often, because it waits for one rank only.
///
/// In a meeting of several hosts, a rank that shares its processor yields more often before it
/// sleeps. The other ranks need several turns until the messages have come, and each of their
/// turns is shorter than a wake-up. While the ranks move much data, a rank that waits sleeps
/// earlier, because Linux (from 6.18 on) puts a thread that yields behind the threads that work.
struct Yielding {
    /// How many waits are left that do not yield. The counter is a hint: threads may overwrite
    /// each other's values.
    waits_without: AtomicU32,
    /// How many waits will not yield after the next slow yield. This counter is a hint, too.
    cost_of_slow: AtomicU32,
}

static YIELDING: Yielding = Yielding::new();
/// The yields in meetings have a counter of their own. Yields are slow while ranks move much data,
/// and such slow yields must not count for the next meeting.
static YIELDING_IN_MEETINGS: Yielding = Yielding::new();
/// A wait for a message in memory ends after this number of yields, where ranks share processors.
/// The other rank only needs its turn on the processor. The turn comes after about as many yields
/// as there are ranks on that processor. With 4 ranks on each processor, 2 yields were too few:
/// most messages of 4 bytes waited for a wake-up, and took more than twice as long.
const MAX_TAKEN_BY_MESSAGES: u32 = 16;
/// Any other wait for words in memory ends after this number of yields in which other threads ran.
const MAX_TAKEN: u32 = 2;
/// A wait for a message of a large call ends after this number of yields in which other threads
/// ran.
const MAX_TAKEN_ON_WIRE: u32 = 20;
/// A wait in a meeting ends after this number of yields in which other threads ran.
const MAX_TAKEN_IN_MEETINGS: u32 = 50;
/// A yield during which no other thread ran is quicker than this, because it is one system call
/// without a switch to another thread.
const QUICK_YIELD: Duration = Duration::from_nanos(1500);
/// During a yield that lasts longer than this, a program ran that keeps the processor.
const SLOW_YIELD: Duration = Duration::from_micros(500);
/// The longest time for which a thread polls while no other thread wants its processor.
const LONGEST_POLL: Duration = Duration::from_micros(50);
/// How many waits do not yield after a slow yield: the least and the largest number.
const MIN_COST: u32 = 64;
const MAX_COST: u32 = 16_384;

/// The limits of one wait that polls and yields. The wait also ends after [`LONGEST_POLL`] in
/// which no other thread wanted the processor.
struct Limits {
    /// Whether the time in which other threads ran counts towards [`LONGEST_POLL`], too.
    counts_others: bool,
    /// The number of yields in which other threads ran, after which the wait ends.
    taken: u32,
    /// Whether each yield counts towards `taken`, however quick it was.
    is_each_taken: bool,
}

impl Limits {
    const MEETING: Limits = Limits { counts_others: false, taken: MAX_TAKEN_IN_MEETINGS, is_each_taken: false };

    /// The limits of a wait for bytes from a wire.
    fn wire(purpose: Purpose) -> Limits {
        match purpose {
            Purpose::Meeting => Limits::MEETING,
            Purpose::Message | Purpose::Other => {
                Limits { counts_others: false, taken: MAX_TAKEN_ON_WIRE, is_each_taken: false }
            }
        }
    }

    /// The limits of a wait for words in memory.
    fn words(oversubscribed: bool, purpose: Purpose) -> Limits {
        match purpose {
            Purpose::Meeting if oversubscribed => Limits { is_each_taken: true, ..Limits::MEETING },
            Purpose::Message if oversubscribed => {
                Limits { counts_others: false, taken: MAX_TAKEN_BY_MESSAGES, is_each_taken: true }
            }
            _ => Limits { counts_others: !oversubscribed, taken: MAX_TAKEN, is_each_taken: oversubscribed },
        }
    }
}

impl Yielding {
    const fn new() -> Yielding {
        Yielding { waits_without: AtomicU32::new(0), cost_of_slow: AtomicU32::new(MIN_COST) }
    }

    fn poll(&self, limits: &Limits, changed: impl Fn() -> bool) -> bool {
        let without = self.waits_without.load(Ordering::Relaxed);
        if without > 0 {
            self.waits_without.store(without - 1, Ordering::Relaxed);
            return false;
        }
        let (mut polled, mut taken) = (Duration::ZERO, 0);
        let mut began = Instant::now();
        while taken < limits.taken && polled < LONGEST_POLL {
            let before = Instant::now();
            std::thread::yield_now();
            let after = Instant::now();
            let took = after.duration_since(before);
            let is_taken = limits.is_each_taken || took > QUICK_YIELD;
            taken += u32::from(is_taken);
            if limits.counts_others || !is_taken {
                polled += after.duration_since(began);
            }
            began = after;
            let slow = took > SLOW_YIELD;
            let cost = self.cost_of_slow.load(Ordering::Relaxed);
            if slow {
                self.waits_without.store(cost, Ordering::Relaxed);
                self.cost_of_slow.store((cost * 2).min(MAX_COST), Ordering::Relaxed);
            }
            let changed = changed();
            // Yields are slow while the ranks move much data, and become fast as soon as the ranks
            // move less.
            if changed && !slow && cost > MIN_COST {
                self.cost_of_slow.store((cost / 2).max(MIN_COST), Ordering::Relaxed);
            }
            if changed || slow {
                return changed;
            }
        }
        false
    }
}
