//! Improves the plan of a small world by swaps of two ranks, as long as a swap helps.

use super::locations::Topology;

/// The most steps from one start. A step looks at one rank of a group at one level.
const MAX_STEPS: usize = 1_000_000;
/// The most ranks of a world in which swaps are tried.
const MAX_RANKS: usize = 1024;

/// Whether there are few enough ranks for swaps.
pub(super) fn is_small(topology: &Topology) -> bool {
    topology.world_size() <= MAX_RANKS
}

/// Swaps ranks of each of these rank arrays with one another and with ranks that are not in it, in
/// a fixed order, as long as that lowers the cost. Returns the cheapest result, and of equal ones
/// the first. The arrays come with their costs, the cheapest first.
pub(super) fn improved(topology: &Topology, shape: &[usize], weights: &[u64], kept: Vec<(u128, Vec<i32>)>) -> Vec<i32> {
    let size: usize = shape.iter().product();
    let helps = is_small(topology) && kept[0].0 > 0;
    let starts = if helps { kept.len() } else { 1 };
    let mut best: Option<(u128, Vec<i32>)> = None;
    for (cost, ranks) in kept.into_iter().take(starts) {
        let mut swaps = Swaps { topology, shape, weights, size, all: with_spare(topology, &ranks), saved: 0, steps: 0 };
        while helps && swaps.pass() {}
        let cost = cost - swaps.saved;
        if best.as_ref().is_none_or(|(least, _)| cost < *least) {
            swaps.all.truncate(size);
            best = Some((cost, swaps.all));
        }
    }
    best.map_or_else(Vec::new, |(_, ranks)| ranks)
}

/// Returns these ranks, followed by the others of the world.
fn with_spare(topology: &Topology, ranks: &[i32]) -> Vec<i32> {
    let mut used = vec![false; topology.world_size()];
    ranks.iter().for_each(|rank| used[*rank as usize] = true);
    let spare = (0..topology.world_size() as i32).filter(|rank| !used[*rank as usize]);
    ranks.iter().copied().chain(spare).collect()
}

/// The swaps from one start.
struct Swaps<'a> {
    /// The domains of the world's ranks.
    topology: &'a Topology,
    /// The shape of the mesh.
    shape: &'a [usize],
    /// The traffic of each dimension.
    weights: &'a [u64],
    /// The number of ranks of the mesh.
    size: usize,
    /// The ranks of the mesh, row-major, followed by the others of the world.
    all: Vec<i32>,
    /// The cost that the swaps have saved, in hop-bytes.
    saved: u128,
    /// How many steps were taken.
    steps: usize,
}

impl Swaps<'_> {
    /// Tries every pair once. Returns whether another pass may help.
    fn pass(&mut self) -> bool {
        let mut better = false;
        for a in 0..self.size {
            for b in a + 1..self.all.len() {
                if self.steps > MAX_STEPS {
                    return false;
                }
                if self.same_place(a, b) {
                    continue;
                }
                let before = self.together(a, b);
                self.all.swap(a, b);
                let after = self.together(a, b);
                if after > before {
                    // Each pair counts in both orders.
                    self.saved += 2 * (after - before);
                    better = true;
                } else {
                    self.all.swap(a, b);
                }
            }
        }
        better
    }

    /// Whether the ranks at these two positions are in one domain of every level, so a swap changes
    /// nothing.
    fn same_place(&self, a: usize, b: usize) -> bool {
        let nearest = self.topology.levels().checked_sub(1);
        nearest.is_none_or(|level| self.topology.domain(level, self.all[a]) == self.topology.domain(level, self.all[b]))
    }

    /// Returns how much of the cost is saved, because ranks of the groups of these two positions
    /// lie in one domain. When a swap adds to this, it lowers the cost by as much. Groups that hold
    /// both positions are left out, because a swap inside a group changes nothing.
    fn together(&mut self, a: usize, b: usize) -> u128 {
        let mut saved = 0;
        let mut stride = self.size;
        for (dim, &size) in self.shape.iter().enumerate() {
            stride /= size;
            let start = |position: usize| position - position / stride % size * stride;
            if size == 1 || (b < self.size && start(a) == start(b)) {
                continue;
            }
            for position in [a, b].into_iter().filter(|position| *position < self.size) {
                let group: Vec<i32> = (0..size).map(|index| self.all[start(position) + index * stride]).collect();
                // Only pairs of the position with the others of its group count, because the pairs
                // of the others with one another do not change.
                for level in 0..self.topology.levels() {
                    let mine = self.topology.domain(level, self.all[position]);
                    let near = group.iter().filter(|rank| self.topology.domain(level, **rank) == mine).count() - 1;
                    saved += u128::from(self.weights[dim]) * near as u128 * (self.size / size) as u128;
                }
                self.steps += size * self.topology.levels();
            }
        }
        saved
    }
}
