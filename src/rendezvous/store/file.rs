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

mod ending;
mod operations;

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hostccl::fork::{self, Private};
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};

use super::frame::MAX_VALUE;
use super::random;
use crate::error::{Error, Result};
use crate::printable::printable;
use crate::rendezvous::host::host_name;
use crate::wait::Wait;

/// The name of the file that is locked while counters change. No key has this name. While a rank
/// has the lock, the file says which rank that is ([`Holder`]).
const LOCK: &str = ".lock";

/// A folder as a store.
#[derive(Debug)]
pub struct FileStore {
    /// `file://` and the path, for messages.
    name: String,
    /// The folder.
    folder: PathBuf,
    /// The user to whom the folder belongs. The files in it belong to the same user.
    owner: u32,
    /// Whether this handle has stored a key. Until then the last rank of an earlier world may
    /// remove the folder, and this handle makes it again.
    has_stored: AtomicBool,
    /// The rank that uses this handle, where there is one.
    rank: Option<i32>,
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
        let there = loop {
            make(&folder).map_err(|error| failed("make", &error))?;
            match fs::symlink_metadata(&folder) {
                // The last rank of an earlier world has just removed the folder.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                there => break there.map_err(|error| failed("look at", &error))?,
            }
        };
        let refused = |what: String| {
            Error::store(format!("the store's folder {} {what}: remove it, or name another path", folder.display()))
        };
        if !there.is_dir() {
            return Err(refused(format!("is a {}, not a folder", kind(&there))));
        }
        let store = FileStore {
            name: format!("file://{}", path.display()),
            folder: folder.clone(),
            owner: there.uid(),
            has_stored: AtomicBool::new(false),
            rank: None,
        };
        // A file system may map users, and may know no modes. So the owner and the mode of a fresh
        // file are compared with those of the folder.
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

    /// Opens the store of `path` as [`open`](FileStore::open) does, for this rank. If this rank is
    /// stopped while it has the lock, the errors of the ranks that wait for the lock name this
    /// rank.
    pub fn open_as(path: &Path, rank: i32) -> Result<FileStore> {
        FileStore::open(path).map(|store| FileStore { rank: Some(rank), ..store })
    }

    /// Makes the folder again, if an earlier world may have removed it since this handle was
    /// opened. Returns whether it did.
    fn make_again(&self, error: &io::Error) -> bool {
        error.kind() == ErrorKind::NotFound && !self.has_stored.load(Ordering::SeqCst) && make(&self.folder).is_ok()
    }

    /// Removes the folder with everything in it.
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
        let refused = |what: String| Error::store(format!("the file of key {key} in {} {what}", self.name));
        if !file.is_file() {
            return Err(refused(format!("is a {}, not a regular file", kind(file))));
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
                Err(error) if error.kind() == ErrorKind::AlreadyExists || self.make_again(&error) => {}
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

    /// Stores `value` under `key`, in place of what was there.
    fn write(&self, key: &str, value: &[u8]) -> Result<()> {
        let fresh = self.fresh(key, value)?;
        fs::rename(&fresh, self.path(key)).map_err(|error| {
            let _ = fs::remove_file(&fresh);
            self.broken("set", key, &error)
        })?;
        self.has_stored.store(true, Ordering::SeqCst);
        Ok(())
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
    pub(crate) fn lock(&self, wait: &Wait) -> Result<Lock> {
        let path = self.folder.join(LOCK);
        let mut pause = Duration::from_micros(100);
        let mut file = self.open_lock(&path)?;
        loop {
            let error: io::Error = match flock(&*file, FlockOperation::NonBlockingLockExclusive) {
                // The last rank of an earlier world may have removed the file meanwhile. Then the
                // others lock another file.
                Ok(()) if !is_at(&file, &path) => {
                    file = self.open_lock(&path)?;
                    continue;
                }
                Ok(()) => {
                    let lock = Lock(file);
                    // A rank that died while it had the lock has left its text. Nothing depends on
                    // the text except a message, so a failure here does no harm.
                    let _ = lock.0.set_len(0);
                    let _ = self.rank.map(|rank| lock.0.write_all_at(Holder::text_of(rank).as_bytes(), 0));
                    return Ok(lock);
                }
                Err(error) => error.into(),
            };
            if !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) {
                return Err(self.broken("lock", "counters", &error));
            }
            wait.cancel.check()?;
            if wait.deadline.passed() {
                let holder = Holder::read(&file);
                let (who, ranks) = match &holder {
                    Some(Holder { rank, process }) => (format!("rank {rank} ({process})"), vec![*rank]),
                    None => ("another process".to_owned(), Vec::new()),
                };
                let millis = wait.deadline.timeout().as_millis();
                let message = format!("{who} has not given back the lock of {} within {millis} ms", self.name);
                return Err(Error::timeout(message).with_ranks(&ranks));
            }
            std::thread::sleep(pause.min(wait.deadline.slice()));
            pause = (pause * 2).min(Duration::from_millis(5));
        }
    }

    fn open_lock(&self, path: &Path) -> Result<Private<File>> {
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).read(true).write(true).mode(0o600).custom_flags(CAREFULLY);
        let file = loop {
            match options.open(path) {
                Ok(file) => break Private::of(file),
                Err(error) if self.make_again(&error) => {}
                Err(error) => {
                    // The kind of the file says more than the error of opening it.
                    if let Ok(there) = fs::symlink_metadata(path) {
                        self.check(LOCK, &there)?;
                    }
                    return Err(self.broken("lock", "counters", &error));
                }
            }
        };
        let there = file.metadata().map_err(|error| self.broken("lock", "counters", &error))?;
        self.check(LOCK, &there).map(|()| file)
    }
}

/// Makes the folder for this user alone, if it is not there.
fn make(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Whether this open file is the one at that path.
fn is_at(file: &File, path: &Path) -> bool {
    let (Ok(open), Ok(there)) = (file.metadata(), fs::symlink_metadata(path)) else { return false };
    (open.dev(), open.ino()) == (there.dev(), there.ino())
}

/// The rank that has the lock, as the lock file says.
struct Holder {
    /// The rank of the world.
    rank: i32,
    /// Its process and host.
    process: String,
}

impl Holder {
    /// The most bytes of the lock file that are read.
    const MOST_BYTES: usize = 256;

    /// Returns the content of the lock file while this rank has the lock.
    fn text_of(rank: i32) -> String {
        format!("{rank} pid {} on {}\n", std::process::id(), host_name())
    }

    /// Reads which rank has the lock. Returns `None` where the file does not say so. That is so for
    /// a moment after a rank has taken the lock.
    fn read(file: &File) -> Option<Holder> {
        let mut bytes = [0; Holder::MOST_BYTES];
        let read = file.read_at(&mut bytes, 0).ok()?;
        let text = std::str::from_utf8(&bytes[..read]).ok()?;
        let (rank, process) = text.strip_suffix('\n')?.split_once(' ')?;
        Some(Holder { rank: rank.parse().ok()?, process: printable(process).into_owned() })
    }
}

/// The right to change counters.
pub(crate) struct Lock(Private<File>);

impl Drop for Lock {
    fn drop(&mut self) {
        if !fork::is_child() {
            // The file must not name a rank that does not have the lock any more.
            let _ = self.0.set_len(0);
            // Closing the file is not enough where a child has a copy.
            let _ = flock(&*self.0, FlockOperation::Unlock);
        }
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
