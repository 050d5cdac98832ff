//! The anonymous file that holds a segment: how it is made, opened, sized and mapped.

use std::ffi::CStr;
use std::fs;
use std::io;
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;

use super::header::Header;
use super::layout::HEADER_BYTES;
use crate::error::{Error, Result};
use crate::fork::{self, Private};
use crate::machine;
use crate::memory_file::{self, owned, resize, seal};
use crate::process;
use crate::types::ncclSystemError;

/// The version of the layout. The version changes with the layout, so that ranks with different
/// versions of the library refuse each other.
pub(crate) const LAYOUT_VERSION: u32 = 16;
/// Where the version of the layout lies in a segment, in bytes.
#[cfg(test)]
pub(crate) const VERSION_AT: usize = offset_of!(Header, version);
/// The first bytes of a segment, which tell a segment from another file.
const MAGIC: u64 = 0x6c63_6374_736f_6868;
/// The name of the anonymous file in `/proc/<pid>/fd` and `/proc/<pid>/maps`.
const NAME: &CStr = c"hostccl";

/// A mapping of a segment's first bytes.
#[derive(Debug)]
pub(super) struct Mapping {
    /// The address of the first byte.
    pub(super) base: NonNull<u8>,
    /// The length in bytes: the header alone, or the whole segment.
    pub(super) bytes: usize,
}

