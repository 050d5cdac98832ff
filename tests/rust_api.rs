//! The crate as a Rust library: worlds, meshes and collectives over slices, with ranks as threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use devicemesh::comm::{Element, MeshOptions, Operands, Operator, RootComms, View, World, WorldOptions};
use devicemesh::error::{Result, Status};
use devicemesh::mesh::{Mesh, MeshSpec};
use devicemesh::rendezvous::JoinOptions;
use devicemesh::rendezvous::store::{MemoryStore, Store};

/// Runs `body` on so many ranks, each with a (2, size / 2) mesh of its own world.
fn on_ranks(size: usize, body: impl Fn(&View, usize) + Sync) {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    std::thread::scope(|scope| {
        for rank in 0..size {
            let (store, body) = (Arc::clone(&store), &body);
            scope.spawn(move || {
                let join = JoinOptions::ranked(rank, size).timeout(Duration::from_secs(60)).store(store);
                let world = Arc::new(World::join("cpu", &WorldOptions::new(join)).unwrap());
                let mesh = View::init(&world, &[2, size / 2], &["replicate", "shard"]).unwrap();
                body(&mesh, rank);
                mesh.root_comms().finalize().unwrap();
            });
        }
    });
}

#[test]
fn collectives_over_slices() {
    on_ranks(4, |mesh, rank| {
        assert_eq!(mesh.mesh().coordinate().unwrap(), [rank / 2, rank % 2]);
        let (along_replicate, along_shard) = ([rank % 2, rank % 2 + 2], [rank / 2 * 2, rank / 2 * 2 + 1]);

        let mut sum = [rank as i64, 10];
        mesh.all_reduce("replicate", &mut sum, Operator::Sum).unwrap();
        assert_eq!(sum, [along_replicate.iter().sum::<usize>() as i64, 20]);
        let mut largest = [rank as f64];
        mesh.all_reduce("shard", &mut largest, Operator::Max).unwrap();
        assert_eq!(largest, [along_shard[1] as f64]);

        let mut copied = [rank as u8; 3];
        mesh.broadcast("shard", &mut copied, 1).unwrap();
        assert_eq!(copied, [along_shard[1] as u8; 3]);

        let mut gathered = [0u32; 4];
        mesh.all_gather("replicate", &[rank as u32, 7], &mut gathered).unwrap();
        assert_eq!(gathered, [along_replicate[0] as u32, 7, along_replicate[1] as u32, 7]);

        let mut block = [0f32];
        mesh.reduce_scatter("shard", &[rank as f32, 100.0 + rank as f32], &mut block, Operator::Average).unwrap();
        let mean = (along_shard[0] + along_shard[1]) as f32 / 2.0;
        assert_eq!(block, [if rank % 2 == 0 { mean } else { 100.0 + mean }]);

        let mut exchanged = [0i32; 2];
        mesh.all_to_all("shard", &[rank as i32 * 10, rank as i32 * 10 + 1], &mut exchanged).unwrap();
        assert_eq!(exchanged, along_shard.map(|peer| (peer * 10 + rank % 2) as i32));

        // A flattened dimension, under its name, from the view that it was made of.
        mesh.flatten(Some("all"), Default::default()).unwrap();
        let mut everybody = [1u64];
        mesh.all_reduce("all", &mut everybody, Operator::Sum).unwrap();
        assert_eq!(everybody, [4]);
    });
}

#[test]
fn what_does_not_fit_is_refused_before_anything_moves() {
    on_ranks(2, |mesh, _| {
        let refused = |result: Result<()>, status, words: &str| {
            let error = result.unwrap_err();
            assert_eq!(error.status(), status, "{error}");
            assert!(error.message().contains(words), "{error}, expected {words}");
        };
        let mut four = [0f32; 4];
        refused(mesh.all_reduce("nowhere", &mut four, Operator::Sum), Status::NotFound, "nowhere");
        refused(mesh.broadcast("replicate", &mut four, 2), Status::InvalidArgument, "root is 2");
        refused(
            mesh.all_gather("replicate", &[1.0; 3], &mut four),
            Status::InvalidArgument,
            "expected 2 times the 3 of send",
        );
        refused(
            mesh.reduce_scatter("replicate", &[1.0; 3], &mut four, Operator::Sum),
            Status::InvalidArgument,
            "send has 3 elements, expected 2 times the 4 of recv",
        );
        refused(
            mesh.all_to_all("replicate", &[1.0; 3], &mut [0.0; 3]),
            Status::InvalidArgument,
            "the same multiple of 2",
        );
        mesh.group_start().unwrap();
        refused(mesh.all_reduce("replicate", &mut four, Operator::Sum), Status::Unsupported, "end the group first");
        mesh.group_end().unwrap();
        mesh.all_reduce("replicate", &mut four, Operator::Sum).unwrap();
    });
}

