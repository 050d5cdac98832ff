//! The recording of a process: its last collective calls, messages and agreements, in memory that
//! another process can read.
//!
//! A process that uses the library writes its recording all the time, so that `devicemesh why` can
//! say where the process is when its job hangs: nobody has to ask for a recording before the job
//! begins. The writer makes no system call, takes no lock and starts no thread. A reader never
//! stops the writer, and reads the recording of a process that is stopped, blocked or dead as well.
//!
//! - [`layout`]: which word of the memory holds which value. The memory is an array of 64-bit
//!   words.
//! - [`clock`]: the ticks in which times are written, and what a tick is.
//! - [`Operation`]: what a call does.
//! - [`Recorder`], [`Channel`] and [`Entry`]: the writer.
//! - [`Snapshot`]: the reader. It takes a copy of the memory, so it needs no shared mapping.
//! - [`extract`](extract()): a part of a recording in few bytes, for another host.
//! - [`metrics`]: the counters of recordings as text for Prometheus.
//! - [`packed`]: copies of a recording for other hosts.
//! - [`place`]: how a recording is named, and how a reader finds the recordings of a process.
//!
//! The user of the crate provides the memory. In the library, hostccl's module `recorder` opens it:
//! an anonymous file (memfd), or a file in `DM_TRACE_DIR`.

pub mod clock;
mod extract;
pub mod layout;
mod members;
pub mod metrics;
mod operation;
pub mod packed;
pub mod place;
mod recorder;
mod settled;
mod snapshot;

pub use extract::{extract, of_extract};
pub use members::Members;
pub use operation::{Call, NO_PEER, Operation};
pub use recorder::{Channel, ChannelFacts, Entry, Recorder, RunningCall, Wait, World, WorldFacts};
pub use snapshot::{ChannelState, EntryState, ProcessFacts, RecordedCall, RecordedChannel, RecordedWorld, Snapshot};
