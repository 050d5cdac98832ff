//! A store in memory, for tests, that asks the test before each operation.

use super::{MemoryStore, Store};
use crate::error::Result;
use crate::wait::Wait;

/// A store in memory. Before each operation it calls `before` with the operation, the number of its
/// keys and the caller's wait. Where `before` fails, the operation fails and does nothing. The
/// operations are "set", "wait" (for any of the keys), "get" (without waiting), "add", "set_once",
/// "present" and "delete".
pub(crate) struct Hooked<F> {
    pub(crate) store: MemoryStore,
    pub(crate) before: F,
}

impl<F: Fn(&str, usize, &Wait) -> Result<()> + Send + Sync> Store for Hooked<F> {
    fn set(&self, key: &str, value: &[u8], wait: &Wait) -> Result<()> {
        (self.before)("set", 1, wait)?;
        self.store.set(key, value, wait)
    }

    fn get_any(&self, keys: &[&str], wait: &Wait) -> Result<(usize, Vec<u8>)> {
        (self.before)("wait", keys.len(), wait)?;
        self.store.get_any(keys, wait)
    }

    fn try_get(&self, key: &str, wait: &Wait) -> Result<Option<Vec<u8>>> {
        (self.before)("get", 1, wait)?;
        self.store.try_get(key, wait)
    }

    fn add(&self, key: &str, amount: i64, wait: &Wait) -> Result<i64> {
        (self.before)("add", 1, wait)?;
        self.store.add(key, amount, wait)
    }

    fn set_once(&self, key: &str, value: &[u8], wait: &Wait) -> Result<Vec<u8>> {
        (self.before)("set_once", 1, wait)?;
        self.store.set_once(key, value, wait)
    }

    fn present(&self, keys: &[String], wait: &Wait) -> Result<Vec<bool>> {
        (self.before)("present", keys.len(), wait)?;
        self.store.present(keys, wait)
    }

    fn delete(&self, key: &str, wait: &Wait) -> Result<()> {
        (self.before)("delete", 1, wait)?;
        self.store.delete(key, wait)
    }

    fn name(&self) -> &str {
        "a store of a test"
    }
}
