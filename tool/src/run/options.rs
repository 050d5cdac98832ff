//! The command line of `devicemesh run`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use devicemesh::ccl;

use super::output::Route;
use super::rendezvous::Rendezvous;
use crate::endpoint::endpoint;
use crate::failure::Failure;
use crate::style::When;

/// The end of `--help` and of the manual page.
pub const HELP: &str = "\
Examples:
  devicemesh run -n 8 -- ./train --epochs 10
  devicemesh run -n gpu --log-dir logs --tee --prefix -- python train.py
  devicemesh run --nnodes 2 --rdzv-endpoint head:29400 -n 8 -- ./train      (on both hosts)

Exit codes:
  0        all ranks, of all nodes, exited with 0
  1 - 255  the exit code of the rank that failed first
  128 + n  that rank was killed by signal n, or the tool got signal n
  124      --timeout passed
  126      the program cannot be started
  127      the program is not there
  2        wrong command line
  1        everything else: nodes that do not come or do not fit, a node that has gone

Environment:
  DM_STORE_SECRET  only who has it joins the job; the same on all nodes
  DM_LOG           what the ranks log: error, warn, info or debug
  OMP_NUM_THREADS  1 for the ranks, where it is not set and there are several on a host
  NO_COLOR         no colours

The ranks get:
  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK (the node), GROUP_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
  ROLE_RANK, ROLE_WORLD_SIZE, ROLE_NAME, TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_MAX_RESTARTS,
  TORCHELASTIC_USE_AGENT_STORE=True";

/// The options of `devicemesh run`. The comments of the fields are their help.
#[derive(Args)]
pub struct Options {
    /// Number of ranks to start here: a number, "cpu" (one for each core), "gpu" (one for each
    /// device), or "auto" (gpu where there is one, else cpu)
    #[arg(short = 'n', long = "nproc-per-node", alias = "nproc_per_node", value_name = "N", value_parser = count)]
    pub ranks: Count,
    /// Number of nodes: hosts that run this same command
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub nnodes: u32,
    /// This node's number, from 0; left out, the nodes are numbered as they come. Node 0 has the
    /// first ranks
    #[arg(long, alias = "node_rank", value_name = "NODE")]
    pub node_rank: Option<u32>,
    /// Where the ranks meet, the same on all nodes: a host of the job (node 0's, where nodes are
    /// numbered), and a port that is free there [port: 29400]
    #[arg(long, alias = "rdzv_endpoint", value_name = "HOST[:PORT]", value_parser = endpoint)]
    pub rdzv_endpoint: Option<(String, u16)>,
    /// A name for the job, the same on all nodes; a node with another one is refused
    #[arg(long, alias = "rdzv_id", value_name = "NAME")]
    pub rdzv_id: Option<String>,
    /// How long to wait until all nodes are there
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = duration)]
    pub rdzv_timeout: Duration,
    /// Put "[rank R] " before every line that a rank writes
    #[arg(long)]
    pub prefix: bool,
    /// Write each rank's output to DIR/rank-R.log instead of to the terminal
    #[arg(long, alias = "log_dir", value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// With --log-dir: show it here too
    #[arg(long, requires = "log_dir")]
    pub tee: bool,
    /// After the first failure, how long the other ranks have to notice and end by themselves
    #[arg(long, value_name = "TIME", default_value = "3", value_parser = duration)]
    pub grace_period: Duration,
    /// End the whole job after that time
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub timeout: Option<Duration>,
    /// Colours in what the tool itself says; auto: on a terminal, unless NO_COLOR is set
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub color: When,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub command: Vec<OsString>,
}

/// How many ranks a node starts: the value of `-n`.
#[derive(Clone, Copy)]
pub enum Count {
    Ranks(u32),
    /// One rank for each core.
    Cores,
    /// One rank for each device.
    Devices,
    /// One rank for each device, or for each core where there is no device.
    DevicesOrCores,
}

