//! The number of a join, which is equal on all ranks, and the keys that earlier worlds of this
//! process left in the store.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use once_cell::sync::Lazy;

use super::agreement::WorldKeys;
use super::handshake;
use super::running;
use super::store::{LeftWorld, Store};
use crate::error::Result;
use crate::wait::Wait;

/// How long it may take to give a number back.
const SHORT: Duration = Duration::from_millis(200);
/// How long it may take to leave a world. Leaving takes longer than a moment only when other ranks
/// hold the lock of a folder, and a rank that was stopped may hold it for ever.
const LEAVING: Duration = Duration::from_millis(500);
/// The most notes of lost ranks that are removed. There is a bound because the number of notes is
/// read from the store.
const MOST_LOST: usize = 1 << 16;
/// The most worlds that this process has left and whose keys it remembers. This number is also the
/// most nonces of failed joins that are kept.
const MOST: usize = 64;

/// The number of a join in the store. The number is given back when this value is dropped before
/// the join has succeeded, so the next try gets it again. The next try needs this number because
/// the other ranks may not have begun this join at all.
pub(super) struct JoinAttempt {
    /// The store that counts the joins.
    store: Arc<dyn Store>,
    /// The key under which the store counts the joins of this rank of this process.
    pub(super) counter: String,
    /// The keys of this join begin with this prefix.
    pub(super) prefix: String,
    /// The rank that joins.
    rank: usize,
    /// The nonces under which this rank tried this join in vain. Rank 0 may still be handing out
    /// the nonce of such a try.
    pub(super) tried: Vec<String>,
    /// The nonce of this try, once it is known.
    nonce: Option<String>,
    /// The number of this join.
    number: i64,
    /// The knowledge of this process about the key that counts the joins.
    count: Count,
    /// Whether the join has succeeded, so its number stays in use.
    done: bool,
}

/// For each store and rank, the nonces of the joins that failed since the last join that succeeded.
static TRIED: Lazy<Mutex<Tried>> = Lazy::new(Mutex::default);
type Tried = HashMap<(String, usize), Vec<String>>;

/// The knowledge of this process about each key that counts its joins. An answer of the store may
/// fail to come while a number is taken or given back, and then nobody knows whether the store has
/// counted. Without this knowledge the rank would be one number beyond the other ranks from then
/// on. Only stores that are known by their addresses and folders are listed here, because several
/// stores of a caller may have one name.
static COUNTS: Lazy<Mutex<HashMap<String, Counted>>> = Lazy::new(Mutex::default);

/// The knowledge of a process about a key that counts its joins.
#[derive(Clone, Copy, Default)]
struct Counted {
    /// The number of the next join.
    next: i64,
    /// How many numbers the key may have counted in vain beyond `next`.
    too_many: i64,
    /// How many joins that the key counts are going on in this process.
    going_on: usize,
    /// Whether several such joins have gone on at the same time. Each of them has a number of its
    /// own, so nothing is known of the key until all of them are over.
    overlap: bool,
}

impl Counted {
    /// Returns the correct value of the key, which has this value after a join has begun. The
    /// number of this join counts in `too_many`, because this join may still fail.
    fn correct(&self, joins: i64) -> i64 {
        let first = self.next + 1;
        if (first..=self.next + self.too_many).contains(&joins) { first } else { joins }
    }
}

/// The part of one join in the knowledge about the key that counts it ([`COUNTS`]).
struct Count {
    /// The key; `None` where the knowledge is not kept.
    key: Option<String>,
}

impl Count {
    /// Begins a join that this key will count.
    fn begin(key: Option<String>) -> Count {
        if let Some(key) = &key {
            let mut all = lock(&COUNTS);
            let count = all.entry(key.clone()).or_default();
            count.going_on += 1;
            count.overlap |= count.going_on > 1;
        }
        Count { key }
    }

    /// Returns what is known of the key, which is nothing while several joins go on.
    fn known(&self) -> Counted {
        let known = self.key.as_ref().and_then(|key| lock(&COUNTS).get(key).copied());
        known.filter(|known| !known.overlap).unwrap_or_default()
    }

