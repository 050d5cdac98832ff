//! `devicemesh why`: which rank did not come, and where it is.
//!
//! Every process that uses the library has a recording of its calls in memory that others can read
//! (the crate `recording`). This subcommand reads the recordings of a job, and says who waits for
//! whom. It changes nothing in the processes, and needs nothing from them. It reads those of its
//! own host itself, and asks the other hosts of the job ([`lines`]).

mod answer;
mod exit_code;
mod find;
mod groups;
mod job;
mod json;
mod judge;
#[cfg(test)]
mod judge_tests;
mod launched;
mod lines;
mod metrics;
mod process;
mod ras;
mod report;
mod roots;
mod stack;
mod waits;
mod words;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use clap::Args;
use devicemesh::printable::printable;
use devicemesh::rendezvous::host_name;
use rustix::process::geteuid;
use serde::Serialize;

pub use self::answer::answer_for_parent;
use self::exit_code::{NOT_MADE, STUCK};
use self::find::Found;
use self::job::{Job, Rank, Seen, jobs};
use self::json::JobReport;
use self::judge::{Verdict, judge};
use self::launched::{Launched, advice_for_one, variable};
use self::lines::Lines;
use self::metrics::metrics;
use self::process::Process;
use self::stack::Stacks;
use crate::duration::{duration, limit};
use crate::failure::Failure;
use crate::proc;
use crate::ps::jobs::{MADE_ID, NO_ID};
use crate::stdio::{print, say};
use crate::style::{Style, When};
use crate::terminal;
use crate::words::{count, listed};

/// The end of `--help` and of the manual page.
pub const HELP: &str = "\
Examples:
  # all jobs of this user on this host; a job of devicemesh run on all of its hosts
  devicemesh why
  # the job with that name or process
  devicemesh why llama
  # a job that is gone, whose ranks had DM_TRACE_DIR=traces
  devicemesh why traces/
  # counters for Prometheus, for example for node_exporter's textfile collector
  devicemesh why --metrics > /var/lib/node_exporter/devicemesh.prom
  # ranks that srun has started on two hosts
  srun --jobid=JOB --overlap -N 2 --ntasks-per-node=1 devicemesh why

Columns:
  group  a mesh and its dimension, or what the ranks agree in
  ranks  the ranks that are at this call
  call   how many calls of the group they have begun
  what   the last one
  state  waits (waited, in a job that is gone), done, failed, \
         queued (in a group of calls that has not ended), or issued (handed to a stream)
  since  the time since the call began, or since it ended

Exit codes:
  0  nothing is stuck, also where there is no job
  1  something is stuck: a rank has waited for longer than --after
  2  wrong command line
  3  a job or a file cannot be found or read, or the output cannot be written";

/// The options of `devicemesh why`. The comments of the fields are their help.
#[derive(Args)]
pub struct Options {
    /// The jobs: their names, processes (of a rank or of the tool that started it), or files and
    /// folders with recordings (DM_TRACE_DIR); left out, all jobs of this user on this host, or of
    /// all users for root
    #[arg(value_name = "JOB")]
    jobs: Vec<String>,
    /// A rank that has waited for less is not stuck
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    after: Duration,
    /// Look again after each TIME, until Ctrl-C
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "2s", value_parser = limit)]
    watch: Option<Duration>,
    /// How long the other hosts of the jobs may take to answer. Left out, it is 2s for the nodes of
    /// devicemesh run, and 10s where srun or mpirun has started this on each host. 0 asks no other
    /// host
    #[arg(long, value_name = "TIME", value_parser = duration)]
    timeout: Option<Duration>,
    /// Do not read the native stacks of the ranks that are behind. Reading one stops its thread for
    /// a moment. --watch does not read them
    #[arg(long)]
    no_stacks: bool,
    /// Copy the recordings of the jobs on this host into this folder, and judge nothing. Where
    /// nothing else reaches all hosts of a job, do this on each host, and give the folder with all
    /// copies to `devicemesh why`
    #[arg(long, value_name = "DIR", conflicts_with_all = ["json", "watch", "no_stacks"])]
    save: Option<PathBuf>,
    /// Print one line of JSON, with all ranks, groups and findings
    #[arg(long)]
    json: bool,
    /// Print the counters of the jobs' processes as text for Prometheus, and judge nothing
    #[arg(long, conflicts_with_all = ["json", "watch", "no_stacks", "save"])]
    metrics: bool,
    /// Colours; auto: on a terminal, unless NO_COLOR is set
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    color: When,
}

#[derive(Serialize)]
struct Report {
    host: String,
    jobs: Vec<JobReport>,
}

/// How long the nodes of devicemesh run may take to answer where the user gives no time.
const PATIENCE: Duration = Duration::from_secs(2);

