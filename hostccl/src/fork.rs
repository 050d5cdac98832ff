//! Keeps from a forked child what belongs to its parent alone, and recognises a child.
//!
//! A child made by `fork` has copies of its parent's descriptors and memory, but none of its other threads. While a child holds a copy of a
//! socket, the peer does not learn that the parent has died; while it holds a listening socket, the parent's port stays taken; and a call made
//! in the child would speak for the parent. So there are three rules:
//!
//! | what | rule | how |
//! |---|---|---|
//! | descriptors | they are closed in the child | [`Private`] enters them in a table; a handler of `pthread_atfork` closes them |
//! | shared memory | it is not mapped in the child | `madvise(MADV_DONTFORK)`; `MADV_WIPEONFORK` exists for private memory only |
//! | calls | they are refused in the child | [`is_child`] reads one word of a page that the kernel clears in every child (`MADV_WIPEONFORK`) |
//!
//! `posix_spawn`, `vfork` and `system` run no handlers. Their children call `exec`, which closes everything here, because every descriptor is
//! made with close-on-exec. A child made by the `clone` system call itself, without `exec`, runs no handlers either: its calls are refused and
//! it has no shared memory, but it keeps the descriptors.
//!
//! A child is free to use this library when its parent held nothing at the time of the fork: no world, no communicator, no store. A unique
//! id does not count, because programs make one and then fork their ranks. The handlers are registered when the first world, communicator
//! or store is made, and not before.

use std::io;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The word that [`MARK`] points to while this process holds nothing. It is never 0.
static NOTHING_HELD: AtomicU32 = AtomicU32::new(1);
/// The word that is 0 in a child of a process that held something. Never NULL; what it points to is never freed.
static MARK: AtomicPtr<AtomicU32> = AtomicPtr::new((&raw const NOTHING_HELD).cast_mut());
/// The page whose first word [`MARK`] points to while this process holds something; NULL until it first does.
static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
/// The word in place of the page where the kernel gives none. Then only the handler marks a child.
static NO_PAGE: AtomicU32 = AtomicU32::new(1);
/// How many things this process holds. Changed only with [`LOCK`] held.
static HELD: AtomicU64 = AtomicU64::new(0);
/// The process that holds them.
static HOLDER: AtomicU32 = AtomicU32::new(0);

/// Whether this process was forked from one that held something of this library, which can then not be used here. This costs two loads.
#[inline]
pub fn is_child() -> bool {
    // SAFETY: MARK always points to a static word, or to one in a page that is never unmapped.
    unsafe { (*MARK.load(Ordering::Acquire)).load(Ordering::Relaxed) == 0 }
}

/// Why nothing works in a forked child, and what to do.
#[cold]
pub fn refusal() -> String {
    format!(
        "this process (pid {}) was forked from process {}, whose worlds and communicators it cannot use: make the call there, or start a process that makes such calls afresh, by fork and exec (in Python: multiprocessing with \"spawn\" or \"forkserver\")",
        std::process::id(),
        HOLDER.load(Ordering::Relaxed)
    )
}

/// The value is 0 when it is free, [`SECTION`], or the number of the thread that forks.
static LOCK: AtomicU32 = AtomicU32::new(0);
/// The value while a thread is inside [`section`]. No thread has this number.
const SECTION: u32 = u32::MAX;
/// How long a fork waits for threads inside a section. They make a system call or two. Only a thread that was interrupted by a
/// signal whose handler forks takes longer, and such a thread must not wait for itself.
const PATIENCE: Duration = Duration::from_millis(100);

fn take(owner: u32, patience: Option<Duration>) -> bool {
    let since = Instant::now();
    let mut tries = 0;
    while LOCK.compare_exchange_weak(0, owner, Ordering::Acquire, Ordering::Relaxed).is_err() {
        tries += 1;
        match tries {
            ..100 => std::hint::spin_loop(),
            _ => std::thread::sleep(Duration::from_micros(50)),
        }
        if patience.is_some_and(|patience| since.elapsed() > patience) {
            return false;
        }
    }
    true
}

