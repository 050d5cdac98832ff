//! Tests of the search for processes and files with recordings.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use nix::sys::ptrace;
use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use super::*;

fn shell(script: &str) -> Child {
    let mut command = Command::new("sh");
    command.args(["-c", script]).stdin(Stdio::piped()).spawn().unwrap()
}

/// A process that sleeps. The kernel shows its environment, where this user may read that.
fn sleeper(command: &mut Command) -> Child {
    let child = command.arg("60").spawn().unwrap();
    while proc::words(child.id(), "environ").is_some_and(|words| words.is_empty()) {
        sleep(Duration::from_millis(1));
    }
    child
}

#[test]
fn a_process_that_was_awake_for_a_moment_sleeps() {
    let (mut reads, mut spins) = (shell("read line"), shell("while :; do :; done"));
    // The shells begin, and one of them then waits for its input.
    while state(reads.id()) != State::Sleeps || state(spins.id()) != State::Computes {
        sleep(Duration::from_millis(1));
    }
    let (mut one, mut other) = (State::Computes, State::Computes);
    look_again_at(vec![(reads.id(), &mut one), (spins.id(), &mut other)]);
    for child in [&mut reads, &mut spins] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert_eq!((one, other), (State::Sleeps, State::Computes));
}
#[test]
fn the_place_of_a_rank_beside_spares_says_nothing_of_the_hosts_other_ranks() {
    let local_size = |mesh_size: &str, local_size: &str| {
        let place = [("RANK", "8"), ("WORLD_SIZE", "10"), ("LOCAL_RANK", "4")];
        let mut command = Command::new("/bin/sleep");
        command.env_clear().envs(place).env("LOCAL_WORLD_SIZE", local_size).env("DM_MESH_SIZE", mesh_size);
        let mut child = sleeper(&mut command);
        let place = super::place(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        place.unwrap().local_size
    };
    assert_eq!(local_size("10", "5"), Some(5));
    assert_eq!(local_size("8", "5"), None);
    assert_eq!(local_size("8", "10"), Some(10), "one host has all ranks");
}

#[test]
fn a_process_that_was_traced_for_a_moment_sleeps() {
    let mut child = shell("read line");
    let pid = child.id();
    let look = || {
        let mut known = State::Traced;
        look_again_at(vec![(pid, &mut known)]);
        known
    };
    while state(pid) != State::Sleeps {
        sleep(Duration::from_millis(1));
    }
    let free = look();
    let traced = Pid::from_raw(pid as i32);
    // A container may forbid this.
    let may_trace = ptrace::seize(traced, ptrace::Options::empty()).is_ok();
    if may_trace {
        ptrace::interrupt(traced).unwrap();
        waitpid(traced, None).unwrap();
    }
    let held = look();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(free, State::Sleeps);
    assert_eq!(held, if may_trace { State::Traced } else { State::Sleeps });
}

/// Root sees the processes of all users. Only root can start one for another user.
#[test]
fn root_finds_the_processes_of_other_users() {
    if !geteuid().is_root() {
        return;
    }
    let mut command = Command::new("/bin/sleep");
    let place = [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")];
    let mut child = sleeper(command.env_clear().envs(place).uid(65534).gid(65534));
    let pid = child.id();
    let file = |started: u64| PathBuf::from(format!("traces/alpha-{}-{started}.dmrec", innermost(pid).unwrap()));
    let started = Stat::read(pid).unwrap().started;
    let found = candidates().remove(&pid);
    let may_read = fs::read(format!("/proc/{pid}/environ")).is_ok();
    let running = Running::now();
    let states = [started, started + 1].map(|started| running.process_of_file(&file(started), innermost(pid).unwrap()));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(matches!(states[0], (found, State::Sleeps | State::Computes) if found == pid), "{states:?}");
    assert_eq!(states[1].1, State::Gone);
    // A container may take CAP_SYS_PTRACE from root.
    let rank = found.and_then(|found| found.place).map(|place| place.rank);
    assert_eq!(rank, may_read.then_some(1));
}

/// A user to whom /proc shows no processes of others (`hidepid`) cannot say that one has ended.
#[test]
fn a_process_that_cannot_be_seen_is_not_gone() {
    let file = std::env::temp_dir().join(format!("alpha-1-{}.dmrec", std::process::id()));
    fs::write(&file, "").unwrap();
    let state =
        |is_complete: bool, path: &Path| Running { pids: BTreeMap::new(), is_complete }.process_of_file(path, 1).1;
    let states = [state(true, &file), state(false, &file)];
    fs::remove_file(&file).unwrap();
    assert_eq!(states, [State::Gone; 2], "it is this user's file");
    assert_eq!(state(false, &file), State::Unknown);
    assert_eq!(state(true, &file), State::Gone);
}

/// Any process may keep a recording in a folder with very many files.
#[test]
fn the_newest_recordings_of_a_folder_are_read() {
    let folder = std::env::temp_dir().join(format!("dm-newest-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    for (name, age) in [("a.dmrec", 10), ("b.dmrec", 30), ("c.dmrec", 20), ("d.dmrec", 40), ("notes", 0)] {
        let file = File::create(folder.join(name)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
    }
    let named = |most| {
        let (files, left_out) = newest(&folder, most);
        let names = files.map(|file| file.file_name().unwrap().to_string_lossy().into_owned());
        (names.collect::<BTreeSet<String>>(), left_out)
    };
    let (some, all) = (named(2), named(4));
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!(some, (["a.dmrec", "c.dmrec"].map(String::from).into(), 2));
    assert_eq!((all.0.len(), all.1), (4, 0));
}

#[test]
fn folders_with_few_recordings_leave_their_room_to_those_with_many() {
    let root = std::env::temp_dir().join(format!("dm-shares-{}", std::process::id()));
    let folders: BTreeSet<PathBuf> = [("few", 3), ("many", 50), ("more", 60)]
        .map(|(name, count)| {
            let folder = root.join(name);
            fs::create_dir_all(&folder).unwrap();
            (0..count).for_each(|number| drop(File::create(folder.join(format!("{number}.dmrec"))).unwrap()));
            folder
        })
        .into();
    let named: Vec<(String, usize)> = shares(&folders, 43)
        .into_iter()
        .map(|(folder, share)| (folder.file_name().unwrap().to_string_lossy().into_owned(), share))
        .collect();
    fs::remove_dir_all(&root).unwrap();
    assert_eq!(named, [("few", 14), ("many", 20), ("more", 20)].map(|(name, share)| (name.to_owned(), share)));
}
