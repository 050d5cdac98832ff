//! A store in a folder that all ranks share: one file per key.
//!
//! `file:///path` names a path as PyTorch does, but what is made there is a folder, `<path>.devicemesh`: files that are renamed and linked
//! into place need no lock to be whole, also on network file systems. Counters take an advisory lock, which the kernel gives back when a
//! process dies.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hostccl::fork::{self, Private};
use sha2::{Digest, Sha256};

use super::{Store, no_key, parse_integer, random};
use crate::error::{Error, Result};
use crate::wait::Wait;

/// A folder as a store.
#[derive(Debug)]
pub struct FileStore {
    name: String,
    folder: PathBuf,
}

impl FileStore {
    /// The store of `path`; its folder is made when missing.
    pub fn open(path: &Path) -> Result<FileStore> {
        let mut folder = path.as_os_str().to_owned();
        folder.push(".devicemesh");
        let folder = PathBuf::from(folder);
        fs::create_dir_all(&folder)
            .map_err(|error| Error::store_io(format!("cannot make the store's folder {}", folder.display()), &error))?;
        Ok(FileStore { name: format!("file://{}", path.display()), folder })
    }

    /// Removes the folder with everything in it: for the last rank that leaves.
    pub fn remove(&self) {
        let _ = fs::remove_dir_all(&self.folder);
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(file_name(key))
    }

    fn broken(&self, action: &str, key: &str, error: &std::io::Error) -> Error {
        Error::store_io(format!("cannot {action} key {key} of {}", self.name), error)
    }

    /// A file with that content under a name that nobody else has.
    fn fresh(&self, key: &str, value: &[u8]) -> Result<PathBuf> {
        loop {
            let path = self.folder.join(format!(".new-{:016x}", random()));
            // Two containers may look alike in every other way, so the name is random, and making it decides.
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(self.broken("write", key, &error)),
                Ok(mut file) => match file.write_all(value) {
                    Ok(()) => return Ok(path),
                    Err(error) => {
                        let _ = fs::remove_file(&path);
                        return Err(self.broken("write", key, &error));
                    }
                },
            }
        }
    }

    fn read(&self, key: &str) -> Result<Option<Vec<u8>>> {
        match fs::read(self.path(key)) {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.broken("read", key, &error)),
        }
    }

    /// Opens the lock file and waits for the lock; dropping the file gives it back. A forked child has no copy.
    fn lock(&self, wait: &Wait) -> Result<Lock> {
        let path = self.folder.join(".lock");
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(path);
        let file = Private::of(file.map_err(|error| self.broken("lock", "counters", &error))?);
        let mut pause = Duration::from_micros(100);
        loop {
            // SAFETY: our own descriptor.
            if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
                return Ok(Lock(file));
            }
            let error = std::io::Error::last_os_error();
            if !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) {
                return Err(self.broken("lock", "counters", &error));
            }
            wait.cancel.check()?;
            if wait.deadline.passed() {
                return Err(Error::timeout(format!(
                    "the lock of {} was held by another process for {} ms",
                    self.name,
                    wait.deadline.timeout().as_millis()
                )));
            }
            std::thread::sleep(pause.min(wait.deadline.slice()));
            pause = (pause * 2).min(Duration::from_millis(5));
        }
    }
}

/// The right to change counters.
struct Lock(Private<File>);

impl Drop for Lock {
    fn drop(&mut self) {
        if !fork::is_child() {
            // SAFETY: our own descriptor. Closing it is not enough where a child has a copy.
            unsafe { libc::flock(self.0.as_raw_fd(), libc::LOCK_UN) };
        }
    }
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8], _wait: &Wait) -> Result<()> {
        let fresh = self.fresh(key, value)?;
        fs::rename(&fresh, self.path(key)).map_err(|error| self.broken("set", key, &error))
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
        self.set(key, sum.to_string().as_bytes(), wait)?;
        Ok(sum)
    }

    fn set_once(&self, key: &str, value: &[u8], wait: &Wait) -> Result<Vec<u8>> {
        let fresh = self.fresh(key, value)?;
        // A link either makes the name with its whole content or finds it taken.
        let linked = fs::hard_link(&fresh, self.path(key));
        let _ = fs::remove_file(&fresh);
        match linked {
            Ok(()) => Ok(value.to_vec()),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => self.get(key, wait),
            // A file system without links: everybody who sets once takes the lock.
            Err(_) => {
                let _lock = self.lock(wait)?;
                match self.read(key)? {
                    Some(stands) => Ok(stands),
                    None => self.set(key, value, wait).map(|()| value.to_vec()),
                }
            }
        }
    }

    fn present(&self, keys: &[String], _wait: &Wait) -> Result<Vec<bool>> {
        Ok(keys.iter().map(|key| self.path(key).exists()).collect())
    }

    fn delete(&self, key: &str, _wait: &Wait) -> Result<()> {
        match fs::remove_file(self.path(key)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(self.broken("delete", key, &error)),
            _ => Ok(()),
        }
    }

    fn name(&self) -> &str {
        &self.name
    }
}

/// Letters, digits, '-' and '_' as they are, every other byte as %XX; so different keys have different names. File systems take 255 bytes:
/// a longer name ends in a digest of the key, after a character that no other name has.
fn file_name(key: &str) -> String {
    const LONGEST: usize = 200;
    let mut name = String::from("k");
    for byte in key.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => name.push(byte as char),
            _ => name.push_str(&format!("%{byte:02X}")),
        }
    }
    if name.len() > LONGEST {
        let digest = Sha256::digest(key.as_bytes());
        name.truncate(LONGEST - 65);
        name.push('~');
        name.extend(digest.iter().map(|byte| format!("{byte:02x}")));
    }
    name
}
