//! A stored value, which exists once however many replies refer to it.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Counts the bytes of values that only replies hold any more. Unread replies keep such values
/// alive after the table has dropped them. Clones share the count.
#[derive(Clone, Default)]
pub(super) struct DetachedBytes(Arc<AtomicUsize>);

impl DetachedBytes {
    /// Returns how many bytes these values have.
    pub(super) fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// A stored value. Clones share its bytes.
#[derive(Clone)]
pub(super) struct Value(Arc<Held>);

/// The bytes of a value, and whether they are counted.
struct Held {
    /// The value itself.
    bytes: Vec<u8>,
    /// Whether the table has dropped the value, so its bytes are counted in `count`.
    is_loose: AtomicBool,
    /// The count that all values of this table share.
    count: DetachedBytes,
}

impl Value {
    pub(super) fn new(bytes: Vec<u8>, count: &DetachedBytes) -> Value {
        Value(Arc::new(Held { bytes, is_loose: AtomicBool::new(false), count: count.clone() }))
    }

    /// Drops the table's reference. From now on the bytes are counted as loose, until the last
    /// reply that holds the value has gone.
    pub(super) fn let_go(self) {
        let is_held_elsewhere = Arc::strong_count(&self.0) > 1;
        if is_held_elsewhere && !self.0.is_loose.swap(true, Ordering::Relaxed) {
            self.0.count.0.fetch_add(self.0.bytes.len(), Ordering::Relaxed);
        }
    }

    /// Returns the bytes, for appending, where nobody else holds this value.
    pub(super) fn alone(&mut self) -> Option<&mut Vec<u8>> {
        Arc::get_mut(&mut self.0).map(|held| &mut held.bytes)
    }
}

impl Deref for Value {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if *self.is_loose.get_mut() {
            self.count.0.fetch_sub(self.bytes.len(), Ordering::Relaxed);
        }
    }
}
