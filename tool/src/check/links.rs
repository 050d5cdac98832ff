//! Rank 0 draws the conclusions from the times of the pairs: the slowest pair and host, and the
//! pairs, ranks and hosts that are slow.
//!
//! The peers of a pair within a host are the other pairs within hosts. The peers of a pair between
//! hosts are the other pairs between hosts. Where most pairs of a host or of a rank are slow, the
//! host or the rank is named in place of its pairs. A host or rank that is in many of the pairs is
//! compared with the pairs that it is not in, because its own pairs would shift the median.

use std::collections::{BTreeMap, BTreeSet};

use super::measure::{Timed, gbps};
use super::meetings;
use super::notes::Notes;
use super::report::{Pair, PairEvidence, Pairs, SlowHost, SlowPair, SlowRank};
use super::slow::{Rule, batch_medians, median};

/// A pair of a culprit is named beside the culprit if it takes at least this many times as long as
/// the culprit's other slow pairs.
const MUCH: f64 = 3.0;

/// A host or rank that is in at least this part of the pairs is compared with the pairs that it is
/// not in. There are at most eight such hosts, because each pair has two. For the others the median
/// of all other pairs does as well, and it is quicker to find.
const MANY: f64 = 0.25;

/// Slow pairs by their index, each with the sizes at which it is slow.
type SlowPairs = BTreeMap<usize, Vec<PairEvidence>>;

/// The conclusions from the times of the pairs.
#[derive(Default)]
pub struct Links {
    pub pairs: Vec<Pairs>,
    pub slow_pairs: Vec<SlowPair>,
    pub slow_hosts: Vec<SlowHost>,
    pub slow_ranks: Vec<SlowRank>,
    /// The median bandwidth between each host and the others, with the largest size.
    pub host_gbps: BTreeMap<String, f64>,
}

/// A pair with its times by size.
struct Measured<'a> {
    ranks: [usize; 2],
    timed: &'a [Timed],
}

/// Draws the conclusions. `hosts` has the host of each rank.
pub fn assess(notes: &[Notes], hosts: &[String], factor: f64, ranks_per_core: f64) -> Links {
    let mut links = Links::default();
    let all = notes.iter().enumerate().flat_map(|(rank, notes)| notes.met.iter().map(move |met| (rank, met)));
    let all = all.map(|(rank, met)| Measured { ranks: [rank, met.peer], timed: &met.timed });
    let is_between = |pair: &Measured<'_>| hosts[pair.ranks[0]] != hosts[pair.ranks[1]];
    let (between, within): (Vec<_>, Vec<_>) = all.partition(is_between);
    let (all_within, all_between) = meetings::pairs(hosts);
    for (kind, pairs, of) in [("within hosts", within, all_within), ("between hosts", between, all_between)] {
        let kind = Kind { name: kind, pairs: &pairs, hosts, factor, ranks_per_core };
        links.pairs.extend(kind.summaries(of));
        kind.blame(&mut links);
        if kind.name == "between hosts" {
            links.host_gbps = kind.host_gbps();
        }
    }
    links
}

/// All measured pairs within hosts, or between hosts.
struct Kind<'a> {
    name: &'static str,
    pairs: &'a [Measured<'a>],
    hosts: &'a [String],
    /// A slow pair takes at least this many times as long as its peers.
    factor: f64,
    /// How many ranks share a core on the host where they are most.
    ranks_per_core: f64,
}

/// A host or rank most of whose pairs are slow.
struct Culprit<T> {
    unit: T,
    /// The number of its pairs.
    pairs: usize,
    /// Its slow pairs.
    slow: SlowPairs,
}

