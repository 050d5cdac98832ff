//! A rank that dies, leaves or aborts gives every other rank an error soon, and leaves nothing
//! behind.
//!
//! The ranks are child processes, which play a scene (child_ranks).

mod child_ranks;
mod common;

use std::env;
use std::ffi::c_int;
use std::fs;
use std::process::{Command, Stdio};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use child_ranks::{
    Part, Rank, leave_as_told, listen, names_at_the_deadline, say, say_result, set_time_as_told, start_all, watch,
};
use common::{config, from_hex, hex_of, init, last_error, unique_id, until_thread_asleep};
use hostccl::types::*;
use hostccl::*;

/// How long a test waits for a condition. It is long enough for a loaded machine, and the times
/// that a test measures have bounds of their own.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long an error may take to reach all ranks that the test hears. It takes a hundredth of that
/// where nothing else runs.
const SOON: Duration = Duration::from_secs(20);

fn all_reduce(comm: ncclComm_t, data: &mut [f32]) -> ncclResult_t {
    // SAFETY: the slice holds what the call says.
    unsafe {
        ncclAllReduce(
            data.as_ptr().cast(),
            data.as_mut_ptr().cast(),
            data.len(),
            DataType::Float32 as c_int,
            ReduceOp::Max as c_int,
            comm,
            null_mut(),
        )
    }
}

/// Sends large messages from rank 0 to rank 1 until a call fails. Each message is filled with a
/// value of its own, which rank 1 checks. Rank 0 changes its buffer as soon as a call has failed.
fn stream(comm: ncclComm_t, rank: usize) -> ncclResult_t {
    let (started, mut buffer) = (Instant::now(), vec![0_u8; 64 << 20]);
    let (count, dtype) = (buffer.len(), DataType::Uint8 as c_int);
    for value in (0..=u8::MAX).cycle() {
        assert!(started.elapsed() < PATIENCE);
        if rank == 0 {
            buffer.fill(value);
        }
        // SAFETY: the buffer has that many bytes.
        let result = unsafe {
            match rank {
                0 => ncclSend(buffer.as_ptr().cast(), count, dtype, 1, comm, null_mut()),
                _ => ncclRecv(buffer.as_mut_ptr().cast(), count, dtype, 0, comm, null_mut()),
            }
        };
        if result != ncclSuccess {
            buffer.fill(!value);
            return result;
        }
        // A comparison of slices is one memcmp, which is fast without optimisation, too.
        let is_whole = || buffer[0] == value && buffer[1..] == buffer[..count - 1];
        assert!(rank == 0 || is_whole(), "message {value} is wrong");
    }
    unreachable!("the values have no end")
}

/// Whether each process is a host of its own. Ranks of other hosts do not know a rank's process.
fn are_apart() -> bool {
    env::var("DM_HOSTCCL_SHM").is_ok_and(|value| value == "0")
}

/// How many descriptors of processes this process has.
fn pidfds() -> usize {
    let links = fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
    links.filter(|link| link.to_string_lossy().contains("pidfd")).count()
}

/// Joins a communicator whose other rank never comes, and sets its time while it is made.
fn join_alone() {
    let mut config = config(0);
    let (mut comm, mut state, id) = (null_mut(), ncclInProgress, unique_id());
    // SAFETY: there are places for the communicator and the answer, and the configuration is whole.
    unsafe {
        assert_eq!(ncclCommInitRankConfig(&raw mut comm, 2, id, 0, &raw mut config), ncclInProgress);
        assert_eq!(hostcclCommSetTimeout(comm, 200), ncclSuccess);
        assert_eq!(hostcclCommWait(comm, 30_000, &raw mut state), ncclSuccess);
    }
    say(&format!("{state} {}", last_error()));
}

