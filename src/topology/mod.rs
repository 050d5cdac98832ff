//! Plans which world rank goes where in a mesh, so that the dimensions with the most traffic stay
//! inside the closest domains of a machine. It is pure arithmetic, so every rank that asks with the
//! same arguments gets the same plan.
//!
//! # Cost
//!
//! A location is a path of domains from far to near, "rack1/host3/nvl0". The domains of level
//! `l` are those that the first `l + 1` components name. Each rank exchanges `traffic[d]` along
//! dimension `d`, evenly with the ranks of its group. A unit of traffic costs one for each level at
//! which it leaves a domain. This is the hop-bytes metric of Agarwal, Sharma and Kale,
//! "Topology-aware task mapping for reducing communication contention on large parallel machines",
//! IPDPS 2006, on the tree of domains. With `n` ranks in the mesh, in integers:
//!
//! ```text
//! pairs[d][l] = ordered pairs of ranks that share a group along d and no domain of level l
//! cost        = sum over d and l of  traffic[d] * pairs[d][l] * n / size[d]
//! ```
//!
//! Without traffic from the caller, `traffic[d]` is the product of the sizes of dimensions 0 to d.
//! So a later dimension outweighs each one before it by its own size.
//!
//! # Plan
//!
//! The world's ranks are put in a line in which the ranks of each domain are neighbours (lines.rs),
//! and a way to walk the line fills the mesh. Two kinds of walks are tried: boxes that nest as the
//! domains do, which dynamic programming over the levels chooses (boxes.rs), and row-major walks
//! with the dimensions in any order. (With equal traffic per pair, no set of so many positions
//! holds more pairs than the first ones of a row-major walk whose largest dimension is the fastest:
//! J. H. Lindsey, "Assignment of numbers to vertices", American Mathematical Monthly 71, 1964. This
//! result is about one domain, not about the sum over all.) Each walk is measured by its true cost,
//! and in small worlds swaps improve the cheapest ones. The first of the cheapest is the plan.
//! Ranks 0 to n - 1 in order are the first candidate, so a plan never costs more than they do. Work
//! is bounded by counts, never by time.

mod boxes;
mod cost;
mod lines;
mod locations;
mod search;
mod swaps;

pub use cost::{DimCost, LevelCost};
pub use locations::{MAX_LEVELS, Topology};

use crate::error::{Error, Result};
use crate::layout::row_major;
use cost::Meter;

/// A rank for each position of a mesh, and what it costs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plan {
    /// World ranks, row-major in the mesh's shape.
    pub ranks: Vec<i32>,
    /// The cost of each dimension.
    pub dims: Vec<DimCost>,
    /// The cost of ranks 0 to n - 1 in order.
    pub identity_cost: u128,
    /// The number of ranks of the world.
    pub world_size: usize,
    /// The number of domains of each level.
    pub domains: Vec<usize>,
}

