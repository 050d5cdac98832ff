//! A model of the promise of crossbeam_epoch: an entry is destroyed after all threads are unpinned
//! that were pinned when the entry was given up. A thread that pins itself later finds the entry
//! unlinked.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::marker::PhantomData;
use std::ptr;
use std::rc::Rc;

use loom::sync::atomic::{AtomicUsize, Ordering::*, fence};
use memory_order::sync::{AtomicPtr, Ordering};

/// An entry that was given up.
struct Garbage {
    /// The guards that the threads had then, and still have.
    pinned: BTreeSet<usize>,
    destroy: Box<dyn FnOnce()>,
}

#[derive(Default)]
struct State {
    last: usize,
    pinned: BTreeSet<usize>,
    garbage: Vec<Garbage>,
    /// How many guards were dropped. Whoever drops one sees what the threads before it did.
    unpinned: Option<Rc<AtomicUsize>>,
}

thread_local! {
    /// loom runs all threads of a model on one thread.
    static STATE: RefCell<State> = RefCell::default();
}

/// Prepares the epochs for an execution.
pub(crate) fn begin() {
    STATE.set(State { unpinned: Some(Rc::new(AtomicUsize::new(0))), ..State::default() });
}

/// A thread's protection of the entries that it looks at.
pub struct Guard(usize);

/// Protects the entries at which this thread looks.
pub fn pin() -> Guard {
    let guard = STATE.with_borrow_mut(|state| {
        state.last += 1;
        state.pinned.insert(state.last);
        Guard(state.last)
    });
    fence(SeqCst);
    guard
}

impl Guard {
    /// Destroys an entry when no thread can look at it.
    ///
    /// # Safety
    /// The entry was unlinked, and is given up once.
    pub unsafe fn defer_destroy<T: 'static>(&self, entry: Shared<'_, T>) {
        fence(SeqCst);
        let pointer = entry.0;
        // SAFETY: the entry was made by `Owned::new`, and no thread looks at it any more.
        let destroy = Box::new(move || drop(unsafe { Box::from_raw(pointer) }));
        STATE.with_borrow_mut(|state| state.garbage.push(Garbage { pinned: state.pinned.clone(), destroy }));
    }

    pub fn flush(&self) {}
}

impl Drop for Guard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let counter = STATE.with_borrow(|state| state.unpinned.clone()).expect("a model begins with `begin`");
        counter.fetch_add(1, AcqRel);
        let unused = STATE.with_borrow_mut(|state| {
            state.pinned.remove(&self.0);
            for garbage in &mut state.garbage {
                garbage.pinned.remove(&self.0);
            }
            let garbage = std::mem::take(&mut state.garbage);
            let (unused, used): (Vec<_>, Vec<_>) = garbage.into_iter().partition(|garbage| garbage.pinned.is_empty());
            state.garbage = used;
            unused
        });
        unused.into_iter().for_each(|garbage| (garbage.destroy)());
    }
}

/// An entry that no other thread knows.
pub struct Owned<T>(Box<T>);

impl<T> Owned<T> {
    pub fn new(entry: T) -> Owned<T> {
        Owned(Box::new(entry))
    }
}

/// A pointer to an entry, which is valid while the thread is pinned.
pub struct Shared<'g, T>(*mut T, PhantomData<&'g T>);

impl<T> Clone for Shared<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Shared<'_, T> {}

impl<'g, T> Shared<'g, T> {
    pub fn null() -> Shared<'g, T> {
        Shared(ptr::null_mut(), PhantomData)
    }

    /// # Safety
    /// The entry was not destroyed.
    pub unsafe fn as_ref(&self) -> Option<&'g T> {
        // SAFETY: the caller's promise.
        unsafe { self.0.as_ref() }
    }
}

/// A place for an entry.
pub struct Atomic<T>(AtomicPtr<T>);

impl<T> Atomic<T> {
    pub fn null() -> Atomic<T> {
        Atomic(AtomicPtr::known(ptr::null_mut()))
    }

    #[track_caller]
    pub fn load<'g>(&self, order: Ordering, _guard: &'g Guard) -> Shared<'g, T> {
        Shared(self.0.load(order), PhantomData)
    }

    #[track_caller]
    pub fn store(&self, entry: Owned<T>, order: Ordering) {
        self.0.store(Box::into_raw(entry.0), order);
    }

    #[track_caller]
    pub fn compare_exchange<'g>(
        &self,
        from: Shared<'g, T>,
        to: Shared<'g, T>,
        success: Ordering,
        failure: Ordering,
        _guard: &'g Guard,
    ) -> Result<Shared<'g, T>, Shared<'g, T>> {
        let shared = |pointer| Shared(pointer, PhantomData);
        self.0.compare_exchange(from.0, to.0, success, failure).map(shared).map_err(shared)
    }
}
