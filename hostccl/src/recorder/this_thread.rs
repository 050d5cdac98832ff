//! Keeps facts of the call that the calling thread makes, for the recorder: whether the beginning
//! of the call has a time, whether the call has waited, and for which rank of another host.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use recording::clock::Clock;
use recording::{Call, Channel, Entry, Recorder, Wait};

use super::get;

/// How many calls are kept in [`REMOTE`].
const MOST_REMOTE: usize = 64;

/// The numbers of the last calls that have waited for a rank of another host for long, and these
/// ranks.
static REMOTE: Mutex<VecDeque<(u64, i32)>> = Mutex::new(VecDeque::new());

/// The calling thread's call.
struct ThisCall {
    /// The number of the call in the recording. It is the number of [`Entry::NONE`] where there is
    /// no call, and for the calls of a group.
    number: Cell<u64>,
    /// Whether the beginning of the call has a time.
    is_timed: Cell<bool>,
    /// When the thread last read the clock in this call, in ticks. It is 0 before the first reading
    /// and after a sleep. A call that is not brief has no reading before the end of its first wait.
    looked: Cell<u64>,
    /// Whether a call has waited for another rank since the last [`take_wait`].
    wait: Cell<Wait>,
}

thread_local! {
    static THIS_CALL: ThisCall = const {
        ThisCall {
            number: Cell::new(u64::MAX),
            is_timed: Cell::new(true),
            looked: Cell::new(0),
            wait: Cell::new(Wait::None),
        }
    };
}

/// Records that this thread begins a call outside a group. The beginning of a brief call gets its
/// time when the call waits, or when the other ranks can see the call.
#[inline]
pub fn begin(recorder: &Recorder, channel: Channel, call: &Call) -> Entry {
    let entry = recorder.begin_untimed(channel, call);
    // Without thread-local variables, the end of the call gives the time of the beginning, too.
    with(|this| {
        this.number.set(entry.number());
        this.is_timed.set(!entry.is_brief());
        this.looked.set(0);
        this.wait.set(Wait::None);
    });
    entry
}

/// Notes that the other ranks can see that this thread's call has begun. Nobody waits any more for
/// what this rank does next, so this is the time for a look at the clock.
// Inlined, it would make every poll of a collective look up the thread-local variable.
#[inline(never)]
pub(crate) fn note_begun() {
    with(time);
}

/// Notes that a call of this thread waits for another rank. Returns when the thread has last looked
/// at the clock in this call, in ticks; 0 where that is not known.
#[inline]
pub(crate) fn note_wait() -> u64 {
    // Without thread-local variables, `take_wait` returns `Unknown`, so the end of the call gets
    // its exact time.
    with(|this| {
        this.wait.set(Wait::Unknown);
        time(this);
        this.looked.get()
    })
    .unwrap_or(0)
}

/// Notes when the last wait of this thread's call was over.
#[inline]
pub(crate) fn note_end_of_wait(ticks: u64) {
    with(|this| {
        this.wait.set(Wait::Until(ticks));
        this.looked.set(ticks);
    });
}

/// Notes that this thread's call is going to sleep. The last look at the clock does not tell when
/// its next wait begins.
#[inline]
pub(crate) fn note_sleep() {
    with(|this| this.looked.set(0));
}

/// Notes that this thread's call has waited for long for that rank of another host.
#[cold]
pub(crate) fn note_remote(rank: i32) {
    if let Some(number) = with(|this| this.number.get()).filter(|number| *number != u64::MAX) {
        let mut remote = REMOTE.lock().unwrap_or_else(PoisonError::into_inner);
        remote.retain(|(known, _)| *known != number);
        if remote.len() == MOST_REMOTE {
            remote.pop_front();
        }
        remote.push_back((number, rank));
    }
}

/// The rank of another host for which the call with that number in the recording has waited last,
/// where the call has waited for long.
pub fn remote_of(number: u64) -> Option<i32> {
    let remote = REMOTE.lock().unwrap_or_else(PoisonError::into_inner);
    remote.iter().find(|(known, _)| *known == number).map(|(_, rank)| *rank)
}

/// Whether a call of this thread has waited for another rank since this function was called last.
#[inline]
pub fn take_wait() -> Wait {
    with(|this| this.wait.replace(Wait::None)).unwrap_or(Wait::Unknown)
}

/// The recorder's clock, where there is a recorder and a look at its clock takes about as long as
/// one poll of a word in memory.
#[inline]
pub(crate) fn quick_clock() -> Option<Clock> {
    get().and_then(Recorder::quick_clock)
}

/// Runs `work` with the calling thread's call. Returns `None` on a thread that is ending and has no
/// thread-local variables any more, and in a build without a recorder.
#[inline]
fn with<T>(work: impl FnOnce(&ThisCall) -> T) -> Option<T> {
    if cfg!(devicemesh_without_recorder) {
        return None;
    }
    THIS_CALL.try_with(work).ok()
}

/// Gives the beginning of the thread's call its time.
#[inline]
fn time(this: &ThisCall) {
    if !this.is_timed.replace(true) {
        if let Some(recorder) = get() {
            this.looked.set(recorder.set_begun(this.number.get()));
        }
    }
}
