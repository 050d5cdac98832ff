//! Recognises forked children, and keeps the descriptors and the shared memory of the parent from
//! them.
//!
//! A child that `fork` makes has copies of its parent's descriptors and memory, but of its threads
//! only the one that forked. While a child holds a copy of a socket, the peer does not learn that
//! the parent has died. While a child holds a copy of a listening socket, the parent's port stays
//! in use. A call in the child would reach the other ranks in the parent's name. So there are three
//! rules:
//!
//! - The parent's descriptors are closed in the child. [`Private`] enters them in a table, and a
//!   handler of `pthread_atfork` closes them.
//! - The parent's shared memory is not mapped in the child, because of `madvise(MADV_DONTFORK)`.
//! - Calls in the child are refused. [`is_child`] reads one word of a page that the kernel clears
//!   in every child, because of `madvise(MADV_WIPEONFORK)`. The kernel offers that for private
//!   memory only, so the page is not part of the shared memory.
//!
//! `posix_spawn`, `vfork` and `system` run no handlers. Their children call `exec`, which closes
//! the library's descriptors, because all of them have the flag close-on-exec. A program may also
//! call the system call `clone` itself and not call `exec`. That runs no handlers either: the
//! child's calls are refused and it has no shared memory, but it keeps the descriptors.
//!
//! If the parent held nothing at the time of the fork (no world, no communicator and no store), the
//! child may use this library. A unique id does not count, because programs make an id and then
//! fork their ranks. The first world, communicator, store, or id that this process serves over the
//! network registers the handlers.

use std::io;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The word that [`MARK`] points to while this process holds nothing. It is never 0.
static NOTHING_HELD: AtomicU32 = AtomicU32::new(1);
/// Points to the word that is 0 in a child of a process that held something. The pointer is never
/// NULL, and the word is never freed.
static MARK: AtomicPtr<AtomicU32> = AtomicPtr::new((&raw const NOTHING_HELD).cast_mut());
/// The page to whose first word [`MARK`] points while this process holds something. It is NULL
/// until this process first holds something.
static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
/// Takes the place of the page if the kernel refuses to map one. Then only the handler [`child`]
/// marks a child.
static NO_PAGE: AtomicU32 = AtomicU32::new(1);
/// How many things this process holds. It changes only inside a [`section`].
static HELD: AtomicU64 = AtomicU64::new(0);
/// The number of the process that holds something. The messages in its children name it.
static HOLDER: AtomicU32 = AtomicU32::new(0);

/// Whether this process is a forked child of a process that held something of this library. Then
/// the library refuses calls here. The question costs two loads.
#[inline]
pub fn is_child() -> bool {
    // SAFETY: MARK always points to a static word, or to a word of a page that is never unmapped.
    unsafe { (*MARK.load(Ordering::Acquire)).load(Ordering::Relaxed) == 0 }
}

/// Returns the text that says why calls in a forked child are refused, and what to do.
#[cold]
pub fn refusal() -> String {
    format!(
        "this process (pid {}) was forked from process {}, whose worlds and communicators it cannot use: make the call there, or start a process that makes such calls afresh, by fork and exec (in Python: multiprocessing with \"spawn\" or \"forkserver\")",
        std::process::id(),
        HOLDER.load(Ordering::Relaxed)
    )
}

/// Keeps forks and sections apart. It is 0 when it is free, [`SECTION`] while a thread is inside a
/// section, and the number of the thread that forks during a fork.
static LOCK: AtomicU32 = AtomicU32::new(0);
/// The value of [`LOCK`] while a thread is inside a [`section`]. No thread has this number.
const SECTION: u32 = u32::MAX;
/// How long a fork waits for a thread inside a section. A section makes one or two system calls, so
/// the wait is short. But if a signal interrupts a section and its handler forks, the thread would
/// wait for itself. After this time the fork goes on without the lock.
const PATIENCE: Duration = Duration::from_millis(100);

/// Takes [`LOCK`] for `owner`. Gives up after `patience`; with `None` it never gives up. Returns
/// whether it has the lock.
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

/// Runs `work` while no other thread forks. So a fork sees a descriptor either open and in the
/// table, or neither open nor in the table. `work` is short and enters no section itself.
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

/// Returns the number of the calling thread.
fn this_thread() -> u32 {
    // SAFETY: the call has no arguments.
    unsafe { libc::syscall(libc::SYS_gettid) as u32 }
}

/// Runs before a fork, on the thread that forks. The handlers may be registered twice, so the lock
/// may be this thread's already.
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

/// Runs after a fork, in the child. It uses only atomics and `close`, because the parent's other
/// threads do not exist in the child, and a lock that one of them held stays locked.
unsafe extern "C" fn child() {
    if HELD.load(Ordering::Relaxed) != 0 {
        // SAFETY: as in `is_child`. The page is private memory, so the parent does not see the 0.
        unsafe { (*MARK.load(Ordering::Relaxed)).store(0, Ordering::Relaxed) };
    }
    for (chunk, words) in CHUNKS.iter().enumerate() {
        let words = words.load(Ordering::Relaxed);
        if words.is_null() {
            continue;
        }
        // SAFETY: a chunk is initialised before its address is stored, and is never freed.
        for (at, word) in unsafe { &*words }.iter().enumerate() {
            let mut open = word.swap(0, Ordering::Relaxed);
            while open != 0 {
                let fd = chunk * PER_CHUNK + at * 64 + open.trailing_zeros() as usize;
                // SAFETY: only this library uses the descriptor, and it does not use it in a child.
                unsafe { libc::close(fd as RawFd) };
                open &= open - 1;
            }
        }
    }
    LOCK.store(0, Ordering::Release);
}

