//! `without_thread`: communicators that are made inside `hostcclCommWait`, by no thread of the
//! engine. All non-blocking communicators of this program are made in this way.

mod common;

use std::fs;
use std::ptr::null_mut;
use std::sync::Barrier;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use common::*;
use hostccl::types::*;
use hostccl::*;

/// The longest time of an end that need not wait. An end that waits in vain lasts five seconds.
const SOON: Duration = Duration::from_secs(20);

/// Begins to join as one rank. Nothing happens until a thread waits.
fn begin(id: ncclUniqueId, size: i32, rank: i32) -> Comm {
    let (mut comm, mut config) = (null_mut(), config(0));
    // SAFETY: there is a place for the communicator, and the configuration is whole.
    let began = without_thread(|| unsafe { ncclCommInitRankConfig(&raw mut comm, size, id, rank, &raw mut config) });
    assert_eq!(began, ncclInProgress, "{}", last_error());
    Comm(comm)
}

/// Begins to split. The place gets the new communicator once waits for the parent have made it.
fn begin_split(parent: &Comm, key: i32, place: &mut ncclComm_t) {
    let mut config = config(0);
    // SAFETY: the place stays valid until the split is done, and the configuration is whole.
    let began = without_thread(|| unsafe { ncclCommSplit(**parent, 0, key, place, &raw mut config) });
    assert_eq!(began, ncclInProgress, "{}", last_error());
}

/// Waits once, for this time at most. Returns the state.
fn wait_once(comm: &Comm, millis: i64) -> ncclResult_t {
    let mut state = -1;
    // SAFETY: there is a place for the answer.
    ok(unsafe { hostcclCommWait(**comm, millis, &raw mut state) });
    state
}

/// Waits again and again, for two milliseconds each time, as long as the communicator is in
/// progress. Returns the last state.
fn wait(comm: &Comm) -> ncclResult_t {
    let began = Instant::now();
    loop {
        let state = wait_once(comm, 2);
        if state != ncclInProgress {
            return state;
        }
        assert!(began.elapsed() < DEADLINE, "still in progress");
    }
}

/// Runs two ranks as threads.
fn two_ranks(body: impl Fn(ncclUniqueId, i32) + Sync) {
    let id = unique_id();
    thread::scope(|scope| {
        for rank in 0..2 {
            let body = &body;
            scope.spawn(move || body(id, rank));
        }
    });
}

#[test]
fn waits_make_communicators_and_their_parts() {
    let both = Barrier::new(2);
    two_ranks(|id, rank| {
        let comm = begin(id, 2, rank);
        both.wait();
        if rank == 1 {
            // Rank 0 has begun and does not wait, so nothing goes on there.
            assert_eq!(wait_once(&comm, 50), ncclInProgress);
        }
        both.wait();
        assert_eq!(wait(&comm), ncclSuccess, "{}", last_error());
        assert_eq!(sum(&comm, 1), 2);
        let mut part = null_mut();
        begin_split(&comm, -rank, &mut part);
        // A second call on the parent is refused meanwhile.
        let mut second = null_mut();
        // SAFETY: there is a place for the communicator.
        let refused = unsafe { ncclCommSplit(*comm, 0, 0, &raw mut second, null_mut()) };
        assert_eq!(refused, ncclInvalidArgument);
        // So is a collective, because it has the split's name: neither of the two has one.
        let mut data = [1.0_f32];
        let (at, dtype, op) = (data.as_mut_ptr().cast(), DataType::Float32 as i32, ReduceOp::Sum as i32);
        // SAFETY: the buffer holds the element.
        let refused = unsafe { ncclAllReduce(at, at, 1, dtype, op, *comm, null_mut()) };
        assert_eq!(refused, ncclInvalidArgument, "{}", last_error());
        assert!(part.is_null());
        // A wait of any length returns as soon as the part is made.
        assert_eq!(wait_once(&comm, i64::MAX), ncclSuccess, "{}", last_error());
        let part = Comm(part);
        assert_eq!((wait(&part), part.rank()), (ncclSuccess, 1 - rank as usize));
        assert_eq!((sum(&part, 10), sum(&comm, 1)), (20, 2));
        let names = fs::read_dir("/proc/self/task").unwrap().flatten();
        let mut names = names.map(|task| fs::read_to_string(task.path().join("comm")).unwrap_or_default());
        assert!(names.all(|name| !name.starts_with("dm-make")), "the engine has started a thread");
        both.wait();
    });
}

