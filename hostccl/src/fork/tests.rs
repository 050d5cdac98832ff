use std::fs::File;
use std::os::fd::OwnedFd;

use super::*;

fn null() -> Private<OwnedFd> {
    Private::open(|| File::open("/dev/null").map(OwnedFd::from)).unwrap()
}

fn is_open(fd: RawFd) -> bool {
    // SAFETY: the call only asks about a number.
    unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
}

/// Returns what `work` returns in a forked child. `work` may use only atomics and system calls,
/// because other tests run at the same time and may hold locks.
fn in_child(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child ends with _exit, so it runs nothing but `work`.
    unsafe {
        match libc::fork() {
            0 => libc::_exit(i32::from(work())),
            child => {
                let mut status = 0;
                assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
                assert!(libc::WIFEXITED(status), "the child died: status {status:#x}");
                libc::WEXITSTATUS(status) == 1
            }
        }
    }
}

#[test]
fn a_child_has_no_private_descriptor_and_knows_that_it_is_one() {
    let kept = File::open("/dev/null").unwrap();
    let private = null();
    let (kept, fd) = (kept.as_raw_fd(), private.as_raw_fd());
    assert!(in_child(|| is_child() && !is_open(fd) && is_open(kept)));
    assert!(!is_child() && is_open(fd), "the parent is as before");
    assert!(in_child(|| in_child(is_child)), "a grandchild too");
}

#[test]
fn dropping_in_a_child_leaves_what_has_the_number_now() {
    let private = ManuallyDrop::new(null());
    let fd = private.as_raw_fd();
    assert!(in_child(|| {
        // SAFETY: nothing in the child uses that number, and the value is not used again in the
        // child.
        unsafe {
            let taken = libc::dup2(2, fd) == fd;
            drop(ManuallyDrop::into_inner(std::ptr::read(&raw const private)));
            taken && is_open(fd)
        }
    }));
    drop(ManuallyDrop::into_inner(private));
    assert!(!is_child());
}

#[test]
fn a_descriptor_is_open_and_noted_or_neither_when_another_thread_forks() {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                drop(null());
            }
        });
        for _ in 0..100 {
            let left = in_child(|| {
                // The handler has closed all descriptors of the table and emptied it.
                CHUNKS.iter().all(|chunk| {
                    let words = chunk.load(Ordering::Relaxed);
                    // SAFETY: a chunk is initialised and never freed.
                    words.is_null() || unsafe { &*words }.iter().all(|word| word.load(Ordering::Relaxed) == 0)
                }) && LOCK.load(Ordering::Relaxed) == 0
            });
            assert!(left);
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_child_takes_a_value_over_and_waits_for_no_thread_of_its_parent() {
    static VALUE: Inherited<u32> = Inherited::new();
    *VALUE.lock() = 7;
    assert!(in_child(|| std::mem::replace(&mut *VALUE.lock(), 8) == 7 && *VALUE.lock() == 8));
    let held = VALUE.lock();
    assert!(VALUE.try_lock().is_none());
    let begins_anew = in_child(|| {
        // A child that waits for the lock is ended by the signal.
        // SAFETY: the call has no conditions.
        unsafe { libc::alarm(20) };
        *VALUE.lock() == 0
    });
    assert!(begins_anew, "nobody in the child holds the lock");
    drop(held);
    assert_eq!(*VALUE.lock(), 7, "the parent's value is as before");
}
