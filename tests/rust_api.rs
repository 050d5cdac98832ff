//! The crate as a Rust library: worlds, meshes and collectives over slices, with ranks as threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use devicemesh::comm::{
    CallOptions, Collective, DimOptions, Element, Memory, MeshOptions, Operands, Operator, RootComms, View, World,
    WorldOptions,
};
use devicemesh::error::{Result, Status};
use devicemesh::mesh::{Mesh, MeshSpec};
use devicemesh::ndarray::{Array, Array2, ArrayD, Axis, array, s};
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

        let mut half_precision = [half::bf16::from_f32(rank as f32)];
        mesh.all_reduce("shard", &mut half_precision, Operator::Sum).unwrap();
        assert_eq!(half_precision[0].to_f32(), along_shard.iter().sum::<usize>() as f32);
        let mut half_precision = [half::f16::from_f32(0.5 * rank as f32)];
        mesh.all_reduce("shard", &mut half_precision, Operator::Max).unwrap();
        assert_eq!(half_precision[0].to_f32(), 0.5 * along_shard[1] as f32);

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

        // Counts for each rank: two elements for the rank at 0, and three for the rank at 1.
        let (me, shard) = (rank % 2, rank as i32);
        let mut blocks = vec![-1i32; if me == 0 { 4 } else { 6 }];
        let received = if me == 0 { [2, 2] } else { [3, 3] };
        mesh.all_to_allv("shard", &[shard; 5], &[2, 3], &mut blocks, &received).unwrap();
        let expected: Vec<i32> = along_shard.iter().flat_map(|peer| vec![*peer as i32; received[0]]).collect();
        assert_eq!(blocks, expected);
        let mut gathered = [0i32; 5];
        mesh.all_gatherv("shard", &vec![shard; 2 + me], &mut gathered, &[2, 3]).unwrap();
        assert_eq!(gathered, [0, 0, 1, 1, 1].map(|index: usize| along_shard[index] as i32));
        let mut block = vec![0i32; 2 + me];
        mesh.reduce_scatterv("shard", &[1, 2, 3, 4, 5], &[2, 3], &mut block, Operator::Sum).unwrap();
        assert_eq!(block, [&[2, 4][..], &[6, 8, 10]][me]);

        // A flattened dimension, under its name, from the view that it was made of.
        mesh.flatten(Some("all"), &Default::default()).unwrap();
        let mut everybody = [1u64];
        mesh.all_reduce("all", &mut everybody, Operator::Sum).unwrap();
        assert_eq!(everybody, [4]);
    });
}

