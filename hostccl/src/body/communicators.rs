//! The functions that make, query and end communicators.

use std::ffi::{CStr, c_char, c_int};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::arguments::check_out;
use crate::call_name::Name;
use crate::comm::Comm;
use crate::config::Config;
use crate::diagnosis;
use crate::error::{self, Error, Result};
use crate::group;
use crate::handle::{self, Handle};
use crate::id::Id;
use crate::join::{Join, Source};
use crate::recorder;
use crate::revoked_split::RevokedSplit;
use crate::segment::MAX_RANKS;
use crate::setup::{ChildInit, ChildOperation, Init};
use crate::shrink::{Shrink, SpanShrink};
use crate::split::{SpanSplit, Split};
use crate::task::Task;
use crate::timeout;
use crate::types::*;

pub(crate) unsafe fn ncclGetUniqueId(unique_id: *mut ncclUniqueId) -> Result<ncclResult_t> {
    check_out("unique_id", unique_id)?;
    // SAFETY: not NULL, and valid by the caller's contract.
    unsafe { unique_id.write(Id::create(None)?.to_raw()) };
    Ok(ncclSuccess)
}

pub(crate) unsafe fn hostcclGetUniqueIdFor(unique_id: *mut ncclUniqueId, hosts: c_int) -> Result<ncclResult_t> {
    check_out("unique_id", unique_id)?;
    let hosts = match hosts {
        0 => false,
        1 => true,
        other => return Err(Error::argument(format!("hosts {other} is neither 0 (one host) nor 1 (several hosts)"))),
    };
    // SAFETY: not NULL, and valid by the caller's contract.
    unsafe { unique_id.write(Id::create(Some(hosts))?.to_raw()) };
    Ok(ncclSuccess)
}

/// Writes NULL to the place of a new communicator. The NULL stays there if the call fails.
///
/// # Safety
/// `comm` is NULL, or can be written.
unsafe fn clear(name: &str, comm: *mut ncclComm_t) -> Result<()> {
    check_out(name, comm)?;
    // SAFETY: not NULL, and valid by the caller's contract.
    unsafe { comm.write(std::ptr::null_mut()) };
    Ok(())
}

/// Begins a call that makes a communicator with ranks that have no parent: an init, or a growth. It
/// checks `nranks` and the environment, and sets `*comm` to NULL. The NULL stays if an argument is
/// wrong. Errors call the parameter `name`.
///
/// # Safety
/// `comm` is NULL, or can be written.
pub(super) unsafe fn prepare(name: &str, comm: *mut ncclComm_t, nranks: c_int) -> Result<()> {
    // SAFETY: the caller's contract.
    unsafe { clear(name, comm) }?;
    timeout::check_environment()?;
    recorder::open().map_err(Error::argument)?;
    if nranks < 1 || nranks as u32 > MAX_RANKS {
        return Err(Error::argument(format!("nranks {nranks} is not in 1..={MAX_RANKS}")));
    }
    Ok(())
}

/// Returns the task by which one rank joins a communicator of that id. `*comm` is NULL before the
/// id and the configuration are read.
///
/// # Safety
/// `comm` is NULL, or stays valid until the call is over.
unsafe fn init(
    comm: *mut ncclComm_t,
    nranks: c_int,
    id: impl FnOnce() -> Result<Id>,
    rank: c_int,
    device: c_int,
    config: impl FnOnce() -> Result<Config>,
) -> Result<Task> {
    // SAFETY: the caller's contract.
    unsafe { prepare("comm", comm, nranks) }?;
    let (config, id) = (config()?, id()?);
    if id.grows_from != 0 {
        return Err(Error::argument("the unique id was made by ncclCommGetUniqueId: pass it to ncclCommGrow"));
    }
    if rank < 0 || rank >= nranks {
        return Err(Error::argument(format!("rank {rank} is not in 0..{nranks}")));
    }
    // SAFETY: the caller's contract.
    unsafe { join_by(id, comm, nranks, rank, device, config) }
}

/// Returns the task by which one rank joins a communicator. The caller has checked the arguments.
///
/// # Safety
/// `comm` stays valid until the call is over.
pub(super) unsafe fn join_by(
    id: Id,
    comm: *mut ncclComm_t,
    nranks: c_int,
    rank: c_int,
    device: c_int,
    config: Config,
) -> Result<Task> {
    let [a, b, c, d, ..] = id.token;
    let name = config.name.clone().unwrap_or_else(|| format!("communicator {a:02x}{b:02x}{c:02x}{d:02x}"));
    let handle = Arc::new(Handle::new(rank, nranks, device, config));
    let join = Join::new(Source::Id(id), nranks as u32, rank as u32, name, handle.aborted.clone())
        .with_global_ranks(&handle.global_ranks);
    // SAFETY: the caller's contract.
    Ok(Task::Init(unsafe { Init::new(Box::new(join), handle, comm) }?))
}

