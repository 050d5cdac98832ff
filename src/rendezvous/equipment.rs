//! Compares the libraries and devices that the ranks of a world bring for its communicators. All
//! ranks need the same version of the communicator library, and each rank needs a device of its
//! own.

use super::agreement::{Round, WorldKeys};
use super::store::Store;
use crate::error::{Error, Result, Status};
use crate::wait::Wait;

/// The things that one rank brings.
#[derive(Debug, Clone, Default)]
pub struct Equipment {
    /// The communicator library in words. The text must be equal on all ranks, because NCCL
    /// refuses other versions of itself only after it has connected. The text is empty where the
    /// version does not matter.
    pub library: String,
    /// The identity of the device, and its name for messages; `None` where ranks may share a
    /// device.
    pub device: Option<(String, String)>,
}

/// Compares the library with that of rank 0, and claims the device for this rank. Each rank needs a
/// constant number of store operations. The world's keys begin with `prefix`.
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
    // The rank that holds the device may be lost before it has written its number.
    let other = round.fetch_of_world(&holder, wait)?;
    let other = String::from_utf8_lossy(&other);
    Err(Error::new(
        Status::Device,
        format!(
            "ranks {other} and {rank} are both on {name}: give each a device of its own, or let ranks share a device: from NCCL 2.30 on set NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks; with an older NCCL give each rank a different NCCL_HOSTID"
        ),
    ))
}
