//! Processes of this machine: their identity, and whether they live.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::fork::Private;

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
            Some(stat) => !self.lives_by(&stat) || stat.exiting,
            None => !exists(self.pid),
        }
    }

    /// Whether that process exists and is not a zombie. Where `/proc` does not tell, for example
    /// because this process can open no more files, any process of that number counts.
    fn lives(self) -> bool {
        stat(self.pid).map_or_else(|| exists(self.pid), |stat| self.lives_by(&stat))
    }

    /// Whether `stat` is about this process, and the process is no zombie.
    fn lives_by(self, stat: &Stat) -> bool {
        (self.start == 0 || stat.start == self.start) && !matches!(stat.state, b'Z' | b'X' | b'x')
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

/// The fields of a process's `stat` file that the engine needs.
struct Stat {
    /// The letter of its state, for example `Z` for a zombie.
    state: u8,
    /// The clock ticks between boot and its start.
    start: u64,
    /// Whether the kernel is ending the process. Its descriptors may be closed already while it
    /// still counts as alive.
    exiting: bool,
}

/// `PF_EXITING` of the kernel's `linux/sched.h`.
const EXITING: u64 = 4;

/// Reads the `stat` file of the process's first thread, which has the process's own fields.
///
/// Programs that emulate a processor (qemu-user) make up `/proc/<pid>/stat` for the process itself,
/// with another start time than other processes read. The files of threads are the kernel's own.
fn stat(pid: u32) -> Option<Stat> {
    // One read returns the whole line, and the fields that are needed are in its first 1024 bytes.
    // A rank of a large world reads many of these files, so the buffer is small.
    let mut line = [0; 1024];
    let length = File::open(format!("/proc/{pid}/task/{pid}/stat")).ok()?.read(&mut line).ok()?;
    parse_stat(&line[..length])
}

/// Reads the fields 3 (state), 9 (flags) and 22 (start time) of a `stat` file. Field 2, the
/// name, may hold any character, but it ends at the last parenthesis.
fn parse_stat(line: &[u8]) -> Option<Stat> {
    let close = line.iter().rposition(|&byte| byte == b')')?;
    let mut fields = line.get(close + 2..)?.split(|&byte| byte == b' ');
    let state = *fields.next()?.first()?;
    let mut number = |at: usize| std::str::from_utf8(fields.nth(at)?).ok()?.parse::<u64>().ok();
    let (flags, start) = (number(5)?, number(12)?);
    Some(Stat { state, start, exiting: flags & EXITING != 0 })
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
        // When the descriptor was opened, the number may have belonged to another process already.
        let may_hold = HELD.load(Ordering::Relaxed) < MOST_HELD;
        let pidfd = may_hold.then(|| Private::open(|| pidfd_open(id.pid)).ok()).flatten().filter(|_| id.lives());
        // Only the thread that holds the lock counts up, so the number does not pass the limit.
        HELD.fetch_add(usize::from(pidfd.is_some()), Ordering::Relaxed);
        let process = Arc::new(Process { id, pidfd, looked: AtomicU64::new(0), is_dead: AtomicBool::new(false) });
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
    /// second. It finds the end of a process that has no descriptor within a second.
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
            let dead = due.into_iter().filter(|(index, ago)| match *ago >= LONG_AGO {
                true => processes[*index].has_ended(),
                false => processes[*index].has_ended_lately(),
            });
            dead.map(|(index, _)| index).min()
        })
    }

    /// When the process was looked at last.
    fn last_look(&self) -> Duration {
        match self.looked.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            millis => Duration::from_millis(millis),
        }
    }

    /// Whether the process has ended, by its number and its start time.
    fn has_ended(&self) -> bool {
        self.note_look(!self.id.lives())
    }

    /// Whether the process has ended, where the process still had its number a moment ago. A
    /// descriptor that is open only for this check costs a fifth of a read of the start time.
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

    /// Returns the index of the first of `processes` of which it is known that it has ended, or
    /// whose descriptor says so. One system call asks for all descriptors.
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

