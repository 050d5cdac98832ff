//! Split and shrink of communicators whose ranks are on several hosts, with real processes. Each
//! process is a host, or one of two processes of a host: `DM_HOSTCCL_HOST` names the hosts.
//!
//! The ranks are child processes, which play a scene (child_ranks).

mod child_ranks;
mod common;

use std::ptr::null_mut;

use child_ranks::{Part, Rank, listen, say, start_on};
use common::{Comm, last_error, ok};
use hostccl::types::*;
use hostccl::*;

/// Starts a rank on each of these hosts.
fn start(scene: &str, hosts: &[&str]) -> Vec<Rank> {
    start_on(scene, hosts, &[("HOSTCCL_TIMEOUT_MS", "60000")])
}

/// Adds up the ranks of the communicator's parent, and returns "rank of size: sum".
fn sum(comm: &Comm, mine: usize) -> String {
    let (sent, mut got) = (mine as i32, -1_i32);
    // SAFETY: both places hold one number, and outlive the call.
    ok(unsafe {
        ncclAllReduce(
            (&raw const sent).cast(),
            (&raw mut got).cast(),
            1,
            DataType::Int32 as i32,
            ReduceOp::Sum as i32,
            comm.0,
            null_mut(),
        )
    });
    format!("{} of {}: {got}", comm.rank(), comm.size())
}

fn shrink(comm: &Comm, excluded: &[i32], flags: i32) -> Result<Comm, String> {
    let (mut less, mut excluded) = (null_mut(), excluded.to_vec());
    // SAFETY: the list has that many ranks, and there is a place for the communicator.
    let result = unsafe {
        let count = excluded.len() as i32;
        ncclCommShrink(comm.0, excluded.as_mut_ptr(), count, &raw mut less, null_mut(), flags)
    };
    if result == ncclSuccess { Ok(Comm(less)) } else { Err(last_error()) }
}

#[test]
#[ignore = "started by the other tests as ranks"]
fn child() {
    let Some(Part { scene, rank, size, id }) = Part::of_this_process() else { return };
    let comm = Comm::init(id, size, rank);
    let said = match scene.as_str() {
        // Even and odd ranks, each in reverse order; and then the halves of the whole.
        "split" => {
            let parity = comm.split((rank % 2) as i32, -(rank as i32)).unwrap();
            let half = comm.split((2 * rank / size) as i32, 0).unwrap();
            let none = comm.split(if rank == 0 { 0 } else { NCCL_SPLIT_NOCOLOR }, 0);
            assert_eq!(none.is_some(), rank == 0);
            let grandchild = parity.split(0, parity.size() as i32 - parity.rank() as i32).unwrap();
            [sum(&parity, rank), sum(&half, rank), sum(&grandchild, rank)].join(", ")
        }
        // The last rank dies in a collective, and the others go on without it.
        "shrink" => {
            sum(&comm, rank);
            if rank + 1 == size {
                std::process::abort();
            }
            let (sent, mut got) = (1_i32, 0_i32);
            // SAFETY: both places hold one number, and outlive the call.
            let failed = unsafe {
                let (from, to, int, add) = ((&raw const sent).cast(), (&raw mut got).cast(), 2, 0);
                ncclAllReduce(from, to, 1, int, add, comm.0, null_mut())
            };
            assert_eq!(failed, ncclRemoteError, "{}", last_error());
            match shrink(&comm, &[size as i32 - 1], NCCL_SHRINK_ABORT) {
                Ok(less) => sum(&less, rank),
                Err(error) => error,
            }
        }
        other => panic!("{other}"),
    };
    say(&said);
    // The communicators live until the test is done.
    listen();
}

#[test]
fn splits_over_hosts_and_within_one() {
    for hosts in [["a", "a", "b", "b"], ["a", "b", "a", "b"], ["a", "b", "c", "d"], ["a", "b", "b", "b"]] {
        let mut ranks = start("split", &hosts);
        let lines: Vec<String> = ranks.iter_mut().map(Rank::hear).collect();
        assert_eq!(
            lines,
            [
                "1 of 2: 2, 0 of 2: 1, 0 of 2: 2",
                "1 of 2: 4, 1 of 2: 1, 0 of 2: 4",
                "0 of 2: 2, 0 of 2: 5, 1 of 2: 2",
                "0 of 2: 4, 1 of 2: 5, 1 of 2: 4"
            ],
            "{hosts:?}"
        );
    }
}

#[test]
fn survivors_of_a_dead_rank_go_on() {
    for hosts in [["a", "a", "b", "b"], ["a", "b", "c", "d"], ["a", "b", "a", "c"]] {
        let mut ranks = start("shrink", &hosts);
        let lines: Vec<String> = ranks[..3].iter_mut().map(Rank::hear).collect();
        assert_eq!(lines, ["0 of 3: 3", "1 of 3: 3", "2 of 3: 3"], "{hosts:?}");
    }
}
