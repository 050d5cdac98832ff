//! A store in this process's memory: for a world of one rank, and for ranks that are threads of one
//! process.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::Store;
use crate::error::Result;
use crate::wait::Wait;

/// A store in this process's memory. Clones share the content.
#[derive(Debug, Clone, Default)]
pub struct MemoryStore(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// The values by key.
    values: Mutex<HashMap<String, Vec<u8>>>,
    /// Wakes the threads that wait for a key when a value has changed.
    changed: Condvar,
}

impl MemoryStore {
    /// Makes an empty store.
    pub fn new() -> MemoryStore {
        MemoryStore::default()
    }

    /// Returns all keys, sorted.
    #[cfg(test)]
    pub(crate) fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.values().keys().cloned().collect();
        keys.sort();
        keys
    }

    fn values(&self) -> MutexGuard<'_, HashMap<String, Vec<u8>>> {
        self.0.values.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8], _wait: &Wait) -> Result<()> {
        self.values().insert(key.to_owned(), value.to_vec());
        self.0.changed.notify_all();
        Ok(())
    }

    fn get_any(&self, keys: &[&str], wait: &Wait) -> Result<(usize, Vec<u8>)> {
        let mut values = self.values();
        let mut lookout = wait.lookout();
        loop {
            let found = keys.iter().enumerate().find_map(|(index, key)| Some((index, values.get(*key)?.clone())));
            if let Some(found) = found {
                return Ok(found);
            }
            wait.cancel.check()?;
            if wait.deadline.passed() {
                return Err(super::no_key(self, keys[0], wait));
            }
            if lookout.is_due() {
                // The watch may use this store.
                drop(values);
                lookout.look()?;
                values = self.values();
                continue;
            }
            let slept = self.0.changed.wait_timeout(values, wait.deadline.slice());
            values = slept.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn try_get(&self, key: &str, _wait: &Wait) -> Result<Option<Vec<u8>>> {
        Ok(self.values().get(key).cloned())
    }

    fn add(&self, key: &str, amount: i64, _wait: &Wait) -> Result<i64> {
        let mut values = self.values();
        let sum = super::parse_integer(self, key, values.get(key).map(Vec::as_slice))?.wrapping_add(amount);
        values.insert(key.to_owned(), sum.to_string().into_bytes());
        self.0.changed.notify_all();
        Ok(sum)
    }

    fn set_once(&self, key: &str, value: &[u8], _wait: &Wait) -> Result<Vec<u8>> {
        let mut values = self.values();
        let stands = values.entry(key.to_owned()).or_insert_with(|| value.to_vec()).clone();
        self.0.changed.notify_all();
        Ok(stands)
    }

    fn present(&self, keys: &[String], _wait: &Wait) -> Result<Vec<bool>> {
        let values = self.values();
        Ok(keys.iter().map(|key| values.contains_key(key)).collect())
    }

    fn delete(&self, key: &str, _wait: &Wait) -> Result<()> {
        self.values().remove(key);
        Ok(())
    }

    fn name(&self) -> &str {
        "this process's memory"
    }
}
