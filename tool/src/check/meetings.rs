//! Chooses which ranks meet in pairs, and in which round. In a round every rank meets at most one
//! other rank, so all pairs of a round can run at the same time.
//!
//! First the ranks of each host meet each other, on all hosts at the same time. Then the hosts meet
//! each other: where two hosts meet, the first rank of one meets the first rank of the other, the
//! second the second, and so on. Both are round-robin tournaments, in which n units meet in n - 1
//! rounds (n where n is odd).

use std::collections::BTreeMap;

/// The most rounds within hosts, and the most between hosts. Up to 64 units all meet each other.
/// Where there are more, each meets 63 others, because more rounds would take long and rank 0
/// would get too many times.
const ROUNDS: usize = 63;

/// The world ranks of each host in ascending order, by name.
pub type ByHost<'a> = BTreeMap<&'a str, Vec<usize>>;

/// The rank that `me` meets in each round. `None` where it meets nobody.
pub fn meetings(hosts: &[String], me: usize) -> Vec<Option<usize>> {
    let by_host = by_host(hosts);
    let Some(mine) = hosts.get(me).and_then(|host| by_host.get(host.as_str())) else { return Vec::new() };
    let largest = by_host.values().map(Vec::len).max().unwrap_or(0);
    let at = mine.iter().position(|rank| *rank == me).unwrap_or(0);
    let all: Vec<&Vec<usize>> = by_host.values().collect();
    let host = all.iter().position(|ranks| *ranks == mine).unwrap_or(0);
    let within = chosen(rounds(largest)).map(|round| {
        let peer = if round < rounds(mine.len()) { partner(mine.len(), round, at) } else { None };
        peer.map(|peer| mine[peer])
    });
    let between = chosen(rounds(all.len())).map(|round| {
        let other = partner(all.len(), round, host)?;
        all[other].get(at).copied()
    });
    within.chain(between).collect()
}

/// The number of pairs within hosts and between hosts, with the pairs for which there is no round.
pub fn pairs(hosts: &[String]) -> (usize, usize) {
    let mut sizes: Vec<usize> = by_host(hosts).values().map(Vec::len).collect();
    let within = sizes.iter().map(|ranks| ranks * (ranks - 1) / 2).sum();
    // Two hosts have as many pairs as the smaller one has ranks.
    sizes.sort_unstable();
    let larger = sizes.len();
    let between = sizes.iter().enumerate().map(|(at, ranks)| ranks * (larger - 1 - at)).sum();
    (within, between)
}

/// Sorts the ranks by their hosts. `hosts` has the host of each rank.
pub fn by_host(hosts: &[String]) -> ByHost<'_> {
    let mut by_host = ByHost::new();
    for (rank, host) in hosts.iter().enumerate() {
        by_host.entry(host).or_default().push(rank);
    }
    by_host
}

/// The rounds of a tournament of that many units.
fn rounds(units: usize) -> usize {
    match units {
        0 | 1 => 0,
        even if even % 2 == 0 => even - 1,
        odd => odd,
    }
}

/// The rounds that are played: at most [`ROUNDS`] of them, spread evenly.
fn chosen(rounds: usize) -> impl Iterator<Item = usize> {
    let count = rounds.min(ROUNDS);
    (0..count).map(move |index| index * rounds / count)
}

/// The unit that `me` meets in a round. One unit stays in its place and the others go round in a
/// circle. With an odd number of units that place is empty, and the unit that would meet it has no
/// partner.
fn partner(units: usize, round: usize, me: usize) -> Option<usize> {
    let circle = if units % 2 == 0 { units - 1 } else { units };
    let other = match me {
        last if last == circle => round,
        alone if alone == round => circle,
        other => (2 * round + circle - other) % circle,
    };
    (other < units).then_some(other)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The pairs of all rounds, each once. Fails where the two ranks of a pair do not meet each
    /// other in the same round.
    fn all(hosts: &[String]) -> BTreeSet<(usize, usize)> {
        let each: Vec<Vec<Option<usize>>> = (0..hosts.len()).map(|rank| meetings(hosts, rank)).collect();
        let mut found = BTreeSet::new();
        for (rank, rounds) in each.iter().enumerate() {
            assert_eq!(rounds.len(), each[0].len());
            for (round, peer) in rounds.iter().enumerate() {
                let Some(peer) = *peer else { continue };
                assert_eq!(each[peer][round], Some(rank));
                if rank < peer {
                    assert!(found.insert((rank, peer)), "{rank} meets {peer} twice");
                }
            }
        }
        found
    }

    fn hosts(places: &str) -> Vec<String> {
        places.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn on_one_host_everybody_meets_everybody_once() {
        for ranks in 1..12 {
            let places = vec!["a".to_owned(); ranks];
            assert_eq!(all(&places).len(), ranks * (ranks - 1) / 2);
            assert_eq!(pairs(&places), (ranks * (ranks - 1) / 2, 0));
        }
    }

    #[test]
    fn hosts_meet_rank_by_rank() {
        let places = hosts("a b a b c");
        let wanted = [(0, 1), (0, 2), (0, 4), (1, 3), (1, 4), (2, 3)];
        assert_eq!(all(&places), wanted.into());
        assert_eq!(pairs(&places), (2, 4));
    }

    #[test]
    fn of_many_hosts_each_meets_as_many_others() {
        let places: Vec<String> = (0..200).map(|host| format!("h{host}")).collect();
        let found = all(&places);
        assert_eq!(pairs(&places), (0, 200 * 199 / 2));
        assert_eq!(found.len(), 100 * ROUNDS);
    }
}
