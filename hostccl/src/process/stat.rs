//! The kernel's description of a process and of its threads in `/proc`.
//!
//! A process lives on when its main thread ends alone, by `pthread_exit`. The files of the process
//! in `/proc/<pid>` are those of its main thread. So they then say `Z`, as for a process that has
//! ended, and show no open files. Only the files of the other threads tell the two apart.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::PathBuf;

/// The fields of a thread's `stat` file that the engine needs.
pub(super) struct Stat {
    /// The letter of its state, for example `Z` for a zombie.
    pub(super) state: u8,
    /// The clock ticks between boot and its start.
    pub(super) start: u64,
    /// Whether the kernel is ending the thread. The thread's descriptors may be closed already
    /// while it still counts as alive.
    pub(super) exiting: bool,
    /// Whether SIGKILL is pending for the thread. A thread that waits in a driver ends only after
    /// that wait.
    is_killed: bool,
    /// The number of threads of the process. The main thread counts until the process has ended.
    pub(super) threads: u64,
}

/// `PF_EXITING` of the kernel's `linux/sched.h`.
const EXITING: u64 = 4;
/// SIGKILL in a set of signals.
const KILL: u64 = 1 << (libc::SIGKILL - 1);

impl Stat {
    /// Whether the thread has ended.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self.state, b'Z' | b'X' | b'x')
    }

    /// Whether process `pid`, whose main thread this is, has another thread that the kernel is not
    /// ending. A killed process has no such thread, even if the last ones take long to end.
    pub(super) fn has_living_thread(&self, pid: u32) -> bool {
        self.threads > 1 && threads(pid).is_none_or(|mut others| others.any(|thread| may_live(pid, thread)))
    }
}

/// Reads the `stat` file of the process's main thread, which has the process's own fields.
///
/// Programs that emulate a processor (qemu-user) make up `/proc/<pid>/stat` for the process itself,
/// with another start time than other processes read. The files of threads are the kernel's own.
pub(super) fn stat(pid: u32) -> Option<Stat> {
    stat_of_thread(pid, pid).ok()
}

fn stat_of_thread(pid: u32, thread: u32) -> io::Result<Stat> {
    // One read returns the whole line, and the fields that are needed are in its first 1024 bytes.
    // A rank of a large world reads many of these files, so the buffer is small.
    let mut line = [0; 1024];
    let length = File::open(format!("/proc/{pid}/task/{thread}/stat"))?.read(&mut line)?;
    parse(&line[..length]).ok_or_else(|| ErrorKind::InvalidData.into())
}

/// Reads the fields 3 (state), 9 (flags), 20 (number of threads), 22 (start time) and 31 (the
/// thread's pending signals) of a `stat` file. Field 2, the name, may hold any character, but it
/// ends at the last parenthesis.
pub(super) fn parse(line: &[u8]) -> Option<Stat> {
    let close = line.iter().rposition(|&byte| byte == b')')?;
    let mut fields = line.get(close + 2..)?.split(|&byte| byte == b' ');
    let state = *fields.next()?.first()?;
    let mut number = |at: usize| std::str::from_utf8(fields.nth(at)?).ok()?.parse::<u64>().ok();
    let (flags, threads, start) = (number(5)?, number(10)?, number(1)?);
    let pending = number(8).unwrap_or(0);
    Some(Stat { state, start, exiting: flags & EXITING != 0, is_killed: pending & KILL != 0, threads })
}

/// The threads of a process except its main thread, or `None` where `/proc` does not tell.
fn threads(pid: u32) -> Option<impl Iterator<Item = u32>> {
    let entries = match fs::read_dir(format!("/proc/{pid}/task")) {
        Ok(entries) => Some(entries),
        Err(reason) if is_gone(&reason) => None,
        Err(_) => return None,
    };
    let number = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    Some(entries.into_iter().flatten().filter_map(number).filter(move |thread| *thread != pid))
}

/// Whether the kernel is not ending that thread, and is not about to. Where `/proc` does not tell,
/// the thread counts as living.
fn may_live(pid: u32, thread: u32) -> bool {
    stat_of_thread(pid, thread).map_or_else(|reason| !is_gone(&reason), |stat| !stat.exiting && !stat.is_killed)
}

/// Whether a file of `/proc` could not be read because the process or thread has ended.
fn is_gone(reason: &io::Error) -> bool {
    reason.kind() == ErrorKind::NotFound || reason.raw_os_error() == Some(libc::ESRCH)
}

/// Reads the link in `/proc` of the file that a process has open as `fd`. Returns the path of the
/// link, too.
pub(crate) fn link_of_file(pid: u32, fd: i32) -> (String, io::Result<PathBuf>) {
    let path = format!("/proc/{pid}/fd/{fd}");
    let link = fs::read_link(&path);
    if link.is_ok() {
        return (path, link);
    }
    // Where the main thread has ended, another thread shows the files.
    let main = stat(pid).filter(|main| main.exiting && main.threads > 1);
    let other = main.and_then(|_| threads(pid)?.find(|thread| may_live(pid, *thread)));
    match other {
        Some(thread) => {
            let path = format!("/proc/{pid}/task/{thread}/fd/{fd}");
            let link = fs::read_link(&path);
            (path, link)
        }
        None => (path, link),
    }
}