/// Returns the time since this process first asked, plus [`LONG_AGO`].
fn since_start() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    // Because of `LONG_AGO`, a process that was never checked counts as one checked long ago.
    START.get_or_init(Instant::now).elapsed() + LONG_AGO
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_confuse_stat() {
        let line = b"42 (a) R 1 (b) S 1 2 3 4 5 4194308 7 8 9 10 11 12 13 14 15 16 17 18 987654 20\n";
        let stat = parse_stat(line).unwrap();
        assert_eq!((stat.state, stat.start, stat.exiting), (b'S', 987_654, true));
        assert!(parse_stat(b"").is_none());
        assert!(parse_stat(b"1 (x)").is_none());
        assert!(parse_stat(b"1 (x) S 1 2").is_none());
    }

    fn without_descriptor(id: ProcessId) -> Arc<Process> {
        Arc::new(Process { id, pidfd: None, looked: AtomicU64::new(0), is_dead: AtomicBool::new(false) })
    }

    fn start_sleep() -> (Child, ProcessId) {
        let child = Command::new("sleep").arg("100").stdin(Stdio::null()).spawn().unwrap();
        let id = ProcessId { pid: child.id(), start: stat(child.id()).unwrap().start };
        (child, id)
    }

    #[test]
    fn the_ends_of_more_processes_than_have_descriptors_are_seen() {
        let mut children: Vec<(Child, ProcessId)> = (0..MOST_HELD + 8).map(|_| start_sleep()).collect();
        let watched: Vec<Arc<Process>> = children.iter().map(|(_, id)| Process::watch(*id)).collect();
        let held = watched.iter().filter(|process| process.pidfd.is_some()).count();
        // Other tests of this process watch processes, too.
        assert!(held > 0 && held <= MOST_HELD, "{held}");
        let mut alive: Vec<usize> = (0..watched.len()).collect();
        // The last ones have no descriptor.
        for victim in [0, MOST_HELD + 7, MOST_HELD + 3] {
            let list = |alive: &[usize]| alive.iter().map(|at| watched[*at].clone()).collect::<Vec<_>>();
            assert_eq!(Process::first_dead_in_turn(&list(&alive)), None);
            children[victim].0.kill().unwrap();
            let started = Instant::now();
            let found = loop {
                if let Some(found) = Process::first_dead_in_turn(&list(&alive)) {
                    break alive[found];
                }
                assert!(started.elapsed() < Duration::from_secs(10), "the end of {victim} was not seen");
                std::thread::sleep(Duration::from_millis(20));
            };
            assert_eq!(found, victim);
            assert_eq!(Process::first_dead(&list(&alive)).map(|at| alive[at]), Some(victim), "it stays dead");
            alive.retain(|at| *at != victim);
        }
        for (child, _) in &mut children {
            let _ = child.kill();
            child.wait().unwrap();
        }
    }

    #[test]
    fn a_process_whose_number_was_reused_long_ago_is_dead() {
        let (mut child, mut id) = start_sleep();
        id.start += 1;
        assert_eq!(Process::first_dead_in_turn(&[without_descriptor(id)]), Some(0));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_killed_child_is_dead_while_still_a_zombie() {
        let (mut child, id) = start_sleep();
        let watched = Process::watch(id);
        let without_fd = without_descriptor(id);
        assert!(Arc::ptr_eq(&watched, &Process::watch(id)), "one descriptor for each process");
        assert_eq!(Process::first_dead(&[watched.clone(), without_fd.clone()]), None);
        child.kill().unwrap();
        let started = Instant::now();
        let dead = |process| Process::first_dead(std::slice::from_ref(process)).is_some();
        while !dead(&watched) || !dead(&without_fd) {
            assert!(started.elapsed() < Duration::from_secs(10), "the death was not seen");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(exists(id.pid), "a zombie still has its number");
        child.wait().unwrap();
        assert!(!exists(id.pid));
        assert_eq!(Process::first_dead(&[watched]), Some(0));
    }

    /// A process has its number until its parent has waited for it. Here one thread waits for the
    /// child, and this thread asks about the child at the same time.
    #[test]
    fn a_process_that_is_ending_stays_so_while_its_parent_takes_its_number_away() {
        for _ in 0..300 {
            let mut child = Command::new("true").stdin(Stdio::null()).spawn().unwrap();
            let id = ProcessId { pid: child.id(), start: stat(child.id()).unwrap().start };
            let parent = std::thread::spawn(move || child.wait().unwrap());
            let started = Instant::now();
            while !id.is_ending() {
                assert!(started.elapsed() < Duration::from_secs(10), "the end was not seen");
            }
            while !parent.is_finished() {
                assert!(id.is_ending(), "the process was ending, and then it was not");
            }
            parent.join().unwrap();
            assert!(id.is_ending());
        }
    }

    #[test]
    fn a_later_process_of_the_same_number_is_another_one() {
        let mut id = ProcessId::current();
        assert!(id.lives() && !id.is_ending());
        id.start += 1;
        assert_eq!(Process::first_dead(&[Process::watch(id)]), Some(0));
    }
}