/// Says what is wrong with the jobs.
pub fn why(options: &Options) -> Result<u8, Failure> {
    let named = Named::new(&options.jobs);
    if let Some(folder) = &options.save {
        return save(&chosen(&named, true, find::here)?, folder);
    }
    if options.metrics {
        return metrics(&chosen(&named, true, find::here)?);
    }
    let is_alone = options.timeout.is_some_and(|timeout| timeout.is_zero()) || named.are_paths();
    let launched = if is_alone { None } else { Launched::here(options.timeout)? };
    let Some(launched) = launched else {
        let patience = options.timeout.unwrap_or(PATIENCE);
        let lines = || if is_alone { Lines::none() } else { Lines::of_runs(&named.names, patience) };
        return repeat(options, |is_first| look(options, &named, &lines(), is_first));
    };
    if !launched.is_first() {
        return launched.answer().map(|()| 0);
    }
    let (_server, line) = launched.serve()?;
    let lines = Lines::one(line, launched.patience);
    let done = repeat(options, |is_first| look(options, &named, &lines, is_first));
    lines.finish();
    done
}

/// Looks once, or again and again. `look` gets whether this is the first time.
fn repeat(options: &Options, look: impl Fn(bool) -> Result<u8, Failure>) -> Result<u8, Failure> {
    let mut is_first = true;
    loop {
        let done = look(std::mem::take(&mut is_first))?;
        let Some(pause) = options.watch else { return Ok(done) };
        sleep(pause);
        // A terminal shows the newest answer alone, and elsewhere an empty line divides the
        // answers.
        if !options.json {
            print(if io::stdout().is_terminal() { "\x1b[H\x1b[2J" } else { "\n" })?;
        }
    }
}

/// Looks at the jobs once.
fn look(options: &Options, named: &Named<'_>, lines: &Lines, is_first: bool) -> Result<u8, Failure> {
    let live = || {
        let mut found = find::live();
        lines.gather(&mut found);
        found
    };
    let jobs = chosen(named, is_first, live)?;
    let after = options.after.as_secs_f64();
    let stdout = io::stdout();
    let style = Style::new(options.color, &stdout);
    let mut report = Report { host: host_name(), jobs: Vec::new() };
    let mut texts = Vec::new();
    let (mut is_stuck, mut is_partial) = (false, false);
    for job in &jobs {
        let verdict = judge(job, after);
        let unseen = |rank: &Rank| matches!(rank.seen, Seen::Elsewhere);
        is_partial |= !verdict.findings.is_empty() && job.ranks.iter().any(unseen);
        let name = name(job);
        let stacks = stacks(&verdict, !options.no_stacks && options.watch.is_none(), lines);
        is_stuck |= !verdict.findings.is_empty();
        let local = job.ranks.iter().filter_map(Rank::process).filter(|process| process.runs_here());
        let nccl = ras::Status::of(local.map(|process| process.pid));
        let width = terminal::width();
        match options.json {
            true => {
                let nccl = nccl.and_then(Result::ok).map(|status| status.known(&verdict)).unwrap_or_default();
                report.jobs.push(JobReport::new(&verdict, &stacks, after, &name, nccl));
            }
            false => {
                let text = report::text(&verdict, &stacks, after, &printable(&name), width, style);
                let nccl = match nccl {
                    Some(Ok(status)) => status.text(&status.known(&verdict), width, style),
                    Some(Err(why)) => format!("\n{}\n", printable(&why)),
                    None => String::new(),
                };
                texts.push(text + &nccl);
            }
        }
    }
    let text = match (options.json, texts.is_empty()) {
        (true, _) => serde_json::to_string(&report).map_err(|error| Failure::new(NOT_MADE, error.to_string()))? + "\n",
        (false, true) if named.are_paths() => "the named recordings belong to no job\n".to_owned(),
        (false, true) => {
            let whose = if geteuid().is_root() { "" } else { " of this user" };
            format!("no job{whose} on {} has a recording\n", printable(&report.host))
        }
        (false, false) => texts.join("\n"),
    };
    print(text).map_err(|failure| Failure { code: NOT_MADE, ..failure })?;
    // Ranks whose files are missing, and nodes that were asked and are silent, have another reason.
    let may_be_alone = !named.are_paths() && lines.is_empty() && options.watch.is_none();
    if let Some(advice) = advice_for_one(&variable).filter(|_| is_partial && may_be_alone) {
        say(&format!("devicemesh why: {advice}"));
    }
    Ok(if is_stuck { STUCK } else { 0 })
}

/// The most recordings of one process that are copied.
const MOST_COPIES: u32 = 16;

/// Copies the recordings of the jobs into a folder.
fn save(jobs: &[Job], folder: &Path) -> Result<u8, Failure> {
    let cannot =
        |path: &Path, error: io::Error| Failure::new(NOT_MADE, format!("cannot write {}: {error}", path.display()));
    fs::create_dir_all(folder).map_err(|error| cannot(folder, error))?;
    let mut written: BTreeSet<PathBuf> = BTreeSet::new();
    for process in jobs.iter().flat_map(Job::recordings) {
        // A process has two recordings where it has two copies of the library.
        let mut paths = (1..=MOST_COPIES).map(|copy| folder.join(process.file_name(copy)));
        let Some(path) = paths.find(|path| !written.contains(path)) else { continue };
        if find::is_original(&path) {
            let path = printable(&path.to_string_lossy()).into_owned();
            return Err(Failure::new(
                NOT_MADE,
                format!("{path} is the recording of a process itself: name another folder"),
            ));
        }
        // A process that has mapped the file that is there keeps its own.
        let new = path.with_extension("new");
        let saved = write_new(&new, &process.copy(usize::MAX)).and_then(|()| fs::rename(&new, &path));
        saved.map_err(|error| {
            let _ = fs::remove_file(&new);
            cannot(&path, error)
        })?;
        written.insert(path);
    }
    let text = format!("{} saved in {}\n", count(written.len(), "recording"), printable(&folder.to_string_lossy()));
    print(text).map_err(|failure| Failure { code: NOT_MADE, ..failure })?;
    Ok(0)
}

