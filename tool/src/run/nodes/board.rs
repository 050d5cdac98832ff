//! The job's keys in the store.
//!
//! A store that a `devicemesh run` serves has one job, and ends with it. A store that a
//! `devicemesh store` serves has one job after the other, and each start of a job that starts again
//! is a job of its own there. So the keys of each job have its number: `devicemesh/run/7/over`.

use devicemesh::error::Result;
use devicemesh::rendezvous::store::{Store, TcpStore};
use devicemesh::wait::Wait;

use super::keys::PREFIX;

/// The store, as this job sees it. The functions do what those of [`Store`] do.
pub struct Board {
    store: TcpStore,
    /// The number of the job in the store of a service, from 1. `None` where a node serves the
    /// store.
    job: Option<u64>,
}

impl Board {
    pub fn new(store: TcpStore, job: Option<u64>) -> Board {
        Board { store, job }
    }

    /// The number of the job in the store of a service.
    pub fn job(&self) -> Option<u64> {
        self.job
    }

    /// The key of this job. Only keys with the [`PREFIX`] differ from job to job.
    fn key(&self, key: &str) -> String {
        match (self.job, key.strip_prefix(PREFIX)) {
            (Some(job), Some(rest)) => of_job(job, rest),
            _ => key.to_owned(),
        }
    }

    pub fn name(&self) -> &str {
        self.store.name()
    }

    pub fn get(&self, key: &str, wait: &Wait) -> Result<Vec<u8>> {
        self.store.get(&self.key(key), wait)
    }

    pub fn get_any(&self, keys: &[&str], wait: &Wait) -> Result<(usize, Vec<u8>)> {
        let keys: Vec<String> = keys.iter().map(|key| self.key(key)).collect();
        self.store.get_any(&keys.iter().map(String::as_str).collect::<Vec<_>>(), wait)
    }

    pub fn try_get(&self, key: &str, wait: &Wait) -> Result<Option<Vec<u8>>> {
        self.store.try_get(&self.key(key), wait)
    }

    pub fn present(&self, keys: &[String], wait: &Wait) -> Result<Vec<bool>> {
        let keys: Vec<String> = keys.iter().map(|key| self.key(key)).collect();
        self.store.present(&keys, wait)
    }

    pub fn set(&self, key: &str, value: &[u8], wait: &Wait) -> Result<()> {
        self.store.set(&self.key(key), value, wait)
    }

    pub fn set_once(&self, key: &str, value: &[u8], wait: &Wait) -> Result<Vec<u8>> {
        self.store.set_once(&self.key(key), value, wait)
    }

    pub fn add(&self, key: &str, amount: i64, wait: &Wait) -> Result<i64> {
        self.store.add(&self.key(key), amount, wait)
    }

    pub fn delete(&self, key: &str, wait: &Wait) -> Result<()> {
        self.store.delete(&self.key(key), wait)
    }

    pub fn leave_last_word(&self, key: &str, word: &[u8], wait: &Wait) -> Result<bool> {
        self.store.leave_last_word(&self.key(key), word, wait)
    }
}

/// A key of a job in the store of a service.
pub fn of_job(job: u64, rest: &str) -> String {
    format!("{PREFIX}{job}/{rest}")
}
