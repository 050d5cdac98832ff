//! A rank that dies, stops, leaves or aborts gives every rank on every host an error that names it.
//! Messages between hosts arrive.
//!
//! The ranks are child processes, which play a scene (child_ranks). `DM_HOSTCCL_HOST` gives each
//! process its host, so one machine serves as several.

mod child_ranks;
mod common;

use std::ffi::c_int;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use child_ranks::{
    Part, Rank, leave_as_told, listen, names_at_the_deadline, say, say_result, set_time_as_told, start_on_hosts, watch,
};
use common::{init, last_error};
use hostccl::types::*;
use hostccl::*;
use plain::numbers::{are_all, floats};
use plain::pattern;

/// How long an error may take to reach a rank of another host. It takes a tenth of that where
/// nothing else runs.
const SOON: Duration = Duration::from_secs(10);

/// Sends `sent[i]` to rank i, and receives `got[i]` from rank i, in one group.
fn exchange(comm: ncclComm_t, sent: &[Vec<u8>], got: &mut [Vec<u8>]) -> ncclResult_t {
    let dtype = DataType::Uint8 as c_int;
    // SAFETY: the buffers hold what the calls say.
    unsafe {
        assert_eq!(ncclGroupStart(), ncclSuccess);
        for (peer, (sent, got)) in sent.iter().zip(got).enumerate() {
            for result in [
                ncclSend(sent.as_ptr().cast(), sent.len(), dtype, peer as c_int, comm, null_mut()),
                ncclRecv(got.as_mut_ptr().cast(), got.len(), dtype, peer as c_int, comm, null_mut()),
            ] {
                if result != ncclSuccess {
                    let _ = ncclGroupEnd();
                    return result;
                }
            }
        }
        ncclGroupEnd()
    }
}

/// Returns the bytes that `from` sends to `to` in a round.
fn bytes(from: usize, to: usize, round: usize) -> Vec<u8> {
    const LENGTHS: [usize; 7] = [1, 0, 4096, 5000, 100_000, 65_536, 300_000];
    let length = LENGTHS[(3 * from + 5 * to + round) % LENGTHS.len()];
    pattern((from * 31 + to * 7 + round) as u64, length)
}

/// Adds ones over all ranks, and checks the sums.
fn reduce(comm: ncclComm_t, size: usize, count: usize) -> ncclResult_t {
    let mut data = floats(1.0, count);
    let (dtype, op) = (DataType::Float32 as c_int, ReduceOp::Sum as c_int);
    // SAFETY: the buffer holds what the call says.
    let result =
        unsafe { ncclAllReduce(data.as_ptr().cast(), data.as_mut_ptr().cast(), count, dtype, op, comm, null_mut()) };
    assert!(result != ncclSuccess || are_all(&data, size as f32), "a wrong result");
    result
}

/// Receives ten bytes from a rank, and says how it went.
fn receive(comm: ncclComm_t, peer: c_int) {
    let mut data = [0_u8; 10];
    // SAFETY: the buffer holds ten bytes.
    let result =
        unsafe { ncclRecv(data.as_mut_ptr().cast(), data.len(), DataType::Uint8 as c_int, peer, comm, null_mut()) };
    say_result(comm, result);
}

/// Plays one rank of a scene. It is no test by itself.
#[test]
#[ignore = "started by the other tests as a rank"]
fn child() {
    let Some(Part { scene: play, rank, size, id }) = Part::of_this_process() else { return };
    let (result, comm) = init(size as c_int, id, rank as c_int);
    if result != ncclSuccess {
        return say(&format!("init {result} {}", last_error()));
    }
    say("ready");
    match play.as_str() {
        // Every rank sends to every rank and receives from every rank, until a call fails.
        "exchange" | "some rounds" => {
            let rounds = if play == "exchange" { usize::MAX } else { 20 };
            let result = (0..rounds).find_map(|round| {
                let sent: Vec<Vec<u8>> = (0..size).map(|to| bytes(rank, to, round)).collect();
                let expected: Vec<Vec<u8>> = (0..size).map(|from| bytes(from, rank, round)).collect();
                let mut got: Vec<Vec<u8>> = expected.iter().map(|bytes| vec![0; bytes.len()]).collect();
                let result = exchange(comm, &sent, &mut got);
                assert!(result != ncclSuccess || got == expected, "a wrong result in round {round}");
                Some(result).filter(|result| *result != ncclSuccess)
            });
            match result {
                None => say("right"),
                Some(result) => say_result(comm, result),
            }
        }
        // Every rank reduces until a call fails.
        "reduce" => {
            let counts = [1, 5000, 300_000].into_iter().cycle();
            let result = counts.map(|count| reduce(comm, size, count)).find(|result| *result != ncclSuccess);
            say_result(comm, result.unwrap());
        }
        // All ranks but rank 5 reduce.
        "late" if rank != 5 => {
            set_time_as_told(comm);
            let result = reduce(comm, size, 5000);
            say_result(comm, result);
        }
        // Every rank only asks for the state of its communicator.
        "watch" => say_result(comm, watch(comm)),
        // Rank 0 leaves in the way that the test writes, and the others wait for a message of it.
        "leave" if rank == 0 => leave_as_told(comm),
        "leave" => receive(comm, 0),
        // Each rank waits for the one before it, and rank 0 for nobody.
        "chain" if rank > 0 => {
            set_time_as_told(comm);
            receive(comm, rank as c_int - 1);
        }
        _ => {}
    }
    listen();
    // SAFETY: the communicator is live, or the call refuses it.
    unsafe { ncclCommDestroy(comm) };
    say("over");
    listen();
}

