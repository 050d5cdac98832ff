//! Ranks of a joined world go on after losses by decisions (docs/recovery.md), over a server and
//! over a folder. src/rendezvous/agreement/recovery/tests.rs has the cases of the protocol.

mod ports;

use std::sync::Barrier;
use std::time::Duration;

use devicemesh::error::Status;
use devicemesh::rendezvous::{
    Arrival, Epoch, Incarnation, JoinOptions, Made, Outcome, Recovery, Replicas, Terms, World,
};
use devicemesh::wait::Wait;
use ports::free_port;

const SIZE: usize = 4;

fn soon() -> Wait {
    Wait::after(Duration::from_secs(20))
}

/// Comes to the next turn, goes on to its epoch, and makes the mesh.
fn recover(world: &World, recovery: &mut Recovery) -> Vec<Option<i32>> {
    let terms = Terms::default();
    let arrival = Arrival { call: "dm_recover()", terms: &terms, has_state: true, lost: &[], suspects: &[] };
    assert_eq!(recovery.come(&arrival, &soon()).unwrap(), Outcome::Epoch);
    world.enter_epoch(recovery).unwrap();
    assert_eq!(recovery.make(Ok(()), &soon()).unwrap(), Made::Whole);
    recovery.epoch().seats.iter().map(|holder| holder.as_ref().map(|holder: &Incarnation| holder.rank)).collect()
}

fn first_epoch(size: usize) -> Epoch {
    let ranks: Vec<i32> = (0..size as i32).collect();
    Epoch::first(size, Replicas { sizes: vec![size], dim: 0 }, &ranks)
}

/// Makes a call in a scope of these ranks, whose name is used once in each epoch.
fn call_of_some(world: &World, ranks: &[i32]) {
    if let Some(position) = ranks.iter().position(|rank| *rank == world.rank() as i32) {
        let scope = world.subscope("some", ranks.into(), position).unwrap();
        scope.agree("dm_flatten()", &soon()).unwrap().finish(&soon()).unwrap();
    }
}

/// Makes a call that fails because that rank is lost, or because another rank knows this already
/// and has begun the recovery.
fn fails_without(world: &World, lost: i32) {
    let error = world.barrier(None).unwrap_err();
    let is_right = error.lost() == [lost] || error.message().contains(" has begun recovery ");
    assert!(error.status() == Status::PeerLost && is_right, "{error}");
}

/// Rank 3 ends its world, and then rank 1 does. A call of the others in the world fails each time,
/// and they go on by a decision. In the next epoch the calls of the world are those of the ranks
/// that are left.
fn ranks_end_one_after_the_other(method: &str) {
    // Rank 0 may serve the store, so it stays until rank 2 has read the last verdict.
    let done = Barrier::new(2);
    std::thread::scope(|threads| {
        for rank in 0..SIZE {
            let done = &done;
            threads.spawn(move || {
                let options = JoinOptions::ranked(rank, SIZE).timeout(Duration::from_secs(20)).init_method(method);
                let world = World::join("cpu", &options).unwrap();
                let mut recovery = world.recovery(first_epoch(SIZE)).unwrap();
                call_of_some(&world, &[0, 2]);
                // Rank 1 would otherwise learn of the loss, and begin the recovery, during that
                // call.
                world.barrier(None).unwrap();
                if rank == 3 {
                    return world.leave();
                }
                fails_without(&world, 3);
                assert_eq!(recover(&world, &mut recovery), [Some(0), Some(1), Some(2), None]);
                world.barrier(None).unwrap();
                call_of_some(&world, &[0, 2]);
                if rank == 1 {
                    return world.leave();
                }
                fails_without(&world, 1);
                assert_eq!(recover(&world, &mut recovery), [Some(0), None, Some(2), None]);
                assert_eq!((recovery.epoch_number(), recovery.epoch().without.as_slice()), (2, &[1, 3][..]));
                world.barrier(None).unwrap();
                assert_eq!(world.lost_ranks(&soon()).unwrap(), [1, 3]);
                done.wait();
            });
        }
    });
}

/// Nobody is lost. Rank 1 comes to the turn while the others wait for it in a barrier, and again
/// after the recovery. Returns the names of the keys that are left then, as `list` gives them.
fn a_rank_comes_to_the_turn_while_others_wait(method: &str, list: impl Fn() -> Vec<String> + Sync) -> Vec<String> {
    let (came, done) = (Barrier::new(3), Barrier::new(3));
    std::thread::scope(|threads| {
        let run = |rank: usize| {
            let (came, done, list) = (&came, &done, &list);
            threads.spawn(move || {
                let options = JoinOptions::ranked(rank, 3).timeout(Duration::from_secs(20)).init_method(method);
                let world = World::join("cpu", &options).unwrap();
                let mut recovery = world.recovery(first_epoch(3)).unwrap();
                for turn in 1..=2 {
                    call_of_some(&world, &[0, 2]);
                    world.barrier(None).unwrap();
                    if rank != 1 {
                        let error = world.barrier(None).unwrap_err();
                        assert_eq!((error.status(), error.ranks()), (Status::PeerLost, &[1][..]), "{error}");
                        assert!(error.message().contains(&format!("recovery {turn} of the job")), "{error}");
                    }
                    assert_eq!(recover(&world, &mut recovery), [Some(0), Some(1), Some(2)]);
                    assert_eq!(recovery.epoch_number(), turn);
                }
                // The next calls remove what a store removes together with other operations.
                world.barrier(None).unwrap();
                came.wait();
                let left = list();
                done.wait();
                left
            })
        };
        let [left, ..] = [0, 1, 2].map(run).map(|rank| rank.join().unwrap());
        left
    })
}

#[test]
fn a_barrier_over_a_server_ends_when_a_rank_comes_to_the_turn() {
    a_rank_comes_to_the_turn_while_others_wait(&format!("tcp://127.0.0.1:{}", free_port()), Vec::new);
}

#[test]
fn a_barrier_over_a_folder_ends_when_a_rank_comes_to_the_turn_and_old_keys_go() {
    let path = format!("{}/epochs-{}", env!("CARGO_TARGET_TMPDIR"), std::process::id());
    let list = || {
        let names = std::fs::read_dir(format!("{path}.devicemesh"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.collect::<Vec<String>>()
    };
    let left = a_rank_comes_to_the_turn_while_others_wait(&format!("file://{path}"), list);
    let left: Vec<String> = left.iter().map(|name| name.replace("%2F", "/")).collect();
    let has = |part: &str| left.iter().filter(|name| name.contains(part)).count();
    // Only the scopes of the last epoch have keys: here, those of the barrier's two phases.
    assert_eq!((has("/some/"), has("/e1/"), has("/turn/")), (0, 0, 0), "{left:?}");
    assert_eq!(has("/world/"), has("/e2/world/"), "{left:?}");
    assert_eq!((has("/decision/"), has("/lost/")), (4, 2), "{left:?}");
}

#[test]
fn over_the_server_of_rank_0() {
    ranks_end_one_after_the_other(&format!("tcp://127.0.0.1:{}", free_port()));
}

#[test]
fn over_a_folder() {
    let path = format!("{}/recovery-{}", env!("CARGO_TARGET_TMPDIR"), std::process::id());
    ranks_end_one_after_the_other(&format!("file://{path}"));
}
