//! The join of communicators whose ranks are on several hosts. `DM_HOSTCCL_SHM=0` makes each
//! process a host of its own, and `DM_HOSTCCL_HOST` names the host of a process, so one machine
//! serves as many.
//!
//! A rank is this test program, started again with its ignored test `child`. Environment variables
//! give the rank and the id. A rank writes one line for each thing that it has done.

mod common;

use std::env;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::ptr::null_mut;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::{Comm, DEADLINE, from_hex, hex_of, last_error, ok, unique_id};
use hostccl::types::*;
use hostccl::*;

/// A process of ranks.
struct Process {
    /// The process, which is killed and waited for at the end of the test.
    child: Child,
    /// The process goes on to its next step when it reads a line.
    input: Option<ChildStdin>,
    /// The lines that the process has written.
    lines: Receiver<String>,
}

/// The ranks of a process, and the variables that it gets.
type Given<'a> = (&'a [usize], &'a [(&'a str, &'a str)]);

impl Process {
    /// Starts a process with the ranks `ranks` of `size`.
    fn start(id: &ncclUniqueId, size: usize, ranks: &[usize], variables: &[(&str, &str)]) -> Process {
        Process::start_at(&hex_of(id), size, ranks, variables)
    }

    /// Does what [`start`](Process::start) does for an id as text. With "make" the process makes
    /// the id, and writes it first.
    fn start_at(id: &str, size: usize, ranks: &[usize], variables: &[(&str, &str)]) -> Process {
        let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "child", "--ignored", "--nocapture", "--test-threads=1"])
            .env("HOSTCCL_TEST_ID", id)
            .env("HOSTCCL_TEST_SIZE", size.to_string())
            .env("HOSTCCL_TEST_RANKS", list.join(","))
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (out, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // The test program's own lines come too, and one may precede ours.
                if let Some((_, line)) = line.split_once("> ") {
                    let _ = out.send(line.to_owned());
                }
            }
        });
        Process { input: child.stdin.take(), child, lines }
    }

    /// Returns the next line.
    #[track_caller]
    fn line(&self) -> String {
        self.lines.recv_timeout(DEADLINE).expect("the process writes a line")
    }
}