    /// Notes what is known of the key from now on.
    fn note(&self, next: i64, too_many: i64) {
        let Some(key) = &self.key else { return };
        if let Some(count) = lock(&COUNTS).get_mut(key) {
            (count.next, count.too_many) = (next, too_many);
        }
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        let Some(key) = &self.key else { return };
        let mut all = lock(&COUNTS);
        let Some(count) = all.get_mut(key) else { return };
        count.going_on -= 1;
        if count.going_on == 0 && count.overlap {
            all.remove(key);
        }
    }
}

impl JoinAttempt {
    /// Begins the n-th join of this rank of this process in that store. The store counts the joins.
    /// So what this process does in other stores of that name, or with an earlier server there,
    /// does not matter to the ranks that meet now. `has_own_name` says whether no other store of
    /// this process has the name of the store.
    pub(super) fn begin(
        store: &Arc<dyn Store>,
        job: u64,
        rank: usize,
        has_own_name: bool,
        wait: &Wait,
    ) -> Result<JoinAttempt> {
        static NAMES: Lazy<Mutex<HashMap<(String, usize), String>>> = Lazy::new(Mutex::default);
        let mut names = lock(&NAMES);
        let name = names.entry((store.name().to_owned(), rank)).or_insert_with(handshake::random).clone();
        drop(names);
        let counter = format!("devicemesh/{job:x}/joins/{name}");
        let count = Count::begin(has_own_name.then(|| counter.clone()));
        let Counted { next, too_many, .. } = count.known();
        count.note(next, too_many + 1);
        let mut joins = store.add(&counter, 1, wait)?;
        // The store may have begun anew after it had given a number out, which was then given
        // back. It may also have kept a number that was given back. If another join has begun
        // meanwhile, the store's count stands.
        let correct = count.known().correct(joins.max(1));
        if joins != correct {
            joins = store.add(&counter, correct - joins, wait)?;
        }
        let number = joins - 1;
        count.note(number, 1);
        let prefix = format!("devicemesh/{job:x}/{number}");
        let tried = lock(&TRIED).get(&(store.name().to_owned(), rank)).cloned().unwrap_or_default();
        let store = Arc::clone(store);
        Ok(JoinAttempt { store, counter, prefix, rank, tried, nonce: None, number, count, done: false })
    }

    /// Notes that the ranks meet under that prefix, which ends with their nonce.
    pub(super) fn meets_under(&mut self, prefix: &str) {
        self.nonce = prefix.rsplit('/').next().map(str::to_owned);
    }

    /// Keeps the number in use. This is called when the join has succeeded or its store has gone.
    pub(super) fn keep(mut self) {
        self.done = true;
        self.count.note(self.number + 1, 0);
        lock(&TRIED).remove(&(self.store.name().to_owned(), self.rank));
    }
}

impl Drop for JoinAttempt {
    fn drop(&mut self) {
        if !self.done {
            if let Some(nonce) = self.nonce.take() {
                let mut all = lock(&TRIED);
                let tried = all.entry((self.store.name().to_owned(), self.rank)).or_default();
                if tried.len() == MOST {
                    tried.remove(0);
                }
                tried.push(nonce);
            }
            let wait = Wait::after(SHORT);
            // This key is removed before the number is free again, because a rank that gets the
            // number must not find what rank 0 left for this join.
            if self.rank == 0 {
                let _ = self.store.delete(&format!("{}/session", self.prefix), &wait);
            }
            if self.store.add(&self.counter, -1, &wait).is_ok() {
                self.count.note(self.number, 0);
            }
        }
    }
}

/// The keys that this process has left in a world.
struct LeftKeys {
    /// The name of the store.
    store: String,
    /// This process's rank in that world.
    rank: usize,
    /// The number of ranks of that world.
    size: usize,
    /// The keys of that world begin with this prefix.
    prefix: String,
    /// The keys that this rank has left there, and those that it removes as the last rank.
    keys: Vec<String>,
    /// Whether a clean-up has counted this rank among the ranks that have gone.
    is_counted: bool,
}

static LEFT: Mutex<Vec<LeftKeys>> = Mutex::new(Vec::new());