#[test]
fn what_is_shared_between_threads_may_be() {
    fn shared<T: Send + Sync>() {}
    shared::<View>();
    shared::<World>();
    shared::<devicemesh::mesh::Mesh>();
    shared::<devicemesh::error::Error>();
    fn elements<T: Element>() {}
    elements::<f32>();
}

/// A mesh of this process alone, in a world of its own, over the named library or the embedded one.
fn alone(library: Option<&PathBuf>) -> View {
    let mut options = WorldOptions::new(JoinOptions::ranked(0, 1).store(Arc::new(MemoryStore::default())));
    if let Some(path) = library {
        // SAFETY: it is the host engine, which has NCCL's API.
        options = unsafe { options.library(path.to_str().unwrap()) };
    }
    View::init(&Arc::new(World::join("cpu", &options).unwrap()), &[1], &["d"]).unwrap()
}

/// The host engine as a shared library of its own, of this profile.
fn shared_engine() -> PathBuf {
    let folder = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().to_owned();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--package", "hostccl-capi", "--target-dir"]).arg(folder.parent().unwrap());
    if folder.ends_with("release") {
        cargo.arg("--release");
    }
    assert!(cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success());
    folder.join("libhostccl.so")
}

/// A group puts its operations off, and a slice must not be in it: it may be gone by then.
#[test]
fn groups_are_counted_by_library() {
    let engine = shared_engine();
    let (embedded, shared, again) = (alone(None), alone(Some(&engine)), alone(Some(&engine)));
    let call = |mesh: &View| mesh.broadcast("d", &mut [1.5f32], 0);
    let is_refused = |mesh: &View| {
        let error = call(mesh).unwrap_err();
        assert!(error.message().contains("end the group first"), "{error}");
    };
    for mesh in [&embedded, &shared, &again] {
        call(mesh).unwrap();
    }
    embedded.group_start().unwrap();
    // A group of one library is none of another.
    call(&shared).unwrap();
    shared.group_end().unwrap_err();
    is_refused(&embedded);
    shared.group_start().unwrap();
    embedded.group_end().unwrap();
    call(&embedded).unwrap();
    // Two worlds that name one library have its groups in common.
    is_refused(&shared);
    is_refused(&again);
    again.group_end().unwrap();
    call(&shared).unwrap();
    call(&again).unwrap();
    shared.group_end().unwrap_err();
    // Another thread is in no group of this one.
    embedded.group_start().unwrap();
    std::thread::scope(|scope| scope.spawn(|| call(&embedded).unwrap()).join().unwrap());
    embedded.group_end().unwrap();
    // One that ends in the middle of a group leaves nothing behind.
    std::thread::scope(|scope| scope.spawn(|| embedded.group_start().unwrap()).join().unwrap());
    call(&embedded).unwrap();
}

#[test]
fn what_is_dropped_forgotten_or_panics_leaves_the_rest_whole() {
    on_ranks(2, |mesh, rank| {
        let sum = |mesh: &View, dim: &str| {
            let mut value = [rank + 1].map(|value| value as u32);
            mesh.all_reduce(dim, &mut value, Operator::Sum).map(|()| value[0])
        };
        let flat = mesh.flatten(Some("flat"), Default::default()).unwrap();
        let again = mesh.root().unwrap();
        drop(flat);
        std::mem::forget(mesh.slice(&["replicate"]).unwrap());
        assert_eq!(sum(&again, "replicate").unwrap(), 3);
        assert_eq!(sum(mesh, "flat").unwrap(), 3);
        // A panic in what is done with the communicator, here and inside a group.
        let operands = Operands::new(1, 7, std::ptr::null_mut());
        let panics =
            || mesh.operate("mine", 0, operands, &[], |_, _| std::panic::resume_unwind(Box::new("in a closure")));
        catch_unwind(AssertUnwindSafe(panics)).unwrap_err();
        mesh.group_start().unwrap();
        catch_unwind(AssertUnwindSafe(panics)).unwrap_err();
        mesh.group_end().unwrap();
        assert_eq!(sum(mesh, "replicate").unwrap(), 3);
        // An index that no dimension has is not for a panic.
        assert_eq!(mesh.comm(7).unwrap_err().status(), Status::InvalidArgument);
        assert_eq!(mesh.operate("mine", 7, operands, &[], |_, _| 0).unwrap_err().status(), Status::InvalidArgument);
        assert_eq!(mesh.check(7).unwrap_err().status(), Status::InvalidArgument);
    });
}

