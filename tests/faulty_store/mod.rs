//! A store of the caller that breaks its promises.

use devicemesh::error::Result;
use devicemesh::rendezvous::store::{MemoryStore, Store};
use devicemesh::wait::Wait;

/// The ways in which a store of the caller is wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Wrong {
    /// `set_once` panics.
    SetOncePanics,
    /// `try_get` of a key of the tokens panics.
    LookPanics,
    /// Every verdict reads thus.
    Verdict(&'static str),
    /// `get_any` gives this index.
    Index(usize),
    /// `get_any` of several keys always finds the last one, which tells of a loss.
    LossesWithoutEnd,
}

/// A store in memory that is wrong in one way.
pub struct Faulty(pub MemoryStore, pub Wrong);

impl Store for Faulty {
    fn set(&self, key: &str, value: &[u8], wait: &Wait) -> Result<()> {
        self.0.set(key, value, wait)
    }
    fn get_any(&self, keys: &[&str], wait: &Wait) -> Result<(usize, Vec<u8>)> {
        if self.1 == Wrong::LossesWithoutEnd && keys.len() > 1 {
            return Ok((keys.len() - 1, b"nobody".to_vec()));
        }
        let (index, value) = self.0.get_any(keys, wait)?;
        Ok(match self.1 {
            Wrong::Verdict(text) if keys[index].ends_with("/verdict") => (index, text.into()),
            Wrong::Index(wrong) => (wrong, value),
            _ => (index, value),
        })
    }
    fn try_get(&self, key: &str, wait: &Wait) -> Result<Option<Vec<u8>>> {
        assert!(self.1 != Wrong::LookPanics || !key.ends_with("/tokens"), "the caller's own panic");
        self.0.try_get(key, wait)
    }
    fn add(&self, key: &str, amount: i64, wait: &Wait) -> Result<i64> {
        self.0.add(key, amount, wait)
    }
    fn set_once(&self, key: &str, value: &[u8], wait: &Wait) -> Result<Vec<u8>> {
        assert!(self.1 != Wrong::SetOncePanics, "the caller's own panic");
        let stands = self.0.set_once(key, value, wait)?;
        Ok(if let Wrong::Verdict(text) = self.1 { text.into() } else { stands })
    }
    fn present(&self, keys: &[String], wait: &Wait) -> Result<Vec<bool>> {
        self.0.present(keys, wait)
    }
    fn delete(&self, key: &str, wait: &Wait) -> Result<()> {
        self.0.delete(key, wait)
    }
    fn name(&self) -> &str {
        "a faulty store"
    }
}
