//! Two processes that guard each other, so that no process of a job outlives `devicemesh run`,
//! however that ends.
//!
//! ```text
//! devicemesh run    the front: the process that the user started. It passes signals on to the
//!       |           keeper, and exits with the keeper's code.
//! dm-ranks          the keeper: this program once more. It does the work of `devicemesh run`.
//!       |
//!     ranks         and what they start, also in groups and sessions of their own
//! ```
//!
//! | killed | who ends the ranks and what they have started |
//! |---|---|
//! | the front, or its process group | the keeper, which is in a group of its own |
//! | the keeper | the kernel ends the ranks; the front adopts and ends the rest |
//!
//! The starter of a job on several hosts is guarded in the same way. There both processes end the
//! commands that reach the hosts (ssh), because ssh to a host that gives no answer ends late. They
//! leave alone what these commands have put into sessions of their own, because an ssh with
//! ControlPersist leaves a master behind that other commands of the user use.
//!
//! The keeper's name and arguments contain nothing of the user's command line, so that `pkill` and
//! `killall` find only the front.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, getpid, getppid, kill_process, set_parent_process_death_signal, waitid,
};
use signal_hook::consts::SIGKILL;
use signal_hook::low_level::exit;

use super::cause::How;
use super::orphans;
use super::output::copy_terminal;
use super::ranks::Stops;
use super::signals::{Signals, is_ready_for};
use crate::failure::{Failure, advice_on_limits};
use crate::proc::words;

/// The name of the keeper, in place of the program's.
const KEEPER: &str = "dm-ranks";
/// The signal that the kernel sends to the keeper when the front has ended. Nobody else sends it to
/// a process, except init.
const FRONT_ENDED: Signal = Signal::POWER;
/// The pause before the front looks again whether the keeper is ready for a signal.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
/// How long the end of all processes of the job may take.
const END: Duration = Duration::from_secs(10);

/// Whether the front has ended, so that this process is ending everything.
static FRONT_HAS_ENDED: AtomicBool = AtomicBool::new(false);

/// This lock is held while a command is started that reaches a host, and for good once the front
/// has ended. Between fork and exec such a command still runs this program. Without the lock, the
/// thread that ends everything would take it for this process.
static STARTING: Mutex<()> = Mutex::new(());

/// The text that the keeper writes to standard error when the front was killed.
static LAST_WORD: OnceLock<Vec<u8>> = OnceLock::new();

/// Keeps the end of the front from being handled while a command is started. Does not return once
/// the front has ended.
pub fn starting() -> MutexGuard<'static, ()> {
    STARTING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets what the keeper writes to standard error when the front was killed. The text must not be
/// longer than what a pipe takes in one write (4 KiB). It is lost if the pipe is full.
pub fn set_last_word(word: Vec<u8>) {
    let _ = LAST_WORD.set(word);
}

/// Writes to standard error, if this does not block.
fn say_at_once(word: &[u8]) {
    let (error, now) = (std::io::stderr(), Timespec { tv_sec: 0, tv_nsec: 0 });
    if poll(&mut [PollFd::new(&error, PollFlags::OUT)], Some(&now)) == Ok(1) {
        let _ = rustix::io::write(&error, word);
    }
}

/// The command line of `devicemesh`. The keeper has the front's.
pub fn command_line() -> Vec<OsString> {
    let Some(front) = front() else { return std::env::args_os().collect() };
    let front = front.as_raw_nonzero().get().unsigned_abs();
    // The third word is the front's descriptor of the memory of `leave_command_line`.
    let descriptor = std::env::args_os().nth(2).and_then(|word| word.into_string().ok());
    let left_there = descriptor.and_then(|descriptor| words(front, &format!("fd/{descriptor}")));
    left_there.or_else(|| words(front, "cmdline")).unwrap_or_default()
}

