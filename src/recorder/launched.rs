//! The calls that NCCL has launched and whose kernels have not ended, as its profiler plugin
//! tells.
//!
//! NCCL keeps a handle for each call and gives the handle back later, also after the call has
//! ended. So the handle is a number, and a handle whose call is not kept any more is ignored.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hostccl::recorder::get;
use recording::{Call, Channel, Entry, EntryState, Recorder};

/// How many launched calls are kept until their kernels have ended.
const CALLS: usize = 4096;

/// The number of the next call. 0 is no call.
static NEXT: AtomicU64 = AtomicU64::new(1);
/// The calls that were launched last. Call `n` stands at place `n % 4096`.
static LAUNCHED: Mutex<Vec<Launched>> = Mutex::new(Vec::new());

/// A call whose kernels have not ended.
#[derive(Clone, Copy)]
struct Launched {
    /// The number of the call; 0 for none.
    number: u64,
    /// The call in the recording.
    entry: Entry,
    /// How many of NCCL's channels have not ended the call. 0 where NCCL does not tell of their
    /// ends.
    channels: u8,
}

/// Records that NCCL has launched a call on `channels` of its channels. Returns the number of the
/// call; 0 where the call is not recorded.
pub(crate) fn launch(group: Channel, call: &Call, channels: u8) -> u64 {
    let Some(recorder) = get() else { return 0 };
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let entry = recorder.begin(group, call);
    launched()[number as usize % CALLS] = Launched { number, entry, channels };
    number
}

/// Records that the launch of a call is over: its stream has it.
pub(crate) fn end_launch(number: u64) {
    with(number, |recorder, call| recorder.end(call.entry, EntryState::Issued));
}

/// Records that one of NCCL's channels has ended a call. The last one ends the call.
pub(crate) fn end_channel(number: u64) {
    with(number, |recorder, call| {
        call.channels = call.channels.saturating_sub(1);
        if call.channels == 0 {
            call.number = 0;
            recorder.end(call.entry, EntryState::Done);
        }
    });
}

/// The launched calls of which it is known that their kernels have not ended.
pub(super) fn unfinished() -> Vec<Entry> {
    let launched = LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner);
    launched.iter().filter(|call| call.number != 0 && call.channels > 0).map(|call| call.entry).collect()
}

/// Does `work` on a call that is still kept.
fn with(number: u64, work: impl FnOnce(&Recorder, &mut Launched)) {
    let Some(recorder) = get() else { return };
    let mut launched = launched();
    let call = &mut launched[number as usize % CALLS];
    if number != 0 && call.number == number {
        work(recorder, call);
    }
}

/// The calls that were launched last. The table is made at the first call.
fn launched() -> MutexGuard<'static, Vec<Launched>> {
    let mut launched = LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner);
    if launched.is_empty() {
        launched.resize(CALLS, Launched { number: 0, entry: Entry::NONE, channels: 0 });
    }
    launched
}
