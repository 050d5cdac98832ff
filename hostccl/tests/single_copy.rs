//! Ranks that read large data straight from each other's buffers. The data is right whether they
//! read or copy. A rank that dies, gives up or may not be read never makes another rank report
//! wrong data.
//!
//! The ranks are child processes, which play a scene (child_ranks).

mod child_ranks;
mod common;

use std::env;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use child_ranks::{Part, Rank, listen, say, say_result};
use common::{group, init, ok, unique_id};
use hostccl::types::*;
use hostccl::*;

const SWITCH: &str = "DM_HOSTCCL_SINGLE_COPY";

/// How long ranks may take. It is long enough for a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// The length of a message whose copy takes so long that a test can stop it in the middle.
const LONG: usize = 256 << 20;

const BYTE: c_int = DataType::Uint8 as c_int;

/// The byte at a place of what `from` sends to `to` in a round.
fn byte(from: usize, to: usize, round: usize, at: usize) -> u8 {
    (at.wrapping_mul(31) ^ at >> 12 ^ from << 5 ^ to << 3 ^ round) as u8
}

fn fill(block: &mut [u8], from: usize, to: usize, round: usize) {
    block.iter_mut().enumerate().for_each(|(at, value)| *value = byte(from, to, round, at));
}

#[track_caller]
fn check(block: &[u8], from: usize, to: usize, round: usize) {
    let wrong = block.iter().enumerate().find(|(at, value)| **value != byte(from, to, round, *at));
    assert_eq!(wrong, None, "from {from} to {to} in round {round}, of {} bytes", block.len());
}

fn send(comm: ncclComm_t, buffer: &[u8], peer: usize) -> ncclResult_t {
    // SAFETY: the buffer has that many bytes.
    unsafe { ncclSend(buffer.as_ptr().cast(), buffer.len(), BYTE, peer as c_int, comm, null_mut()) }
}

fn recv(comm: ncclComm_t, buffer: &mut [u8], peer: usize) -> ncclResult_t {
    // SAFETY: the buffer has that many bytes.
    unsafe { ncclRecv(buffer.as_mut_ptr().cast(), buffer.len(), BYTE, peer as c_int, comm, null_mut()) }
}

/// An all-to-all with blocks of `each` bytes, apart and in place.
fn all_to_all(comm: ncclComm_t, rank: usize, size: usize, round: usize, each: usize) {
    let (mut out, mut into) = (vec![0; each * size], vec![0xEE; each * size]);
    out.chunks_mut(each).enumerate().for_each(|(to, block)| fill(block, rank, to, round));
    let (from, to) = (out.as_ptr().cast(), into.as_mut_ptr().cast());
    // SAFETY: the buffers have a block for each rank.
    ok(unsafe { ncclAlltoAll(from, to, each, BYTE, comm, null_mut()) });
    into.chunks(each).enumerate().for_each(|(from, block)| check(block, from, rank, round));
    let buffer = out.as_mut_ptr();
    // SAFETY: as above.
    ok(unsafe { ncclAlltoAll(buffer.cast(), buffer.cast(), each, BYTE, comm, null_mut()) });
    out.chunks(each).enumerate().for_each(|(from, block)| check(block, from, rank, round));
}

/// Large all-to-alls, in the middle of which rank 1 loses the right to read.
fn lose_the_right(comm: ncclComm_t, rank: usize, size: usize) {
    let each = 2_000_003;
    all_to_all(comm, rank, size, 0, each);
    let before = bytes_read_from_ranks();
    if rank == 1 {
        forbid_reads();
    }
    (1..4).for_each(|round| all_to_all(comm, rank, size, round, each));
    say(&format!("{before} {}", bytes_read_from_ranks() - before));
}