fn count(text: &str) -> Result<Count, String> {
    match text {
        "cpu" => Ok(Count::Cores),
        "gpu" => Ok(Count::Devices),
        "auto" => Ok(Count::DevicesOrCores),
        _ => match text.parse() {
            Ok(ranks) if (1..=65536).contains(&ranks) => Ok(Count::Ranks(ranks)),
            _ => Err("1 to 65536, cpu, gpu or auto".to_owned()),
        },
    }
}

/// Reads a time as timeout(1) does: a number of seconds, or a number with the unit s, m, h or d.
fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = match text.char_indices().last() {
        Some((at, 's')) => (&text[..at], 1.0),
        Some((at, 'm')) => (&text[..at], 60.0),
        Some((at, 'h')) => (&text[..at], 3600.0),
        Some((at, 'd')) => (&text[..at], 86_400.0),
        _ => (text, 1.0),
    };
    match number.parse::<f64>().map(|number| number * unit) {
        Ok(seconds) if (0.0..1e9).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("not a time: seconds, or 90s, 10m, 2h, 1d".to_owned()),
    }
}

impl Options {
    /// Checks what clap cannot: options that do not fit together.
    pub fn check(&self) -> Result<(), Failure> {
        let wrong = |message: String| Err(Failure::new(2, message));
        let nodes = self.nnodes;
        match self.node_rank {
            Some(node) if node >= nodes => {
                return wrong(format!("--node-rank {node} with --nnodes {nodes}: the nodes are 0 to {}", nodes - 1));
            }
            _ => {}
        }
        if nodes > 1 && self.rdzv_endpoint.is_none() {
            return wrong(format!(
                "--nnodes {nodes} needs --rdzv-endpoint HOST:PORT, the same on all nodes: a host of the job that the others reach, and a port that is free there"
            ));
        }
        if self.prefix && self.log_dir.is_some() && !self.tee {
            return wrong(
                "--prefix is for the terminal, and --log-dir takes the output from there: add --tee".to_owned(),
            );
        }
        Ok(())
    }

    /// The number of ranks to start on this node.
    pub fn ranks_here(&self) -> Result<u32, Failure> {
        let cores = || std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
        let devices = || ccl::devices().map(|(count, _)| count as u32);
        match self.ranks {
            Count::Ranks(ranks) => Ok(ranks),
            Count::Cores => Ok(cores()),
            Count::DevicesOrCores => Ok(devices().ok().filter(|count| *count > 0).unwrap_or_else(cores)),
            Count::Devices => match devices() {
                Ok(count) if count > 0 => Ok(count),
                Ok(_) => Err(Failure::new(1, "-n gpu: this host has no device; say a number, or -n cpu")),
                Err(error) => {
                    Err(Failure::new(1, format!("-n gpu: {}; say a number, or see devicemesh info", error.message())))
                }
            },
        }
    }

    /// Returns where the ranks' output goes.
    pub fn route(&self) -> Route {
        Route {
            prefix: self.prefix,
            logs: self.log_dir.clone(),
            tee: self.tee,
            keep_stderr: self.nnodes > 1,
            color: self.color,
        }
    }

    /// Returns where this node meets the others.
    pub fn rendezvous(&self, ranks: u32) -> Rendezvous {
        let (host, port) = self.rdzv_endpoint.clone().unwrap_or_else(|| ("127.0.0.1".to_owned(), 0));
        let (nodes, node, id) = (self.nnodes, self.node_rank, self.rdzv_id.clone());
        Rendezvous { host, port, nodes, node, ranks, id, timeout: self.rdzv_timeout }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::duration;

    #[test]
    fn times_have_units() {
        assert_eq!(duration("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(duration("1.5h"), Ok(Duration::from_secs(5400)));
        for wrong in ["", "m", "-1", "nan", "inf", "1w", "5 x", "2µ"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}
