//! Ranks that open and map one segment, in this process.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};

use super::file::Mapping;
use super::*;
use crate::memory_file::resize;
use crate::types::*;

#[test]
fn what_one_mapping_writes_the_other_reads() {
    let fd = create([7; 16]).unwrap();
    let again = open(std::process::id(), fd.as_raw_fd(), [7; 16]).unwrap().unwrap();
    let (a, b) =
        (Segment::map(&fd, 3, 0, &Labels::default()).unwrap(), Segment::map(&again, 3, 1, &Labels::default()).unwrap());
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
    assert!(error.message().contains("passed nranks 3, but rank 0 passed 4"), "{}", error.message());
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
                ranks.push(scope.spawn(move || Segment::map(fd, nranks, rank as u32, &Labels::default()).map(drop)));
                // The rank that comes first decides the number of ranks.
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

#[test]
fn a_rank_without_memory_is_named_by_its_rank_and_not_by_its_seat() {
    let fd = create([1; 16]).unwrap();
    // The kernel refuses to enlarge the file, as it does when there is no memory.
    seal(&fd, libc::F_SEAL_GROW).unwrap();
    let labels = Labels { comm_name: "it".to_owned(), seats: [4, 6].into(), ..Labels::default() };
    let error = Segment::map(&fd, 2, 1, &labels).unwrap_err();
    assert_eq!((error.code(), &error.blame().ranks[..]), (ncclSystemError, &[6][..]));
    assert!(error.message().starts_with("rank 6 of it (pid "), "{}", error.message());
    let told = Mapping::new(fd.as_raw_fd(), HEADER_BYTES).unwrap().header().failure.error().unwrap();
    assert_eq!(told, error, "the other ranks read the same");
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
        assert_eq!((error.code(), &*error.blame().ranks), (ncclInvalidUsage, &[0, 1][..]));
        assert!(error.message().contains(&format!("passed nranks {came}, but rank 0 passed 4")), "{}", error.message());
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
    let blame = Blame { ranks: vec![1, 70], lost: vec![1] };
    assert!(segment.header().fail(ncclRemoteError, &blame, &long, "ncclAllReduce"));
    assert!(!segment.header().fail(ncclInvalidUsage, &Blame::none(), "later", ""));
    let error = segment.header().failure.error().unwrap();
    assert_eq!(error.code(), ncclRemoteError);
    assert_eq!(error.message(), "é".repeat(254) + "…", "a message that is cut says so");
    assert_eq!((error.blame().ranks.as_slice(), error.blame().lost.as_slice()), (&[1, 70][..], &[1][..]));
}
