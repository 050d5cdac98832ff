//! Processes, as Linux describes them in /proc. Each function returns nothing for a process that
//! has ended meanwhile or that may not be looked at.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;

use rustix::process::geteuid;

/// The process numbers of all processes that are visible here. There are none without /proc.
pub fn pids() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").ok().into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// The process numbers of the processes whose memory and environment this user may read: the user's
/// own, and for root those of all users.
pub fn readable_pids() -> impl Iterator<Item = u32> {
    let user = geteuid();
    let is_own = move |pid: u32| fs::metadata(format!("/proc/{pid}")).is_ok_and(|folder| folder.uid() == user.as_raw());
    pids().filter(move |pid| user.is_root() || is_own(*pid))
}

/// Whether the processes of all users are visible here. The option `hidepid` of /proc hides those
/// of other users, and process 1 with them.
pub fn sees_all_users() -> bool {
    geteuid().is_root() || Stat::read(1).is_some()
}

/// Returns the words of a file of the process in which a zero byte ends each word: `cmdline` or
/// `environ`.
pub fn words(pid: u32, file: &str) -> Option<Vec<OsString>> {
    Some(split(&fs::read(format!("{}/{file}", folder(pid))).ok()?))
}

fn split(bytes: &[u8]) -> Vec<OsString> {
    if bytes.is_empty() {
        return Vec::new();
    }
    let words = bytes.strip_suffix(b"\0").unwrap_or(bytes);
    words.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec())).collect()
}

/// The threads of a process.
pub fn threads(pid: u32) -> impl Iterator<Item = u32> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).ok().into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// The letter of the process's state: R runs, S sleeps, D cannot be interrupted, T is stopped, t is
/// stopped by a debugger, Z has ended. A process whose main thread has ended alone, by
/// `pthread_exit`, has the state of one of its other threads.
pub fn state(pid: u32) -> Option<char> {
    state_in(&format!("{}/stat", folder(pid)))
}

/// The folder in /proc that describes the memory and the open files of a process. The folder of the
/// process is that of its main thread, which shows nothing after this thread has ended. While other
/// threads live, the folder is that of one of these.
pub fn folder(pid: u32) -> String {
    let own = format!("/proc/{pid}");
    if state_in(&format!("{own}/stat")) != Some('Z') {
        return own;
    }
    let lives = |thread: &u32| state_of_thread(pid, *thread).is_some_and(|state| !matches!(state, 'Z' | 'X'));
    threads(pid).find(lives).map_or(own, |thread| format!("/proc/{pid}/task/{thread}"))
}

/// The letter of a thread's state.
pub fn state_of_thread(pid: u32, thread: u32) -> Option<char> {
    state_in(&format!("/proc/{pid}/task/{thread}/stat"))
}

fn state_in(path: &str) -> Option<char> {
    let text = fs::read(path).ok()?;
    String::from_utf8_lossy(&text).rsplit_once(") ")?.1.chars().next()
}

/// The fields of /proc/PID/stat that the tool uses.
pub struct Stat {
    /// The process number of the parent.
    pub parent: u32,
    /// The session. It is 0 where its leader is outside this PID namespace. Calls like getsid(2)
    /// fail in rustix there, because 0 is no process number.
    pub session: u32,
    /// Whether the process is stopped, by Ctrl-Z or by a debugger.
    pub is_stopped: bool,
    /// When the process was started: the time since the host's start, in clock ticks.
    pub started: u64,
    /// The CPU time of the process and of its threads, in clock ticks.
    pub ticks: u64,
}

