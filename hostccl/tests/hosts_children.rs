//! Split and shrink of communicators whose ranks are on several hosts, with real processes. Each
//! process is a host, or one of two processes of a host: `DM_HOSTCCL_HOST` names the hosts.
//!
//! A rank is this test program, started again with its ignored test `child`.

mod common;

use std::env;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::ptr::null_mut;
use std::time::Duration;

use common::{Comm, from_hex, hex_of, last_error, ok, unique_id};
use hostccl::types::*;
use hostccl::*;

/// The processes of a test, which are killed and waited for when the test ends in any way.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Starts a rank on each of these hosts. They do `what`, and write one line each.
fn start(what: &str, hosts: &[&str]) -> Children {
    let hex = hex_of(&unique_id());
    let start = |(rank, host): (usize, &&str)| {
        Command::new(env::current_exe().unwrap())
            .args(["--exact", "child", "--ignored", "--nocapture", "--test-threads=1"])
            .env("HOSTCCL_TEST_ID", &hex)
            .env("HOSTCCL_TEST_DO", what)
            .env("HOSTCCL_TEST_SIZE", hosts.len().to_string())
            .env("HOSTCCL_TEST_RANK", rank.to_string())
            .env("HOSTCCL_TIMEOUT_MS", "60000")
            .env("DM_HOSTCCL_HOST", host)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    Children(hosts.iter().enumerate().map(start).collect())
}

/// Returns the line that a rank writes.
fn line(child: &mut Child) -> String {
    let output = BufReader::new(child.stdout.as_mut().unwrap());
    let found = output.lines().map_while(Result::ok).find_map(|line| Some(line.split_once("> ")?.1.to_owned()));
    found.expect("the process writes a line")
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
    let Ok(hex) = env::var("HOSTCCL_TEST_ID") else { return };
    let number = |name: &str| env::var(name).unwrap().parse::<usize>().unwrap();
    let (size, rank) = (number("HOSTCCL_TEST_SIZE"), number("HOSTCCL_TEST_RANK"));
    let comm = Comm::init(from_hex(&hex), size, rank);
    let mut said = match env::var("HOSTCCL_TEST_DO").unwrap().as_str() {
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
    said.insert_str(0, "> ");
    println!("{said}");
    std::io::stdout().flush().unwrap();
    // The communicators live until the test is done.
    let _ = std::io::stdin().read(&mut [0]);
    drop(comm);
    std::thread::sleep(Duration::from_millis(1));
}

#[test]
fn splits_over_hosts_and_within_one() {
    for hosts in [["a", "a", "b", "b"], ["a", "b", "a", "b"], ["a", "b", "c", "d"], ["a", "b", "b", "b"]] {
        let mut ranks = start("split", &hosts);
        let lines: Vec<String> = ranks.0.iter_mut().map(line).collect();
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
        let lines: Vec<String> = ranks.0[..3].iter_mut().map(line).collect();
        assert_eq!(lines, ["0 of 3: 3", "1 of 3: 3", "2 of 3: 3"], "{hosts:?}");
    }
}