impl Kind<'_> {
    fn sizes(&self) -> usize {
        self.pairs.iter().map(|pair| pair.timed.len()).min().unwrap_or(0)
    }

    fn host(&self, rank: usize) -> String {
        self.hosts[rank].clone()
    }

    /// The seconds of each pair at a size, by batch.
    fn batches(&self, size: usize) -> Vec<&[f64]> {
        self.pairs.iter().map(|pair| &pair.timed[size].seconds[..]).collect()
    }

    /// The smallest number of calls of a batch at a size.
    fn iterations(&self, size: usize) -> u32 {
        self.pairs.iter().map(|pair| pair.timed[size].iterations).min().unwrap_or(1)
    }

    fn seconds(&self, pair: &Measured<'_>, size: usize) -> f64 {
        median(pair.timed[size].seconds.clone())
    }

    /// The median and the slowest pair of each size. `of` is the number of pairs that there are,
    /// measured or not.
    fn summaries(&self, of: usize) -> Vec<Pairs> {
        let summary = |size: usize| {
            let slowest = self.pairs.iter().max_by(|a, b| self.seconds(a, size).total_cmp(&self.seconds(b, size)))?;
            let bytes = slowest.timed[size].bytes;
            let seconds = median(self.pairs.iter().map(|pair| self.seconds(pair, size)).collect());
            let slowest_seconds = self.seconds(slowest, size);
            Some(Pairs {
                kind: self.name,
                bytes,
                pairs: self.pairs.len(),
                left_out: of.saturating_sub(self.pairs.len()),
                iterations: self.iterations(size),
                seconds,
                gbps: gbps(bytes, seconds),
                batch_seconds: batch_medians(&self.batches(size)),
                slowest: Pair {
                    ranks: slowest.ranks,
                    hosts: slowest.ranks.map(|rank| self.host(rank)),
                    seconds: slowest_seconds,
                    gbps: gbps(bytes, slowest_seconds),
                },
            })
        };
        (0..self.sizes()).filter_map(summary).collect()
    }

    fn rule(&self, size: usize) -> Rule {
        Rule::new(self.factor, self.ranks_per_core, self.iterations(size))
    }

    fn evidence(&self, place: usize, size: usize, times: f64, median_seconds: f64) -> PairEvidence {
        let pair = &self.pairs[place];
        PairEvidence { bytes: pair.timed[size].bytes, times, seconds: self.seconds(pair, size), median_seconds }
    }

    /// The pairs that are slow beside all other pairs.
    fn slow(&self) -> SlowPairs {
        let mut slow = SlowPairs::new();
        for size in 0..self.sizes() {
            let seconds: Vec<f64> = self.pairs.iter().map(|pair| self.seconds(pair, size)).collect();
            let of_others = |place: usize| {
                let others = seconds.iter().enumerate().filter(|(other, _)| *other != place);
                median(others.map(|(_, seconds)| *seconds).collect())
            };
            for found in self.rule(size).slow(&self.batches(size)) {
                let evidence = self.evidence(found.place, size, found.times, of_others(found.place));
                slow.entry(found.place).or_default().push(evidence);
            }
        }
        slow
    }

    /// The pairs at `mine` that are slow beside the pairs that are not there.
    fn slow_beside_the_rest(&self, mine: &BTreeSet<usize>) -> SlowPairs {
        let rest: Vec<&Measured<'_>> =
            self.pairs.iter().enumerate().filter(|(place, _)| !mine.contains(place)).map(|(_, pair)| pair).collect();
        let mut slow = SlowPairs::new();
        for size in 0..self.sizes() {
            let peers = batch_medians(&rest.iter().map(|pair| &pair.timed[size].seconds[..]).collect::<Vec<_>>());
            let usual = median(rest.iter().map(|pair| self.seconds(pair, size)).collect());
            for place in mine {
                if let Some(times) = self.rule(size).times(&self.pairs[*place].timed[size].seconds, &peers) {
                    slow.entry(*place).or_default().push(self.evidence(*place, size, times, usual));
                }
            }
        }
        slow
    }

    /// Finds the hosts and ranks most of whose pairs are slow, and the slow pairs of the others.
    fn blame(&self, links: &mut Links) {
        let mut slow = self.slow();
        let mut explained = BTreeSet::new();
        if self.name == "between hosts" {
            for culprit in self.culprits(&slow, &explained, |rank| self.host(rank)) {
                let evidence = typical(&culprit.slow);
                let times = times(&evidence);
                let (slow_pairs, pairs) = (culprit.slow.len(), culprit.pairs);
                links.slow_hosts.push(SlowHost { host: culprit.unit.clone(), times, slow_pairs, pairs, evidence });
                explained.extend(explained_by(&culprit));
            }
            slow.retain(|place, _| !explained.contains(place));
        }
        for culprit in self.culprits(&slow, &explained, |rank| rank) {
            let (rank, host) = (culprit.unit, self.host(culprit.unit));
            let times = median(culprit.slow.values().map(|evidence| times(evidence)).collect());
            links.slow_ranks.push(SlowRank { rank: rank as i32, host, evidence: "pairs", times: Some(times) });
            let of_rank = explained_by(&culprit);
            slow.retain(|place, _| !of_rank.contains(place));
        }
        links.slow_pairs.extend(slow.into_iter().map(|(place, evidence)| {
            let ranks = self.pairs[place].ranks;
            let hosts = ranks.map(|rank| self.host(rank));
            SlowPair { kind: self.name, ranks, hosts, times: times(&evidence), evidence }
        }));
    }

    /// The culprits. A culprit is a rank or host with slow pairs with several other ranks or
    /// hosts, if more than half of its pairs are slow. The pairs of `slow` are slow beside all
    /// other pairs. The pairs of `explained` have a culprit already.
    fn culprits<T: Ord + Clone>(
        &self,
        slow: &SlowPairs,
        explained: &BTreeSet<usize>,
        unit: impl Fn(usize) -> T,
    ) -> Vec<Culprit<T>> {
        let mut pairs_of: BTreeMap<T, BTreeSet<usize>> = BTreeMap::new();
        for (place, pair) in self.pairs.iter().enumerate() {
            for rank in pair.ranks {
                pairs_of.entry(unit(rank)).or_default().insert(place);
            }
        }
        let judged = |(unit_here, mine): (T, BTreeSet<usize>)| {
            let is_in_many = mine.len() as f64 >= MANY * self.pairs.len() as f64 && mine.len() < self.pairs.len();
            let mut slow = match is_in_many {
                true => self.slow_beside_the_rest(&mine),
                false => mine.iter().filter_map(|place| Some((*place, slow.get(place)?.clone()))).collect(),
            };
            slow.retain(|place, _| !explained.contains(place));
            let others: BTreeSet<T> = slow.keys().flat_map(|place| self.pairs[*place].ranks.map(&unit)).collect();
            // `others` has the unit itself, too.
            let is_culprit = 2 * slow.len() > mine.len() && others.len() > 2;
            is_culprit.then_some(Culprit { unit: unit_here, pairs: mine.len(), slow })
        };
        pairs_of.into_iter().filter_map(judged).collect()
    }

    /// The median bandwidth of the pairs of each host, with the largest size.
    fn host_gbps(&self) -> BTreeMap<String, f64> {
        let Some(size) = self.sizes().checked_sub(1) else { return BTreeMap::new() };
        let mut by_host: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for pair in self.pairs {
            for rank in pair.ranks {
                let bandwidth = gbps(pair.timed[size].bytes, self.seconds(pair, size));
                by_host.entry(self.host(rank)).or_default().push(bandwidth);
            }
        }
        by_host.into_iter().map(|(host, bandwidths)| (host, median(bandwidths))).collect()
    }
}

