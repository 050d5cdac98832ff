//! The functions by which a communicator grows.

use std::ffi::c_int;
use std::sync::Arc;

use super::arguments::check_out;
use super::communicators::{join_by, prepare};
use crate::call_name::Name;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::group;
use crate::grow::Grow;
use crate::handle::{self, Handle};
use crate::id::Id;
use crate::setup::Init;
use crate::task::Task;
use crate::types::*;

pub(crate) unsafe fn ncclCommGetUniqueId(comm: ncclComm_t, unique_id: *mut ncclUniqueId) -> Result<ncclResult_t> {
    check_out("unique_id", unique_id)?;
    let handle = handle::find(comm)?;
    let id = handle.ready()?.offer_growth()?;
    // SAFETY: not NULL, and valid by the caller's contract.
    unsafe { unique_id.write(id.to_raw()) };
    Ok(ncclSuccess)
}

pub(crate) unsafe fn ncclCommGrow(
    comm: ncclComm_t,
    nranks: c_int,
    unique_id: *const ncclUniqueId,
    rank: c_int,
    new_comm: *mut ncclComm_t,
    config: *mut ncclConfig_t,
) -> Result<ncclResult_t> {
    let call = Name::take_next();
    group::submit(|| {
        // SAFETY: the caller's contract.
        unsafe { prepare("new_comm", new_comm, nranks) }?;
        // SAFETY: NULL, or valid by the caller's contract.
        let id = unsafe { unique_id.as_ref() }.map(Id::parse).transpose()?;
        if id.is_some_and(|id| id.grows_from == 0) {
            return Err(Error::argument(
                "the unique id was made by ncclGetUniqueId: ncclCommGrow needs one that ncclCommGetUniqueId made",
            ));
        }
        // SAFETY: the caller's contract.
        unsafe {
            Ok(vec![match comm.is_null() {
                true => come(nranks, id, rank, new_comm, config)?,
                false => stay(comm, (nranks, id, rank), new_comm, config, call)?,
            }])
        }
    })
}

/// Returns the task by which a new rank joins.
///
/// # Safety
/// `new_comm` stays valid until the call is over. `config` is NULL, or as NCCL documents it.
unsafe fn come(
    nranks: c_int,
    id: Option<Id>,
    rank: c_int,
    new_comm: *mut ncclComm_t,
    config: *const ncclConfig_t,
) -> Result<Task> {
    let id = id.ok_or_else(|| Error::argument("unique_id is NULL: a new rank needs the id of ncclCommGetUniqueId"))?;
    let from = id.grows_from;
    check_growth(nranks, from)?;
    if rank < from as c_int || rank >= nranks {
        return Err(Error::argument(format!(
            "rank {rank} is not in {from}..{nranks}: the ranks of the communicator that grows keep 0..{from}"
        )));
    }
    // SAFETY: the caller's contract.
    unsafe {
        let config = Config::read(config, &Config::default())?;
        join_by(id, new_comm, nranks, rank, 0, config)
    }
}

/// Returns the task of a rank of the communicator that grows.
///
/// # Safety
/// `new_comm` stays valid until the call is over. `config` is NULL, or as NCCL documents it.
unsafe fn stay(
    comm: ncclComm_t,
    (nranks, id, rank): (c_int, Option<Id>, c_int),
    new_comm: *mut ncclComm_t,
    config: *const ncclConfig_t,
    call: Name,
) -> Result<Task> {
    let parent_handle = handle::find(comm)?;
    let parent = parent_handle.ready()?.clone();
    let (me, size) = parent.whole();
    if rank != -1 {
        return Err(Error::argument(format!("rank {rank}: a rank of the communicator that grows passes -1")));
    }
    check_growth(nranks, size as u32)?;
    // The new communicator does not inherit the parent's name, which describes the parent only.
    let inherited = Config { name: None, ..parent_handle.config.clone() };
    // SAFETY: the caller's contract.
    let config = unsafe { Config::read(config, &inherited) }?;
    let name = config.name.clone().unwrap_or_else(|| format!("{}/grown", parent.name()));
    let handle = Arc::new(Handle::new(me as c_int, nranks, parent_handle.device, config));
    let grow = Grow::new(parent, nranks as u32, id, name, handle.aborted.clone(), &handle.global_ranks, call)?;
    // SAFETY: not NULL, and valid by the caller's contract.
    Ok(Task::Init(unsafe { Init::new(Box::new(grow), handle, new_comm) }?))
}

/// Fails unless `nranks` is more than `from`, the number of ranks of the communicator that grows.
fn check_growth(nranks: c_int, from: u32) -> Result<()> {
    match nranks as u32 > from {
        true => Ok(()),
        false => Err(Error::argument(format!(
            "nranks {nranks}: the communicator has {from} ranks already, so it grows to more than {from}"
        ))),
    }
}
