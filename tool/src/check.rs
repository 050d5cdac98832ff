//! `devicemesh check`: what an operator runs before a big job. Every rank of the job makes the mesh
//! and verifies each collective along each dimension with real data. Then the ranks measure the
//! collectives, all groups of a dimension at the same time. Rank 0 reports. docs/check.md explains
//! the figures.

mod assess;
mod exit_code;
mod measure;
mod notes;
mod operation;
mod options;
mod progress;
mod report;
mod slow;
mod table;
mod team;
mod values;
mod verify;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use devicemesh::ccl;
use devicemesh::comm::{Buffer, CallOptions, Memory, MeshOptions, RootComms, View, World, WorldOptions};
use devicemesh::error::{Error, Result, Status};
use devicemesh::mesh::{Mesh, MeshSpec};
use devicemesh::printable::printable;
use devicemesh::rendezvous::{JoinOptions, launcher};

use self::assess::{Measured, Subject, assess};
use self::exit_code::{NOT_MADE, TIMED_OUT, WRONG_COMMAND};
use self::measure::{Schedule, Timed};
use self::notes::Notes;
use self::options::Shape;
use self::progress::Progress;
use self::report::Report;
use self::team::{Clock, Team};
use self::verify::Bench;
use crate::failure::Failure;
use crate::library;
use crate::stdio::{print, say};

pub use self::options::Options;

/// How much longer than a rank that failed the other ranks live.
const AFTER_FAILED: Duration = Duration::from_millis(300);

/// Runs the check as one of its ranks. The exit code is the same on all ranks.
pub fn check(options: &Options) -> std::result::Result<u8, Failure> {
    let place = launcher::detect(&|name| std::env::var(name).ok())
        .map_err(|error| Failure::new(WRONG_COMMAND, error.message().to_owned()))?;
    let rank = place.rank;
    // Every rank finds such a mistake, so rank 0 alone reports it.
    let alike = |message: String| match rank {
        0 => Err(Failure::new(WRONG_COMMAND, message)),
        _ => Ok(WRONG_COMMAND),
    };
    let shape = match Shape::of(options.shape.as_ref(), place.size) {
        Ok(shape) => shape,
        Err(message) => return alike(message),
    };
    let device_type = match &options.device {
        Some(named) => named,
        None if ccl::has_device() && library::for_cuda(options.library.as_deref()).is_ok() => "cuda",
        None => "cpu",
    };
    let names: Option<Vec<&str>> = options.names.as_ref().map(|names| names.0.iter().map(String::as_str).collect());
    let mut spec = MeshSpec::new(device_type, &shape, place.size, rank);
    spec.names = names.as_deref();
    let mesh = match plan(&spec, options) {
        Ok(mesh) => mesh,
        Err(error) => return alike(error.message().to_owned()),
    };
    let json = options.json;
    let began = Instant::now();
    let clock = Clock::start(options.timeout, {
        let limit = options.timeout.as_secs_f64();
        move |doing| {
            let message = format!("not done after {limit} s (--timeout), while {doing}");
            if rank == 0 {
                tell(
                    json,
                    "TIMEOUT",
                    &format!("{message}; allow more with --timeout, or look at this step with a smaller world"),
                );
            }
            TIMED_OUT
        }
    })
    .map_err(|error| Failure::new(NOT_MADE, Error::no_thread(&error).message()))?;
    let progress = Progress::new(options.quiet || rank > 0);
    match work(options, device_type, mesh, clock, progress) {
        Ok(code) => Ok(code),
        Err(error) => {
            if rank == 0 || rank == 1 && may_miss_rank_0(&error) {
                let status = error.status().name().trim_start_matches("DM_STATUS_");
                tell(json && rank == 0, status, &format!("{}{}", error.message(), advice(&error, device_type)));
            }
            // `devicemesh run` names the rank that ends first. That is to be the rank that failed.
            // A rank that was lost or did not come has ended already, or ends by itself.
            let has_failed = ![Status::PeerLost, Status::Timeout].contains(&error.status());
            if has_failed && !error.ranks().is_empty() && !error.ranks().contains(&(rank as i32)) {
                let left = options.timeout.saturating_sub(began.elapsed());
                std::thread::sleep(AFTER_FAILED.min(left / 2));
            }
            Ok(NOT_MADE)
        }
    }
}

/// Whether rank 0 may be unable to report this error, because rank 0 itself may be lost or late.
/// Then rank 1 reports it too.
fn may_miss_rank_0(error: &Error) -> bool {
    let is_loss = [Status::PeerLost, Status::Store, Status::Timeout].contains(&error.status());
    is_loss && (error.ranks().is_empty() || error.ranks().contains(&0))
}

