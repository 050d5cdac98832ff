//! The operations of a store, as requests to a TCPStore server.

use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::super::connection::{CANCEL_ANSWER, Connection, ExchangeError};
use super::super::frame::{Writer, op};
use super::super::{Arrival, KeyWatch, Last, Store, arrive_in_steps, no_key};
use super::{FEW_IN_FLIGHT, SHORT_KEY, TcpStore, check_each, full, leave, with_keys};
use crate::error::{Error, Result};
use crate::wait::{Deadline, Wait};

/// The first pause before a server that cannot wait for one of several keys is asked again. The
/// pause doubles each time.
const FIRST_LOOK: Duration = Duration::from_millis(25);

/// The longest pause before such a server is asked again.
const LAST_LOOK: Duration = Duration::from_millis(400);

impl TcpStore {
    /// Sends WAIT for one key and GET. Returns `None` when the key has not come at `until`. Only
    /// the wait for the key ends at that moment; connecting, and the answer to the cancellation,
    /// may take as long as `wait` allows.
    fn wait_for(&self, key: &str, until: Deadline, wait: &Wait) -> Result<Option<Vec<u8>>> {
        let key_bytes = full(key);
        let request = with_keys(op::WAIT, std::slice::from_ref(&key_bytes));
        let talk = |connection: &mut Connection| {
            connection.send(&request, &at_once(wait))?;
            let waited = connection.byte(&wait.with_deadline(until));
            let at_once = at_once(wait);
            match waited {
                Err(ExchangeError::Late) if !connection.cancel_wait(&at_once)? => return Ok(None),
                Ok(_) | Err(ExchangeError::Late) => {}
                Err(broken) => return Err(broken),
            }
            connection.send(&Writer::new(op::GET).string(&key_bytes).finish(), &at_once)?;
            connection.string(&at_once).map(Some)
        };
        self.exchange(wait, || format!("GET {key}"), talk)
    }

    /// Waits for any of the keys, at a server of this library; `None` at the deadline.
    fn wait_any(&self, keys: &[&str], wait: &Wait) -> Result<Option<(usize, Vec<u8>)>> {
        let talk = |connection: &mut Connection| {
            connection.send(&wait_any_of(keys), wait)?;
            answer_to_wait(connection, keys.len(), wait)
        };
        self.exchange(wait, || format!("GET {}", keys[0]), talk)
    }

    /// Does what [`Store::arrive`] does, in one request.
    fn arrive_at_once(
        &self,
        Arrival { note, count }: &Arrival<'_>,
        keys: &[&str],
        counted: &mut dyn FnMut(i64) -> Result<()>,
        wait: &Wait,
    ) -> Result<Option<(usize, Vec<u8>)>> {
        let mut request = Vec::new();
        if let Some((key, value)) = note {
            self.check(key, value)?;
            request.extend(Writer::new(op::SET).string(&full(key)).string(value).finish());
        }
        if let Some(count) = count {
            self.check(count.counter, &[])?;
            let op = if count.last.is_some() { op::COUNT } else { op::ADD };
            request.extend(Writer::new(op).string(&full(count.counter)).number(count.amount).finish());
            if let Some(Last { sum, key, value }) = count.last {
                self.check(key, value)?;
                request.extend(Writer::default().number(sum).string(&full(key)).string(value).finish());
            }
        }
        // The answer to the count comes before the answer to the wait. If this first answer is
        // missing at the deadline, the server does not answer at all, so the wait is not cancelled.
        // SET has no answer, so a PING follows it where nothing is counted.
        let pings = count.is_none() && note.is_some();
        if pings {
            request.extend(Writer::new(op::PING).word(0).finish());
        }
        if !keys.is_empty() {
            request.extend(wait_any_of(keys));
        }
        let talk = |connection: &mut Connection| {
            connection.send(&request, wait)?;
            if pings {
                connection.receive(&mut [0; 4], wait)?;
            }
            if count.is_some() {
                let sum = connection.number(wait)?;
                counted(sum).map_err(ExchangeError::Ended)?;
            }
            if keys.is_empty() { Ok(None) } else { answer_to_wait(connection, keys.len(), wait).map(Some) }
        };
        let what = || match (note, count) {
            (Some((key, _)), _) => format!("SET {key}"),
            (None, Some(count)) => format!("ADD {}", count.counter),
            (None, None) => format!("GET {keys:?}"),
        };
        match self.exchange(wait, what, talk)? {
            Some(None) => Err(no_key(self, keys[0], wait)),
            found => Ok(found.flatten()),
        }
    }
}

