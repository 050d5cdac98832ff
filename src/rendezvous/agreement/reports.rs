//! The place in the store where ranks leave extracts of their recordings when a call has failed.

use std::sync::Arc;
use std::time::Duration;

use super::round::Membership;
use super::scope::Scope;
use crate::recorder::Reports;
use crate::wait::Wait;

/// How long the store may take for one request.
const SHORT: Duration = Duration::from_millis(200);

/// The reports of the epoch in which a scope is.
pub(crate) struct ReportsInStore(Arc<Membership>);

impl Scope {
    /// The place for the reports of the scope's epoch.
    pub(crate) fn reports(&self) -> ReportsInStore {
        ReportsInStore(Arc::clone(&self.membership))
    }
}

impl ReportsInStore {
    fn key(&self, key: &str) -> String {
        format!("{}/report/{key}", self.0.prefix())
    }
}

impl Reports for ReportsInStore {
    fn leave(&self, key: &str, value: &[u8]) {
        let key = self.key(key);
        // The reports of a failure may be read until the epoch ends.
        if self.0.store.set(&key, value, &Wait::after(SHORT)).is_ok() {
            self.0.left.note_of_others([key]);
        }
    }

    fn look(&self, keys: &[String]) -> Vec<Option<Vec<u8>>> {
        let (store, wait) = (&self.0.store, Wait::after(SHORT));
        let keys: Vec<String> = keys.iter().map(|key| self.key(key)).collect();
        let present = store.present(&keys, &wait).unwrap_or_default();
        let is_there = |at: usize| present.get(at).copied().unwrap_or(false);
        let value = |key: &String| store.try_get(key, &wait).ok().flatten();
        keys.iter().enumerate().map(|(at, key)| if is_there(at) { value(key) } else { None }).collect()
    }
}
