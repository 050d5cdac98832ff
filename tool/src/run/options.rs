//! The command line of `devicemesh run`.

use std::ffi::OsString;
use std::fmt::{self, Display, Formatter};
use std::path::Path;

use clap::Args;
use devicemesh::ccl;

use super::binding::BindingOptions;
use super::ending::Ending;
use super::guard::command_line;
use super::hosts::Hosts;
use super::meeting::Meeting;
use super::output::OutputOptions;
use super::program::mistake;
use super::restart::RestartOptions;
use crate::failure::Failure;
use crate::other_launchers::{PREFIX, TEE, is_streams};
use crate::style::When;

/// The end of `--help` and of the manual page.
pub const HELP: &str = "\
Examples:
  # eight ranks on this host
  devicemesh run -n 8 -- ./train --epochs 10
  # a rank for each GPU, with logs
  devicemesh run -n gpu --log-dir logs --tee --prefix -- python train.py
  # two hosts, by ssh from here
  devicemesh run --hosts alpha,beta -n 8 -x LD_LIBRARY_PATH -- ./train
  # two hosts, by hand on each
  devicemesh run --nnodes 2 --rdzv-endpoint head:29400 -n 8 -- ./train
  # a rank that fails starts again alone, and rank 8 is a spare
  devicemesh run -n 8 --restart rank --max-restarts 5 --spares 1 -- ./train
  # two hosts, in Slurm
  srun -N 2 --ntasks-per-node 1 devicemesh run -n 8 -- ./train

Exit codes:
  0        all ranks, of all nodes, exited with 0
  1 - 255  the exit code of the rank that failed first
  128 + n  that rank was killed by signal n, or the tool got signal n
  124      --timeout passed
  126      the program cannot be started
  127      the program is not there
  2        wrong command line
  1        everything else: nodes that do not arrive or do not fit together, a lost node

Environment:
  DM_STORE_SECRET  the secret of the job, the same on all nodes; a node without it cannot join
  DM_STORE         the devicemesh store in which the ranks meet, where --store is not given
  DM_RSH_AGENT     the command that reaches the hosts of --hosts
  DM_LOG           what the ranks log: error, warn, info or debug
  OMP_NUM_THREADS  where it is not set, the ranks get it: the number of a rank's cores with \
                   --bind core, else 1 if there are several ranks on a host
  NO_COLOR         no colours

The ranks get:
  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK (the node), GROUP_WORLD_SIZE, \
  MASTER_ADDR, MASTER_PORT, ROLE_RANK, ROLE_WORLD_SIZE, ROLE_NAME, TORCHELASTIC_RUN_ID, \
  TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_MAX_RESTARTS, TORCHELASTIC_USE_AGENT_STORE=True, \
  DM_STARTED_BY_RUN (the store, by which libdevicemesh knows this launcher), DM_MESH_SIZE (the \
  number of ranks without spares), DM_JOIN=running (a rank that was started again alone), \
  OMP_NUM_THREADS";

/// The options of `devicemesh run`. The comments of the fields are their help.
#[derive(Args)]
pub struct Options {
    /// Number of ranks to start here: a number, "cpu" (one for each core), "gpu" (one for each
    /// device), or "auto" (gpu where there is one, else cpu) [default: one for each device, else 1]
    #[arg(short = 'n', long = "nproc-per-node", alias = "nproc_per_node", value_name = "N", value_parser = count, allow_negative_numbers = true)]
    pub ranks: Option<Count>,
    #[command(flatten)]
    pub meeting: Meeting,
    #[command(flatten)]
    pub hosts: Hosts,
    #[command(flatten)]
    pub output: OutputOptions,
    #[command(flatten)]
    pub ending: Ending,
    #[command(flatten)]
    pub restart: RestartOptions,
    #[command(flatten)]
    pub binding: BindingOptions,
    /// Show what would be started, with which variables and on which CPUs, and start nothing
    #[arg(long)]
    pub dry_run: bool,
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

impl Display for Count {
    /// Writes the count in the form that `-n` takes.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Count::Ranks(ranks) => ranks.fmt(f),
            Count::Cores => f.write_str("cpu"),
            Count::Devices => f.write_str("gpu"),
            Count::DevicesOrCores => f.write_str("auto"),
        }
    }
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

