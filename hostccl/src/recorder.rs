//! Makes the memory of this process's recording, which other processes can read.
//!
//! The crate `recording` has the layout, the writer and the reader. A process opens its recording
//! when it first joins a world or makes a communicator, and keeps it until it ends:
//!
//! - Usually the recording is anonymous memory (memfd) with the name `devicemesh-recording`. A
//!   reader of the same user finds it by this name in `/proc/<pid>/fd`, and it is gone with the
//!   process.
//! - With `DM_TRACE_DIR` the recording is a file in that folder, which outlives the process.
//! - With `DM_RECORDER=0` there is no recording.
//!
//! A process that cannot get the memory runs without a recording.
//!
//! A forked child does not write to its parent's recording. The recorder lies in a page that the
//! kernel clears in every child (`MADV_WIPEONFORK`), the memory is not mapped there, and the
//! descriptor is closed there. A child that may use the library opens a recording of its own. The
//! descriptor does not count as held, because the recording alone is no reason to refuse calls in a
//! child.

mod this_thread;

use std::cell::UnsafeCell;
use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io;
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use recording::place::{NAME, file_name};
use recording::{Channel, ChannelState, Recorder, layout};

pub use self::this_thread::{begin, remote_of, take_wait};
pub(crate) use self::this_thread::{note_begun, note_end_of_wait, note_remote, note_sleep, note_wait, quick_clock};
use crate::error::{Error, Result};
use crate::fork::{Closed, map_apart};
use crate::machine;
use crate::memory_file::{self, check_limit, resize, seal};
use crate::process::ProcessId;
use crate::types::ncclSystemError;

/// The variable that turns the recording off.
const SWITCH: &str = "DM_RECORDER";
/// The variable that names the folder for recordings that outlive their processes.
const FOLDER: &str = "DM_TRACE_DIR";
/// The size of a recording in bytes.
const BYTES: usize = layout::WORDS * 8;
/// The size of a page in bytes. A [`Page`] is not larger than that.
const PAGE_BYTES: usize = 4096;

/// The page with the recorder. The pointer is NULL until this process first opens a recording.
static PAGE: AtomicPtr<Page> = AtomicPtr::new(ptr::null_mut());

/// The page that the kernel clears in forked children. The page is never unmapped.
struct Page {
    /// The state of the recording: [`NONE`], [`OPENING`] or [`OPEN`].
    state: AtomicU32,
    /// The recorder, once the state is [`OPEN`]. From then on nobody changes it.
    recorder: UnsafeCell<MaybeUninit<Recorder>>,
}

const _: () = assert!(size_of::<Page>() <= PAGE_BYTES);

/// There is no recording. The kernel clears the page of a child to this value.
const NONE: u32 = 0;
/// A thread opens the recording.
const OPENING: u32 = 1;
/// The recorder is there.
const OPEN: u32 = 2;

/// Returns the recorder of this process; `None` while there is no recording.
#[cfg(not(devicemesh_without_recorder))]
#[inline]
pub fn get() -> Option<&'static Recorder> {
    let page = PAGE.load(Ordering::Acquire);
    // SAFETY: the page is NULL, or mapped for ever.
    let page = unsafe { page.as_ref() }?;
    // SAFETY: a recorder that is open was initialised, and nobody changes it.
    (page.state.load(Ordering::Acquire) == OPEN).then(|| unsafe { (*page.recorder.get()).assume_init_ref() })
}

/// Returns `None`: this build, which benches/recorder.py compares with the usual one, has no
/// recorder.
#[cfg(devicemesh_without_recorder)]
#[inline]
pub fn get() -> Option<&'static Recorder> {
    None
}

/// Opens the recording of this process, unless it is open already or turned off. Fails where
/// `DM_RECORDER` has no valid value, and where the folder of `DM_TRACE_DIR` cannot be used. A
/// process without memory for a recording has none, and the log says why.
pub fn open() -> std::result::Result<(), String> {
    if get().is_some() || cfg!(devicemesh_without_recorder) {
        return Ok(());
    }
    let value = |name| std::env::var_os(name).unwrap_or_default();
    let switch = value(SWITCH);
    match switch.to_string_lossy().trim() {
        "" | "1" => {}
        "0" => return Ok(()),
        _ => return Err(format!("{SWITCH} is {switch:?}: it must be 1 (the default) or 0")),
    }
    let folder = Some(value(FOLDER)).filter(|folder| !folder.is_empty());
    let Some(page) = page() else {
        log::warn!("this process records nothing, because the kernel gives it no memory for that");
        return Ok(());
    };
    loop {
        match page.state.compare_exchange(NONE, OPENING, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => break,
            Err(OPEN) => return Ok(()),
            // Another thread opens the recording, which takes a few system calls.
            Err(_) => std::thread::yield_now(),
        }
    }
    let made = make(folder.as_deref());
    let state = match &made {
        Ok(_) => OPEN,
        Err(_) => NONE,
    };
    let failed = made.map(|recorder| {
        // SAFETY: the state is OPENING, so no other thread reads or writes the recorder.
        unsafe { (*page.recorder.get()).write(recorder) };
    });
    page.state.store(state, Ordering::Release);
    match (failed, folder) {
        (Ok(()), _) => Ok(()),
        (Err(error), Some(folder)) => Err(format!(
            "{FOLDER} is {}, where this process cannot keep its recording: {}",
            folder.to_string_lossy(),
            error.message()
        )),
        (Err(error), None) => {
            log::warn!("this process records nothing, because it cannot get the memory: {}", error.message());
            Ok(())
        }
    }
}

