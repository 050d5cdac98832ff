//! Runs the models: each one as it stands, and once for each memory order that is weakened.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::places::{Place, place, unmet};
use crate::weak::{self, Point};
use crate::{futex, plain, sync};

/// A model: some threads that use a protocol.
pub struct Model {
    /// The model's name.
    pub name: &'static str,
    /// How often loom may take the processor from a thread that could go on. Without a limit loom
    /// runs all interleavings.
    pub preemptions: Option<usize>,
    /// Whether the kernel has `futex_waitv`.
    pub waitv: bool,
    /// The body of the first thread. It starts the other threads.
    pub run: fn(),
}

/// A memory order that stays although no model fails without it, or reaches it.
pub struct Kept {
    /// The function, with the type to which it belongs.
    pub function: &'static str,
    /// A part of the line of code.
    pub code: &'static str,
    /// The half that stays, or "any" where no model reaches the order.
    pub half: &'static str,
    /// Why no model fails, and why the order stays.
    pub why: &'static str,
}

impl Kept {
    fn is(&self, place: &Place) -> bool {
        place.function == self.function && place.code.contains(self.code) && place.half == self.half
    }
}

/// What a run of one model has shown.
enum Outcome {
    /// The model holds. The run has met these memory orders in so many executions.
    Holds { executions: usize, met: Vec<Point> },
    /// The model fails, for this reason.
    Fails(String),
    /// The run shows nothing, for example because it has too many branches.
    Unclear(String),
}

/// The most operations in one execution.
const MAX_BRANCHES: usize = 20_000;

/// Runs what the arguments say: one model, or all of them with each order weakened. The rows of the
/// table of orders go to the standard output.
pub fn main(models: &[Model], kept: &[Kept]) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [] => check(models, kept, true),
        ["--quick"] => check(models, kept, false),
        [name] => one(models, name),
        [name, point] => {
            weak::weaken(point.parse().expect("a point is FILE|LINE|COLUMN|HALF"));
            one(models, name)
        }
        _ => {
            eprintln!("usage: [--quick | MODEL [FILE|LINE|COLUMN|HALF]]");
            ExitCode::FAILURE
        }
    }
}

/// Runs one model in this process, and says which memory orders it has met.
fn one(models: &[Model], name: &str) -> ExitCode {
    static EXECUTIONS: AtomicUsize = AtomicUsize::new(0);
    let Some(model) = models.iter().find(|model| model.name == name) else {
        eprintln!("no model {name}");
        return ExitCode::FAILURE;
    };
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = model.preemptions.or(builder.preemption_bound);
    builder.max_branches = MAX_BRANCHES;
    let (run, waitv) = (model.run, model.waitv);
    builder.check(move || {
        EXECUTIONS.fetch_add(1, Ordering::Relaxed);
        plain::begin();
        futex::begin(waitv);
        sync::turn();
        run();
    });
    println!("executions {}", EXECUTIONS.load(Ordering::Relaxed));
    weak::met().iter().for_each(|point| println!("met {}", point.key()));
    ExitCode::SUCCESS
}

/// Runs a model in a process of its own, because a model that fails may end the process.
fn run(model: &Model, weakened: Option<&Point>) -> Outcome {
    let program = std::env::current_exe().expect("this program has a path");
    let mut command = Command::new(program);
    command.arg(model.name).args(weakened.map(Point::key)).stdin(Stdio::null()).env("RUST_BACKTRACE", "0");
    let output = command.output().expect("this program can be started");
    let (said, complaint) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() {
        let number = |line: &str| line.strip_prefix("executions ")?.parse().ok();
        return Outcome::Holds {
            executions: said.lines().find_map(number).unwrap_or(0),
            met: said.lines().filter_map(|line| line.strip_prefix("met ")?.parse().ok()).collect(),
        };
    }
    let mut lines = complaint.lines().skip_while(|line| !line.contains("panicked at")).skip(1);
    let first = lines.find(|line| !line.trim().is_empty()).unwrap_or("").trim().to_owned();
    match &first {
        first if first.contains("deadlock") => Outcome::Fails("a thread sleeps for ever".to_owned()),
        first
            if first.contains("Causality violation")
                || first.contains("ing to cell")
                || first.contains("ing from cell") =>
        {
            Outcome::Fails("a data race".to_owned())
        }
        first if first.contains("exceeded") || first.is_empty() => Outcome::Unclear(complaint.into_owned()),
        first => Outcome::Fails(first.trim_start_matches("assertion failed: ").to_owned()),
    }
}

/// Writes one row of the table.
fn write_row(place: &Place, verdict: &str) {
    let file = place.file.rsplit_once("src/").map_or(&*place.file, |(_, file)| file);
    let (code, verdict) = (place.code.replace('|', "\\|"), verdict.replace('|', "\\|"));
    println!("| {file} | {} | `{code}` | {} | {verdict} |", place.function, place.half);
}

fn check(models: &[Model], kept: &[Kept], weakens: bool) -> ExitCode {
    let mut is_good = true;
    let mut met_by: BTreeMap<Point, Vec<(usize, &Model)>> = BTreeMap::new();
    for model in models {
        let began = Instant::now();
        match run(model, None) {
            Outcome::Holds { executions, met } => {
                eprintln!("{}: holds in {executions} executions ({:.1} s)", model.name, began.elapsed().as_secs_f64());
                for point in met {
                    met_by.entry(point).or_default().push((executions, model));
                }
            }
            Outcome::Fails(why) | Outcome::Unclear(why) => {
                eprintln!("{}: {why}", model.name);
                is_good = false;
            }
        }
    }
    if weakens && is_good {
        is_good = weaken_each(met_by, kept);
    }
    if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs the models with each order weakened, and writes one row for each.
fn weaken_each(met_by: BTreeMap<Point, Vec<(usize, &Model)>>, kept: &[Kept]) -> bool {
    let mut is_good = true;
    let mut needless: BTreeSet<usize> = (0..kept.len()).collect();
    let unmet = unmet(&met_by.keys().collect::<Vec<_>>());
    for (point, mut models) in met_by {
        let place = place(&point);
        // The model with the fewest executions fails first.
        models.sort_by_key(|(executions, _)| *executions);
        let failed = models.iter().find_map(|(_, model)| match run(model, Some(&point)) {
            Outcome::Holds { .. } => None,
            Outcome::Fails(why) => Some(format!("{}: {why}", model.name)),
            Outcome::Unclear(why) => {
                eprintln!("{}: {}: weakened, it shows nothing: {why}", place.function, model.name);
                None
            }
        });
        let reason = kept.iter().position(|kept| kept.is(&place));
        let verdict = match (failed, reason) {
            (Some(failed), None) => failed,
            (Some(failed), Some(_)) => {
                // The order may stand in another line of the same kind, which needs no reason.
                failed
            }
            (None, Some(reason)) => {
                needless.remove(&reason);
                format!("no model fails: {}", kept[reason].why)
            }
            (None, None) => {
                is_good = false;
                "NO MODEL FAILS".to_owned()
            }
        };
        write_row(&place, &verdict);
    }
    for place in unmet {
        let reason = kept.iter().position(|kept| kept.is(&place));
        match reason {
            Some(reason) => {
                needless.remove(&reason);
                write_row(&place, &format!("no model reaches it: {}", kept[reason].why));
            }
            None => {
                is_good = false;
                write_row(&place, "NO MODEL REACHES IT");
            }
        }
    }
    for kept in needless.into_iter().map(|number| &kept[number]) {
        eprintln!("{}: a model fails without the order in `{}`, so it needs no reason", kept.function, kept.code);
        is_good = false;
    }
    is_good
}