/// The mesh, and everything that can be refused without another rank.
fn plan(spec: &MeshSpec<'_>, options: &Options) -> Result<Mesh> {
    let mesh = Mesh::new(spec)?;
    for flat in &options.flatten {
        let dims: Vec<&str> = flat.dims.iter().map(String::as_str).collect();
        mesh.slice(&dims)?.flatten(Some(&flat.name))?.publish()?;
    }
    for (name, _) in &options.expect {
        if options.flatten.iter().all(|flat| flat.name != *name) {
            mesh.dim_index(name)?;
        }
    }
    Mesh::new(spec)
}

/// Reports an error that ends the check.
fn tell(json: bool, status: &str, message: &str) {
    // On a terminal the current line may hold the progress, so it is cleared.
    let clear = if io::IsTerminal::is_terminal(&io::stderr()) { "\r\x1b[K" } else { "" };
    say(&format!("{clear}devicemesh check: {}", printable(message)));
    if json {
        let _ = print(report::failure(status, message) + "\n");
    }
}

/// Says what the user can do next, where the message does not say it. `device_type` is that of the
/// mesh.
fn advice(error: &Error, device_type: &str) -> &'static str {
    match error.status() {
        // The host engine has no such variable, and its messages say what to do.
        Status::Ccl if device_type == "cpu" => "",
        Status::Timeout if device_type == "cpu" => {
            "; next: see what the ranks named are doing (gdb -p on their hosts), and check again without these hosts"
        }
        Status::PeerLost => {
            "; next: look at that rank's own output and its host's kernel log, and check again without that host"
        }
        Status::Timeout => {
            "; next: see what the ranks named are doing (gdb -p, nvidia-smi on their hosts), and check again without these hosts"
        }
        Status::Ccl => "; next: run again with NCCL_DEBUG=INFO, which says what the library met",
        Status::Mismatch => "; next: start every rank with the same command line and the same version",
        Status::Library => "; devicemesh info says what is found here",
        _ => "",
    }
}

/// Runs the check after the command line was accepted. Gives the exit code.
fn work(options: &Options, device_type: &str, planned: Mesh, clock: Clock, progress: Progress) -> Result<u8> {
    progress.expect(steps(options, &planned)?);
    progress.step("joining the world");
    let joining = WorldOptions::new(JoinOptions::default().timeout(clock.limit() - clock.limit() / 20));
    let joining = library::options_with(joining, options.library.as_deref());
    let world = Arc::new(World::join(device_type, &joining)?);
    let team = Team::new(Arc::clone(&world), clock, progress)?;
    team.step_in_detail("comparing the command lines", &options.agreed(), |_| Ok(()))?;
    team.progress.step("making the mesh");
    // On host memory a call waits at most as long as the mesh's timeout, so the timeout is short.
    // On a device the timeout is longer, because making communicators takes long there, and the
    // check waits for a call on its stream.
    let patience = team.clock.patience();
    let timeout = if device_type == "cpu" { patience } else { team.clock.limit() / 2 };
    let root = RootComms::create(&world, planned, &MeshOptions::default().timeout(timeout))?;
    let whole = View::of_root(root);
    let mut views: Vec<(View, usize)> =
        (0..whole.mesh().ndim()).map(|index| (View::of_root(Arc::clone(whole.root_comms())), index)).collect();
    for flat in &options.flatten {
        let dims: Vec<&str> = flat.dims.iter().map(String::as_str).collect();
        views.push((whole.slice(&dims)?.flatten(Some(&flat.name), &CallOptions::default())?, 0));
    }
    let memory = Memory::of(&world)?;
    let schedule = Schedule {
        sizes: options.sizes(device_type),
        iterations: options.iterations,
        warmup: options.warmup,
        repeats: options.repeats,
    };
    let copied = measure::copies(device_type == "cuda").0;
    let largest = schedule.sizes.last().copied().unwrap_or(0).max(copied);
    let largest = if options.no_measure { 0 } else { largest };
    let sizes: Vec<usize> = views.iter().map(|(view, index)| view.mesh().dim_size(*index)).collect();
    let needed = |measured: usize| {
        let each = sizes.iter().map(|size| verify::buffer_bytes(*size, options.dtype, measured));
        each.max().unwrap_or(0)
    };
    let bytes = needed(largest);
    let (send, recv) = team.step("allocating the buffers", |_| {
        let buffer = || {
            let error = |error| if bytes > needed(copied) { smaller_sizes(error) } else { error };
            memory.buffer(bytes).map_err(error)
        };
        Ok((buffer()?, buffer()?))
    })?;
    let benches: Vec<Bench<'_>> = views
        .iter()
        .map(|(view, index)| bench(view, *index, options, &memory, (&send, &recv), patience))
        .collect::<Result<_>>()?;
    let checked = Checked { team: &team, options, benches, schedule };
    let code = checked.all(&whole, &memory, (&send, &recv))?;
    team.progress.step("ending the mesh");
    whole.root_comms().finalize()?;
    team.progress.clear();
    Ok(code)
}

/// Adds to an error of too little memory that smaller sizes need less.
fn smaller_sizes(error: Error) -> Error {
    let message = format!("{}; or take smaller --sizes", error.message());
    Error::new(error.status(), message).with_device_error(error.device_error()).with_os_error(error.os_error())
}

