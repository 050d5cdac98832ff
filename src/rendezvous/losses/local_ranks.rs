//! The ranks of this host. Where the store does not know who is lost, each of them looks whether
//! the processes of the others live.

use std::sync::{Arc, Mutex, PoisonError};

use hostccl::machine;
use hostccl::process::{Process, ProcessId};

use crate::digest::Fnv1a;
use crate::error::Result;
use crate::rendezvous::agreement::WorldKeys;
use crate::rendezvous::host::HostIdentity;
use crate::rendezvous::incarnation::Incarnation;
use crate::rendezvous::store::Store;
use crate::wait::Wait;

/// The ranks of this host, with their processes.
pub(super) struct LocalRanks {
    /// The key under which the ranks of this host are counted and listed.
    key: String,
    /// This process.
    me: Incarnation,
    /// The ranks that were found so far.
    found: Mutex<Found>,
}

/// The ranks of a host, as far as this rank has found them.
#[derive(Default)]
struct Found {
    /// The ranks.
    ranks: Vec<LocalRank>,
    /// The highest number in the list whose line was found.
    last: usize,
    /// The lower numbers whose lines have not come. A rank may have died after it took its number.
    without_line: Vec<usize>,
}

/// How many numbers after the last one a rank looks at. A number may stay without a line, and the
/// numbers after it are found all the same.
const AHEAD: usize = 3;

/// A rank of this host.
struct LocalRank {
    /// Its name in the world.
    name: Incarnation,
    /// Its process on this host.
    process: Arc<Process>,
    /// Whether its end was announced, or need not be.
    told: bool,
}

impl LocalRanks {
    /// Lists this rank among those of its host. Returns `None` where this process cannot tell which
    /// host it is on, or cannot see the processes there.
    pub(super) fn join(
        store: &dyn Store,
        prefix: &str,
        leftovers: &WorldKeys,
        me: Incarnation,
        wait: &Wait,
    ) -> Result<Option<LocalRanks>> {
        let Some(here) = HostIdentity::here().ok().filter(|_| machine::broken_proc().is_none()) else {
            return Ok(None);
        };
        let host = Fnv1a::default().bytes(here.line().bytes()).value();
        let key = format!("{prefix}/host/{host:016x}");
        let process = ProcessId::current();
        let number = store.add(&key, 1, wait)?;
        let line = format!("{me} {} {}", process.pid, process.start);
        leftovers.note(format!("{key}/{number}"));
        if number == 1 {
            leftovers.note(key.clone());
        }
        store.set(&format!("{key}/{number}"), line.as_bytes(), wait)?;
        Ok(Some(LocalRanks { key, me, found: Mutex::default() }))
    }

    /// Reads the line of a rank. Returns `None` when the text is not such a line.
    fn read(&self, line: &str) -> Option<LocalRank> {
        let mut words = line.split(' ');
        let name: Incarnation = words.next()?.parse().ok()?;
        let (pid, start) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        // Ranks may be threads of one process. Such ranks live as long as this process.
        let told = name == self.me || pid == std::process::id();
        Some(LocalRank { name, process: Process::watch(ProcessId { pid, start }), told })
    }

    /// Looks for the lines of ranks that were not found so far. Returns whether there were any.
    fn find_more(&self, found: &mut Found, store: &dyn Store, wait: &Wait) -> Result<bool> {
        let numbers: Vec<usize> =
            found.without_line.iter().copied().chain(found.last + 1..=found.last + AHEAD).collect();
        let keys: Vec<String> = numbers.iter().map(|number| format!("{}/{number}", self.key)).collect();
        let mut are_more = false;
        for ((number, key), _) in numbers.iter().zip(&keys).zip(store.present(&keys, wait)?).filter(|(_, there)| *there)
        {
            let Some(line) = store.try_get(key, wait)? else { continue };
            found.ranks.extend(self.read(&String::from_utf8_lossy(&line)));
            found.without_line.retain(|other| other != number);
            found.without_line.extend(found.last + 1..*number);
            found.last = found.last.max(*number);
            are_more = true;
        }
        Ok(are_more)
    }

    /// Returns the ranks of this host whose processes have ended since the last call. Where there
    /// are many ranks, a rank that has ended may be in the list up to a second later.
    pub(super) fn newly_dead(&self, store: &dyn Store, wait: &Wait) -> Vec<Incarnation> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        // The ranks join in the beginning only, but not all at once.
        while self.find_more(&mut found, store, wait).unwrap_or(false) {}
        let ranks = &mut found.ranks;
        let mut dead = Vec::new();
        loop {
            let alive: Vec<usize> = (0..ranks.len()).filter(|index| !ranks[*index].told).collect();
            let processes: Vec<Arc<Process>> = alive.iter().map(|index| Arc::clone(&ranks[*index].process)).collect();
            let Some(first) = Process::first_dead_in_turn(&processes) else { return dead };
            let local_rank = &mut ranks[alive[first]];
            local_rank.told = true;
            dead.push(local_rank.name);
        }
    }
}
