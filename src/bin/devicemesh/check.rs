//! `devicemesh check`: what an operator runs before a big job. Every rank of the job makes the mesh, verifies each collective along each dimension with
//! real data, and measures them, all groups of a dimension at the same time; rank 0 reports. docs/check.md explains the figures.
//!
//! Exit codes, the same on every rank: 0 all is well, 1 wrong data, 2 a wrong command line or a shape that does not fit the world, 3 the check could not be
//! made, 4 something is slow (with `--fail-slow`), 124 not done by `--timeout`.

mod measure;
mod memory;
mod operation;
mod options;
mod progress;
mod report;
mod slow;
mod table;
mod team;
mod values;
mod verify;

use std::ffi::CStr;
use std::io::{self, ErrorKind, Write};
use std::sync::Arc;
use std::time::Duration;

use devicemesh::ccl;
use devicemesh::comm::{DimOptions, MeshOptions, RootComms, View, World, WorldOptions};
use devicemesh::error::{Error, Result, Status};
use devicemesh::mesh::{Mesh, MeshSpec};
use devicemesh::printable::printable;
use devicemesh::rendezvous::{JoinOptions, launcher};

use self::measure::{Plan, Timed};
use self::memory::{Buffer, Memory};
use self::options::Shape;
use self::progress::Progress;
use self::report::{Measured, Notes, Report, Subject};
use self::team::{Clock, Team};
use self::verify::Bench;
use crate::ranks::Failure;

pub use self::options::Options;

const WRONG_DATA: u8 = 1;
const WRONG_COMMAND: u8 = 2;
const NOT_MADE: u8 = 3;
const SLOW: u8 = 4;
/// `--timeout` passed: as timeout(1).
const TIMED_OUT: u8 = 124;

/// The check as one of its ranks; the exit code is the same on all.
pub fn check(options: &Options) -> std::result::Result<u8, Failure> {
    let place = launcher::detect(&|name| std::env::var(name).ok())
        .map_err(|error| Failure::new(WRONG_COMMAND, error.message().to_owned()))?;
    let rank = place.rank;
    // What every rank finds alike is said once.
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
        // SAFETY: who starts the tool vouches for the library that is named.
        None if ccl::has_device() && unsafe { ccl::named_or_usual("cuda", options.library.as_deref()) }.is_ok() => {
            "cuda"
        }
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
    .map_err(|error| Failure::new(NOT_MADE, format!("starting a thread: {error}")))?;
    let progress = Progress::new(options.quiet || rank > 0);
    match work(options, device_type, mesh, clock, progress) {
        Ok(code) => Ok(code),
        Err(error) => {
            // One voice for all; where rank 0 may be what is missing, rank 1's too.
            let lost = [Status::PeerLost, Status::Store, Status::Timeout].contains(&error.status());
            if rank == 0 || rank == 1 && lost && error.message().replace("rank 0 on ", "").contains("rank 0") {
                tell(json && rank == 0, &status(&error), &format!("{}{}", error.message(), advice(&error)));
            }
            Ok(NOT_MADE)
        }
    }
}

/// As in C, without DM_STATUS_.
fn status(error: &Error) -> String {
    // SAFETY: the string is static.
    let name = unsafe { CStr::from_ptr(devicemesh::ffi::dm_status_name(error.status() as i32)) };
    name.to_string_lossy().trim_start_matches("DM_STATUS_").to_owned()
}

/// What can be refused without another rank.
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

fn tell(json: bool, status: &str, message: &str) {
    // The line of progress may be there.
    eprintln!(
        "{}devicemesh check: {}",
        if io::IsTerminal::is_terminal(&io::stderr()) { "\r\x1b[K" } else { "" },
        printable(message)
    );
    if json {
        let _ = print(&(report::failure(status, message) + "\n"));
    }
}

