//! `devicemesh ps`: the jobs of this user on this host.
//!
//! Nothing keeps a list of the jobs, because a list would outlive a job that is killed. The jobs
//! are found in /proc: by the tools that run, and by the environment and the parents of the ranks.

pub mod jobs;
pub mod process;
mod report;

use std::io;
use std::time::Duration;

use clap::Args;

use self::jobs::jobs;
use self::process::{Usage, processes};
use self::report::Report;
use crate::failure::Failure;
use crate::stdio::print;
use crate::style::{Style, When};
use crate::terminal;

/// The end of `--help` and of the manual page.
pub const HELP: &str = "\
Columns:
  job      --rdzv-id, or the program
  pid      the process that started the ranks here: devicemesh run, torchrun, mpirun ...
  ranks    the ranks that run on this host, and the number of ranks of the job
  elapsed  the time since the start here, as [[days-]hours:]minutes:seconds
  state    running, stopped (Ctrl-Z), ending (some ranks here have ended), \
           waiting (no rank runs here; the tool waits for other nodes, for a restart \
           or for the reader of its output), \
           or left over (the tool has ended)
  memory   the memory of the ranks here and of the processes that they started; \
           shared memory counts once
  CPU      the CPU time of these processes in the last half second; 100% is one CPU

Exit codes:
  0  printed, also where there is no job
  2  wrong command line
  1  the output cannot be written";

/// The time for which the use of the CPUs is watched. The kernel counts it in steps of 10 ms.
const WATCH: Duration = Duration::from_millis(500);

/// The options of `devicemesh ps`. The comments of the fields are their help.
#[derive(Args)]
pub struct PsOptions {
    /// Print one line of JSON, with each rank
    #[arg(long)]
    json: bool,
    /// Colours; auto: on a terminal, unless NO_COLOR is set
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    color: When,
}

/// Prints the jobs. A process that ends meanwhile is no error.
pub fn ps(options: &PsOptions) -> Result<u8, Failure> {
    let processes = processes();
    let jobs = jobs(&processes, &process::uses_library);
    let usage = Usage::watch(jobs.iter().flat_map(|job| job.pids()), WATCH);
    let report = Report::new(&jobs, &usage);
    let stdout = io::stdout();
    let text = match options.json {
        true => report.json()?,
        false => report.text(terminal::width(), Style::new(options.color, &stdout)),
    };
    print(text)?;
    Ok(0)
}