/// The number of steps of a check in which nothing goes wrong.
fn steps(options: &Options, mesh: &Mesh) -> Result<usize> {
    let mut sizes = mesh.shape();
    for flat in &options.flatten {
        let dims: Vec<&str> = flat.dims.iter().map(String::as_str).collect();
        sizes.push(mesh.slice(&dims)?.size());
    }
    let measured = sizes.iter().filter(|size| **size > 1 && !options.no_measure).count();
    let around = if options.no_measure { 7 } else { 8 };
    Ok(options.collectives().len() * (sizes.len() + measured) + around)
}

/// A dimension with what calls along it need.
fn bench<'a>(
    view: &'a View,
    index: usize,
    options: &Options,
    memory: &'a Memory,
    (send, recv): (&'a Buffer, &'a Buffer),
    patience: Duration,
) -> Result<Bench<'a>> {
    let mesh = view.mesh();
    let (group, position) = (mesh.group_ranks(index)?, mesh.local_rank(index)?);
    Ok(Bench {
        view,
        index,
        name: mesh.dim_name(index),
        group,
        position,
        kind: options.dtype,
        memory,
        send,
        recv,
        patience,
    })
}

/// A mesh that is being checked.
struct Checked<'a> {
    team: &'a Team,
    options: &'a Options,
    /// The dimensions of the mesh, then the flattened ones.
    benches: Vec<Bench<'a>>,
    /// The sizes that are measured, and how often.
    schedule: Schedule,
}

impl Checked<'_> {
    /// Verifies and measures all dimensions, and has rank 0 report. Gives the exit code, which is
    /// the same on all ranks.
    fn all(&self, whole: &View, memory: &Memory, buffers: (&Buffer, &Buffer)) -> Result<u8> {
        let (team, options) = (self.team, self.options);
        let measured: Vec<bool> = self.benches.iter().map(|bench| bench.size() > 1 && !options.no_measure).collect();
        let collectives = options.collectives();
        let mut notes = Notes {
            device: memory.device_name().map(str::to_owned),
            ranks_per_core: measure::ranks_per_core(team, memory),
            ..Notes::default()
        };
        for bench in &self.benches {
            let mut calls = 0;
            for collective in &collectives {
                let step = format!("verifying {}: {}", bench.name, collective.name());
                let (made, wrong) = team.step(&step, |exchange| verify::verify(bench, *collective, team, exchange))?;
                calls += made;
                notes.wrong.extend(wrong);
            }
            notes.calls.push(calls);
        }
        let wrong = [notes.wrong.len() as f64];
        let wrong = team.step("comparing the data", |exchange| exchange.largest(&wrong))?[0] > 0.0;
        // Where results are wrong, times have no meaning.
        for (bench, measured) in self.benches.iter().zip(&measured) {
            notes.groups.push((bench.group[0], bench.position));
            let mut times: Vec<Vec<Timed>> = Vec::new();
            for collective in collectives.iter().filter(|_| *measured && !wrong) {
                let step = format!("measuring {}: {}", bench.name, collective.name());
                times
                    .push(team.step(&step, |exchange| measure::measure(bench, *collective, &self.schedule, exchange))?);
            }
            notes.times.push(times);
        }
        if !wrong && !options.no_measure {
            notes.copies = team.step("measuring each rank alone", |exchange| {
                measure::copy(memory, buffers, self.schedule.repeats, exchange)
            })?;
        }
        let code = team.step("reporting", |exchange| {
            let report = exchange.gather("notes", notes.encode())?.map(|all| self.report(whole, &all)).transpose()?;
            let code = report.as_ref().map(|report| vec![report.exit_code(options.fail_slow)]);
            if let Some(report) = report {
                team.progress.clear();
                let text = if options.json { report.json() } else { table::text(&report) };
                print(text).map_err(|failure| Error::internal(failure.message))?;
            }
            exchange.share("code", code)
        })?;
        Ok(code.first().copied().unwrap_or(NOT_MADE))
    }

    /// The report, on rank 0.
    fn report(&self, whole: &View, all: &[Vec<u8>]) -> Result<Report> {
        let (team, options) = (self.team, self.options);
        let notes: Vec<Notes> = all.iter().map(|notes| Notes::decode(notes)).collect::<Result<_>>()?;
        let collectives = options.collectives();
        let dimensions: Vec<Measured<'_>> =
            self.benches.iter().map(|bench| Measured { name: bench.name, size: bench.size() }).collect();
        let subject = Subject {
            mesh: whole.mesh().describe(),
            library: whole.library()?,
            device_type: team.world().rendezvous().device_type(),
            launcher: team.world().rendezvous().launcher(),
            hosts: &team.hosts,
            dimensions: &dimensions,
            collectives: &collectives,
            schedule: &self.schedule,
            options,
            seconds: team.clock.elapsed().as_secs_f64(),
        };
        Ok(assess(&subject, &notes))
    }
}
