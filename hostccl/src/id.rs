//! The unique id. It tells the ranks of a new communicator where to find the segment.

use std::collections::HashMap;
use std::ffi::c_char;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::error::{Error, Result};
use crate::fork::Private;
use crate::machine;
use crate::process::ProcessId;
use crate::segment::{self, LAYOUT_VERSION};
use crate::types::{NCCL_UNIQUE_ID_BYTES, ncclSystemError, ncclUniqueId};

/// The first bytes of an id, by which a foreign id is recognised.
const MAGIC: [u8; 8] = *b"hostccl\x01";

/// The fields of a unique id. [`Id::to_raw`] writes them into its 128 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id {
    /// The segment's random number, which tells it from another segment at that descriptor.
    pub(crate) token: [u8; 16],
    /// The process that made the id and holds the segment open.
    pub(crate) creator: ProcessId,
    /// The segment's descriptor in that process.
    pub(crate) fd: RawFd,
    /// The hash of the kernel's boot id, which tells hosts and reboots apart; 0 where `/proc` does
    /// not tell.
    boot: u64,
    /// The process-id namespace of `creator`: process numbers mean nothing outside it. It is 0
    /// where `/proc` does not tell.
    namespace: u64,
}

/// The segments of the ids that this process has made and that have not started a communicator yet,
/// by token. A forked child has them, too, because a program may make an id and then fork its
/// ranks.
fn open_ids() -> &'static Mutex<HashMap<[u8; 16], OwnedFd>> {
    static OPEN: OnceLock<Mutex<HashMap<[u8; 16], OwnedFd>>> = OnceLock::new();
    OPEN.get_or_init(Mutex::default)
}

impl Id {
    /// Makes an id and its segment, which stays open until [`Id::close`]. `_hosts` says whether the
    /// ranks are on several hosts; `None` where the caller does not know it.
    pub(crate) fn create(_hosts: Option<bool>) -> Result<Id> {
        let token = random_token()?;
        let fd = segment::create(token)?;
        let id = Id {
            token,
            creator: ProcessId::current(),
            fd: fd.as_raw_fd(),
            boot: boot_hash()?,
            namespace: pid_namespace()?,
        };
        let mut open = open_ids().lock().unwrap_or_else(PoisonError::into_inner);
        // A creator that joins closes its id when it has joined. A creator that only makes ids for
        // others closes the old ones here.
        open.retain(|_, fd| !segment::is_over(fd));
        open.insert(token, fd);
        Ok(id)
    }

    /// Reads an id. Refuses bytes that no id has, and an id of another version of this library.
    pub(crate) fn parse(raw: &ncclUniqueId) -> Result<Id> {
        let bytes = raw.internal.map(|byte| byte as u8);
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if bytes[..8] != MAGIC {
            return Err(Error::argument(
                "the unique id was not made by hostccl's ncclGetUniqueId: all ranks need the same communicator library",
            ));
        }
        if u32_at(8) != LAYOUT_VERSION {
            return Err(Error::usage(format!(
                "another version of hostccl made the unique id (layout {}, this one has {LAYOUT_VERSION}): all ranks need the same library",
                u32_at(8)
            )));
        }
        if u64_at(64) != checksum(&bytes[..64]) {
            return Err(Error::argument("the unique id is damaged: copy all of its 128 bytes"));
        }
        Ok(Id {
            token: bytes[16..32].try_into().expect("sixteen bytes"),
            creator: ProcessId { pid: u32_at(32), start: u64_at(40) },
            fd: u32_at(36) as RawFd,
            boot: u64_at(48),
            namespace: u64_at(56),
        })
    }

    /// Returns the 128 bytes of the id.
    pub(crate) fn to_raw(self) -> ncclUniqueId {
        let mut bytes = [0; NCCL_UNIQUE_ID_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&LAYOUT_VERSION.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.token);
        bytes[32..36].copy_from_slice(&self.creator.pid.to_le_bytes());
        bytes[36..40].copy_from_slice(&(self.fd as u32).to_le_bytes());
        bytes[40..48].copy_from_slice(&self.creator.start.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.boot.to_le_bytes());
        bytes[56..64].copy_from_slice(&self.namespace.to_le_bytes());
        let sum = checksum(&bytes[..64]);
        bytes[64..72].copy_from_slice(&sum.to_le_bytes());
        ncclUniqueId { internal: bytes.map(|byte| byte as c_char) }
    }

    /// Opens the segment. Refuses an id that was made on another host or in another process-id
    /// namespace.
    pub(crate) fn open(&self) -> Result<Private<OwnedFd>> {
        if self.creator.pid != std::process::id() {
            if let Some(why) = machine::broken_proc() {
                return Err(Error::new(ncclSystemError, why));
            }
        }
        if differ(self.boot, boot_hash()?) {
            return Err(Error::usage(
                "the unique id was made on another host (or before a reboot): hostccl works within one machine, ranks on several need NCCL",
            ));
        }
        if differ(self.namespace, pid_namespace()?) {
            return Err(Error::usage(
                "the unique id was made in another process-id namespace (container): ranks of one machine need a shared one",
            ));
        }
        let (pid, fd) = (self.creator.pid, self.fd);
        segment::open(pid, fd, self.token)?.ok_or_else(|| {
            Error::usage(format!(
                "the unique id is used up or its segment is gone (process {pid}, descriptor {fd}): one id starts one communicator, and its creator lives until all ranks have joined"
            ))
        })
    }

