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
    /// How far the call's kernel is.
    left: Left,
}

/// How far a call's kernel is. The kernel runs in several of NCCL's channels.
#[derive(Clone, Copy)]
pub(crate) enum Left {
    /// NCCL does not tell of the ends of the channels.
    Unknown,
    /// So many channels have not ended.
    Channels(u8),
    /// So many channels have begun and have not ended. The call is done when the last of them ends.
    /// For a message only this count can be used, because NCCL may use fewer channels than it
    /// announces (nccl#2056).
    Begun(u8),
    /// All channels that have begun have ended. Another one may begin later.
    Ended,
}

/// Records that NCCL has launched a call. Returns the number of the call; 0 where the call is not
/// recorded.
pub(crate) fn launch(group: Channel, call: &Call, left: Left) -> u64 {
    let Some(recorder) = get() else { return 0 };
    // The calls of a group begin one after the other. A thread of CUDA, which replays a graph, and
    // a thread of the program may launch calls of one communicator at the same time.
    let mut launched = launched();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let entry = recorder.begin(group, call);
    launched[number as usize % CALLS] = Launched { number, entry, left };
    number
}

/// Records that the launch of a call is over: its stream has it. The kernel of a quick call may
/// have ended before that.
pub(crate) fn end_launch(number: u64) {
    with(number, |recorder, call| {
        if !matches!(call.left, Left::Ended) {
            recorder.end(call.entry, EntryState::Issued);
        }
    });
}

/// Notes that one of NCCL's channels has begun a call.
pub(crate) fn begin_channel(number: u64) {
    with(number, |recorder, call| match &mut call.left {
        Left::Begun(begun) => *begun = begun.saturating_add(1),
        Left::Ended => {
            call.left = Left::Begun(1);
            recorder.end(call.entry, EntryState::Issued);
        }
        Left::Unknown | Left::Channels(_) => {}
    });
}

/// Records that one of NCCL's channels has ended a call. The last one ends the call.
pub(crate) fn end_channel(number: u64) {
    with(number, |recorder, call| {
        let (Left::Channels(left) | Left::Begun(left)) = &mut call.left else { return };
        *left = left.saturating_sub(1);
        if *left == 0 {
            call.left = Left::Ended;
            recorder.end(call.entry, EntryState::Done);
        }
    });
}

/// The launched calls of which it is known that their kernels have not ended.
pub(super) fn unfinished() -> Vec<Entry> {
    let launched = LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner);
    let is_known = |call: &&Launched| call.number != 0 && matches!(call.left, Left::Channels(_) | Left::Begun(_));
    launched.iter().filter(is_known).map(|call| call.entry).collect()
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
        launched.resize(CALLS, Launched { number: 0, entry: Entry::NONE, left: Left::Unknown });
    }
    launched
}
