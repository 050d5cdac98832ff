//! Locked values that a forked child takes over.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A value behind a lock, for statics. A child may be forked while another thread holds the lock.
/// That thread does not exist in the child, so the child would wait for ever. Therefore each
/// process has a lock of its own. The child's first use takes the value over, or begins with the
/// default value where a thread held the parent's lock during the fork.
pub(crate) struct Inherited<T> {
    /// The lock of the process that used the value last. It is NULL before the first use. A lock
    /// that was stored here is never freed.
    last: AtomicPtr<Locked<T>>,
}

/// The lock of one process.
struct Locked<T> {
    /// The process.
    pid: u32,
    /// The value.
    value: Mutex<T>,
    /// The lock of the process from which this one took the value over. It is kept here only so
    /// that tools that look for leaks do not report it.
    _parents: *mut Locked<T>,
}

impl<T: Default + Send + 'static> Inherited<T> {
    pub(crate) const fn new() -> Inherited<T> {
        Inherited { last: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Locks the value.
    pub(crate) fn lock(&self) -> MutexGuard<'static, T> {
        self.mine().lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the value, or returns `None` where another thread holds the lock.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'static, T>> {
        self.mine().try_lock().ok()
    }

    /// Returns the lock of this process.
    fn mine(&self) -> &'static Mutex<T> {
        let pid = std::process::id();
        let mut last = self.last.load(Ordering::Acquire);
        loop {
            // SAFETY: a pointer that is not NULL comes from `Box::into_raw`. What was stored is
            // never freed.
            let known: Option<&'static Locked<T>> = unsafe { last.as_ref() };
            if let Some(locked) = known.filter(|locked| locked.pid == pid) {
                return &locked.value;
            }
            let raw = Box::into_raw(Box::new(Locked { pid, value: Mutex::new(T::default()), _parents: last }));
            // SAFETY: the pointer comes from `Box::into_raw`. The memory is freed below only where
            // no other thread has got the pointer.
            let own: &'static Locked<T> = unsafe { &*raw };
            // Another thread gets the new lock only once the value is there.
            let mut value = own.value.lock().unwrap_or_else(PoisonError::into_inner);
            match self.last.compare_exchange(last, raw, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    if let Some(mut taken) = known.and_then(|parent| parent.value.try_lock().ok()) {
                        *value = std::mem::take(&mut *taken);
                    }
                    last = raw;
                }
                Err(now) => {
                    drop(value);
                    // SAFETY: this thread alone has the pointer, and the guard and `own` are not
                    // used any more. The value owns nothing of the parent.
                    drop(unsafe { Box::from_raw(raw) });
                    last = now;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    /// The value stands in the lock of another process, as in a child that was just forked.
    #[test]
    fn threads_that_make_the_first_use_at_once_keep_the_value() {
        for round in 0..100 {
            let parents =
                Box::into_raw(Box::new(Locked { pid: 0, value: Mutex::new(7_u32), _parents: ptr::null_mut() }));
            let (value, ready) = (Inherited { last: AtomicPtr::new(parents) }, AtomicU32::new(0));
            let first_use = || {
                ready.fetch_add(1, Ordering::SeqCst);
                while ready.load(Ordering::SeqCst) < 2 {
                    std::hint::spin_loop();
                }
                *value.lock()
            };
            let found = std::thread::scope(|scope| {
                let other = scope.spawn(first_use);
                [first_use(), other.join().unwrap()]
            });
            assert_eq!(found, [7, 7], "in round {round}");
            for locked in [parents, value.last.into_inner()] {
                // SAFETY: the pointers come from `Box::into_raw`, and nobody uses them any more.
                drop(unsafe { Box::from_raw(locked) });
            }
        }
    }
}
