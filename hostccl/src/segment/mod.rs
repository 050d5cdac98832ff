//! The segment: the shared memory of one communicator. It is an anonymous file (`memfd`), so no
//! file is left behind when a rank is killed. Every rank maps all of it.
//!
//! | part | content | size |
//! |---|---|---|
//! | header | magic, token, number of ranks, failure, arrivals, barrier, verdict | one page |
//! | seats | the process of each rank, its steps, its tags and its offer | 384 bytes for each rank |
//! | descriptors | the call of each rank in a step | [`SLOTS`] lines for each rank |
//! | slots | staging areas for the data of collectives | [`SLOTS`] for each rank |
//! | channels | the state of the messages from one rank to another | one for each ordered pair |
//! | rings | the bytes of the messages from one rank to another | one for each ordered pair |
//!
//! The kernel allocates a page when it is first touched. So the rings of a communicator that sends
//! no messages take no memory.

mod header;
mod layout;

use std::cmp::Ordering;
use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic;
use std::time::{Duration, Instant};

use self::header::RankBits;
pub(crate) use self::header::{Channel, Header, Offer, Seat};
use self::layout::HEADER_BYTES;
pub(crate) use self::layout::{LINE, Layout, MAX_RANKS, SLOTS};
use crate::blame::Blame;
use crate::error::{Error, Result};
use crate::fork::{self, Private};
use crate::labels::{self, Labels};
use crate::machine;
use crate::process::ProcessId;
use crate::types::{ncclInvalidUsage, ncclSystemError};

/// The version of the layout. It changes with the layout, so that ranks with different versions of
/// the library refuse each other.
pub(crate) const LAYOUT_VERSION: u32 = 7;
/// How long a rank that came with another number of ranks than the first waits for a third rank.
const THIRD_RANK: Duration = Duration::from_millis(250);
const _: () = assert!(RankBits::RANKS >= MAX_RANKS as usize);
/// The first bytes of a segment, by which another file is recognised.
const MAGIC: u64 = 0x6c63_6374_736f_6868;
/// The name of the anonymous file in `/proc/<pid>/fd` and `/proc/<pid>/maps`.
const NAME: &CStr = c"hostccl";

/// A mapping of a segment's first bytes.
#[derive(Debug)]
struct Mapping {
    /// The address of the first byte.
    base: NonNull<u8>,
    /// The length in bytes: the header alone, or the whole segment.
    bytes: usize,
}

// SAFETY: threads and processes share the memory in any case. Every access is atomic, or is ordered
// by atomic accesses.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: RawFd, bytes: usize) -> Result<Mapping> {
        let read_write = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let map = || unsafe { libc::mmap(std::ptr::null_mut(), bytes, read_write, libc::MAP_SHARED, fd, 0) };
        let base = fork::map_apart(bytes, map);
        if base == libc::MAP_FAILED {
            let why = machine::explained_memory(bytes, &io::Error::last_os_error());
            return Err(Error::new(ncclSystemError, format!("mapping {bytes} bytes of shared memory: {why}")));
        }
        Ok(Mapping { base: NonNull::new(base.cast()).expect("mmap never returns NULL here"), bytes })
    }

    fn header(&self) -> &Header {
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

/// Makes a new segment, which has only a header, and returns its descriptor.
pub(crate) fn create(token: [u8; 16]) -> Result<OwnedFd> {
    // SAFETY: the name is a C string, and the result is a new descriptor or -1.
    let fd = unsafe { owned(libc::memfd_create(NAME.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)) };
    let refused = |reason| machine::explained_call("memfd_create", &reason);
    let fd = fd.map_err(|reason| Error::new(ncclSystemError, format!("shared memory: {}", refused(reason))))?;
    resize(&fd, HEADER_BYTES)?;
    seal(&fd, libc::F_SEAL_SHRINK)?;
    let mapping = Mapping::new(fd.as_raw_fd(), HEADER_BYTES)?;
    // SAFETY: nobody else knows the segment yet, so nobody reads or writes it at the same time.
    unsafe {
        let header = mapping.base.cast::<Header>().as_ptr();
        (&raw mut (*header).magic).write(MAGIC);
        (&raw mut (*header).version).write(LAYOUT_VERSION);
        (&raw mut (*header).token).write(token);
    }
    Ok(fd)
}

/// Turns the result of a system call into a descriptor or the error.
///
/// # Safety
/// `fd` is an open descriptor that nobody else owns, or negative.
unsafe fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the caller's contract.
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd) }) }
}

