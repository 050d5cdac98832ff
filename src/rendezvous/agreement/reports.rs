//! The place in the store where ranks leave extracts of their recordings when a call has failed.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::round::Membership;
use super::scope::Scope;
use crate::recorder::Reports;
use crate::wait::{Deadline, Wait};

/// How long an error may wait for all requests to the store, and for what other hosts say. A rank
/// that is blocked says nothing.
const LONGEST: Duration = Duration::from_millis(250);

/// The reports of the epoch in which a scope is, for one error.
pub(crate) struct ReportsInStore {
    membership: Arc<Membership>,
    /// The deadline of all requests, whose time begins with the first use.
    deadline: OnceLock<Deadline>,
}

impl Scope {
    /// Returns the place for the reports of the scope's epoch, for one error.
    pub(crate) fn reports(&self) -> ReportsInStore {
        ReportsInStore { membership: Arc::clone(&self.membership), deadline: OnceLock::new() }
    }
}

impl ReportsInStore {
    fn key(&self, key: &str) -> String {
        format!("{}/report/{key}", self.membership.prefix())
    }
}

impl Reports for ReportsInStore {
    fn deadline(&self) -> Deadline {
        *self.deadline.get_or_init(|| Deadline::after(LONGEST))
    }

    fn leave(&self, key: &str, value: &[u8]) -> bool {
        let (key, left) = (self.key(key), self.deadline().left());
        let is_left = !left.is_zero() && self.membership.store.set(&key, value, &Wait::after(left)).is_ok();
        if is_left {
            // The reports of a failure may be read until the epoch ends.
            self.membership.left.note_of_others([key]);
        }
        is_left
    }

    fn look(&self, keys: &[String]) -> Vec<Option<Vec<u8>>> {
        let (store, wait) = (&self.membership.store, Wait::after(self.deadline().left()));
        let keys: Vec<String> = keys.iter().map(|key| self.key(key)).collect();
        let present = store.present(&keys, &wait).unwrap_or_default();
        let is_there = |at: usize| present.get(at).copied().unwrap_or(false);
        let value = |key: &String| store.try_get(key, &wait).ok().flatten();
        keys.iter().enumerate().map(|(at, key)| if is_there(at) { value(key) } else { None }).collect()
    }
}