/// Makes the request WAIT_ANY.
fn wait_any_of(keys: &[&str]) -> Vec<u8> {
    let keys: Vec<Vec<u8>> = keys.iter().map(|key| full(key)).collect();
    with_keys(op::WAIT_ANY, &keys)
}

/// Reads the answer to WAIT_ANY of so many keys. Returns `None` when no key has come at the
/// deadline.
fn answer_to_wait(
    connection: &mut Connection,
    keys: usize,
    wait: &Wait,
) -> std::result::Result<Option<(usize, Vec<u8>)>, ExchangeError> {
    let answer = |connection: &mut Connection, at_once: &Wait| {
        let index = connection.number(at_once)?;
        let value = connection.string(at_once)?;
        match usize::try_from(index).ok().filter(|index| *index < keys) {
            Some(index) => Ok(Some((index, value))),
            None => Err(ExchangeError::Ended(Error::store(format!("WAIT_ANY of {keys} keys answers key {index}")))),
        }
    };
    match connection.byte(wait) {
        Ok(_) => answer(connection, &at_once(wait)),
        Err(ExchangeError::Late) => {
            let short = at_once(wait);
            connection.send(&[op::CANCEL_WAIT], &short)?;
            // The answer may have crossed the cancellation.
            if connection.byte(&short)? != 0 {
                return Ok(None);
            }
            let found = answer(connection, &short)?;
            connection.byte(&short)?;
            Ok(found)
        }
        Err(broken) => Err(broken),
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8], wait: &Wait) -> Result<()> {
        self.check(key, value)?;
        let request = Writer::new(op::SET).string(&full(key)).string(value);
        let request = request.then(op::PING).word(0).finish();
        // SET has no reply. The next request of this thread may use another connection and arrive
        // earlier, so the answer to PING is awaited.
        self.exchange(
            wait,
            || format!("SET {key}"),
            |connection| {
                connection.send(&request, wait)?;
                connection.receive(&mut [0; 4], wait)
            },
        )
    }

    fn get_any(&self, keys: &[&str], wait: &Wait) -> Result<(usize, Vec<u8>)> {
        for key in keys {
            self.check(key, &[])?;
        }
        let late = || no_key(self, keys[0], wait);
        if self.ours.load(Ordering::SeqCst) {
            return self.wait_any(keys, wait)?.ok_or_else(late);
        }
        if keys.len() == 1 {
            return self.wait_for(keys[0], wait.deadline, wait)?.map(|value| (0, value)).ok_or_else(late);
        }
        let mut look = FIRST_LOOK;
        loop {
            let last = wait.deadline.passed();
            let until = Deadline::after(wait.deadline.left().min(look));
            if let Some(value) = self.wait_for(keys[0], until, wait)? {
                return Ok((0, value));
            }
            for (index, key) in keys.iter().enumerate().skip(1) {
                if let Some(value) = self.try_get(key, &at_once(wait))? {
                    return Ok((index, value));
                }
            }
            wait.look_around()?;
            if last {
                return Err(late());
            }
            look = (look * 2).min(LAST_LOOK);
        }
    }

    fn arrive(
        &self,
        arrival: &Arrival<'_>,
        keys: &[&str],
        counted: &mut dyn FnMut(i64) -> Result<()>,
        wait: &Wait,
    ) -> Result<Option<(usize, Vec<u8>)>> {
        for key in keys {
            self.check(key, &[])?;
        }
        // A note alone gets no answer, so this rank could not know whether the store has it.
        let is_answered = arrival.count.is_some() || !keys.is_empty();
        if is_answered && self.counts.load(Ordering::SeqCst) {
            return self.arrive_at_once(arrival, keys, counted, wait);
        }
        arrive_in_steps(self, arrival, keys, counted, wait)
    }

    fn try_get_each(&self, keys: &[String], wait: &Wait) -> Result<Vec<Option<Vec<u8>>>> {
        keys.iter().try_for_each(|key| self.check(key, &[]))?;
        let talk = |connection: &mut Connection| {
            let mut values = Vec::with_capacity(keys.len());
            let few = if keys.iter().all(|key| key.len() <= SHORT_KEY) { FEW_IN_FLIGHT } else { 1 };
            for keys in keys.chunks(few) {
                let keys: Vec<Vec<u8>> = keys.iter().map(|key| full(key)).collect();
                let there = check_each(connection, &keys, wait)?;
                let found = keys.iter().zip(&there).filter(|(_, there)| **there);
                let gets: Vec<u8> = found.flat_map(|(key, _)| Writer::new(op::GET).string(key).finish()).collect();
                connection.send(&gets, wait)?;
                for there in there {
                    values.push(if there { Some(connection.string(wait)?) } else { None });
                }
            }
            Ok(values)
        };
        self.exchange(wait, || format!("GET of {} keys", keys.len()), talk)
    }

    fn try_get(&self, key: &str, wait: &Wait) -> Result<Option<Vec<u8>>> {
        self.check(key, &[])?;
        let (check, get) = (with_keys(op::CHECK, &[full(key)]), Writer::new(op::GET).string(&full(key)).finish());
        // GET of a missing key gives an empty value on one server and closes the connection on
        // another, so CHECK comes first.
        let both = self.ours.load(Ordering::SeqCst);
        self.exchange(
            wait,
            || format!("GET {key}"),
            |connection| {
                connection.send(&if both { [&check[..], &get].concat() } else { check }, wait)?;
                let there = connection.byte(wait)? == 0;
                if !both {
                    if !there {
                        return Ok(None);
                    }
                    connection.send(&get, wait)?;
                }
                Ok(Some(connection.string(wait)?).filter(|_| there))
            },
        )
    }

    fn add(&self, key: &str, amount: i64, wait: &Wait) -> Result<i64> {
        self.check(key, &[])?;
        let request = Writer::new(op::ADD).string(&full(key)).number(amount).finish();
        self.exchange(
            wait,
            || format!("ADD {key}"),
            |connection| {
                connection.send(&request, wait)?;
                connection.number(wait)
            },
        )
    }

    fn set_once(&self, key: &str, value: &[u8], wait: &Wait) -> Result<Vec<u8>> {
        self.check(key, value)?;
        let request = Writer::new(op::COMPARE_SET).string(&full(key)).string(b"").string(value).finish();
        self.exchange(
            wait,
            || format!("COMPARE_SET {key}"),
            |connection| {
                connection.send(&request, wait)?;
                connection.string(wait)
            },
        )
    }

    fn present(&self, keys: &[String], wait: &Wait) -> Result<Vec<bool>> {
        keys.iter().try_for_each(|key| self.check(key, &[]))?;
        let keys: Vec<Vec<u8>> = keys.iter().map(|key| full(key)).collect();
        self.each_there(&keys, wait)
    }

    fn delete(&self, key: &str, wait: &Wait) -> Result<()> {
        self.check(key, &[])?;
        let request = Writer::new(op::DELETE).string(&full(key)).finish();
        self.exchange(
            wait,
            || format!("DELETE {key}"),
            |connection| {
                connection.send(&request, wait)?;
                connection.number(wait).map(drop)
            },
        )
    }

    /// Sends the removals together with the next operation, so they need no packet of their own.
    fn forget(&self, mut keys: Vec<String>, _wait: &Wait) {
        keys.retain(|key| self.check(key, &[]).is_ok());
        self.forgotten().append(&mut keys);
    }

    fn leave_last_word(&self, key: &str, word: &[u8], wait: &Wait) -> Result<bool> {
        if !self.ours.load(Ordering::SeqCst) {
            return Ok(false);
        }
        let (key, word) = self.last_word.get_or_init(|| (full(key), word.to_vec()));
        // The word is left on the connections that are open already. A later connection gets the
        // last word when it is made.
        let idle = std::mem::take(&mut *self.idle());
        for mut connection in idle {
            let left = leave(&mut connection, key, word, wait);
            left.map_err(|broken| self.explain(broken, connection.nonce, "LAST_WORD", wait))?;
            self.idle().push(connection);
        }
        Ok(true)
    }

    fn knows_losses(&self) -> bool {
        self.ours.load(Ordering::SeqCst)
    }

    fn watch_key(&self, key: &str, wait: &Wait) -> Result<Option<Box<dyn KeyWatch>>> {
        self.check(key, &[])?;
        self.leave_open(key, wait).map(Some)
    }

    fn local_address(&self) -> Option<IpAddr> {
        self.address.from.get().copied()
    }

    fn name(&self) -> &str {
        &self.address.name
    }
}

/// Returns a wait for an answer that comes at once, also when the deadline is close or has passed.
fn at_once(wait: &Wait) -> Wait {
    wait.with_deadline(wait.deadline.at_least(CANCEL_ANSWER))
}
