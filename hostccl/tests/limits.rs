//! Resource limits make the operating system refuse descriptors, memory and threads. Every rank
//! gets an error that names the limit to raise. Each case runs in a process of its own, because a
//! limit holds for the whole process.

mod common;

use std::ffi::c_int;
use std::fs::{self, DirEntry};
use std::process::{Command, Stdio};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use common::{Comm, DEADLINE, config, last_error, ranks, ranks_of, unique_id};
use hostccl::types::*;
use hostccl::*;

/// The environment variable that names the case. It is set in the processes that [`said`] starts.
const CASE: &str = "HOSTCCL_TEST_LIMIT";

/// Runs a case in a process of its own, and returns the lines that it wrote with [`say`].
fn said(case: &str) -> Vec<String> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture", "--test-threads", "1"]).env(CASE, case).stdin(Stdio::null());
    let done = command.output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{case}: {}\n{text}\n{}", done.status, String::from_utf8_lossy(&done.stderr));
    text.lines().filter_map(|line| line.split_once("said: ").map(|(_, text)| text.to_owned())).collect()
}

/// Sets the soft limit of a resource.
fn limit(resource: u32, value: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the first call writes to `limit`, and the second one reads it.
    let code = unsafe {
        libc::getrlimit(resource as _, &raw mut limit);
        limit.rlim_cur = value;
        libc::setrlimit(resource as _, &raw const limit)
    };
    assert_eq!(code, 0, "setrlimit({resource}, {value})");
}

/// Returns the lowest number that no open descriptor has.
fn next_descriptor() -> u64 {
    // SAFETY: descriptor 2 is open, and the copy is closed at once.
    unsafe {
        let next = libc::dup(2);
        libc::close(next);
        next as u64
    }
}

/// Returns how many bytes of address space this process uses.
fn address_space() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096
}

/// Returns a unique id, once the thread that serves it waits for ranks. If the thread began after
/// the limit on memory is set, it would find no room for its signal stack, and end the process.
fn served_id() -> ncclUniqueId {
    let (id, began) = (unique_id(), Instant::now());
    let is_waiting = |task: std::io::Result<DirEntry>| {
        fs::read_to_string(task.unwrap().path().join("stat")).is_ok_and(|stat| stat.contains("(dm-join) S"))
    };
    while !fs::read_dir("/proc/self/task").unwrap().any(is_waiting) {
        assert!(began.elapsed() < DEADLINE, "no thread dm-join waits");
        std::thread::sleep(Duration::from_millis(1));
    }
    id
}

/// Writes the outcome of a call for the process that runs the test.
fn say(code: ncclResult_t) {
    println!("said: {code} {}", if code == ncclSuccess { String::new() } else { last_error() });
}