/// Sends messages around the ring, and makes all-to-all and all-to-all-v, with sizes around the
/// limits of the engine. Then says how many bytes came straight from the buffers of other ranks.
fn exchange(comm: ncclComm_t, rank: usize, size: usize) {
    let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
    for (round, bytes) in [1, 63, 4096, 65_537, 300_000, 1 << 20, 5_000_001, 64, 9 << 20].into_iter().enumerate() {
        let (mut out, mut into) = (vec![0; bytes], vec![0xEE; bytes + 1]);
        fill(&mut out, rank, next, round);
        group(|| {
            ok(recv(comm, &mut into[..bytes], last));
            ok(send(comm, &out, next));
        });
        check(&into[..bytes], last, rank, round);
        assert_eq!(into[bytes], 0xEE);
    }
    for (round, each) in [1000, 70_000, 2_500_001, 5 << 20].into_iter().enumerate() {
        all_to_all(comm, rank, size, round, each);
    }
    for round in 0..6 {
        // Every pair of ranks has a count of its own, and some pairs have none.
        let count = |from: usize, to: usize| (from * 7 + to * 3 + round) % 4 * [10, 30_000, 1_000_003][round % 3];
        let (sent, got): (Vec<usize>, Vec<usize>) =
            (0..size).map(|peer| (count(rank, peer), count(peer, rank))).unzip();
        let (mut out, mut into) = (vec![0; sent.iter().sum()], vec![0xEE; got.iter().sum()]);
        let mut rest = &mut out[..];
        for (to, count) in sent.iter().enumerate() {
            let (block, others) = rest.split_at_mut(*count);
            fill(block, rank, to, round);
            rest = others;
        }
        let (from, to): (*const c_void, *mut c_void) = (out.as_ptr().cast(), into.as_mut_ptr().cast());
        let (no_places, sent, counts) = (std::ptr::null(), sent.as_ptr(), got.as_ptr());
        // SAFETY: the buffers have the blocks, one behind the other.
        ok(unsafe { hostcclAlltoAllv(from, sent, no_places, to, counts, no_places, BYTE, comm, null_mut()) });
        let mut rest = &into[..];
        for (from, count) in got.iter().enumerate() {
            let (block, others) = rest.split_at(*count);
            check(block, from, rank, round);
            rest = others;
        }
    }
    say(&format!("{}", bytes_read_from_ranks()));
}

/// Makes the kernel refuse `process_vm_readv` in this process, as the sandbox of a container does.
fn forbid_reads() {
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let filter = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_process_vm_readv as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the program outlives the call, and only changes what this process may do.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

/// Gives up root's rights, so that the kernel checks who may read whom.
fn become_nobody() {
    // SAFETY: the calls change only the rights of this process.
    unsafe {
        if libc::geteuid() == 0 {
            assert_eq!(libc::setresgid(65_534, 65_534, 65_534), 0);
            assert_eq!(libc::setresuid(65_534, 65_534, 65_534), 0);
        }
        assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0), 0);
    }
}

/// Sends to rank 1, or receives from rank 0, again and again until a call fails.
fn flow(comm: ncclComm_t, rank: usize) -> ncclResult_t {
    let (began, mut buffer) = (Instant::now(), vec![0_u8; LONG]);
    let (mut result, mut round) = (ncclSuccess, 0);
    while result == ncclSuccess && began.elapsed() < PATIENCE {
        if rank == 0 {
            buffer.fill(round);
            result = send(comm, &buffer, 1);
        } else {
            result = recv(comm, &mut buffer, 0);
            let is_right = buffer.iter().all(|value| *value == round);
            assert!(result != ncclSuccess || is_right, "wrong data in round {round}");
        }
        round = round.wrapping_add(1);
    }
    result
}

/// Exchanges large blocks again and again until a call fails.
fn flow_all(comm: ncclComm_t, size: usize) -> ncclResult_t {
    let (began, each) = (Instant::now(), (32 << 20) / size);
    let (mut out, mut into) = (vec![0_u8; each * size], vec![0_u8; each * size]);
    let (mut result, mut round) = (ncclSuccess, 0);
    while result == ncclSuccess && began.elapsed() < PATIENCE {
        out.fill(round);
        let (from, to) = (out.as_ptr().cast(), into.as_mut_ptr().cast());
        // SAFETY: the buffers have a block for each rank.
        result = unsafe { ncclAlltoAll(from, to, each, BYTE, comm, null_mut()) };
        let is_right = into.iter().all(|value| *value == round);
        assert!(result != ncclSuccess || is_right, "wrong data in round {round}");
        round = round.wrapping_add(1);
    }
    result
}

