//! The identity of a job: the user, the command and the scheduler's job. Nodes that meet at one
//! endpoint compare their identities, so that two jobs never become one.

use std::ffi::{OsStr, OsString};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::process::getuid;
use serde::{Deserialize, Serialize};

use crate::words::{count, cut};

/// The most characters of a command that a message quotes.
const QUOTED: usize = 120;

/// The job that a node belongs to, as the node itself sees it.
#[derive(Clone, Default, Serialize, Deserialize)]
pub struct Identity {
    /// The name of the user who started the tool, or "uid N" where the user has no name here.
    #[serde(default)]
    user: String,
    /// The number of that user. Two users are the same if the names or the numbers are equal,
    /// because a container may know only one of the two.
    #[serde(default)]
    uid: u32,
    /// The program and its arguments. Programs are compared by the names of their files, because
    /// hosts may have the program in different folders.
    #[serde(default)]
    command: Vec<String>,
    /// The scheduler's job, for example "Slurm job 17", where the tool runs in one.
    #[serde(default)]
    scheduler: Option<String>,
    /// When the tool was started, in seconds since 1970 by the clock of its host.
    #[serde(default)]
    started: u64,
}

impl Identity {
    /// The job that runs this command.
    pub fn of_this_job(command: &[OsString], scheduler: Option<String>) -> Identity {
        let uid = getuid().as_raw();
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let command = command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        Identity { user: user_name(uid), uid, command, scheduler, started }
    }

    /// Returns why two nodes belong to different jobs, or `None` if they belong to one job. Nodes
    /// with the same `--rdzv-id` belong to one job although their commands differ, because the
    /// user has given them one id.
    pub fn difference(&self, other: &Identity, same_id: bool) -> Option<&'static str> {
        if self.user != other.user && self.uid != other.uid {
            return Some("their users differ");
        }
        if same_id {
            return None;
        }
        if self.scheduler.is_some() && other.scheduler.is_some() && self.scheduler != other.scheduler {
            return Some("the scheduler's jobs differ");
        }
        if self.program() != other.program() {
            return Some("their programs differ");
        }
        let arguments = |identity: &Identity| identity.command.get(1..).unwrap_or_default().to_vec();
        (arguments(self) != arguments(other)).then_some("their arguments differ")
    }

    /// The name of the program's file.
    fn program(&self) -> &str {
        let program = self.command.first().map_or("", String::as_str);
        program.rsplit('/').next().unwrap_or(program)
    }

    /// The job for messages: "the job `./train --epochs 3` of user anna (2 nodes)".
    pub fn describe(&self, nodes: u32) -> String {
        let scheduler = self.scheduler.as_ref().map_or(String::new(), |job| format!(", {job}"));
        let command = cut(&shell_line(&self.command), QUOTED);
        format!("the job `{command}` of user {} ({}{scheduler})", self.user, count(nodes, "node"))
    }

    /// How long ago the tool was started, for messages.
    pub fn age(&self) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        span(Duration::from_secs(now.saturating_sub(self.started)))
    }
}

/// Quotes a word for a shell, so that a message can be copied.
pub fn shell_word(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./=:,@%+".contains(&byte);
    match !word.is_empty() && word.bytes().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// Quotes the words of a command for a shell, so that a message can be copied.
pub fn shell_line(words: &[impl AsRef<OsStr>]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| shell_word(&word.as_ref().to_string_lossy())).collect();
    quoted.join(" ")
}

/// A time for people: "40 s", "9 min 50 s", "2 h 5 min".
pub fn span(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        seconds => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

/// The name of a user in /etc/passwd. Where that file does not have the user, the name is the one
/// in the environment, because a name server may know the user.
fn user_name(uid: u32) -> String {
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let known = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
    });
    let named = || std::env::var("USER").ok().filter(|name| !name.is_empty());
    known.or_else(named).unwrap_or_else(|| format!("uid {uid}"))
}

/// The name of a job to which the user gave no name: the host and the process number of the first
/// tool.
pub fn default_id(host: &str, pid: u32) -> String {
    format!("devicemesh-{host}-{pid}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(user: &str, uid: u32, scheduler: Option<&str>, command: &[&str]) -> Identity {
        let command = command.iter().map(|word| (*word).to_owned()).collect();
        Identity { user: user.to_owned(), uid, command, scheduler: scheduler.map(str::to_owned), started: 0 }
    }

    #[test]
    fn jobs_differ_by_user_program_arguments_and_scheduler() {
        let job = identity("anna", 7, Some("Slurm job 1"), &["./train", "a"]);
        for (other, same_id, difference) in [
            (identity("anna", 8, None, &["/home/anna/train", "a"]), false, None),
            (identity("uid 7", 7, Some("Slurm job 1"), &["train", "a"]), false, None),
            (identity("bert", 8, None, &["./train", "a"]), true, Some("their users differ")),
            (identity("anna", 7, Some("Slurm job 2"), &["./train", "a"]), false, Some("the scheduler's jobs differ")),
            (identity("anna", 7, None, &["./eval", "a"]), false, Some("their programs differ")),
            (identity("anna", 7, None, &["./train", "b"]), false, Some("their arguments differ")),
            (identity("anna", 7, None, &["./train"]), false, Some("their arguments differ")),
            (identity("anna", 7, Some("Slurm job 2"), &["./eval", "b"]), true, None),
        ] {
            assert_eq!(job.difference(&other, same_id), difference, "{}", other.describe(2));
            assert_eq!(other.difference(&job, same_id), difference, "{}", other.describe(2));
        }
    }

    #[test]
    fn jobs_are_described_in_one_line() {
        let job = identity("anna", 7, Some("Slurm job 1"), &["sh", "-c", "echo it's"]);
        assert_eq!(job.describe(1), r"the job `sh -c 'echo it'\''s'` of user anna (1 node, Slurm job 1)");
        let long = identity("anna", 7, None, &["x", &"é".repeat(500)]);
        assert!(long.describe(2).ends_with("é...` of user anna (2 nodes)"));
        assert_eq!(span(Duration::from_secs(590)), "9 min 50 s");
    }
}
