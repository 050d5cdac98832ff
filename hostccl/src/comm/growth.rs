//! The id that a rank makes for the growth of its communicator.

use std::sync::{MutexGuard, PoisonError};

use super::Comm;
use crate::error::{Error, Result};
use crate::id::Id;

impl Comm {
    /// Makes the id by which new ranks join this communicator's next growth. Fails when the
    /// communicator takes no more calls, and while an earlier id of this rank is not used.
    pub(crate) fn offer_growth(&self) -> Result<Id> {
        self.check_open()?;
        let mut growth = self.growth();
        if growth.is_some() {
            return Err(Error::usage(format!(
                "{} made an id by ncclCommGetUniqueId that is not used yet: pass it to ncclCommGrow first",
                self.own_label()
            )));
        }
        // New ranks may be on other hosts, even if all ranks of this communicator are on one host.
        let id = Id::create(self.span.is_some().then_some(true))?.for_growth_from(self.whole().1 as u32);
        Ok(*growth.insert(id))
    }

    /// Returns the id that this rank has made for the next growth and that is not used yet.
    pub(crate) fn offered_growth(&self) -> Option<Id> {
        *self.growth()
    }

    /// Forgets the id, because the growth has begun to use it.
    pub(crate) fn take_growth(&self) {
        self.growth().take();
    }

    /// Ends the growth for the new ranks that join by this rank's id. These ranks get the error.
    pub(crate) fn end_growth(&self, error: &Error) {
        if let Some(id) = self.growth().take() {
            // This process has made the id, so there is no other maker to tell.
            let _ = id.give_up(self.whole().0 as u32, error);
        }
    }

    fn growth(&self) -> MutexGuard<'_, Option<Id>> {
        self.growth.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
