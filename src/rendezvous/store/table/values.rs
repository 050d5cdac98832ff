//! Stores and removes values.

use super::super::frame::MAX_VALUE;
use super::super::value::Value;
use super::limits::{Refusal, cost, most_stored, room};
use super::state::{Key, LOOK, Replies, Table};

impl Table {
    pub(super) fn put(&mut self, key: Key, value: Vec<u8>, replies: &mut Replies) -> Result<(), Refusal> {
        let value = Value::new(value, &self.loose);
        self.put_value(key, value, replies)
    }

    pub(super) fn put_value(&mut self, key: Key, value: Value, replies: &mut Replies) -> Result<(), Refusal> {
        self.put_up_to(most_stored(&key, value.len()), key, value, replies)
    }

    /// Stores the pair if no more than `most` bytes are stored then.
    pub(super) fn put_up_to(
        &mut self,
        most: usize,
        key: Key,
        value: Value,
        replies: &mut Replies,
    ) -> Result<(), Refusal> {
        self.work += LOOK + key.len();
        // When there is no room, what stood there stays.
        let without = self.stored - self.values.get(&key).map_or(0, |old| cost(&key, old));
        self.stored = room(without, cost(&key, &value), most)?;
        let wakes = self.waiters.contains_key(&key).then(|| (key.clone(), value.clone()));
        let len = listed(&key);
        match self.values.insert(key, value) {
            Some(old) => old.let_go(),
            None => self.listed += len,
        }
        if let Some((key, value)) = wakes {
            self.wake(&key, &value, replies);
        }
        Ok(())
    }

    pub(super) fn append(&mut self, key: Key, more: Vec<u8>, replies: &mut Replies) -> Result<(), Refusal> {
        let Some(value) = self.values.get_mut(&key) else { return self.put(key, more, replies) };
        let len = value.len() + more.len();
        if len > MAX_VALUE {
            return Err(format!("APPEND makes a value of {len} bytes").into());
        }
        self.stored = room(self.stored, more.len(), most_stored(&key, len))?;
        match value.alone() {
            Some(bytes) => bytes.extend(more),
            // Replies hold the value as it was.
            None => {
                self.work += len;
                let longer = Value::new([&value[..], &more].concat(), &self.loose);
                std::mem::replace(value, longer).let_go();
            }
        }
        Ok(())
    }

    /// Removes a key, and returns whether it existed.
    pub(super) fn remove(&mut self, key: &[u8]) -> bool {
        let Some(value) = self.values.remove(key) else { return false };
        self.stored -= cost(key, &value);
        self.listed -= listed(key);
        value.let_go();
        true
    }
}

/// Returns how many bytes a key adds to the answer to LIST_KEYS.
pub(super) fn listed(key: &[u8]) -> usize {
    8 + key.len()
}
