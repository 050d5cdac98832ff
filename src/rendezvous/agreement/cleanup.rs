//! The keys that this rank has left in the store for its calls, and when it removes them.
//!
//! Each key is removed by the rank that wrote it. A counter or a verdict, which several ranks may
//! write, is removed by the rank that wrote it first. A rank begins a call only after it has left
//! its previous call. So once all ranks of a scope have agreed on a call, nobody reads the keys of
//! earlier calls of that scope any more. Every rank then removes those of its keys that were in the
//! store when it began the call. When a scope is dropped (a mesh was finalized or freed), the keys
//! that the scope still holds are removed after the next agreed call of a scope that has all of its
//! ranks, for example dm_init of the next mesh.
//!
//! Once the mesh of an epoch is made (docs/recovery.md), all ranks have left the calls of the
//! earlier epochs. Each rank then removes all of its keys of these epochs.
//!
//! A call that failed keeps its keys until a later call is agreed, so a rank that is late for the
//! failed call reads the same verdict as the others.

use std::collections::HashSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use super::members::Members;
use crate::wait::Wait;

/// The names of keys, to which threads add.
type Keys = Mutex<Vec<String>>;

/// The keys that this rank left in one scope.
pub(in crate::rendezvous) struct ScopeKeys {
    /// The ranks of the scope. This scope may remove the keys of another scope when all ranks of
    /// that other scope are among these ranks.
    members: Members,
    /// The keys to be removed. Every thread that makes calls in the scope adds keys. The keys of
    /// the world refer to this list, because it is emptied when the epoch has ended.
    keys: Arc<Keys>,
    /// The number of the epoch to which the keys belong; `None` for keys that no epoch ends.
    epoch: Option<u64>,
    /// The number of the first dropped scope that this scope has not examined yet. From all scopes
    /// that were dropped before that one, this scope has taken the keys that it may remove.
    examined: Mutex<u64>,
    /// The keys of the whole world, to which the scope gives its own keys when it is dropped.
    leftovers: Arc<WorldKeys>,
}

/// The keys that this rank left in one world: those of the scopes that it has dropped, and those of
/// the world as a whole.
#[derive(Default)]
pub(in crate::rendezvous) struct WorldKeys {
    /// The keys that were handed over so far.
    dropped: Mutex<Dropped>,
    /// The keys of the scopes that are in use, with the numbers of their epochs.
    in_use: Mutex<Vec<(u64, Weak<Keys>)>>,
    /// How many threads of this rank are writing keys that the rank's next call relies on.
    writing: Mutex<usize>,
    /// Wakes the calls that wait for these threads.
    written: Condvar,
    /// Receives the keys that are left when this rank has dropped the world; `None` when nobody
    /// wants these keys.
    at_end: Option<AtEnd>,
}

/// A thread of this rank holds this value for as long as the thread writes keys.
pub(super) struct Writing(Arc<WorldKeys>);

/// Receives the keys that are left of a world when this rank has dropped the world and all of its
/// scopes.
type AtEnd = Box<dyn Fn(Vec<String>) + Send + Sync>;

/// The keys that were handed over by dropped scopes and by the world itself.
#[derive(Default)]
struct Dropped {
    /// The dropped scopes that have left keys.
    scopes: Vec<DroppedScope>,
    /// The number of the next scope that is dropped.
    next: u64,
    /// Keys that are needed for as long as any rank is in the world.
    of_world: Vec<String>,
    /// Keys that are needed for as long as any rank is in an epoch, with the number of the epoch.
    of_epochs: Vec<(u64, String)>,
}

/// A scope that was dropped.
struct DroppedScope {
    /// How many scopes were dropped before this one.
    number: u64,
    /// The number of the scope's epoch; `None` for keys that no epoch ends.
    epoch: Option<u64>,
    /// The ranks of the scope.
    members: Members,
    /// The keys that this rank has left.
    keys: Vec<String>,
}

impl ScopeKeys {
    /// Begins the list of the keys of a scope. `epoch` is the number of the epoch to which the
    /// keys belong; `None` for keys that no epoch ends.
    pub(in crate::rendezvous) fn new(members: &Members, leftovers: &Arc<WorldKeys>, epoch: Option<u64>) -> ScopeKeys {
        let (members, leftovers, keys) = (members.clone(), Arc::clone(leftovers), Arc::default());
        if let Some(epoch) = epoch {
            leftovers.watch(epoch, &keys);
        }
        ScopeKeys { members, keys, epoch, examined: Mutex::default(), leftovers }
    }

    /// Notes keys that this rank has written or is about to write, so that they are removed later.
    pub(super) fn note(&self, keys: impl IntoIterator<Item = String>) {
        lock(&self.keys).extend(keys);
    }

    /// Notes keys that this rank has written for calls of other scopes. Their ranks may read these
    /// keys for as long as any rank is in the epoch, or in the world where the keys of this scope
    /// belong to no epoch.
    pub(super) fn note_of_others(&self, keys: impl IntoIterator<Item = String>) {
        keys.into_iter().for_each(|key| match self.epoch {
            Some(epoch) => self.leftovers.note_of_epoch(epoch, key),
            None => self.leftovers.note(key),
        });
    }

    /// Takes all keys of this rank that belong to epochs before epoch `number`. All ranks have
    /// left the calls of these epochs.
    pub(super) fn take_before_epoch(&self, number: u64) -> Vec<String> {
        self.leftovers.take_before_epoch(number)
    }

