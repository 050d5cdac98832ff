//! The checks of `reference.rs` with ranks as processes, and as processes of several threads each.
//!
//! A process is one of child_ranks. `HOSTCCL_TEST_THREADS` says how many ranks it has. Two other
//! ranks end their main threads, and live on.

mod child_ranks;
mod common;

use std::env;
use std::time::{Duration, Instant};

use child_ranks::{Part, Rank, listen, say};
use common::call::Case;
use common::{Comm, DEADLINE, from_hex, hex_of, ok, ranks_of, sum, unique_id};
use hostccl::ncclCommGetAsyncError;
use hostccl::types::*;

/// Starts `processes` of `threads` ranks each, and waits until all have done their checks.
fn check(processes: usize, threads: usize) {
    let (id, size, threads_text) = (unique_id(), processes * threads, threads.to_string());
    let variables = [("HOSTCCL_TEST_THREADS", threads_text.as_str())];
    let start = |process: usize| Rank::start_with("checks", process * threads, size, &id, &variables);
    let mut children: Vec<Rank> = (0..processes).map(start).collect();
    let started = Instant::now();
    for (process, rank) in children.iter_mut().enumerate() {
        let status = loop {
            if let Some(status) = rank.child.try_wait().unwrap() {
                break status;
            }
            assert!(started.elapsed() < DEADLINE, "process {process} of {processes} is not done after {DEADLINE:?}");
            std::thread::sleep(Duration::from_millis(2));
        };
        assert!(status.success(), "process {process} of {processes}: {status}; its error is above");
    }
}

/// Returns fewer cases than the test with threads has, because every process computes all of them:
/// each type once, each reduction twice.
fn cases(size: usize) -> Vec<Case> {
    let counts = [1, 0, 7, 4097, 2, 1023, 3, 31, 12345, 65];
    let slot = ((12 << 20) / (3 * size) / 4096 * 4096).clamp(64 << 10, 1 << 20);
    let mut cases: Vec<Case> = DataType::ALL
        .into_iter()
        .zip(counts)
        .enumerate()
        .map(|(i, (dtype, count))| Case::new(dtype, size, count, count, &[ReduceOp::ALL[i % 5]], &[i % size]))
        .collect();
    let whole = slot / 4 + 1;
    cases.push(Case::new(DataType::Float32, size, whole, 2 * whole - 3, &[ReduceOp::Sum], &[size - 1]));
    cases
}

#[test]
#[ignore = "started by the other tests as ranks"]
fn child() {
    let Some(Part { scene, rank: first, size, id }) = Part::of_this_process() else { return };
    if scene == "main thread ends" {
        return without_main_thread(first, size);
    }
    let threads: usize = env::var("HOSTCCL_TEST_THREADS").unwrap().parse().unwrap();
    // With this variable, each process is a host.
    let seats = if env::var("DM_HOSTCCL_SHM").is_ok_and(|value| value == "0") { threads } else { size };
    let cases: Vec<Case> = cases(size).into_iter().map(|case| case.on_hosts_of(seats)).collect();
    ranks_of(id, size, first..first + threads, |comm, rank| {
        assert_eq!((comm.size(), comm.rank()), (size, rank));
        cases.iter().for_each(|case| case.run(comm, rank));
    });
}

/// Ends the main thread of this process alone, as `pthread_exit` does. The main thread belongs to
/// the test harness, so a signal ends it.
fn end_main_thread() {
    extern "C" fn end_thread(_: libc::c_int) {
        // SAFETY: this ends the calling thread alone, which runs nothing any more.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
    let handler: extern "C" fn(libc::c_int) = end_thread;
    let pid = std::process::id() as libc::pid_t;
    // SAFETY: the handler calls nothing that a signal could interrupt.
    unsafe { libc::signal(libc::SIGUSR1, handler as usize) };
    // SAFETY: the call only sends a signal to the main thread.
    unsafe { libc::syscall(libc::SYS_tgkill, pid, pid, libc::SIGUSR1) };
    let started = Instant::now();
    while !std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") Z ") {
        assert!(started.elapsed() < DEADLINE, "the main thread does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The part of a rank whose main thread ends before its other thread joins. Rank 0 makes the id.
fn without_main_thread(rank: usize, size: usize) {
    let rank = std::thread::spawn(move || {
        end_main_thread();
        let id = if rank == 0 { unique_id() } else { from_hex(&listen()) };
        if rank == 0 {
            say(&hex_of(&id));
        }
        let comm = Comm::init(id, size, rank);
        let half = comm.split(0, rank as i32).unwrap();
        let mut state = ncclInProgress;
        // SAFETY: there is a place for the answer.
        ok(unsafe { ncclCommGetAsyncError(comm.0, &raw mut state) });
        say(&format!("{state} {} {}", sum(&comm, 1), sum(&half, 10)));
        // The other rank may look at this process until it has said the same.
        listen();
        drop((half, comm));
        std::process::exit(0);
    });
    let _ = rank.join();
    std::process::exit(1);
}

#[test]
fn two_processes_whose_main_threads_have_ended() {
    let (unused, limit) = (unique_id(), [("HOSTCCL_TIMEOUT_MS", "60000")]);
    let mut ranks = [0, 1].map(|rank| Rank::start_with("main thread ends", rank, 2, &unused, &limit));
    let id = ranks[0].hear();
    ranks[1].tell(&id);
    let said = ranks.each_mut().map(Rank::hear);
    assert_eq!(said, ["0 2 20", "0 2 20"]);
    ranks.iter_mut().for_each(|rank| rank.tell("end"));
}

#[test]
fn two_processes() {
    check(2, 1);
}

#[test]
fn three_processes() {
    check(3, 1);
}

#[test]
fn eight_processes() {
    check(8, 1);
}

#[test]
fn two_processes_of_two_threads() {
    check(2, 2);
}
