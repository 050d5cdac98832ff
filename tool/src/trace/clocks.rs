//! Puts the clocks of several hosts on one scale.
//!
//! The monotonic clock of a host counts from its own start. The real time of the hosts differs by
//! what their time service leaves, often by milliseconds, which is longer than a collective. The
//! collectives themselves tell more: an all-reduce ends on no rank before it has begun on every
//! rank. So each one that ranks of two hosts have made together bounds the difference of the two
//! clocks from both sides:
//!
//! ```text
//! end on A   >= begin on B + difference        difference: what is added to a time of B
//! end on B + difference >= begin on A
//! ```
//!
//! The largest lower bound and the smallest upper bound of all these calls enclose the difference,
//! and their middle is taken. This is Cristian's way to read a remote clock (Distributed Computing
//! 3, 1989), with a collective in place of a question and its answer. Hosts that share no such call
//! keep the difference of their real times.

use std::collections::BTreeMap;

/// A collective that all ranks of a group have made, on one of its hosts, in nanoseconds of the
/// host's clock.
#[derive(Debug, Clone, Copy)]
pub struct OnHost {
    /// The host, as an index.
    pub host: usize,
    /// When the last rank of the host began the call.
    pub begun: f64,
    /// When the first rank of the host ended the call.
    pub ended: f64,
}

/// For each pair of hosts, the smaller index first, the bounds of what is added to a time of the
/// second host so that it fits the times of the first one.
#[derive(Default)]
pub struct Bounds(BTreeMap<(usize, usize), (f64, f64)>);

impl Bounds {
    /// Takes in a collective. Its hosts are in the order of their indices.
    pub fn meet(&mut self, hosts: &[OnHost]) {
        for (at, first) in hosts.iter().enumerate() {
            for second in &hosts[at + 1..] {
                let bounds = self.0.entry((first.host, second.host));
                let (least, most) = bounds.or_insert((f64::NEG_INFINITY, f64::INFINITY));
                *least = least.max(first.begun - second.ended);
                *most = most.min(first.ended - second.begun);
            }
        }
    }
}

/// For each host, what is added to its times so that they fit those of host 0. `real` gives the
/// same by the real times alone.
pub fn offsets(real: &[f64], bounds: Bounds) -> Vec<f64> {
    // The pairs whose difference is known best come first. Each joins two sets of hosts, as in
    // Kruskal's spanning tree.
    let mut pairs: Vec<_> = bounds.0.into_iter().collect();
    pairs.sort_by(|(_, one), (_, other)| (one.1 - one.0).total_cmp(&(other.1 - other.0)));
    let mut set: Vec<usize> = (0..real.len()).collect();
    let mut offsets = real.to_vec();
    for ((first, second), (least, most)) in pairs {
        let (kept, moved) = (set[first].min(set[second]), set[first].max(set[second]));
        if kept == moved || !(least + most).is_finite() {
            continue;
        }
        // Times of the second host plus this fit the times of the first host.
        let difference = (least + most) / 2.0;
        let shift = match set[second] == moved {
            true => offsets[first] + difference - offsets[second],
            false => offsets[second] - difference - offsets[first],
        };
        for host in 0..set.len() {
            if set[host] == moved {
                set[host] = kept;
                offsets[host] += shift;
            }
        }
    }
    offsets
}

#[cfg(test)]
mod tests {
    use super::{Bounds, OnHost, offsets};

    /// A call that two hosts make together. The clock of the second one is `behind` the first.
    fn meet(bounds: &mut Bounds, hosts: (usize, usize), begun: (f64, f64), ended: (f64, f64), behind: f64) {
        let first = OnHost { host: hosts.0, begun: begun.0, ended: ended.0 };
        bounds.meet(&[first, OnHost { host: hosts.1, begun: begun.1 - behind, ended: ended.1 - behind }]);
    }

    #[test]
    fn the_tightest_calls_tell_the_difference() {
        let mut bounds = Bounds::default();
        meet(&mut bounds, (0, 1), (0.0, 90.0), (100.0, 101.0), 5000.0);
        meet(&mut bounds, (0, 1), (290.0, 200.0), (300.0, 302.0), 5000.0);
        let found = offsets(&[0.0, 4000.0], bounds);
        assert_eq!(found[0], 0.0);
        assert!((found[1] - 5000.0).abs() <= 12.0, "{found:?}");
    }

    #[test]
    fn hosts_that_never_meet_the_first_one_are_placed_through_others() {
        // Host 2 meets host 1 only, and host 3 nobody.
        let mut bounds = Bounds::default();
        meet(&mut bounds, (1, 2), (0.0, 0.0), (2.0, 2.0), 300.0);
        meet(&mut bounds, (0, 1), (0.0, 0.0), (2.0, 2.0), -70.0);
        assert_eq!(offsets(&[0.0, 9.0, 9.0, 9.0], bounds), [0.0, -70.0, 230.0, 9.0]);
    }
}
