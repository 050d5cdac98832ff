//! The keys that this rank has left in the store for its calls, and when it removes them.
//!
//! Each key is removed by the rank that wrote it. A counter or a verdict, which several ranks may write, is removed by the rank that wrote
//! it first. A rank begins a call only after it has left the call before. So once all ranks of a scope have agreed on a call, nobody reads
//! what was left in that scope before, and every rank removes the keys that it had left when it began the call. When a scope is dropped (a
//! mesh was finalized or freed), the keys that the scope still holds are removed after the next agreed call of a scope that has all of its
//! ranks, for example dm_init of the next mesh.
//!
//! A call that failed keeps its keys until a later call is agreed, so a rank that is late for the failed call reads the same verdict as the
//! others.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Members;

/// The keys that this rank left in one scope.
pub(in crate::rendezvous) struct Left {
    members: Members,
    keys: Mutex<Vec<String>>,
    /// This scope has looked at the leftovers with a lower number, and has taken those that it may remove.
    examined: Mutex<u64>,
    leftovers: Arc<Leftovers>,
}

/// The keys that this rank left in one world: those of the scopes that it has dropped, and those of the world as a whole.
#[derive(Default)]
pub(in crate::rendezvous) struct Leftovers {
    dropped: Mutex<Dropped>,
    at_end: Option<AtEnd>,
}

/// Receives the keys that are left of a world when this rank has dropped the world and all of its scopes.
type AtEnd = Box<dyn Fn(Vec<String>) + Send + Sync>;

#[derive(Default)]
struct Dropped {
    scopes: Vec<(u64, Members, Vec<String>)>,
    next: u64,
    /// Keys that are needed for as long as any rank is in the world.
    of_world: Vec<String>,
}

impl Left {
    pub(in crate::rendezvous) fn new(members: &Members, leftovers: &Arc<Leftovers>) -> Left {
        let (members, leftovers) = (members.clone(), Arc::clone(leftovers));
        Left { members, keys: Mutex::default(), examined: Mutex::default(), leftovers }
    }

    /// Notes keys that this rank writes now, or keeps after all.
    pub(super) fn note(&self, keys: impl IntoIterator<Item = String>) {
        lock(&self.keys).extend(keys);
    }

    /// Takes the keys that may be removed once the call that this rank is about to make is agreed.
    pub(super) fn take(&self) -> Vec<String> {
        let mut keys = std::mem::take(&mut *lock(&self.keys));
        keys.append(&mut self.leftovers.take(&self.members, &mut lock(&self.examined)));
        keys
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        let keys = std::mem::take(&mut *lock(&self.keys));
        if !keys.is_empty() {
            let mut dropped = self.leftovers.lock();
            let number = dropped.next;
            dropped.next += 1;
            dropped.scopes.push((number, self.members.clone(), keys));
        }
    }
}

impl Leftovers {
    fn lock(&self) -> MutexGuard<'_, Dropped> {
        lock(&self.dropped)
    }

    /// `at_end` receives the keys that are still there when this rank has dropped the world and all of its scopes.
    pub(in crate::rendezvous) fn for_world(at_end: impl Fn(Vec<String>) + Send + Sync + 'static) -> Leftovers {
        Leftovers { dropped: Mutex::default(), at_end: Some(Box::new(at_end)) }
    }

    /// Notes a key that is needed for as long as any rank is in the world.
    pub(in crate::rendezvous) fn note(&self, key: String) {
        self.lock().of_world.push(key);
    }

    /// Takes the keys of the scopes that were dropped since `examined` and whose ranks are all among `members`.
    fn take(&self, members: &Members, examined: &mut u64) -> Vec<String> {
        let mut dropped = self.lock();
        let since = std::mem::replace(examined, dropped.next);
        if dropped.scopes.iter().all(|(number, ..)| *number < since) {
            return Vec::new();
        }
        let mut keys = Vec::new();
        let all = match members {
            Members::All(_) => None,
            Members::Listed(ranks) => Some(ranks.iter().copied().collect::<HashSet<i32>>()),
        };
        dropped.scopes.retain_mut(|(number, theirs, left)| {
            let within = match (&all, &*theirs) {
                (None, _) => true,
                (Some(_), Members::All(_)) => false,
                (Some(all), Members::Listed(ranks)) => *number >= since && ranks.iter().all(|rank| all.contains(rank)),
            };
            if within {
                keys.append(left);
            }
            !within
        });
        keys
    }
}

impl Drop for Leftovers {
    fn drop(&mut self) {
        let mut dropped = std::mem::take(&mut *self.lock());
        dropped.scopes.into_iter().for_each(|(_, _, keys)| dropped.of_world.extend(keys));
        if let Some(at_end) = &self.at_end {
            at_end(dropped.of_world);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