/// Collects the keys that a rank leaves in a world whose keys begin with `prefix`. When the rank
/// has left the world, the store is told, and these keys are remembered for [`clean_up`].
/// `counter` is the key that counts the joins of this rank. `size` is the number of ranks of the
/// world by then. `size` is 0 for a process that was no member of the world: the keys that this
/// process has left stay, and the ranks of the world are counted without this process.
pub(super) fn leftovers(
    store: &Arc<dyn Store>,
    rank: usize,
    prefix: &str,
    counter: &str,
    size: Arc<AtomicUsize>,
) -> WorldKeys {
    let (in_store, store, prefix) = (Arc::clone(store), store.name().to_owned(), prefix.to_owned());
    let counter = counter.to_owned();
    WorldKeys::for_world(move |keys| {
        let size = size.load(Ordering::SeqCst);
        if size < 2 {
            return;
        }
        let world = LeftWorld { prefix: &prefix, counter: &counter, rank, size };
        in_store.leave_world(&world, &Wait::after(LEAVING));
        let mut left = lock(&LEFT);
        if left.len() == MOST {
            left.remove(0);
        }
        left.push(LeftKeys { store: store.clone(), rank, size, prefix: prefix.clone(), keys, is_counted: false });
    })
}

/// Removes the keys that this rank left in the worlds that it joined in this store earlier and has
/// left since. Only the last rank to do so for a world removes the notes about the ranks that have
/// gone from this world, because ranks that are still in the world look for these notes.
///
/// When the store fails, the worlds whose keys are not removed yet are remembered for the next
/// call.
pub(super) fn clean_up(store: &dyn Store, rank: usize, wait: &Wait) -> Result<()> {
    let mut all = lock(&LEFT);
    let (mine, others) = all.drain(..).partition::<Vec<_>, _>(|left| left.rank == rank && left.store == store.name());
    *all = others;
    drop(all);
    let mut mine = mine.into_iter();
    while let Some(mut left) = mine.next() {
        if let Err(error) = left.find_last(store, wait) {
            let mut all = lock(&LEFT);
            all.extend([left].into_iter().chain(mine));
            // Threads of other ranks may have left worlds meanwhile.
            let more = all.len().saturating_sub(MOST);
            all.drain(..more);
            return Err(error);
        }
        store.forget(left.keys, wait);
    }
    Ok(())
}