    /// Waits until no thread of this rank writes keys of the world on which this rank's next call
    /// relies. Returns early when `wait` has ended.
    pub(super) fn await_written(&self, wait: &Wait) {
        let mut writing = lock(&self.leftovers.writing);
        while *writing > 0 && !wait.deadline.passed() && !wait.cancel.is_raised() {
            let woken = self.leftovers.written.wait_timeout(writing, wait.deadline.slice());
            writing = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes the keys of this scope that begin with `prefix`.
    pub(super) fn take_under(&self, prefix: &str) -> Vec<String> {
        let mut keys = lock(&self.keys);
        let (taken, left) = std::mem::take(&mut *keys).into_iter().partition(|key| key.starts_with(prefix));
        *keys = left;
        taken
    }

    /// Takes the keys that may be removed once the call that this rank is about to make is agreed.
    pub(super) fn take(&self) -> Vec<String> {
        let mut keys = std::mem::take(&mut *lock(&self.keys));
        keys.append(&mut self.leftovers.take(&self.members, &mut lock(&self.examined)));
        keys
    }
}

impl Drop for ScopeKeys {
    fn drop(&mut self) {
        let keys = std::mem::take(&mut *lock(&self.keys));
        if !keys.is_empty() {
            let mut dropped = self.leftovers.lock();
            let number = dropped.next;
            dropped.next += 1;
            dropped.scopes.push(DroppedScope { number, epoch: self.epoch, members: self.members.clone(), keys });
        }
    }
}

impl WorldKeys {
    fn lock(&self) -> MutexGuard<'_, Dropped> {
        lock(&self.dropped)
    }

    /// `at_end` receives the keys that are still there when this rank has dropped the world and all
    /// of its scopes.
    pub(in crate::rendezvous) fn for_world(at_end: impl Fn(Vec<String>) + Send + Sync + 'static) -> WorldKeys {
        let mut keys = WorldKeys::default();
        keys.at_end = Some(Box::new(at_end));
        keys
    }

    /// Notes a key that is needed for as long as any rank is in the world.
    pub(in crate::rendezvous) fn note(&self, key: String) {
        self.lock().of_world.push(key);
    }

    /// Notes a key that is needed for as long as any rank is in the epoch of that number.
    pub(super) fn note_of_epoch(&self, epoch: u64, key: String) {
        self.lock().of_epochs.push((epoch, key));
    }

    /// Notes the list of the keys of a scope of that epoch.
    fn watch(&self, epoch: u64, keys: &Arc<Keys>) {
        let mut in_use = lock(&self.in_use);
        // The list is cleaned before it would grow, so the cost of a scope does not grow with the
        // number of scopes before it.
        if in_use.len() == in_use.capacity() {
            in_use.retain(|(_, keys)| keys.strong_count() > 0);
        }
        in_use.push((epoch, Arc::downgrade(keys)));
    }

    /// Takes the keys of all epochs before epoch `number`.
    fn take_before_epoch(&self, number: u64) -> Vec<String> {
        let mut taken = Vec::new();
        lock(&self.in_use).retain(|(epoch, keys)| {
            let Some(keys) = keys.upgrade() else { return false };
            if *epoch < number {
                taken.append(&mut lock(&keys));
            }
            true
        });
        let mut dropped = self.lock();
        dropped.scopes.retain_mut(|scope| {
            let has_ended = scope.epoch.is_some_and(|epoch| epoch < number);
            if has_ended {
                taken.append(&mut scope.keys);
            }
            !has_ended
        });
        let all = std::mem::take(&mut dropped.of_epochs);
        let (ended, left): (Vec<_>, Vec<_>) = all.into_iter().partition(|(epoch, _)| *epoch < number);
        dropped.of_epochs = left;
        taken.extend(ended.into_iter().map(|(_, key)| key));
        taken
    }

    /// Notes that a thread is about to write keys that this rank's next call relies on.
    pub(super) fn begin_writing(self: &Arc<Self>) -> Writing {
        *lock(&self.writing) += 1;
        Writing(Arc::clone(self))
    }

    /// Takes the keys of the scopes that were dropped since `examined` and whose ranks are all
    /// among `members`.
    pub(super) fn take(&self, members: &Members, examined: &mut u64) -> Vec<String> {
        let mut dropped = self.lock();
        let since = std::mem::replace(examined, dropped.next);
        if dropped.scopes.iter().all(|scope| scope.number < since) {
            return Vec::new();
        }
        let mut keys = Vec::new();
        let all = match members {
            Members::All(_) => None,
            Members::Listed(ranks) => Some(ranks.iter().copied().collect::<HashSet<i32>>()),
        };
        dropped.scopes.retain_mut(|scope| {
            let within = match (&all, &scope.members) {
                (None, _) => true,
                (Some(_), Members::All(_)) => false,
                (Some(all), Members::Listed(ranks)) => {
                    scope.number >= since && ranks.iter().all(|rank| all.contains(rank))
                }
            };
            if within {
                keys.append(&mut scope.keys);
            }
            !within
        });
        keys
    }
}

impl Drop for WorldKeys {
    fn drop(&mut self) {
        let mut dropped = std::mem::take(&mut *self.lock());
        dropped.of_world.extend(dropped.scopes.into_iter().flat_map(|scope| scope.keys));
        dropped.of_world.extend(dropped.of_epochs.into_iter().map(|(_, key)| key));
        if let Some(at_end) = &self.at_end {
            at_end(dropped.of_world);
        }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        *lock(&self.0.writing) -= 1;
        self.0.written.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
