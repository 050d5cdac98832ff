//! Several threads of a rank, groups, aborts, and what is dropped or panics.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use devicemesh::comm::{Element, Operands, Operator, View, World, WorldOptions};
use devicemesh::error::Status;
use devicemesh::rendezvous::JoinOptions;
use devicemesh::rendezvous::store::{MemoryStore, Store};

use super::cargo_build::shared_engine;
use super::comm_timeout::set_comm_timeout;
use super::on_ranks;

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

/// Two threads that call along one dimension without an order of their own are refused as soon as
/// their calls overlap. Calls that do not overlap may pair crosswise (docs/threads.md), so a result
/// before the refusal is the sum of one call of each rank, whichever thread made it.
#[test]
fn two_threads_on_one_dimension_get_errors_or_sums_of_one_call_of_each_rank() {
    const ROUNDS: u64 = 500;
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let rank = |rank: usize| {
        let join = JoinOptions::ranked(rank, 2).timeout(Duration::from_secs(60)).store(Arc::clone(&store));
        let world = Arc::new(World::join("cpu", &WorldOptions::new(join)).unwrap());
        let mesh = View::init(&world, &[2], &["d"]).unwrap();
        // Only the calls of the threads may wait in vain.
        set_comm_timeout(&mesh, Duration::from_secs(2));
        let thread = |tag: u64| {
            for round in 0..ROUNDS {
                let mine = tag * 1_000_000 + round;
                let mut value = [mine];
                match mesh.all_reduce("d", &mut value, Operator::Sum) {
                    Ok(()) => {
                        let theirs = value[0] - mine;
                        let (tag, round) = (theirs / 1_000_000, theirs % 1_000_000);
                        assert!(matches!(tag, 1 | 2) && round < ROUNDS, "{} is no sum of two calls", value[0]);
                    }
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
