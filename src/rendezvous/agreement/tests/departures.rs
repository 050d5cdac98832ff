//! Ranks that end a mesh by dm_abort, which is local, while the others make calls on the mesh.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::soon;
use crate::error::{Error, Status};
use crate::rendezvous::agreement::cleanup::WorldKeys;
use crate::rendezvous::agreement::{Departures, Members, Membership, Scope, ScopeKeys};
use crate::rendezvous::losses::Losses;
use crate::rendezvous::store::{MemoryStore, Store};
use crate::wait::{Cancel, Wait};

/// One rank of a world over a store in memory.
struct Rank {
    me: usize,
    store: Arc<dyn Store>,
    keys: Arc<WorldKeys>,
    world: Scope,
}

impl Rank {
    fn new(store: &MemoryStore, me: usize, size: usize) -> Rank {
        let (store, keys): (Arc<dyn Store>, Arc<WorldKeys>) = (Arc::new(store.clone()), Arc::default());
        let (losses, members) = (Arc::new(Losses::none(Arc::clone(&store), "test")), Members::All(size));
        let left = ScopeKeys::new(&members, &keys, Some(0));
        let membership = Membership { left, ..super::membership(Arc::clone(&store), losses, members, me) };
        Rank { me, store, keys, world: Scope::new(membership, "test/world".to_owned()) }
    }

    /// A mesh of all ranks, whose calls are numbered with those of the world.
    fn mesh(&self, name: &str) -> (Arc<Departures>, Scope) {
        let store = Arc::clone(&self.store);
        let departures = Arc::new(Departures::new(store, format!("test/{name}"), 0, self.me as i32, &self.keys));
        let scope = self.world.of_mesh(&departures);
        (departures, scope)
    }

    /// Waits until that rank has come to the first call.
    fn await_rank(&self, rank: usize) {
        self.store.get(&format!("test/world/0/here/{rank}"), &soon()).unwrap();
    }
}

fn run<T: Send>(size: usize, run: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let (store, run) = (MemoryStore::new(), &run);
    std::thread::scope(|threads| {
        let start = |me| {
            let rank = Rank::new(&store, me, size);
            threads.spawn(move || run(rank))
        };
        let handles: Vec<_> = (0..size).map(start).collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    })
}

fn whole_call(scope: &Scope, call: &str) {
    scope.agree(call, &soon()).unwrap().finish(&soon()).unwrap();
}

/// How the ranks come to the first call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    AborterFirst,
    AborterLast,
    /// One rank comes before the aborting rank, and the others come after it.
    AborterBetween,
    Together,
}

/// Rank `aborter` ends the mesh and goes on with `next`, which the others call after their call on
/// the mesh. Returns the errors of the others in their call on the mesh.
fn abort(size: usize, aborter: usize, order: Order, next: impl Fn(&Rank, &Scope) + Sync) -> Vec<Error> {
    let first = (aborter + 1) % size;
    let errors = run(size, |rank| {
        let ((one, on_one), (_, on_other)) = (rank.mesh("mesh0"), rank.mesh("mesh1"));
        if rank.me == aborter {
            match order {
                Order::AborterFirst | Order::Together => {}
                Order::AborterBetween => rank.await_rank(first),
                Order::AborterLast => {
                    (0..size).filter(|other| *other != aborter).for_each(|other| rank.await_rank(other))
                }
            }
            one.tell();
            next(&rank, &on_other);
            return None;
        }
        if order == Order::AborterFirst || (order == Order::AborterBetween && rank.me != first) {
            rank.await_rank(aborter);
        }
        let error = on_one.agree("dm_flatten()", &soon()).map(drop).unwrap_err();
        next(&rank, &on_other);
        Some(error)
    });
    errors.into_iter().flatten().collect()
}

