//! The key that says that a job runs, by which a process finds the job that it is to join as a
//! newcomer (docs/recovery.md, "The door").
//!
//! ```text
//! 6fb1c2d3e4f50617 8
//! cpu
//! 0.2.0
//! 1732615200
//! 1
//! box,4f0c...,pid:[4026531836],user:[4026531837],0
//! loopback
//! NCCL 2.27.3
//! ```
//!
//! The lines, from the first to the last:
//!
//! 1. the nonce of the world, and its size
//! 2. the device type
//! 3. the version of this library
//! 4. the time of the join in seconds since 1970
//! 5. the number of hosts
//! 6. the memory that the ranks share; empty where they are on several hosts, and on other device
//!    types than cpu
//! 7. whether all ranks reach each other by loopback addresses
//! 8. the communicator library, where its version matters
//!
//! Rank 0 writes the key when all ranks have come to the join and before it reports that it has
//! got through. So rank 0 cannot end after a join that succeeds and before it writes the key. Rank
//! 0 removes the key of a join that fails. Where rank 0 is lost meanwhile, the key stays, and
//! whoever reads it finds that the join has failed.

use std::collections::BTreeSet;
use std::fmt::{self, Display, Formatter};
use std::str::FromStr;
use std::sync::Arc;

use super::agreement::{Decision, Decisions, Epoch, Why, decided_at, ended, has_first_call_failed, now};
use super::incarnation::Incarnation;
use super::losses;
use super::options::Join;
use super::store::Store;
use crate::error::{Error, Result, Status};
use crate::wait::Wait;

/// The version of this library, which all processes of a job share.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Newcomers can join a job that has started with at most this many ranks. A decision can list as
/// many.
const MOST_RANKS: usize = 1 << 20;

/// A job that runs, as far as its key says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Running {
    /// The nonce of the job's world.
    pub(super) nonce: String,
    /// The number of ranks with which the job has started.
    pub(super) size: usize,
    /// The device type of the job.
    pub(super) device_type: String,
    /// The version of this library in the job's processes.
    pub(super) version: String,
    /// When the job has started, in seconds since 1970.
    pub(super) since: u64,
    /// How many hosts the job's ranks were on.
    pub(super) num_hosts: usize,
    /// The memory that all ranks of the job share; `None` where they share none, or need not share
    /// any.
    pub(super) memory: Option<String>,
    /// Whether all ranks of the job reach each other by loopback addresses.
    pub(super) is_one_network: bool,
    /// The communicator library of the job's ranks; empty where the version does not matter.
    pub(super) library: String,
}

impl Running {
    /// Returns the job of a world that has just been joined.
    pub(super) fn new(nonce: &str, size: usize, device_type: &str) -> Running {
        Running {
            nonce: nonce.to_owned(),
            size,
            device_type: device_type.to_owned(),
            version: VERSION.to_owned(),
            since: now(),
            num_hosts: 1,
            memory: None,
            is_one_network: false,
            library: String::new(),
        }
    }

    /// Fails where this process, which is `rank` of `size`, cannot be a newcomer of this job.
    /// `newest` is the newest epoch, which may have more ranks than the job has started with.
    pub(super) fn check(
        &self,
        (rank, size): (usize, usize),
        device_type: &str,
        newest: Option<&Epoch>,
        store: &dyn Store,
    ) -> Result<()> {
        let refuse = |message: String| Err(Error::new(Status::Mismatch, format!("{message} ({})", store.name())));
        if self.version != VERSION {
            return refuse(format!(
                "rank {rank} has libdevicemesh {VERSION}, and the running job has {}: start this process with the library of the job",
                self.version
            ));
        }
        if self.device_type != device_type {
            return refuse(format!(
                "rank {rank} joins with device type {device_type}, and the running job has {}: start this process with the options of the job",
                self.device_type
            ));
        }
        // A job that has grown has had every size between the first and the newest.
        let is_known_size = (self.size..=self.size.max(newest.map_or(0, |epoch| epoch.size))).contains(&size);
        if rank < self.size && !is_known_size {
            return refuse(format!(
                "rank {rank} joins a world of {size} ranks, and the running job has {}: start this process with the world size of the job, or give each job an address of its own",
                self.size
            ));
        }
        Ok(())
    }
}

