//! A store in a folder that all ranks share, with one file for each key.
//!
//! `file:///path` names a path as in PyTorch, but the store makes a folder there,
//! `<path>.devicemesh`. Files are renamed and linked into place, so they need no lock to be whole,
//! also on network file systems. Counters take an advisory lock, which the kernel releases when a
//! process dies.
//!
//! The folder must belong to this job's user alone. Everything in it that is no regular file is
//! refused: a symbolic link could lead anywhere, opening a FIFO blocks, and a device may do
//! anything.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hostccl::fork::{self, Private};
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};

use super::frame::MAX_VALUE;
use super::{Store, no_key, parse_integer, random};
use crate::error::{Error, Result};
use crate::wait::Wait;

/// A folder as a store.
#[derive(Debug)]
pub struct FileStore {
    /// `file://` and the path, for messages.
    name: String,
    /// The folder.
    folder: PathBuf,
    /// The user to whom the folder belongs. The files in it belong to the same user.
    owner: u32,
}

impl FileStore {
    /// Opens the store of `path`. A missing folder is made for this user alone. A folder is refused
    /// when others may write to it, when it belongs to another user, and when it is a symbolic
    /// link.
    pub fn open(path: &Path) -> Result<FileStore> {
        let mut folder = path.as_os_str().to_owned();
        folder.push(".devicemesh");
        let folder = PathBuf::from(folder);
        let failed = |action: &str, error: &io::Error| {
            Error::store_io(format!("cannot {action} the store's folder {}", folder.display()), error)
        };
        let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty());
        parent.map_or(Ok(()), fs::create_dir_all).map_err(|error| failed("make", &error))?;
        match DirBuilder::new().mode(0o700).create(&folder) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(failed("make", &error)),
            _ => {}
        }
        let there = fs::symlink_metadata(&folder).map_err(|error| failed("look at", &error))?;
        let refused = |what: String| {
            Error::store(format!("the store's folder {} {what}: remove it, or name another path", folder.display()))
        };
        if !there.is_dir() {
            return Err(refused(format!("is a {}, which is not followed", kind(&there))));
        }
        let store =
            FileStore { name: format!("file://{}", path.display()), folder: folder.clone(), owner: there.uid() };
        // A file shows what this user, and a file for this user alone, look like on this file
        // system, which may map users and know no modes.
        let probe = store.fresh("of a probe", b"")?;
        let ours = fs::symlink_metadata(&probe);
        let _ = fs::remove_file(&probe);
        let ours = ours.map_err(|error| failed("write to", &error))?;
        if ours.uid() != there.uid() {
            return Err(refused(format!("belongs to user {}, and this process is user {}", there.uid(), ours.uid())));
        }
        let mode = there.permissions().mode() & 0o7777;
        if mode & 0o022 != 0 && ours.permissions().mode() & 0o022 == 0 {
            return Err(Error::store(format!(
                "other users can write to the store's folder {} (mode {mode:o}): chmod 700 it, or name another path",
                folder.display()
            )));
        }
        Ok(store)
    }

    /// Removes the folder with everything in it. The last rank that leaves may do so.
    pub fn remove(&self) {
        let _ = fs::remove_dir_all(&self.folder);
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(file_name(key))
    }

    fn broken(&self, action: &str, key: &str, error: &std::io::Error) -> Error {
        Error::store_io(format!("cannot {action} key {key} of {}", self.name), error)
    }

    /// Refuses a file that is no regular file of the folder's owner.
    fn check(&self, key: &str, file: &Metadata) -> Result<()> {
        let refused = |what: String| Error::store(format!("what stands for key {key} in {} {what}", self.name));
        if !file.is_file() {
            return Err(refused(format!("is a {}, no file", kind(file))));
        }
        if file.uid() != self.owner {
            return Err(refused(format!("belongs to user {}, and the folder to user {}", file.uid(), self.owner)));
        }
        if file.len() > MAX_VALUE as u64 {
            return Err(refused(format!("has {} bytes; at most {MAX_VALUE} are taken", file.len())));
        }
        Ok(())
    }

    /// Makes a file with that content under a name that nobody else has.
    fn fresh(&self, key: &str, value: &[u8]) -> Result<PathBuf> {
        if value.len() > MAX_VALUE {
            let len = value.len();
            return Err(Error::store(format!("key {key} with {len} bytes: {} takes at most {MAX_VALUE}", self.name)));
        }
        loop {
            let path = self.folder.join(format!(".new-{:016x}", random()));
            // Two containers may be alike in every other way, so the name is random, and the file
            // system refuses a name that exists.
            match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
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
        let file = match OpenOptions::new().read(true).custom_flags(CAREFULLY).open(self.path(key)) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                // The kind of the file says more than the error of opening it.
                if let Ok(there) = fs::symlink_metadata(self.path(key)) {
                    self.check(key, &there)?;
                }
                return Err(self.broken("read", key, &error));
            }
        };
        let mut value = Vec::new();
        file.metadata().map_err(|error| self.broken("read", key, &error)).and_then(|there| self.check(key, &there))?;
        match file.take(MAX_VALUE as u64 + 1).read_to_end(&mut value) {
            Ok(_) => Ok(Some(value)),
            Err(error) => Err(self.broken("read", key, &error)),
        }
    }

    /// Opens the lock file and waits for the lock. Dropping the result releases the lock. A forked
    /// child has no copy.
    fn lock(&self, wait: &Wait) -> Result<Lock> {
        let path = self.folder.join(".lock");
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).read(true).write(true).mode(0o600).custom_flags(CAREFULLY);
        let file = Private::of(options.open(&path).map_err(|error| {
            let there = fs::symlink_metadata(&path)
                .map_err(|_| ())
                .and_then(|there| self.check(".lock", &there).err().ok_or(()));
            there.unwrap_or_else(|()| self.broken("lock", "counters", &error))
        })?);
        file.metadata()
            .map_err(|error| self.broken("lock", "counters", &error))
            .and_then(|there| self.check(".lock", &there))?;
        let mut pause = Duration::from_micros(100);
        loop {
            let error: io::Error = match flock(&*file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Lock(file)),
                Err(error) => error.into(),
            };
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
            // Closing the file is not enough where a child has a copy.
            let _ = flock(&*self.0, FlockOperation::Unlock);
        }
    }
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8], _wait: &Wait) -> Result<()> {
        let fresh = self.fresh(key, value)?;
        fs::rename(&fresh, self.path(key)).map_err(|error| {
            let _ = fs::remove_file(&fresh);
            self.broken("set", key, &error)
        })
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
        // A link either makes the name with its whole content, or fails because the name exists.
        let linked = fs::hard_link(&fresh, self.path(key));
        let _ = fs::remove_file(&fresh);
        match linked {
            Ok(()) => Ok(value.to_vec()),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => self.get(key, wait),
            // This file system has no links, so everybody who sets once takes the lock.
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

    fn name(&self) -> &str {
        &self.name
    }
}

/// How files are opened that others may have put there: links are not followed, and opening does
/// not wait.
const CAREFULLY: i32 = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;

/// Returns the kind of a file, for messages.
fn kind(there: &Metadata) -> &'static str {
    let kind = there.file_type();
    match () {
        () if kind.is_symlink() => "symbolic link",
        () if kind.is_dir() => "folder",
        () if kind.is_fifo() => "FIFO",
        () if kind.is_socket() => "socket",
        () if kind.is_block_device() || kind.is_char_device() => "device",
        () => "file",
    }
}

/// Returns the file name of a key. Letters, digits, '-' and '_' stay as they are, and every other
/// byte becomes %XX, so different keys have different names. File systems take 255 bytes, so a
/// longer name ends in a digest of the key, after a character that no other name has.
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
