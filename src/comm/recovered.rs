//! The result of a recovery, as programs ask for it.

use crate::mesh::Mesh;
use crate::rendezvous::Epoch;

/// The result of the recovery that made a mesh.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recovered {
    /// The epoch of the mesh. The job starts in epoch 0.
    pub epoch: u64,
    /// The epoch of the mesh that this rank had before; `None` where it had none.
    pub previous_epoch: Option<u64>,
    /// The world ranks that were lost or left out since `previous_epoch`, in ascending order, also
    /// those that another process has replaced.
    pub lost_ranks: Vec<i32>,
    /// The world ranks of the mesh that need the state of the training, in ascending order.
    pub joined_ranks: Vec<i32>,
    /// This rank's coordinate in the mesh before; `None` where it had none.
    pub old_coordinate: Option<Vec<i32>>,
    /// This rank's coordinate in the mesh; `None` where it is not in the mesh.
    pub new_coordinate: Option<Vec<i32>>,
    /// The rank along the dimension of replicas that has the state of this rank's part; `None`
    /// where no rank has it, and where this rank is not in the mesh.
    pub state_root: Option<usize>,
    /// Whether this rank is one of `joined_ranks`.
    pub has_joined: bool,
    /// The members of the epoch; `None` where no recovery made the mesh.
    pub(super) members: Option<Epoch>,
}

impl Recovered {
    /// Returns the answer for a mesh that no recovery made.
    pub(super) fn none(mesh: &Mesh, epoch: u64) -> Recovered {
        let coordinate = coordinate(mesh);
        Recovered {
            epoch,
            previous_epoch: Some(epoch),
            old_coordinate: coordinate.clone(),
            state_root: coordinate.is_some().then_some(0),
            new_coordinate: coordinate,
            ..Recovered::default()
        }
    }

    /// Returns the answer for `mesh` of `epoch`, whose number is `number`. `before` is the mesh
    /// that this rank had before, with the number and the processes of its epoch; `None` for a
    /// newcomer.
    pub(super) fn of((number, epoch): (u64, &Epoch), mesh: &Mesh, before: Option<(&Mesh, u64, &Epoch)>) -> Recovered {
        let members = epoch.members();
        let members_before = before.map(|(.., epoch)| epoch.members()).unwrap_or_default();
        let lost = members_before.into_iter().filter(|process| !members.contains(process));
        Recovered {
            epoch: number,
            previous_epoch: before.map(|(_, number, _)| number),
            lost_ranks: lost.map(|process| process.rank).collect(),
            joined_ranks: epoch.stateless.iter().map(|process| process.rank).collect(),
            old_coordinate: before.and_then(|(mesh, ..)| coordinate(mesh)),
            new_coordinate: coordinate(mesh),
            state_root: state_root(epoch, mesh.rank()),
            has_joined: epoch.stateless.iter().any(|process| process.rank == mesh.rank()),
            members: Some(epoch.clone()),
        }
    }
}

/// This rank's coordinate in a mesh; `None` where the rank is not in it.
fn coordinate(mesh: &Mesh) -> Option<Vec<i32>> {
    let coordinate = mesh.is_member().then(|| mesh.coordinate())?.ok()?;
    Some(coordinate.into_iter().map(|index| index as i32).collect())
}

/// The lowest index along the dimension of replicas whose rank, at the position of `me` inside its
/// replica, has the state.
fn state_root(epoch: &Epoch, me: i32) -> Option<usize> {
    let in_mesh = epoch.in_mesh();
    let holders = || epoch.seats.iter().enumerate().filter_map(|(seat, holder)| Some((seat, (*holder)?)));
    let (mine, _) = holders().find(|(_, holder)| holder.rank == me && in_mesh.contains(holder))?;
    let position = epoch.replicas.position_of(mine);
    // The seats of one position are in the order of their replicas.
    let same = holders().filter(|(seat, _)| epoch.replicas.position_of(*seat) == position);
    let mut same = same.filter(|(_, holder)| in_mesh.contains(holder));
    same.position(|(_, holder)| !epoch.stateless.contains(&holder))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::Incarnation;
    use crate::rendezvous::Replicas;

    #[test]
    fn the_state_comes_from_the_lowest_index_that_has_it() {
        // Ranks 0 to 5 as (replica=3, shard=2), of which replica 0 is not in the mesh.
        let replicas = Replicas { sizes: vec![3, 2], dim: 0 };
        let mut epoch = Epoch::first(7, replicas, &[0, 1, 2, 3, 4, 5]);
        epoch.without = vec![0];
        epoch.stateless = vec![Incarnation::first(3)];
        let roots: Vec<_> = (0..7).map(|rank| state_root(&epoch, rank)).collect();
        assert_eq!(roots, [None, None, Some(0), Some(1), Some(0), Some(1), None]);
        epoch.stateless = vec![Incarnation::first(2), Incarnation::first(4)];
        assert_eq!(state_root(&epoch, 2), None);
    }
}