/// The next step, where the message does not say it.
fn advice(error: &Error) -> &'static str {
    match error.status() {
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

fn work(options: &Options, device_type: &str, planned: Mesh, clock: Clock, progress: Progress) -> Result<u8> {
    progress.expect(steps(options, &planned)?);
    progress.step("joining the world");
    let mut joining = WorldOptions::new(JoinOptions::default().timeout(clock.limit() - clock.limit() / 20));
    if let Some(library) = &options.library {
        // SAFETY: as above, whoever starts the tool vouches for it.
        joining = unsafe { joining.library(library) };
    }
    let domain = Arc::new(World::join(device_type, &joining)?);
    let team = Team::new(Arc::clone(&domain), clock, progress)?;
    team.step_in_detail("comparing the command lines", &options.agreed(), |_| Ok(()))?;
    team.progress.step("making the mesh");
    // Communicators of devices take long to make, and streams are waited for here: only calls in host memory have the shorter limit by the mesh.
    let patience = team.clock.patience();
    let timeout = if device_type == "cpu" { patience } else { team.clock.limit() / 2 };
    let root = RootComms::create(&domain, planned, &MeshOptions::default().timeout(timeout))?;
    let whole = View::of_root(root);
    let mut views: Vec<(View, usize)> =
        (0..whole.mesh().ndim()).map(|index| (View::of_root(Arc::clone(whole.root_comms())), index)).collect();
    for flat in &options.flatten {
        let dims: Vec<&str> = flat.dims.iter().map(String::as_str).collect();
        views.push((whole.slice(&dims)?.flatten(Some(&flat.name), DimOptions::default())?, 0));
    }
    let memory = Memory::open(device_type, domain.rendezvous().local_rank())?;
    let plan = Plan {
        sizes: options.sizes(device_type),
        iterations: options.iterations,
        warmup: options.warmup,
        repeats: options.repeats,
    };
    let largest = plan.sizes.last().copied().unwrap_or(0).max(measure::copies(device_type == "cuda").0);
    let sizes = views.iter().map(|(view, index)| view.mesh().dim_size(*index));
    let bytes = sizes.map(|size| verify::buffer_bytes(size, options.dtype, largest)).max().unwrap_or(0);
    let (send, recv) = (memory.buffer(bytes)?, memory.buffer(bytes)?);
    let benches: Vec<Bench<'_>> = views
        .iter()
        .map(|(view, index)| bench(view, *index, options, &memory, (&send, &recv), patience))
        .collect::<Result<_>>()?;
    let checked = Checked { team: &team, options, benches, plan };
    let code = checked.all(&whole, &memory, (&send, &recv))?;
    team.progress.step("ending the mesh");
    whole.root_comms().finalize()?;
    team.progress.clear();
    Ok(code)
}

/// How many there will be, if nothing goes wrong.
fn steps(options: &Options, mesh: &Mesh) -> Result<usize> {
    let mut sizes = mesh.shape();
    for flat in &options.flatten {
        let dims: Vec<&str> = flat.dims.iter().map(String::as_str).collect();
        sizes.push(mesh.slice(&dims)?.size());
    }
    let measured = sizes.iter().filter(|size| **size > 1 && !options.no_measure).count();
    let around = if options.no_measure { 6 } else { 7 };
    Ok(options.collectives().len() * (sizes.len() + measured) + around)
}

fn bench<'a>(
    view: &'a View,
    index: usize,
    options: &Options,
    memory: &'a Memory,
    (send, recv): (&'a Buffer<'a>, &'a Buffer<'a>),
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

struct Checked<'a> {
    team: &'a Team,
    options: &'a Options,
    benches: Vec<Bench<'a>>,
    plan: Plan,
}

impl Checked<'_> {
    /// Verifies, measures, and lets rank 0 report. Gives the exit code of all.
    fn all(&self, whole: &View, memory: &Memory, buffers: (&Buffer<'_>, &Buffer<'_>)) -> Result<u8> {
        let (team, options) = (self.team, self.options);
        let measured: Vec<bool> = self.benches.iter().map(|bench| bench.size() > 1 && !options.no_measure).collect();
        let collectives = options.collectives();
        let mut notes =
            Notes { device: memory.device(), crowding: measure::crowding(team, memory), ..Notes::default() };
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
        // Times of wrong results are of no use.
        for (bench, measured) in self.benches.iter().zip(&measured) {
            notes.groups.push((bench.group[0], bench.position));
            let mut times: Vec<Vec<Timed>> = Vec::new();
            for collective in collectives.iter().filter(|_| *measured && !wrong) {
                let step = format!("measuring {}: {}", bench.name, collective.name());
                times.push(team.step(&step, |exchange| measure::measure(bench, *collective, &self.plan, exchange))?);
            }
            notes.times.push(times);
        }
        if !wrong && !options.no_measure {
            notes.copies = team.step("measuring each rank alone", |exchange| {
                measure::copy(memory, buffers, self.plan.repeats, exchange)
            })?;
        }
        let code = team.step("reporting", |exchange| {
            let report = exchange.gather("notes", notes.encode())?.map(|all| self.report(whole, &all)).transpose()?;
            let code = report.as_ref().map(|report| vec![report.exit_code(options.fail_slow)]);
            if let Some(report) = report {
                team.progress.clear();
                let text = if options.json { report.json() } else { table::text(&report) };
                print(&text).map_err(|error| Error::internal(format!("writing to standard output: {error}")))?;
            }
            exchange.share("code", code)
        })?;
        Ok(code.first().copied().unwrap_or(NOT_MADE))
    }

    fn report(&self, whole: &View, all: &[Vec<u8>]) -> Result<Report> {
        let (team, options) = (self.team, self.options);
        let notes: Vec<Notes> = all.iter().map(|notes| Notes::decode(notes)).collect::<Result<_>>()?;
        let collectives = options.collectives();
        let dimensions: Vec<Measured<'_>> =
            self.benches.iter().map(|bench| Measured { name: bench.name, size: bench.size() }).collect();
        let subject = Subject {
            mesh: whole.mesh().describe(),
            library: whole.library()?,
            device_type: team.domain().rendezvous().device_type(),
            launcher: team.domain().rendezvous().launcher(),
            hosts: &team.hosts,
            dimensions: &dimensions,
            collectives: &collectives,
            plan: &self.plan,
            options,
            seconds: team.clock.elapsed().as_secs_f64(),
        };
        Ok(Report::new(&subject, &notes))
    }
}

fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        // Whoever reads has seen enough.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome,
    }
}
