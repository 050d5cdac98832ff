//! Ranks of a joined world go on after losses by decisions (docs/recovery.md), over a server and
//! over a folder. src/rendezvous/agreement/recovery/tests.rs has the cases of the protocol.

use std::net::TcpListener;
use std::sync::Barrier;
use std::time::Duration;

use devicemesh::error::Status;
use devicemesh::rendezvous::{
    Arrival, Epoch, Incarnation, JoinOptions, Made, Outcome, Recovery, Replicas, Terms, World,
};
use devicemesh::wait::Wait;

const SIZE: usize = 4;

fn soon() -> Wait {
    Wait::after(Duration::from_secs(20))
}

/// Comes to the next turn, and makes the mesh of its epoch.
fn recover(recovery: &mut Recovery) -> Vec<Option<i32>> {
    let terms = Terms::default();
    let arrival = Arrival { call: "dm_recover()", terms: &terms, has_state: true, lost: &[], suspects: &[] };
    assert_eq!(recovery.come(&arrival, &soon()).unwrap(), Outcome::Epoch);
    assert_eq!(recovery.make(Ok(()), &soon()).unwrap(), Made::Whole);
    recovery.epoch().seats.iter().map(|holder| holder.as_ref().map(|holder: &Incarnation| holder.rank)).collect()
}

/// Rank 3 ends its world, and then rank 1 does. A call of the others in the world fails each time,
/// and they go on by a decision.
fn ranks_end_one_after_the_other(method: &str) {
    // Rank 0 may serve the store, so it stays until rank 2 has read the last verdict.
    let done = Barrier::new(2);
    std::thread::scope(|threads| {
        for rank in 0..SIZE {
            let done = &done;
            threads.spawn(move || {
                let options = JoinOptions::ranked(rank, SIZE).timeout(Duration::from_secs(20)).init_method(method);
                let world = World::join("cpu", &options).unwrap();
                let first = Epoch::first(SIZE, Replicas { sizes: vec![SIZE], dim: 0 }, &[0, 1, 2, 3]);
                let mut recovery = world.recovery(first).unwrap();
                if rank == 3 {
                    return world.leave();
                }
                let error = world.barrier(None).unwrap_err();
                assert_eq!((error.status(), error.lost()), (Status::PeerLost, &[3][..]), "{error}");
                assert_eq!(recover(&mut recovery), [Some(0), Some(1), Some(2), None]);
                if rank == 1 {
                    return world.leave();
                }
                assert_eq!(recover(&mut recovery), [Some(0), None, Some(2), None]);
                assert_eq!((recovery.epoch_number(), recovery.epoch().without.as_slice()), (2, &[1, 3][..]));
                done.wait();
            });
        }
    });
}

#[test]
fn over_the_server_of_rank_0() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    ranks_end_one_after_the_other(&format!("tcp://127.0.0.1:{port}"));
}

#[test]
fn over_a_folder() {
    let path = format!("{}/recovery-{}", env!("CARGO_TARGET_TMPDIR"), std::process::id());
    ranks_end_one_after_the_other(&format!("file://{path}"));
}