pub(crate) unsafe fn ncclCommInitRank(
    comm: *mut ncclComm_t,
    nranks: c_int,
    id: ncclUniqueId,
    rank: c_int,
) -> Result<ncclResult_t> {
    // SAFETY: the caller's contract.
    group::submit(|| unsafe { Ok(vec![init(comm, nranks, || Id::parse(&id), rank, 0, || Ok(Config::default()))?]) })
}

pub(crate) unsafe fn ncclCommInitRankConfig(
    comm: *mut ncclComm_t,
    nranks: c_int,
    id: ncclUniqueId,
    rank: c_int,
    config: *mut ncclConfig_t,
) -> Result<ncclResult_t> {
    group::submit(|| {
        // SAFETY: the caller's contract.
        unsafe {
            let config = || Config::read(config, &Config::default());
            Ok(vec![init(comm, nranks, || Id::parse(&id), rank, 0, config)?])
        }
    })
}

pub(crate) unsafe fn ncclCommInitRankScalable(
    comm: *mut ncclComm_t,
    nranks: c_int,
    rank: c_int,
    id_count: c_int,
    ids: *mut ncclUniqueId,
    config: *mut ncclConfig_t,
) -> Result<ncclResult_t> {
    group::submit(|| {
        let id = || match id_count < 1 || ids.is_null() {
            true => Err(Error::argument(format!("{id_count} ids at {ids:p}: at least one is needed"))),
            // SAFETY: the caller's contract says that at least one id lies there.
            false => Id::parse(unsafe { &*ids }),
        };
        // SAFETY: the caller's contract.
        unsafe {
            let config = || Config::read(config, &Config::default());
            Ok(vec![init(comm, nranks, id, rank, 0, config)?])
        }
    })
}

pub(crate) unsafe fn ncclCommInitAll(
    comms: *mut ncclComm_t,
    ndev: c_int,
    devlist: *const c_int,
) -> Result<ncclResult_t> {
    group::submit(|| {
        check_out("comms", comms)?;
        if ndev < 1 || ndev as u32 > MAX_RANKS {
            return Err(Error::argument(format!("ndev {ndev} is not in 1..={MAX_RANKS}")));
        }
        // SAFETY: the caller's contract says that there are `ndev` places.
        (0..ndev as usize).for_each(|rank| unsafe { comms.add(rank).write(std::ptr::null_mut()) });
        let id = Id::create(Some(false))?;
        (0..ndev)
            .map(|rank| {
                // SAFETY: the caller's contract says that each array that is not NULL has `ndev`
                // places.
                unsafe {
                    let device = if devlist.is_null() { rank } else { *devlist.add(rank as usize) };
                    init(comms.add(rank as usize), ndev, || Ok(id), rank, device, || Ok(Config::default()))
                }
            })
            .collect::<Result<_>>()
            .inspect_err(|_| id.close(None))
    })
}

pub(crate) unsafe fn ncclCommSplit(
    comm: ncclComm_t,
    color: c_int,
    key: c_int,
    new_comm: *mut ncclComm_t,
    config: *mut ncclConfig_t,
) -> Result<ncclResult_t> {
    let call = Name::take_next();
    group::submit(|| {
        // SAFETY: the caller's contract.
        unsafe { clear("new_comm", new_comm) }?;
        if color < 0 && color != NCCL_SPLIT_NOCOLOR {
            return Err(Error::argument(format!("color {color} is neither >= 0 nor NCCL_SPLIT_NOCOLOR (-1)")));
        }
        // SAFETY: the caller's contract.
        unsafe {
            child_of(comm, false, new_comm, config, &format!("{color}"), |parent, name, handle| {
                let (aborted, flag) = (handle.aborted.clone(), handle.aborted.clone());
                let whole = parent.name().to_owned();
                let described = format!("ncclCommSplit(color {color}, key {key}) on {}", parent.own_label());
                let make = move |parent: Arc<Comm>| -> Result<Box<dyn ChildOperation>> {
                    let (name, aborted) = (name.clone(), aborted.clone());
                    Ok(match parent.span {
                        None => Box::new(Split::new(parent, color, key, name, aborted, call)?),
                        Some(_) => Box::new(SpanSplit::new(parent, (color, key), name, aborted, call)?),
                    })
                };
                match parent.is_revoked() {
                    false => make(parent),
                    true => {
                        let renewal = shrink(parent.clone(), &[], false, whole, flag)?;
                        Ok(Box::new(RevokedSplit::new(parent, renewal, Box::new(make), call, described)))
                    }
                }
            })
        }
    })
}