// SAFETY: threads and processes share the memory in any case. Every access is atomic, or is ordered
// by atomic accesses.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(super) fn new(fd: RawFd, bytes: usize) -> Result<Mapping> {
        let read_write = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let map = || unsafe { libc::mmap(std::ptr::null_mut(), bytes, read_write, libc::MAP_SHARED, fd, 0) };
        let base = fork::map_apart(bytes, map);
        if base == libc::MAP_FAILED {
            let why = machine::explained_memory(bytes, &io::Error::last_os_error());
            return Err(Error::new(ncclSystemError, format!("mapping {bytes} bytes of shared memory: {why}")));
        }
        // A thread that changes a word finds the doorbells by their distance from the word
        // (`Event::ring`).
        base.expose_provenance();
        Ok(Mapping { base: NonNull::new(base.cast()).expect("mmap never returns NULL here"), bytes })
    }

    pub(super) fn header(&self) -> &Header {
        // SAFETY: a mapping is aligned to a page, has at least the header's size, and lives as long
        // as `self`. All fields that change after `create` are atomics.
        unsafe { self.base.cast().as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if fork::is_child() {
            // The segment is not mapped in the child, and other memory may lie at its address.
            return;
        }
        // SAFETY: `self` made the mapping, and nothing borrows from it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// The fields of a segment's header that do not change after the segment is made. They are read and
/// written without a mapping, because one read or write takes less time than a mapping.
struct Head {
    magic: u64,
    version: u32,
    token: [u8; 16],
    among: u32,
}

impl Head {
    /// The length of the header's part with these fields.
    const BYTES: usize = offset_of!(Header, among) + size_of::<u32>();

    /// The part of a new segment's header. The fields that are not in `Head` are 0.
    fn to_bytes(&self) -> [u8; Head::BYTES] {
        let mut bytes = [0; Head::BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(offset_of!(Header, magic), &self.magic.to_ne_bytes());
        put(offset_of!(Header, version), &self.version.to_ne_bytes());
        put(offset_of!(Header, token), &self.token);
        put(offset_of!(Header, among), &self.among.to_ne_bytes());
        bytes
    }

    /// Reads the fields of a segment. The file has at least [`HEADER_BYTES`] bytes.
    fn read(file: &fs::File) -> io::Result<Head> {
        let mut bytes = [0; Head::BYTES];
        file.read_exact_at(&mut bytes, 0)?;
        fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
            bytes[at..at + N].try_into().expect("the slice has N bytes")
        }
        Ok(Head {
            magic: u64::from_ne_bytes(field(&bytes, offset_of!(Header, magic))),
            version: u32::from_ne_bytes(field(&bytes, offset_of!(Header, version))),
            token: field(&bytes, offset_of!(Header, token)),
            among: u32::from_ne_bytes(field(&bytes, offset_of!(Header, among))),
        })
    }
}

/// Makes a new segment, which has only a header, and returns its descriptor.
pub(crate) fn create(token: [u8; 16]) -> Result<OwnedFd> {
    create_split(token, 0)
}

/// Does what [`create`] does for a part of a split. [`Layout::split`](super::Layout::split) has the
/// meaning of `among`.
pub(crate) fn create_split(token: [u8; 16], among: u32) -> Result<OwnedFd> {
    let refused = |reason| machine::explained_call("memfd_create", &reason);
    let fd = memory_file::open(NAME);
    let fd = fd.map_err(|reason| Error::new(ncclSystemError, format!("shared memory: {}", refused(reason))))?;
    resize(&fd, HEADER_BYTES)?;
    seal(&fd, libc::F_SEAL_SHRINK)?;
    let head = Head { magic: MAGIC, version: LAYOUT_VERSION, token, among };
    let fd = fs::File::from(fd);
    fd.write_all_at(&head.to_bytes(), 0).map_err(|reason| {
        let why = machine::explained_memory(HEADER_BYTES, &reason);
        Error::new(ncclSystemError, format!("writing to shared memory: {why}"))
    })?;
    Ok(fd.into())
}

/// Reads the number `among` with which a segment was made. [`Layout::split`](super::Layout::split)
/// says what the number means.
pub(super) fn among(fd: &OwnedFd) -> Result<u32> {
    let (mut among, at) = (0_u32, offset_of!(Header, among) as libc::off_t);
    // SAFETY: the number is valid for its size.
    let count = unsafe { libc::pread(fd.as_raw_fd(), (&raw mut among).cast(), size_of::<u32>(), at) };
    if count != size_of::<u32>() as isize {
        return Err(Error::system("reading shared memory", io::Error::last_os_error()));
    }
    Ok(among)
}

/// Whether the file of a segment has at least that size.
pub(super) fn has(fd: &OwnedFd, bytes: usize) -> Result<bool> {
    let mut about = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: there is a place for the answer.
    if unsafe { libc::fstat(fd.as_raw_fd(), about.as_mut_ptr()) } != 0 {
        return Err(Error::system("looking at shared memory", io::Error::last_os_error()));
    }
    // SAFETY: the call has succeeded, so the answer is there.
    Ok(unsafe { about.assume_init() }.st_size as usize >= bytes)
}

/// Opens the segment that process `owner` holds at descriptor `fd`. Returns `None` if there is no
/// segment with that token. Only the caller knows whether this means that the process has ended,
/// or that the process has closed the segment.
pub(crate) fn open(owner: u32, fd: RawFd, token: [u8; 16]) -> Result<Option<Private<OwnedFd>>> {
    let found = if owner == std::process::id() { open_here(fd) } else { open_there(owner, fd) }?;
    let Some(file) = found else { return Ok(None) };
    let about = file.metadata().map_err(|reason| Error::system("looking at shared memory", reason))?;
    if !about.is_file() || about.len() < HEADER_BYTES as u64 {
        return Ok(None);
    }
    let head = Head::read(&file).map_err(|reason| Error::system("reading shared memory", reason))?;
    if head.magic != MAGIC || head.token != token {
        return Ok(None);
    }
    if head.version != LAYOUT_VERSION {
        return Err(Error::usage(format!(
            "another version of hostccl made the unique id (layout {}, this one has {LAYOUT_VERSION}): all ranks need the same library",
            head.version
        )));
    }
    Ok(Some(file.map(OwnedFd::from)))
}

/// Copies descriptor `fd` of this process, for which no `/proc` is needed. Returns `None` when it
/// is not open for reading and writing.
fn open_here(fd: RawFd) -> Result<Option<Private<fs::File>>> {
    // SAFETY: the call only asks about a number.
    let mode = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if mode < 0 || mode & libc::O_ACCMODE != libc::O_RDWR {
        return Ok(None);
    }
    // SAFETY: the result is a new descriptor or -1.
    let copied = Private::open(|| unsafe { owned(libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0)) });
    match copied {
        Ok(copied) => Ok(Some(copied.map(fs::File::from))),
        Err(reason) if reason.raw_os_error() == Some(libc::EBADF) => Ok(None),
        Err(reason) => Err(Error::system("opening shared memory", reason)),
    }
}

/// Opens the file that process `owner` has at `fd`. Returns `None` when that is no segment.
fn open_there(owner: u32, fd: RawFd) -> Result<Option<Private<fs::File>>> {
    let (path, link) = process::link_of_file(owner, fd);
    let refused = |reason: io::Error| match reason.kind() {
        io::ErrorKind::NotFound => match machine::broken_proc() {
            Some(why) => Err(Error::new(ncclSystemError, why)),
            None => Ok(None),
        },
        io::ErrorKind::PermissionDenied => Err(Error::new(ncclSystemError, machine::denied(owner, &reason))),
        _ => Err(Error::system(&format!("opening {path}"), reason)),
    };
    match link {
        // To open a file of another kind might block or have effects, so its name is checked first.
        Ok(target) if !target.to_string_lossy().starts_with("/memfd:hostccl") => return Ok(None),
        Ok(_) => {}
        Err(reason) => return refused(reason),
    }
    let opened = Private::open(|| fs::OpenOptions::new().read(true).write(true).open(&path));
    opened.map(Some).or_else(refused)
}
