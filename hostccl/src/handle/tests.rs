use std::time::Instant;

use super::*;
use crate::crowd::Crowd;
use crate::labels::{GlobalRanks, Labels};
use crate::process::ProcessId;
use crate::segment::{self, Segment};

fn handle() -> Arc<Handle> {
    Arc::new(Handle::new(0, 1, 0, Config::default()))
}

/// Returns a communicator of one rank.
fn comm() -> Arc<Comm> {
    let fd = segment::create([5; 16]).unwrap();
    let labels = Labels { comm_name: "it".to_owned(), global_ranks: GlobalRanks::default(), seats: Box::default() };
    let segment = Segment::map(&fd, 1, 0, &Labels::default()).unwrap();
    Arc::new(Comm::new(segment, 0, Crowd::default(), labels, Arc::default(), ProcessId::current(), None))
}

#[test]
fn a_token_dies_with_its_handle() {
    let first = insert(handle()).unwrap();
    assert!(find(first).is_ok());
    remove(first).unwrap();
    let second = insert(handle()).unwrap();
    assert_eq!(find(first).unwrap_err().code(), ncclInvalidArgument);
    assert_eq!(remove(first).unwrap_err().code(), ncclInvalidArgument);
    assert_ne!(first, second);
    remove(second).unwrap();
}

#[test]
fn a_time_that_is_set_while_the_communicator_is_made_holds() {
    for _ in 0..200 {
        let (comm, handle, both) = (comm(), handle(), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                both.wait();
                handle.set_timeout(7).unwrap();
            });
            both.wait();
            handle.set_comm(Ok(comm));
        });
        assert_eq!(handle.comm().unwrap().timeout(), Some(Duration::from_millis(7)));
    }
}

#[test]
fn a_thread_that_drives_a_call_in_the_background_can_abort_it() {
    let (driven, other) = (handle(), handle());
    let abort_here = |handle: &Arc<Handle>| {
        let began = Instant::now();
        handle.abort();
        began.elapsed()
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _here = DrivenHere::new([&driven].into_iter());
            assert!(abort_here(&driven) < Duration::from_secs(4), "the thread has waited for itself");
            driven.finish(Err(Error::aborted()));
            other.finish(Err(Error::aborted()));
        });
        // Another thread waits until the call has ended.
        abort_here(&other);
        assert!(!other.in_progress());
    });
    assert!(driven.aborted.load(Ordering::SeqCst));
}

/// A call without a thread that counts its drives, and whether it was dropped.
struct Counted {
    handle: Arc<Handle>,
    drives: Arc<AtomicU32>,
    /// The call is over when it was driven so many times.
    needed: u32,
    panics: bool,
}

impl WithoutThread for Counted {
    fn drive_until(self: Box<Self>, end: Instant, is_unwanted: &dyn Fn() -> bool) -> Option<Box<dyn WithoutThread>> {
        assert!(!self.panics, "as it is meant to");
        let drives = self.drives.fetch_add(1, Ordering::SeqCst) + 1;
        while drives < self.needed && Instant::now() < end && !is_unwanted() {
            std::thread::yield_now();
        }
        (drives < self.needed && !is_unwanted()).then_some(self as Box<dyn WithoutThread>)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.handle.finish(Ok(()));
    }
}

fn counted(handle: &Arc<Handle>, needed: u32, panics: bool) -> (Counted, Arc<AtomicU32>) {
    let drives = Arc::<AtomicU32>::default();
    (Counted { handle: Arc::clone(handle), drives: Arc::clone(&drives), needed, panics }, drives)
}

#[test]
fn a_thread_takes_a_call_over_that_another_one_has_left() {
    let handle = handle();
    let (call, drives) = counted(&handle, 2, false);
    assert!(handle.without_thread.keep(call).is_ok());
    assert!(handle.without_thread.keep(counted(&handle, 1, false).0).is_err(), "there is a call already");
    handle.begin(None);
    std::thread::scope(|scope| {
        scope.spawn(|| handle.wait(Duration::from_millis(50)));
        while drives.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        let began = Instant::now();
        handle.wait(Duration::from_secs(60));
        assert!(began.elapsed() < Duration::from_secs(30), "nobody has driven the call");
    });
    assert!(!handle.in_progress());
    assert_eq!(drives.load(Ordering::SeqCst), 2);
}

#[test]
fn a_call_that_panics_is_dropped_and_leaves_the_handle_usable() {
    let handle = handle();
    assert!(handle.without_thread.keep(counted(&handle, 1, true).0).is_ok());
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| handle.wait(Duration::ZERO)));
    assert!(panicked.is_err() && !handle.in_progress());
    handle.begin(None);
    assert!(handle.without_thread.keep(counted(&handle, 1, false).0).is_ok());
    handle.wait(Duration::from_secs(60));
    assert!(!handle.in_progress());
}

#[test]
fn an_aborted_handle_keeps_no_call() {
    let handle = handle();
    let (call, drives) = counted(&handle, 2, false);
    assert!(handle.without_thread.keep(call).is_ok());
    std::thread::scope(|scope| {
        scope.spawn(|| handle.wait(Duration::from_secs(60)));
        while drives.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        let began = Instant::now();
        handle.abort();
        assert!(began.elapsed() < Duration::from_secs(4), "the abort has waited for the other thread");
    });
    // A call that began before the abort and is kept after it would never end.
    handle.begin(None);
    assert!(handle.without_thread.keep(counted(&handle, 1, false).0).is_err());
    assert!(!handle.in_progress());
}

#[test]
fn made_up_tokens_are_refused() {
    for raw in [0_usize, 1, 16, 0xb, 0xdead_beef, usize::MAX, usize::MAX - 4] {
        let made_up = std::ptr::without_provenance_mut(raw);
        assert_eq!(find(made_up).unwrap_err().code(), ncclInvalidArgument, "{raw:#x}");
    }
}

#[test]
fn each_of_several_splits_keeps_its_name_from_collectives_until_it_ends() {
    let handle = handle();
    handle.set_comm(Ok(comm()));
    let [one, other, free] = [1, 2, 3].map(|tag| Name { tag, ..Name::NONE });
    for name in [one, other, one] {
        handle.begin(Some(name));
    }
    let refused = || [one, other, free].map(|name| handle.for_collective(&name).is_err());
    assert_eq!(refused(), [true, true, false]);
    for (ended, left) in [(one, [true, true, false]), (one, [false, true, false]), (other, [false; 3])] {
        handle.end_split(ended);
        handle.finish(Ok(()));
        assert_eq!(refused(), left);
    }
}

/// A revocation removes the error of a call in the background. It removes the error first, and then
/// the flag, so a call may find the flag alone.
#[test]
fn a_call_during_a_revocation_gets_no_error_once_the_error_is_removed() {
    let handle = handle();
    handle.set_comm(Ok(comm()));
    handle.begin(None);
    handle.finish(Err(Error::usage("the split has failed")));
    assert_eq!(handle.check().unwrap_err().message(), "the split has failed");
    *lock(&handle.error) = None;
    assert!(handle.failed.load(Ordering::Acquire));
    assert_eq!(handle.check(), Ok(()));
    handle.revoke().unwrap();
    assert!(!handle.failed.load(Ordering::Acquire));
}
