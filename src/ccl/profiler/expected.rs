//! The communicators that this process is making. NCCL's profiler interface tells the name, the
//! size and the rank of a communicator. By these three the library finds the communicator of a
//! mesh again, and records its calls for the dimension, with the dimension's name and ranks.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::recorder::Group;

/// The communicators that threads of this process are making.
static EXPECTED: Mutex<Vec<Communicator>> = Mutex::new(Vec::new());

struct Communicator {
    name: String,
    rank: c_int,
    size: c_int,
    group: Arc<Group>,
}

/// A communicator that is being made. Dropping it forgets the communicator.
pub(crate) struct Expected(Arc<Group>);

/// Notes that the communicator of `group` is about to be made. `name` is its name in NCCL's
/// configuration, and this process is `rank` of `size`.
pub(crate) fn expect(name: &str, (rank, size): (usize, usize), group: &Arc<Group>) -> Expected {
    let (rank, size) = (rank as c_int, size as c_int);
    lock().push(Communicator { name: name.to_owned(), rank, size, group: Arc::clone(group) });
    Expected(Arc::clone(group))
}

impl Drop for Expected {
    fn drop(&mut self) {
        lock().retain(|known| !Arc::ptr_eq(&known.group, &self.0));
    }
}

/// The group of a communicator that is being made. Returns `None` unless exactly one of them has
/// this name, rank and size.
pub(super) fn find(name: &str, rank: c_int, size: c_int) -> Option<Arc<Group>> {
    let known = lock();
    let mut fitting = known.iter().filter(|known| (&*known.name, known.rank, known.size) == (name, rank, size));
    let first = fitting.next().filter(|_| !name.is_empty())?;
    fitting.next().is_none().then(|| Arc::clone(&first.group))
}

fn lock() -> MutexGuard<'static, Vec<Communicator>> {
    EXPECTED.lock().unwrap_or_else(PoisonError::into_inner)
}