/// A place in the recording that is opened when it is first needed, and closed with its owner.
#[derive(Debug, Default)]
pub(crate) struct OwnedChannel(OnceLock<Channel>);

impl OwnedChannel {
    pub(crate) fn get_or_open(&self, open: impl FnOnce() -> Channel) -> Channel {
        *self.0.get_or_init(open)
    }
}

impl Drop for OwnedChannel {
    fn drop(&mut self) {
        // A forked child has no recorder of its parent.
        if let (Some(channel), Some(recorder)) = (self.0.get(), get()) {
            recorder.set_channel_state(*channel, ChannelState::Closed);
        }
    }
}

/// Returns the page, which is mapped now if it was not before. `None` where the kernel refuses it.
fn page() -> Option<&'static Page> {
    let known = PAGE.load(Ordering::Acquire);
    if let Some(page) = page_at(known) {
        return Some(page);
    }
    let (read_write, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    let page = unsafe { libc::mmap(ptr::null_mut(), PAGE_BYTES, read_write, private, -1, 0) };
    if page == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the page was mapped just now, and nobody else knows it. Without the advice (before
    // Linux 4.14) a child would take its parent's recorder for its own.
    let is_wiped = unsafe { libc::madvise(page, PAGE_BYTES, libc::MADV_WIPEONFORK) } == 0;
    let taken = is_wiped.then(|| PAGE.compare_exchange(known, page.cast(), Ordering::AcqRel, Ordering::Acquire));
    match taken {
        Some(Ok(_)) => page_at(page.cast()),
        other => {
            // SAFETY: the mapping is this thread's alone.
            unsafe { libc::munmap(page, PAGE_BYTES) };
            other.and_then(|found| page_at(found.unwrap_or_else(|theirs| theirs)))
        }
    }
}

/// Returns the page at an address that was read from `PAGE`.
fn page_at(page: *mut Page) -> Option<&'static Page> {
    // SAFETY: the address is NULL, or that of a page that is never unmapped. Zeros are a valid
    // page.
    unsafe { page.as_ref() }
}

/// Makes the memory of a recording, and begins the recording.
fn make(folder: Option<&OsStr>) -> Result<Recorder> {
    let (file, path) = match folder {
        Some(folder) => file_in(Path::new(folder)).map(|(file, path)| (file, Some(path)))?,
        None => (memory()?, None),
    };
    let begun = map(file.as_raw_fd()).map(|words| {
        let host = host_name();
        Recorder::new(words, std::process::id(), &host, env!("CARGO_PKG_VERSION"))
    });
    match (&begun, path) {
        // The descriptor stays open until the process ends, because readers find it in /proc.
        (Ok(_), _) => mem::forget(file),
        (Err(_), Some(path)) => drop(fs::remove_file(path)),
        (Err(_), None) => {}
    }
    begun
}

/// Returns anonymous memory of the size of a recording.
fn memory() -> Result<Closed<OwnedFd>> {
    check_limit(BYTES)?;
    let refused = |reason| Error::new(ncclSystemError, machine::explained_call("memfd_create", &reason));
    let file = Closed::open(|| memory_file::open(NAME)).map_err(refused)?;
    resize(&file, BYTES)?;
    // A reader can rely on the size, because the seals forbid any change of the size.
    seal(&file, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW)?;
    Ok(file)
}

/// Makes the file of this process in a folder, and allocates all blocks of the file. Without the
/// blocks, a full disk would end the process when the process writes to the mapping.
fn file_in(folder: &Path) -> Result<(Closed<OwnedFd>, PathBuf)> {
    check_limit(BYTES)?;
    let ProcessId { pid, start } = ProcessId::current();
    let host = host_name();
    // A process that has two copies of this library has two recordings, so they need different
    // names.
    let mut names = (1..=9).map(|copy| folder.join(file_name(&host, pid, start, copy)));
    let open = |path: &Path| {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        Closed::open(|| options.open(path).map(OwnedFd::from))
    };
    let (file, path) = loop {
        let path = names.next().ok_or_else(|| refused(&io::Error::from_raw_os_error(libc::EEXIST)))?;
        match open(&path) {
            Ok(file) => break (file, path),
            Err(reason) if reason.kind() == io::ErrorKind::AlreadyExists => {}
            Err(reason) => return Err(refused(&reason)),
        }
    };
    // SAFETY: the call only takes a descriptor that this process owns.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, BYTES as libc::off_t) } {
        0 => Ok((file, path)),
        code => {
            let _ = fs::remove_file(path);
            Err(refused(&io::Error::from_raw_os_error(code)))
        }
    }
}

fn refused(reason: &io::Error) -> Error {
    Error::new(ncclSystemError, machine::explained(reason))
}

/// Maps the memory of a recording for as long as the process lives.
fn map(fd: RawFd) -> Result<&'static [AtomicU64]> {
    let read_write = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    let map = || unsafe { libc::mmap(ptr::null_mut(), BYTES, read_write, libc::MAP_SHARED, fd, 0) };
    let base = map_apart(BYTES, map);
    if base == libc::MAP_FAILED {
        let why = machine::explained_memory(BYTES, &io::Error::last_os_error());
        return Err(Error::new(ncclSystemError, why));
    }
    // SAFETY: the mapping has that many words, is aligned to a page, and is never unmapped. All
    // accesses are atomic. A forked child, which has no such mapping, has no recorder either.
    Ok(unsafe { std::slice::from_raw_parts(base.cast(), layout::WORDS) })
}

/// The name of this host as the kernel has it.
fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname");
    name.map_or_else(|_| "localhost".to_owned(), |name| name.trim().to_owned())
}
