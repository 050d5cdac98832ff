//! Communicator handles: tokens of a slot and a generation, so that a stale or made-up one is refused, never followed.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use crate::collective::Reduction;
use crate::comm::{Comm, Names};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::fork::Own;
use crate::types::*;

/// What a live handle stands for.
#[derive(Debug)]
pub(crate) struct Handle {
    rank: c_int,
    nranks: c_int,
    pub(crate) device: c_int,
    pub(crate) config: Config,
    /// Raised by `ncclCommAbort`; shared with the communicator.
    pub(crate) aborted: Arc<AtomicBool>,
    /// Shared with the communicator, where it was not made of another one.
    pub(crate) names: Names,
    comm: OnceLock<Arc<Comm>>,
    /// Calls at work in the background, joining included.
    pending: AtomicU32,
    failed: AtomicBool,
    /// How long its making may wait without progress, in milliseconds; 0: not set.
    patience: AtomicU64,
    error: Mutex<Option<Error>>,
    finished: Condvar,
    operators: RwLock<Vec<Option<PreMulSum>>>,
    /// Forked children may not use the handle.
    _own: Own<()>,
}

/// An operator of `ncclRedOpCreatePreMulSum`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PreMulSum {
    pub(crate) dtype: DataType,
    pub(crate) scalar: Scalar,
}

/// Its scalar.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Scalar {
    Value([u8; 8]),
    /// Read when an operation uses it.
    At(usize),
}