/// Plays the case in a process that [`said`] has started. Otherwise it does nothing.
#[test]
fn child() {
    match std::env::var(CASE).as_deref() {
        Ok("split without files") => {
            // Rank 0 sets the limit when both ranks have their first communicator.
            let ready = std::sync::Barrier::new(2);
            ranks(2, |comm, rank| {
                ready.wait();
                if rank == 0 {
                    limit(libc::RLIMIT_NOFILE, next_descriptor());
                }
                ready.wait();
                let mut child = null_mut();
                // SAFETY: the communicator is live, and there is a place for the new one.
                say(unsafe { ncclCommSplit(**comm, 0, 0, &raw mut child, null_mut()) });
            });
        }
        Ok("split of one colour without files") => {
            // Rank 1 is in no new communicator, so it needs no files.
            let ready = std::sync::Barrier::new(2);
            ranks(2, |comm, rank| {
                // SAFETY: the communicator is live.
                assert_eq!(unsafe { hostcclCommSetTimeout(**comm, 60_000) }, ncclSuccess);
                ready.wait();
                if rank == 0 {
                    limit(libc::RLIMIT_NOFILE, next_descriptor());
                }
                ready.wait();
                let (mut child, mut config, mut state) = (null_mut(), config(0), ncclInProgress);
                let color = if rank == 0 { 0 } else { NCCL_SPLIT_NOCOLOR };
                // SAFETY: the communicator is live, and the places outlive the split.
                let begun = unsafe { ncclCommSplit(**comm, color, 0, &raw mut child, &raw mut config) };
                assert_eq!(begun, ncclInProgress, "{}", last_error());
                let began = Instant::now();
                while state == ncclInProgress {
                    assert!(began.elapsed() < DEADLINE, "rank {rank}: the split does not end");
                    // SAFETY: there is a place for the answer.
                    assert_eq!(unsafe { ncclCommGetAsyncError(**comm, &raw mut state) }, ncclSuccess);
                    std::thread::yield_now();
                }
                if rank == 0 {
                    return say(state);
                }
                let mut data = [1.0_f32];
                let at = data.as_mut_ptr().cast();
                let (dtype, op) = (DataType::Float32 as c_int, ReduceOp::Sum as c_int);
                // SAFETY: the buffer holds the element.
                say(unsafe { ncclAllReduce(at, at, 1, dtype, op, **comm, null_mut()) });
            });
        }
        Ok("shrink without files") => {
            let ready = std::sync::Barrier::new(3);
            ranks(3, |comm, rank| {
                // SAFETY: the communicator is live.
                assert_eq!(unsafe { hostcclCommSetTimeout(**comm, 60_000) }, ncclSuccess);
                ready.wait();
                if rank == 0 {
                    limit(libc::RLIMIT_NOFILE, next_descriptor());
                }
                ready.wait();
                let (mut excluded, mut shrunk) = ([2], null_mut());
                let at = excluded.as_mut_ptr();
                if rank != 2 {
                    // SAFETY: the communicator is live, and the places outlive the call.
                    say(unsafe { ncclCommShrink(**comm, at, 1, &raw mut shrunk, null_mut(), NCCL_SHRINK_DEFAULT) });
                }
            });
        }
        Ok("init without memory") => {
            let id = served_id();
            limit(libc::RLIMIT_AS, address_space() + (1 << 20));
            let mut comm = null_mut();
            // SAFETY: there is a place for the communicator.
            say(unsafe { ncclCommInitRank(&raw mut comm, 2, id, 0) });
        }
        Ok("thread without memory") => {
            let id = served_id();
            let mut config = config(0);
            limit(libc::RLIMIT_AS, address_space() + (1 << 20));
            let mut comm = null_mut();
            // SAFETY: there is a place for the communicator, and the configuration is whole.
            say(unsafe { ncclCommInitRankConfig(&raw mut comm, 2 as c_int, id, 0, &raw mut config) });
        }
        Ok("split without a thread") => {
            // No thread serves this id, and a new thread gets no stack of one that has ended.
            let mut id = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
            // SAFETY: there is a place for the id.
            assert_eq!(unsafe { hostcclGetUniqueIdFor(&raw mut id, 0) }, ncclSuccess);
            // Rank 0 needs a thread for its split, and rank 1 does not.
            ranks_of(id, 2, 0..2, |comm, rank| {
                let mut config = config(c_int::from(rank == 1));
                if rank == 0 {
                    limit(libc::RLIMIT_AS, address_space() + (1 << 20));
                }
                let mut child = null_mut();
                // SAFETY: the communicator is live, there is a place for the new one, and the
                // configuration is whole.
                say(unsafe { ncclCommSplit(**comm, 0, 0, &raw mut child, &raw mut config) });
            });
        }
        Ok("group without a thread") => {
            let mut id = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
            // SAFETY: there is a place for the id.
            assert_eq!(unsafe { hostcclGetUniqueIdFor(&raw mut id, 0) }, ncclSuccess);
            let other = Comm::init_all(2);
            ranks_of(id, 1, 0..1, |comm, _| {
                let (mut config, mut child, mut data) = (config(0), null_mut(), [[1.0_f32], [2.0]]);
                limit(libc::RLIMIT_AS, address_space() + (1 << 20));
                // SAFETY: the communicators are live, the places outlive the group, the
                // configuration is whole, and the buffers hold their elements.
                say(unsafe {
                    assert_eq!(ncclGroupStart(), ncclSuccess);
                    let begun = ncclCommSplit(**comm, 0, 0, &raw mut child, &raw mut config);
                    assert_eq!(begun, ncclSuccess, "{}", last_error());
                    for (comm, data) in other.iter().zip(&mut data) {
                        let at = data.as_mut_ptr().cast();
                        let (dtype, op) = (DataType::Float32 as c_int, ReduceOp::Sum as c_int);
                        assert_eq!(ncclAllReduce(at, at, 1, dtype, op, **comm, null_mut()), ncclSuccess);
                    }
                    ncclGroupEnd()
                });
                assert_eq!(data, [[3.0]; 2], "the group left out its blocking calls");
            });
        }
        Ok("group of one communicator without a thread") => {
            let mut id = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
            // SAFETY: there is a place for the id.
            assert_eq!(unsafe { hostcclGetUniqueIdFor(&raw mut id, 0) }, ncclSuccess);
            ranks_of(id, 1, 0..1, |comm, _| {
                let (mut config, mut child, mut data) = (config(0), null_mut(), [1.0_f32, 2.0]);
                let at = data.as_mut_ptr();
                limit(libc::RLIMIT_AS, address_space() + (1 << 20));
                // SAFETY: the communicator is live, the places outlive the group, the configuration
                // is whole, and the buffers hold their elements.
                say(unsafe {
                    assert_eq!(ncclGroupStart(), ncclSuccess);
                    let begun = ncclCommSplit(**comm, 0, 0, &raw mut child, &raw mut config);
                    assert_eq!(begun, ncclSuccess, "{}", last_error());
                    let dtype = DataType::Float32 as c_int;
                    assert_eq!(ncclSend(at.cast(), 1, dtype, 0, **comm, null_mut()), ncclSuccess);
                    assert_eq!(ncclRecv(at.add(1).cast(), 1, dtype, 0, **comm, null_mut()), ncclSuccess);
                    ncclGroupEnd()
                });
            });
        }
        Ok(other) => panic!("no case {other}"),
        Err(_) => {}
    }
}

