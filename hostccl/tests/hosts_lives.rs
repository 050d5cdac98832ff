//! A rank that destroys its communicator and ends at once harms no call of another host that needs
//! nothing more from it. And a rank that is stopped for longer than a host may be silent is not
//! lost, because its host is there. That test takes more than 5 s, because the silence cannot be
//! made shorter.
//!
//! The ranks are child processes, which play a scene (child_ranks). `DM_HOSTCCL_HOST` gives each
//! process its host, so one machine serves as several.

mod child_ranks;
mod common;

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use child_ranks::{Part, listen, say, start_on_hosts};
use common::{init, last_error};
use hostccl::types::*;
use hostccl::*;
use plain::pattern;

/// The length of the data that the rank broadcasts before it ends, in bytes. The sockets' buffers
/// are full while it travels.
const LONG: usize = 32 << 20;

/// Sets the secret of this process, which makes the ids of all tests. A test holds the guard until
/// all its ranks have joined. Then another test may set its secret.
fn with_secret(secret: Option<&str>) -> MutexGuard<'static, ()> {
    static ONE_TEST: Mutex<()> = Mutex::new(());
    let guard = ONE_TEST.lock().unwrap_or_else(PoisonError::into_inner);
    set_secret(secret.map(|secret| secret.as_bytes().to_vec())).unwrap();
    guard
}

fn send(comm: ncclComm_t, data: &[u8], peer: c_int) -> ncclResult_t {
    // SAFETY: the buffer holds what the call says.
    unsafe { ncclSend(data.as_ptr().cast(), data.len(), DataType::Uint8 as c_int, peer, comm, null_mut()) }
}

fn receive(comm: ncclComm_t, data: &mut [u8], peer: c_int) -> ncclResult_t {
    // SAFETY: the buffer holds what the call says.
    unsafe { ncclRecv(data.as_mut_ptr().cast(), data.len(), DataType::Uint8 as c_int, peer, comm, null_mut()) }
}

/// Broadcasts the data of rank 0.
fn broadcast(comm: ncclComm_t, data: &mut [u8]) -> ncclResult_t {
    let (pointer, dtype) = (data.as_mut_ptr().cast::<c_void>(), DataType::Uint8 as c_int);
    // SAFETY: the buffer holds what the call says.
    unsafe { ncclBroadcast(pointer, pointer, data.len(), dtype, 0, comm, null_mut()) }
}

/// Sends data from rank 0 to rank 1 again and again. The test stops rank 1 in the middle.
fn go_on_over_a_stop(comm: ncclComm_t, rank: usize, long: &[u8]) {
    let mut got = vec![0; if rank == 0 { 0 } else { LONG }];
    for round in 0..60 {
        if round == 3 {
            say("in the middle");
        }
        let result = if rank == 0 { send(comm, long, 1) } else { receive(comm, &mut got, 0) };
        if result != ncclSuccess {
            return say(&format!("round {round}: {result} {}", last_error()));
        }
    }
    say(if rank == 0 || got == long { "right" } else { "wrong data" });
}

/// Makes a communicator of ranks 0 and 1, and another one of rank 2.
fn split(comm: ncclComm_t, rank: usize) -> ncclComm_t {
    let mut smaller = null_mut();
    // SAFETY: there is a place for the communicator.
    let result = unsafe { ncclCommSplit(comm, (rank / 2) as c_int, rank as c_int, &raw mut smaller, null_mut()) };
    assert_eq!(result, ncclSuccess, "{}", last_error());
    smaller
}

/// Returns the state of the communicator.
fn state(comm: ncclComm_t) -> ncclResult_t {
    let mut state = -1;
    // SAFETY: there is a place for the answer.
    assert_eq!(unsafe { ncclCommGetAsyncError(comm, &raw mut state) }, ncclSuccess);
    state
}

/// Plays one rank of a scene. It is no test by itself.
#[test]
#[ignore = "started by the other tests as a rank"]
fn child() {
    let Some(Part { scene, rank, size, id }) = Part::of_this_process() else { return };
    let (result, comm) = init(size as c_int, id, rank as c_int);
    assert_eq!(result, ncclSuccess, "{}", last_error());
    let long = pattern(0, LONG);
    if scene == "stop" {
        return go_on_over_a_stop(comm, rank, &long);
    }
    let smaller = (scene == "world first").then(|| split(comm, rank));
    let mut data = if rank == 0 { long.clone() } else { vec![0; LONG] };
    let result = broadcast(comm, &mut data);
    if rank == 0 {
        assert_eq!(result, ncclSuccess, "{}", last_error());
        // SAFETY: the communicator is live, and `_exit` does not return.
        unsafe {
            assert_eq!(ncclCommDestroy(comm), ncclSuccess);
            if let Some(smaller) = smaller {
                assert_eq!(ncclCommDestroy(smaller), ncclSuccess);
            }
            libc::_exit(0);
        }
    }
    say(format!("{result} {} {}", data == long, last_error()).trim());
    // The ranks that are left go on among themselves, until the test has seen the end of rank 0 for
    // long enough.
    let word = std::thread::spawn(listen);
    let (other, mut result) = (3 - rank as c_int, ncclSuccess);
    let mut go_on = [1_u8];
    while result == ncclSuccess && go_on == [1] {
        match rank {
            1 => {
                go_on = [u8::from(!word.is_finished())];
                result = send(comm, &go_on, other);
            }
            _ => result = receive(comm, &mut go_on, other),
        }
    }
    if result == ncclSuccess {
        result = state(comm);
    }
    say(format!("{result} {}", last_error()).trim());
    listen();
}

#[test]
fn a_rank_that_ends_right_after_it_has_left_harms_no_other() {
    // In the second scene rank 0 destroys the communicator of all ranks first, and then one that
    // rank 2 is not in.
    for (scene, secret) in [("it", ""), ("it", "a secret"), ("world first", ""), ("world first", "a secret")] {
        for round in 0..2 {
            let of = format!("scene {scene}, secret {secret:?}, round {round}");
            // This process makes the id, so it needs the secret, too.
            let secret_is_set = with_secret(Some(secret).filter(|secret| !secret.is_empty()));
            let mut ranks = start_on_hosts(scene, 3, 1, &[("DM_STORE_SECRET", secret)]);
            for rank in &mut ranks[1..] {
                assert_eq!(rank.hear(), "0 true", "{of}");
            }
            drop(secret_is_set);
            assert!(ranks[0].child.wait().unwrap().success());
            // A rank that has lost another one blames it within 300 ms.
            std::thread::sleep(Duration::from_millis(400));
            ranks[1].tell("enough");
            for rank in &mut ranks[1..] {
                assert_eq!(rank.hear(), "0", "{of}");
            }
        }
    }
}

#[test]
fn a_rank_that_is_stopped_is_not_taken_for_a_silent_host() {
    let no_secret_is_set = with_secret(None);
    let mut ranks = start_on_hosts("stop", 2, 1, &[("DM_HOST_TIMEOUT_MS", "2000")]);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "in the middle"));
    drop(no_secret_is_set);
    let stopped = ranks[1].child.id() as libc::pid_t;
    // SAFETY: the process is a child of this one that nobody has waited for.
    let signal = |signal| assert_eq!(unsafe { libc::kill(stopped, signal) }, 0);
    signal(libc::SIGSTOP);
    std::thread::sleep(Duration::from_millis(4500));
    signal(libc::SIGCONT);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "right"));
}
