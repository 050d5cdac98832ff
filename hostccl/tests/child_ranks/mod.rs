//! Ranks that are child processes: the test program, started again with its ignored test `child`.
//! `HOSTCCL_FAULT` names the scene that they play. A test and its ranks talk in lines.

// Each test program uses a part of this module.
#![allow(dead_code)]

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use hostccl::types::ncclUniqueId;

use crate::common::{hex_of, unique_id, until_asleep};

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
    /// Starts a rank of the scene `play`.
    pub fn start(play: &str, rank: usize, size: usize, id: &ncclUniqueId) -> Rank {
        Rank::start_with(play, rank, size, id, &[])
    }

    /// Starts a rank of the scene `play` with more variables in its environment.
    pub fn start_with(play: &str, rank: usize, size: usize, id: &ncclUniqueId, variables: &[(&str, &str)]) -> Rank {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "child", "--ignored", "--nocapture", "--test-threads=1"])
            .env("HOSTCCL_FAULT", play)
            .env("HOSTCCL_FAULT_RANK", rank.to_string())
            .env("HOSTCCL_FAULT_SIZE", size.to_string())
            .env("HOSTCCL_FAULT_ID", hex_of(id))
            .env(
                "HOSTCCL_TIMEOUT_MS",
                play.strip_prefix("timeout ").unwrap_or(if play == "late" { "300" } else { "0" }),
            )
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
pub fn start_all(play: &str, size: usize) -> Vec<Rank> {
    let id = unique_id();
    (0..size).map(|rank| Rank::start(play, rank, size, &id)).collect()
}

/// Starts all ranks of a scene on several hosts, `on_each` ranks on each.
#[allow(dead_code, reason = "some test programs have one host only")]
pub fn start_on_hosts(play: &str, hosts: usize, on_each: usize, variables: &[(&str, &str)]) -> Vec<Rank> {
    let id = unique_id();
    let start = |rank: usize| {
        let host = format!("host{}", rank / on_each);
        let variables = [variables, &[("DM_HOSTCCL_HOST", &host)]].concat();
        Rank::start_with(play, rank, hosts * on_each, &id, &variables)
    };
    (0..hosts * on_each).map(start).collect()
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
