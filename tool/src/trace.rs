//! `devicemesh trace`: what the ranks of a job did, from their recordings.

mod chrome;
mod clocks;
mod summary;
mod timeline;
mod words;

use std::io;
use std::path::PathBuf;

use clap::Args;
use devicemesh::printable::printable;
use recording::Snapshot;

use self::summary::Summary;
use self::timeline::{Timeline, jobs};
use self::words::{size, time};
use crate::columns::table;
use crate::failure::Failure;
use crate::recordings;
use crate::stdio::{print, say};
use crate::style::{Style, When};
use crate::terminal;
use crate::words::{count, listed};

/// The end of `--help` and of the manual page.
pub const HELP: &str = "\
A process that uses the library records its last 2048 calls. With DM_TRACE_DIR=DIR it
records into a file in DIR, which outlives it.

Examples:
  DM_TRACE_DIR=traces devicemesh run -n 8 -- ./train
  devicemesh trace traces -o job.json     # for https://ui.perfetto.dev

Tables:
  transfer  from the moment when the last rank has begun to the end on the last rank
  busbw     GB/s on the bus as nccl-tests counts it, during the transfers
  waited    how long all other ranks together waited because this rank began last

Exit codes:
  0  done
  1  there is no recording, or the trace cannot be written
  2  wrong command line";

/// The options of `devicemesh trace`. The comments of the fields are their help.
#[derive(Args)]
pub struct Options {
    /// Recordings, or folders of recordings (DM_TRACE_DIR)
    #[arg(value_name = "RECORDING", required = true)]
    recordings: Vec<PathBuf>,
    /// The job, where the recordings are of several
    #[arg(long, value_name = "NAME")]
    job: Option<String>,
    /// Write the trace into this file, for Perfetto or chrome://tracing
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print the tables as one line of JSON
    #[arg(long)]
    json: bool,
    /// Colours; auto: on a terminal, unless NO_COLOR is set
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    color: When,
}

/// Reads the recordings, writes the trace, and prints the tables.
pub fn trace(options: &Options) -> Result<u8, Failure> {
    let warn = |line: &str| say(&format!("devicemesh trace: {}", printable(line)));
    let snapshots = recordings::read_files(&options.recordings, warn)?;
    let job = choose(&snapshots, options.job.as_deref())?;
    let timeline = Timeline::new(&snapshots, &job).map_err(|why| Failure::new(1, why))?;
    if let Some(path) = &options.output {
        let text = chrome::chrome(&timeline).map_err(|error| Failure::new(1, error.to_string()))?;
        std::fs::write(path, text)
            .map_err(|error| Failure::new(1, format!("cannot write {}: {error}", path.display())))?;
    }
    let summary = Summary::new(&timeline);
    print(match options.json {
        true => serde_json::to_string(&summary).map_err(|error| Failure::new(1, error.to_string()))? + "\n",
        false => text(&timeline, &summary, &job, terminal::width(), Style::new(options.color, &io::stdout())),
    })?;
    Ok(0)
}

/// The job of the recordings. Fails where there are several and none is named.
fn choose(snapshots: &[Snapshot], wanted: Option<&str>) -> Result<String, Failure> {
    let jobs = jobs(snapshots);
    let names = || listed(jobs.iter().map(|(name, number)| format!("{name} ({})", processes(*number))), 8);
    match wanted {
        Some(wanted) if jobs.contains_key(wanted) => Ok(wanted.to_owned()),
        Some(wanted) => Err(Failure::new(2, format!("no recording is of the job {wanted}; there are {}", names()))),
        None => match (jobs.len(), jobs.first_key_value()) {
            (1, Some((name, _))) => Ok(name.clone()),
            (0, _) | (_, None) => Err(Failure::new(1, "the processes of the recordings have made no call")),
            _ => Err(Failure::new(2, format!("the recordings are of several jobs: choose one by --job: {}", names()))),
        },
    }
}

fn processes(number: usize) -> String {
    if number == 1 { "1 process".to_owned() } else { format!("{number} processes") }
}

/// The tables, and the range of time that they cover.
fn text(timeline: &Timeline, summary: &Summary, job: &str, width: Option<usize>, style: Style) -> String {
    let spent = timeline.calls.iter().map(|call| call.ended).fold(0.0, f64::max);
    let begun = timeline.ranks.iter().fold(0u64, |sum, rank| sum.saturating_add(rank.calls_begun));
    let mut out = format!(
        "{}: {}, {} in {}",
        style.bold(&printable(job)),
        processes(timeline.ranks.len()),
        count(timeline.calls.len(), "call"),
        time(spent)
    );
    if begun > timeline.calls.len() as u64 {
        out += &format!(" (the last ones of {begun})");
    }
    out += "\n\n";
    let heads = ["dimension", "operation", "up to", "calls", "bytes", "time", "transfer", "busbw"];
    let row = |cost: &summary::Cost| {
        [
            printable(&cost.group).into_owned(),
            cost.operation.to_owned(),
            if cost.size_class == 0 { "-".to_owned() } else { size(cost.size_class) },
            cost.calls.to_string(),
            if cost.bytes == 0 { "-".to_owned() } else { size(cost.bytes) },
            time(cost.seconds * 1e9),
            cost.transfer_seconds.map_or("-".to_owned(), |seconds| time(seconds * 1e9)),
            cost.busbw_gbps.map_or("-".to_owned(), |busbw| format!("{busbw:.2}")),
        ]
    };
    let rows: Vec<_> = summary.costs.iter().map(row).collect();
    out += &table(&heads, &rows, |column| column < 2, 2, width, |head| style.dim(head));
    if summary.stragglers.is_empty() {
        return out;
    }
    let heads = ["rank", "last in", "waited", "mostly in", "by rank"];
    let row = |late: &summary::Straggler| {
        [
            late.rank.to_string(),
            count(late.last_in, "call"),
            time(late.waited_seconds * 1e9),
            printable(&late.mostly_in).into_owned(),
            late.mostly_rank.to_string(),
        ]
    };
    let rows: Vec<_> = summary.stragglers.iter().take(16).map(row).collect();
    out += &format!("\n{}\n", style.bold("for whom the others waited"));
    out + &table(&heads, &rows, |column| column == 3, 1, width, |head| style.dim(head))
}
