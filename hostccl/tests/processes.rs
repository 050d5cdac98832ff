//! The checks of `reference.rs` with ranks as processes, and as processes of several threads each.
//!
//! A process is one of child_ranks. `HOSTCCL_TEST_THREADS` says how many ranks it has.

mod child_ranks;
mod common;

use std::env;
use std::time::{Duration, Instant};

use child_ranks::{Part, Rank};
use common::call::Case;
use common::{DEADLINE, ranks_of, unique_id};
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
    let Some(Part { rank: first, size, id, .. }) = Part::of_this_process() else { return };
    let threads: usize = env::var("HOSTCCL_TEST_THREADS").unwrap().parse().unwrap();
    // With this variable, each process is a host.
    let seats = if env::var("DM_HOSTCCL_SHM").is_ok_and(|value| value == "0") { threads } else { size };
    let cases: Vec<Case> = cases(size).into_iter().map(|case| case.on_hosts_of(seats)).collect();
    ranks_of(id, size, first..first + threads, |comm, rank| {
        assert_eq!((comm.size(), comm.rank()), (size, rank));
        cases.iter().for_each(|case| case.run(comm, rank));
    });
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