pub(crate) unsafe fn ncclCommShrink(
    comm: ncclComm_t,
    excluded: *mut c_int,
    excluded_count: c_int,
    new_comm: *mut ncclComm_t,
    config: *mut ncclConfig_t,
    flags: c_int,
) -> Result<ncclResult_t> {
    group::submit(|| {
        // SAFETY: the caller's contract.
        unsafe { clear("new_comm", new_comm) }?;
        if flags & !NCCL_SHRINK_ABORT != 0 {
            return Err(Error::argument(format!("flags {flags:#x}: there are NCCL_SHRINK_DEFAULT (0) and _ABORT (1)")));
        }
        let count = usize::try_from(excluded_count).ok().filter(|count| *count > 0 && !excluded.is_null());
        let Some(count) = count else {
            return Err(Error::argument(format!(
                "{excluded_count} excluded ranks at {excluded:p}: at least one is needed"
            )));
        };
        // SAFETY: the caller's contract says that `count` ranks lie there.
        let excluded = unsafe { std::slice::from_raw_parts(excluded, count) }.to_vec();
        let abort = flags & NCCL_SHRINK_ABORT != 0;
        // SAFETY: the caller's contract.
        unsafe {
            child_of(comm, abort, new_comm, config, "shrunk", |parent, name, handle| {
                shrink(parent, &excluded, abort, name, handle.aborted.clone())
            })
        }
    })
}

/// Returns a shrink of `parent` that has not begun.
fn shrink(
    parent: Arc<Comm>,
    excluded: &[c_int],
    abort: bool,
    name: String,
    aborted: Arc<AtomicBool>,
) -> Result<Box<dyn ChildOperation>> {
    Ok(match parent.span {
        None => Box::new(Shrink::new(parent, excluded, abort, name, aborted)?),
        Some(_) => Box::new(SpanShrink::new(parent, excluded, abort, name, aborted)?),
    })
}

/// Returns the task that makes a communicator of ranks of `comm`. With `despite_failure`, an
/// earlier call on `comm` may have failed in the background.
///
/// # Safety
/// `new_comm` stays valid until the call is over. `config` is NULL, or as NCCL documents it.
unsafe fn child_of(
    comm: ncclComm_t,
    despite_failure: bool,
    new_comm: *mut ncclComm_t,
    config: *const ncclConfig_t,
    suffix: &str,
    make: impl FnOnce(Arc<Comm>, String, &Handle) -> Result<Box<dyn ChildOperation>>,
) -> Result<Vec<Task>> {
    let parent_handle = handle::find(comm)?;
    let parent = match despite_failure {
        true => parent_handle.ready_or_failed()?.clone(),
        false => parent_handle.ready()?.clone(),
    };
    // The child does not inherit the parent's name, which describes the parent only.
    let inherited = Config { name: None, ..parent_handle.config.clone() };
    // SAFETY: the caller's contract.
    let config = unsafe { Config::read(config, &inherited) }?;
    let name = config.name.clone().unwrap_or_else(|| format!("{}/{suffix}", parent.name()));
    let handle = Arc::new(Handle::new(0, 0, parent_handle.device, config));
    let child = make(parent.clone(), name, &handle)?;
    // SAFETY: not NULL, and valid by the caller's contract.
    let child = unsafe { ChildInit::new(child, parent_handle, parent, handle, new_comm) };
    Ok(vec![Task::Child(child.despite_failure(despite_failure))])
}

pub(crate) unsafe fn ncclCommRevoke(comm: ncclComm_t, flags: c_int) -> Result<ncclResult_t> {
    if comm.is_null() {
        return Ok(ncclSuccess);
    }
    if flags != NCCL_REVOKE_DEFAULT {
        return Err(Error::argument(format!("flags {flags:#x}: there is only NCCL_REVOKE_DEFAULT (0)")));
    }
    handle::find(comm)?.revoke()?;
    Ok(ncclSuccess)
}

pub(crate) unsafe fn ncclCommFinalize(comm: ncclComm_t) -> Result<ncclResult_t> {
    let handle = handle::find(comm)?;
    let comm = handle.ready()?;
    comm.finalize()?;
    Ok(ncclSuccess)
}

pub(crate) unsafe fn ncclCommDestroy(comm: ncclComm_t) -> Result<ncclResult_t> {
    if !comm.is_null() {
        handle::remove(comm)?.destroy();
    }
    Ok(ncclSuccess)
}

pub(crate) unsafe fn ncclCommAbort(comm: ncclComm_t) -> Result<ncclResult_t> {
    if !comm.is_null() {
        handle::remove(comm)?.abort();
    }
    Ok(ncclSuccess)
}

