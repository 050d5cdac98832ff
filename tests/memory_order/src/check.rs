//! Runs the models: each one as it stands, and again for each memory order that is weakened.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{Location, PanicHookInfo};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::places::{Place, place, unmet};
use crate::weak::{self, Half, Point};
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

/// Why a memory order stays that no model needs, or why no model reaches an access.
pub struct Kept {
    /// The function, with the type to which it belongs.
    pub function: &'static str,
    /// The line of code, without the spaces around it.
    pub code: &'static str,
    /// The half that stays, or "any" where no model reaches the access.
    pub half: &'static str,
    /// Why no model fails, and why the order stays.
    pub why: &'static str,
}

impl Kept {
    fn is(&self, place: &Place) -> bool {
        (self.function, self.code, self.half) == (&*place.function, &*place.code, place.half)
    }
}

/// The models of one program.
pub struct Program<'a> {
    /// The folder of the program's source, from the package on. Its `#[path]` attributes name the
    /// files of the product.
    pub folder: &'static str,
    /// The models.
    pub models: &'a [Model],
    /// The orders that no model needs, and the accesses that no model reaches.
    pub kept: &'a [Kept],
    /// The names of the models that hold whichever order is weakened, each with the reason.
    pub sturdy: &'a [(&'static str, &'static str)],
}

/// The outcome of running one model.
enum Outcome {
    /// loom ran the model this many times; `met` lists the accesses that the runs used.
    Holds { executions: usize, met: Vec<Point> },
    /// The model fails, for this reason.
    Fails(String),
    /// The run shows nothing, for example because it has too many branches.
    Unclear(String),
}

/// The most operations in one execution.
const MAX_BRANCHES: usize = 20_000;
/// The exit code of a process whose model fails.
const FAILS: u8 = 10;
/// The exit code where a run shows nothing: the models or this program have a defect.
const BROKEN: u8 = 20;

/// The faults that were found so far.
#[derive(Default)]
struct Findings {
    /// A model, or the table, is not as it should be.
    is_bad: bool,
    /// A run has shown nothing.
    is_broken: bool,
}

impl Findings {
    fn bad(&mut self, text: &str) {
        eprintln!("{text}");
        self.is_bad = true;
    }

    fn broken(&mut self, text: &str) {
        eprintln!("{text}");
        self.is_broken = true;
    }

    fn code(&self) -> ExitCode {
        match self {
            Findings { is_broken: true, .. } => ExitCode::from(BROKEN),
            Findings { is_bad: true, .. } => ExitCode::FAILURE,
            _ => ExitCode::SUCCESS,
        }
    }
}

/// The reasons for orders that no model needs.
struct Reasons<'a> {
    /// Each reason, with how many orders it is for, and how many of these no model needs.
    all: Vec<(&'a Kept, usize, usize)>,
}

impl<'a> Reasons<'a> {
    fn new(kept: &'a [Kept]) -> Reasons<'a> {
        Reasons { all: kept.iter().map(|kept| (kept, 0, 0)).collect() }
    }

    /// Returns why the order at `place` stays. `is_needed` says that a model fails without it.
    fn of(&mut self, place: &Place, is_needed: bool) -> Option<&'static str> {
        let (kept, orders, excused) = self.all.iter_mut().find(|(kept, ..)| kept.is(place))?;
        *orders += 1;
        *excused += usize::from(!is_needed);
        Some(kept.why)
    }

    /// Each reason must be for one order that no model needs. Other orders may have the same line
    /// of code in the same function, if a model fails without each of them.
    fn check(&self, findings: &mut Findings) {
        for (kept, orders, excused) in &self.all {
            let named = format!("Kept for `{}` in {} ({})", kept.code, kept.function, kept.half);
            match (orders, excused) {
                (0, _) => findings.bad(&format!("{named}: this Kept matches no order")),
                (_, 0) => findings.bad(&format!("{named}: a model fails without the order, so it needs no Kept")),
                (_, 1) => {}
                _ => findings.bad(&format!("{named}: this Kept matches {excused} orders that no model needs")),
            }
        }
    }
}