/// The aborting rank has not begun the call that it ends for the others. Its next call meets their
/// next one, in whatever order the ranks come, and whether or not the calls have equal texts.
#[test]
fn a_rank_that_ends_a_mesh_is_not_waited_for_in_calls_on_the_mesh() {
    let began = Instant::now();
    for size in [2, 3] {
        for aborter in 0..size {
            for order in [Order::AborterFirst, Order::AborterLast, Order::AborterBetween, Order::Together] {
                let in_world = abort(size, aborter, order, |rank, _| whole_call(&rank.world, "dm_init()"));
                let on_other = abort(size, aborter, order, |_, other| whole_call(other, "dm_flatten()"));
                for error in in_world.into_iter().chain(on_other) {
                    let told = (error.status(), error.ranks(), error.lost());
                    assert_eq!(told, (Status::PeerLost, &[aborter as i32][..], &[][..]), "{order:?}: {error}");
                    let words = format!(
                        "rank {aborter} has ended the mesh by dm_abort, dm_recover or dm_shrink, and dm_flatten() as call 0 needs that rank"
                    );
                    assert_eq!(error.message(), words);
                }
            }
        }
    }
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

/// Two of three ranks end the mesh and go on. The third rank calls on the mesh.
#[test]
fn several_ranks_that_end_a_mesh_meet_in_their_next_call() {
    for other in 0..3 {
        let errors = run(3, |rank| {
            let (mesh, on_mesh) = rank.mesh("mesh0");
            let error = (rank.me == other).then(|| on_mesh.agree("dm_flatten()", &soon()).map(drop).unwrap_err());
            if rank.me != other {
                mesh.tell();
            }
            whole_call(&rank.world, "dm_init()");
            error
        });
        let error = errors.into_iter().flatten().next().unwrap();
        assert_eq!((error.status(), error.lost()), (Status::PeerLost, &[][..]), "{error}");
        assert!(!error.ranks().is_empty() && !error.ranks().contains(&(other as i32)), "{error}");
    }
}

/// Rank 0 ends the mesh while its own thread is in a call on the mesh, and writes that as the
/// verdict. Rank 2 has ended the mesh, too, and is in its next call. Rank 1 is in the call on the
/// mesh.
#[test]
fn a_call_that_is_aborted_is_passed_over_by_ranks_that_have_ended_its_mesh() {
    let errors = run(3, |rank| {
        let (mesh, on_mesh) = rank.mesh("mesh0");
        let mut error = None;
        if rank.me == 0 {
            let wait = Wait { cancel: Cancel::new(), ..soon() };
            wait.cancel.raise();
            error = on_mesh.agree("dm_flatten()", &wait).map(drop).err();
            mesh.tell();
        } else {
            rank.store.get("test/world/0/verdict", &soon()).unwrap();
            match rank.me {
                1 => error = on_mesh.agree("dm_flatten()", &soon()).map(drop).err(),
                _ => drop(mesh.tell()),
            }
        }
        whole_call(&rank.world, "dm_init()");
        error.map(|error| (error.status(), error.ranks().to_vec()))
    });
    assert_eq!(errors, [Some((Status::Aborted, vec![])), Some((Status::PeerLost, vec![0])), None]);
}

/// Rank 0 ends the mesh while its own thread is in a call on the mesh. Rank 1, which has not ended
/// the mesh, makes another call, which rank 0 does not make.
#[test]
fn a_rank_with_another_call_than_the_aborted_one_is_told_of_the_abort() {
    let errors = run(2, |rank| {
        let (mesh, on_mesh) = rank.mesh("mesh0");
        if rank.me == 0 {
            let wait = Wait { cancel: Cancel::new(), ..soon() };
            wait.cancel.raise();
            on_mesh.agree("dm_flatten()", &wait).map(drop).unwrap_err();
            mesh.tell();
            return None;
        }
        rank.store.get("test/world/0/verdict", &soon()).unwrap();
        rank.world.agree("dm_world_barrier()", &soon()).map(drop).err()
    });
    let error = errors.into_iter().flatten().next().unwrap();
    assert_eq!((error.status(), error.ranks()), (Status::PeerLost, &[0][..]), "{error}");
}

#[test]
fn calls_on_whole_meshes_are_compared_as_ever() {
    let errors = run(2, |rank| {
        let ((_, on_one), (_, on_other)) = (rank.mesh("mesh0"), rank.mesh("mesh1"));
        let (scope, call) = if rank.me == 0 { (on_one, "dm_flatten()") } else { (on_other, "dm_finalize()") };
        scope.agree(call, &soon()).map(drop).unwrap_err()
    });
    for error in errors {
        let words = "rank 1 called dm_finalize() as call 0, rank 0 called dm_flatten()";
        assert_eq!((error.status(), error.message()), (Status::Mismatch, words));
    }
}

/// Rank 1 has taken a number for its note and has died. The note of rank 0, which has the next
/// number, is read all the same.
#[test]
fn a_rank_that_dies_before_its_note_does_not_hide_the_others() {
    let errors = run(3, |rank| {
        let (mesh, on_mesh) = rank.mesh("mesh0");
        match rank.me {
            0 => {
                rank.store.add("test/mesh0/left", 1, &soon()).unwrap();
                mesh.tell();
                None
            }
            1 => None,
            _ => Some(on_mesh.agree("dm_flatten()", &soon()).map(drop).unwrap_err()),
        }
    });
    let error = errors.into_iter().flatten().next().unwrap();
    assert_eq!((error.status(), error.ranks()), (Status::PeerLost, &[0][..]), "{error}");
}

/// Another rank has filled the number of a rank that is slow.
#[test]
fn a_rank_whose_number_was_filled_takes_a_new_one() {
    let store = MemoryStore::new();
    let (slow, other) = (Rank::new(&store, 0, 2), Rank::new(&store, 1, 2));
    store.set("test/mesh0/left/1", b"-", &soon()).unwrap();
    slow.mesh("mesh0").0.tell();
    let (departures, _) = other.mesh("mesh0");
    assert_eq!(store.get("test/mesh0/left/2", &soon()).unwrap(), b"0");
    departures.catch_up(&soon()).unwrap();
    assert_eq!(departures.all(|_| true), [0]);
}

/// Rank 0 has ended the mesh and forgotten it, and all ranks have agreed on later calls. Rank 1 has
/// read the note of rank 0, and then learns that rank 2 has ended the mesh, too.
#[test]
fn the_end_of_a_forgotten_mesh_does_not_hide_later_ends_of_the_mesh() {
    let known = run(3, |rank| {
        let (mesh, on_mesh) = rank.mesh("mesh0");
        if rank.me == 0 {
            mesh.tell();
        }
        rank.store.get("test/mesh0/left/1", &soon()).unwrap();
        mesh.catch_up(&soon()).unwrap();
        let mesh = (rank.me > 0).then_some(mesh);
        drop(on_mesh);
        (0..3).for_each(|_| whole_call(&rank.world, "dm_init()"));
        let mesh = mesh?;
        if rank.me == 2 {
            mesh.tell();
            return None;
        }
        let (number, next) = mesh.next();
        mesh.note(number, &rank.store.get(&next, &soon()).unwrap());
        Some(mesh.all(|_| true))
    });
    assert_eq!(known, [None, Some(vec![0, 2]), None]);
}
