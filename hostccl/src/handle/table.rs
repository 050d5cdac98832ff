//! The table of the live handles. A token is the index of a slot and the slot's generation, so a
//! stale or made-up token is refused: it is looked up and never followed.

use std::sync::{Arc, PoisonError, RwLock};

use super::Handle;
use crate::error::{Error, Result};
use crate::types::*;

/// A place for a handle.
struct Slot {
    /// How many handles the slot has had. A token of an earlier one is refused.
    generation: u32,
    /// The live handle.
    handle: Option<Arc<Handle>>,
}

fn slots() -> &'static RwLock<Vec<Slot>> {
    static SLOTS: RwLock<Vec<Slot>> = RwLock::new(Vec::new());
    &SLOTS
}

/// The last four bits of a token, which is `generation << 24 | slot << 4 | TAG`. So a token is
/// never NULL, and never a multiple of 16. The pointers to NCCL's communicators are multiples of
/// 16.
const TAG: usize = 0xb;
/// The bits of a slot's index in a token.
const SLOT_BITS: u32 = 20;

fn token(index: usize, generation: u32) -> ncclComm_t {
    std::ptr::without_provenance_mut((generation as usize) << (SLOT_BITS + 4) | index << 4 | TAG)
}

fn parse(token: ncclComm_t) -> Option<(usize, u32)> {
    let raw = token as usize;
    let generation = u32::try_from(raw >> (SLOT_BITS + 4)).ok()?;
    (raw & 0xf == TAG).then_some((raw >> 4 & ((1 << SLOT_BITS) - 1), generation))
}

/// Puts a handle into a slot and returns its token.
pub(crate) fn insert(handle: Arc<Handle>) -> Result<ncclComm_t> {
    let mut slots = slots().write().unwrap_or_else(PoisonError::into_inner);
    let index = match slots.iter().position(|slot| slot.handle.is_none()) {
        Some(index) => index,
        None if slots.len() < 1 << SLOT_BITS => {
            slots.push(Slot { generation: 0, handle: None });
            slots.len() - 1
        }
        None => {
            return Err(Error::new(
                ncclSystemError,
                format!("{} communicators are open, which is the limit: destroy some first", slots.len()),
            ));
        }
    };
    let slot = &mut slots[index];
    slot.generation = slot.generation.wrapping_add(1).max(1);
    slot.handle = Some(handle);
    Ok(token(index, slot.generation))
}

/// Returns the handle of a token.
pub(crate) fn find(token: ncclComm_t) -> Result<Arc<Handle>> {
    with(token, |handle| Ok(Arc::clone(handle)))
}

/// Runs `work` with the handle of a token. The table is locked for reading meanwhile. So `work`
/// must not wait, must not make or end a communicator, and must not look up another token.
#[inline]
pub(crate) fn with<T>(token: ncclComm_t, work: impl FnOnce(&Arc<Handle>) -> Result<T>) -> Result<T> {
    let slots = slots().read().unwrap_or_else(PoisonError::into_inner);
    let found = parse(token)
        .and_then(|(index, generation)| slots.get(index).filter(|slot| slot.generation == generation))
        .and_then(|slot| slot.handle.as_ref());
    match found {
        Some(handle) => work(handle),
        None => Err(unknown(token)),
    }
}

/// Takes a token out of use, and returns its handle.
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