/// Whether nobody needs the segment's descriptor any more, because all ranks have arrived or
/// because the segment has failed.
pub(crate) fn is_over(fd: &OwnedFd) -> bool {
    Mapping::new(fd.as_raw_fd(), HEADER_BYTES).is_ok_and(|mapping| {
        let header = mapping.header();
        let nranks = header.nranks.load(atomic::Ordering::Acquire);
        nranks != 0 && header.arrived.value() == nranks || header.failure.is_set()
    })
}

/// Ends a segment because rank `rank` cannot join, so that the ranks that come later read the
/// reason, which names that rank. Returns whether the segment holds a failure now. If all ranks
/// have arrived already, this rank is one too many, and the segment does not fail.
pub(crate) fn fail(fd: &OwnedFd, rank: u32, error: &Error) -> bool {
    Mapping::new(fd.as_raw_fd(), HEADER_BYTES).is_ok_and(|mapping| {
        let header = mapping.header();
        let nranks = header.nranks.load(atomic::Ordering::Acquire);
        if nranks != 0 && header.arrived.value() == nranks {
            return false;
        }
        header.fail(error.code(), &Blame::of([rank as usize]), error.message(), "");
        header.failure.is_set()
    })
}

/// Ends a segment because rank `rank` came with `nranks`, where the first rank came with `agreed`.
/// Waits a moment for a third rank, because two ranks cannot tell which of them is wrong.
fn differ(header: &Header, (nranks, rank): (u32, u32), agreed: u32) -> Error {
    header.differ.set(&[rank as usize]);
    let end = Instant::now() + THIRD_RANK;
    let (came, differ) = loop {
        let (came, differ) = (header.came.get(), header.differ.get());
        if came.len() != differ.len() || header.failure.is_set() || Instant::now() >= end {
            break (came, differ);
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let to_blame = match came.len().cmp(&differ.len()) {
        Ordering::Less => came.clone(),
        Ordering::Equal => [came.clone(), differ].concat(),
        Ordering::Greater => differ,
    };
    let message = format!(
        "rank {rank} (pid {}) came with nranks {nranks}, {} with {agreed}",
        std::process::id(),
        labels::list(came.iter().map(|rank| *rank as i32))
    );
    header.fail(ncclInvalidUsage, &Blame::of(to_blame), &message, "");
    // There is no error to read while another rank is writing down its own failure.
    header.failure.error().unwrap_or_else(|| Error::usage(message))
}

/// Sets the size of a segment.
fn resize(fd: &OwnedFd, bytes: usize) -> Result<()> {
    // Beyond the limit on file sizes the kernel does not only refuse: it sends SIGXFSZ, which ends
    // the process. So the limit is checked first.
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is valid to write to. When the call fails, it keeps its initial value.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    if bytes as libc::rlim_t > limit.rlim_cur {
        let limit = limit.rlim_cur;
        return Err(Error::new(
            ncclSystemError,
            format!("shared memory of {bytes} bytes is beyond the limit on file sizes, {limit}: raise `ulimit -f`"),
        ));
    }
    // SAFETY: the call only takes a descriptor that this process owns.
    if unsafe { libc::ftruncate(fd.as_raw_fd(), bytes as libc::off_t) } != 0 {
        return Err(Error::system(&format!("sizing shared memory to {bytes} bytes"), io::Error::last_os_error()));
    }
    Ok(())
}

/// Forbids every process to change the segment's size: `seals` says whether to forbid shrinking or
/// growing. If the segment could shrink, a rank that touches the lost part would get SIGBUS.
fn seal(fd: &OwnedFd, seals: libc::c_int) -> Result<()> {
    // SAFETY: the call only takes a descriptor that this process owns.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) } != 0 {
        return Err(Error::system("sealing the size of shared memory", io::Error::last_os_error()));
    }
    Ok(())
}

/// Opens the segment that process `owner` holds at descriptor `fd`. Returns `None` if there is no
/// segment with that token. Only the caller knows what that means: whether the process has ended,
/// or has closed the segment.
pub(crate) fn open(owner: u32, fd: RawFd, token: [u8; 16]) -> Result<Option<Private<OwnedFd>>> {
    let found = if owner == std::process::id() { open_here(fd) } else { open_there(owner, fd) }?;
    let Some(file) = found else { return Ok(None) };
    let about = file.metadata().map_err(|reason| Error::system("looking at shared memory", reason))?;
    if !about.is_file() || about.len() < HEADER_BYTES as u64 {
        return Ok(None);
    }
    let mapping = Mapping::new(file.as_raw_fd(), HEADER_BYTES)?;
    let header = mapping.header();
    if header.magic != MAGIC || header.token != token {
        return Ok(None);
    }
    if header.version != LAYOUT_VERSION {
        return Err(Error::usage(format!(
            "another version of hostccl made the unique id (layout {}, this one has {LAYOUT_VERSION}): all ranks need the same library",
            header.version
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
    let path = format!("/proc/{owner}/fd/{fd}");
    let refused = |reason: io::Error| match reason.kind() {
        io::ErrorKind::NotFound => match machine::broken_proc() {
            Some(why) => Err(Error::new(ncclSystemError, why)),
            None => Ok(None),
        },
        io::ErrorKind::PermissionDenied => Err(Error::new(ncclSystemError, machine::denied(owner, &reason))),
        _ => Err(Error::system(&format!("opening {path}"), reason)),
    };
    match fs::read_link(&path) {
        // To open a file of another kind might block or have effects, so its name is checked first.
        Ok(target) if !target.to_string_lossy().starts_with("/memfd:hostccl") => return Ok(None),
        Ok(_) => {}
        Err(reason) => return refused(reason),
    }
    let opened = Private::open(|| fs::OpenOptions::new().read(true).write(true).open(&path));
    opened.map(Some).or_else(refused)
}

/// A segment that is mapped whole.
#[derive(Debug)]
pub(crate) struct Segment {
    /// The memory.
    mapping: Mapping,
    /// Where the parts of the segment lie in the memory.
    layout: Layout,
}

impl Segment {
    /// Maps the segment for a communicator of `nranks` ranks. The rank that comes first decides the
    /// number of ranks, and with it the size. A rank that comes with another number ends the
    /// communicator, but does not resize the segment, because other ranks may have mapped it
    /// already. `labels` names the ranks in messages.
    pub(crate) fn map(fd: &OwnedFd, nranks: u32, rank: u32, labels: &Labels) -> Result<Segment> {
        let first = Mapping::new(fd.as_raw_fd(), HEADER_BYTES)?;
        let header = first.header();
        if let Err(agreed) =
            header.nranks.compare_exchange(0, nranks, atomic::Ordering::SeqCst, atomic::Ordering::SeqCst)
        {
            if header.arrived.value() == agreed {
                return Err(Error::usage(format!(
                    "the unique id has started a communicator of {agreed} ranks already; make one id for each communicator"
                )));
            }
            if agreed != nranks {
                return Err(differ(header, (nranks, rank), agreed));
            }
        }
        header.came.set(&[rank as usize]);
        if let Some(error) = header.failure.error() {
            return Err(error);
        }
        let layout = Layout::new(nranks);
        // Every rank sets the same size, so only the first resize and the first seal change
        // anything.
        let mapped = resize(fd, layout.total)
            .and_then(|()| seal(fd, libc::F_SEAL_GROW))
            .and_then(|()| Mapping::new(fd.as_raw_fd(), layout.total));
        match mapped {
            Ok(mapping) => Ok(Segment { mapping, layout }),
            Err(error) => {
                let error = labels.refused(rank as usize, error);
                header.fail(error.code(), &Blame::of([rank as usize]), error.message(), "");
                Err(error)
            }
        }
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn header(&self) -> &Header {
        self.mapping.header()
    }

    /// The seat of `rank`.
    pub(crate) fn seat(&self, rank: usize) -> &Seat {
        assert!(rank < self.layout.nranks);
        // SAFETY: the layout puts the seat inside the mapping and aligns it, and it consists of
        // atomics.
        unsafe { &*self.at(HEADER_BYTES + rank * size_of::<Seat>()).cast() }
    }

    /// The address of the line in which `rank` describes its call in a step. `index` is the number
    /// of the step modulo [`SLOTS`].
    pub(crate) fn descriptor(&self, rank: usize, index: usize) -> *mut u8 {
        self.at(self.layout.descriptors + self.slot(rank, index) * LINE)
    }

    /// The address of a slot of `rank`. `index` is the number of a step modulo [`SLOTS`].
    pub(crate) fn data(&self, rank: usize, index: usize) -> *mut u8 {
        self.at(self.layout.slots + self.slot(rank, index) * self.layout.slot_pitch)
    }

    /// Returns the number of a slot, and of the descriptor that goes with it.
    fn slot(&self, rank: usize, index: usize) -> usize {
        assert!(rank < self.layout.nranks && index < SLOTS);
        index * self.layout.nranks + rank
    }

    /// The channel of the messages from `source` to `destination`.
    pub(crate) fn channel(&self, source: usize, destination: usize) -> &Channel {
        // SAFETY: the layout puts the channel inside the mapping and aligns it, and it consists of
        // atomics.
        unsafe { &*self.at(self.layout.channels + self.pair(source, destination) * size_of::<Channel>()).cast() }
    }

    /// The address of the ring of the messages from `source` to `destination`.
    pub(crate) fn ring(&self, source: usize, destination: usize) -> *mut u8 {
        self.at(self.layout.rings + self.pair(source, destination) * self.layout.ring_bytes)
    }

    /// Returns the process of `rank`, or `None` while that rank has not taken its seat.
    pub(crate) fn process(&self, rank: usize) -> Option<ProcessId> {
        let seat = self.seat(rank);
        (seat.claim.load(atomic::Ordering::Acquire) == 2).then(|| ProcessId {
            pid: seat.pid.load(atomic::Ordering::Relaxed),
            start: seat.start.load(atomic::Ordering::Relaxed),
        })
    }

    /// Returns the number of an ordered pair of ranks.
    fn pair(&self, source: usize, destination: usize) -> usize {
        assert!(source < self.layout.nranks && destination < self.layout.nranks);
        source * self.layout.nranks + destination
    }

    /// Returns the address at an offset from the segment's start.
    fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.mapping.bytes);
        // SAFETY: the offset is inside the mapping.
        unsafe { self.mapping.base.as_ptr().add(offset) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::*;

    #[test]
    fn what_one_mapping_writes_the_other_reads() {
        let fd = create([7; 16]).unwrap();
        let again = open(std::process::id(), fd.as_raw_fd(), [7; 16]).unwrap().unwrap();
        let (a, b) = (
            Segment::map(&fd, 3, 0, &Labels::default()).unwrap(),
            Segment::map(&again, 3, 1, &Labels::default()).unwrap(),
        );
        // SAFETY: the last bytes of the last slot and of the last ring are inside the mapping.
        unsafe {
            a.data(2, SLOTS - 1).add(a.layout().slot_bytes - 1).write(1);
            a.ring(2, 2).add(a.layout().ring_bytes - 1).write(2);
            assert_eq!(b.data(2, SLOTS - 1).add(a.layout().slot_bytes - 1).read(), 1);
            assert_eq!(b.ring(2, 2).add(a.layout().ring_bytes - 1).read(), 2);
        }
        a.channel(1, 2).head.set(9);
        assert_eq!(b.channel(1, 2).head.value(), 9);
    }

    #[test]
    fn another_descriptor_or_token_is_no_segment() {
        let fd = create([1; 16]).unwrap();
        let me = std::process::id();
        assert!(open(me, fd.as_raw_fd(), [2; 16]).unwrap().is_none());
        assert!(open(me, 9999, [1; 16]).unwrap().is_none());
        let other = fs::File::open("/dev/null").unwrap();
        assert!(open(me, other.as_raw_fd(), [1; 16]).unwrap().is_none());
    }

    #[test]
    fn ranks_that_disagree_on_their_number_all_hear_of_it() {
        let fd = create([1; 16]).unwrap();
        let first = Segment::map(&fd, 4, 0, &Labels::default()).unwrap();
        let error = Segment::map(&fd, 3, 1, &Labels::default()).unwrap_err();
        assert_eq!(error.code(), ncclInvalidUsage);
        assert!(error.message().contains("came with nranks 3, rank 0 with 4"), "{}", error.message());
        assert_eq!(error.blame().ranks, [0, 1], "two ranks cannot tell which of them is wrong");
        assert_eq!(first.header().failure.error(), Some(error));
    }

    #[test]
    fn the_rank_with_another_number_than_most_is_to_blame() {
        for (numbers, wrong) in [([4, 4, 3], 2), ([3, 4, 4], 0)] {
            let fd = create([1; 16]).unwrap();
            let errors = std::thread::scope(|scope| {
                let mut ranks = Vec::new();
                for (rank, nranks) in numbers.into_iter().enumerate() {
                    let fd = &fd;
                    ranks
                        .push(scope.spawn(move || Segment::map(fd, nranks, rank as u32, &Labels::default()).map(drop)));
                    // The rank that comes first decides on the number.
                    let first = Mapping::new(fd.as_raw_fd(), HEADER_BYTES).unwrap();
                    while first.header().came.get().len() + first.header().differ.get().len() <= rank {
                        std::thread::yield_now();
                    }
                }
                ranks.into_iter().filter_map(|rank| rank.join().unwrap().err()).collect::<Vec<_>>()
            });
            assert!(!errors.is_empty());
            assert!(errors.iter().all(|error| error.blame().ranks == [wrong]), "{errors:?}");
        }
    }

    fn file_size(fd: &OwnedFd) -> u64 {
        fs::File::from(fd.try_clone().unwrap()).metadata().unwrap().len()
    }

    #[test]
    fn a_rank_with_another_number_is_refused_at_once_while_another_failure_is_being_written() {
        for came in [3, 5] {
            let fd = create([1; 16]).unwrap();
            let first = Segment::map(&fd, 4, 0, &Labels::default()).unwrap();
            let size = file_size(&fd);
            assert!(first.header().failure.begin(), "another rank has begun to write down its failure");
            let error = Segment::map(&fd, came, 1, &Labels::default()).unwrap_err();
            assert_eq!(error.code(), ncclInvalidUsage);
            assert!(
                error.message().contains(&format!("came with nranks {came}, rank 0 with 4")),
                "{}",
                error.message()
            );
            assert_eq!(file_size(&fd), size, "the segment keeps the size that rank 0 has mapped");
        }
    }

    #[test]
    fn the_size_of_a_mapped_segment_is_final() {
        let fd = create([1; 16]).unwrap();
        let segment = Segment::map(&fd, 4, 0, &Labels::default()).unwrap();
        for bytes in [HEADER_BYTES, segment.layout().total - 1, segment.layout().total + 1] {
            assert!(resize(&fd, bytes).is_err(), "the segment was resized to {bytes} bytes");
        }
        assert!(Segment::map(&fd, 4, 1, &Labels::default()).is_ok(), "the next rank maps the same size");
    }

    #[test]
    fn the_first_failure_stays() {
        let fd = create([1; 16]).unwrap();
        let segment = Segment::map(&fd, 2, 0, &Labels::default()).unwrap();
        assert_eq!(segment.header().failure.error(), None);
        let long = "é".repeat(400);
        segment.header().fail(ncclRemoteError, &Blame { ranks: vec![1, 70], lost: vec![1] }, &long, "ncclAllReduce");
        segment.header().fail(ncclInvalidUsage, &Blame::none(), "later", "");
        let error = segment.header().failure.error().unwrap();
        assert_eq!(error.code(), ncclRemoteError);
        assert!(long.starts_with(error.message()) && error.message().len() > 500);
        assert_eq!((error.blame().ranks.as_slice(), error.blame().lost.as_slice()), (&[1, 70][..], &[1][..]));
    }
}
