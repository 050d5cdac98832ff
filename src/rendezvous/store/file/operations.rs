//! The operations of a store, on the files of a folder.

use std::fs;
use std::io::{self, ErrorKind};
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::io::Errno;

use super::super::{LeftWorld, Store, no_key, parse_integer};
use super::FileStore;
use crate::error::Result;
use crate::wait::Wait;

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8], _wait: &Wait) -> Result<()> {
        self.write(key, value)
    }

    fn get_any(&self, keys: &[&str], wait: &Wait) -> Result<(usize, Vec<u8>)> {
        let (mut pause, mut lookout) = (Duration::from_micros(200), wait.lookout());
        loop {
            for (index, key) in keys.iter().enumerate() {
                if let Some(value) = self.read(key)? {
                    return Ok((index, value));
                }
            }
            wait.cancel.check()?;
            if wait.deadline.passed() {
                return Err(no_key(self, keys[0], wait));
            }
            lookout.look()?;
            std::thread::sleep(pause.min(wait.deadline.slice()));
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }

    fn try_get(&self, key: &str, _wait: &Wait) -> Result<Option<Vec<u8>>> {
        self.read(key)
    }

    fn add(&self, key: &str, amount: i64, wait: &Wait) -> Result<i64> {
        let _lock = self.lock(wait)?;
        let sum = parse_integer(self, key, self.read(key)?.as_deref())?.wrapping_add(amount);
        self.write(key, sum.to_string().as_bytes())?;
        Ok(sum)
    }

    fn set_once(&self, key: &str, value: &[u8], wait: &Wait) -> Result<Vec<u8>> {
        let fresh = self.fresh(key, value)?;
        // A link either makes the name with its whole content, or fails because the name exists.
        let linked = fs::hard_link(&fresh, self.path(key));
        let _ = fs::remove_file(&fresh);
        match linked {
            Ok(()) => {
                self.has_stored.store(true, Ordering::SeqCst);
                Ok(value.to_vec())
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => self.get(key, wait),
            // On a file system without hard links every rank that sets a key once takes the lock
            // instead.
            Err(error) if has_no_links(&error) => {
                let _lock = self.lock(wait)?;
                match self.read(key)? {
                    Some(stands) => Ok(stands),
                    None => self.write(key, value).map(|()| value.to_vec()),
                }
            }
            Err(error) => Err(self.broken("link", key, &error)),
        }
    }

    fn present(&self, keys: &[String], _wait: &Wait) -> Result<Vec<bool>> {
        let is_there = |key: &String| match fs::symlink_metadata(self.path(key)) {
            Ok(there) => self.check(key, &there).map(|()| true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(self.broken("look for", key, &error)),
        };
        keys.iter().map(is_there).collect()
    }

    fn delete(&self, key: &str, _wait: &Wait) -> Result<()> {
        match fs::remove_file(self.path(key)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(self.broken("delete", key, &error)),
            _ => Ok(()),
        }
    }

    fn leave_world(&self, world: &LeftWorld<'_>, wait: &Wait) {
        // A file that cannot be removed stays. Nobody needs it.
        let _ = self.end(world, wait);
    }

    fn name(&self) -> &str {
        &self.name
    }
}

/// Whether a link failed because this file system has no links, or allows none. Another failure,
/// for example of the network, says nothing about the other ranks: they may have linked their
/// values, so this rank must not take the lock instead.
fn has_no_links(error: &io::Error) -> bool {
    let without = [Errno::PERM, Errno::OPNOTSUPP, Errno::NOSYS, Errno::MLINK];
    Errno::from_io_error(error).is_some_and(|errno| without.contains(&errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_system_without_links_is_locked_instead() {
        let judged = |errno: Errno| has_no_links(&io::Error::from(errno));
        assert!([Errno::PERM, Errno::OPNOTSUPP, Errno::NOSYS, Errno::MLINK].into_iter().all(judged));
        assert!(![Errno::NOSPC, Errno::IO, Errno::STALE, Errno::NOENT, Errno::ACCESS].into_iter().any(judged));
    }
}