/// Leaves this process's command line in memory that the keeper can read. Where an emulator such as
/// qemu runs the programs, /proc/PID/cmdline is the emulator's command line.
fn leave_command_line() -> std::io::Result<OwnedFd> {
    let mut memory = File::from(memfd_create("command-line", MemfdFlags::CLOEXEC)?);
    let words = std::env::args_os().map(OsString::into_vec);
    memory.write_all(&words.flat_map(|word| [word, vec![0]].concat()).collect::<Vec<u8>>())?;
    Ok(memory.into())
}

/// The front's process id from the command line. `None` where this process is no keeper.
fn front() -> Option<Pid> {
    let mut arguments = std::env::args_os();
    let is_keeper = arguments.next().as_deref() == Some(OsStr::new(KEEPER));
    let pid = arguments.next().filter(|_| is_keeper)?;
    pid.to_str()?.parse().ok().and_then(Pid::from_raw)
}

/// The process that the user sees as the job: the front, or this one where it works alone.
pub fn visible() -> Pid {
    front().unwrap_or_else(getpid)
}

/// The work that the two processes guard.
#[derive(Clone, Copy)]
pub enum Work {
    /// The ranks of this node. `reads_input` says whether a rank reads standard input, and
    /// `is_agent` whether a starter has started this node.
    Ranks { reads_input: bool, is_agent: bool },
    /// The commands that reach the hosts of a job.
    Hosts,
}

impl Work {
    /// Ends what is left of the work.
    fn end_all(self) {
        match self {
            Work::Ranks { .. } => orphans::end_all(Instant::now() + END),
            Work::Hosts => orphans::kill_other_programs(),
        }
    }
}

/// The keeper, which has ended.
pub struct Ended {
    pid: i32,
    how: How,
}

impl Ended {
    /// The exit code of the tool.
    pub fn code(&self) -> u8 {
        self.how.code()
    }

    /// The words for a keeper that was killed. `what` says what the keeper is.
    pub fn told(&self, what: &str) -> Option<String> {
        let Ended { pid, how } = self;
        let is_killed = matches!(how, How::Signalled(_));
        is_killed.then(|| format!("its process {KEEPER} (pid {pid}), {what}, {how}"))
    }
}

/// The part of a process in the work.
pub enum Part {
    /// This process was the front, and the keeper has ended.
    Front(Ended),
    /// This process is to do the work: as the keeper, or alone where no keeper can be started. The
    /// signals that do not end the job are caught.
    Worker(Signals),
}

/// Starts the keeper and waits for its end, unless this process is to do the work itself.
pub fn stand_guard(work: Work) -> Result<Part, Failure> {
    if let Some(front) = front() {
        let signals = Signals::catch_early()?;
        end_with(front, work)?;
        return Ok(Part::Worker(signals));
    }
    let mut signals = Signals::catch()?;
    orphans::adopt();
    let mut keeper = Command::new("/proc/self/exe");
    keeper.arg0(KEEPER).arg(std::process::id().to_string()).process_group(0);
    // A keeper that cannot read this memory reads /proc/PID/cmdline instead. `line` keeps the
    // memory until this function returns, which is after the keeper's end.
    let line = leave_command_line().ok();
    keeper.args(line.iter().map(|line| line.as_raw_fd().to_string()));
    // The keeper is in the background of a terminal, so it must not read there.
    if matches!(work, Work::Ranks { reads_input: true, .. }) && std::io::stdin().is_terminal() {
        keeper.stdin(Stdio::piped());
    }
    match keeper.spawn() {
        Ok(mut keeper) => {
            if let Some(to) = keeper.stdin.take() {
                copy_terminal(to).map_err(|error| Failure::new(1, format!("cannot read the terminal: {error}")))?;
            }
            Ok(Part::Front(wait_for(&mut keeper, &mut signals, work)))
        }
        // There is no /proc here, or this user may start no more processes.
        Err(_) => Ok(Part::Worker(signals)),
    }
}

