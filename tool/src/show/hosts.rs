//! The hosts on which the ranks of a mesh run.

use std::collections::BTreeSet;

use super::arguments::HostSizes;
use crate::failure::Failure;

/// The largest number of ranks of a mesh. Larger meshes are refused, because the list of their
/// ranks takes much memory.
pub const MAX_RANKS: usize = 1 << 24;

/// The hosts on which the ranks run.
pub struct Hosts {
    pub sizes: HostSizes,
    /// Whether the ranks are dealt out to the hosts in turn.
    pub cyclic: bool,
}

impl Hosts {
    /// The host of a rank.
    pub fn of(&self, rank: i32) -> usize {
        match self.cyclic {
            true => rank as usize % self.sizes.hosts,
            false => rank as usize / self.sizes.each,
        }
    }

    /// The number of hosts that have some of these ranks.
    pub fn used_by(&self, ranks: &[i32]) -> usize {
        ranks.iter().map(|rank| self.of(*rank)).collect::<BTreeSet<_>>().len()
    }

    /// The number of ranks on all hosts. Fails where a mesh of that size has more.
    pub fn room_for(&self, size: usize) -> Result<usize, Failure> {
        let HostSizes { hosts, each } = self.sizes;
        match hosts * each {
            room if room > MAX_RANKS => {
                Err(Failure::new(2, format!("--hosts {hosts}x{each} has {room} ranks; show goes up to {MAX_RANKS}")))
            }
            room if room < size => Err(Failure::new(
                2,
                format!(
                    "the mesh has {size} ranks, --hosts {hosts}x{each} has {room}: give --hosts {}x{each}",
                    size.div_ceil(each)
                ),
            )),
            room => Ok(room),
        }
    }
}
