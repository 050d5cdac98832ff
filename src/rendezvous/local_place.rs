//! Finds where each rank is among the ranks of its host. Each rank says on which host it is, rank 0
//! computes the places of all ranks, and each rank reads its own place.

use std::collections::{HashMap, HashSet};

use super::agreement::Round;
use super::launcher::Place;
use crate::error::{Error, Result};
use crate::wait::Wait;

/// Where a rank is among the ranks of its host, and its host among the hosts of the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LocalPlace {
    /// The rank in the host. This is the number that the launcher or the options say. The ranks
    /// without such a number get the free numbers, the lowest world rank first.
    pub local_rank: usize,
    /// The number of ranks on the host.
    pub local_size: usize,
    /// The number of the host. The hosts are numbered in the order of the lowest rank on each.
    pub host: usize,
    /// The number of hosts.
    pub num_hosts: usize,
}

impl LocalPlace {
    /// Returns the place of a rank when all ranks are known to be on one host, or when no other
    /// rank can be asked.
    pub(super) fn on_one_host(place: &Place) -> LocalPlace {
        let local_size = place.local_size.filter(|_| place.local_rank.is_some()).unwrap_or(place.size);
        LocalPlace { local_rank: place.local_rank.unwrap_or(place.rank), local_size, host: 0, num_hosts: 1 }
    }

    /// Returns the place of a process that joins a running job whose ranks were on `num_hosts`
    /// hosts. No rank is asked, so the place follows from what the launcher says. Several hosts
    /// are taken to have equal numbers of ranks in a row. The local rank is 0 where the launcher
    /// says none.
    pub(super) fn of_newcomer(place: &Place, num_hosts: usize) -> LocalPlace {
        if num_hosts <= 1 {
            return LocalPlace::on_one_host(place);
        }
        let local_size = place.local_size.unwrap_or(1).max(1);
        let host = (place.rank / local_size).min(num_hosts - 1);
        LocalPlace { local_rank: place.local_rank.unwrap_or(0), local_size, host, num_hosts }
    }

    /// Returns the place of this rank. `host` is equal on the ranks of one host, and on no others.
    /// Every rank of `round` makes this call. A rank other than 0 needs two store operations.
    /// Rank 0 needs three for each rank, but it asks for many ranks at once.
    pub(super) fn find(round: &Round, place: &Place, host: &str, wait: &Wait) -> Result<LocalPlace> {
        let Place { rank, size, .. } = *place;
        let mine = said(place.local_rank, host);
        let (from, to) = (|rank: usize| format!("on/{rank}"), |rank: usize| format!("local/{rank}"));
        let text = if rank > 0 {
            round.publish(&from(rank), mine.as_bytes(), wait)?;
            text(round.fetch(&to(rank), 0, wait)?)
        } else {
            let keys: Vec<(String, i32)> = (1..size).map(|rank| (from(rank), rank as i32)).collect();
            let others = round.fetch_each(&keys, wait)?.into_iter().map(text);
            let said: Vec<String> = std::iter::once(mine).chain(others).collect();
            let places = places(&said);
            for (rank, place) in places.iter().enumerate().skip(1) {
                round.publish(&to(rank), place.to_text().as_bytes(), wait)?;
            }
            places[0].to_text()
        };
        let found = LocalPlace::from_text(&text)
            .ok_or_else(|| Error::store(format!("rank 0 published {text:?}, which is no place on a host")))?;
        // A launcher that numbers the ranks of a host also knows best how many it has put there.
        let told = place.local_size.filter(|_| place.local_rank.is_some());
        Ok(LocalPlace { local_size: told.unwrap_or(found.local_size), ..found })
    }

    fn to_text(self) -> String {
        format!("{} {} {} {}", self.local_rank, self.local_size, self.host, self.num_hosts)
    }

    fn from_text(text: &str) -> Option<LocalPlace> {
        let numbers = text.split(' ').map(|number| number.parse().ok()).collect::<Option<Vec<usize>>>()?;
        let [local_rank, local_size, host, num_hosts] = numbers[..] else { return None };
        Some(LocalPlace { local_rank, local_size, host, num_hosts })
    }
}

/// Returns what a rank publishes: the local rank that it was told, or a dash, and its host.
fn said(local_rank: Option<usize>, host: &str) -> String {
    let told = local_rank.map_or_else(|| "-".to_owned(), |local_rank| local_rank.to_string());
    format!("{told} {host}")
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the place of every rank. `said` holds what each rank has published, in rank order.
fn places(said: &[String]) -> Vec<LocalPlace> {
    let said: Vec<(Option<usize>, &str)> = said
        .iter()
        .map(|said| said.split_once(' ').unwrap_or(("-", said)))
        .map(|(told, host)| (told.parse().ok(), host))
        .collect();
    let mut numbers: HashMap<&str, usize> = HashMap::new();
    let mut hosts: Vec<Vec<usize>> = Vec::new();
    for (rank, (_, name)) in said.iter().enumerate() {
        let host = *numbers.entry(name).or_insert(hosts.len());
        if host == hosts.len() {
            hosts.push(Vec::new());
        }
        hosts[host].push(rank);
    }
    let unknown = LocalPlace { local_rank: 0, local_size: 0, host: 0, num_hosts: hosts.len() };
    let mut places = vec![unknown; said.len()];
    for (host, ranks) in hosts.iter().enumerate() {
        let taken: HashSet<usize> = ranks.iter().filter_map(|rank| said[*rank].0).collect();
        let mut free = (0..).filter(|number| !taken.contains(number));
        for rank in ranks {
            let local_rank = said[*rank].0.or_else(|| free.next()).unwrap_or(0);
            places[*rank] = LocalPlace { local_rank, local_size: ranks.len(), host, ..unknown };
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns local rank, local size and host of each rank.
    fn found(ranks: &[(Option<usize>, &str)]) -> Vec<(usize, usize, usize)> {
        let said: Vec<String> = ranks.iter().map(|(told, host)| said(*told, host)).collect();
        let places = places(&said);
        assert!(places.iter().all(|place| LocalPlace::from_text(&place.to_text()) == Some(*place)));
        places.iter().map(|place| (place.local_rank, place.local_size, place.host)).collect()
    }

    #[test]
    fn ranks_are_numbered_within_their_host() {
        let blocks = [(None, "a"), (None, "a"), (None, "b"), (None, "b"), (None, "b")];
        assert_eq!(found(&blocks), [(0, 2, 0), (1, 2, 0), (0, 3, 1), (1, 3, 1), (2, 3, 1)]);
        let cyclic = [(None, "b"), (None, "a"), (None, "b"), (None, "a")];
        assert_eq!(found(&cyclic), [(0, 2, 0), (0, 2, 1), (1, 2, 0), (1, 2, 1)]);
    }

    #[test]
    fn numbers_that_were_told_stay_and_the_others_are_free_ones() {
        let reversed = [(Some(1), "a"), (Some(0), "a"), (Some(3), "b")];
        assert_eq!(found(&reversed), [(1, 2, 0), (0, 2, 0), (3, 1, 1)]);
        // An explicit 0 looks like no number in dm_world_options.
        let explicit = [(Some(3), "a"), (Some(2), "a"), (Some(1), "a"), (None, "a")];
        assert_eq!(found(&explicit), [(3, 4, 0), (2, 4, 0), (1, 4, 0), (0, 4, 0)]);
        assert_eq!(found(&[(None, "a"), (Some(0), "a"), (None, "a")]), [(1, 3, 0), (0, 3, 0), (2, 3, 0)]);
    }
}
