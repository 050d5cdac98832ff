//! How long the calls of a mesh take at worlds of 8, 1,024 and 1,048,576 ranks: through the C ABI
//! of libdevicemesh.so (mesh/library.rs), and the mesh algebra below it by itself.
//! `cargo bench -p devicemesh-benches`; benches/mesh.py runs it beside PyTorch.
//!
//! `memory plain` and `memory ranks` make one mesh of 1,048,576 ranks instead and print the bytes
//! by which this process's memory grew at most meanwhile.

mod library;
mod processor;
mod worlds;

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use criterion::{BatchSize, Criterion};
use devicemesh::mesh::{Mesh as View, MeshSpec};

use library::{Library, Mesh};
use processor::{ProcessorTime, processor_time};
use worlds::{Offline, PAIR, SHAPES, rank, reversed, size, with_communicators};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let library = Library::load();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["memory", "plain"] => println!("{}", memory(library, &[])),
        ["memory", "ranks"] => println!("{}", memory(library, &reversed(&SHAPES[2]))),
        _ => {
            let mut criterion = Criterion::default()
                .with_measurement(ProcessorTime)
                .sample_size(20)
                .warm_up_time(Duration::from_millis(150))
                .measurement_time(Duration::from_millis(400))
                .configure_from_args();
            for shape in SHAPES {
                making(&mut criterion, library, shape);
                asking(&mut criterion, library, shape);
            }
            communicators(&mut criterion, library);
            algebra(&mut criterion);
            criterion.final_summary();
        }
    }
}

/// Measures the calls that give a new handle, and dm_free.
fn making(criterion: &mut Criterion<ProcessorTime>, library: &'static Library, shape: [usize; 4]) {
    let (world, ranks) = (Offline::new(library, shape), size(&shape));
    // The handle is freed outside the measured time.
    criterion.bench_function(&format!("dm_init/{ranks}"), |bencher| bencher.iter_with_large_drop(|| world.mesh(&[])));
    let listed = reversed(&shape);
    criterion.bench_function(&format!("dm_init_ranks/{ranks}"), |bencher| {
        bencher.iter_batched(|| (), |()| world.mesh(&listed), BatchSize::NumBatches(20));
    });
    let mesh = world.mesh(&[]);
    criterion.bench_function(&format!("dm_slice/{ranks}"), |bencher| bencher.iter_with_large_drop(|| slice(&mesh)));
    // Each call has a fresh root, so the name is new there, as in a program.
    let pair = || slice(&world.mesh(&[]));
    criterion.bench_function(&format!("dm_flatten/{ranks}"), |bencher| {
        bencher.iter_batched_ref(pair, |view| flatten(view), BatchSize::NumIterations(500));
    });
    let flat = flatten(&pair());
    criterion.bench_function(&format!("dm_unflatten/{ranks}"), |bencher| {
        bencher.iter_with_large_drop(|| unflatten(&flat, &shape));
    });
    criterion.bench_function(&format!("dm_free/{ranks}"), |bencher| {
        bencher.iter_batched(|| slice(&mesh), drop, BatchSize::NumIterations(500));
    });
}

/// Measures questions that a rank answers without the others.
fn asking(criterion: &mut Criterion<ProcessorTime>, library: &'static Library, shape: [usize; 4]) {
    let (world, ranks) = (Offline::new(library, shape), size(&shape));
    let (mesh, same) = (world.mesh(&[]), world.mesh(&[]));
    quick(criterion, &format!("dm_get_local_rank/{ranks}"), || local_rank(&mesh));
    quick(criterion, &format!("dm_slice_and_dm_free/{ranks}"), || drop(slice(&mesh)));
    criterion.bench_function(&format!("dm_get_coordinate/{ranks}"), |bencher| bencher.iter(|| coordinate(&mesh)));
    criterion.bench_function(&format!("dm_hash/{ranks}"), |bencher| bencher.iter(|| hash(&mesh)));
    criterion.bench_function(&format!("dm_equal/{ranks}"), |bencher| bencher.iter(|| equal(&mesh, &same)));
}

/// Measures dm_get_comm in two worlds with communicators: this process alone, and eight ranks.
fn communicators(criterion: &mut Criterion<ProcessorTime>, library: &'static Library) {
    for shape in [[1; 4], SHAPES[0]] {
        with_communicators(library, &shape, |mesh| {
            quick(criterion, &format!("dm_get_comm/{}", size(&shape)), || get_comm(mesh));
        });
    }
}

/// Measures a call from one thread and from four at once, in processor time and in time on the
/// clock. If there are fewer free processors than threads, the time on the clock includes the wait
/// for a processor.
fn quick(criterion: &mut Criterion<ProcessorTime>, name: &str, call: impl Fn() + Sync) {
    criterion.bench_function(name, |bencher| bencher.iter(&call));
    for threads in [1, 4] {
        let clock = format!("{name}/{threads}_threads_clock");
        criterion.bench_function(&clock, |bencher| bencher.iter_custom(|calls| from_threads(threads, calls, &call).0));
        let used = format!("{name}/{threads}_threads");
        criterion.bench_function(&used, |bencher| bencher.iter_custom(|calls| from_threads(threads, calls, &call).1));
    }
}

