//! Communicators whose ranks meet by a unique id.

use std::sync::Arc;
use std::time::Instant;

use super::super::communicator::{Communicator, FirstUse};
use super::super::ending::{discard, finalize};
use super::super::failure::{blame, name_ranks};
use super::super::names::{parent_config, world_ranks};
use super::{Maker, log_made};
use crate::ccl::{CommConfig, Library, RawComm, UniqueId};
use crate::error::{Error, Result, Status};
use crate::mesh::Mesh;

/// How many ranks meet at one id, where a library takes several ids. NCCL's root of an id serves
/// its ranks one after another. With 256 ranks or more, the ranks pause before they connect to it.
const RANKS_PER_ID: usize = 128;

impl Maker<'_> {
    /// A communicator over the ranks of the one-dimensional `group`, for their own calls. The ranks
    /// meet by a fresh id under `key`. With streams they meet in a seed, from which the
    /// communicator is split. The seed is destroyed here, and not by a thread later: a destruction
    /// breaks the capture of a CUDA graph that the program begins meanwhile (tests/gpu/graph.c,
    /// "behind").
    pub(in crate::comm) fn meet_for_use(&self, key: &str, group: &Mesh, config: CommConfig) -> Result<RawComm> {
        if !self.library.has_streams() {
            return self.meet(key, group, config.blocking(false));
        }
        if !self.library.can_split() {
            return self.meet(key, group, config.blocking_by_default());
        }
        let raw = self.meet(key, group, parent_config(self.library, None))?;
        let seed = Communicator::unmade(Arc::clone(self.library), group.clone(), FirstUse::default());
        seed.set_ready(raw)?;
        let place = i32::try_from(group.local_rank(0)?).unwrap_or(i32::MAX);
        let made = self.split(&seed, group, Some((0, place)), config.blocking_by_default());
        let made = made.inspect_err(|_| seed.abort_soon(Some(&self.worker)))?.unwrap_or(RawComm::NULL);
        finalize(&seed, self.peers.wait(), &|error| self.peers.tell_before_abort(error))
            .map(|()| made)
            .inspect_err(|_| discard(self.library, &[made], None))
    }

    /// A communicator over the ranks of the one-dimensional `group`, which meet by a fresh id under
    /// `key`.
    pub(in crate::comm) fn meet(&self, key: &str, group: &Mesh, config: CommConfig) -> Result<RawComm> {
        let began = Instant::now();
        self.connect(key, group, config).inspect(|_| log_made("made by id", group, began))
    }

    fn connect(&self, key: &str, group: &Mesh, mut config: CommConfig) -> Result<RawComm> {
        let (size, rank) = (group.size(), group.local_rank(0)?);
        let ids = self.ids(key, group, rank)?;
        let what = || format!("making communicator {key} of ranks {}", world_ranks(group));
        let function = if ids.len() == 1 { "ncclCommInitRankConfig" } else { "ncclCommInitRankScalable" };
        let what = || match blocks_by_environment() && self.library.has_streams() {
            true => format!("{} ({function}, which NCCL_COMM_BLOCKING=1 makes block)", what()),
            false => format!("{} ({function})", what()),
        };
        let ending = Arc::clone(self.library);
        let make = move |library: &Library| library.init_rank(size, &ids, rank, &mut config);
        let comm = self.on_worker(what, make, move |late| drop(ending.abort(late)))?;
        // Only the host engine takes a timeout. Where it refuses, the polling still ends at the
        // deadline.
        let _ = self.library.set_timeout(comm, self.millis_left());
        name_ranks(self.library, comm, group);
        let explain = |error: Error| match group.ranks().first() {
            // The communicator was never complete, so the engine cannot name the lost rank. Then
            // the lost rank is the one that made the id.
            Some(maker) if error.status() == Status::PeerLost && error.blamed().is_empty() => {
                error.within(&format!("rank {maker} was lost (it made the id)")).with_lost(&[*maker])
            }
            // Over several hosts the ranks join with the help of the one that made the id. An
            // engine that has not heard of it within the time blames no rank.
            Some(maker) if is_silent_maker(&error) && self.library.is_host_engine() => {
                error.within(&format!("rank {maker} did not come (it made the id)")).with_ranks(&[*maker])
            }
            _ => blame(group, error),
        };
        self.poll_new(comm, what, explain)?;
        Ok(comm)
    }

    /// The ids by which the ranks of `group` meet. There is one id, unless there are many ranks
    /// and the library takes several ids. Then each part of the ranks has an id, which the first
    /// rank of the part makes. All ranks get the same list from rank 0.
    fn ids(&self, key: &str, group: &Mesh, rank: usize) -> Result<Vec<UniqueId>> {
        let (size, wait) = (group.size(), self.peers.wait());
        let count = if self.library.takes_several_ids() { size.div_ceil(RANKS_PER_ID) } else { 1 };
        let maker = |index: usize| index * (size / count) + index.min(size % count);
        let world_rank = |position: usize| group.ranks().get(position).copied().unwrap_or_default();
        let Some(round) = self.peers.round().filter(|_| size > 1) else {
            return Ok(vec![self.unique_id(Some(true))?]);
        };
        let (first, mine) = (rank == 0, (0..count).find(|index| maker(*index) == rank));
        let made = mine.map(|_| self.unique_id(self.peers.share_memory())).transpose()?;
        let publish = |key: &str, id: &UniqueId, value: &[u8]| {
            round.publish(key, value, wait).inspect_err(|_| self.library.discard(id))
        };
        if let (Some(id), Some(index), false) = (&made, mine, first) {
            publish(&format!("{key}/id{index}"), id, &id.bytes)?;
        }
        let bytes = match made.filter(|_| first) {
            Some(id) => {
                let mut all = id.bytes.to_vec();
                for index in 1..count {
                    all.extend(round.fetch(&format!("{key}/id{index}"), world_rank(maker(index)), wait)?);
                }
                publish(key, &id, &all)?;
                all
            }
            None => round.fetch(key, world_rank(0), wait)?,
        };
        UniqueId::list(&bytes, count).ok_or_else(|| {
            Error::store(format!(
                "the {count} unique ids under {key} have {} bytes instead of {}",
                bytes.len(),
                128 * count
            ))
        })
    }

    /// A fresh id. `shares_memory` says whether its ranks share memory; `None` where nobody knows.
    fn unique_id(&self, shares_memory: Option<bool>) -> Result<UniqueId> {
        let make = move |library: &Library| library.unique_id(shares_memory);
        self.on_worker(|| "making an id (ncclGetUniqueId)".to_owned(), make, drop)
    }
}

/// Whether the engine says that it cannot reach the process that made the id, or that the process
/// is stopped.
fn is_silent_maker(error: &Error) -> bool {
    error.status() == Status::Timeout
        && error.blamed().is_empty()
        && error.message().contains("the maker of the unique id ")
}

/// Whether the environment makes every communicator of NCCL block.
fn blocks_by_environment() -> bool {
    std::env::var("NCCL_COMM_BLOCKING").is_ok_and(|value| value == "1")
}