impl Process {
    /// Waits until the process is as `holds` says, which gets the process's folder in /proc.
    #[track_caller]
    fn until(&self, what: &str, holds: impl Fn(&Path) -> bool) {
        let folder = PathBuf::from(format!("/proc/{}", self.child.id()));
        let began = Instant::now();
        while !holds(&folder) {
            assert!(began.elapsed() < DEADLINE, "this does not come about: {what}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until the process has a connection to that port.
    #[track_caller]
    fn until_connected(&self, port: u16) {
        self.until("it is connected", |folder| {
            let table = |name| std::fs::read_to_string(folder.join("net").join(name)).unwrap_or_default();
            let tables = table("tcp") + &table("tcp6");
            let sockets: Vec<String> = tables
                .lines()
                .map(|line| line.split_whitespace().collect::<Vec<_>>())
                .filter(|cells| cells.len() > 9 && cells[2].ends_with(&format!(":{port:04X}")) && cells[3] == "01")
                .map(|cells| format!("socket:[{}]", cells[9]))
                .collect();
            let Ok(open) = std::fs::read_dir(folder.join("fd")) else { return false };
            let mut open = open.flatten().filter_map(|file| std::fs::read_link(file.path()).ok());
            open.any(|file| sockets.iter().any(|socket| file.as_os_str() == socket.as_str()))
        });
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.input = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Joins as one rank, exchanges a number with the neighbours, and says how it went.
fn join(id: ncclUniqueId, size: usize, rank: usize) -> (String, Option<Comm>) {
    let (result, comm) = match env::var("HOSTCCL_TEST_HOW") {
        Err(_) => common::init(size as i32, id, rank as i32),
        Ok(how) => init_in_background(&how, id, size, rank),
    };
    if result != ncclSuccess {
        return (format!("error {result}: {}", last_error()), None);
    }
    let comm = Comm(comm);
    if env::var_os("HOSTCCL_TEST_HOW").is_none() {
        return (exchange(&comm), Some(comm));
    }
    // The parts have the ranks of equal parity, in reverse order.
    let (mut part, mut config) = (null_mut(), common::config(0));
    // SAFETY: there is a place for the communicator, and the configuration outlives the making.
    let begun = unsafe { ncclCommSplit(*comm, (rank % 2) as i32, -(rank as i32), &raw mut part, &raw mut config) };
    assert!([ncclSuccess, ncclInProgress].contains(&begun), "{}", last_error());
    assert_eq!((poll(*comm), poll(part)), (ncclSuccess, ncclSuccess), "{}", last_error());
    let part = Comm(part);
    (format!("{}, {} in its part", exchange(&comm), exchange(&part)), Some(comm))
}

/// Begins to join without blocking. Returns when the communicator is made or has failed. With
/// "abort" as `how`, the rank aborts the communicator in the making when the test says so.
fn init_in_background(how: &str, id: ncclUniqueId, size: usize, rank: usize) -> (ncclResult_t, ncclComm_t) {
    let (mut comm, mut config) = (null_mut(), common::config(0));
    // SAFETY: there is a place for the communicator, and the configuration outlives the making.
    let begun = unsafe { ncclCommInitRankConfig(&raw mut comm, size as i32, id, rank as i32, &raw mut config) };
    assert!([ncclSuccess, ncclInProgress].contains(&begun), "{}", last_error());
    if how == "abort" {
        println!("> begun");
        let _ = std::io::stdin().read(&mut [0]);
        // SAFETY: the communicator is live.
        println!("> aborted {}", unsafe { ncclCommAbort(comm) });
        return (ncclInternalError, null_mut());
    }
    (poll(comm), comm)
}

/// Asks for the state of a communicator until it is made or has failed.
fn poll(comm: ncclComm_t) -> ncclResult_t {
    let (mut state, began) = (ncclInProgress, Instant::now());
    while state == ncclInProgress && began.elapsed() < DEADLINE {
        // SAFETY: the communicator is live, and there is a place for the answer.
        ok(unsafe { ncclCommGetAsyncError(comm, &raw mut state) });
        std::thread::sleep(Duration::from_millis(1));
    }
    state
}

/// Exchanges a number with the neighbours. Returns the rank and the number of ranks.
fn exchange(comm: &Comm) -> String {
    let (me, size) = (comm.rank(), comm.size());
    let (sent, mut got) = (me as i32, -1_i32);
    let (next, last) = ((me + 1) % size, (me + size - 1) % size);
    // SAFETY: both places hold one number, and outlive the group.
    unsafe {
        ok(ncclGroupStart());
        ok(ncclSend((&raw const sent).cast(), 1, DataType::Int32 as i32, next as i32, comm.0, null_mut()));
        ok(ncclRecv((&raw mut got).cast(), 1, DataType::Int32 as i32, last as i32, comm.0, null_mut()));
        ok(ncclGroupEnd());
    }
    assert_eq!(got, last as i32);
    format!("{me} of {size}")
}

#[test]
#[ignore = "started by the other tests as ranks"]
fn child() {
    let Ok(hex) = env::var("HOSTCCL_TEST_ID") else { return };
    let size: usize = env::var("HOSTCCL_TEST_SIZE").unwrap().parse().unwrap();
    let ranks: Vec<usize> =
        env::var("HOSTCCL_TEST_RANKS").unwrap().split(',').map(|rank| rank.parse().unwrap()).collect();
    let id = match hex.as_str() {
        "make" => {
            let id = unique_id();
            println!("> {}", hex_of(&id));
            id
        }
        _ => from_hex(&hex),
    };
    let threads: Vec<_> = ranks.iter().map(|&rank| std::thread::spawn(move || join(id, size, rank))).collect();
    let mut files = Vec::new();
    if env::var_os("HOSTCCL_TEST_FILES").is_some() {
        let _ = std::io::stdin().read(&mut [0]);
        files.extend(std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()));
        println!("> no file can be opened");
    }
    let joined: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    drop(files);
    for (line, _) in &joined {
        println!("> {line}");
    }
    std::io::stdout().flush().unwrap();
    // The communicators live until the test is done.
    let _ = std::io::stdin().read(&mut [0]);
}

/// Each process is a host.
const ALONE: (&str, &str) = ("DM_HOSTCCL_SHM", "0");

/// Starts a process for each list of ranks, with its variables.
fn start(id: &ncclUniqueId, size: usize, processes: &[Given<'_>]) -> Vec<Process> {
    processes.iter().map(|(ranks, variables)| Process::start(id, size, ranks, variables)).collect()
}

/// Checks that all ranks have joined.
#[track_caller]
fn all_join(size: usize, processes: &[Given<'_>]) {
    let started = start(&unique_id(), size, processes);
    for (process, (ranks, _)) in started.iter().zip(processes) {
        for rank in *ranks {
            assert_eq!(process.line(), format!("{rank} of {size}"));
        }
    }
}

#[test]
fn each_process_a_host() {
    all_join(3, &[(&[0], &[ALONE]), (&[1], &[ALONE]), (&[2], &[ALONE])]);
}

#[test]
fn hosts_of_several_processes_and_threads() {
    let (a, b) = (("DM_HOSTCCL_HOST", "a"), ("DM_HOSTCCL_HOST", "b"));
    all_join(6, &[(&[0, 4], &[a]), (&[2], &[a]), (&[1], &[b]), (&[3], &[ALONE]), (&[5], &[b])]);
}

/// `ncclCommInitRankConfig` and `ncclCommSplit` with `blocking` 0 return at once, and the ranks ask
/// `ncclCommGetAsyncError` for the end.
#[test]
fn communicators_are_made_in_the_background_and_asked_for() {
    let how = ("HOSTCCL_TEST_HOW", "ask");
    let (a, b) = (&[("DM_HOSTCCL_HOST", "a"), how][..], &[("DM_HOSTCCL_HOST", "b"), how][..]);
    let processes = start(&unique_id(), 5, &[(&[0], a), (&[1], b), (&[2], b), (&[3], a), (&[4], &[ALONE, how])]);
    for (rank, process) in processes.iter().enumerate() {
        let part = if rank % 2 == 0 { 3 } else { 2 };
        assert_eq!(process.line(), format!("{rank} of 5, {} of {part} in its part", part - 1 - rank / 2));
    }
}

/// The join of ranks that wait for rank 2, which never comes, ends when one of them aborts it.
#[test]
fn a_rank_that_aborts_during_the_join_is_told_to_all() {
    for aborting in [0, 1] {
        let how = |rank: usize| ("HOSTCCL_TEST_HOW", if rank == aborting { "abort" } else { "ask" });
        let id = unique_id();
        let mut processes = start(&id, 3, &[(&[0], &[ALONE, how(0)]), (&[1], &[ALONE, how(1)])]);
        processes.iter().for_each(|process| process.until_connected(address_of(&id).port()));
        assert_eq!(processes[aborting].line(), "begun");
        // It has told the maker of the id that it is there, and waits.
        common::until_asleep(processes[aborting].child.id());
        processes[aborting].input = None;
        assert_eq!(processes[aborting].line(), format!("aborted {ncclSuccess}"));
        let line = processes[1 - aborting].line();
        assert!(line.starts_with(&format!("error {ncclRemoteError}: ")), "{line}");
        assert!(line.contains(&format!("rank {aborting} (pid ")), "{line}");
    }
}

/// The ranks without variables share the maker's host, and wait in its segment first.
#[test]
fn ranks_in_the_makers_segment_leave_it_for_a_remote_one() {
    let id = unique_id();
    let here = start(&id, 3, &[(&[0], &[]), (&[2], &[])]);
    for process in &here {
        process.until("it has mapped the segment of the id", |folder| {
            std::fs::read_to_string(folder.join("maps")).is_ok_and(|maps| maps.contains("/memfd:hostccl"))
        });
    }
    let there = Process::start(&id, 3, &[1], &[("DM_HOSTCCL_HOST", "other")]);
    assert_eq!([here[0].line(), there.line(), here[1].line()], ["0 of 3", "1 of 3", "2 of 3"]);
}

/// The time of each rank begins when its process joins. On a busy machine, the other rank may come
/// later than that by more than the time, or the maker may not answer within it. Then the ranks get
/// more time.
#[test]
fn a_rank_that_does_not_come_is_named_to_all() {
    for millis in ["700", "2800", "11200", "45000"] {
        let time = ("HOSTCCL_TIMEOUT_MS", millis);
        let processes = start(&unique_id(), 4, &[(&[0], &[ALONE, time]), (&[1], &[ALONE, time])]);
        let lines = [processes[0].line(), processes[1].line()];
        if lines.iter().all(|line| line.contains(&format!("ranks 2, 3 did not come within {millis} ms"))) {
            return;
        }
        let is_late = |line: &str| line.contains(", 2, 3 did not come") || line.contains("could not be reached");
        assert!(lines.iter().any(|line| is_late(line)) && millis != "45000", "{lines:?}");
    }
}

/// The maker can open no more files, so it cannot accept the connection of rank 1. The maker's own
/// rank fails with this reason, and rank 1 fails before its deadline. The test takes 2 s, because
/// the maker does not fail after a moment without files.
#[test]
fn a_maker_without_files_ends_the_join() {
    let mut maker = Process::start_at("make", 2, &[0], &[ALONE, ("HOSTCCL_TEST_FILES", "none")]);
    let id = from_hex(&maker.line());
    // When the maker's own rank waits in the segment of the id, it needs no more files.
    common::until_asleep(maker.child.id());
    maker.input.as_mut().unwrap().write_all(b"\n").unwrap();
    assert_eq!(maker.line(), "no file can be opened");
    let other = Process::start(&id, 2, &[1], &[ALONE]);
    let line = maker.line();
    assert!(line.starts_with(&format!("error {ncclSystemError}: ")), "{line}");
    assert!(line.contains("cannot accept connections of further ranks: "), "{line}");
    let line = other.line();
    assert!(line.starts_with(&format!("error {ncclRemoteError}: ")) && !line.contains("did not come"), "{line}");
}

#[test]
fn a_rank_that_dies_while_others_wait_is_named_to_all() {
    let id = unique_id();
    let left = Process::start(&id, 3, &[0], &[ALONE]);
    let dead = Process::start(&id, 3, &[1], &[ALONE]);
    [&left, &dead].iter().for_each(|process| process.until_connected(address_of(&id).port()));
    // A rank that dies before it has registered is nobody's loss. When all wait, it has registered.
    let pid = dead.child.id();
    common::until_all_asleep(&[left.child.id(), pid]);
    drop(dead);
    let line = left.line();
    let named = line.contains(&format!("rank 1 (pid {pid} at "));
    assert!(named && line.contains("ended or lost its connection before all"), "{line}");
}

#[test]
fn other_numbers_of_ranks_are_told_to_all() {
    let id = unique_id();
    let processes = [
        Process::start(&id, 3, &[0], &[ALONE]),
        Process::start(&id, 3, &[1], &[ALONE]),
        Process::start(&id, 4, &[2], &[ALONE]),
    ];
    let lines = processes.each_ref().map(Process::line);
    for line in &lines {
        assert!(line.starts_with(&format!("error {ncclInvalidUsage}: ")) && line.contains("passed nranks"), "{line}");
    }
}

#[test]
fn a_rank_that_is_taken_twice_is_told_to_all() {
    let processes = start(&unique_id(), 3, &[(&[0], &[ALONE]), (&[1], &[ALONE]), (&[1], &[ALONE])]);
    for process in &processes {
        let line = process.line();
        assert!(line.contains("rank 1 was taken twice: by pid"), "{line}");
    }
}

#[test]
fn an_id_starts_one_communicator() {
    let id = unique_id();
    let first = start(&id, 2, &[(&[0], &[ALONE]), (&[1], &[ALONE])]);
    assert_eq!([first[0].line(), first[1].line()], ["0 of 2", "1 of 2"]);
    for variables in [&[ALONE][..], &[]] {
        let line = Process::start(&id, 2, &[1], variables).line();
        assert!(line.contains("used up") || line.contains("started a communicator already"), "{line}");
    }
}

/// Returns the address that an id carries.
fn address_of(id: &ncclUniqueId) -> SocketAddr {
    let bytes = id.internal.map(|byte| byte as u8);
    let port = u16::from_le_bytes([bytes[12], bytes[13]]);
    match bytes[14] {
        4 => SocketAddr::from(([bytes[64], bytes[65], bytes[66], bytes[67]], port)),
        _ => SocketAddr::from((<[u8; 16]>::try_from(&bytes[64..80]).unwrap(), port)),
    }
}

#[test]
fn strangers_stop_nothing() {
    let id = unique_id();
    let address = address_of(&id);
    let mut strangers: Vec<TcpStream> = (0..60).map(|_| TcpStream::connect(address).unwrap()).collect();
    for (number, stranger) in strangers.iter_mut().enumerate() {
        let bytes: Vec<u8> = match number % 3 {
            0 => vec![],
            1 => vec![7; 5000],
            _ => [b"hccljoin".as_slice(), &[0; 500]].concat(),
        };
        // The maker closes the connection of a stranger that says something wrong.
        let _ = stranger.write_all(&bytes);
    }
    let processes = start(&id, 2, &[(&[0], &[ALONE]), (&[1], &[ALONE])]);
    assert_eq!([processes[0].line(), processes[1].line()], ["0 of 2", "1 of 2"]);
}

#[test]
fn a_maker_that_dies_ends_the_join() {
    let maker = Process::start_at("make", 3, &[0], &[ALONE]);
    let id = from_hex(&maker.line());
    let other = Process::start(&id, 3, &[1], &[ALONE]);
    other.until_connected(address_of(&id).port());
    drop(maker);
    let line = other.line();
    let is_named = line.contains("has gone") || line.contains("ended or became unreachable");
    assert!(line.contains("the process that made") && is_named, "{line}");
}

/// A rank without a wire cannot register. It tells the maker the reason, so all ranks get it.
#[test]
fn a_rank_with_a_wire_that_does_not_exist_is_named_to_all() {
    let why = "DM_WIRE is \"pigeon\": it must be \"tcp\" or \"ucx\"";
    let processes = start(&unique_id(), 2, &[(&[0], &[ALONE]), (&[1], &[ALONE, ("DM_WIRE", "pigeon")])]);
    let [right, wrong] = [processes[0].line(), processes[1].line()];
    assert!(wrong.starts_with(&format!("error {ncclInvalidArgument}: ")) && wrong.contains(why), "{wrong}");
    assert!(right.contains(&format!("rank 1: {why}")), "{right}");
}

#[test]
fn a_secret_is_needed_on_all_ranks_or_none() {
    let secret = ("DM_STORE_SECRET", "correct horse battery staple");
    let maker = Process::start_at("make", 2, &[0], &[ALONE, secret]);
    let id = from_hex(&maker.line());
    let other = Process::start(&id, 2, &[1], &[ALONE, secret]);
    assert_eq!([maker.line(), other.line()], ["0 of 2", "1 of 2"]);

    let maker = Process::start_at("make", 2, &[0], &[ALONE, secret]);
    let id = from_hex(&maker.line());
    let without = Process::start(&id, 2, &[1], &[ALONE]).line();
    assert!(without.contains("DM_STORE_SECRET"), "{without}");
    let wrong = Process::start(&id, 2, &[1], &[ALONE, ("DM_STORE_SECRET", "another")]).line();
    assert!(wrong.contains("has another secret"), "{wrong}");
}
