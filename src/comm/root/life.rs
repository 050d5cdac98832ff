//! Whether a root mesh is alive, and what ends with it.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::recorder::Group;

/// Whether a root mesh is alive, and how it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::comm) enum Life {
    Alive = 0,
    Aborted = 1,
    Finalized = 2,
    /// dm_shrink has ended it. Its remaining ranks have another mesh.
    Shrunk = 3,
    /// dm_recover has ended it, and all other meshes of its epoch.
    Recovered = 4,
}

/// A root mesh's [`Life`], shared with everything that must stop when the mesh ends.
pub(in crate::comm) struct LifeFlag {
    /// The [`Life`] as a number.
    life: AtomicU8,
    /// The groups along the dimensions of the root and its ranges, in the recording of this
    /// process. Their places are free when the root ends.
    groups: Mutex<Vec<Weak<Group>>>,
}

impl LifeFlag {
    pub(super) fn new() -> Arc<LifeFlag> {
        Arc::new(LifeFlag { life: AtomicU8::new(Life::Alive as u8), groups: Mutex::default() })
    }

    /// Notes a group whose place in the recording is free when the root ends.
    pub(in crate::comm) fn note_group(&self, group: &Arc<Group>) {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        // The list is cleaned before it would grow.
        if groups.len() == groups.capacity() {
            groups.retain(|known| known.strong_count() > 0);
        }
        groups.push(Arc::downgrade(group));
    }

    fn close_groups(&self) {
        let groups = std::mem::take(&mut *self.groups.lock().unwrap_or_else(PoisonError::into_inner));
        groups.iter().filter_map(Weak::upgrade).for_each(|group| group.close());
    }

    #[inline]
    pub(in crate::comm) fn is_alive(&self) -> bool {
        self.life.load(Ordering::Acquire) == Life::Alive as u8
    }

    pub(super) fn life(&self) -> Life {
        match self.life.load(Ordering::SeqCst) {
            0 => Life::Alive,
            1 => Life::Aborted,
            2 => Life::Finalized,
            3 => Life::Shrunk,
            _ => Life::Recovered,
        }
    }

    /// Ends the root in the way that `life` says. Returns whether this call ended it, because only
    /// the first end counts.
    pub(super) fn end(&self, life: Life) -> bool {
        let ends =
            self.life.compare_exchange(Life::Alive as u8, life as u8, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if ends {
            self.close_groups();
        }
        ends
    }
}