/// Plays one rank of a scene. It is no test by itself.
#[test]
#[ignore = "started by the other tests as a rank"]
fn child() {
    let Some(Part { scene: play, rank, size, id }) = Part::of_this_process() else { return };
    if play == "maker" {
        say(&hex_of(&unique_id()));
        return drop(listen());
    }
    if play == "timeout all" {
        let mut comms = [null_mut(); 2];
        // SAFETY: there are places for the communicators.
        let result = unsafe { ncclCommInitAll(comms.as_mut_ptr(), 2, std::ptr::null()) };
        return say(&format!("{result} {}", holdings()));
    }
    if play == "timeout 600000" {
        return join_alone();
    }
    let began = Instant::now();
    let (result, comm) = init(size as c_int, id, rank as c_int);
    if result != ncclSuccess {
        return say(&format!("init {result} {}", last_error()));
    }
    say("ready");
    match play.as_str() {
        // Every rank reduces until a call fails.
        "reduce" => {
            let mut data = vec![1.0; 1 << 20];
            let started = Instant::now();
            let mut result = ncclSuccess;
            while result == ncclSuccess && started.elapsed() < PATIENCE {
                result = all_reduce(comm, &mut data);
            }
            say_result(comm, result);
            let again = all_reduce(comm, &mut data[..1]);
            say(&format!("{again} {}", last_error()));
        }
        // Rank 0 waits for a message of rank 1, and the others wait for one of rank 0.
        "message" => {
            let mut data = vec![1.0_f32; 10];
            // SAFETY: the buffer holds ten elements.
            let result = unsafe {
                let (buffer, peer) = (data.as_mut_ptr().cast(), if rank == 0 { 1 } else { 0 });
                ncclRecv(buffer, data.len(), DataType::Float32 as c_int, peer, comm, null_mut())
            };
            say_result(comm, result);
        }
        "stream" => say_result(comm, stream(comm, rank)),
        // Only the sender gives up.
        "impatient stream" => {
            // SAFETY: the communicator is live.
            assert!(rank == 1 || unsafe { hostcclCommSetTimeout(comm, 2000) } == ncclSuccess);
            say_result(comm, stream(comm, rank))
        }
        // Rank 0 leaves in the way that the test writes, and the others reduce once.
        "leave" if rank == 0 => leave_as_told(comm),
        "leave" => say_result(comm, all_reduce(comm, &mut [0.0; 4])),
        // All ranks but rank 1 reduce.
        "late" if rank != 1 => {
            set_time_as_told(comm);
            say_result(comm, all_reduce(comm, &mut [0.0; 4]))
        }
        // All ranks but rank 1 split.
        "split" if rank != 1 => {
            let mut new = null_mut();
            // SAFETY: there is a place for the communicator.
            let result = unsafe { ncclCommSplit(comm, 0, rank as c_int, &raw mut new, null_mut()) };
            assert!(new.is_null());
            say_result(comm, result);
        }
        // Every rank asks whether its communicator is made, and then for its state.
        "ask" => {
            let mut state = ncclInProgress;
            // SAFETY: there is a place for the answer.
            assert_eq!(unsafe { hostcclCommWait(comm, 0, &raw mut state) }, ncclSuccess);
            assert_eq!(state, ncclSuccess);
            let (first, age) = (pidfds(), began.elapsed().as_millis());
            // SAFETY: as above.
            assert_eq!(unsafe { ncclCommGetAsyncError(comm, &raw mut state) }, ncclSuccess);
            assert_eq!(state, ncclSuccess);
            say(&format!("{first} {age} {}", pidfds()));
        }
        // Every rank only asks for the state of its communicator.
        "watch" => say_result(comm, watch(comm)),
        _ => {}
    }
    listen();
}

/// Kills `victim` and checks the errors of the others. Returns how long they took.
fn kill_and_hear(play: &str, size: usize, victim: usize) -> Duration {
    let mut took = Duration::ZERO;
    let mut ranks = start_all(play, size);
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ready");
    }
    // The ranks are most likely in the middle of the call by then. The error is the same at any
    // moment.
    std::thread::sleep(Duration::from_millis(50));
    ranks[victim].child.kill().unwrap();
    let killed = Instant::now();
    let pid = ranks[victim].child.id();
    for (rank, process) in ranks.iter_mut().enumerate().filter(|(rank, _)| *rank != victim) {
        let said = process.hear();
        took = killed.elapsed();
        assert!(took < SOON, "rank {rank} took {took:?}");
        let expected = format!("{ncclRemoteError} {victim} ");
        assert!(said.starts_with(&expected), "{play}, rank {rank}: {said}");
        let (gone, more) = match are_apart() {
            false => (format!("rank {victim} (pid {pid}) has gone"), " (its process exited or was killed)"),
            true => (format!("rank {victim} has gone"), ": "),
        };
        assert!(said.contains(&format!("{gone}{more}")), "{play}, rank {rank}: {said}");
        if play == "reduce" {
            let again = process.hear();
            assert!(again.starts_with(&format!("{ncclRemoteError} ncclAllReduce: ")), "{again}");
            // The end of a rank of another host may be found by the wire's thread, or by a rank
            // that is between two calls. Then the failure belongs to no call.
            let in_a_call = again.contains("failed earlier, in ncclAllReduce(");
            assert!(in_a_call || are_apart() && again.contains("failed earlier: "), "{again}");
            assert!(again.contains(&gone), "{again}");
        }
    }
    took
}

