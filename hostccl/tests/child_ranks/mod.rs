//! Ranks that are child processes: the test program, started again with its ignored test `child`.
//! Environment variables give each its part. A test and its ranks talk in lines.

#![allow(dead_code, reason = "each test program uses a part of this module")]

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use hostccl::types::*;
use hostccl::*;

use crate::common::{DEADLINE, from_hex, hex_of, last_error, unique_id, until_all_asleep, until_asleep};

/// The part that this process plays as a rank.
pub struct Part {
    /// The name of the scene, which says what the ranks do.
    pub scene: String,
    /// The rank of this process, or the lowest of its ranks.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
    /// The unique id by which the ranks join.
    pub id: ncclUniqueId,
}

impl Part {
    /// Returns the part of this process, or `None` where no test has started it as a rank.
    pub fn of_this_process() -> Option<Part> {
        let scene = env::var("HOSTCCL_TEST_SCENE").ok()?;
        let number = |name: &str| env::var(name).unwrap().parse().unwrap();
        let (rank, size) = (number("HOSTCCL_TEST_RANK"), number("HOSTCCL_TEST_SIZE"));
        Some(Part { scene, rank, size, id: from_hex(&env::var("HOSTCCL_TEST_ID").unwrap()) })
    }
}

/// A rank that runs as a child process.
pub struct Rank {
    /// The process.
    pub child: Child,
    /// Where the test writes its commands.
    input: ChildStdin,
    /// Where the rank writes its answers.
    output: BufReader<ChildStdout>,
}

impl Rank {
    /// Starts a rank of a scene.
    pub fn start(scene: &str, rank: usize, size: usize, id: &ncclUniqueId) -> Rank {
        Rank::start_with(scene, rank, size, id, &[])
    }

    /// Starts a rank of a scene with more variables in its environment.
    pub fn start_with(scene: &str, rank: usize, size: usize, id: &ncclUniqueId, variables: &[(&str, &str)]) -> Rank {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "child", "--ignored", "--nocapture", "--test-threads=1"])
            .env("HOSTCCL_TEST_SCENE", scene)
            .env("HOSTCCL_TEST_RANK", rank.to_string())
            .env("HOSTCCL_TEST_SIZE", size.to_string())
            .env("HOSTCCL_TEST_ID", hex_of(id))
            .env("HOSTCCL_TIMEOUT_MS", scene.strip_prefix("timeout ").unwrap_or("0"))
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Rank { input: child.stdin.take().unwrap(), output: BufReader::new(child.stdout.take().unwrap()), child }
    }

    /// Returns the next line that the rank wrote for the test, without its mark.
    pub fn hear(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the rank ended without a word");
            if let Some((_, said)) = line.trim_end().split_once("@@") {
                return said.to_owned();
            }
        }
    }

    /// Returns when the rank has slept for a while, which means that it waits for others.
    #[track_caller]
    pub fn until_it_waits(&self) {
        until_asleep(self.child.id());
    }

    /// Returns when these ranks, and the maker of their id, have slept for a while at one time.
    /// They wait for other ranks then, and the maker has all that they have told it.
    #[track_caller]
    pub fn until_all_wait<'a>(ranks: impl IntoIterator<Item = &'a Rank>) {
        let pids: Vec<u32> = ranks.into_iter().map(|rank| rank.child.id()).collect();
        until_all_asleep(&pids);
    }

    /// Writes a line for the rank, which `listen` gives there.
    pub fn tell(&mut self, word: &str) {
        writeln!(self.input, "{word}").unwrap();
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts all ranks of a scene.
pub fn start_all(scene: &str, size: usize) -> Vec<Rank> {
    let id = unique_id();
    (0..size).map(|rank| Rank::start(scene, rank, size, &id)).collect()
}

/// Starts all ranks of a scene. `hosts` has the name of each rank's host.
pub fn start_on(scene: &str, hosts: &[impl AsRef<str>], variables: &[(&str, &str)]) -> Vec<Rank> {
    let id = unique_id();
    let start = |(rank, host): (usize, &_)| {
        let variables = [variables, &[("DM_HOSTCCL_HOST", AsRef::<str>::as_ref(host))]].concat();
        Rank::start_with(scene, rank, hosts.len(), &id, &variables)
    };
    hosts.iter().enumerate().map(start).collect()
}

/// Starts all ranks of a scene on several hosts, `on_each` ranks on each.
pub fn start_on_hosts(scene: &str, hosts: usize, on_each: usize, variables: &[(&str, &str)]) -> Vec<Rank> {
    let hosts: Vec<String> = (0..hosts * on_each).map(|rank| format!("host{}", rank / on_each)).collect();
    start_on(scene, &hosts, variables)
}

/// Writes a line for the test, in a rank.
pub fn say(line: &str) {
    println!("@@{line}");
}

/// Returns the next line of the test, in a rank.
pub fn listen() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

/// Leaves the communicator in the way that the test writes: "abort" or "destroy".
pub fn leave_as_told(comm: ncclComm_t) {
    let leave = match listen().as_str() {
        "abort" => ncclCommAbort,
        "destroy" => ncclCommDestroy,
        word => panic!("{word}"),
    };
    // SAFETY: the communicator is live.
    assert_eq!(unsafe { leave(comm) }, ncclSuccess);
    say("left");
}

/// Asks for the state of the communicator until it is no success, and returns the state.
pub fn watch(comm: ncclComm_t) -> ncclResult_t {
    let mut state = ncclSuccess;
    let started = Instant::now();
    while state == ncclSuccess && started.elapsed() < DEADLINE {
        // SAFETY: there is a place for the answer.
        assert_eq!(unsafe { ncclCommGetAsyncError(comm, &raw mut state) }, ncclSuccess);
        std::thread::sleep(Duration::from_millis(5));
    }
    state
}

/// Gives the communicator the time that the test writes, in milliseconds.
pub fn set_time_as_told(comm: ncclComm_t) {
    // SAFETY: the communicator is live.
    assert_eq!(unsafe { hostcclCommSetTimeout(comm, listen().parse().unwrap()) }, ncclSuccess);
}

/// Plays a scene whose ranks all wait for `missing`, and checks that each of them says so at its
/// deadline. The scene gets the time of the ranks in milliseconds, and returns what they say. On a
/// busy machine, another rank may come later than that, and is named too. Then the ranks get more
/// time.
pub fn names_at_the_deadline(missing: usize, play: impl Fn(u64) -> Vec<String>) {
    for millis in [2000, 8000, 32_000] {
        let said = play(millis);
        let (named, did_not_come) = (format!("{ncclTimeout} {missing} "), format!("rank {missing} did not come"));
        let is_right =
            |said: &String| said.starts_with(&named) && said.ends_with(&format!("{did_not_come} within {millis} ms"));
        if said.iter().all(is_right) {
            return;
        }
        let is_late = |said: &String| said.contains(" did not come ") && !said.contains(&did_not_come);
        assert!(millis < 32_000 && said.iter().any(is_late), "{said:?}");
    }
}

/// Tells the test how a call ended: the result, the lost rank and the message.
pub fn say_result(comm: ncclComm_t, result: ncclResult_t) {
    let mut lost = -2;
    // SAFETY: there is a place for the answer.
    assert_eq!(unsafe { hostcclCommLostRank(comm, &raw mut lost) }, ncclSuccess);
    say(&format!("{result} {lost} {}", last_error()));
}
