//! `devicemesh check`: what an operator runs before a big job. Every rank of the job makes the
//! mesh and verifies each collective along each dimension with real data. Then the ranks measure
//! the collectives, all groups of a dimension at the same time. Rank 0 reports. docs/check.md
//! explains the figures.

mod again;
mod agreed;
mod assess;
mod checked;
mod compare;
mod copies;
mod ending;
mod exit_code;
mod links;
mod measure;
mod meetings;
mod notes;
mod operation;
mod options;
mod pairs;
mod progress;
mod record;
mod record_options;
mod report;
mod slow;
mod table;
mod team;
mod text;
mod values;
mod verify;
mod words;

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use devicemesh::ccl;
use devicemesh::comm::{Buffer, CallOptions, Memory, MeshOptions, RootComms, View, World, WorldOptions};
use devicemesh::error::{Error, Result};
use devicemesh::mesh::{Mesh, MeshSpec};
use devicemesh::printable::printable;
use devicemesh::rendezvous::{JoinOptions, launcher};

use self::checked::Checked;
use self::exit_code::{NOT_MADE, WRONG_COMMAND};
use self::measure::Schedule;
use self::options::Shape;
use self::progress::Progress;
use self::record_options::RecordOptions;
use self::team::{Clock, Team};
use self::verify::Bench;
use crate::failure::Failure;
use crate::library;
use crate::stdio::say;

pub use self::options::{HELP, Options};

/// The name of the dimension that has all ranks. Spaces keep it apart from the names of users.
const ALL_RANKS: &str = "all the ranks";

/// Whether the command line is that of a check, and this process is one of its ranks, but not rank
/// 0.
pub fn is_other_rank() -> bool {
    let is_check = std::env::args_os().nth(1).is_some_and(|first| first == "check");
    is_check && launcher::detect(&|name| std::env::var(name).ok()).is_ok_and(|place| place.rank > 0)
}

/// Refuses the command line of such a rank, for this reason. Returns the exit code.
pub fn refuse(why: &str) -> u8 {
    let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let named = words.iter().zip(words.iter().skip(1)).find(|(option, _)| *option == "--device");
    ending::refuse(why, device_type(named.map(|(_, device)| device.as_str()), None))
}

/// Whether this command line is a check's and this exit code means that the command line is wrong.
/// The ranks have then said so themselves, and whoever started them need not say it again.
pub fn tells_itself(command: &[OsString], code: i32) -> bool {
    let program = command.first().and_then(|program| Path::new(program).file_name());
    let is_check =
        program.is_some_and(|name| name == "devicemesh") && command.get(1).is_some_and(|word| word == "check");
    is_check && code == i32::from(WRONG_COMMAND)
}

/// Runs the check as one of its ranks. The exit code is the same on all ranks.
pub fn check(options: &Options) -> std::result::Result<u8, Failure> {
    let place = launcher::detect(&|name| std::env::var(name).ok())
        .map_err(|error| Failure::new(WRONG_COMMAND, error.message().to_owned()))?;
    let rank = place.rank;
    let device_type = device_type(options.device.as_deref(), options.library.as_deref());
    // Every rank finds such a mistake, so rank 0 alone reports it.
    let alike = |message: String| match rank {
        0 => Err(Failure::new(WRONG_COMMAND, message)),
        _ => Ok(ending::refuse(&message, device_type)),
    };
    let shape = match Shape::of(options.shape.as_ref(), place.size) {
        Ok(shape) => shape,
        Err(message) => return alike(message),
    };
    if let Err(message) = options.whole_elements() {
        return alike(message);
    }
    let names: Option<Vec<&str>> = options.names.as_ref().map(|names| names.0.iter().map(String::as_str).collect());
    let mut spec = MeshSpec::new(device_type, &shape, place.size, rank);
    spec.names = names.as_deref();
    let mesh = match plan(&spec, options) {
        Ok(mesh) => mesh,
        Err(error) => return alike(error.message().to_owned()),
    };
    let clock = Clock::start(options.timeout, ending::when_late(rank, options))
        .map_err(|error| Failure::new(NOT_MADE, Error::no_thread(&error).message()))?;
    let progress = Progress::new(options.quiet || rank > 0);
    match work(options, device_type, mesh, clock.clone(), progress) {
        Ok(code) => Ok(code),
        Err(error) => Ok(ending::end(&error, rank, device_type, options, &clock)),
    }
}

