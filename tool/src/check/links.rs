//! Rank 0 draws the conclusions from the times of the pairs: the slowest pair and host, and the
//! pairs, ranks and hosts that are slow.
//!
//! The peers of a pair within a host are the other pairs within hosts. The peers of a pair between
//! hosts are the other pairs between hosts. Where most pairs of a host or of a rank are slow, the
//! host or the rank is named in place of its pairs.

use std::collections::{BTreeMap, BTreeSet};

use super::measure::{Timed, gbps};
use super::meetings;
use super::notes::Notes;
use super::report::{Pair, PairEvidence, Pairs, SlowHost, SlowPair, SlowRank};
use super::slow::{Rule, batch_medians, median};

/// A pair of a culprit is named beside the culprit if it takes at least this many times as long as
/// the culprit's other slow pairs.
const MUCH: f64 = 3.0;

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
        let kind = Kind { name: kind, pairs: &pairs, hosts };
        links.pairs.extend(kind.summaries(of));
        let slow = kind.slow(factor, ranks_per_core);
        kind.blame(slow, &mut links);
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

    /// The slow pairs by their index, each with the sizes at which it is slow.
    fn slow(&self, factor: f64, ranks_per_core: f64) -> BTreeMap<usize, Vec<PairEvidence>> {
        let mut slow: BTreeMap<usize, Vec<PairEvidence>> = BTreeMap::new();
        for size in 0..self.sizes() {
            let seconds: Vec<f64> = self.pairs.iter().map(|pair| self.seconds(pair, size)).collect();
            let of_others = |place: usize| {
                let others = seconds.iter().enumerate().filter(|(other, _)| *other != place);
                median(others.map(|(_, seconds)| *seconds).collect())
            };
            for found in Rule::new(factor, ranks_per_core, self.iterations(size)).slow(&self.batches(size)) {
                slow.entry(found.place).or_default().push(PairEvidence {
                    bytes: self.pairs[found.place].timed[size].bytes,
                    times: found.times,
                    seconds: seconds[found.place],
                    median_seconds: of_others(found.place),
                });
            }
        }
        slow
    }

    /// Finds the hosts and ranks most of whose pairs are slow, and the slow pairs of the others.
    fn blame(&self, mut slow: BTreeMap<usize, Vec<PairEvidence>>, links: &mut Links) {
        if self.name == "between hosts" {
            for (host, of, places) in self.culprits(&slow, |rank| self.host(rank)) {
                let evidence = typical(&places, &slow);
                let times = times(&evidence);
                links.slow_hosts.push(SlowHost { host, times, slow_pairs: places.len(), pairs: of, evidence });
                remove_explained(&mut slow, &places);
            }
        }
        for (rank, _, places) in self.culprits(&slow, |rank| rank) {
            let times = median(places.iter().filter_map(|place| Some(times(slow.get(place)?))).collect());
            let host = self.host(rank);
            links.slow_ranks.push(SlowRank { rank: rank as i32, host, evidence: "pairs", times: Some(times) });
            remove_explained(&mut slow, &places);
        }
        links.slow_pairs.extend(slow.into_iter().map(|(place, evidence)| {
            let ranks = self.pairs[place].ranks;
            let hosts = ranks.map(|rank| self.host(rank));
            SlowPair { kind: self.name, ranks, hosts, times: times(&evidence), evidence }
        }));
    }

    /// The culprits. A culprit is a rank or host with slow pairs with several other ranks or
    /// hosts, if more than half of its pairs are slow. Each culprit comes with the number of its
    /// pairs and with its slow pairs.
    fn culprits<T: Ord + Clone>(
        &self,
        slow: &BTreeMap<usize, Vec<PairEvidence>>,
        unit: impl Fn(usize) -> T,
    ) -> Vec<(T, usize, BTreeSet<usize>)> {
        let mut found: BTreeMap<T, (usize, BTreeSet<usize>, BTreeSet<T>)> = BTreeMap::new();
        for (place, pair) in self.pairs.iter().enumerate() {
            for [mine, other] in [pair.ranks, [pair.ranks[1], pair.ranks[0]]] {
                let (pairs, places, others) = found.entry(unit(mine)).or_default();
                *pairs += 1;
                if slow.contains_key(&place) {
                    places.insert(place);
                    others.insert(unit(other));
                }
            }
        }
        let most = found.into_iter().filter(|(_, (of, places, others))| 2 * places.len() > *of && others.len() > 1);
        most.map(|(unit, (of, places, _))| (unit, of, places)).collect()
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

/// Removes the pairs of a culprit. A pair that is much slower than the culprit's other slow pairs
/// stays, because the culprit alone does not explain it.
fn remove_explained(slow: &mut BTreeMap<usize, Vec<PairEvidence>>, places: &BTreeSet<usize>) {
    let known: BTreeMap<usize, f64> =
        places.iter().filter_map(|place| Some((*place, times(slow.get(place)?)))).collect();
    slow.retain(|place, _| {
        let Some(mine) = known.get(place) else { return true };
        let others = known.iter().filter(|(other, _)| *other != place).map(|(_, times)| *times);
        *mine > MUCH * median(others.collect())
    });
}

/// The medians of the evidence against several pairs, by size.
fn typical(places: &BTreeSet<usize>, slow: &BTreeMap<usize, Vec<PairEvidence>>) -> Vec<PairEvidence> {
    let mut by_size: BTreeMap<usize, Vec<&PairEvidence>> = BTreeMap::new();
    for evidence in places.iter().filter_map(|place| slow.get(place)).flatten() {
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
            assert!((times - seconds / median_seconds).abs() < 1e-9, "{hosts}: {times} {seconds} {median_seconds}");
            assert!(found.slow_pairs.is_empty() && found.slow_ranks.is_empty(), "{hosts}");
            assert!(found.host_gbps["c"] < found.host_gbps["a"], "{hosts}");
        }
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