/// The largest of these factors: the time of a pair, divided by the time of its peers.
fn times(evidence: &[PairEvidence]) -> f64 {
    evidence.iter().map(|found| found.times).fold(0.0, f64::max)
}

/// The pairs that a culprit explains. It does not explain a pair that is much slower than its other
/// slow pairs.
fn explained_by<T>(culprit: &Culprit<T>) -> BTreeSet<usize> {
    let known: BTreeMap<usize, f64> = culprit.slow.iter().map(|(place, evidence)| (*place, times(evidence))).collect();
    let is_explained = |place: &usize| {
        let others = known.iter().filter(|(other, _)| *other != place).map(|(_, times)| *times);
        known[place] <= MUCH * median(others.collect())
    };
    known.keys().copied().filter(is_explained).collect()
}

/// The medians of the evidence against several pairs, by size.
fn typical(slow: &SlowPairs) -> Vec<PairEvidence> {
    let mut by_size: BTreeMap<usize, Vec<&PairEvidence>> = BTreeMap::new();
    for evidence in slow.values().flatten() {
        by_size.entry(evidence.bytes).or_default().push(evidence);
    }
    let of =
        |all: &[&PairEvidence], value: fn(&PairEvidence) -> f64| median(all.iter().map(|one| value(one)).collect());
    let typical = by_size.into_iter().map(|(bytes, all)| PairEvidence {
        bytes,
        times: of(&all, |one| one.times),
        seconds: of(&all, |one| one.seconds),
        median_seconds: of(&all, |one| one.median_seconds),
    });
    typical.collect()
}

#[cfg(test)]
mod tests {
    use super::super::pairs::Met;
    use super::*;

    /// The notes of ranks on these hosts, when `seconds` is the time of an exchange of 1 MiB of two
    /// ranks.
    fn links(hosts: &str, seconds: impl Fn(usize, usize) -> f64) -> Links {
        let hosts: Vec<String> = hosts.split(' ').map(str::to_owned).collect();
        let notes: Vec<Notes> = (0..hosts.len())
            .map(|rank| {
                let mut peers: Vec<usize> = meetings::meetings(&hosts, rank).into_iter().flatten().collect();
                peers.retain(|peer| rank < *peer);
                let timed =
                    |peer: usize| Timed { bytes: 1 << 20, iterations: 10, seconds: vec![seconds(rank, peer); 3] };
                let met = |peer: usize| Met { peer, timed: vec![timed(peer)] };
                Notes { met: peers.into_iter().map(met).collect(), ..Notes::default() }
            })
            .collect();
        assess(&notes, &hosts, 1.5, 0.5)
    }

