//! Requests that may be large, and are carried out step by step. The server serves the other
//! clients between two steps.

use std::ops::Bound;

use super::super::frame::Strings;
use super::super::value::Value;
use super::limits::{Refusal, Step};
use super::state::{Client, Key, LOOK, MAX_REPLY, Replies, Reply, Table};

/// The work that is left to do of a request.
pub(in super::super) enum Task {
    /// CHECK. The keys are still to be looked at.
    Check(Strings),
    /// WAIT or WAIT_ANY. The keys are in [`Table::waiting`].
    Wait,
    /// MULTI_GET, which goes through its keys twice.
    MultiGet {
        /// The keys that this pass has still to look at.
        keys: Strings,
        /// The length of the answer so far in the first pass; `None` in the second pass, which
        /// sends the values.
        length: Option<usize>,
    },
    /// MULTI_SET. The keys and values are still to be stored.
    MultiSet(Strings),
    /// LIST_KEYS.
    List {
        /// The last key that is in `bytes`.
        last: Option<Key>,
        /// The answer so far. The count, with which the answer begins, is written in the end.
        bytes: Vec<u8>,
        /// How many keys are in `bytes`.
        count: i64,
    },
}

impl Task {
    /// Returns how many bytes of memory the task takes.
    pub(in super::super) fn memory(&self) -> usize {
        match self {
            Task::Check(strings) | Task::MultiGet { keys: strings, .. } | Task::MultiSet(strings) => strings.memory(),
            Task::Wait => 0,
            Task::List { bytes, .. } => bytes.capacity(),
        }
    }
}

impl Table {
    /// Does what [`Table::advance`] does, except for turning clients away.
    pub(super) fn step(&mut self, client: Client, task: &mut Task, replies: &mut Replies) -> Result<bool, Refusal> {
        match task {
            Task::Check(keys) => Ok(self.check(client, keys, replies)),
            Task::Wait => self.list_waits(client, replies),
            Task::MultiGet { keys, length: Some(length) } => {
                let counted = self.count_values(keys, length)?;
                if counted {
                    *task = Task::MultiGet { keys: std::mem::take(keys).again(), length: None };
                }
                Ok(false)
            }
            Task::MultiGet { keys, length: None } => Ok(self.multi_get(client, keys, replies)),
            Task::MultiSet(pairs) => self.multi_set(client, pairs, replies),
            Task::List { last, bytes, count } => {
                let whole = self.list_on(last, bytes, count)?;
                if whole {
                    bytes[..8].copy_from_slice(&count.to_le_bytes());
                    let list = Value::new(std::mem::take(bytes), &self.loose);
                    replies.push(Reply { to: client, bytes: Vec::new(), value: Some(list.clone()) });
                    list.let_go();
                }
                Ok(whole)
            }
        }
    }

    fn check(&mut self, client: Client, keys: &mut Strings, replies: &mut Replies) -> bool {
        let mut step = Step::default();
        while step.goes_on() {
            let Some(key) = keys.take() else {
                replies.push(Reply::new(client, vec![0]));
                return true;
            };
            step.key(key.len());
            self.work += LOOK + key.len();
            if !self.has(key) {
                replies.push(Reply::new(client, vec![1]));
                return true;
            }
        }
        false
    }

    fn count_values(&mut self, keys: &mut Strings, length: &mut usize) -> Result<bool, Refusal> {
        let mut step = Step::default();
        while step.goes_on() {
            let Some(key) = keys.take() else { return Ok(true) };
            step.key(key.len());
            self.work += LOOK + key.len();
            *length += 8 + self.value(key).map_or(0, |value| value.len());
            if *length > MAX_REPLY {
                return Err(format!("MULTI_GET of {length} bytes or more; at most {MAX_REPLY} are sent").into());
            }
        }
        Ok(keys.taken() == keys.count())
    }

    fn multi_get(&mut self, client: Client, keys: &mut Strings, replies: &mut Replies) -> bool {
        let mut step = Step::default();
        while step.goes_on() {
            let Some(key) = keys.take() else { return true };
            step.key(key.len());
            self.work += LOOK + key.len();
            let reply = match self.value(key) {
                Some(value) => Reply::string(client, Vec::new(), value),
                None => Reply::new(client, 0u64.to_le_bytes().to_vec()),
            };
            step.value(reply.value.as_ref().map_or(0, |value| value.len()));
            replies.push(reply);
        }
        false
    }

    fn multi_set(&mut self, client: Client, pairs: &mut Strings, replies: &mut Replies) -> Result<bool, Refusal> {
        let mut step = Step::default();
        while step.goes_on() {
            let Some(key) = pairs.take().map(<[u8]>::to_vec) else { return Ok(true) };
            let Some(value) = pairs.take().map(<[u8]>::to_vec) else { return Ok(true) };
            self.work += value.len();
            step.key(key.len() + value.len());
            self.put(client, key, value, replies)?;
        }
        Ok(false)
    }

    /// Begins a list of all keys. A key that is stored or removed before the last step may be in
    /// the list or not.
    pub(super) fn list(&mut self) -> Result<Task, Refusal> {
        fits(self.listed)?;
        let mut bytes = Vec::with_capacity(8 + self.listed);
        bytes.resize(8, 0);
        Ok(Task::List { last: None, bytes, count: 0 })
    }

    fn list_on(&mut self, last: &mut Option<Key>, bytes: &mut Vec<u8>, count: &mut i64) -> Result<bool, Refusal> {
        let began = bytes.len();
        let from = last.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
        let mut keys = self.values.range::<[u8], _>((from, Bound::Unbounded)).map(|(key, _)| key).peekable();
        let (mut looked, mut step) = (0, Step::default());
        while let Some(key) = keys.next() {
            bytes.extend((key.len() as u64).to_le_bytes());
            bytes.extend(key);
            *count += 1;
            looked += 1;
            step.key(8 + key.len());
            if keys.peek().is_some() && !step.goes_on() {
                *last = Some(key.clone());
                self.work += looked * LOOK + bytes.len() - began;
                fits(bytes.len())?;
                return Ok(false);
            }
        }
        self.work += looked * LOOK + bytes.len() - began;
        fits(bytes.len()).map(|()| true)
    }
}

fn fits(len: usize) -> Result<(), Refusal> {
    if len > MAX_REPLY + 8 {
        return Err(format!("LIST_KEYS of {len} bytes; at most {MAX_REPLY} are sent").into());
    }
    Ok(())
}