/// Expects `count` refusals of the system from a case. Each has all of `texts`.
fn expect(case: &str, count: usize, texts: &[&str]) {
    let said = said(case);
    assert_eq!(said.len(), count, "{said:?}");
    for line in &said {
        assert!(line.starts_with(&ncclSystemError.to_string()), "{case}: {line}");
        assert!(texts.iter().all(|text| line.contains(text)), "{case}: expected {texts:?} in {line}");
        assert!(!line.contains("ulimit -u"), "{case}: {line}");
    }
}

#[test]
fn a_split_without_descriptors_names_the_limit_on_every_rank() {
    expect("split without files", 2, &["rank 0 could not make shared memory", "ulimit -n"]);
}

#[test]
fn a_shrink_for_which_the_first_rank_has_no_descriptor_ends_at_once_on_every_rank() {
    let mut said = said("shrink without files");
    said.sort();
    let [own, other] = &said[..] else { panic!("{said:?}") };
    let (own, other) = if own.contains("could not join") { (other, own) } else { (own, other) };
    assert!(own.starts_with(&ncclSystemError.to_string()) && own.contains("ulimit -n"), "{own}");
    assert!(other.starts_with(&ncclSystemError.to_string()), "{other}");
    assert!(other.contains("rank 0 (") && other.contains("could not join the new communicator"), "{other}");
}

#[test]
fn a_split_in_the_background_that_fails_for_one_colour_ends_the_parent_for_the_others() {
    expect("split of one colour without files", 2, &["rank 0 could not make shared memory", "ulimit -n"]);
}

#[test]
fn a_split_for_which_there_is_no_thread_ends_on_every_rank() {
    expect("split without a thread", 2, &["a thread could not be started", "ulimit -v"]);
}

#[test]
fn a_group_with_a_split_for_which_there_is_no_thread_performs_its_blocking_calls() {
    let others = "the calls of this group on other communicators were performed";
    expect("group without a thread", 1, &["a thread could not be started", "ulimit -v", others]);
}

#[test]
fn a_group_on_the_parent_of_a_split_for_which_there_is_no_thread_names_no_other_communicators() {
    let said = said("group of one communicator without a thread");
    let [line] = &said[..] else { panic!("{said:?}") };
    assert!(line.contains("a thread could not be started") && !line.contains("other communicators"), "{line}");
}

#[test]
fn a_communicator_without_address_space_names_the_limit() {
    expect("init without memory", 1, &["bytes of shared memory", "ulimit -v"]);
}

#[test]
fn a_thread_without_address_space_names_that_limit_and_not_the_one_on_threads() {
    expect("thread without memory", 1, &["a thread could not be started", "no room for its stack", "ulimit -v"]);
}
