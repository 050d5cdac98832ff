//! The options that start a job on several hosts.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::list::{Host, from_file, from_text};
use super::words::Share;
use crate::failure::Failure;

/// The variable that names the program that reaches another host.
pub const RSH_VARIABLE: &str = "DM_RSH_AGENT";

/// The time in seconds that ssh has to connect, as an option of ssh.
const CONNECT_TIMEOUT: &str = "ConnectTimeout=20";
/// How long a program other than ssh may take to connect before the tool says why it may be silent.
const OTHERS_CONNECT: Duration = Duration::from_secs(20);

#[derive(Args)]
pub struct Hosts {
    /// Start the job on these hosts by ssh, one node on each: alpha,beta:4 or alpha[01-16]. A
    /// number after a colon is that host's -n. The first host serves the store
    #[arg(short = 'H', long, alias = "host", value_name = "HOST[:N],...", conflicts_with = "hostfile")]
    pub hosts: Option<String>,
    /// Start the job on the hosts in a file, one in each line: "alpha", "alpha:4" or "alpha
    /// slots=4"
    #[arg(long, alias = "machinefile", value_name = "FILE")]
    pub hostfile: Option<PathBuf>,
    /// With --hosts: a variable for the ranks on all hosts. NAME has the value that it has here,
    /// NAME=VALUE the value that you give, and 'NAME_*' stands for all variables whose names begin
    /// with NAME_. May be given again. The ranks get DM_* and NCCL_* without -x
    #[arg(short = 'x', value_name = "NAME[=VALUE]")]
    pub forward: Vec<String>,
    /// With --hosts: the command that reaches another host, with options; it gets the host and a
    /// command line. It is split at blanks, and quotes in it are not interpreted: put a command
    /// that needs quotes into a script [default: DM_RSH_AGENT, else ssh]
    #[arg(long, value_name = "COMMAND")]
    pub rsh_agent: Option<String>,
    /// With --hosts: the path of devicemesh on the other hosts [default: its path here, else PATH]
    #[arg(long, value_name = "PATH")]
    pub remote_tool: Option<PathBuf>,
    /// This node's share of a job that --hosts has started
    #[arg(long, hide = true, value_parser = Share::read)]
    pub agent: Option<Share>,
}

impl Hosts {
    /// Whether this tool starts the job on the hosts of a list.
    pub fn starts(&self) -> bool {
        self.agent.is_none() && (self.hosts.is_some() || self.hostfile.is_some())
    }

    /// The hosts of `--hosts` or `--hostfile`. `None` where this tool starts ranks itself.
    pub fn listed(&self) -> Result<Option<Vec<Host>>, Failure> {
        let wrong = |message: String| Failure::new(2, message);
        let hosts = match (&self.agent, &self.hosts, &self.hostfile) {
            (Some(_), ..) => return Ok(None),
            (None, Some(text), _) => from_text(text).map_err(|error| wrong(format!("--hosts: {error}")))?,
            (None, None, Some(path)) => {
                let shown = path.display();
                let text =
                    std::fs::read_to_string(path).map_err(|error| wrong(format!("--hostfile {shown}: {error}")))?;
                from_file(&text).map_err(|error| wrong(format!("--hostfile {shown}: {error}")))?
            }
            (None, None, None) => {
                let useless = [
                    (
                        !self.forward.is_empty(),
                        "-x: the ranks here have the environment of this command, so write `A=b devicemesh run ...`; -x",
                    ),
                    (self.rsh_agent.is_some(), "--rsh-agent"),
                    (self.remote_tool.is_some(), "--remote-tool"),
                ];
                return match useless.iter().find(|(is_given, _)| *is_given) {
                    Some((_, option)) => Err(wrong(format!("{option} is for --hosts or --hostfile"))),
                    None => Ok(None),
                };
            }
        };
        Ok(Some(hosts))
    }

    /// The words of the command that reaches another host.
    pub fn rsh(&self) -> Result<Vec<String>, Failure> {
        let variable = || std::env::var(RSH_VARIABLE).ok().filter(|value| !value.trim().is_empty());
        let command = self.rsh_agent.clone().or_else(variable).unwrap_or_else(|| "ssh".to_owned());
        let mut words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        if words.is_empty() {
            return Err(Failure::new(2, "--rsh-agent is empty: name a command such as \"ssh -p 2222\""));
        }
        if is_ssh(&words[0]) {
            // A question for a password would hang, and a silent host would never be missed. ssh
            // takes the first value of an option, so the user's own options come first.
            let more = ["BatchMode=yes", CONNECT_TIMEOUT, "ServerAliveInterval=10", "ServerAliveCountMax=3"];
            words.extend(more.iter().flat_map(|option| ["-o".to_owned(), (*option).to_owned()]));
        }
        Ok(words)
    }

    /// Whether ssh reaches the hosts. Another program may reach containers, several of which may be
    /// on one machine and use its network.
    pub fn has_ssh(&self) -> bool {
        self.rsh().is_ok_and(|words| is_ssh(&words[0]))
    }

    /// How long a host may be silent before the tool says why that may be. `limit` is the time in
    /// which a host must answer.
    pub fn time_to_connect(&self, limit: Duration) -> Duration {
        self.connect_timeout().unwrap_or(OTHERS_CONNECT.min(limit * 3 / 4))
    }

    /// Says why a host may be silent for longer than [`time_to_connect`](Hosts::time_to_connect).
    /// The agent needs standard input for its orders, so no login script can read there.
    pub fn why_silent(&self) -> String {
        let first = match self.connect_timeout() {
            Some(_) => "ssh has connected, so maybe a login script there".to_owned(),
            None => {
                let words = self.rsh().unwrap_or_default();
                format!("maybe {}, or a login script there,", words.first().map_or("", String::as_str))
            }
        };
        format!(
            "{first} waits for input or for a key: let a login script do so in interactive shells only (case $- in *i*)"
        )
    }

    /// How long ssh may take to connect. `None` where another program reaches the hosts.
    pub fn connect_timeout(&self) -> Option<Duration> {
        let words = self.rsh().ok().filter(|words| words.iter().any(|word| word == CONNECT_TIMEOUT))?;
        // Of several values ssh takes the first. Names of options may be in upper or lower case,
        // and may be in one word with -o: -o connecttimeout=5, -oConnectTimeout=5
        let value = |word: &String| word.to_lowercase().split_once("connecttimeout=")?.1.parse().ok();
        words.iter().find_map(value).map(Duration::from_secs)
    }
}

fn is_ssh(program: &str) -> bool {
    program.rsplit('/').next() == Some("ssh")
}
