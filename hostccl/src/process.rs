//! Processes of this machine: their identity, and whether they live.

mod stat;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use self::stat::{Stat, stat};
use crate::fork::Private;

pub(crate) use self::stat::link_of_file;

/// The identity of a process. Its start time tells it from a later process of the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)] // It lies in shared memory.
pub struct ProcessId {
    /// The process number.
    pub pid: u32,
    /// The clock ticks between boot and the start of the process; 0 where `/proc` does not tell.
    pub start: u64,
}

impl ProcessId {
    /// Returns the identity of this process. The start time is kept together with the number of the
    /// process that read it, because a forked child is another process.
    pub fn current() -> ProcessId {
        static READ: AtomicU32 = AtomicU32::new(0);
        static START: AtomicU64 = AtomicU64::new(0);
        let pid = std::process::id();
        if READ.load(Ordering::Acquire) == pid {
            return ProcessId { pid, start: START.load(Ordering::Relaxed) };
        }
        let Some(stat) = stat(pid) else { return ProcessId { pid, start: 0 } };
        START.store(stat.start, Ordering::Relaxed);
        READ.store(pid, Ordering::Release);
        ProcessId { pid, start: stat.start }
    }

    /// Whether the process has ended or is about to end, so that its descriptors may be closed
    /// already.
    pub(crate) fn is_ending(self) -> bool {
        // One reading decides. The process may be about to end at a first reading and be gone at a
        // second one, and then the two together would say that it lives.
        match stat(self.pid) {
            Some(stat) => !self.is_of(&stat) || stat.exiting && !stat.has_living_thread(self.pid),
            None => !exists(self.pid),
        }
    }

    /// Whether that process exists and has a thread that has not ended. Where `/proc` does not
    /// tell, for example because this process can open no more files, any process of that number
    /// counts.
    fn lives(self) -> bool {
        stat(self.pid).map_or_else(
            || exists(self.pid),
            |stat| self.is_of(&stat) && (!stat.has_ended() || stat.has_living_thread(self.pid)),
        )
    }

    /// Whether that process has its number still. It may be a zombie.
    fn has_its_number(self) -> bool {
        stat(self.pid).map_or_else(|| exists(self.pid), |stat| self.is_of(&stat))
    }

    /// Whether `stat` is about this process.
    fn is_of(self, stat: &Stat) -> bool {
        self.start == 0 || stat.start == self.start
    }
}

fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers. It returns a new descriptor, which is closed on exec,
    // or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) } as RawFd;
    // SAFETY: a non-negative result is a descriptor that nobody else owns.
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd) }) }
}

fn exists(pid: u32) -> bool {
    // SAFETY: signal 0 is not delivered; the call only asks whether the process exists.
    let answered = unsafe { libc::kill(pid as libc::pid_t, 0) } == 0;
    answered || std::io::Error::last_os_error().raw_os_error() == Some(libc::EPERM)
}

/// The most descriptors of other processes that this process keeps. This process checks the
/// processes without a descriptor in turn ([`Process::first_dead_in_turn`]), so that a program with
/// many ranks on one host has most of its descriptors for itself.
const MOST_HELD: usize = 64;
/// How many descriptors of other processes this process keeps.
static HELD: AtomicUsize = AtomicUsize::new(0);
/// How many processes without a descriptor one call of [`Process::first_dead_in_turn`] checks at
/// most. With a call every 100 ms, each of up to 1024 processes is checked once a second.
const MOST_IN_TURN: usize = 104;
/// A look in turn passes over a process that was looked at within this time.
const AGAIN: Duration = Duration::from_millis(700);
/// When a process was not checked for this time, its number may belong to another process by now.
/// So the next check reads the start time, too.
const LONG_AGO: Duration = Duration::from_secs(2);
/// A number can change hands even between two checks less than [`LONG_AGO`] apart. So a check reads
/// the start time, too, when it was last read this long ago.
const READ_AGAIN: Duration = Duration::from_secs(30);

/// A watched process. All communicators of this process share what is known of it.
#[derive(Debug)]
pub struct Process {
    /// Which process it is.
    id: ProcessId,
    /// A descriptor that is readable once the process has ended. `None` where there are
    /// [`MOST_HELD`] others, and where the kernel or the limit of descriptors refuses one.
    pidfd: Option<Private<OwnedFd>>,
    /// When this process was looked at last, in milliseconds since [`since_start`] began; 0 for
    /// never. Only processes without a descriptor have a time.
    looked: AtomicU64,
    /// When the start time of this process was read last, in the same units; 0 for never.
    read: AtomicU64,
    /// Whether some thread has found that the process has ended.
    is_dead: AtomicBool,
}