/// Runs `work` so that no fork happens meanwhile: a descriptor is either open and in the table, or neither. `work` is short and does not
/// enter a section.
fn section<R>(work: impl FnOnce() -> R) -> R {
    struct Held;
    impl Drop for Held {
        fn drop(&mut self) {
            LOCK.store(0, Ordering::Release);
        }
    }
    take(SECTION, None);
    let _held = Held;
    work()
}

fn this_thread() -> u32 {
    // SAFETY: no arguments.
    unsafe { libc::syscall(libc::SYS_gettid) as u32 }
}

/// Runs before a fork, on the thread that forks.
unsafe extern "C" fn prepare() {
    let me = this_thread();
    if LOCK.load(Ordering::Relaxed) != me {
        take(me, Some(PATIENCE));
    }
}

/// Runs after a fork, in the parent.
unsafe extern "C" fn parent() {
    let _ = LOCK.compare_exchange(this_thread(), 0, Ordering::Release, Ordering::Relaxed);
}

/// Runs after a fork, in the child. It uses atomics and `close` only, because other threads are gone and locks that they held stay locked.
unsafe extern "C" fn child() {
    if HELD.load(Ordering::Relaxed) != 0 {
        // SAFETY: as in `is_child`. The page is private, so the parent does not see this.
        unsafe { (*MARK.load(Ordering::Relaxed)).store(0, Ordering::Relaxed) };
    }
    for (chunk, words) in CHUNKS.iter().enumerate() {
        let words = words.load(Ordering::Relaxed);
        if words.is_null() {
            continue;
        }
        // SAFETY: chunks are whole and never freed.
        for (at, word) in unsafe { &*words }.iter().enumerate() {
            let mut open = word.swap(0, Ordering::Relaxed);
            while open != 0 {
                let fd = chunk * PER_CHUNK + at * 64 + open.trailing_zeros() as usize;
                // SAFETY: a descriptor that only this library uses, and that nothing in the child uses.
                unsafe { libc::close(fd as RawFd) };
                open &= open - 1;
            }
        }
    }
    LOCK.store(0, Ordering::Release);
}

/// Registers the handlers, once. Where two threads do so at the same time the handlers run twice, which harms nothing.
fn register() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.load(Ordering::Acquire) {
        // SAFETY: functions of this library, which the C library forgets when this library is unloaded. Without memory for it children are
        // recognised all the same.
        unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
        DONE.store(true, Ordering::Release);
    }
}

/// Counts one more thing that this process holds. It is called inside a section.
fn hold() {
    if HELD.fetch_add(1, Ordering::Relaxed) > 0 {
        return;
    }
    let mut page = PAGE.load(Ordering::Relaxed);
    if page.is_null() {
        page = new_page();
        PAGE.store(page, Ordering::Relaxed);
    }
    // SAFETY: it is never unmapped.
    unsafe { (*page).store(1, Ordering::Relaxed) };
    HOLDER.store(std::process::id(), Ordering::Relaxed);
    // Whoever reads this address also sees the 1 in the page: a new page holds 0, as in a child.
    MARK.store(page, Ordering::Release);
}

/// Counts one thing less. It is called inside a section.
fn release() {
    if HELD.fetch_sub(1, Ordering::Relaxed) == 1 {
        MARK.store((&raw const NOTHING_HELD).cast_mut(), Ordering::Relaxed);
    }
}

/// A page that the kernel clears in every child; kept until the process ends.
fn new_page() -> *mut AtomicU32 {
    let (read_write, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    let page = unsafe { libc::mmap(ptr::null_mut(), 4096, read_write, private, -1, 0) };
    if page == libc::MAP_FAILED {
        return (&raw const NO_PAGE).cast_mut();
    }
    // SAFETY: the mapping just made. Kernels before Linux 4.14 refuse; then the handler alone marks children.
    unsafe { libc::madvise(page, 4096, libc::MADV_WIPEONFORK) };
    page.cast()
}

/// A value that belongs to this process: its forked children may use nothing of this library while it lives. In a child the value is
/// never dropped, because that would end what is the parent's.
#[derive(Debug)]
pub struct Own<T>(ManuallyDrop<T>);

impl<T> Own<T> {
    /// Holds `value`.
    pub fn new(value: T) -> Own<T> {
        register();
        section(hold);
        Own(ManuallyDrop::new(value))
    }
}

impl<T> Deref for Own<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if !is_child() {
            // SAFETY: it is not used again.
            unsafe { ManuallyDrop::drop(&mut self.0) };
            section(release);
        }
    }
}

