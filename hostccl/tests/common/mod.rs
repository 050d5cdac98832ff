//! Helpers of the engine's tests: ranks as threads with a deadline, and calls that check their own
//! buffers.

#![allow(dead_code, reason = "no test program uses all of the helpers")]

pub mod call;

use std::ffi::{CStr, c_int};
use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use hostccl::types::*;
use hostccl::*;

/// How long ranks may take before a test gives up. It is far more than they need on a loaded
/// machine.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// A communicator that is destroyed at the end of its scope. So a rank whose assertion fails ends
/// the wait of its peers.
pub struct Comm(pub ncclComm_t);

// SAFETY: an ncclComm_t is a token that points at nothing.
unsafe impl Send for Comm {}
// SAFETY: as above, and the engine synchronises its own state.
unsafe impl Sync for Comm {}

impl Comm {
    /// Joins as one rank.
    pub fn init(id: ncclUniqueId, size: usize, rank: usize) -> Comm {
        let mut comm = null_mut();
        // SAFETY: there is a place for the communicator.
        ok(unsafe { ncclCommInitRank(&raw mut comm, size as c_int, id, rank as c_int) });
        Comm(comm)
    }

    /// Makes all ranks of a communicator in this thread.
    pub fn init_all(size: usize) -> Vec<Comm> {
        let mut comms = vec![null_mut(); size];
        // SAFETY: there are places for `size` communicators.
        ok(unsafe { ncclCommInitAll(comms.as_mut_ptr(), size as c_int, std::ptr::null()) });
        comms.into_iter().map(Comm).collect()
    }

    /// Splits the communicator. Returns `None` for NCCL_SPLIT_NOCOLOR.
    pub fn split(&self, color: c_int, key: c_int) -> Option<Comm> {
        let mut comm = std::ptr::dangling_mut();
        // SAFETY: there is a place for the communicator.
        ok(unsafe { ncclCommSplit(self.0, color, key, &raw mut comm, null_mut()) });
        (!comm.is_null()).then_some(Comm(comm))
    }

    pub fn size(&self) -> usize {
        let mut size = -1;
        // SAFETY: there is a place for the answer.
        ok(unsafe { ncclCommCount(self.0, &raw mut size) });
        size as usize
    }

    pub fn rank(&self) -> usize {
        let mut rank = -1;
        // SAFETY: there is a place for the answer.
        ok(unsafe { ncclCommUserRank(self.0, &raw mut rank) });
        rank as usize
    }
}

impl Deref for Comm {
    type Target = ncclComm_t;

    fn deref(&self) -> &ncclComm_t {
        &self.0
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        // SAFETY: a token may be live or not.
        unsafe { ncclCommDestroy(self.0) };
    }
}

/// Panics with the engine's message unless the call succeeded.
#[track_caller]
pub fn ok(result: ncclResult_t) {
    assert_eq!(result, ncclSuccess, "{}", last_error());
}

pub fn last_error() -> String {
    // SAFETY: NULL is allowed, and the string lives until the next failing call of this thread.
    unsafe { CStr::from_ptr(ncclGetLastError(null_mut())) }.to_str().unwrap().to_owned()
}

/// Returns when all threads of a process have slept for a while, which means that they wait for
/// other processes.
#[track_caller]
pub fn until_asleep(pid: u32) {
    until_all_sleep(&format!("process {pid}"), || tasks_of(pid));
}

/// Returns when all threads of these processes, and the thread of this process that serves joins by
/// the ids it has made, have slept for a while at one time. Where one of these processes has made
/// the id, no step of a join is under way then: each rank has told the maker what it can tell, and
/// the maker has read it.
#[track_caller]
pub fn until_all_asleep(pids: &[u32]) {
    let is_maker = |task: &std::path::PathBuf| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim_end() == "dm-join")
    };
    until_all_sleep(&format!("one of the processes {pids:?}, or the maker of the id,"), || {
        let own = tasks_of(std::process::id()).into_iter().filter(is_maker);
        pids.iter().flat_map(|pid| tasks_of(*pid)).chain(own).collect()
    });
}

/// Returns the folders of a process's threads in /proc.
fn tasks_of(pid: u32) -> Vec<std::path::PathBuf> {
    std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten().map(|task| task.path()).collect()
}

/// Returns when a thread of this process has slept for a while, which means that it waits for other
/// ranks.
#[track_caller]
pub fn until_thread_asleep(tid: libc::pid_t) {
    until_all_sleep(&format!("thread {tid}"), || vec![format!("/proc/self/task/{tid}").into()]);
}

