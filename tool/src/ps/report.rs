//! The jobs as a table and as JSON. docs/tool.md describes the JSON: a field may be added, and
//! none is removed or gets another meaning.

use std::time::{SystemTime, UNIX_EPOCH};

use devicemesh::printable::printable;
use devicemesh::rendezvous::host_name;
use serde::Serialize;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::jobs::{Job, Rank, State};
use super::process::{Usage, elapsed};
use crate::columns::{Columns, GAP, table};
use crate::failure::Failure;
use crate::number_set::NumberSet;
use crate::style::Style;
use crate::terminal;
use crate::words::count;

/// A name is cut to this width at the least, in character cells. Where the table is wider even
/// then, it is split.
const SHORTEST_NAME: usize = 8;
/// The end of a name that is cut.
const DOTS: &str = "...";

#[derive(Serialize)]
pub struct Report<'a> {
    host: String,
    jobs: Vec<JobReport<'a>>,
}

#[derive(Serialize)]
struct JobReport<'a> {
    name: &'a str,
    /// Who started the ranks.
    launcher: &'static str,
    /// The process that started them. Null where it has gone.
    pid: Option<u32>,
    state: &'static str,
    /// The start here in seconds since 1970, and the seconds since then.
    started: f64,
    elapsed: f64,
    /// The number of ranks in the job. Null before its nodes have met.
    world_size: Option<usize>,
    /// How many of them are spares.
    spares: usize,
    /// How often the job was started again, or with `--restart rank` the ranks of this host.
    restarts: u32,
    memory_bytes: u64,
    cpu_percent: f64,
    command: &'a [String],
    /// The ranks that run on this host.
    ranks: Vec<RankReport>,
}

#[derive(Serialize)]
struct RankReport {
    rank: usize,
    /// The rank's first process.
    pid: u32,
    /// The number of its processes.
    processes: usize,
    /// The numbers of its processes.
    pids: Vec<u32>,
    state: &'static str,
    /// How often it was started again.
    restarts: u32,
    memory_bytes: u64,
    cpu_percent: f64,
}

impl<'a> Report<'a> {
    pub fn new(jobs: &'a [Job], usage: &Usage) -> Report<'a> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |now| now.as_secs_f64());
        let rounded = |number: f64| (number * 10.0).round() / 10.0;
        let rank = |rank: &Rank| {
            let (memory_bytes, percent) = usage.of(rank.pids());
            RankReport {
                rank: rank.rank,
                pid: rank.pids().next().unwrap_or(0),
                processes: rank.processes.len(),
                pids: rank.pids().collect(),
                state: word(if rank.is_stopped() { State::Stopped } else { State::Running }),
                restarts: rank.restarts(),
                memory_bytes,
                cpu_percent: rounded(percent),
            }
        };
        let job = |job: &'a Job| {
            let (memory_bytes, percent) = usage.of(job.pids());
            let elapsed = elapsed(job.started);
            JobReport {
                name: &job.name,
                launcher: job.launcher,
                pid: job.starter,
                state: word(job.state),
                started: rounded(now - elapsed),
                elapsed: rounded(elapsed),
                world_size: job.world_size,
                spares: job.spares,
                restarts: job.restarts,
                memory_bytes,
                cpu_percent: rounded(percent),
                command: &job.command,
                ranks: job.ranks.iter().map(rank).collect(),
            }
        };
        Report { host: host_name(), jobs: jobs.iter().map(job).collect() }
    }

    pub fn json(&self) -> Result<String, Failure> {
        serde_json::to_string(self).map(|text| text + "\n").map_err(|error| Failure::new(1, error.to_string()))
    }

    /// A table whose lines are no wider than `width`, and how to end what is left over. A name is
    /// cut where the table would be wider.
    pub fn text(&self, width: Option<usize>, style: Style) -> String {
        if self.jobs.is_empty() {
            return format!("no job of this user on {}\n", printable(&self.host));
        }
        let row = |job: &JobReport| {
            [
                printable(job.name).into_owned(),
                job.pid.map_or("-".to_owned(), |pid| pid.to_string()),
                ranks(job),
                duration(job.elapsed),
                state(job),
                bytes(job.memory_bytes),
                format!("{:.0}%", job.cpu_percent),
            ]
        };
        let mut rows: Vec<[String; 7]> = self.jobs.iter().map(row).collect();
        let heads = ["job", "pid", "ranks", "elapsed", "state", "memory", "CPU"];
        let is_name = |column| [0, 4].contains(&column);
        if let Some(width) = width {
            let others: Vec<&[String]> = rows.iter().map(|row| &row[1..]).collect();
            // The last column has no gap behind it, and the name has one.
            let others = Columns::new(&heads[1..], &others, |_| false).width() - GAP;
            let room = width.saturating_sub(others + GAP).max(SHORTEST_NAME);
            rows.iter_mut().for_each(|row| row[0] = cut(&row[0], room));
        }
        let table = table(&heads, &rows, is_name, 2, width, |head| style.dim(head));
        let left = self.jobs.iter().filter(|job| job.state == word(State::LeftOver)).map(left_over);
        table + &terminal::wrap(&left.collect::<String>(), width)
    }
}

/// The ranks that run here, and the number of ranks of the job. One rank is called a rank, because
/// "0 of 1" would read as a count.
fn ranks(job: &JobReport) -> String {
    let here: NumberSet = job.ranks.iter().map(|rank| rank.rank as u32).collect();
    let spares = if job.spares == 0 { String::new() } else { format!(" ({})", count(job.spares, "spare")) };
    match (job.world_size, &job.ranks[..]) {
        (None, _) => "-".to_owned(),
        (Some(size), [one]) => format!("rank {} of {size}{spares}", one.rank),
        (Some(size), _) => format!("{here} of {size}{spares}"),
    }
}