/// Runs what the arguments say: one model, or all of them with each order weakened. The rows of the
/// table of orders go to the standard output.
pub fn main(program: &Program<'_>) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [] => check(program, true),
        ["--quick"] => check(program, false),
        [name] => one(program.models, name),
        [name, point] => {
            weak::weaken(point.parse().expect("a point is FILE|LINE|COLUMN|HALF"));
            one(program.models, name)
        }
        _ => {
            eprintln!("usage: [--quick | MODEL [FILE|LINE|COLUMN|HALF]]");
            ExitCode::from(BROKEN)
        }
    }
}

/// Runs one model in this process, and says which accesses it has met.
fn one(models: &[Model], name: &str) -> ExitCode {
    static EXECUTIONS: AtomicUsize = AtomicUsize::new(0);
    let Some(model) = models.iter().find(|model| model.name == name) else {
        eprintln!("no model {name}");
        return ExitCode::from(BROKEN);
    };
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = model.preemptions.or(builder.preemption_bound);
    builder.max_branches = MAX_BRANCHES;
    let (run, waitv) = (model.run, model.waitv);
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        usual(panic);
        end(panic);
    }));
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

/// Ends this process at its first panic, and says why the model fails.
fn end(panic: &PanicHookInfo<'_>) {
    let payload = panic.payload();
    let text = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    // loom's coroutines end by panics that have no text.
    let Some(text) = text else { return };
    let why = failure(panic.location().map_or("", Location::file), text);
    if let Some(why) = &why {
        println!("fails {why}");
    }
    // SAFETY: the function takes any number. It runs no destructors, which loom's state would not
    // survive after a panic.
    unsafe { libc::_exit(i32::from(if why.is_some() { FAILS } else { BROKEN })) }
}

/// Returns why the model fails that panics in this file with this text. Only what loom reports
/// about the protocol counts, and the assertions of the models.
fn failure(file: &str, text: &str) -> Option<String> {
    let line = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    let races = ["Causality violation", "currently writing to cell", "currently reading from cell"];
    // The compiler names the package's own files, and those of the product, from the package on.
    let is_loom = !file.starts_with("src/");
    let is_model = !is_loom && !file.contains("..") && file.contains("models");
    if is_loom && line.starts_with("deadlock") {
        Some("a thread sleeps for ever".to_owned())
    } else if is_loom && races.iter().any(|race| line.contains(race)) {
        Some("a data race".to_owned())
    } else if is_model && !line.starts_with("internal error: entered unreachable code") {
        let line = line.trim_start_matches("assertion failed: ");
        Some(line.trim_start_matches("assertion `left == right` failed: ").to_owned())
    } else {
        None
    }
}

/// Runs a model in a process of its own, because a model that fails ends the process.
fn run(model: &Model, weakened: Option<&Point>) -> Outcome {
    let program = std::env::current_exe().expect("this program has a path");
    let mut command = Command::new(program);
    command.arg(model.name).args(weakened.map(Point::key)).stdin(Stdio::null()).env("RUST_BACKTRACE", "0");
    // loom reads limits from the environment, under which a model could hold after one execution.
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("LOOM_")) {
        command.env_remove(name);
    }
    let output = command.output().expect("this program can be started");
    let said = String::from_utf8_lossy(&output.stdout);
    match output.status.code().map(u8::try_from) {
        Some(Ok(0)) => {
            let number = |line: &str| line.strip_prefix("executions ")?.parse().ok();
            Outcome::Holds {
                executions: said.lines().find_map(number).unwrap_or(0),
                met: said.lines().filter_map(|line| line.strip_prefix("met ")?.parse().ok()).collect(),
            }
        }
        Some(Ok(FAILS)) => {
            let why = said.lines().find_map(|line| line.strip_prefix("fails ")).unwrap_or_default();
            Outcome::Fails(why.to_owned())
        }
        _ => Outcome::Unclear(format!("{}\n{}", output.status, String::from_utf8_lossy(&output.stderr))),
    }
}

/// Writes one row of the table.
fn write_row(place: &Place, verdict: &str) {
    let file = place.file.rsplit_once("src/").map_or(&*place.file, |(_, file)| file);
    let (code, verdict) = (place.code.replace('|', "\\|"), verdict.replace('|', "\\|"));
    println!("| {file} | {} | `{code}` | {} | {verdict} |", place.function, place.half);
}

