//! Reads location paths as domains by level.

use std::collections::HashMap;

use crate::error::{Error, Result};

/// The most components of a path.
pub const MAX_LEVELS: usize = 32;

/// The domains that each rank is in, from far to near. The domains of a level are numbered in the
/// order of their first ranks.
///
/// ```
/// use devicemesh::topology::Topology;
/// let topology = Topology::new(&["r0/h0", "r1/h0", "r0/h1", "r0/h0"]).unwrap();
/// assert_eq!((topology.levels(), topology.domains(0), topology.domains(1)), (2, 2, 3));
/// assert_eq!((0..4).map(|rank| topology.domain(1, rank)).collect::<Vec<_>>(), [0, 1, 2, 0]); // a host's name counts within its rack
/// // Where a path ends early, the ranks share one domain without a name at the levels below.
/// let topology = Topology::new(&["h0/a", "h0/b", "h1", "h1"]).unwrap();
/// assert_eq!((0..4).map(|rank| topology.domain(1, rank)).collect::<Vec<_>>(), [0, 1, 2, 2]);
/// assert!(Topology::new(&["h0//a"]).is_err());
/// ```
#[derive(Debug, Clone)]
pub struct Topology {
    /// The number of ranks.
    world_size: usize,
    /// The domain of each rank, by level and then by rank.
    labels: Vec<Vec<u32>>,
    /// The number of domains of each level.
    counts: Vec<usize>,
}

impl Topology {
    /// Reads the domains of these paths, of which there is one for each rank. Components are
    /// separated by "/" and are not empty. An empty path has no components.
    pub fn new(locations: &[&str]) -> Result<Topology> {
        let mut levels = 0;
        for (rank, path) in locations.iter().enumerate() {
            let depth = if path.is_empty() { 0 } else { path.split('/').count() };
            if depth > MAX_LEVELS {
                return Err(Error::invalid(format!(
                    "locations[{rank}] has {depth} components; at most {MAX_LEVELS} are allowed"
                )));
            }
            if let Some(at) = path.split('/').position(str::is_empty).filter(|_| depth > 0) {
                return Err(Error::invalid(format!(
                    "locations[{rank}] is {path:?}: component {at} is empty; a path is like \"rack1/host3/nvl0\""
                )));
            }
            levels = levels.max(depth);
        }
        let mut labels = vec![Vec::with_capacity(locations.len()); levels];
        let mut known: Vec<HashMap<(u32, &str), u32>> = vec![HashMap::new(); levels];
        for path in locations {
            // A path that ends early is continued with components that no path can have.
            let mut parts = path.split('/').filter(|part| !part.is_empty());
            let mut parent = 0;
            for level in 0..levels {
                let fresh = known[level].len() as u32;
                parent = *known[level].entry((parent, parts.next().unwrap_or(""))).or_insert(fresh);
                labels[level].push(parent);
            }
        }
        let counts = known.iter().map(HashMap::len).collect();
        Ok(Topology { world_size: locations.len(), labels, counts })
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the number of levels, which is the number of components of the longest path.
    pub fn levels(&self) -> usize {
        self.labels.len()
    }

    /// Returns the number of domains of a level.
    ///
    /// # Panics
    /// Panics where `level` is not below [`Topology::levels`], as a slice does.
    pub fn domains(&self, level: usize) -> usize {
        self.counts[level]
    }

    /// Returns the domain of a rank at a level.
    ///
    /// # Panics
    /// Panics where `level` is not below [`Topology::levels`], or `rank` is negative or not below
    /// [`Topology::world_size`], as a slice does.
    pub fn domain(&self, level: usize, rank: i32) -> u32 {
        self.labels[level][rank as usize]
    }
}