/// The state, with the number of restarts where there were any.
fn state(job: &JobReport) -> String {
    match job.restarts {
        0 => job.state.to_owned(),
        restarts => format!("{}, {}", job.state, count(restarts, "restart")),
    }
}

/// Says how to end the processes of a job whose tool has ended.
fn left_over(job: &JobReport) -> String {
    let pids: Vec<String> = job.ranks.iter().flat_map(|rank| &rank.pids).map(u32::to_string).collect();
    let name = printable(job.name);
    format!("{name} is left over: its devicemesh run has ended. To end its processes: kill {}\n", pids.join(" "))
}

/// The name, or its beginning and three dots where it is wider than `room` cells.
fn cut(name: &str, room: usize) -> String {
    if name.width() <= room {
        return name.to_owned();
    }
    let mut short = String::new();
    for letter in name.chars() {
        if short.width() + letter.width().unwrap_or(0) + DOTS.len() > room {
            break;
        }
        short.push(letter);
    }
    short + DOTS
}

fn word(state: State) -> &'static str {
    match state {
        State::Running => "running",
        State::Stopped => "stopped",
        State::Ending => "ending",
        State::Waiting => "waiting",
        State::LeftOver => "left over",
    }
}

/// Seconds as Slurm and ps(1) write them: [[days-]hours:]minutes:seconds.
fn duration(seconds: f64) -> String {
    let seconds = seconds as u64;
    let (days, hours, minutes, rest) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    match (days, hours) {
        (0, 0) => format!("{minutes}:{rest:02}"),
        (0, _) => format!("{hours}:{minutes:02}:{rest:02}"),
        _ => format!("{days}-{hours:02}:{minutes:02}:{rest:02}"),
    }
}

fn bytes(bytes: u64) -> String {
    let units = [(1u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")];
    let fitting = units.iter().find(|(unit, _)| bytes >= *unit);
    fitting.map_or_else(
        || format!("{} KiB", bytes >> 10),
        |(unit, name)| format!("{:.1} {name}", bytes as f64 / *unit as f64),
    )
}

#[cfg(test)]
mod tests {
    use super::{JobReport, RankReport, Report, Style, bytes, duration};

    fn job<'a>(name: &'a str, state: &'static str, pids: &[u32], world_size: usize) -> JobReport<'a> {
        let rank = |(rank, pid): (usize, &u32)| RankReport {
            rank,
            pid: *pid,
            processes: 1,
            pids: vec![*pid],
            state,
            restarts: 0,
            memory_bytes: 200 << 20,
            cpu_percent: 99.0,
        };
        JobReport {
            name,
            launcher: "devicemesh run",
            pid: (state != "left over").then_some(271_802),
            state,
            started: 0.0,
            elapsed: 11.0,
            world_size: Some(world_size),
            spares: 0,
            restarts: 0,
            memory_bytes: 400 << 20,
            cpu_percent: 198.0,
            command: &[],
            ranks: pids.iter().enumerate().map(rank).collect(),
        }
    }

    fn text(jobs: Vec<JobReport<'_>>, width: Option<usize>) -> String {
        Report { host: "here".to_owned(), jobs }.text(width, Style { colour: false })
    }

    #[test]
    fn a_long_name_is_cut_before_the_table_is_split() {
        let name = "llama-70b-pretraining-2026-11-23";
        let long = || vec![job(name, "running", &[7, 8], 2), job("short", "running", &[9], 1)];
        assert!(text(long(), None).contains(name));
        let narrow = text(long(), Some(66));
        let lines: Vec<&str> = narrow.lines().collect();
        assert_eq!(lines.len(), 3, "{narrow}");
        assert!(lines.iter().all(|line| line.len() <= 66) && lines[1].len() > 63, "{narrow}");
        assert!(lines[1].starts_with("llama") && lines[1].contains("...  271802"), "{narrow}");
        assert!(lines[2].starts_with("short ") && lines[2].contains("  rank 0 of 1  "), "{narrow}");
    }

    #[test]
    fn the_processes_that_are_left_over_are_named() {
        let left = text(vec![job("solve", "left over", &[41, 42], 2)], None);
        let said = "solve is left over: its devicemesh run has ended. To end its processes: kill 41 42";
        assert_eq!(left.lines().last(), Some(said), "{left}");
        assert!(!text(vec![job("solve", "running", &[41], 2)], None).contains("kill"));
    }

    #[test]
    fn restarts_and_spares_are_shown_where_there_are_any() {
        let healed = JobReport { spares: 1, restarts: 2, ..job("heals", "running", &[7, 8, 9], 3) };
        let shown = text(vec![healed, job("other", "running", &[5, 6], 2)], None);
        assert!(shown.contains("  0-2 of 3 (1 spare)  ") && shown.contains("  running, 2 restarts  "), "{shown}");
        assert!(
            shown.lines().nth(2).is_some_and(|line| !line.contains("restart") && !line.contains("spare")),
            "{shown}"
        );
    }

    #[test]
    fn amounts_are_short() {
        let spans = [(7.9, "0:07"), (3600.0, "1:00:00"), (86_400.0 * 3.0 + 61.0, "3-00:01:01")];
        spans.iter().for_each(|(seconds, text)| assert_eq!(duration(*seconds), *text));
        let amounts = [(5 << 10, "5 KiB"), (3 << 19, "1.5 MiB"), (1 << 42, "4.0 TiB")];
        amounts.iter().for_each(|(amount, text)| assert_eq!(bytes(*amount), *text));
    }
}