#[track_caller]
fn until_all_sleep(who: &str, tasks: impl Fn() -> Vec<std::path::PathBuf>) {
    let is_asleep = |task: std::path::PathBuf| {
        let stat = std::fs::read_to_string(task.join("stat")).unwrap_or_default();
        stat.rsplit_once(')').is_none_or(|(_, rest)| rest.starts_with(" S"))
    };
    let (mut looks, began) = (0, std::time::Instant::now());
    while looks < 20 {
        looks = if tasks().into_iter().all(is_asleep) { looks + 1 } else { 0 };
        assert!(began.elapsed() < DEADLINE, "{who} does not come to wait");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

/// Returns a configuration that sets only whether calls block.
pub fn config(blocking: c_int) -> ncclConfig_t {
    ncclConfig_t { blocking, ..NCCL_CONFIG_INITIALIZER }
}

/// Returns the state of the communicator when nothing is in progress on it any more.
pub fn state_of(comm: &Comm) -> ncclResult_t {
    let mut state = -1;
    // SAFETY: the communicator is live, and there is a place for the answer.
    ok(unsafe { hostcclCommWait(**comm, 20_000, &raw mut state) });
    state
}

pub fn unique_id() -> ncclUniqueId {
    let mut id = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
    // SAFETY: there is a place for the id.
    ok(unsafe { ncclGetUniqueId(&raw mut id) });
    id
}

/// Returns the id as text, for the environment of a rank in another process.
pub fn hex_of(id: &ncclUniqueId) -> String {
    id.internal.iter().map(|byte| format!("{:02x}", *byte as u8)).collect()
}

/// Returns the id of this text.
pub fn from_hex(hex: &str) -> ncclUniqueId {
    let mut id = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
    for (byte, at) in id.internal.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&hex[at..at + 2], 16).unwrap() as _;
    }
    id
}

/// Joins as one rank. Returns the result of the call and the communicator, NULL where it failed.
pub fn init(size: c_int, id: ncclUniqueId, rank: c_int) -> (ncclResult_t, ncclComm_t) {
    let mut comm = null_mut();
    // SAFETY: there is a place for the communicator.
    let result = unsafe { ncclCommInitRank(&raw mut comm, size, id, rank) };
    (result, comm)
}

/// Runs `body` as ranks 0..size of a new communicator, each on a thread of its own. Returns the
/// results in the order of the ranks.
pub fn ranks<R: Send>(size: usize, body: impl Fn(&Comm, usize) -> R + Sync) -> Vec<R> {
    ranks_of(unique_id(), size, 0..size, body)
}

/// Runs `body` as the `local` ranks of the communicator of `id`, each on a thread of its own.
pub fn ranks_of<R: Send>(
    id: ncclUniqueId,
    size: usize,
    local: std::ops::Range<usize>,
    body: impl Fn(&Comm, usize) -> R + Sync,
) -> Vec<R> {
    let live: Mutex<Vec<usize>> = Mutex::default();
    let (done, finished) = channel();
    thread::scope(|scope| {
        let threads: Vec<_> = local
            .clone()
            .map(|rank| {
                let (body, live, done) = (&body, &live, done.clone());
                scope.spawn(move || {
                    let comm = Comm::init(id, size, rank);
                    live.lock().unwrap().push(comm.0.addr());
                    let result = body(&comm, rank);
                    drop(comm);
                    done.send(rank).unwrap();
                    result
                })
            })
            .collect();
        drop(done);
        // A rank that panics drops its sender, so the channel closes when all ranks have ended in
        // any way.
        let started = Instant::now();
        let mut missing: Vec<usize> = local.collect();
        loop {
            match finished.recv_timeout(DEADLINE.saturating_sub(started.elapsed())) {
                Ok(rank) => missing.retain(|&other| other != rank),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    eprintln!("ranks {missing:?} of {size} are not done after {DEADLINE:?}");
                    // SAFETY: these are tokens, live or not, and abort may be called from any
                    // thread.
                    live.lock().unwrap().iter().for_each(|&comm| unsafe {
                        ncclCommAbort(std::ptr::without_provenance_mut(comm));
                    });
                    thread::sleep(Duration::from_secs(5));
                    std::process::exit(101);
                }
            }
        }
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// Returns the values of all ranks of `comm`, in the order of the ranks.
pub fn gather(comm: &Comm, value: i64) -> Vec<i64> {
    let mut all = vec![-1; comm.size()];
    let (from, to) = ((&raw const value).cast(), all.as_mut_ptr().cast());
    // SAFETY: one element is sent, and there is room for one element of every rank.
    ok(unsafe { ncclAllGather(from, to, 1, DataType::Int64 as c_int, **comm, null_mut()) });
    all
}

/// Returns the sum of the values of all ranks of `comm`.
pub fn sum(comm: &Comm, value: i64) -> i64 {
    let mut total = 0;
    let (from, to) = ((&raw const value).cast(), (&raw mut total).cast());
    let (dtype, op) = (DataType::Int64 as c_int, ReduceOp::Sum as c_int);
    // SAFETY: each buffer has one element.
    ok(unsafe { ncclAllReduce(from, to, 1, dtype, op, **comm, null_mut()) });
    total
}

/// Makes the calls of `body` in one group. Their buffers must outlive this call.
pub fn group<R>(body: impl FnOnce() -> R) -> R {
    // SAFETY: the call has no arguments.
    ok(unsafe { ncclGroupStart() });
    let result = body();
    // SAFETY: the caller's promise about the buffers.
    ok(unsafe { ncclGroupEnd() });
    result
}