/// Runs `body` with a world of its own on so many ranks, and gives what each returns.
fn in_worlds<T: Send>(size: usize, body: impl Fn(&Arc<World>, usize) -> T + Sync) -> Vec<T> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    std::thread::scope(|scope| {
        let rank = |rank: usize| {
            let (store, body) = (Arc::clone(&store), &body);
            scope.spawn(move || {
                let join = JoinOptions::ranked(rank, size).timeout(Duration::from_secs(60)).store(store);
                body(&Arc::new(World::join("cpu", &WorldOptions::new(join)).unwrap()), rank)
            })
        };
        let ranks: Vec<_> = (0..size).map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn a_mesh_from_an_array_of_ranks_reduces_along_the_arrays_axes() {
    in_worlds(5, |world, rank| {
        // Rank 2 of the world is not in the mesh. The array is a view with strides of its own:
        // every other column of another one, transposed.
        let wide = array![[4, 9, 0], [1, 9, 3]];
        let ranks = wide.slice(s![.., ..;2]).reversed_axes();
        assert_eq!(ranks, array![[4, 1], [0, 3]]);
        let view = View::from_rank_array(world, ranks, &["dp", "tp"]).unwrap();
        let mesh = view.mesh();
        assert_eq!(mesh.rank_array(), ranks.into_dyn());
        let Some((at, _)) = ranks.indexed_iter().find(|(_, known)| **known == rank as i32) else {
            assert_eq!(rank, 2);
            assert_eq!(mesh.coordinate().unwrap_err().status(), Status::NotMember);
            return;
        };
        assert_eq!(mesh.coordinate().unwrap(), [at.0, at.1]);
        for (axis, name, other) in [(0, "dp", at.1), (1, "tp", at.0)] {
            let lane = ranks.index_axis(Axis(1 - axis), other);
            assert_eq!(mesh.group_ranks(axis).unwrap(), lane.to_vec());
            let mut sum = [rank as i32];
            view.all_reduce(name, &mut sum, Operator::Sum).unwrap();
            assert_eq!(sum, [lane.sum()]);
        }
        view.root_comms().finalize().unwrap();
    });
}

#[test]
fn ranks_that_give_different_arrays_are_told_so() {
    let errors = in_worlds(2, |world, rank| {
        let ranks = if rank == 0 { array![[0], [1]] } else { array![[1], [0]] };
        View::from_rank_array(world, ranks.view(), &["dp", "tp"]).err().unwrap()
    });
    for error in errors {
        assert_eq!(error.status(), Status::Mismatch, "{error}");
        assert!(error.message().contains("ranks=(1, 0)"), "{error}");
    }
}

#[test]
fn an_array_that_is_no_mesh_is_refused_with_its_values() {
    let refused = |array: ArrayD<i32>, names: Option<&[&str]>, words: &str| {
        let error = Mesh::from_rank_array("cpu", array.view(), names, 4, 0).unwrap_err();
        assert_eq!(error.status(), Status::InvalidArgument, "{error}");
        assert!(error.message().contains(words), "{error}, expected {words}");
    };
    refused(array![[0, 1], [2, 1]].into_dyn(), None, "rank 1 is listed twice, at index 1 and index 3");
    refused(array![[0, 1], [2, 4]].into_dyn(), None, "rank 4 at index 3 is out of range: the world has ranks 0 to 3");
    refused(array![-1].into_dyn(), None, "rank -1 at index 0 is out of range");
    refused(Array2::<i32>::zeros((2, 0)).into_dyn(), None, "dimension 1 has size 0");
    refused(Array::from_iter(0..5).into_dyn(), None, "a mesh of shape (5) has 5 ranks, but the world has 4");
    refused(array![[0, 1]].into_dyn(), Some(&["dp"]), "the shape has 2 dimensions, but there are 1 names");
    // One element that is said to be there 2^40 times is refused before anything of that size is
    // made.
    let one = array![0];
    let error = Mesh::from_rank_array("cpu", one.broadcast((1 << 20, 1 << 20)).unwrap(), None, 4, 0).unwrap_err();
    assert!(error.message().contains("1099511627776 ranks, but the world has 4"), "{error}");
    // An array without dimensions is a mesh of one rank.
    let point = Mesh::from_rank_array("cpu", ndarray_of_one(3).view(), None, 4, 3).unwrap();
    assert_eq!((point.ndim(), point.size(), point.rank_array()), (0, 1, ndarray_of_one(3)));
}

fn ndarray_of_one(rank: i32) -> ArrayD<i32> {
    ArrayD::from_elem(vec![], rank)
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
        refused(
            mesh.all_to_allv("replicate", &[1.0; 3], &[1, 1], &mut [0.0; 2], &[1, 1]),
            Status::InvalidArgument,
            "send has 3 elements, which is not the sum of its counts",
        );
        refused(
            mesh.all_gatherv("replicate", &[1.0; 3], &mut four, &[2, 2]),
            Status::InvalidArgument,
            "send has 3 elements, but the count of this rank is 2",
        );
        refused(
            mesh.all_gatherv("replicate", &[1.0; 4], &mut four, &[4]),
            Status::InvalidArgument,
            "has 1 numbers, but dimension replicate has 2 ranks",
        );
        mesh.group_start().unwrap();
        refused(mesh.all_reduce("replicate", &mut four, Operator::Sum), Status::InvalidState, "end the group first");
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
        let flat = mesh.flatten(Some("flat"), &Default::default()).unwrap();
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

/// Nobody can know which thread's call belongs to which of another rank. So this is an error, or
/// goes well by chance; a wrong number it never is.
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
fn bytes_travel_along_a_dimension_and_over_the_world() {
    on_ranks(4, |mesh, rank| {
        let text = |rank: usize| "x".repeat(rank).into_bytes();
        mesh.barrier("shard", None).unwrap();
        let all = mesh.all_gather_bytes("replicate", &text(rank), None).unwrap();
        assert_eq!(all, [text(rank % 2), text(rank % 2 + 2)]);
        let of_root = mesh.broadcast_bytes("shard", &text(rank), 1, None).unwrap();
        assert_eq!(of_root, text(rank / 2 * 2 + 1));
        let error = mesh.broadcast_bytes("shard", &[], 2, None).unwrap_err();
        assert_eq!((error.status(), error.dimension()), (Status::InvalidArgument, Some("shard")));
        assert_eq!(mesh.barrier("nowhere", None).unwrap_err().status(), Status::NotFound);
        assert_eq!(mesh.slice(&["shard"]).unwrap().all_gather_bytes("shard", b"", None).unwrap(), [b""; 2]);
    });
    in_worlds(3, |world, rank| {
        let all = world.all_gather_bytes(&vec![rank as u8; 2_000_000 * rank], None).unwrap();
        assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [0, 2_000_000, 4_000_000]);
        assert!(all[2].iter().all(|byte| *byte == 2));
        assert_eq!(world.broadcast_bytes(b"seed", 2, None).unwrap(), b"seed");
        assert_eq!(world.broadcast_bytes(b"", 3, None).unwrap_err().status(), Status::InvalidArgument);
        // A rank that comes to another call, and then again to the same.
        let made = if rank == 1 { world.barrier(None) } else { world.broadcast_bytes(b"", 0, None).map(drop) };
        assert_eq!(made.unwrap_err().status(), Status::Mismatch);
        assert_eq!(world.locations(Some("here"), None).unwrap(), ["here"; 3]);
    });
}

#[test]
fn a_call_that_may_not_be_made_now_and_options_of_other_dimensions_are_told_apart() {
    in_worlds(2, |world, _| {
        let mesh = View::init(world, &[2, 1], &["replicate", "shard"]).unwrap();
        assert_eq!(mesh.group_end().unwrap_err().status(), Status::InvalidState);
        mesh.check_all().unwrap();
        let two = CallOptions::default().dims(vec![DimOptions::default().own(); 2]);
        let refused = mesh.flatten(Some("all"), &two).map(drop).unwrap_err();
        assert_eq!(refused.status(), Status::InvalidArgument);
        assert!(refused.message().ends_with("there are options for 2 dimensions, but this call makes 1"), "{refused}");
        // A slice must not be in a group.
        mesh.group_start().unwrap();
        let in_group = mesh.broadcast("replicate", &mut [1.0f32], 0).unwrap_err();
        assert_eq!(in_group.status(), Status::InvalidState, "{in_group}");
        mesh.group_end().unwrap();
        let nobody = mesh.shrink(Some("replicate"), None, &CallOptions::default()).map(drop).unwrap_err();
        assert_eq!(nobody.status(), Status::InvalidState, "{nobody}");
    });
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

#[test]
fn collectives_over_buffers_move_bytes_and_refuse_what_does_not_fit() {
    const UINT8: i32 = 1;
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let body = |rank: usize, store: Arc<dyn Store>| {
        let join = JoinOptions::ranked(rank, 2).timeout(Duration::from_secs(60)).store(store);
        let world = Arc::new(World::join("cpu", &WorldOptions::new(join)).unwrap());
        let mesh = View::init(&world, &[2], &["dp"]).unwrap();
        let memory = Memory::of(&world).unwrap();
        assert!(!memory.is_on_device() && memory.device_name().is_none());
        let (send, recv) = (memory.buffer(4).unwrap(), memory.buffer(4).unwrap());
        let mine = rank as u8 * 10;
        let result = |collective: Collective, count: usize, offset: usize| {
            send.write(0, &[mine, mine + 1, mine + 2, mine + 3]).unwrap();
            recv.write(0, &[99; 4]).unwrap();
            mesh.collective(0, collective, UINT8, count, send.at(0), recv.at(offset)).unwrap();
            let mut got = [0; 4];
            recv.read(0, &mut got).unwrap();
            got
        };
        assert_eq!(result(Collective::AllReduce(Operator::Sum), 3, 1), [99, 10, 12, 14]);
        assert_eq!(result(Collective::AllGather, 2, 0), [0, 1, 10, 11]);
        assert_eq!(
            result(Collective::ReduceScatter(Operator::Max), 2, 0)[..2],
            [10 + rank as u8 * 2, 11 + rank as u8 * 2]
        );
        assert_eq!(result(Collective::AllToAll, 2, 0), [mine / 5, mine / 5 + 1, 10 + mine / 5, 11 + mine / 5]);
        assert_eq!(result(Collective::Shift, 1, 0), [10 - mine, 99, 99, 99]);
        assert_eq!(result(Collective::Broadcast { root: 1 }, 2, 0)[..2], [10, 11]);
        let reduced = result(Collective::Reduce { op: Operator::Min, root: 0 }, 4, 0);
        assert_eq!(reduced, if rank == 0 { [0, 1, 2, 3] } else { [99; 4] });
        // In place, and what is not quite in place.
        send.write(0, &[mine; 4]).unwrap();
        mesh.collective(0, Collective::AllGather, UINT8, 2, send.at(rank * 2), send.at(0)).unwrap();
        let mut gathered = [0; 4];
        send.read(0, &mut gathered).unwrap();
        assert_eq!(gathered, [0, 0, 10, 10]);
        let (sum, other) = (Collective::AllReduce(Operator::Sum), memory.buffer(4).unwrap());
        for (outcome, words) in [
            (mesh.collective(0, sum, UINT8, 5, send.at(0), other.at(0)), "5 bytes from offset 0 on are not inside"),
            (mesh.collective(0, sum, UINT8, 1, send.at(4), other.at(0)), "from offset 4 on"),
            (mesh.collective(0, sum, UINT8, 2, send.at(0), send.at(1)), "overlap, but not as in place"),
            (mesh.collective(0, Collective::Shift, UINT8, 2, send.at(0), send.at(0)), "never works in place"),
            (mesh.collective(0, sum, 12, 1, send.at(0), other.at(0)), "dtype is 12"),
            (mesh.collective(0, Collective::Broadcast { root: 2 }, UINT8, 1, send.at(0), other.at(0)), "root is 2"),
            (mesh.collective(0, sum, UINT8, usize::MAX, send.at(0), other.at(0)), "are not inside"),
        ] {
            let error = outcome.unwrap_err();
            assert_eq!(error.status(), Status::InvalidArgument, "{error}");
            assert!(error.message().contains(words), "{error}");
        }
        mesh.group_start().unwrap();
        let error = mesh.collective(0, sum, UINT8, 1, send.at(0), other.at(0)).unwrap_err();
        assert_eq!(error.status(), Status::InvalidState, "{error}");
        mesh.group_end().unwrap();
        mesh.root_comms().finalize().unwrap();
    };
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let store = Arc::clone(&store);
            scope.spawn(move || body(rank, store));
        }
    });
}