/// Sends memory in whose middle a page is missing.
fn send_a_hole(comm: ncclComm_t, bytes: usize) -> ncclResult_t {
    // SAFETY: a new mapping touches no other memory, and only a page of its own is unmapped.
    unsafe {
        let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let at = libc::mmap(null_mut(), bytes, rights, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        assert_eq!(libc::munmap(at.byte_add(bytes / 2 / 4096 * 4096), 4096), 0);
        ncclSend(at, bytes, BYTE, 1, comm, null_mut())
    }
}

/// Plays one rank of a scene. It is no test by itself.
#[test]
#[ignore = "started by the other tests as a rank"]
fn child() {
    let Some(Part { scene: play, rank, size, id }) = Part::of_this_process() else { return };
    match play.as_str() {
        "forbidden" if rank == 1 => forbid_reads(),
        "hidden" => become_nobody(),
        _ => {}
    }
    let (result, comm) = init(size as c_int, id, rank as c_int);
    assert_eq!(result, ncclSuccess, "{}", common::last_error());
    if play == "hidden" && rank == 1 {
        // SAFETY: the call changes only who may look at this process.
        assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) }, 0);
    }
    say("ready");
    match play.as_str() {
        "exchange" | "forbidden" | "hidden" => exchange(comm, rank, size),
        "lose" => lose_the_right(comm, rank, size),
        "flow" => say_result(comm, flow(comm, rank)),
        "flow all" => say_result(comm, flow_all(comm, size)),
        "hole" if rank == 0 => say_result(comm, send_a_hole(comm, 8 << 20)),
        "hole" => say_result(comm, recv(comm, &mut vec![0; 8 << 20], 0)),
        // Rank 0 gives up its send and then changes its buffer.
        "give up" if rank == 0 => {
            let mut buffer = vec![7; LONG];
            // SAFETY: the communicator is live.
            assert_eq!(unsafe { hostcclCommSetTimeout(comm, 400) }, ncclSuccess);
            say("sending");
            let result = send(comm, &buffer, 1);
            buffer.fill(9);
            say_result(comm, result);
            listen();
        }
        "give up" => {
            let mut buffer = vec![0; LONG];
            listen();
            say("receiving");
            let result = recv(comm, &mut buffer, 0);
            let is_right = buffer.iter().all(|value| *value == 7);
            say(&format!("{result} {is_right}"));
        }
        _ => {}
    }
    listen();
}

/// Starts all ranks of a scene, with a value of the variable. Returns when all have joined.
fn start(scene: &str, size: usize, switch: &str) -> Vec<Rank> {
    let id = unique_id();
    let start = |rank| Rank::start_with(scene, rank, size, &id, &[(SWITCH, switch)]);
    let mut ranks: Vec<Rank> = (0..size).map(start).collect();
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ready");
    }
    ranks
}

/// Whether each process is a host of its own, so that nobody reads anybody's memory.
fn are_apart() -> bool {
    env::var("DM_HOSTCCL_SHM").is_ok_and(|value| value == "0")
}

/// Returns how many bytes each rank of a scene has read from the others' buffers.
fn bytes_read(scene: &str, size: usize, switch: &str) -> Vec<u64> {
    start(scene, size, switch).iter_mut().map(|rank| rank.hear().parse().unwrap()).collect()
}

#[test]
fn data_is_right_where_ranks_read_each_others_buffers_and_where_they_do_not() {
    for size in [2, 3] {
        let always = bytes_read("exchange", size, "always");
        // Messages alone are more than 15 MB.
        assert!(are_apart() || always.iter().all(|bytes| *bytes > 20_000_000), "{always:?}");
        assert_eq!(bytes_read("exchange", size, "0"), vec![0; size]);
    }
    // Here the machine decides.
    bytes_read("exchange", 4, "1");
}

/// A rank that may not read finds out with its first message, and the others may have read their
/// first messages by then.
fn no_rank_reads_much(scene: &str) {
    let read = bytes_read(scene, 3, "always");
    assert!(read.iter().all(|bytes| *bytes < 5000), "{scene}: {read:?}");
}