impl Display for Running {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        let Running { nonce, size, device_type, version, since, num_hosts, library, .. } = self;
        let memory = self.memory.as_deref().unwrap_or_default();
        let network = if self.is_one_network { "loopback" } else { "" };
        write!(out, "{nonce} {size}\n{device_type}\n{version}\n{since}\n{num_hosts}\n{memory}\n{network}\n{library}")
    }
}

impl FromStr for Running {
    type Err = ();

    /// Reads a text that [`Display`] has written. A later version may write more lines.
    fn from_str(text: &str) -> std::result::Result<Running, ()> {
        let mut lines = text.split('\n');
        let mut line = || lines.next().map(str::to_owned).ok_or(());
        let head = line()?;
        let (nonce, size) = head.split_once(' ').ok_or(())?;
        // Lists of all ranks are made with this size, so a size that no rank can have written must
        // not pass.
        let size = size.parse().ok().filter(|size| (2..=MOST_RANKS).contains(size)).ok_or(())?;
        Ok(Running {
            nonce: nonce.to_owned(),
            size,
            device_type: line()?,
            version: line()?,
            since: line()?.parse().map_err(drop)?,
            num_hosts: line()?.parse().map_err(drop)?,
            memory: Some(line()?).filter(|memory| !memory.is_empty()),
            is_one_network: line()? == "loopback",
            library: line()?,
        })
    }
}

/// Returns the key, for the join whose keys begin with `join`.
pub(super) fn key(join: &str) -> String {
    format!("{join}/running")
}

/// A job that a process joins as a newcomer.
pub(super) struct Found {
    /// The facts of the job.
    pub(super) running: Running,
    /// The keys of the job's world begin with this prefix.
    pub(super) prefix: String,
}

/// Returns the running job that this process joins as a newcomer, or `None` where it takes part in
/// the join of a new world. `place` is the rank of this process and the size of the world, as this
/// process was told. `join` is the prefix of this join.
///
/// A job runs if it has left the key, its last decision is not the end, and some member of its
/// newest epoch is not lost. The caller or `DM_JOIN` may say that the job runs. If neither says
/// so, the store must also know that the process that held this rank is lost. Otherwise this
/// process is more likely a rank that was started twice, or a rank of another job. A key of a join
/// that has failed is taken for no key, because the ranks begin this join again.
///
/// Fails where this process cannot be a newcomer of the job that runs.
pub(super) fn find(
    store: &Arc<dyn Store>,
    join: &str,
    how: Join,
    place: (usize, usize),
    device_type: &str,
    wait: &Wait,
) -> Result<Option<Found>> {
    if how == Join::New || (how == Join::Auto && !store.knows_losses()) {
        return Ok(None);
    }
    let key = key(join);
    let Some(said) = store.try_get(&key, wait)? else { return Ok(None) };
    let Ok(running) = String::from_utf8_lossy(&said).parse::<Running>() else {
        return Err(Error::store(format!(
            "the store at {} gave an unreadable value ({:?}) under the key {key}, which has the facts of a running job of 2 to {MOST_RANKS} ranks: it must give the values back as they were set",
            store.name(),
            String::from_utf8_lossy(&said).chars().take(40).collect::<String>()
        )));
    };
    let prefix = format!("{join}/{}", running.nonce);
    if has_first_call_failed(&**store, &format!("{prefix}/world"), wait)? {
        return Ok(None);
    }
    let seen = Seen::read(store, &prefix, wait)?;
    let lost = if store.knows_losses() { losses::read_all(&**store, &prefix, wait)? } else { BTreeSet::new() };
    let members = seen.newest.as_ref().map_or_else(|| first_members(running.size), Epoch::members);
    let is_over = seen.has_ended || members.iter().all(|member| lost.contains(member));
    let rank = place.0 as i32;
    let size = seen.newest.as_ref().map_or(0, |epoch| epoch.size).max(running.size);
    let is_missing = || place.0 < size && members.iter().all(|it| it.rank != rank || lost.contains(it));
    match how {
        Join::Auto if is_over || !is_missing() => Ok(None),
        _ if is_over => Err(ended()),
        _ => {
            running.check(place, device_type, seen.newest.as_ref(), &**store)?;
            Ok(Some(Found { running, prefix }))
        }
    }
}