    /// Gives the id up, because rank `rank` of this process cannot join; `error` says why. If this
    /// process made the id, the segment stays open until the next id is made, so that the ranks
    /// that come later read the reason.
    pub(crate) fn give_up(&self, rank: u32, error: &Error) {
        let mut open = open_ids().lock().unwrap_or_else(PoisonError::into_inner);
        if open.get(&self.token).is_some_and(|fd| !segment::fail(fd, rank, error)) {
            open.remove(&self.token);
        }
    }

    /// Closes the segment's descriptor if this process made the id. Nobody can join by the id any
    /// more.
    pub(crate) fn close(&self) {
        open_ids().lock().unwrap_or_else(PoisonError::into_inner).remove(&self.token);
    }
}

/// Returns the random number of a new segment.
pub(crate) fn random_token() -> Result<[u8; 16]> {
    let mut token = [0; 16];
    // SAFETY: the buffer has that many bytes. A request for so few bytes is never met in part.
    let got = unsafe { libc::getrandom(token.as_mut_ptr().cast(), token.len(), 0) };
    if got == token.len() as isize {
        Ok(token)
    } else {
        Err(Error::system("getting random bytes", io::Error::last_os_error()))
    }
}

/// Whether two numbers of machines are both known, and are not equal. The number 0 is unknown.
fn differ(theirs: u64, mine: u64) -> bool {
    theirs != 0 && mine != 0 && theirs != mine
}

/// Returns the number that was read, and 0 where this machine hides it. Another error says nothing
/// about the machine, for example that this process can open no more files, so it is passed on.
fn known(answer: io::Result<u64>) -> Result<u64> {
    match answer {
        Err(reason) if !matches!(reason.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => {
            Err(Error::system("finding out which machine this is", reason))
        }
        answer => Ok(answer.unwrap_or(0)),
    }
}

/// Returns the hash of the kernel's boot id, or 0 where `/proc` does not tell.
fn boot_hash() -> Result<u64> {
    static HASH: OnceLock<u64> = OnceLock::new();
    if let Some(hash) = HASH.get() {
        return Ok(*hash);
    }
    let hash = known(fs::read("/proc/sys/kernel/random/boot_id").map(|boot| checksum(&boot)))?;
    Ok(*HASH.get_or_init(|| hash))
}

/// Returns the number of this process's process-id namespace, or 0 where `/proc` does not tell. It
/// is read anew each time, because `unshare` and `fork` can put a process into another namespace.
fn pid_namespace() -> Result<u64> {
    known(fs::metadata("/proc/self/ns/pid").map(|meta| std::os::linux::fs::MetadataExt::st_ino(&meta)))
}

/// Returns the FNV-1a hash of the bytes.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::labels::Labels;
    use crate::types::*;

    #[test]
    fn an_id_survives_its_bytes() {
        let id = Id::create(None).unwrap();
        assert_eq!(Id::parse(&id.to_raw()).unwrap(), id);
        id.open().unwrap();
        id.close();
        let error = id.open().unwrap_err();
        assert_eq!(error.code(), ncclInvalidUsage);
        assert!(error.message().contains("used up"), "{}", error.message());
    }

    #[test]
    fn ranks_that_come_after_its_maker_gave_up_read_why() {
        let id = Id::create(None).unwrap();
        id.give_up(0, &Error::new(ncclSystemError, "no memory"));
        let error = segment::Segment::map(&id.open().unwrap(), 2, 1, &Labels::default()).unwrap_err();
        assert_eq!((error.code(), error.lost()), (ncclSystemError, Some(0)));
        assert!(error.message().ends_with("no memory"), "{}", error.message());
        Id::create(None).unwrap().close();
        assert!(id.open().unwrap_err().message().contains("used up"), "the next id closes what has failed");
    }

    #[test]
    fn foreign_bytes_are_refused() {
        let zero = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
        assert_eq!(Id::parse(&zero).unwrap_err().code(), ncclInvalidArgument);
        let id = Id::create(None).unwrap();
        let mut cut = id.to_raw();
        cut.internal[40] ^= 1;
        assert_eq!(Id::parse(&cut).unwrap_err().code(), ncclInvalidArgument);
        let mut newer = id.to_raw();
        newer.internal[8] += 1;
        assert_eq!(Id::parse(&newer).unwrap_err().code(), ncclInvalidUsage);
        id.close();
    }

    #[test]
    fn an_id_from_elsewhere_says_so() {
        let id = Id::create(None).unwrap();
        let host = Id { boot: id.boot ^ 1, ..id }.open().unwrap_err();
        assert!(host.message().contains("another host"), "{}", host.message());
        let container = Id { namespace: id.namespace ^ 1, ..id }.open().unwrap_err();
        assert!(container.message().contains("namespace"), "{}", container.message());
        id.close();
    }
}
