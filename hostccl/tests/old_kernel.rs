//! Ranks on a kernel before Linux 5.16, which has no `futex_waitv`. A filter of system calls lets
//! the kernel of this machine look like one.

mod child_ranks;
mod common;

use std::ffi::c_int;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use child_ranks::{Part, Rank, listen, say, start_all};
use common::{Comm, group, ok, sum};
use hostccl::types::*;
use hostccl::*;

/// Makes `futex_waitv` fail as on an old kernel, for this thread and those that it starts.
fn forbid_waitv() {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let returned = |action: u32| statement(libc::BPF_RET | libc::BPF_K, action);
    let waitv = libc::SYS_futex_waitv as u32;
    let mut filter = [
        // The number of the system call is the first word of the data.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        libc::sock_filter { jf: 1, ..statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, waitv) },
        returned(libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
        returned(libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program outlives the calls, which change nothing else.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
        assert_eq!(libc::syscall(libc::SYS_futex_waitv, null_mut::<u8>(), 0, 0, 0, 0), -1);
    }
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ENOSYS));
}

/// How often this thread has given its processor away, which each sleep does once.
fn sleeps() -> i64 {
    // SAFETY: a structure of numbers may be zero.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is valid to write to.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) }, 0);
    usage.ru_nvcsw
}

fn send(comm: &Comm, peer: usize, data: &[i64]) {
    // SAFETY: the buffer has that many elements, and stays as it is until the call is over.
    ok(unsafe {
        ncclSend(data.as_ptr().cast(), data.len(), DataType::Int64 as c_int, peer as c_int, **comm, null_mut())
    });
}

fn recv(comm: &Comm, peer: usize, data: &mut [i64]) {
    let at = data.as_mut_ptr().cast();
    // SAFETY: as above.
    ok(unsafe { ncclRecv(at, data.len(), DataType::Int64 as c_int, peer as c_int, **comm, null_mut()) });
}

#[test]
#[ignore = "started by the other tests as ranks"]
fn child() {
    let Some(Part { scene, rank, size, id }) = Part::of_this_process() else { return };
    forbid_waitv();
    let comm = Comm::init(id, size, rank);
    match scene.as_str() {
        "messages" => {
            let other = 1 - rank;
            let mut word = [0];
            for turn in 0..300 {
                // The other rank falls asleep in some of the turns.
                std::thread::sleep(Duration::from_millis((turn % 3 == 0) as u64));
                if rank == 0 {
                    send(&comm, other, &[turn]);
                    recv(&comm, other, &mut word);
                } else {
                    recv(&comm, other, &mut word);
                    send(&comm, other, &word);
                }
                assert_eq!(word, [turn]);
            }
            // A long message needs many wake-ups of both sides.
            let mut long = vec![rank as i64; 1 << 20];
            if rank == 0 {
                send(&comm, 1, &long)
            } else {
                recv(&comm, 0, &mut long)
            }
            assert!(long.iter().all(|word| *word == 0));
            say("done");
        }
        // Rank 1 sends when the test says so. The others wait for that.
        "wait" => {
            sum(&comm, 1);
            if rank == 1 {
                say("ready");
                listen();
                (0..size).filter(|peer| *peer != 1).for_each(|peer| send(&comm, peer, &[7]));
                return say("done");
            }
            say("ready");
            let (before, mut word) = (sleeps(), [0]);
            recv(&comm, 1, &mut word);
            say(&format!("{} {}", word[0], sleeps() - before));
        }
        // All ranks exchange messages in groups, and every rank is late in some rounds.
        "groups" => {
            for round in 0..60 {
                if round % size == rank {
                    std::thread::sleep(Duration::from_millis(3));
                }
                let mine = [rank as i64 + 100 * round as i64];
                let mut theirs = vec![[-1]; size];
                group(|| {
                    for (peer, word) in theirs.iter_mut().enumerate().filter(|(peer, _)| *peer != rank) {
                        send(&comm, peer, &mine);
                        recv(&comm, peer, word);
                    }
                });
                for (peer, word) in theirs.iter().enumerate().filter(|(peer, _)| *peer != rank) {
                    assert_eq!(word[0], peer as i64 + 100 * round as i64);
                }
            }
            say("done");
        }
        // Rank 0 waits for a message, and the test kills rank 1.
        "lost" => {
            say("ready");
            let mut word = [0_i64];
            let peer = (rank == 0) as c_int;
            // SAFETY: there is room for one element.
            let result =
                unsafe { ncclRecv(word.as_mut_ptr().cast(), 1, DataType::Int64 as c_int, peer, *comm, null_mut()) };
            say(&format!("{result}"));
        }
        scene => panic!("{scene}"),
    }
}

#[test]
fn messages_of_two_ranks_arrive() {
    let started = Instant::now();
    start_all("messages", 2).iter_mut().for_each(|rank| assert_eq!(rank.hear(), "done"));
    assert!(started.elapsed() < Duration::from_secs(60));
}

#[test]
fn groups_of_five_ranks_arrive() {
    start_all("groups", 5).iter_mut().for_each(|rank| assert_eq!(rank.hear(), "done"));
}

/// Without a doorbell a rank wakes each millisecond, which is 1,000 times in this second.
#[test]
fn a_rank_that_waits_for_a_message_sleeps() {
    let mut ranks = start_all("wait", 3);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    [0, 2].iter().for_each(|rank: &usize| ranks[*rank].until_it_waits());
    std::thread::sleep(Duration::from_secs(1));
    ranks[1].tell("send");
    assert_eq!(ranks[1].hear(), "done");
    for rank in [0, 2] {
        let answer = ranks[rank].hear();
        let (word, sleeps) = answer.split_once(' ').unwrap();
        assert_eq!(word, "7");
        let sleeps: u64 = sleeps.parse().unwrap();
        assert!(sleeps < 200, "rank {rank} woke {sleeps} times in one second");
    }
}

#[test]
fn a_lost_rank_is_noticed() {
    let mut ranks: Vec<Rank> = start_all("lost", 2);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    ranks[0].until_it_waits();
    ranks[1].child.kill().unwrap();
    let started = Instant::now();
    assert_eq!(ranks[0].hear(), ncclRemoteError.to_string());
    assert!(started.elapsed() < Duration::from_secs(20));
}
