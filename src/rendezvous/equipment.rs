//! What the ranks of a world bring for its communicators: the same version of the library, and a device of their own.

use super::agreement::{Round, WorldKeys};
use super::store::Store;
use crate::error::{Error, Result, Status};
use crate::wait::Wait;

/// What one rank brings.
#[derive(Debug, Clone, Default)]
pub struct Equipment {
    /// The communicator library in words, the same on all ranks: NCCL refuses other versions of itself only after it has connected. Empty where
    /// that does not matter.
    pub library: String,
    /// The device's identity, and what to call it; `None` where ranks may share one.
    pub device: Option<(String, String)>,
}

/// Everybody compares with rank 0, and puts its name to its device. A constant number of store operations per rank. `prefix` is this world's.
pub(super) fn check(
    round: &Round,
    store: &dyn Store,
    prefix: &str,
    leftovers: &WorldKeys,
    rank: usize,
    mine: &Equipment,
    wait: &Wait,
) -> Result<()> {
    if rank == 0 {
        round.publish("library", mine.library.as_bytes(), wait)?;
    } else {
        let theirs = round.fetch("library", 0, wait)?;
        if theirs != mine.library.as_bytes() {
            let theirs = String::from_utf8_lossy(&theirs);
            return Err(Error::new(
                Status::Mismatch,
                format!("rank {rank} has {}, rank 0 has {theirs}; all ranks need the same version", mine.library),
            ));
        }
    }
    let Some((identity, name)) = &mine.device else { return Ok(()) };
    let key = format!("{prefix}/device/{identity}");
    let holder = format!("{key}/rank");
    if store.add(&key, 1, wait)? == 1 {
        leftovers.note(key);
        leftovers.note(holder.clone());
        return store.set(&holder, rank.to_string().as_bytes(), wait);
    }
    let other = store.get(&holder, wait)?;
    let other = String::from_utf8_lossy(&other);
    Err(Error::new(
        Status::Device,
        format!(
            "ranks {other} and {rank} are both on {name}: give each a device of its own, or let NCCL share one: NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks from 2.30 on, before that an NCCL_HOSTID of its own on each"
        ),
    ))
}