/// Registers the handlers, once. If two threads do so at the same time, the handlers run twice,
/// which does no harm.
fn register() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.load(Ordering::Acquire) {
        // SAFETY: the handlers are functions of this library, and the C library drops them when
        // this library is unloaded. The call fails only for lack of memory. Then `is_child` still
        // recognises children, by the page.
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
    // SAFETY: the page is never unmapped.
    unsafe { (*page).store(1, Ordering::Relaxed) };
    HOLDER.store(std::process::id(), Ordering::Relaxed);
    // A new page holds 0, which would mean a child. The order Release makes sure that a thread that
    // reads this address also sees the 1.
    MARK.store(page, Ordering::Release);
}

/// Counts one thing less that this process holds. It is called inside a section.
fn release() {
    if HELD.fetch_sub(1, Ordering::Relaxed) == 1 {
        MARK.store((&raw const NOTHING_HELD).cast_mut(), Ordering::Relaxed);
    }
}

/// Maps a page that the kernel clears in every child. The page is never unmapped. Returns
/// [`NO_PAGE`] if the kernel refuses it.
fn new_page() -> *mut AtomicU32 {
    let (read_write, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    let page = unsafe { libc::mmap(ptr::null_mut(), 4096, read_write, private, -1, 0) };
    if page == libc::MAP_FAILED {
        return (&raw const NO_PAGE).cast_mut();
    }
    // SAFETY: the page was mapped just now. Kernels before Linux 4.14 refuse the advice. Then only
    // the handler marks children.
    unsafe { libc::madvise(page, 4096, libc::MADV_WIPEONFORK) };
    page.cast()
}

/// A value that belongs to this process. A child that is forked while the value lives may use
/// nothing of this library. The value is never dropped in a child, because the drop would end or
/// release things of the parent.
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
            // SAFETY: the value is not used again.
            unsafe { ManuallyDrop::drop(&mut self.0) };
            section(release);
        }
    }
}

/// How many descriptors one chunk has bits for.
const PER_CHUNK: usize = 1 << 15;
/// A part of the table of private descriptors, which has one bit for each descriptor.
type Chunk = [AtomicU64; PER_CHUNK / 64];
/// The first chunk. It is static, so that most processes allocate none.
static FIRST: Chunk = [const { AtomicU64::new(0) }; PER_CHUNK / 64];
/// The table of private descriptors. The bits that are set stand for the descriptors to close in
/// children. A chunk is NULL until one of its descriptors is private. The table ends at the
/// descriptor 2,097,151, so descriptors with higher numbers stay open in children.
static CHUNKS: [AtomicPtr<Chunk>; 64] = {
    let mut chunks = [const { AtomicPtr::new(ptr::null_mut()) }; 64];
    chunks[0] = AtomicPtr::new((&raw const FIRST).cast_mut());
    chunks
};

/// Returns the word and the bit of a descriptor in the table, or `None` for a descriptor beyond it.
/// It is called inside a section.
fn place(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    let chunk = CHUNKS.get(fd / PER_CHUNK)?;
    let mut words = chunk.load(Ordering::Relaxed);
    if words.is_null() {
        // No other thread makes this chunk at the same time, because this thread is inside a
        // section.
        words = Box::into_raw(Box::new([const { AtomicU64::new(0) }; PER_CHUNK / 64]));
        chunk.store(words, Ordering::Release);
    }
    // SAFETY: a chunk is initialised before its address is stored, and is never freed.
    let word = unsafe { &(&*words)[fd % PER_CHUNK / 64] };
    Some((word, 1 << (fd % 64)))
}

/// Owns a descriptor that is closed in forked children.
#[derive(Debug)]
pub struct Private<T: AsRawFd>(ManuallyDrop<T>);

impl<T: AsRawFd> Private<T> {
    /// Opens a descriptor. The function `open` gives it the flag close-on-exec, and does not block,
    /// because forks wait for it.
    pub fn open(open: impl FnOnce() -> io::Result<T>) -> io::Result<Private<T>> {
        register();
        section(|| open().map(Private::note))
    }

    /// Takes a descriptor that is open already, for example because opening it may block. A child
    /// that was forked between the opening and this call keeps the descriptor.
    pub fn of(opened: T) -> Private<T> {
        register();
        section(|| Private::note(opened))
    }

    /// Enters an open descriptor in the table. It is called inside a section.
    fn note(opened: T) -> Private<T> {
        if let Some((word, bit)) = place(opened.as_raw_fd()) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        hold();
        Private(ManuallyDrop::new(opened))
    }

    /// Turns the owner of the descriptor into another type. `turn` does not change the descriptor.
    pub fn map<U: AsRawFd>(self, turn: impl FnOnce(T) -> U) -> Private<U> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, so the value is taken only once.
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
            // The descriptor is closed in the child already, and its number may belong to another
            // file by now.
            return;
        }
        section(|| {
            if let Some((word, bit)) = place(self.0.as_raw_fd()) {
                word.fetch_and(!bit, Ordering::Relaxed);
            }
            // SAFETY: the descriptor is not used again.
            unsafe { ManuallyDrop::drop(&mut self.0) };
            release();
        });
    }
}

/// Maps shared memory that is not mapped in forked children. `map` makes the mapping and returns
/// its address.
pub(crate) fn map_apart(bytes: usize, map: impl FnOnce() -> *mut libc::c_void) -> *mut libc::c_void {
    section(|| {
        let base = map();
        if base != libc::MAP_FAILED {
            // SAFETY: `base` is a mapping of that size. If the kernel refuses the advice, children
            // have the mapping, too, but do not touch it.
            unsafe { libc::madvise(base, bytes, libc::MADV_DONTFORK) };
        }
        base
    })
}

mod closed;
mod inherited;
#[cfg(test)]
mod tests;

pub use self::closed::Closed;
pub(crate) use self::inherited::Inherited;