/// Takes the ticket of a process of that rank, in the world whose keys begin with `prefix`: the
/// number of processes that have joined under the rank before. `running` is the job where the
/// process is a newcomer. A newcomer is never the first process of a rank with which the job has
/// started, also where that first process has removed the keys that it has left.
pub(super) fn take_ticket(
    store: &dyn Store,
    prefix: &str,
    rank: usize,
    running: Option<&Running>,
    wait: &Wait,
) -> Result<u32> {
    let key = format!("{prefix}/rank/{rank}");
    let mut joined = store.add(&key, 1, wait)?;
    if joined == 1 && running.is_some_and(|running| rank < running.size) {
        joined = store.add(&key, 1, wait)?;
    }
    Ok(u32::try_from(joined - 1).unwrap_or(u32::MAX))
}

/// Returns the members of the epoch with which a job of that many ranks has started.
pub(super) fn first_members(size: usize) -> BTreeSet<Incarnation> {
    (0..size as i32).map(Incarnation::first).collect()
}

/// The state of a job, by its decisions.
struct Seen {
    /// The newest epoch; `None` where it is the one with which the job has started.
    newest: Option<Epoch>,
    /// Whether the last decision ends the job.
    has_ended: bool,
}

impl Seen {
    /// Reads the decisions of the world whose keys begin with `prefix`.
    fn read(store: &Arc<dyn Store>, prefix: &str, wait: &Wait) -> Result<Seen> {
        let decisions = Decisions::new(Arc::clone(store), prefix);
        let first = decided_at(&**store, prefix, wait)?.map_or(1, |(number, _)| number).max(1);
        let mut seen = Seen { newest: None, has_ended: false };
        for number in first.. {
            match decisions.read(number, wait)? {
                Some(Decision::Epoch(epoch)) => seen.newest = Some(epoch),
                Some(Decision::End) => seen.has_ended = true,
                Some(Decision::Failure(failure)) => seen.has_ended |= failure.why == Why::NoState,
                None => break,
            }
        }
        Ok(seen)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::rendezvous::store::MemoryStore;

    #[test]
    fn the_facts_are_read_as_they_are_written() {
        let small = Running::new("6fb1", 8, "cuda");
        let memory = Some("box,boot,pid:[1]".to_owned());
        let large = Running {
            size: MOST_RANKS,
            num_hosts: 3,
            memory,
            is_one_network: true,
            library: "NCCL 2.27.3".to_owned(),
            ..Running::new("a", 2, "cpu")
        };
        for facts in [small, large] {
            assert_eq!(facts.to_string().parse(), Ok(facts.clone()));
            assert_eq!(format!("{facts}\nmore").parse(), Ok(facts));
        }
        for text in ["", "6fb1", "6fb1 8", "6fb1 8\ncpu\n0.2.0\n0\n1\n"] {
            assert_eq!(text.parse::<Running>(), Err(()), "{text:?}");
        }
        for (size, is_read) in
            [("8", true), ("x", false), ("0", false), ("1", false), ("1048577", false), ("18446744073709551615", false)]
        {
            let text = format!("6fb1 {size}\ncpu\n0.2.0\n0\n1\n\n\n");
            assert_eq!(text.parse::<Running>().is_ok(), is_read, "{size}");
        }
    }

    /// Rank 0 has written the key and has died before the join has ended.
    #[test]
    fn a_join_that_has_failed_leaves_no_running_job() {
        let wait = Wait::after(Duration::from_secs(20));
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        store.set(&key("join"), Running::new("6fb1", 2, "cpu").to_string().as_bytes(), &wait).unwrap();
        let find = || find(&store, "join", Join::Running, (0, 2), "cpu", &wait);
        assert!(find().unwrap().is_some());
        let lost = Error::new(Status::PeerLost, "rank 0 was lost");
        let verdict = format!("{} 0 0 0 0 0\n{}", lost.status() as i32, lost.message());
        std::thread::scope(|threads| {
            // All ranks have come to the join, which has not ended yet.
            store.set("join/6fb1/world/0/count", b"2", &wait).unwrap();
            let found = threads.spawn(find);
            store.set("join/6fb1/world/0/end/verdict", verdict.as_bytes(), &wait).unwrap();
            assert!(found.join().unwrap().unwrap().is_none());
        });
    }
}
