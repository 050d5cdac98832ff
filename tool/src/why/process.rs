//! A process with its recording, as it was at one moment.

use devicemesh::rendezvous::launcher::Place;
use recording::clock::Moment;
use recording::packed::{note_copy, thin};
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
    /// The recording's memory. It is empty where another host has sent the recording.
    pub bytes: Vec<u8>,
    /// Converts the ticks of the recording.
    pub timeline: Timeline,
    /// The place in the job that the launcher gave. `None` where the environment cannot be read.
    pub place: Option<Place>,
    /// The name of its program. It is empty where nobody knows it.
    pub program: String,
    /// Where the recording comes from.
    pub origin: Origin,
}

/// Where a recording comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// A process of this host, or a file that such a process writes or has written.
    Here,
    /// A file of another host, or a copy.
    File,
    /// Another host has sent it: the place of the line among the lines, and of the peer on it.
    Sent(usize, usize),
}

/// What a process does, as the kernel says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// A thread of the process used a processor, or was ready to, at each look of the tool.
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
    /// The states in the order of their numbers in copies of recordings.
    const ALL: [State; 7] =
        [State::Computes, State::Sleeps, State::Blocked, State::Stopped, State::Traced, State::Gone, State::Unknown];

    /// The state with that number in a copy of a recording.
    pub fn from_number(number: u64) -> State {
        usize::try_from(number).ok().and_then(|at| State::ALL.get(at)).copied().unwrap_or(State::Unknown)
    }

    /// Whether the process is known to run.
    pub fn is_alive(self) -> bool {
        !matches!(self, State::Gone | State::Unknown)
    }

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

    /// Returns what identifies a recording: the host, the process's own number, and the moment at
    /// which the recording began.
    pub fn identity(&self) -> (String, u32, u64, u64) {
        let facts = &self.snapshot.process;
        (facts.host.clone(), facts.pid, facts.began.real, facts.began.ticks)
    }

    /// Whether the process runs on this host.
    pub fn runs_here(&self) -> bool {
        self.origin == Origin::Here && self.state.is_alive()
    }

    /// The name of a file for a copy of the recording, in the form of those in DM_TRACE_DIR. `copy`
    /// is 1, or more where the process has several recordings.
    pub fn file_name(&self, copy: u32) -> String {
        let start = Stat::read(self.pid).filter(|_| self.runs_here()).map_or(0, |stat| stat.started);
        file_name(self.host(), self.snapshot.process.pid, start, copy)
    }

    /// A copy of the recording with the last `most` calls of each group. Where this tool knows the
    /// state of the process, the copy says what the process does, and has the moment at which the
    /// recording was read. So a reader elsewhere knows how long ago each call was, whatever its own
    /// clock says. A process may end between the moments at which its recording and its state are
    /// read. Then the copy says that the process is gone.
    pub fn copy(&self, most: usize) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        thin(&mut bytes, &self.snapshot, most);
        if self.origin == Origin::Here {
            note_copy(&mut bytes, &self.timeline.anchor, self.state as u8);
        }
        bytes
    }

    /// The process of a copy that [`copy`](Process::copy) has made. `None` where the recording is
    /// no copy.
    pub fn of_copy(snapshot: Snapshot, bytes: Vec<u8>, origin: Origin) -> Option<Process> {
        let state = State::from_number(snapshot.process.copied?);
        // All times are those of the copy's own host, so the clocks of the hosts need not agree.
        let timeline = Timeline::new(&snapshot, None, snapshot.process.later.real, None);
        let pid = snapshot.process.pid;
        Some(Process { pid, state, snapshot, bytes, timeline, place: None, program: String::new(), origin })
    }

    /// The group in which the process joins a world, where it is in no world yet.
    pub fn joining(&self) -> Option<&RecordedChannel> {
        let mut channels = self.snapshot.channels.iter().filter(|_| self.snapshot.worlds.is_empty());
        channels.find(|channel| {
            channel.kind == AGREEMENTS && channel.world.is_none() && channel.state != ChannelState::Closed
        })
    }

    /// The communicators of a process that is in no world and joins none: those of a program that
    /// uses NCCL alone, of which NCCL's profiler plugin tells.
    pub fn communicators(&self) -> impl Iterator<Item = &RecordedChannel> {
        let is_alone = self.snapshot.worlds.is_empty() && self.joining().is_none();
        let channels = self.snapshot.channels.iter().filter(move |_| is_alone);
        channels.filter(|channel| channel.kind != AGREEMENTS && channel.state != ChannelState::Closed)
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