impl Process {
    /// Returns the watched process `id`, which is shared while somebody else watches it.
    pub fn watch(id: ProcessId) -> Arc<Process> {
        static WATCHED: OnceLock<Mutex<HashMap<ProcessId, Weak<Process>>>> = OnceLock::new();
        let mut watched = WATCHED.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(process) = watched.get(&id).and_then(Weak::upgrade) {
            return process;
        }
        watched.retain(|_, process| process.strong_count() > 0);
        // The number may have belonged to another process when the descriptor was opened, so the
        // start time is compared afterwards.
        let may_hold = HELD.load(Ordering::Relaxed) < MOST_HELD;
        let pidfd = may_hold.then(|| Private::open(|| pidfd_open(id.pid)).ok()).flatten();
        let pidfd = pidfd.filter(|_| id.has_its_number());
        // Only the thread that holds the lock counts up, so the number does not pass the limit.
        HELD.fetch_add(usize::from(pidfd.is_some()), Ordering::Relaxed);
        let process = Arc::new(Process {
            id,
            pidfd,
            looked: AtomicU64::new(0),
            read: AtomicU64::new(0),
            is_dead: AtomicBool::new(false),
        });
        watched.insert(id, Arc::downgrade(&process));
        process
    }

    /// The identity of the process.
    pub(crate) fn id(&self) -> ProcessId {
        self.id
    }

    /// Returns the index of the first of `processes` that has ended.
    pub fn first_dead(processes: &[Arc<Process>]) -> Option<usize> {
        let known = Process::first_known_dead(processes);
        known.or_else(|| {
            // All are looked at. So when many have ended together, the next call knows them.
            let others = processes.iter().enumerate().filter(|(_, process)| process.pidfd.is_none());
            others.filter(|(_, process)| process.has_ended()).map(|(index, _)| index).min()
        })
    }

    /// Does what [`first_dead`](Process::first_dead) does, for a caller that asks about ten times a
    /// second. It notices within a second that a process without a descriptor has ended.
    pub fn first_dead_in_turn(processes: &[Arc<Process>]) -> Option<usize> {
        let known = Process::first_known_dead(processes);
        known.or_else(|| {
            let now = since_start();
            let mut due: Vec<(usize, Duration)> = processes
                .iter()
                .enumerate()
                .filter(|(_, process)| process.pidfd.is_none())
                .map(|(index, process)| (index, now.saturating_sub(process.last_look())))
                .filter(|(_, ago)| *ago >= AGAIN)
                .collect();
            // Those that were looked at longest ago come first.
            due.sort_by_key(|(_, ago)| std::cmp::Reverse(*ago));
            due.truncate(MOST_IN_TURN);
            let dead = due.into_iter().filter(|(index, ago)| {
                let process = &processes[*index];
                match *ago >= LONG_AGO || now.saturating_sub(process.last_read()) >= READ_AGAIN {
                    true => process.has_ended(),
                    false => process.has_ended_lately(),
                }
            });
            dead.map(|(index, _)| index).min()
        })
    }

    /// When the process was looked at last, on the clock of [`since_start`]; 0 for never.
    fn last_look(&self) -> Duration {
        Duration::from_millis(self.looked.load(Ordering::Relaxed))
    }

    /// When the start time of the process was read last.
    fn last_read(&self) -> Duration {
        Duration::from_millis(self.read.load(Ordering::Relaxed))
    }

    /// Whether the process has ended, by its number and its start time.
    fn has_ended(&self) -> bool {
        self.read.store(since_start().as_millis() as u64, Ordering::Relaxed);
        self.note_look(!self.id.lives())
    }

    /// Whether the process has ended. The caller knows that the process still had its number less
    /// than [`LONG_AGO`] ago. A descriptor that is open only for this check costs a fifth of a read
    /// of the start time.
    fn has_ended_lately(&self) -> bool {
        let Ok(pidfd) = Private::open(|| pidfd_open(self.id.pid)) else { return self.has_ended() };
        let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: the structure is valid, and with a timeout of 0 the call returns at once.
        match unsafe { libc::poll(&raw mut poll, 1, 0) } {
            polled if polled >= 0 => self.note_look(poll.revents & libc::POLLIN != 0),
            _ => self.has_ended(),
        }
    }

    /// Notes that the process was looked at now, and whether it has ended. Returns whether it has.
    fn note_look(&self, has_ended: bool) -> bool {
        self.looked.store(since_start().as_millis() as u64 + 1, Ordering::Relaxed);
        self.is_dead.fetch_or(has_ended, Ordering::Relaxed);
        has_ended
    }

    /// Returns the index of the first of `processes` that an earlier look has found ended, or whose
    /// descriptor says that it has ended. One system call asks for all descriptors.
    fn first_known_dead(processes: &[Arc<Process>]) -> Option<usize> {
        let mut polls: Vec<libc::pollfd> = processes
            .iter()
            .map(|process| libc::pollfd {
                // The system call skips negative descriptors.
                fd: process.pidfd.as_ref().map_or(-1, |pidfd| pidfd.as_raw_fd()),
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        // SAFETY: the array is valid for its length. With a timeout of 0 the call returns at once.
        let polled = unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, 0) } >= 0;
        processes.iter().zip(&polls).position(|(process, poll)| match &process.pidfd {
            Some(_) if polled => poll.revents & libc::POLLIN != 0,
            Some(_) => !process.id.lives(),
            None => process.is_dead.load(Ordering::Relaxed),
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        HELD.fetch_sub(usize::from(self.pidfd.is_some()), Ordering::Relaxed);
    }
}

/// Returns the time since this process first asked, plus [`READ_AGAIN`].
fn since_start() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    // The sum puts 0, which stands for never, far enough in the past for both limits.
    START.get_or_init(Instant::now).elapsed() + READ_AGAIN
}