    #[test]
    fn a_slow_link_is_named_with_its_ranks() {
        let found = links("a b c d", |one, other| if (one, other) == (0, 2) { 9e-3 } else { 1e-3 });
        assert!(found.slow_hosts.is_empty() && found.slow_ranks.is_empty());
        assert_eq!(found.slow_pairs.len(), 1);
        assert_eq!((found.slow_pairs[0].ranks, found.slow_pairs[0].hosts[1].as_str()), ([0, 2], "c"));
        assert_eq!((found.pairs[0].slowest.ranks, found.pairs[0].pairs, found.pairs[0].left_out), ([0, 2], 6, 0));
        assert_eq!(found.pairs[0].seconds, 1e-3);
    }

    #[test]
    fn a_slow_host_is_named_in_place_of_its_pairs() {
        for hosts in ["a b c", "a b c d", "a a b b c c d d"] {
            let is_c = |rank: usize| hosts.split(' ').nth(rank) == Some("c");
            let found = links(hosts, |one, other| if is_c(one) != is_c(other) { 9e-3 } else { 1e-3 });
            let names: Vec<&str> = found.slow_hosts.iter().map(|slow| slow.host.as_str()).collect();
            assert_eq!(names, ["c"], "{hosts}");
            let PairEvidence { times, seconds, median_seconds, .. } = found.slow_hosts[0].evidence[0];
            assert_eq!((times, seconds, median_seconds), (9e-3 / 1e-3, 9e-3, 1e-3), "{hosts}");
            assert!(found.slow_pairs.is_empty() && found.slow_ranks.is_empty(), "{hosts}");
            assert!(found.host_gbps["c"] < found.host_gbps["a"], "{hosts}");
        }
    }

    #[test]
    fn a_host_in_most_pairs_is_compared_with_the_pairs_that_it_is_not_in() {
        // Two of the three pairs are those of c.
        let found = links("a b c", |_, other| if other == 2 { 1.9e-3 } else { 1e-3 });
        assert_eq!(found.slow_hosts.iter().map(|slow| slow.host.as_str()).collect::<Vec<_>>(), ["c"]);
        assert!(found.slow_pairs.is_empty() && found.slow_ranks.is_empty());
        let found = links("a a a", |_, other| if other == 2 { 1.9e-3 } else { 1e-3 });
        assert_eq!(found.slow_ranks.iter().map(|slow| slow.rank).collect::<Vec<_>>(), [2]);
        let found = links("a b c", |one, other| if (one, other) == (0, 1) { 1.9e-3 } else { 1e-3 });
        assert_eq!(found.slow_pairs.iter().map(|slow| slow.ranks).collect::<Vec<_>>(), [[0, 1]]);
        assert!(found.slow_hosts.is_empty() && found.slow_ranks.is_empty());
    }

    #[test]
    fn a_slow_link_of_a_slow_host_is_named_too() {
        let found = links("a b c d e", |one, other| match (one, other) {
            (0, 2) => 90e-3,
            (0, _) => 3e-3,
            _ => 1e-3,
        });
        assert_eq!(found.slow_hosts.iter().map(|slow| slow.host.as_str()).collect::<Vec<_>>(), ["a"]);
        assert_eq!(found.slow_pairs.iter().map(|slow| slow.ranks).collect::<Vec<_>>(), [[0, 2]]);
    }

    #[test]
    fn a_slow_rank_is_named_in_place_of_its_pairs() {
        let found = links("a a a a a", |one, other| if one == 3 || other == 3 { 9e-3 } else { 1e-3 });
        assert_eq!(found.slow_ranks.iter().map(|slow| slow.rank).collect::<Vec<_>>(), [3]);
        assert!(found.slow_pairs.is_empty() && found.slow_hosts.is_empty());
        // One network card of a host with two.
        let found = links("a a b b c c d d", |one, other| if one == 5 || other == 5 { 9e-3 } else { 1e-3 });
        assert_eq!(found.slow_ranks.iter().map(|slow| slow.rank).collect::<Vec<_>>(), [5]);
        assert!(found.slow_hosts.is_empty());
    }

    #[test]
    fn one_pair_has_no_peers() {
        let found = links("a b", |_, _| 1.0);
        assert!(found.slow_pairs.is_empty() && found.slow_hosts.is_empty());
        assert_eq!(found.pairs[0].slowest.seconds, 1.0);
    }
}