const PER_CHUNK: usize = 1 << 15;
type Chunk = [AtomicU64; PER_CHUNK / 64];
static FIRST: Chunk = [const { AtomicU64::new(0) }; PER_CHUNK / 64];
/// One bit for each descriptor that is to be closed in children. A descriptor beyond the last chunk (number 2,097,152
/// or higher) is not closed there.
static CHUNKS: [AtomicPtr<Chunk>; 64] = {
    let mut chunks = [const { AtomicPtr::new(ptr::null_mut()) }; 64];
    chunks[0] = AtomicPtr::new((&raw const FIRST).cast_mut());
    chunks
};

/// The word and the bit of a descriptor.
fn place(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    let chunk = CHUNKS.get(fd / PER_CHUNK)?;
    let mut words = chunk.load(Ordering::Relaxed);
    if words.is_null() {
        // Inside a section, so no other thread makes the same chunk.
        words = Box::into_raw(Box::new([const { AtomicU64::new(0) }; PER_CHUNK / 64]));
        chunk.store(words, Ordering::Release);
    }
    // SAFETY: chunks are whole and never freed.
    let word = unsafe { &(&*words)[fd % PER_CHUNK / 64] };
    Some((word, 1 << (fd % 64)))
}

/// Owns a descriptor that forked children do not keep.
#[derive(Debug)]
pub struct Private<T: AsRawFd>(ManuallyDrop<T>);

impl<T: AsRawFd> Private<T> {
    /// Opens a descriptor by `open`, which makes one with close-on-exec and does not block.
    pub fn open(open: impl FnOnce() -> io::Result<T>) -> io::Result<Private<T>> {
        register();
        section(|| open().map(Private::note))
    }

    /// Keeps from children a descriptor that was opened before, for example by a call that may block. A child that was forked in between
    /// has the descriptor.
    pub fn of(opened: T) -> Private<T> {
        register();
        section(|| Private::note(opened))
    }

    fn note(opened: T) -> Private<T> {
        if let Some((word, bit)) = place(opened.as_raw_fd()) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        hold();
        Private(ManuallyDrop::new(opened))
    }

    /// Returns the same descriptor as another type.
    pub fn map<U: AsRawFd>(self, turn: impl FnOnce(T) -> U) -> Private<U> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped, so the value is taken once.
        let inner = unsafe { ManuallyDrop::take(&mut this.0) };
        Private(ManuallyDrop::new(turn(inner)))
    }
}

impl<T: AsRawFd> Deref for Private<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: AsRawFd> DerefMut for Private<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: AsRawFd> Drop for Private<T> {
    fn drop(&mut self) {
        if is_child() {
            // It is closed here already, and its number may be another file's.
            return;
        }
        section(|| {
            if let Some((word, bit)) = place(self.0.as_raw_fd()) {
                word.fetch_and(!bit, Ordering::Relaxed);
            }
            // SAFETY: it is not used again.
            unsafe { ManuallyDrop::drop(&mut self.0) };
            release();
        });
    }
}

/// Maps shared memory so that forked children do not have it. `map` makes the mapping and returns its address.
pub(crate) fn map_apart(bytes: usize, map: impl FnOnce() -> *mut libc::c_void) -> *mut libc::c_void {
    section(|| {
        let base = map();
        if base != libc::MAP_FAILED {
            // SAFETY: the mapping just made. Where the kernel refuses, children have it and do not touch it.
            unsafe { libc::madvise(base, bytes, libc::MADV_DONTFORK) };
        }
        base
    })
}

#[cfg(test)]
mod tests;