/// Plans a mesh of that shape over a world whose rank `r` is at `locations[r]`. `traffic` has a
/// weight for each dimension.
///
/// ```
/// use devicemesh::topology::plan;
/// // Two hosts of four, but the launcher dealt the ranks out in turn.
/// let places: Vec<&str> = (0..8).map(|rank| ["host0", "host1"][rank % 2]).collect();
/// let plan = plan(&places, &[2, 4], None).unwrap();
/// assert_eq!(plan.ranks, [0, 2, 4, 6, 1, 3, 5, 7]); // the second dimension stays inside a host
/// // Along dimension 0 each of 4 groups has 2 ordered pairs across hosts: traffic 2 * 8 pairs * 8 ranks / size 2.
/// assert_eq!((plan.dims[0].levels[0].pairs, plan.dims[0].cost, plan.dims[1].cost), (8, 64, 0));
/// // As it was, each group of dimension 1 had 8 pairs across: 8 * 16 * 8 / 4, and those of dimension 0 none.
/// assert_eq!((plan.cost(), plan.identity_cost), (64, 256));
/// ```
pub fn plan(locations: &[&str], shape: &[usize], traffic: Option<&[u32]>) -> Result<Plan> {
    let size = row_major(shape)?.iter().map(|dim| dim.size()).product::<usize>();
    if locations.len() > i32::MAX as usize || size > locations.len() {
        return Err(Error::invalid(format!(
            "a mesh of shape ({}) has {size} ranks, but there are {} locations",
            shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
            locations.len()
        )));
    }
    let weights: Vec<u64> = match traffic {
        Some(traffic) if traffic.len() == shape.len() => traffic.iter().map(|weight| u64::from(*weight)).collect(),
        Some(traffic) => {
            return Err(Error::invalid(format!("{} traffic weights for {} dimensions", traffic.len(), shape.len())));
        }
        None => default_traffic(shape),
    };
    let topology = Topology::new(locations)?;
    let mut meter = Meter::new(&topology, shape, &weights);
    let (ranks, identity_cost) = search::best(&topology, shape, &weights, &mut meter);
    let dims = meter.measure(&ranks);
    let domains = (0..topology.levels()).map(|level| topology.domains(level)).collect();
    Ok(Plan { ranks, dims, identity_cost, world_size: locations.len(), domains })
}

/// Returns the weights when the caller gives none: the product of the sizes up to and with each
/// dimension.
fn default_traffic(shape: &[usize]) -> Vec<u64> {
    let mut weight = 1;
    shape
        .iter()
        .map(|size| {
            weight *= *size as u64;
            weight
        })
        .collect()
}

impl Plan {
    /// Returns the cost of all dimensions.
    pub fn cost(&self) -> u128 {
        self.dims.iter().map(|dim| dim.cost).sum()
    }

    /// Whether at every level each domain holds an equal box of the mesh. Then each group along a
    /// dimension has the same number of ranks in each domain that it touches.
    pub fn is_even(&self) -> bool {
        self.dims.iter().all(|dim| dim.levels.iter().all(|level| level.even))
    }

    /// Writes the plan's cost as one line of JSON. Its lists run over the levels, from far to near.
    ///
    /// ```
    /// let plan = devicemesh::topology::plan(&["a", "a", "b", "b"], &[2, 2], Some(&[1, 10])).unwrap();
    /// assert_eq!(
    ///     plan.report(),
    ///     r#"{"ranks":4,"world_size":4,"domains":[2],"cost":8,"identity_cost":8,"even":true,"dimensions":["#.to_owned()
    ///         + r#"{"size":2,"traffic":1,"groups":2,"crossing_groups":[2],"most_domains":[2],"pairs":[4],"cost":8},"#
    ///         + r#"{"size":2,"traffic":10,"groups":2,"crossing_groups":[0],"most_domains":[1],"pairs":[0],"cost":0}]}"#
    /// );
    /// ```
    pub fn report(&self) -> String {
        fn list<T: ToString>(values: impl Iterator<Item = T>) -> String {
            values.map(|value| value.to_string()).collect::<Vec<_>>().join(",")
        }
        let dims = self.dims.iter().map(|dim| {
            format!(
                r#"{{"size":{},"traffic":{},"groups":{},"crossing_groups":[{}],"most_domains":[{}],"pairs":[{}],"cost":{}}}"#,
                dim.size,
                dim.traffic,
                dim.groups,
                list(dim.levels.iter().map(|level| level.crossing_groups)),
                list(dim.levels.iter().map(|level| level.most_domains)),
                list(dim.levels.iter().map(|level| level.pairs)),
                dim.cost
            )
        });
        format!(
            r#"{{"ranks":{},"world_size":{},"domains":[{}],"cost":{},"identity_cost":{},"even":{},"dimensions":[{}]}}"#,
            self.ranks.len(),
            self.world_size,
            list(self.domains.iter()),
            self.cost(),
            self.identity_cost,
            self.is_even(),
            list(dims)
        )
    }
}