/// First value of an operator made at run time: the number of built-in ones.
const FIRST_OPERATOR: usize = ReduceOp::ALL.len();

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Handle {
    /// A handle whose communicator is still to come.
    pub(crate) fn new(rank: c_int, nranks: c_int, device: c_int, config: Config) -> Handle {
        Handle {
            rank,
            nranks,
            device,
            config,
            aborted: Arc::default(),
            names: Names::default(),
            comm: OnceLock::new(),
            pending: AtomicU32::new(1),
            failed: AtomicBool::new(false),
            patience: AtomicU64::new(0),
            error: Mutex::new(None),
            finished: Condvar::new(),
            operators: RwLock::new(Vec::new()),
            _own: Own::new(()),
        }
    }

    /// The communicator, when no call is at work on it in the background.
    pub(crate) fn ready(&self) -> Result<&Arc<Comm>> {
        self.settled()?.ok_or_else(|| {
            Error::argument(
                "the communicator is still in progress: ask ncclCommGetAsyncError until it says ncclSuccess",
            )
        })
    }

    /// The communicator for an operation. A split of it may be under way in the background: both take turns in it, as calls of several threads do.
    pub(crate) fn for_operation(&self) -> Result<&Arc<Comm>> {
        self.check()?;
        self.comm.get().map_or_else(|| self.ready(), Ok)
    }

    /// The same as [`ready`](Handle::ready); `None` while a call is at work on it.
    fn settled(&self) -> Result<Option<&Arc<Comm>>> {
        // What ends afterwards with a failure was still in progress here.
        let busy = self.in_progress();
        self.check()?;
        Ok(self.comm.get().filter(|_| !busy))
    }

    /// The failure of a call in the background, if one has failed.
    fn check(&self) -> Result<()> {
        if self.failed.load(Ordering::Acquire) {
            return Err(lock(&self.error).clone().unwrap_or_else(Error::aborted));
        }
        Ok(())
    }

    /// Rank and number of ranks.
    pub(crate) fn place(&self) -> (c_int, c_int) {
        self.comm.get().map_or((self.rank, self.nranks), |comm| (comm.rank as c_int, comm.nranks as c_int))
    }

    /// The communicator, if it has come to be.
    pub(crate) fn comm(&self) -> Option<&Arc<Comm>> {
        self.comm.get()
    }

    /// How long waits on it may last without progress, from now on; also while it is being made.
    pub(crate) fn set_patience(&self, millis: u64) -> Result<()> {
        self.check()?;
        self.patience.store(millis, Ordering::Relaxed);
        if let Some(comm) = self.comm.get() {
            comm.set_patience(millis);
        }
        Ok(())
    }

    /// What messages call the ranks from now on; the first names stand.
    pub(crate) fn set_names(&self, names: &[i32]) {
        let _ = self.names.set(names.into());
        if let Some(comm) = self.comm.get() {
            let _ = comm.names.set(names.into());
        }
    }

    pub(crate) fn patience(&self) -> Option<Duration> {
        let millis = self.patience.load(Ordering::Relaxed);
        (millis > 0).then(|| Duration::from_millis(millis))
    }

    /// Marks a background call as started.
    pub(crate) fn begin(&self) {
        self.pending.fetch_add(1, Ordering::AcqRel);
    }

    /// Records how joining ended.
    pub(crate) fn set_comm(&self, joined: Result<Arc<Comm>>) {
        let outcome = joined.map(|comm| {
            comm.set_patience(self.patience.load(Ordering::Relaxed));
            let _ = self.comm.set(comm);
        });
        self.finish(outcome);
    }

    /// Records how a background call ended.
    pub(crate) fn finish(&self, outcome: Result<()>) {
        let mut error = lock(&self.error);
        if let Err(failure) = outcome {
            error.get_or_insert(failure);
            self.failed.store(true, Ordering::Release);
        }
        self.pending.fetch_sub(1, Ordering::AcqRel);
        self.finished.notify_all();
    }

    /// Where the communicator stands, as `ncclCommGetAsyncError` tells it.
    pub(crate) fn status(&self) -> Result<ncclResult_t> {
        match self.settled()? {
            Some(comm) => {
                comm.check_before()?;
                comm.check_peers(None, &String::new).map(|()| ncclSuccess)
            }
            None => Ok(ncclInProgress),
        }
    }

    /// The rank found dead, gone or late, in a call at work in the background too.
    pub(crate) fn lost_rank(&self) -> Option<usize> {
        let in_background = lock(&self.error).as_ref().and_then(Error::lost);
        in_background.or_else(|| self.comm.get()?.lost_rank())
    }

    pub(crate) fn in_progress(&self) -> bool {
        self.pending.load(Ordering::Acquire) > 0
    }

    /// Ends the communicator on all ranks.
    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
        if let Some(comm) = self.comm.get() {
            comm.abort();
        }
        // The call notices the raised flag within a slice of its sleep.
        self.wait_finished(Duration::from_secs(5));
        // Joining may have succeeded just before it would have seen the flag.
        if let Some(comm) = self.comm.get() {
            comm.abort();
        }
    }

    /// Leaves the communicator. A call still at work in the background ends first.
    pub(crate) fn destroy(&self) {
        if self.in_progress() {
            return self.abort();
        }
        if let Some(comm) = self.comm.get() {
            comm.leave();
        }
    }

    /// Waits, for so long at most, until no call is at work in the background.
    pub(crate) fn wait_finished(&self, longest: Duration) {
        let error = lock(&self.error);
        let _ = self.finished.wait_timeout_while(error, longest, |_| self.in_progress());
    }

    pub(crate) fn add_operator(&self, operator: PreMulSum) -> ncclRedOp_t {
        let mut operators = self.operators.write().unwrap_or_else(PoisonError::into_inner);
        let free = operators.iter().position(Option::is_none).unwrap_or_else(|| {
            operators.push(None);
            operators.len() - 1
        });
        operators[free] = Some(operator);
        (free + FIRST_OPERATOR) as ncclRedOp_t
    }

    pub(crate) fn remove_operator(&self, raw: ncclRedOp_t) -> Result<()> {
        let mut operators = self.operators.write().unwrap_or_else(PoisonError::into_inner);
        usize::try_from(raw)
            .ok()
            .and_then(|raw| raw.checked_sub(FIRST_OPERATOR))
            .and_then(|index| operators.get_mut(index)?.take())
            .map(|_| ())
            .ok_or_else(|| {
                Error::argument(format!("op {raw} was not made by ncclRedOpCreatePreMulSum, or is destroyed"))
            })
    }

    /// The reduction of that value for elements of `dtype`.
    pub(crate) fn reduction(&self, raw: ncclRedOp_t, dtype: DataType) -> Result<Reduction> {
        if let Some(op) = ReduceOp::from_raw(raw) {
            return Ok(Reduction::Plain(op));
        }
        let operators = self.operators.read().unwrap_or_else(PoisonError::into_inner);
        let operator = usize::try_from(raw)
            .ok()
            .and_then(|raw| raw.checked_sub(FIRST_OPERATOR))
            .and_then(|index| operators.get(index).copied().flatten())
            .ok_or_else(|| Error::argument(format!("op {raw} is none of 0..4 nor made for this communicator")))?;
        if operator.dtype != dtype {
            return Err(Error::argument(format!(
                "op {raw} was made for {}, the call is for {}",
                operator.dtype.name(),
                dtype.name()
            )));
        }
        Ok(Reduction::PreMulSum(match operator.scalar {
            Scalar::Value(value) => value,
            // SAFETY: the caller of ncclRedOpCreatePreMulSum promised that it stays readable until the operator is
            // destroyed.
            Scalar::At(address) => unsafe { read_scalar(address as *const u8, dtype) },
        }))
    }
}

/// The scalar's bytes, the rest zero.
///
/// # Safety
/// `at` points to a readable element of that type.
pub(crate) unsafe fn read_scalar(at: *const u8, dtype: DataType) -> [u8; 8] {
    let mut scalar = [0; 8];
    // SAFETY: the caller's promise; an element has at most eight bytes.
    unsafe { std::ptr::copy_nonoverlapping(at, scalar.as_mut_ptr(), dtype.size()) };
    scalar
}

