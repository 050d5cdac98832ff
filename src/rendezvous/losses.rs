//! Which ranks of the world have gone: told by the store where it can know, else found out by those that share their host.
//!
//! Under `<prefix>/lost` stands how many have gone, and under `<prefix>/lost/<k>` the k-th. A server of this library writes them when a rank's
//! connections end. On another store each rank leaves its process number with its host's, and whoever waits for long looks whether the
//! processes of its own host live.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hostccl::machine;
use hostccl::process::{Process, ProcessId};

use super::agreement::WorldKeys;
use super::host::HostIdentity;
use super::store::Store;
use crate::digest::Fnv1a;
use crate::error::Result;
use crate::wait::{Deadline, Wait};

/// How long writing or reading such a note may take.
const SHORT: Duration = Duration::from_millis(500);

/// The ranks of one world that have gone, as far as this rank knows.
pub(super) struct Losses {
    store: Arc<dyn Store>,
    prefix: String,
    known: Mutex<Known>,
    local_ranks: Option<LocalRanks>,
}

#[derive(Default)]
struct Known {
    ranks: Vec<i32>,
    /// How many of the notes in the store were read. Not all ranks are known from there.
    read: usize,
}

impl Losses {
    /// Of a world whose keys begin with `prefix`; this rank's own end will be told from now on.
    pub(super) fn begin(
        store: Arc<dyn Store>,
        prefix: &str,
        leftovers: &WorldKeys,
        (rank, size): (usize, usize),
        wait: &Wait,
    ) -> Result<Losses> {
        let mut local_ranks = None;
        if size > 1 && !store.leave_last_word(&format!("{prefix}/lost"), rank.to_string().as_bytes(), wait)? {
            local_ranks = LocalRanks::join(&*store, prefix, leftovers, rank, wait)?;
        }
        Ok(Losses { store, prefix: prefix.to_owned(), known: Mutex::default(), local_ranks })
    }

    /// Of a world in which nobody can be lost.
    #[cfg(test)]
    pub(super) fn none(store: Arc<dyn Store>, prefix: &str) -> Losses {
        Losses { store, prefix: prefix.to_owned(), known: Mutex::default(), local_ranks: None }
    }

    /// Before all keys of the world.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The key under which the next loss will stand, and its number.
    pub(super) fn next(&self) -> (usize, String) {
        let number = self.known().read + 1;
        (number, format!("{}/lost/{number}", self.prefix))
    }

    /// What stood under that key.
    pub(super) fn note(&self, number: usize, value: &[u8]) {
        let rank: Option<i32> = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
        let mut known = self.known();
        // Another thread may have noted it meanwhile. What is no rank counts, so that the next one is found.
        if known.read + 1 == number {
            known.read = number;
            known.ranks.extend(rank);
        }
    }

    /// The first rank that is known to have gone and for which `is_missed` holds.
    pub(super) fn first(&self, is_missed: impl Fn(i32) -> bool) -> Option<i32> {
        self.known().ranks.iter().copied().find(|rank| is_missed(*rank))
    }

    /// All of those.
    pub(super) fn all(&self, is_missed: impl Fn(i32) -> bool) -> HashSet<i32> {
        self.known().ranks.iter().copied().filter(|rank| is_missed(*rank)).collect()
    }

    /// Looks at the processes of this host, where the store does not know; what is found out is told to all through the store.
    pub(super) fn look(&self, of_caller: &Wait) {
        let Some(local_ranks) = &self.local_ranks else { return };
        for rank in local_ranks.newly_dead(&*self.store, &of_caller.with_deadline(Deadline::after(SHORT))) {
            self.announce(rank);
        }
    }

    /// Tells all ranks through the store that one has gone.
    pub(super) fn announce(&self, rank: i32) {
        let wait = Wait::after(SHORT);
        let number = self.store.add(&format!("{}/lost", self.prefix), 1, &wait);
        let told = number.and_then(|number| {
            self.store.set(&format!("{}/lost/{number}", self.prefix), rank.to_string().as_bytes(), &wait)
        });
        // The store may have gone with that rank.
        if told.is_err() {
            self.known().ranks.push(rank);
        }
    }
}

/// The ranks of this host, by process.
struct LocalRanks {
    key: String,
    me: i32,
    found: Mutex<Vec<LocalRank>>,
}

struct LocalRank {
    rank: i32,
    process: Arc<Process>,
    told: bool,
}

impl LocalRanks {
    /// `None` where this process cannot tell which host it is on, or cannot see the processes there.
    fn join(
        store: &dyn Store,
        prefix: &str,
        leftovers: &WorldKeys,
        rank: usize,
        wait: &Wait,
    ) -> Result<Option<LocalRanks>> {
        let Some(here) = HostIdentity::here().ok().filter(|_| machine::broken_proc().is_none()) else {
            return Ok(None);
        };
        let host = Fnv1a::default().bytes(here.line().bytes()).value();
        let key = format!("{prefix}/host/{host:016x}");
        let process = ProcessId::current();
        let number = store.add(&key, 1, wait)?;
        let line = format!("{rank} {} {}", process.pid, process.start);
        leftovers.note(format!("{key}/{number}"));
        if number == 1 {
            leftovers.note(key.clone());
        }
        store.set(&format!("{key}/{number}"), line.as_bytes(), wait)?;
        Ok(Some(LocalRanks { key, me: rank as i32, found: Mutex::default() }))
    }

    fn newly_dead(&self, store: &dyn Store, wait: &Wait) -> Vec<i32> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        // LocalRanks join in the beginning only, but not all at once.
        while let Ok(Some(line)) = store.try_get(&format!("{}/{}", self.key, found.len() + 1), wait) {
            let line = String::from_utf8_lossy(&line).into_owned();
            let mut numbers = line.split(' ').map(str::parse::<u64>);
            let (Some(Ok(rank)), Some(Ok(pid)), Some(Ok(start))) = (numbers.next(), numbers.next(), numbers.next())
            else {
                break;
            };
            let process = Process::watch(ProcessId { pid: pid as u32, start });
            // Ranks may be threads of one process, which live as long as this one.
            let told = rank as i32 == self.me || pid == u64::from(std::process::id());
            found.push(LocalRank { rank: rank as i32, process, told });
        }
        let mut dead = Vec::new();
        loop {
            let alive: Vec<usize> = (0..found.len()).filter(|index| !found[*index].told).collect();
            let processes: Vec<Arc<Process>> = alive.iter().map(|index| Arc::clone(&found[*index].process)).collect();
            let Some(first) = Process::first_dead(&processes) else { return dead };
            let local_rank = &mut found[alive[first]];
            local_rank.told = true;
            dead.push(local_rank.rank);
        }
    }
}
