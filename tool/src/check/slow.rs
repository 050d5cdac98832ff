//! Finds the groups of a dimension, and the ranks, that take longer than their peers in every
//! batch.
//!
//! The peers of a group are the other groups of its dimension, which run the collectives at the
//! same time. The peers of a rank are all other ranks. A group or rank is slow when in every batch
//! it takes more than `factor` times the median of its peers, and more than `floor` longer. Without
//! the floor a small disturbance would count in a short batch: the resolution of the clock, an
//! interrupt, and on a host with more ranks than cores the time slices for which a rank waits.

/// A difference per call, in seconds, that never counts as slow. Small calls differ by this much
/// between groups that are placed alike.
const FLOOR: f64 = 20e-6;
/// A time slice of the scheduler on a busy host, in seconds. On Linux it is 3 to 4 ms with several
/// cores.
const SLICE: f64 = 4e-3;

/// The rule by which a group or rank is slow.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    /// The least time of a slow one, divided by the median of its peers.
    pub factor: f64,
    /// The least difference between its time and that median, in seconds.
    pub floor: f64,
}

/// A group or rank that is slow.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slow {
    /// Its index in the list of those that were compared.
    pub place: usize,
    /// The time of its median batch, divided by the time of its peers.
    pub times: f64,
}

impl Rule {
    /// The rule for batches of that many calls. `ranks_per_core` tells how many ranks share a core
    /// on the host where they are most. A rank then waits for its turn, and each call of a batch
    /// has a part of that time.
    pub fn new(factor: f64, ranks_per_core: f64, iterations: u32) -> Rule {
        let slices =
            if ranks_per_core > 1.0 { SLICE * ranks_per_core.ceil() * 2.0 / f64::from(iterations.max(1)) } else { 0.0 };
        Rule { factor, floor: FLOOR + slices }
    }

    /// Returns those of `peers` that are slow. Each of `peers` lists the seconds per call of every
    /// batch, and all have equally many batches.
    pub fn slow(&self, peers: &[&[f64]]) -> Vec<Slow> {
        let batches = peers.iter().map(|batches| batches.len()).min().unwrap_or(0);
        if peers.len() < 2 || batches == 0 {
            return Vec::new();
        }
        let mut ratios = vec![Vec::with_capacity(batches); peers.len()];
        for batch in 0..batches {
            let mut order: Vec<usize> = (0..peers.len()).collect();
            order.sort_by(|a, b| peers[*a][batch].total_cmp(&peers[*b][batch]));
            for (at, place) in order.iter().enumerate() {
                let others = median_without(order.len(), at, |index| peers[order[index]][batch]);
                let mine = peers[*place][batch];
                if self.is_slow(mine, others) {
                    ratios[*place].push(mine / others);
                }
            }
        }
        let always = ratios.into_iter().enumerate().filter(|(_, ratios)| ratios.len() == batches);
        always.map(|(place, ratios)| Slow { place, times: median(ratios) }).collect()
    }

    /// If a place is slow, returns how many times as long as its peers it takes, in its median
    /// batch. `mine` lists its seconds per call for every batch, and `peers` the medians of its
    /// peers.
    pub fn times(&self, mine: &[f64], peers: &[f64]) -> Option<f64> {
        let batches = mine.len().min(peers.len());
        let slow = mine.iter().zip(peers).filter(|(mine, peers)| self.is_slow(**mine, **peers));
        let ratios: Vec<f64> = slow.map(|(mine, peers)| mine / peers).collect();
        (batches > 0 && ratios.len() == batches).then(|| median(ratios))
    }

    fn is_slow(&self, mine: f64, peers: f64) -> bool {
        mine > self.factor * peers && mine - peers > self.floor
    }
}

/// The median of `count` sorted values without the one at `without`.
fn median_without(count: usize, without: usize, value: impl Fn(usize) -> f64) -> f64 {
    let others = count - 1;
    let at = |index: usize| value(if index < without { index } else { index + 1 });
    if others % 2 == 1 { at(others / 2) } else { (at(others / 2 - 1) + at(others / 2)) / 2.0 }
}

