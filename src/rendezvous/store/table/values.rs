//! Stores and removes values.

use super::super::frame::MAX_VALUE;
use super::super::value::Value;
use super::limits::{MOST_STORED, Refusal, cost, most_stored};
use super::state::{Client, Key, LOOK, Replies, Table};

impl Table {
    /// Stores what a client asks to store.
    pub(super) fn put(
        &mut self,
        client: Client,
        key: Key,
        value: Vec<u8>,
        replies: &mut Replies,
    ) -> Result<(), Refusal> {
        let value = Value::new(value, &self.loose);
        self.put_value(client, key, value, replies)
    }

    pub(super) fn put_value(
        &mut self,
        client: Client,
        key: Key,
        value: Value,
        replies: &mut Replies,
    ) -> Result<(), Refusal> {
        let most = most_stored(&key, value.len());
        self.put_up_to(most, client, key, value, replies)?;
        if most == MOST_STORED {
            self.promise(client);
        }
        Ok(())
    }

    /// Stores the pair if no more than `most` bytes are stored then.
    pub(super) fn put_up_to(
        &mut self,
        most: usize,
        client: Client,
        key: Key,
        value: Value,
        replies: &mut Replies,
    ) -> Result<(), Refusal> {
        self.work += LOOK + key.len();
        // When there is no room, what stood there stays.
        let without = self.stored - self.values.get(&key).map_or(0, |old| cost(&key, old));
        self.stored = self.room_for(client, without, cost(&key, &value), most)?;
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

    pub(super) fn append(
        &mut self,
        client: Client,
        key: Key,
        more: Vec<u8>,
        replies: &mut Replies,
    ) -> Result<(), Refusal> {
        let Some(len) = self.values.get(&key).map(|value| value.len() + more.len()) else {
            return self.put(client, key, more, replies);
        };
        if len > MAX_VALUE {
            return Err(format!("APPEND makes a value of {len} bytes").into());
        }
        self.stored = self.room_for(client, self.stored, more.len(), most_stored(&key, len))?;
        let Some(value) = self.values.get_mut(&key) else { return Ok(()) };
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