/// A time includes what the processes and the test wait for a processor. On a busy machine, the
/// best of some tries shows the time of the ranks themselves.
#[test]
fn a_rank_killed_in_an_all_reduce_fails_all_others_within_two_seconds() {
    for (size, victim) in [(4, 2), (3, 0)] {
        let is_in_time = |_| kill_and_hear("reduce", size, victim) < Duration::from_secs(2);
        assert!((0..3).any(is_in_time), "{size} ranks without rank {victim}");
    }
}

#[test]
fn a_rank_killed_while_others_wait_for_messages_fails_also_those_that_wait_for_another() {
    kill_and_hear("message", 4, 1);
}

#[test]
fn a_rank_killed_in_the_middle_of_a_large_message_fails_the_other_side() {
    kill_and_hear("stream", 2, 0);
    kill_and_hear("stream", 2, 1);
}

#[test]
fn a_receiver_that_comes_back_after_its_sender_has_given_up_gets_an_error_and_no_wrong_data() {
    let id = unique_id();
    let start = |rank| Rank::start("impatient stream", rank, 2, &id);
    let mut ranks = [start(0), start(1)];
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ready");
    }
    std::thread::sleep(Duration::from_millis(50));
    let receiver = ranks[1].child.id() as libc::pid_t;
    // SAFETY: the process is a child of this one that was not waited for.
    assert_eq!(unsafe { libc::kill(receiver, libc::SIGSTOP) }, 0);
    let said = ranks[0].hear();
    assert!(said.starts_with(&format!("{ncclTimeout} 1 ")), "{said}");
    // SAFETY: as above.
    assert_eq!(unsafe { libc::kill(receiver, libc::SIGCONT) }, 0);
    let said = ranks[1].hear();
    assert!(said.starts_with(&format!("{ncclTimeout} ")), "{said}");
}

#[test]
fn a_rank_killed_before_its_split_fails_the_split() {
    kill_and_hear("split", 4, 1);
}

#[test]
fn a_watchdog_that_only_asks_hears_of_the_death() {
    kill_and_hear("watch", 3, 1);
}

/// The start of a job on one host would take a third longer if each rank looked at all others at
/// once.
#[test]
fn a_rank_that_asks_whether_a_communicator_is_made_does_not_look_at_its_peers() {
    let mut ranks = start_all("ask", 4);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    for rank in &mut ranks {
        let said = rank.hear();
        let [first, age, later] = said.split(' ').map(|part| part.parse::<u64>().unwrap()).collect::<Vec<_>>()[..]
        else {
            panic!("{said}")
        };
        // A rank that has waited for the others for 20 ms has looked at them.
        assert!(first == 0 || age >= 20, "{first} descriptors of processes {age} ms after the start");
        assert_eq!(later, if are_apart() { 0 } else { 3 }, "{said}");
    }
}