pub(crate) unsafe fn ncclCommGetAsyncError(comm: ncclComm_t, async_error: *mut ncclResult_t) -> Result<ncclResult_t> {
    check_out("async_error", async_error)?;
    let status = handle::find(comm)?.status();
    // SAFETY: not NULL, and valid by the caller's contract.
    unsafe { async_error.write(code_of(status)) };
    Ok(ncclSuccess)
}

pub(crate) unsafe fn hostcclCommWait(
    comm: ncclComm_t,
    timeout_ms: i64,
    async_error: *mut ncclResult_t,
) -> Result<ncclResult_t> {
    check_out("async_error", async_error)?;
    let handle = handle::find(comm)?;
    if timeout_ms != 0 {
        handle.wait(Duration::from_millis(millis(timeout_ms)?));
    }
    // SAFETY: not NULL, and valid by the caller's contract.
    unsafe { async_error.write(code_of(handle.progress())) };
    Ok(ncclSuccess)
}

/// Returns the code of a communicator's state, and makes its error the last one of this thread.
fn code_of(state: Result<ncclResult_t>) -> ncclResult_t {
    state.unwrap_or_else(|error| {
        let code = error.code();
        error::remember_state(error);
        code
    })
}

/// Writes one property of a communicator.
///
/// # Safety
/// `out` is NULL or valid.
unsafe fn answer(
    comm: ncclComm_t,
    name: &str,
    out: *mut c_int,
    of: impl FnOnce(&Handle) -> c_int,
) -> Result<ncclResult_t> {
    check_out(name, out)?;
    let handle = handle::find(comm)?;
    // SAFETY: not NULL, and valid by the caller's contract.
    unsafe { out.write(of(&handle)) };
    Ok(ncclSuccess)
}

pub(crate) unsafe fn ncclCommCount(comm: ncclComm_t, count: *mut c_int) -> Result<ncclResult_t> {
    // SAFETY: the caller's contract.
    unsafe { answer(comm, "count", count, |handle| handle.rank_and_size().1) }
}

pub(crate) unsafe fn ncclCommCuDevice(comm: ncclComm_t, device: *mut c_int) -> Result<ncclResult_t> {
    // SAFETY: the caller's contract.
    unsafe { answer(comm, "device", device, |handle| handle.device) }
}

pub(crate) unsafe fn ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) -> Result<ncclResult_t> {
    // SAFETY: the caller's contract.
    unsafe { answer(comm, "rank", rank, |handle| handle.rank_and_size().0) }
}

pub(crate) unsafe fn hostcclCommLostRank(comm: ncclComm_t, rank: *mut c_int) -> Result<ncclResult_t> {
    let lost = |handle: &Handle| handle.lost_rank().map_or(-1, |rank| rank as c_int);
    // SAFETY: the caller's contract.
    unsafe { answer(comm, "rank", rank, lost) }
}

pub(crate) unsafe fn hostcclCommSetTimeout(comm: ncclComm_t, timeout_ms: i64) -> Result<ncclResult_t> {
    handle::find(comm)?.set_timeout(millis(timeout_ms)?)?;
    Ok(ncclSuccess)
}

#[inline]
pub(crate) unsafe fn hostcclNextCallTimeout(timeout_ms: i64) -> Result<ncclResult_t> {
    timeout::set_next(millis(timeout_ms)?);
    Ok(ncclSuccess)
}

pub(crate) unsafe fn hostcclCommSetNames(comm: ncclComm_t, names: *const c_int, count: c_int) -> Result<ncclResult_t> {
    let handle = handle::find(comm)?;
    let nranks = handle.rank_and_size().1;
    if names.is_null() || count != nranks {
        return Err(Error::argument(format!("{count} names at {names:p} for {nranks} ranks: one each is needed")));
    }
    // SAFETY: not NULL, and the caller's contract says that `count` numbers lie there.
    handle.set_global_ranks(unsafe { std::slice::from_raw_parts(names, count as usize) });
    Ok(ncclSuccess)
}

pub(crate) unsafe fn hostcclCommRefuse(comm: ncclComm_t, call: *const c_char) -> Result<ncclResult_t> {
    if call.is_null() {
        return Err(Error::argument("call is NULL"));
    }
    // SAFETY: not NULL, and the caller's contract says that it is a C string.
    let call = unsafe { CStr::from_ptr(call) }.to_string_lossy();
    let handle = handle::find(comm)?;
    handle.comm().map_or(Ok(()), |comm| diagnosis::end_if_peer_waits(comm, &call))?;
    Ok(ncclSuccess)
}

fn millis(timeout_ms: i64) -> Result<u64> {
    u64::try_from(timeout_ms).map_err(|_| Error::argument(format!("timeout_ms {timeout_ms} is negative")))
}