/// Nobody can know which thread's call belongs to which of another rank. So this is an error, or goes well by chance; a wrong number it never is.
#[test]
fn two_threads_on_one_dimension_get_errors_or_the_right_numbers() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let rank = |rank: usize| {
        let join = JoinOptions::ranked(rank, 2).timeout(Duration::from_secs(2)).store(Arc::clone(&store));
        let world = Arc::new(World::join("cpu", &WorldOptions::new(join)).unwrap());
        let mesh = View::init(&world, &[2], &["d"]).unwrap();
        let thread = |tag: u64| {
            for round in 0..500 {
                let mut value = [tag * 1_000_000 + round];
                match mesh.all_reduce("d", &mut value, Operator::Sum) {
                    Ok(()) => assert_eq!(value, [2 * (tag * 1_000_000 + round)], "thread {tag}, round {round}"),
                    Err(error) => return assert_ne!(error.status(), Status::Internal, "{error}"),
                }
            }
        };
        std::thread::scope(|scope| [1, 2].map(|tag| scope.spawn(move || thread(tag))).map(|one| one.join().unwrap()));
    };
    std::thread::scope(|scope| [0, 1].map(|this| scope.spawn(move || rank(this))).map(|one| one.join().unwrap()));
}

#[test]
fn an_abort_ends_a_blocked_call_and_its_slice_is_free_then() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let aborted = AtomicBool::new(false);
    let rank = |rank: usize| {
        let join = JoinOptions::ranked(rank, 2).timeout(Duration::from_secs(60)).store(Arc::clone(&store));
        let world = Arc::new(World::join("cpu", &WorldOptions::new(join)).unwrap());
        let mesh = View::init(&world, &[2], &["d"]).unwrap();
        let result = std::thread::scope(|scope| {
            let blocked = scope.spawn(|| {
                let mut values = vec![1.0f32; 100_000];
                match rank {
                    0 => mesh.all_reduce("d", &mut values, Operator::Sum),
                    // Rank 1 comes when there is nobody any more.
                    _ => {
                        while !aborted.load(Ordering::SeqCst) {
                            std::thread::yield_now();
                        }
                        mesh.all_reduce("d", &mut values, Operator::Sum)
                    }
                }
            });
            if rank == 0 {
                mesh.root_comms().abort().unwrap();
                aborted.store(true, Ordering::SeqCst);
            }
            blocked.join().unwrap()
        });
        let expected = if rank == 0 { Status::Aborted } else { Status::PeerLost };
        assert_eq!(result.as_ref().unwrap_err().status(), expected, "{result:?}");
    };
    std::thread::scope(|scope| [0, 1].map(|this| scope.spawn(move || rank(this))).map(|one| one.join().unwrap()));
}

#[test]
fn options_are_made_step_by_step() {
    let world = World::join("cpu", &WorldOptions::new(JoinOptions::ranked(3, 8).offline())).unwrap();
    let spec = MeshSpec::new("cpu", &[2, 2], 8, 3).names(&["dp", "tp"]).ranks(&[7, 5, 3, 1]);
    let options = MeshOptions::default().lazy().timeout(Duration::from_secs(1)).dims(vec![Default::default(); 2]);
    let mesh = View::of_root(RootComms::create(&Arc::new(world), Mesh::new(&spec).unwrap(), &options).unwrap());
    assert_eq!(mesh.mesh().coordinate().unwrap(), [1, 0]);
    assert_eq!(mesh.all_reduce("dp", &mut [0f32], Operator::Sum).unwrap_err().status(), Status::Unsupported);
}

#[test]
fn an_index_that_no_dimension_has_is_an_error_wherever_one_can_be_given() {
    let mesh = Mesh::new(&MeshSpec::new("cpu", &[2, 4], 8, 6)).unwrap();
    let outside = Mesh::new(&MeshSpec::new("cpu", &[2], 8, 6)).unwrap();
    for index in [2, 9, usize::MAX] {
        let refused = |error: devicemesh::error::Error| {
            assert_eq!(error.status(), Status::InvalidArgument, "{error}");
            assert!(error.message().starts_with(&format!("there is no dimension {index} in ")), "{error}");
        };
        for mesh in [&mesh, &outside] {
            refused(mesh.local_rank(index).unwrap_err());
            refused(mesh.group_ranks(index).unwrap_err());
            refused(mesh.each_group_rank(index).err().unwrap());
            refused(mesh.translate_rank(index, 0).unwrap_err());
            refused(mesh.neighbor(index, 1, true).unwrap_err());
            refused(mesh.split_color_key(index).unwrap_err());
            refused(mesh.without(index, &[1], 8).unwrap_err());
        }
    }
}