#[test]
fn a_rank_killed_during_init_fails_the_others_that_wait_there() {
    let id = unique_id();
    // Rank 2 never comes.
    let mut ranks: Vec<Rank> = (0..2).map(|rank| Rank::start("reduce", rank, 3, &id)).collect();
    let victim = ranks[1].child.id();
    // A rank that has mapped the segment and waits has joined. On a host of its own, a rank makes a
    // segment, which it does not map yet. When the rank and the maker of the id wait, the maker
    // knows the rank.
    let holds = |pid: u32| {
        let links =
            fs::read_dir(format!("/proc/{pid}/fd")).unwrap().filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
        links.into_iter().any(|link| link.to_string_lossy().contains("/memfd:hostccl"))
    };
    let mapped = |pid: u32| fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().contains("/memfd:hostccl");
    let is_there = |pid: u32| if are_apart() { holds(pid) } else { mapped(pid) };
    let started = Instant::now();
    while !ranks.iter().all(|rank| is_there(rank.child.id())) {
        assert!(started.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(1));
    }
    Rank::until_all_wait(&ranks);
    ranks[1].child.kill().unwrap();
    let killed = Instant::now();
    let said = ranks[0].hear();
    assert!(killed.elapsed() < SOON);
    assert!(said.starts_with(&format!("init {ncclRemoteError}")), "{said}");
    let gone = match are_apart() {
        false => format!("rank 1 (pid {victim}) has gone (its process exited or was killed)"),
        true => format!("rank 1 (pid {victim} at "),
    };
    let end = if are_apart() { "ended or lost its connection before all ranks had joined" } else { "" };
    assert!(said.contains(&gone) && said.ends_with(end), "{said}");
}

#[test]
fn an_id_whose_maker_has_died_says_so() {
    let mut maker = Rank::start("maker", 0, 2, &unique_id());
    let id = from_hex(&maker.hear());
    maker.child.kill().unwrap();
    let expected = match are_apart() {
        false => format!("(pid {}) ended before all ranks had joined", maker.child.id()),
        true => "the process that made it has gone: nobody listens at ".to_owned(),
    };
    // At first the process may still be ending, or be a zombie. After the wait it does not exist.
    for _ in 0..2 {
        let (result, comm) = init(2, id, 1);
        assert!(comm.is_null());
        assert_eq!((result, last_error().contains(&expected)), (ncclRemoteError, true), "{}", last_error());
        maker.child.wait().unwrap();
    }
}

#[test]
fn a_rank_that_does_not_come_in_time_is_named() {
    names_at_the_deadline(1, |millis| {
        let mut ranks = start_all("late", 3);
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
        let _missing = ranks.remove(1);
        ranks.iter_mut().for_each(|rank| rank.tell(&millis.to_string()));
        ranks.iter_mut().map(Rank::hear).collect()
    });
}

fn leave_and_hear(how: &str, expected: &str) {
    let mut ranks = start_all("leave", 3);
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ready");
    }
    std::thread::sleep(Duration::from_millis(50));
    ranks[0].tell(how);
    assert_eq!(ranks[0].hear(), "left");
    let left = Instant::now();
    for rank in &mut ranks[1..] {
        let said = rank.hear();
        assert!(left.elapsed() < SOON, "{how}: {:?}", left.elapsed());
        assert!(said.starts_with(&format!("{ncclRemoteError} 0 ")) && said.ends_with(expected), "{how}: {said}");
    }
}

#[test]
fn peers_of_a_rank_that_aborts_get_an_error() {
    leave_and_hear("abort", "aborted its communicator");
}

#[test]
fn peers_that_still_need_a_rank_that_has_left_get_an_error() {
    leave_and_hear("destroy", "has destroyed its communicator");
}

#[test]
fn abort_wakes_a_blocked_call_of_the_same_process() {
    let id = unique_id();
    let comms: Vec<usize> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2).map(|rank| scope.spawn(move || init(2, id, rank).1 as usize)).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let comm = |rank: usize| comms[rank] as ncclComm_t;
    std::thread::scope(|scope| {
        let (tell, told) = std::sync::mpsc::channel();
        let blocked = scope.spawn(move || {
            // SAFETY: the call has no conditions.
            tell.send(unsafe { libc::gettid() }).unwrap();
            (all_reduce(comm(0), &mut [1.0]), last_error())
        });
        until_thread_asleep(told.recv().unwrap());
        let aborted = Instant::now();
        // SAFETY: the communicator is live.
        assert_eq!(unsafe { ncclCommAbort(comm(0)) }, ncclSuccess);
        let (result, message) = blocked.join().unwrap();
        assert!(aborted.elapsed() < SOON, "{:?}", aborted.elapsed());
        assert_eq!(result, ncclInternalError);
        assert!(message.ends_with("aborted by ncclCommAbort in this process"), "{message}");
    });
    assert_eq!(all_reduce(comm(0), &mut [1.0]), ncclInvalidArgument, "the handle is gone");
    assert_eq!(all_reduce(comm(1), &mut [1.0]), ncclRemoteError);
    // SAFETY: the communicator is live.
    assert_eq!(unsafe { ncclCommDestroy(comm(1)) }, ncclSuccess);
}