/// Passes signals on to the keeper until it has ended. A signal that does not end the job waits
/// until the keeper catches it, because it would end or stop a keeper that has only just started.
/// Says, once, that somebody has stopped the keeper, because the keeper does nothing then. Ctrl-Z
/// stops the ranks and the front, and never the keeper. An agent says nothing: its starter names
/// the hosts that do not obey.
fn wait_for(keeper: &mut Child, signals: &mut Signals, work: Work) -> Ended {
    let pid = Pid::from_child(keeper);
    let mut stop_is_told = matches!(work, Work::Ranks { is_agent: true, .. });
    // The signals that the keeper has not got yet.
    let mut held: Vec<Signal> = Vec::new();
    let status = loop {
        if let Ok(Some(status)) = keeper.try_wait() {
            break status;
        }
        let is_stopped =
            matches!(waitid(WaitId::Pid(pid), WaitIdOptions::STOPPED | WaitIdOptions::NOHANG), Ok(Some(_)));
        if is_stopped && !stop_is_told {
            stop_is_told = true;
            let pid = pid.as_raw_nonzero();
            // If this write blocked, the front would pass on no signals.
            say_at_once(
                format!("devicemesh run: its process {KEEPER} (pid {pid}) is stopped, and does not react to signals and --timeout: continue it with kill -CONT {pid}\n").as_bytes(),
            );
        }
        // A signal may interrupt poll. Then the next call of poll returns at once.
        let pause = Some(&LOOK).filter(|_| !held.is_empty());
        let _ = poll(&mut [PollFd::new(&*signals, PollFlags::IN)], pause);
        let new = signals.take().into_iter().filter_map(Signal::from_named_raw);
        for signal in new.filter(|signal| *signal != Signal::CHILD) {
            // SIGCONT drops a SIGTSTP that the keeper has not got yet, as the kernel drops it.
            // SIGCONT is never held, because it is also for a keeper that is stopped.
            if signal == Signal::CONT {
                held.retain(|held| *held != Signal::TSTP);
                let _ = kill_process(pid, signal);
            } else if !held.contains(&signal) {
                held.push(signal);
            }
        }
        held.retain(|signal| {
            let is_ready = is_ready_for(pid, *signal);
            if is_ready {
                let _ = kill_process(pid, *signal);
            }
            !is_ready
        });
    };
    work.end_all();
    Ended { pid: pid.as_raw_nonzero().get(), how: status.into() }
}

/// Does not return once the front has ended. The main thread calls this before it takes the end of
/// a rank for a failure, because the ranks are killed when the front has ended.
pub fn wait_if_ending() {
    while FRONT_HAS_ENDED.load(Ordering::SeqCst) {
        std::thread::sleep(END);
    }
}

/// Starts a thread that ends this process and all its descendants when the front ends. The main
/// thread may be blocked, for example by a terminal that takes no output.
fn end_with(front: Pid, work: Work) -> Result<(), Failure> {
    let cannot = |error| {
        let advice = advice_on_limits(&error);
        Failure::new(1, format!("cannot watch the process that has started this one: {error}{advice}"))
    };
    // The keeper is in the background of the terminal. If the terminal stopped it (`stty tostop`),
    // the job would hang, and no signal would end it.
    Stops::Ignored.set().map_err(cannot)?;
    let mut ended = signal_hook::iterator::Signals::new([FRONT_ENDED.as_raw()]).map_err(cannot)?;
    let watch = move || {
        ended.forever().next();
        FRONT_HAS_ENDED.store(true, Ordering::SeqCst);
        if let Some(word) = LAST_WORD.get() {
            say_at_once(word);
        }
        let _no_more = starting();
        work.end_all();
        exit(128 + SIGKILL);
    };
    std::thread::Builder::new().name("dm-guard".to_owned()).spawn(watch).map_err(cannot)?;
    let _ = rustix::thread::set_name(c"dm-ranks");
    let armed = set_parent_process_death_signal(Some(FRONT_ENDED));
    armed.map_err(|error| cannot(error.into()))?;
    // The front may have ended before the kernel was asked to tell.
    if getppid() != Some(front) {
        exit(128 + SIGKILL);
    }
    Ok(())
}
