//! A job goes on after a loss, with a spare in the place of the lost rank.

use std::time::Duration;

use devicemesh::comm::{CallOptions, Operator, RecoverOptions, View};
use devicemesh::error::Status;

use super::in_worlds;

#[test]
fn a_spare_takes_the_place_of_a_lost_rank() {
    in_worlds(4, |world, rank| {
        let mesh = View::init(world, &[3], &["dp"]).unwrap();
        let told = mesh.root_comms().recovered();
        assert_eq!((told.epoch, told.previous_epoch, told.has_joined), (0, Some(0), false));
        assert_eq!(told.new_coordinate.is_some(), rank < 3);
        if rank == 1 {
            return world.abort().unwrap();
        }
        // The spare may come after the ranks of the mesh.
        let patience = Duration::from_secs(60);
        let options =
            RecoverOptions::default().dim("dp").min_size(3).replace(patience).timeout(patience).has_state(true);
        if rank < 3 {
            let gone = mesh.flatten(Some("gone"), &CallOptions::default()).map(drop).unwrap_err();
            assert_eq!(gone.status(), Status::PeerLost, "{gone}");
            let wrong = mesh.recover(&RecoverOptions::default().dim("tp")).map(drop).unwrap_err();
            assert_eq!(wrong.status(), Status::NotFound, "{wrong}");
        }
        // Both ranks of the mesh have refused a call of their own, which the other is told of.
        let next = loop {
            match mesh.recover(&options) {
                Ok(next) => break next,
                Err(refused) => assert_eq!(refused.status(), Status::NotFound, "{refused}"),
            }
        };
        let told = next.root_comms().recovered();
        assert_eq!((&told.lost_ranks[..], &told.joined_ranks[..], told.has_joined), (&[1][..], &[3][..], rank == 3));
        assert_eq!((next.mesh().ranks(), told.state_root), (vec![0, 3, 2], Some(0)));
        assert_eq!(told.old_coordinate, (rank < 3).then(|| vec![rank as i32]));
        let mut one = [1.0f32];
        next.all_reduce("dp", &mut one, Operator::Sum).unwrap();
        assert_eq!(one, [3.0]);
        assert_eq!(mesh.slice(&["dp"]).map(drop).unwrap_err().status(), Status::Aborted);
        world.finalize(None).unwrap();
    });
}