/// The type of the devices that are checked.
fn device_type<'a>(named: Option<&'a str>, library: Option<&str>) -> &'a str {
    match named {
        Some(named) => named,
        None if ccl::has_device() && library::for_cuda(library).is_ok() => "cuda",
        None => "cpu",
    }
}

/// The mesh, and everything that can be refused without another rank.
fn plan(spec: &MeshSpec<'_>, options: &Options) -> Result<Mesh> {
    let mesh = Mesh::new(spec)?;
    for flat in &options.flatten {
        mesh.slice(&flat.dims())?.flatten(Some(&flat.name))?.publish()?;
    }
    for (name, _) in &options.expect {
        if options.flatten.iter().all(|flat| flat.name != *name) {
            mesh.dim_index(name)?;
        }
    }
    Mesh::new(spec)
}

/// Runs the check after the command line was accepted. Gives the exit code.
fn work(options: &Options, device_type: &str, planned: Mesh, clock: Clock, progress: Progress) -> Result<u8> {
    progress.expect(steps(options, &planned)?);
    progress.step(team::JOINING);
    let joining = WorldOptions::new(JoinOptions::default().timeout(clock.left()));
    let joining = library::options_with(joining, options.library.as_deref());
    let world = Arc::new(World::join(device_type, &joining)?);
    let team = Team::new(Arc::clone(&world), clock, progress)?;
    agreed::compare(options, &planned, &team)?;
    let record = match compare::records(options, &team, &planned)? {
        Ok(record) => record,
        Err(message) => {
            if team.rank() == 0 {
                team.progress.clear();
                say(&format!("devicemesh check: {}", printable(&message)));
            }
            return Ok(WRONG_COMMAND);
        }
    };
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
        views.push((whole.slice(&flat.dims())?.flatten(Some(&flat.name), &CallOptions::default())?, 0));
    }
    let all_ranks = all_ranks(&whole)?;
    let memory = Memory::of(&world)?;
    let schedule = Schedule {
        sizes: options.sizes(device_type),
        iterations: options.iterations,
        warmup: options.warmup,
        repeats: options.repeats,
    };
    let copied = copies::batch(device_type == "cuda").0;
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
    let all_ranks = bench(&all_ranks, 0, options, &memory, (&send, &recv), patience)?;
    let checked = Checked { team: &team, options, benches, all_ranks, schedule, record };
    let code = checked.all(&whole, &memory, (&send, &recv))?;
    team.progress.step("ending the mesh");
    whole.root_comms().finalize()?;
    team.progress.clear();
    Ok(code)
}

/// All ranks as one dimension, along which pairs of ranks exchange data. It shares the
/// communicator of all ranks.
fn all_ranks(whole: &View) -> Result<View> {
    let names = whole.mesh().dim_names();
    if names.len() == 1 {
        return Ok(View::of_root(Arc::clone(whole.root_comms())));
    }
    whole.slice(&names)?.flatten(Some(ALL_RANKS), &CallOptions::default())
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
        sizes.push(mesh.slice(&flat.dims())?.size());
    }
    let measured = sizes.iter().filter(|size| **size > 1 && !options.no_measure).count();
    let RecordOptions { save, compare, .. } = &options.record;
    let records = match (save.is_some(), compare.is_some()) {
        (false, false) => 0,
        (false, true) => 2,
        (true, is_compared) => 3 + usize::from(is_compared),
    };
    let alone = usize::from(!options.no_measure);
    let pairs = usize::from(!options.no_measure && mesh.size() > 1);
    let around = 8 + records + alone + pairs;
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