#[test]
fn an_abort_ends_a_call_for_which_nobody_waits() {
    let comm = begin(unique_id(), 2, 0);
    let began = Instant::now();
    // SAFETY: the communicator is live.
    ok(unsafe { ncclCommAbort(*comm) });
    assert!(began.elapsed() < SOON, "the abort has waited for a thread");
    let mut state = -1;
    // SAFETY: there is a place for the answer.
    assert_eq!(unsafe { hostcclCommWait(*comm, 2, &raw mut state) }, ncclInvalidArgument);
}

#[test]
fn an_abort_ends_a_wait_of_another_thread() {
    let comm = begin(unique_id(), 2, 0);
    thread::scope(|scope| {
        let (number, numbers) = channel();
        let comm = &comm;
        let waiting = scope.spawn(move || {
            // SAFETY: gettid has no preconditions.
            number.send(unsafe { libc::gettid() }).unwrap();
            wait_once(comm, DEADLINE.as_millis() as i64)
        });
        until_thread_asleep(numbers.recv().unwrap());
        let (mut state, began) = (-1, Instant::now());
        // While the other thread waits, this wait does not drive the call.
        // SAFETY: there is a place for the answer.
        ok(unsafe { hostcclCommWait(**comm, 1, &raw mut state) });
        assert_eq!(state, ncclInProgress);
        // SAFETY: the communicator is live.
        ok(unsafe { ncclCommAbort(**comm) });
        assert_eq!(waiting.join().unwrap(), ncclInternalError, "{}", last_error());
        assert!(began.elapsed() < SOON, "the wait has lasted for {:?}", began.elapsed());
    });
}

#[test]
fn the_end_of_a_parent_ends_a_split_on_all_ranks() {
    for revokes in [false, true] {
        let both = Barrier::new(2);
        two_ranks(|id, rank| {
            let comm = begin(id, 2, rank);
            assert_eq!(wait(&comm), ncclSuccess, "{}", last_error());
            both.wait();
            let mut part = null_mut();
            begin_split(&comm, 0, &mut part);
            both.wait();
            let began = Instant::now();
            match (rank, revokes) {
                (0, _) => assert_eq!(wait(&comm), ncclRemoteError, "{}", last_error()),
                // SAFETY: the communicator is live.
                (_, false) => ok(unsafe { ncclCommAbort(*comm) }),
                // SAFETY: as above.
                (_, true) => ok(unsafe { ncclCommRevoke(*comm, NCCL_REVOKE_DEFAULT) }),
            }
            assert!(began.elapsed() < SOON, "rank {rank} has waited for {:?}", began.elapsed());
            assert!(part.is_null());
        });
    }
}

/// The timeout counts all short waits as one wait.
#[test]
fn the_timeout_counts_all_waits_together() {
    let comm = begin(unique_id(), 2, 0);
    // SAFETY: the communicator is live.
    ok(unsafe { hostcclCommSetTimeout(*comm, 300) });
    let began = Instant::now();
    assert_eq!(wait(&comm), ncclTimeout, "{}", last_error());
    assert!(last_error().contains("rank 1"), "{}", last_error());
    assert!((Duration::from_millis(300)..SOON).contains(&began.elapsed()), "after {:?}", began.elapsed());
}

/// Each arrival is progress, but the time counts for the whole making.
#[test]
fn the_timeout_counts_from_the_beginning_while_other_ranks_arrive() {
    // On a busy machine, the thread that waits may find its time over only when all of ranks 1 to 3
    // have come. Then it gets more time.
    let late = [1000, 4000, 16_000].into_iter().map(lost_while_others_arrive).find(|late| *late < 4);
    assert!(late.is_some(), "the time begins again with each arrival");
}

/// Waits for so many milliseconds while ranks 1 to 3 of 5 arrive. Returns the rank that is named.
fn lost_while_others_arrive(millis: u64) -> i32 {
    let id = unique_id();
    let first = begin(id, 5, 0);
    // SAFETY: the communicator is live.
    ok(unsafe { hostcclCommSetTimeout(*first, millis as i64) });
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            assert_eq!(wait(&first), ncclTimeout, "{}", last_error());
            let mut late = -1;
            // SAFETY: the communicator is live, and there is a place for the answer.
            ok(unsafe { hostcclCommLostRank(*first, &raw mut late) });
            (late, last_error())
        });
        let mut others = Vec::new();
        for rank in 1..4 {
            thread::sleep(Duration::from_millis(millis * 7 / 10));
            others.push(begin(id, 5, rank));
            wait_once(&others[others.len() - 1], 2);
        }
        let (late, told) = waiting.join().unwrap();
        assert!((1..=4).contains(&late), "rank {late}: {told}");
        assert!(told.contains(&format!("did not come within {millis} ms")), "rank {late}: {told}");
        late
    })
}