struct Slot {
    generation: u32,
    handle: Option<Arc<Handle>>,
}

fn slots() -> &'static RwLock<Vec<Slot>> {
    static SLOTS: RwLock<Vec<Slot>> = RwLock::new(Vec::new());
    &SLOTS
}

/// A token is `generation << 24 | slot << 4 | TAG`: never NULL, and no multiple of 16, as pointers to objects of NCCL's are.
const TAG: usize = 0xb;
const SLOT_BITS: u32 = 20;

fn token(index: usize, generation: u32) -> ncclComm_t {
    std::ptr::without_provenance_mut((generation as usize) << (SLOT_BITS + 4) | index << 4 | TAG)
}

fn parse(token: ncclComm_t) -> Option<(usize, u32)> {
    let raw = token as usize;
    let generation = u32::try_from(raw >> (SLOT_BITS + 4)).ok()?;
    (raw & 0xf == TAG).then_some((raw >> 4 & ((1 << SLOT_BITS) - 1), generation))
}

/// Gives a handle its token.
pub(crate) fn insert(handle: Arc<Handle>) -> Result<ncclComm_t> {
    let mut slots = slots().write().unwrap_or_else(PoisonError::into_inner);
    let index = match slots.iter().position(|slot| slot.handle.is_none()) {
        Some(index) => index,
        None if slots.len() < 1 << SLOT_BITS => {
            slots.push(Slot { generation: 0, handle: None });
            slots.len() - 1
        }
        None => return Err(Error::new(ncclSystemError, format!("{} communicators are open", slots.len()))),
    };
    let slot = &mut slots[index];
    slot.generation = slot.generation.wrapping_add(1).max(1);
    slot.handle = Some(handle);
    Ok(token(index, slot.generation))
}

/// The handle of a token.
pub(crate) fn find(token: ncclComm_t) -> Result<Arc<Handle>> {
    let slots = slots().read().unwrap_or_else(PoisonError::into_inner);
    parse(token)
        .and_then(|(index, generation)| slots.get(index).filter(|slot| slot.generation == generation))
        .and_then(|slot| slot.handle.clone())
        .ok_or_else(|| unknown(token))
}

/// Takes a token out of use.
pub(crate) fn remove(token: ncclComm_t) -> Result<Arc<Handle>> {
    let mut slots = slots().write().unwrap_or_else(PoisonError::into_inner);
    parse(token)
        .and_then(|(index, generation)| slots.get_mut(index).filter(|slot| slot.generation == generation))
        .and_then(|slot| slot.handle.take())
        .ok_or_else(|| unknown(token))
}

fn unknown(token: ncclComm_t) -> Error {
    Error::argument(if token.is_null() {
        "the communicator is NULL".to_owned()
    } else {
        format!("{token:p} is no live communicator: it was destroyed, aborted, or never made here")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle() -> Arc<Handle> {
        Arc::new(Handle::new(0, 1, 0, Config::default()))
    }

    #[test]
    fn a_token_dies_with_its_handle() {
        let first = insert(handle()).unwrap();
        assert!(find(first).is_ok());
        remove(first).unwrap();
        let second = insert(handle()).unwrap();
        assert_eq!(find(first).unwrap_err().code(), ncclInvalidArgument);
        assert_eq!(remove(first).unwrap_err().code(), ncclInvalidArgument);
        assert_ne!(first, second);
        remove(second).unwrap();
    }

    #[test]
    fn made_up_tokens_are_refused() {
        for raw in [0_usize, 1, 16, 0xb, 0xdead_beef, usize::MAX, usize::MAX - 4] {
            let made_up = std::ptr::without_provenance_mut(raw);
            assert_eq!(find(made_up).unwrap_err().code(), ncclInvalidArgument, "{raw:#x}");
        }
    }

    #[test]
    fn operators_are_numbered_after_the_built_in_ones() {
        let handle = handle();
        let operator = PreMulSum { dtype: DataType::Int32, scalar: Scalar::Value([3, 0, 0, 0, 0, 0, 0, 0]) };
        assert_eq!(handle.add_operator(operator), 5);
        assert_eq!(handle.add_operator(operator), 6);
        handle.remove_operator(5).unwrap();
        assert!(handle.remove_operator(5).is_err());
        assert_eq!(handle.add_operator(operator), 5);
        assert!(handle.reduction(5, DataType::Int32).is_ok());
        assert!(handle.reduction(5, DataType::Int64).is_err());
        assert!(handle.reduction(7, DataType::Int32).is_err());
        assert!(handle.reduction(-1, DataType::Int32).is_err());
        assert!(handle.remove_operator(4).is_err());
    }
}