/// Whether the program is the DIR of mpirun's `--prefix DIR`: the word behind `--prefix` in this
/// command line, and a folder, or an absolute path at which nothing is.
fn is_prefix(program: &str, line: &[OsString]) -> bool {
    let path = Path::new(program);
    let is_folder = path.is_dir() || (path.is_absolute() && !path.exists());
    let is_behind = |pair: &[OsString]| pair[0] == "--prefix" && pair[1] == program;
    let options = line.split(|word| word == "--").next().unwrap_or_default();
    is_folder && options.windows(2).any(is_behind)
}

impl Options {
    /// Checks what clap cannot: options that do not fit together.
    pub fn check(&self) -> Result<(), Failure> {
        let without_hosts = [
            (
                self.output.stdin.0.is_some(),
                "--stdin reaches no other host, so it does not go with --hosts and --hostfile: let the ranks read a file",
            ),
            (
                self.meeting.nnodes.is_some(),
                "--nnodes does not go with --hosts and --hostfile: the list of hosts says how many nodes there are, so leave --nnodes out",
            ),
            (
                self.meeting.node_rank.is_some(),
                "--node-rank does not go with --hosts and --hostfile: the nodes have the numbers of their hosts in the list, so leave --node-rank out",
            ),
        ];
        let given = without_hosts.iter().find(|(is_given, _)| *is_given && self.hosts.starts());
        if let Some((_, message)) = given {
            return Err(Failure::new(2, *message));
        }
        let mistake = match self.command.first().and_then(|program| program.to_str()) {
            Some(program) if self.output.tee && is_streams(program) => Some(TEE.to_owned()),
            Some(program) if self.output.prefix && self.command.len() > 1 && is_prefix(program, &command_line()) => {
                Some(format!("{program} is no program; {PREFIX}"))
            }
            _ => mistake(&self.command),
        };
        if let Some(message) = mistake {
            return Err(Failure::new(2, message));
        }
        // The starter knows only some of the nodes' numbers of ranks, so each node checks its own.
        if !self.hosts.starts() {
            let share = self.hosts.agent.as_ref().and_then(|share| share.ranks);
            self.restart.check(matches!(share.map(Count::Ranks).or(self.ranks), Some(Count::Ranks(_))))?;
        }
        self.output.check()
    }

    /// The number of ranks to start on this node, with its spares.
    pub fn ranks_here(&self) -> Result<u32, Failure> {
        self.ranks_without_spares().map(|ranks| ranks.saturating_add(self.restart.spares))
    }

    fn ranks_without_spares(&self) -> Result<u32, Failure> {
        let cores = || std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
        let devices = || ccl::devices().map(|(count, _)| count as u32);
        let share = self.hosts.agent.as_ref().and_then(|share| share.ranks);
        match share.map(Count::Ranks).or(self.ranks) {
            Some(Count::Ranks(ranks)) => Ok(ranks),
            Some(Count::Cores) => Ok(cores()),
            Some(Count::DevicesOrCores) => Ok(devices().ok().filter(|count| *count > 0).unwrap_or_else(cores)),
            None => Ok(devices().ok().filter(|count| *count > 0).unwrap_or(1)),
            Some(Count::Devices) => match devices() {
                Ok(count) if count > 0 => Ok(count),
                Ok(_) => Err(Failure::new(1, "-n gpu: this host has no device; say a number, or -n cpu")),
                Err(error) => {
                    // After ";" the message has advice for programs that use the library.
                    let why = error.message().split(';').next().unwrap_or_default();
                    Err(Failure::new(1, format!("-n gpu: {why}; say a number, or -n cpu (devicemesh info has more)")))
                }
            },
        }
    }
}
