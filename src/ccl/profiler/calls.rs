//! The communicators of which NCCL tells the profiler plugin, in the recording.

use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use hostccl::recorder;
use recording::{Call, Channel, ChannelFacts, ChannelState, Recorder};

use super::expected::find;
use crate::digest::Fnv1a;
use crate::recorder::Group;
use crate::recorder::launched::{self, Left};

/// How many communicators tell this plugin of their calls.
static COMMUNICATORS: AtomicUsize = AtomicUsize::new(0);

/// NCCL's description of a communicator.
pub(super) struct Described<'a> {
    /// The name in NCCL's configuration; empty for none.
    pub(super) name: &'a CStr,
    /// Equal on all ranks of the communicator.
    pub(super) hash: u64,
    /// This process's rank.
    pub(super) rank: c_int,
    /// The number of ranks; 0 where it is not known.
    pub(super) size: c_int,
}

/// A communicator that tells the plugin of its calls. Its group in the recording is closed when it
/// is dropped.
pub(super) struct Communicator {
    /// The group in the recording. It is empty until [`open_later`](Communicator::open_later) where
    /// NCCL has not described the communicator at first.
    channel: OnceLock<Channel>,
    /// The dimension's group, where a mesh has made the communicator. Its calls are recorded
    /// there.
    of_mesh: Option<Arc<Group>>,
}

/// Whether NCCL tells this plugin of the calls on its communicators. Then nobody else needs to
/// record them.
pub(crate) fn records_its_calls() -> bool {
    COMMUNICATORS.load(Ordering::Relaxed) > 0
}

impl Communicator {
    /// A communicator that NCCL makes. `None` where this process has no recording.
    pub(super) fn new(described: Option<Described<'_>>) -> Option<Communicator> {
        recorder::open().ok()?;
        let recorder = recorder::get()?;
        let (channel, mut of_mesh) = (OnceLock::new(), None);
        if let Some(described) = described {
            of_mesh = find(&described.name.to_string_lossy(), described.rank, described.size);
            match &of_mesh {
                Some(group) => group.leave_to_nccl(),
                None => drop(channel.set(open(recorder, &described))),
            }
        }
        COMMUNICATORS.fetch_add(1, Ordering::Relaxed);
        Some(Communicator { channel, of_mesh })
    }

    /// Opens the group of a communicator that NCCL has not described before.
    pub(super) fn open_later(&self, described: &Described<'_>) {
        if let Some(recorder) = recorder::get() {
            self.channel.get_or_init(|| open(recorder, described));
        }
    }

    /// Records that a call is launched. Returns its number; 0 where it is not recorded.
    pub(super) fn launch(&self, call: &Call, left: Left) -> u64 {
        let own = || *self.channel.get().unwrap_or(&Channel::NONE);
        launched::launch(self.of_mesh.as_ref().map_or_else(own, |group| group.channel()), call, left)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        COMMUNICATORS.fetch_sub(1, Ordering::Relaxed);
        if let (Some(recorder), Some(channel)) = (recorder::get(), self.channel.get()) {
            recorder.set_channel_state(*channel, ChannelState::Closed);
        }
    }
}

/// Opens the group of a communicator in the recording.
fn open(recorder: &Recorder, described: &Described<'_>) -> Channel {
    let Described { hash, rank, size, .. } = *described;
    let name = described.name.to_string_lossy();
    recorder.open_channel(&ChannelFacts {
        kind: 2,
        // The hash is equal on all ranks of a communicator, and so is the name.
        key: Fnv1a::default().text("NCCL's profiler").number(hash).text(&name).value(),
        world: None,
        rank: rank.max(0) as usize,
        members: &[],
        size: size.max(0) as usize,
        name: if name.is_empty() { "a communicator without name" } else { &name },
    })
}
