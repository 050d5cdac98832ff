//! The cost of a rank array.

use super::locations::Topology;

/// How many borders of domains the groups along one dimension cross at one level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LevelCost {
    /// The number of groups with ranks in more than one domain.
    pub crossing_groups: usize,
    /// The most domains that one group touches.
    pub most_domains: usize,
    /// The number of ordered pairs of ranks of one group that lie in different domains, over all
    /// groups.
    pub pairs: u128,
    /// Whether every group has the same number of ranks in every domain it touches.
    pub even: bool,
}

/// The cost of one dimension.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DimCost {
    /// The number of ranks of a group.
    pub size: usize,
    /// The weight of the dimension.
    pub traffic: u64,
    /// Number of groups.
    pub groups: usize,
    /// The crossings at each level, from the far level to the near one.
    pub levels: Vec<LevelCost>,
    /// The sum of traffic * pairs * groups over all levels. It fits, because with at most 2^31
    /// ranks pairs * groups is less than 2^62 for each of 32 levels.
    pub cost: u128,
}

/// Measures rank arrays of one shape. One measurement takes levels * dimensions * ranks steps.
pub(super) struct Meter<'a> {
    /// The domains of the world's ranks.
    topology: &'a Topology,
    /// The shape of the mesh.
    shape: &'a [usize],
    /// The traffic of each dimension.
    weights: &'a [u64],
    /// How many ranks of the group lie in each domain. All are zero between two groups.
    counts: Vec<u32>,
    /// The domain of each position at one level.
    labels: Vec<u32>,
}

impl<'a> Meter<'a> {
    pub(super) fn new(topology: &'a Topology, shape: &'a [usize], weights: &'a [u64]) -> Meter<'a> {
        let most = (0..topology.levels()).map(|level| topology.domains(level)).max().unwrap_or(0);
        Meter { topology, shape, weights, counts: vec![0; most], labels: Vec::new() }
    }

    /// Measures what each dimension costs with these ranks. There is one rank for each position,
    /// row-major.
    pub(super) fn measure(&mut self, ranks: &[i32]) -> Vec<DimCost> {
        self.measure_below(ranks, u128::MAX).unwrap_or_default()
    }

    /// Returns the cost of all dimensions, when it is less than `bound`.
    pub(super) fn cost_below(&mut self, ranks: &[i32], bound: u128) -> Option<u128> {
        Some(self.measure_below(ranks, bound)?.iter().map(|dim| dim.cost).sum())
    }

    fn measure_below(&mut self, ranks: &[i32], bound: u128) -> Option<Vec<DimCost>> {
        let dim = |(&size, &traffic): (&usize, &u64)| DimCost {
            size,
            traffic,
            groups: ranks.len() / size,
            levels: Vec::new(),
            cost: 0,
        };
        let mut dims: Vec<DimCost> = self.shape.iter().zip(self.weights).map(dim).collect();
        let mut total = 0;
        for level in 0..self.topology.levels() {
            self.labels.clear();
            self.labels.extend(ranks.iter().map(|rank| self.topology.domain(level, *rank)));
            let mut stride = ranks.len();
            for dim in &mut dims {
                stride /= dim.size;
                let crossed = groups(&self.labels, dim.size, stride, &mut self.counts);
                let cost = u128::from(dim.traffic) * crossed.pairs * dim.groups as u128;
                dim.cost += cost;
                total += cost;
                dim.levels.push(crossed);
                if total >= bound {
                    return None;
                }
            }
        }
        Some(dims)
    }
}

/// Counts how many borders the groups of `size` positions, `stride` apart, cross. `counts` is zero
/// before and after.
fn groups(labels: &[u32], size: usize, stride: usize, counts: &mut [u32]) -> LevelCost {
    let mut crossed = LevelCost { crossing_groups: 0, most_domains: 1, pairs: 0, even: true };
    if size == 1 {
        return crossed;
    }
    let mut expected = None;
    for block in labels.chunks(size * stride) {
        for first in 0..stride {
            let (mut domains, mut together) = (0, 0u64);
            for label in block[first..].iter().step_by(stride) {
                let count = &mut counts[*label as usize];
                domains += usize::from(*count == 0);
                // These are ordered pairs in one domain, among them each rank with itself: (k +
                // 1)^2 - k^2.
                together += 2 * u64::from(*count) + 1;
                *count += 1;
            }
            for label in block[first..].iter().step_by(stride) {
                let count = std::mem::take(&mut counts[*label as usize]);
                if count > 0 {
                    crossed.even &= *expected.get_or_insert(count) == count;
                }
            }
            crossed.crossing_groups += usize::from(domains > 1);
            crossed.most_domains = crossed.most_domains.max(domains);
            crossed.pairs += u128::from((size as u64).pow(2) - together);
        }
    }
    crossed
}
