//! What is slow: which groups of a dimension, and which ranks, take longer than their peers, again and again.
//!
//! A group is compared with the other groups of its dimension, which do the same at the same time; a rank with all other ranks. It is slow when in
//! every batch it takes more than `factor` times the median of the others, and more than `floor` longer. The floor keeps out what is a large part of
//! very little: the clock, an interrupt, and on a host with more ranks than cores the time slices that a rank has to wait for its turn.

/// A difference per call that is none, in seconds: a call of few bytes varies by as much between groups that are placed alike.
const FLOOR: f64 = 20e-6;
/// A time slice of a busy host's scheduler, in seconds (Linux's base slice for several cores is 3 to 4 ms).
const SLICE: f64 = 4e-3;

#[derive(Debug, Clone, Copy)]
pub struct Rule {
    pub factor: f64,
    /// Seconds.
    pub floor: f64,
}

/// One that is slow, by its place among its peers, and how many times as long as theirs its median batch takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slow {
    pub place: usize,
    pub times: f64,
}

impl Rule {
    /// `crowding`: how many ranks share a core on the most crowded host. Where a batch has `iterations`, a call's share of what its rank waits for its turn
    /// is as much less.
    pub fn new(factor: f64, crowding: f64, iterations: u32) -> Rule {
        let slices = if crowding > 1.0 { SLICE * crowding.ceil() * 2.0 / f64::from(iterations.max(1)) } else { 0.0 };
        Rule { factor, floor: FLOOR + slices }
    }

    /// Which of the peers are slow. Each has its seconds per call in every batch, the same number of batches for all.
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
                if mine > self.factor * others && mine - others > self.floor {
                    ratios[*place].push(mine / others);
                }
            }
        }
        let always = ratios.into_iter().enumerate().filter(|(_, ratios)| ratios.len() == batches);
        always.map(|(place, ratios)| Slow { place, times: median(ratios) }).collect()
    }
}

/// The median of `count` sorted values without that at `without`.
fn median_without(count: usize, without: usize, value: impl Fn(usize) -> f64) -> f64 {
    let others = count - 1;
    let at = |index: usize| value(if index < without { index } else { index + 1 });
    if others % 2 == 1 { at(others / 2) } else { (at(others / 2 - 1) + at(others / 2)) / 2.0 }
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => values[odd / 2],
        even => (values[even / 2 - 1] + values[even / 2]) / 2.0,
    }
}

/// The ranks that are in a slow group along every dimension where something is slow, if those are two at least: where the lines cross.
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
        // (2, 2, 2), rank 5: its groups along the three dimensions.
        let groups = [vec![vec![1, 5]], vec![vec![5, 7]], vec![vec![4, 5]]];
        assert_eq!(crossing(&groups), [5]);
        assert_eq!(crossing(&[vec![vec![1, 5]], vec![]]), [] as [i32; 0], "one line crosses nothing");
    }
}