#[test]
fn no_rank_reads_where_one_rank_may_not_read() {
    no_rank_reads_much("forbidden");
}

#[test]
fn no_rank_reads_where_one_rank_may_not_be_read() {
    no_rank_reads_much("hidden");
}

/// All ranks begin the call again, through shared memory.
#[test]
fn a_rank_that_loses_the_right_to_read_in_an_all_to_all_still_gets_its_data() {
    if are_apart() {
        return;
    }
    for (rank, process) in start("lose", 3, "always").iter_mut().enumerate() {
        let said = process.hear();
        let read: Vec<u64> = said.split(' ').map(|bytes| bytes.parse().unwrap()).collect();
        assert!(read[0] > 3_000_000, "rank {rank}: {said}");
        // The others read once more, in the call in which rank 1 finds out.
        assert!(
            if rank == 1 { read[1] == 0 } else { (3_000_000..5_000_000).contains(&read[1]) },
            "rank {rank}: {said}"
        );
    }
}

#[test]
fn ranks_with_different_values_of_the_variable_agree() {
    let id = unique_id();
    let start = |rank| Rank::start_with("exchange", rank, 3, &id, &[(SWITCH, ["always", "0", "1"][rank])]);
    let mut ranks: Vec<Rank> = (0..3).map(start).collect();
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ready");
    }
    // The rank that never reads makes all others use shared memory.
    assert_eq!(ranks.iter_mut().map(Rank::hear).collect::<Vec<_>>(), ["0"; 3]);
}

#[test]
fn a_rank_killed_in_the_middle_of_a_read_is_named() {
    for (scene, size) in [("flow", 2), ("flow all", 3)] {
        for millis in [300, 400, 530] {
            let mut ranks = start(scene, size, "always");
            std::thread::sleep(Duration::from_millis(millis));
            ranks[0].child.kill().unwrap();
            let pid = ranks[0].child.id();
            for rank in &mut ranks[1..] {
                let said = rank.hear();
                assert!(said.starts_with(&format!("{ncclRemoteError} 0 ")), "{scene}: {said}");
                let gone =
                    if are_apart() { "rank 0 has gone".to_owned() } else { format!("rank 0 (pid {pid}) has gone") };
                assert!(said.contains(&gone), "{scene}: {said}");
            }
        }
    }
}

#[test]
fn memory_that_is_not_there_is_an_error_on_both_sides() {
    if are_apart() {
        return;
    }
    for mut rank in start("hole", 2, "always") {
        let said = rank.hear();
        assert!(said.starts_with(&format!("{ncclInvalidArgument} ")), "{said}");
        assert!(said.contains("rank 0 sends 8388608 bytes from address 0x"), "{said}");
        assert!(said.contains("where not all of this memory can be read"), "{said}");
    }
}

/// A receiver that is stopped in the middle of a read finds out, when it goes on, that the sender
/// has given up and changed its buffer.
#[test]
fn a_sender_that_gives_up_never_makes_its_receiver_report_other_data() {
    if are_apart() {
        return;
    }
    let mut were_stopped = 0;
    for delay in [2, 5, 10, 15, 20] {
        let mut ranks = start("give up", 2, "always");
        let receiver = ranks[1].child.id() as libc::pid_t;
        assert_eq!(ranks[0].hear(), "sending");
        ranks[1].tell("go");
        assert_eq!(ranks[1].hear(), "receiving");
        std::thread::sleep(Duration::from_millis(delay));
        // SAFETY: the process is a child of this one, which has not waited for it.
        assert_eq!(unsafe { libc::kill(receiver, libc::SIGSTOP) }, 0);
        let said = ranks[0].hear();
        // SAFETY: as above.
        assert_eq!(unsafe { libc::kill(receiver, libc::SIGCONT) }, 0);
        let heard = ranks[1].hear();
        if said.starts_with(&format!("{ncclSuccess} ")) {
            assert_eq!(heard, format!("{ncclSuccess} true"));
        } else {
            were_stopped += 1;
            assert!(!heard.starts_with(&format!("{ncclSuccess} ")), "the sender: {said}; the receiver: {heard}");
        }
    }
    assert!(were_stopped > 0, "no receiver was stopped in the middle of its read");
}