impl Stat {
    pub fn read(pid: u32) -> Option<Stat> {
        // The program's name may have any bytes.
        Stat::parse(&String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/stat")).ok()?))
    }

    fn parse(text: &str) -> Option<Stat> {
        // The fields from the third one on follow the program's name, which may contain ") ".
        let fields: Vec<&str> = text.rsplit_once(") ")?.1.split(' ').collect();
        let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        let is_stopped = matches!(*fields.first()?, "T" | "t");
        let parent = fields.get(1)?.parse().ok()?;
        let session = fields.get(3)?.parse().ok()?;
        Some(Stat { parent, session, is_stopped, started: number(22)?, ticks: number(14)? + number(15)? })
    }
}

/// Whether a process is this ancestor or one of its descendants.
pub fn descends(pid: u32, ancestor: u32) -> bool {
    let parent = |pid: &u32| Stat::read(*pid).map(|stat| stat.parent).filter(|parent| *parent > 0);
    // A number that is used anew meanwhile could make a circle.
    std::iter::successors(Some(pid), parent).take(64).any(|pid| pid == ancestor)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use super::{Stat, descends, folder, pids, split, state, words};

    #[test]
    fn the_fields_follow_the_name_whatever_it_contains() {
        let text = "7 (a) T 9 (b) S 5 7 6 0 -1 4194560 1 0 0 0 30 4 0 0 20 0 1 0 1234 0 0";
        let stat = Stat::parse(text).unwrap();
        assert_eq!((stat.parent, stat.session, stat.is_stopped), (5, 6, false));
        assert_eq!((stat.started, stat.ticks), (1234, 34));
        assert!(Stat::parse(&text.replace(" S 5", " t 5")).unwrap().is_stopped);
        assert!(Stat::parse("7 (a) S 5").is_none() && Stat::parse("").is_none());
    }

    #[test]
    fn a_name_may_have_any_bytes() {
        let folder = std::env::temp_dir().join(format!("dm-proc-{}", std::process::id()));
        let program = folder.join(OsStr::from_bytes(b"\xff) S"));
        std::fs::create_dir(&folder).unwrap();
        symlink("/bin/sleep", &program).unwrap();
        let mut child = Command::new(&program).arg0("sleep").arg("60").spawn().unwrap();
        let parent = Stat::read(child.id()).map(|stat| stat.parent);
        child.kill().unwrap();
        child.wait().unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(parent, Some(std::process::id()));
    }

    #[test]
    fn this_process_is_found() {
        let pid = std::process::id();
        assert!(pids().any(|other| other == pid));
        assert!(Stat::read(pid).unwrap().parent > 0);
        let arguments: Vec<_> = std::env::args_os().collect();
        assert_eq!(words(pid, "cmdline").unwrap(), arguments);
        assert!(words(pid, "no-such-file").is_none());
    }

    #[test]
    fn a_process_whose_main_thread_has_ended_is_there_while_another_thread_lives() {
        let program = "import ctypes, sys, threading\nthreading.Thread(target=sys.stdin.read).start()\nctypes.CDLL(None).pthread_exit(None)";
        let mut child = Command::new("python3").args(["-c", program]).stdin(Stdio::piped()).spawn().unwrap();
        let (pid, began) = (child.id(), Instant::now());
        let own = format!("/proc/{pid}");
        while folder(pid) == own {
            assert!(began.elapsed() < Duration::from_secs(60), "the main thread does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        let (letter, command) = (state(pid), words(pid, "cmdline").unwrap());
        child.kill().unwrap();
        let ended = loop {
            match state(pid) {
                Some('Z') => break folder(pid),
                _ => assert!(began.elapsed() < Duration::from_secs(60), "the process does not end"),
            }
        };
        child.wait().unwrap();
        assert!(matches!(letter, Some('S' | 'R')), "{letter:?}");
        // The first word may be a path.
        assert_eq!(command[1..], ["-c", program]);
        assert_eq!(ended, own);
    }

    /// In a container the tool itself is mostly process 1.
    #[test]
    fn process_1_is_an_ancestor() {
        let pid = std::process::id();
        let ancestors = std::iter::successors(Some(pid), |pid| Some(Stat::read(*pid)?.parent));
        let first = ancestors.take_while(|pid| *pid > 0).last().unwrap();
        assert!(descends(pid, first), "process {first} has started all others");
        assert!(!descends(pid, 0));
    }

    #[test]
    fn a_zero_byte_ends_each_word() {
        assert!(split(b"").is_empty());
        assert_eq!(split(b"a\0\0b c\0"), ["a", "", "b c"]);
        assert_eq!(split(b"\0"), [""], "one word that is empty");
        assert_eq!(split(b"a\0b"), ["a", "b"], "a program may have written over its command line");
    }
}