/// The mean time that a thread needs for that many calls: on the clock, and on the processor.
fn from_threads(threads: u32, calls: u64, call: &(impl Fn() + Sync)) -> (Duration, Duration) {
    let start = Barrier::new(threads as usize);
    let times: Vec<(Duration, Duration)> = std::thread::scope(|scope| {
        let run = || {
            // A thread's first call registers it with the handle table.
            call();
            start.wait();
            let (began, used) = (Instant::now(), processor_time());
            (0..calls).for_each(|_| call());
            (began.elapsed(), processor_time() - used)
        };
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        running.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let mean = |time: fn(&(Duration, Duration)) -> Duration| times.iter().map(time).sum::<Duration>() / threads;
    (mean(|times| times.0), mean(|times| times.1))
}

fn slice(mesh: &Mesh) -> Mesh {
    // SAFETY: here and below: live handles, strings and arrays as the header asks for.
    Mesh::new(mesh.library, |out| unsafe { (mesh.library.slice)(mesh.handle, PAIR.as_ptr(), 2, out) })
}

fn flatten(mesh: &Mesh) -> Mesh {
    let (name, options) = (std::ptr::null(), std::ptr::null());
    // SAFETY: as above.
    Mesh::new(mesh.library, |out| unsafe { (mesh.library.flatten)(mesh.handle, name, options, out) })
}

/// Takes the flattened (dp, cp) apart again.
fn unflatten(mesh: &Mesh, shape: &[usize; 4]) -> Mesh {
    let names = [c"outer".as_ptr(), c"inner".as_ptr()];
    let (sizes, options) = ([shape[2] as i32, shape[1] as i32], std::ptr::null());
    // SAFETY: as above.
    Mesh::new(mesh.library, |out| unsafe {
        (mesh.library.unflatten)(mesh.handle, c"dp_cp".as_ptr(), sizes.as_ptr(), 2, names.as_ptr(), options, out)
    })
}

fn local_rank(mesh: &Mesh) {
    let mut rank = 0;
    // SAFETY: as above.
    let status = unsafe { (mesh.library.get_local_rank)(mesh.handle, black_box(c"cp".as_ptr()), &mut rank) };
    assert_eq!(black_box((status, rank)).0, 0);
}

fn get_comm(mesh: &Mesh) {
    let mut comm = std::ptr::null_mut();
    // SAFETY: as above.
    let status = unsafe { (mesh.library.get_comm)(mesh.handle, black_box(c"cp".as_ptr()), &mut comm) };
    assert_eq!(black_box((status, comm)).0, 0);
}

fn coordinate(mesh: &Mesh) {
    let (mut coordinate, mut length) = ([0i32; 4], 0);
    // SAFETY: as above.
    let status = unsafe { (mesh.library.get_coordinate)(mesh.handle, coordinate.as_mut_ptr(), 4, &mut length) };
    assert_eq!(black_box((status, coordinate)).0, 0);
}

fn hash(mesh: &Mesh) {
    let mut hash = 0;
    // SAFETY: as above.
    let status = unsafe { (mesh.library.hash)(mesh.handle, &mut hash) };
    assert_eq!(black_box((status, hash)).0, 0);
}

fn equal(mesh: &Mesh, other: &Mesh) {
    let mut equal = false;
    // SAFETY: as above.
    let status = unsafe { (mesh.library.equal)(mesh.handle, other.handle, &mut equal) };
    assert_eq!((status, equal), (0, true));
}

/// The mesh algebra without the C ABI, at the largest world.
fn algebra(criterion: &mut Criterion<ProcessorTime>) {
    let shape = SHAPES[2];
    let (names, ranks) = (["pp", "dp", "cp", "tp"], reversed(&shape));
    let plain = MeshSpec::new("cpu", &shape, size(&shape), rank(&shape)).names(&names);
    let listed = plain.ranks(&ranks);
    let new = |spec: &MeshSpec<'_>| View::new(black_box(spec)).expect("a mesh");
    criterion.bench_function("algebra/new", |bencher| bencher.iter_with_large_drop(|| new(&plain)));
    criterion.bench_function("algebra/new_ranks", |bencher| {
        bencher.iter_batched(|| (), |()| new(&listed), BatchSize::NumBatches(20));
    });
    let mesh = new(&plain);
    let pair = mesh.slice(&["dp", "cp"]).expect("a view");
    let flat = pair.flatten(None).expect("a view");
    let outer = flat.size() / 2;
    criterion.bench_function("algebra/slice", |bencher| {
        bencher.iter_with_large_drop(|| mesh.slice(black_box(&["dp", "cp"])));
    });
    criterion
        .bench_function("algebra/flatten", |bencher| bencher.iter_with_large_drop(|| black_box(&pair).flatten(None)));
    criterion.bench_function("algebra/unflatten", |bencher| {
        bencher.iter_with_large_drop(|| black_box(&flat).unflatten("dp_cp", &[outer, 2], &["outer", "inner"]));
    });
    criterion.bench_function("algebra/hash", |bencher| bencher.iter(|| black_box(&mesh).hash()));
}

/// The growth of this process's peak memory in bytes while it makes one mesh of the largest world.
fn memory(library: &'static Library, ranks: &[i32]) -> u64 {
    // A small mesh comes first, so that what the library sets up once is not counted.
    drop(Offline::new(library, SHAPES[0]).mesh(&[]));
    let world = Offline::new(library, SHAPES[2]);
    std::fs::write("/proc/self/clear_refs", "5").expect("the peak can be reset");
    let before = resident("VmRSS:");
    let mesh = world.mesh(ranks);
    let peak = resident("VmHWM:");
    drop(mesh);
    peak.saturating_sub(before)
}

fn resident(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("a field of it");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}