/// The median. 0 where there is no value.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => values[odd / 2],
        even => (values[even / 2 - 1] + values[even / 2]) / 2.0,
    }
}

/// The median of each batch, from the seconds of each group or pair by batch.
pub fn batch_medians(peers: &[&[f64]]) -> Vec<f64> {
    let batches = peers.iter().map(|batches| batches.len()).min().unwrap_or(0);
    (0..batches).map(|batch| median(peers.iter().map(|batches| batches[batch]).collect())).collect()
}

/// The ranks in which slow groups cross: those that are in a slow group along every dimension that
/// has slow groups. There is none where fewer than two dimensions have slow groups.
pub fn crossing(groups: &[Vec<Vec<i32>>]) -> Vec<i32> {
    let slow: Vec<&Vec<Vec<i32>>> = groups.iter().filter(|groups| !groups.is_empty()).collect();
    if slow.len() < 2 {
        return Vec::new();
    }
    let in_all = |rank: &i32| slow.iter().all(|groups| groups.iter().any(|group| group.contains(rank)));
    slow[0].iter().flatten().copied().filter(in_all).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: Rule = Rule { factor: 1.5, floor: 20e-6 };

    fn places(rule: Rule, peers: &[&[f64]]) -> Vec<usize> {
        rule.slow(peers).iter().map(|slow| slow.place).collect()
    }

    #[test]
    fn one_that_is_slow_in_every_batch_is_found() {
        let well = [1.0e-3, 1.1e-3, 0.9e-3];
        let slow = [2.0e-3, 2.4e-3, 1.9e-3];
        assert_eq!(places(RULE, &[&well, &slow, &well, &well]), [1]);
        assert_eq!(places(RULE, &[&well, &slow]), [1], "of two the slower one");
        let found = RULE.slow(&[&well, &slow, &well]);
        assert!((found[0].times - 2.11).abs() < 0.1, "{found:?}");
    }

    #[test]
    fn several_that_are_slow_are_found_while_most_are_well() {
        let (well, slow) = ([1.0e-3; 5], [3.0e-3; 5]);
        assert_eq!(places(RULE, &[&slow, &well, &well, &slow, &well, &well, &well]), [0, 3]);
    }

    #[test]
    fn one_good_batch_acquits() {
        let well = [1.0e-3; 5];
        assert_eq!(places(RULE, &[&well, &[9e-3, 9e-3, 1.2e-3, 9e-3, 9e-3], &well]), [] as [usize; 0]);
    }

    #[test]
    fn microseconds_are_nothing_however_many_times_as_long() {
        assert_eq!(places(RULE, &[&[5e-6; 5], &[20e-6; 5], &[5e-6; 5]]), [] as [usize; 0]);
        assert_eq!(places(RULE, &[&[5e-6; 5], &[26e-6; 5], &[5e-6; 5]]), [1]);
    }

    #[test]
    fn where_ranks_share_cores_their_turns_do_not_count() {
        let (well, late) = ([1e-3; 5], [9e-3; 5]);
        assert_eq!(places(Rule::new(1.5, 4.0, 1), &[&well, &late, &well]), [] as [usize; 0]);
        assert_eq!(places(Rule::new(1.5, 0.5, 1), &[&well, &late, &well]), [1]);
        assert_eq!(
            places(Rule::new(1.5, 4.0, 50), &[&well, &late, &well]),
            [1],
            "nobody waits so long in each of 50 calls"
        );
    }

    #[test]
    fn alone_nothing_is_slow() {
        assert!(RULE.slow(&[&[1.0]]).is_empty() && RULE.slow(&[]).is_empty() && RULE.slow(&[&[], &[]]).is_empty());
    }

    #[test]
    fn a_rank_is_where_the_slow_groups_of_the_dimensions_cross() {
        // These are the groups of rank 5 along the three dimensions of a (2, 2, 2) mesh.
        let groups = [vec![vec![1, 5]], vec![vec![5, 7]], vec![vec![4, 5]]];
        assert_eq!(crossing(&groups), [5]);
        assert_eq!(crossing(&[vec![vec![1, 5]], vec![]]), [] as [i32; 0], "one line crosses nothing");
    }
}