/// Runs all models, and then, if `weakens` says so, each of them with each order weakened.
fn check(program: &Program<'_>, weakens: bool) -> ExitCode {
    let mut findings = Findings::default();
    // The models that meet each access, with the number of times that loom has run each of them.
    let mut met_by: BTreeMap<Point, Vec<(usize, &Model)>> = BTreeMap::new();
    for model in program.models {
        let began = Instant::now();
        match run(model, None) {
            Outcome::Holds { executions, met } => {
                eprintln!("{}: holds in {executions} executions ({:.1} s)", model.name, began.elapsed().as_secs_f64());
                if executions < 2 {
                    findings.broken(&format!("{}: loom has tried one order of the threads", model.name));
                }
                for point in met {
                    met_by.entry(point).or_default().push((executions, model));
                }
            }
            Outcome::Fails(why) => findings.bad(&format!("{}: fails: {why}", model.name)),
            Outcome::Unclear(why) => findings.broken(&format!("{}: shows nothing: {why}", model.name)),
        }
    }
    if !findings.is_bad && !findings.is_broken {
        let unmet = unmet(program.folder, &met_by.keys().collect::<Vec<_>>());
        met_by.retain(|point, _| point.half != Half::Nothing);
        let mut reasons = Reasons::new(program.kept);
        if weakens {
            weaken_each(program, &met_by, &mut reasons, &mut findings);
        }
        write_unmet(&unmet, &mut reasons, &mut findings);
        if weakens {
            reasons.check(&mut findings);
        }
    }
    findings.code()
}

/// Returns why a model fails while the order at `point` is weakened, or `None` if it holds.
fn fails(model: &Model, point: &Point, findings: &mut Findings) -> Option<String> {
    match run(model, Some(point)) {
        Outcome::Holds { .. } => None,
        Outcome::Fails(why) => Some(why),
        Outcome::Unclear(why) => {
            findings.broken(&format!("{}: shows nothing while {} is weakened: {why}", model.name, point.key()));
            None
        }
    }
}

/// Runs the models with each order weakened, and writes one row for each.
fn weaken_each(
    program: &Program<'_>,
    met_by: &BTreeMap<Point, Vec<(usize, &Model)>>,
    reasons: &mut Reasons<'_>,
    findings: &mut Findings,
) {
    let mut failing: BTreeSet<&str> = BTreeSet::new();
    for (point, models) in met_by {
        let place = place(point);
        // The model with the fewest executions fails first.
        let mut models = models.clone();
        models.sort_by_key(|(executions, _)| *executions);
        let failed = models.iter().find_map(|(_, model)| Some((model.name, fails(model, point, findings)?)));
        failing.extend(failed.iter().map(|(name, _)| name));
        // `Kept` may be meant for another line with the same text.
        let reason = reasons.of(&place, failed.is_some());
        let verdict = match (failed, reason) {
            (Some((name, why)), _) => format!("{name}: {why}"),
            (None, Some(why)) => format!("no model fails: {why}"),
            (None, None) => {
                findings.bad(&format!("{}: no model fails without `{}` ({})", place.function, place.code, place.half));
                "NO MODEL FAILS".to_owned()
            }
        };
        write_row(&place, &verdict);
    }
    for model in program.models {
        let reason = program.sturdy.iter().find(|(name, _)| *name == model.name);
        match (failing.contains(model.name), reason) {
            (true, Some(_)) => findings.bad(&format!("{}: it fails without an order, so it is not sturdy", model.name)),
            (true, None) | (false, Some(_)) => {}
            (false, None) => {
                // Other models, with fewer executions, have failed in its place above.
                let mut met = met_by.iter().filter(|(_, models)| models.iter().any(|(_, met)| met.name == model.name));
                if !met.any(|(point, _)| fails(model, point, findings).is_some()) {
                    findings.bad(&format!("{}: it holds whichever order is weakened", model.name));
                }
            }
        }
    }
    for (name, _) in program.sturdy {
        if program.models.iter().all(|model| model.name != *name) {
            findings.bad(&format!("{name}: no model has the name of this sturdy one"));
        }
    }
}

/// Writes one row for each access that no model reaches.
fn write_unmet(unmet: &[Place], reasons: &mut Reasons<'_>, findings: &mut Findings) {
    for place in unmet {
        let reason = reasons.of(place, false);
        if reason.is_none() {
            findings.bad(&format!("{}: no model reaches `{}`", place.function, place.code));
        }
        let verdict = reason.map(|why| format!("no model reaches it: {why}"));
        write_row(place, verdict.as_deref().unwrap_or("NO MODEL REACHES IT"));
    }
}