fn all_ready(ranks: &mut [Rank]) {
    for rank in ranks {
        assert_eq!(rank.hear(), "ready");
    }
}

/// Kills `victim` and checks the errors of the others.
fn kill_and_hear(play: &str, hosts: usize, on_each: usize, victim: usize) {
    let mut ranks = start_on_hosts(play, hosts, on_each, &[]);
    all_ready(&mut ranks);
    // The ranks are most likely in the middle of a call by then. The error is the same at any
    // moment.
    std::thread::sleep(Duration::from_millis(50));
    ranks[victim].child.kill().unwrap();
    let killed = Instant::now();
    for (rank, process) in ranks.iter_mut().enumerate().filter(|(rank, _)| *rank != victim) {
        let said = process.hear();
        let took = killed.elapsed();
        println!("{play}, {hosts} x {on_each}: rank {rank} knew after {took:?}: {said}");
        assert!(said.starts_with(&format!("{ncclRemoteError} {victim} ")), "{play}, rank {rank}: {said}");
        assert!(said.contains(&format!("rank {victim} ")) && said.contains(" gone"), "{play}, rank {rank}: {said}");
        assert!(took < SOON, "rank {rank} took {took:?}");
    }
}

#[test]
fn messages_between_hosts_and_within_them_arrive_and_nobody_is_missed_at_the_end() {
    let mut ranks = start_on_hosts("some rounds", 3, 2, &[]);
    all_ready(&mut ranks);
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "right");
    }
    for rank in &mut ranks {
        rank.tell("destroy");
        assert_eq!(rank.hear(), "over");
    }
}

#[test]
fn a_killed_rank_is_named_by_all_others_in_their_calls() {
    kill_and_hear("exchange", 4, 2, 5);
    kill_and_hear("exchange", 3, 1, 0);
}

#[test]
fn a_killed_rank_is_named_by_all_others_in_their_all_reduces() {
    kill_and_hear("reduce", 4, 2, 2);
    kill_and_hear("reduce", 3, 1, 2);
}

#[test]
fn a_host_whose_processes_are_killed_is_named_with_ranks_of_it() {
    let mut ranks = start_on_hosts("reduce", 3, 2, &[]);
    all_ready(&mut ranks);
    for victim in [2, 3] {
        ranks[victim].child.kill().unwrap();
    }
    for rank in [0, 1, 4, 5] {
        let said = ranks[rank].hear();
        let named = [2, 3].map(|victim| said.starts_with(&format!("{ncclRemoteError} {victim} ")));
        assert!(named.contains(&true), "rank {rank}: {said}");
    }
}

#[test]
fn the_deadline_of_an_all_reduce_names_the_rank_that_does_not_call() {
    names_at_the_deadline(5, |millis| {
        let mut ranks = start_on_hosts("late", 4, 2, &[]);
        all_ready(&mut ranks);
        let _missing = ranks.remove(5);
        ranks.iter_mut().for_each(|rank| rank.tell(&millis.to_string()));
        ranks.iter_mut().map(Rank::hear).collect()
    });
}

#[test]
fn a_killed_rank_is_named_where_nobody_has_sent_anything() {
    kill_and_hear("watch", 4, 2, 3);
    kill_and_hear("watch", 4, 1, 2);
}

#[test]
fn an_abort_wakes_the_ranks_of_all_hosts_with_its_name() {
    let mut ranks = start_on_hosts("leave", 3, 2, &[]);
    all_ready(&mut ranks);
    ranks.iter().for_each(Rank::until_it_waits);
    ranks[0].tell("abort");
    let began = Instant::now();
    for (rank, process) in ranks.iter_mut().enumerate().skip(1) {
        let said = process.hear();
        println!("rank {rank} woke after {:?}: {said}", began.elapsed());
        assert!(said.starts_with(&format!("{ncclRemoteError} 0 ")), "rank {rank}: {said}");
        assert!(said.contains("rank 0 (pid ") && said.ends_with("aborted its communicator"), "rank {rank}: {said}");
        assert!(began.elapsed() < SOON);
    }
}

#[test]
fn a_rank_that_destroys_its_communicator_fails_those_that_wait_for_it() {
    let mut ranks = start_on_hosts("leave", 2, 2, &[]);
    all_ready(&mut ranks);
    ranks[0].tell("destroy");
    for (rank, process) in ranks.iter_mut().enumerate().skip(1) {
        let said = process.hear();
        assert!(said.starts_with(&format!("{ncclRemoteError} 0 ")), "rank {rank}: {said}");
        assert!(said.ends_with("has destroyed its communicator"), "rank {rank}: {said}");
    }
}

#[test]
fn the_deadline_names_the_stopped_rank_and_not_those_that_wait_for_it() {
    names_at_the_deadline(1, |millis| {
        let mut ranks = start_on_hosts("chain", 4, 1, &[]);
        all_ready(&mut ranks);
        // SAFETY: the process is a child of this one.
        unsafe { libc::kill(ranks[1].child.id() as libc::pid_t, libc::SIGSTOP) };
        ranks[2..].iter_mut().for_each(|rank| rank.tell(&millis.to_string()));
        ranks[2..].iter_mut().map(Rank::hear).collect()
    });
}
