//! A WAIT for a key that is left unanswered at the store, so that a look costs one read of a
//! socket.
//!
//! A store that answers each question at once (a folder, or the program's callbacks) cannot leave a
//! WAIT open. Such a store is asked once in each [`ASK`] instead.

use std::time::Duration;

use super::store::{KeyWatch, Store};
use crate::error::Result;
use crate::wait::Wait;

/// The shortest time between two questions to a store that cannot leave a question open, and after
/// an error.
pub(super) const ASK: Duration = Duration::from_secs(1);

/// How long the store may take to answer a question. The thread that asks does nothing else
/// meanwhile.
pub(super) const SHORT: Duration = Duration::from_millis(200);

/// The WAIT for the next note of a list, while it is open.
#[derive(Default)]
pub(super) struct OpenWait(Option<Box<dyn KeyWatch>>);

impl OpenWait {
    /// Whether the WAIT is at the store.
    pub(super) fn is_open(&self) -> bool {
        self.0.is_some()
    }

    /// Whether the note has come since the last look. The WAIT is over then, and after an error.
    pub(super) fn has_come(&mut self) -> bool {
        let come = self.0.as_mut().map(|watch| watch.has_come());
        if matches!(come, Some(Ok(true) | Err(_))) {
            self.0 = None;
        }
        matches!(come, Some(Ok(true)))
    }

    /// Leaves a WAIT for this note at the store, where the store can keep it open.
    pub(super) fn begin(&mut self, store: &dyn Store, note: &str, wait: &Wait) -> Result<()> {
        self.0 = store.watch_key(note, wait)?;
        Ok(())
    }
}
