//! A process with its recording, as it was at one moment.

use devicemesh::rendezvous::launcher::Place;
use recording::clock::Moment;
use recording::layout::header;
use recording::place::file_name;
use recording::{ChannelState, RecordedChannel, RecordedWorld, Snapshot};

use crate::proc::Stat;

/// The kind of a channel in which ranks agree on calls in the store.
pub const AGREEMENTS: u8 = 1;

/// One process that has a recording.
pub struct Process {
    /// The process number: in this tool's PID namespace where the process runs here, else the one
    /// that the recording has.
    pub pid: u32,
    /// Whether the process runs, and how.
    pub state: State,
    /// The copy of its recording.
    pub snapshot: Snapshot,
    /// The recording's memory.
    pub bytes: Vec<u8>,
    /// Converts the ticks of the recording.
    pub timeline: Timeline,
    /// The place in the job that the launcher gave. `None` where the environment cannot be read.
    pub place: Option<Place>,
}

/// What a process does, as the kernel says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// A thread of the process uses a CPU.
    Computes,
    /// The process waits for something.
    Sleeps,
    /// The process waits inside the kernel and cannot be interrupted: for a disk or a driver.
    Blocked,
    /// A signal has stopped the process (SIGSTOP, SIGTSTP).
    Stopped,
    /// A debugger has stopped the process.
    Traced,
    /// The process has ended.
    Gone,
    /// The process belongs to another host, so nobody knows.
    Unknown,
}

impl State {
    /// The word for the state in JSON.
    pub fn word(self) -> &'static str {
        match self {
            State::Computes => "computes",
            State::Sleeps => "sleeps",
            State::Blocked => "blocked in the kernel",
            State::Stopped => "stopped",
            State::Traced => "stopped by a debugger",
            State::Gone => "gone",
            State::Unknown => "unknown",
        }
    }

    /// Whether the process does not go on by itself.
    pub fn is_halted(self) -> bool {
        matches!(self, State::Stopped | State::Traced | State::Gone)
    }
}

impl Process {
    /// The name of the process's host.
    pub fn host(&self) -> &str {
        &self.snapshot.process.host
    }

    /// Whether the process runs on this host.
    pub fn runs_here(&self) -> bool {
        !matches!(self.state, State::Gone | State::Unknown)
    }

    /// The name of a file for a copy of the recording, in the form of those in DM_TRACE_DIR. `copy` is
    /// 1, or more where the process has several recordings.
    pub fn file_name(&self, copy: u32) -> String {
        let start = Stat::read(self.pid).filter(|_| self.runs_here()).map_or(0, |stat| stat.started);
        file_name(self.host(), self.snapshot.process.pid, start, copy)
    }

    /// The memory of the recording, with the present moment of its clock where the process runs
    /// here. So a reader elsewhere knows how long ago each call was.
    pub fn copy(&self) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        if self.runs_here() {
            let now = self.snapshot.process.clock.moment();
            for (at, value) in [now.ticks, now.monotonic, now.real].into_iter().enumerate() {
                let word = (header::LATER + at) * 8;
                bytes[word..word + 8].copy_from_slice(&value.to_ne_bytes());
            }
            let stamp = header::LATER_STAMP * 8;
            bytes[stamp..stamp + 8].copy_from_slice(&2u64.to_ne_bytes());
        }
        bytes
    }

    /// The group in which the process joins a world, where it is in no world yet.
    pub fn joining(&self) -> Option<&RecordedChannel> {
        let mut channels = self.snapshot.channels.iter().filter(|_| self.snapshot.worlds.is_empty());
        channels.find(|channel| {
            channel.kind == AGREEMENTS && channel.world.is_none() && channel.state != ChannelState::Closed
        })
    }

    /// The worlds that have not ended, or all worlds where all have ended.
    pub fn worlds(&self) -> impl Iterator<Item = &RecordedWorld> {
        let all_ended = self.snapshot.worlds.iter().all(|world| world.has_ended);
        self.snapshot.worlds.iter().filter(move |world| all_ended || !world.has_ended)
    }
}

/// Converts the ticks of a recording to times.
#[derive(Debug, Clone, Copy)]
pub struct Timeline {
    /// A moment of the recording's clock.
    anchor: Moment,
    /// The nanoseconds of a tick. `None` where they cannot be computed.
    per_tick: Option<f64>,
    /// The end of the time that is looked at, in nanoseconds since 1970.
    pub until: u64,
}

impl Timeline {
    /// `now` is the present moment on the recording's clock, where the process is on this host.
    /// `real_now` is the present time in nanoseconds since 1970. `usual` is the length of a tick on
    /// this host, for a recording that has only one moment.
    pub fn new(snapshot: &Snapshot, now: Option<Moment>, real_now: u64, usual: Option<f64>) -> Timeline {
        let anchor = now.unwrap_or(snapshot.process.later);
        Timeline { anchor, per_tick: snapshot.nanoseconds_per_tick(now).or(usual), until: real_now }
    }

    /// The time of these ticks in nanoseconds since 1970.
    pub fn real(&self, ticks: u64) -> Option<u64> {
        let offset = (ticks as f64 - self.anchor.ticks as f64) * self.per_tick?;
        Some((self.anchor.real as f64 + offset).max(0.0) as u64)
    }

    /// The seconds from these ticks to the end of the time that is looked at.
    pub fn seconds_since(&self, ticks: u64) -> Option<f64> {
        let since = self.until as f64 - self.real(ticks)? as f64;
        Some((since / 1e9).max(0.0))
    }
}