/// Writes a file that only this user can read. Others may write in the folder, too. So a link with
/// the name of the file is removed, and never followed.
fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let _ = fs::remove_file(path);
    File::options().write(true).create_new(true).mode(0o600).open(path)?.write_all(bytes)
}

/// The jobs and files that the command line names.
struct Named<'a> {
    /// Files and folders.
    paths: Vec<PathBuf>,
    /// Names of jobs, and processes.
    names: Vec<&'a String>,
}

impl<'a> Named<'a> {
    fn new(named: &'a [String]) -> Named<'a> {
        let (paths, names): (Vec<&String>, Vec<&String>) =
            named.iter().partition(|name| name.contains('/') || PathBuf::from(name).exists());
        Named { paths: paths.into_iter().map(PathBuf::from).collect(), names }
    }

    /// Whether no running job is meant.
    fn are_paths(&self) -> bool {
        self.names.is_empty() && !self.paths.is_empty()
    }
}

/// The jobs that are meant, or all that `live` finds. Fails where files alone are named and none
/// can be read. At a later look (`--watch`) this is only reported, because a file may be half
/// written then.
fn chosen(named: &Named<'_>, is_first: bool, live: impl FnOnce() -> Found) -> Result<Vec<Job>, Failure> {
    let Named { paths, names } = named;
    let mut chosen = Vec::new();
    if !paths.is_empty() {
        let mut found = find::of_files(paths)?;
        let may_fail = is_first && named.are_paths();
        if may_fail && found.processes.is_empty() && !found.unreadable.is_empty() {
            let first = found.unreadable.remove(0);
            found.unreadable.iter().for_each(|line| warn(line));
            return Err(Failure::new(NOT_MADE, format!("cannot read {first}")));
        }
        chosen.extend(warned(found));
    }
    if named.are_paths() {
        return Ok(chosen);
    }
    let running = warned(live());
    for name in names {
        if !running.iter().any(|job| is_named(job, name)) {
            let known = listed(running.iter().map(self::name).filter(|name| !name.is_empty()), 8);
            let known =
                if known.is_empty() { "no job has a recording here".to_owned() } else { format!("there are {known}") };
            return Err(Failure::new(NOT_MADE, format!("no job and no process {name:?} with a recording; {known}")));
        }
    }
    chosen.extend(running.into_iter().filter(|job| names.is_empty() || names.iter().any(|name| is_named(job, name))));
    Ok(chosen)
}

/// The jobs of what was found. What could not be read is reported.
fn warned(found: Found) -> Vec<Job> {
    found.unreadable.iter().for_each(|line| warn(line));
    jobs(found)
}

/// Reports what could not be read.
fn warn(line: &str) {
    say(&format!("devicemesh why: {}", printable(line)));
}

/// Whether the job has this name, or a process with this number: a rank, or an ancestor of one.
fn is_named(job: &Job, wanted: &str) -> bool {
    let Ok(pid) = wanted.parse::<u32>() else { return name(job) == wanted };
    // The ancestors of a process of another host are not known.
    let is_meant = |process: &Process| process.pid == pid || process.runs_here() && proc::descends(process.pid, pid);
    job.ranks.iter().filter_map(Rank::process).any(is_meant) || name(job) == wanted
}

/// The job's name, as `devicemesh ps` has it: its id, or the program where no user has given an id.
fn name(job: &Job) -> String {
    if ![String::new(), NO_ID.to_owned()].contains(&job.id) && !job.id.starts_with(MADE_ID) {
        return job.id.clone();
    }
    let mut programs = job.ranks.iter().filter_map(|rank| Some(&rank.process()?.program));
    programs.find(|program| !program.is_empty()).unwrap_or(&job.id).clone()
}

/// The stacks of the ranks that are the cause of what is wrong.
fn stacks(verdict: &Verdict<'_>, frames: bool, lines: &Lines) -> Stacks {
    let mut stacks = Stacks::default();
    let mut elsewhere = Vec::new();
    for rank in report::culprits(verdict).into_iter().take(report::MOST_RANKS) {
        let Some(process) = verdict.job.ranks[rank].process().filter(|process| process.state.is_alive()) else {
            continue;
        };
        match process.runs_here() {
            true => stacks.look(rank, process, frames),
            false => elsewhere.push((rank, process.pid, process.origin)),
        }
    }
    if frames {
        lines.look(&elsewhere, &mut stacks);
    }
    stacks
}
