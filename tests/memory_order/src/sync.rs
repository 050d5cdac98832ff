//! Takes the place of the product's module `sync`: loom's atomics and locks, in which one memory
//! order can be weakened.

use std::cell::{OnceCell, RefCell};
use std::sync::LockResult;
pub use std::sync::atomic::Ordering;

pub use loom::sync::MutexGuard;

use crate::weak;

loom::lazy_static! {
    /// Nobody waits here. loom treats two notifications as dependent, so it tries both orders. A
    /// notification synchronizes nothing.
    static ref TURN: loom::sync::Condvar = loom::sync::Condvar::new();
}

/// Lets another thread go first. loom alone remembers only the last access to each atomic, so it
/// does not try to put a store before a load if the storing thread has loaded the atomic, too. With
/// this call before each access, loom tries all orders of accesses.
pub(crate) fn turn() {
    TURN.notify_one();
}

/// A fence, unless this fence is weakened to none.
#[track_caller]
pub fn fence(order: Ordering) {
    if let Some(order) = weak::fence(order) {
        loom::sync::atomic::fence(order);
    }
}

/// A store with a fence behind it. It stands for the product's exchange on x86-64, too.
#[track_caller]
pub fn store_and_fence(word: &AtomicU32, value: u32) {
    word.store(value, Ordering::Release);
    fence(Ordering::SeqCst);
}

/// Does nothing, because loom has no caches.
pub fn fetch_for_writing(_line: *const u8) {}

macro_rules! atomics {
    ($($name:ident: $value:ty),*) => {$(
        /// An atomic of loom.
        #[derive(Debug, Default)]
        pub struct $name(loom::sync::atomic::$name);

        impl $name {
            pub fn new(value: $value) -> $name {
                $name(loom::sync::atomic::$name::new(value))
            }

            #[track_caller]
            pub fn load(&self, order: Ordering) -> $value {
                turn();
                self.0.load(weak::load(order))
            }

            #[track_caller]
            pub fn store(&self, value: $value, order: Ordering) {
                turn();
                self.0.store(value, weak::store(order))
            }

            #[track_caller]
            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                turn();
                self.0.swap(value, weak::change(order))
            }

            #[track_caller]
            pub fn compare_exchange(
                &self, from: $value, to: $value, success: Ordering, failure: Ordering,
            ) -> Result<$value, $value> {
                turn();
                self.0.compare_exchange(from, to, weak::change(success), weak::failure(failure))
            }
        }
    )*};
}

macro_rules! integers {
    ($($name:ident: $value:ty),*) => {$(
        impl $name {
            #[track_caller]
            pub fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                turn();
                self.0.fetch_add(value, weak::change(order))
            }

            #[track_caller]
            pub fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                turn();
                self.0.fetch_sub(value, weak::change(order))
            }

            #[track_caller]
            pub fn fetch_or(&self, value: $value, order: Ordering) -> $value {
                turn();
                self.0.fetch_or(value, weak::change(order))
            }
        }
    )*};
}

atomics!(AtomicBool: bool, AtomicI32: i32, AtomicI64: i64, AtomicU32: u32, AtomicU64: u64);
integers!(AtomicI32: i32, AtomicI64: i64, AtomicU32: u32, AtomicU64: u64);

/// A pointer, which loom gets to know at the first access, because the product makes it in a
/// constant. A model makes this access before it starts threads.
#[derive(Debug)]
pub struct AtomicPtr<T> {
    first: *mut T,
    inner: OnceCell<loom::sync::atomic::AtomicPtr<T>>,
}

// SAFETY: loom runs all threads of a model in turn, on one thread of the system.
unsafe impl<T> Send for AtomicPtr<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for AtomicPtr<T> {}

impl<T> AtomicPtr<T> {
    pub const fn new(first: *mut T) -> AtomicPtr<T> {
        AtomicPtr { first, inner: OnceCell::new() }
    }

    /// A pointer that loom knows at once.
    pub fn known(first: *mut T) -> AtomicPtr<T> {
        let pointer = AtomicPtr::new(first);
        pointer.inner();
        pointer
    }

    fn inner(&self) -> &loom::sync::atomic::AtomicPtr<T> {
        self.inner.get_or_init(|| loom::sync::atomic::AtomicPtr::new(self.first))
    }

    #[track_caller]
    pub fn load(&self, order: Ordering) -> *mut T {
        turn();
        self.inner().load(weak::load(order))
    }

    #[track_caller]
    pub fn store(&self, value: *mut T, order: Ordering) {
        turn();
        self.inner().store(value, weak::store(order))
    }

    #[track_caller]
    pub fn compare_exchange(
        &self,
        from: *mut T,
        to: *mut T,
        success: Ordering,
        failure: Ordering,
    ) -> Result<*mut T, *mut T> {
        turn();
        self.inner().compare_exchange(from, to, weak::change(success), weak::failure(failure))
    }
}

/// A mutex of loom, made in a constant, as [`AtomicPtr`] is.
#[derive(Debug)]
pub struct Mutex<T> {
    first: RefCell<Option<T>>,
    inner: OnceCell<loom::sync::Mutex<T>>,
}

// SAFETY: loom runs all threads of a model in turn, on one thread of the system.
unsafe impl<T: Send> Send for Mutex<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Mutex<T> {}

impl<T> Mutex<T> {
    pub const fn new(value: T) -> Mutex<T> {
        Mutex { first: RefCell::new(Some(value)), inner: OnceCell::new() }
    }

    #[track_caller]
    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        let make = || loom::sync::Mutex::new(self.first.borrow_mut().take().expect("the value is moved once"));
        self.inner.get_or_init(make).lock()
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Mutex<T> {
        Mutex::new(T::default())
    }
}