#[test]
fn abort_ends_an_init_that_waits_for_ranks_that_never_come() {
    let id = unique_id();
    let mut config = config(0);
    let mut comm = null_mut();
    // SAFETY: the communicator is live, and there are places for the answers.
    unsafe {
        assert_eq!(ncclCommInitRankConfig(&raw mut comm, 2, id, 0, &raw mut config), ncclInProgress);
        let mut state = -1;
        assert_eq!(ncclCommGetAsyncError(comm, &raw mut state), ncclSuccess);
        assert_eq!(state, ncclInProgress);
        assert_eq!(all_reduce(comm, &mut [1.0]), ncclInvalidArgument, "not before it is done");
        let started = Instant::now();
        assert_eq!(ncclCommAbort(comm), ncclSuccess);
        assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
        assert_eq!(ncclCommGetAsyncError(comm, &raw mut state), ncclInvalidArgument);
    }
}

/// Returns how many descriptors and mappings of this process belong to segments.
fn holdings() -> usize {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let held = descriptors.filter(|target| target.to_string_lossy().contains("memfd:hostccl")).count();
    held + fs::read_to_string("/proc/self/maps").unwrap().matches("memfd:hostccl").count()
}

#[test]
fn nothing_is_held_after_a_destroy() {
    // The other tests of this program hold segments at this time, so a process that runs only this
    // test looks.
    let status = Command::new(env::current_exe().unwrap())
        .args(["--exact", "holds_nothing", "--ignored", "--test-threads=1"])
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
}

#[test]
#[ignore = "started by nothing_is_held_after_a_destroy"]
fn holds_nothing() {
    for _ in 0..20 {
        let mut comms = [null_mut(); 3];
        // SAFETY: places for the communicators, which live until they are destroyed.
        unsafe {
            assert_eq!(ncclCommInitAll(comms.as_mut_ptr(), 3, std::ptr::null()), ncclSuccess);
            let mut parts = [null_mut(); 3];
            assert_eq!(ncclGroupStart(), ncclSuccess);
            for (rank, (comm, part)) in comms.iter().zip(&mut parts).enumerate() {
                assert_eq!(ncclCommSplit(*comm, rank as c_int % 2, 0, part, null_mut()), ncclSuccess);
            }
            assert_eq!(ncclGroupEnd(), ncclSuccess);
            assert_eq!(holdings(), 6, "one mapping for each, and no descriptor");
            for comm in comms.into_iter().chain(parts) {
                assert_eq!(ncclCommDestroy(comm), ncclSuccess);
            }
        }
        assert_eq!(holdings(), 0);
    }
}

#[test]
fn a_timeout_in_the_environment_that_is_no_time_is_refused_where_a_communicator_is_made() {
    for value in ["abc", "-1", "99999999999999999999"] {
        let said = Rank::start(&format!("timeout {value}"), 0, 1, &unique_id()).hear();
        assert!(said.starts_with(&format!("init {ncclInvalidArgument} ncclCommInitRank: ")), "{said}");
        assert!(said.contains(&format!("HOSTCCL_TIMEOUT_MS is \"{value}\"")), "{said}");
    }
}

#[test]
fn ranks_of_one_process_that_are_refused_leave_no_segment_behind() {
    let said = Rank::start("timeout all", 0, 1, &unique_id()).hear();
    assert_eq!(said, format!("{ncclInvalidArgument} 0"));
}

#[test]
fn the_time_of_a_communicator_in_the_making_goes_before_the_environment() {
    let said = Rank::start("timeout 600000", 0, 2, &unique_id()).hear();
    assert!(said.starts_with(&format!("{ncclTimeout} ")), "{said}");
    assert!(said.contains("did not come within 200 ms"), "{said}");
}