impl LeftKeys {
    /// Adds the keys that the last rank removes. When this fails, the next try begins where this
    /// one ended.
    fn find_last(&mut self, store: &dyn Store, wait: &Wait) -> Result<()> {
        let LeftKeys { rank, size, prefix, keys, is_counted, .. } = self;
        let (lost, gone) = (format!("{prefix}/lost"), format!("{prefix}/gone"));
        // Another server has no keys of that world.
        let count = if *is_counted { None } else { store.try_get(&lost, wait)? };
        // This rank must not be counted twice, because ranks that are still in the world need the
        // notes. So only one try counts, even if the answer of the store did not come.
        *is_counted = true;
        if count.is_some() && store.add(&gone, 1, wait)? == *size as i64 {
            let count: usize = String::from_utf8_lossy(&count.unwrap_or_default()).trim().parse().unwrap_or(0);
            keys.extend((1..=count.min(MOST_LOST)).map(|number| format!("{lost}/{number}")));
            keys.extend([lost, gone]);
        }
        if *rank == 0 {
            // Where the store has begun anew, this join may use the key of that earlier join.
            let (join, nonce) = prefix.rsplit_once('/').unwrap_or((prefix.as_str(), ""));
            let key = running::key(join);
            let said = store.try_get(&key, wait)?;
            keys.extend(said.is_some_and(|said| said.starts_with(nonce.as_bytes())).then_some(key));
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::rendezvous::store::{Hooked, MemoryStore};
    use std::sync::atomic::AtomicBool;

    /// No other test has these ranks.
    #[test]
    fn a_number_that_was_not_given_back_is_given_back_by_the_next_join() {
        let wait = Wait::after(Duration::from_secs(20));
        let is_ill = Arc::new(AtomicBool::new(false));
        let ill = Arc::clone(&is_ill);
        let before = move |operation: &str, _: usize, _: &Wait| match operation == "add" && ill.load(Ordering::SeqCst) {
            true => Err(Error::store("the store is ill")),
            false => Ok(()),
        };
        let memory = MemoryStore::new();
        let store: Arc<dyn Store> = Arc::new(Hooked { store: memory.clone(), before });
        let begin = || JoinAttempt::begin(&store, 0, 1002, true, &wait);
        let number = |join: &JoinAttempt| join.prefix.rsplit('/').next().map(str::to_owned);
        for expected in ["0", "1"] {
            let join = begin().unwrap();
            assert_eq!(number(&join).as_deref(), Some(expected));
            // The number is not given back.
            is_ill.store(true, Ordering::SeqCst);
            drop(join);
            assert!(begin().is_err());
            is_ill.store(false, Ordering::SeqCst);
            let join = begin().unwrap();
            assert_eq!(number(&join).as_deref(), Some(expected));
            // The store takes a number, and its answer does not come.
            let counter = join.counter.clone();
            drop(join);
            is_ill.store(true, Ordering::SeqCst);
            assert!(begin().is_err());
            is_ill.store(false, Ordering::SeqCst);
            memory.add(&counter, 1, &wait).unwrap();
            let join = begin().unwrap();
            assert_eq!(number(&join).as_deref(), Some(expected));
            join.keep();
        }
        // A join of another job has a key of its own.
        let join = JoinAttempt::begin(&store, 1, 1002, true, &wait).unwrap();
        assert_eq!(number(&join).as_deref(), Some("0"));
        is_ill.store(true, Ordering::SeqCst);
        drop(join);
        is_ill.store(false, Ordering::SeqCst);
        begin().unwrap().keep();
        let join = JoinAttempt::begin(&store, 1, 1002, true, &wait).unwrap();
        assert_eq!(number(&join).as_deref(), Some("0"));
        join.keep();
        // Another server has begun at the same address.
        let other: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let join = JoinAttempt::begin(&other, 0, 1002, true, &wait).unwrap();
        assert_eq!(number(&join).as_deref(), Some("0"));
    }

    /// No other test has this rank.
    #[test]
    fn joins_that_go_on_at_the_same_time_have_numbers_of_their_own() {
        let wait = Wait::after(Duration::from_secs(20));
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let begin = || JoinAttempt::begin(&store, 0, 1003, true, &wait).unwrap();
        let (first, second) = (begin(), begin());
        assert_eq!((first.number, second.number), (0, 1));
        second.keep();
        // The second number stays in use.
        drop(first);
        let third = begin();
        assert_eq!(third.number, 1);
        third.keep();
        assert_eq!(begin().number, 2);
    }

    #[test]
    fn a_clean_up_that_fails_is_made_up_for_by_the_next_one() {
        let wait = Wait::after(Duration::from_secs(20));
        // The list of the process also has what other tests leave in their stores. No other test
        // has this rank.
        let rank = 1001;
        let is_ill = AtomicBool::new(true);
        let before = |operation: &str, _: usize, _: &Wait| match operation == "get" && is_ill.load(Ordering::SeqCst) {
            true => Err(Error::store("the store is ill")),
            false => Ok(()),
        };
        let store = Hooked { store: MemoryStore::new(), before };
        for world in ["devicemesh/0/0/a", "devicemesh/0/1/b"] {
            let keys = vec![format!("{world}/world/0/here/1")];
            store.set(&keys[0], b"dm_init()", &wait).unwrap();
            store.add(&format!("{world}/lost"), 1, &wait).unwrap();
            store.set(&format!("{world}/lost/1"), b"0", &wait).unwrap();
            // The other rank of the world has gone before.
            store.add(&format!("{world}/gone"), 1, &wait).unwrap();
            let (store, prefix) = (store.name().to_owned(), world.to_owned());
            lock(&LEFT).push(LeftKeys { store, rank, size: 2, prefix, keys, is_counted: false });
        }
        assert!(clean_up(&store, rank, &wait).is_err());
        assert_eq!(store.store.keys().len(), 8, "{:?}", store.store.keys());
        is_ill.store(false, Ordering::SeqCst);
        clean_up(&store, rank, &wait).unwrap();
        assert_eq!(store.store.keys(), [""; 0]);
    }
}
