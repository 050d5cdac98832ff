//! Client of a TCPStore server: PyTorch's, torchrun's agent's, or ours.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use once_cell::sync::OnceCell;

use super::Store;
use super::connection::{Broken, CANCEL_ANSWER, Connection};
use super::dial::Address;
use super::frame::{MAX_KEY, MAX_VALUE, SERVER_KEY, Writer, op};
use super::secret::Secret;
use crate::error::{Error, Result, Status};
use crate::wait::{Deadline, Wait};

/// A server that cannot wait for any of several keys is asked again and again: first after, and at last every.
const FIRST_LOOK: Duration = Duration::from_millis(25);
const LAST_LOOK: Duration = Duration::from_millis(400);
/// How long asking a server why it closed a connection may take.
const ASK_WHY: Duration = Duration::from_millis(500);
/// Questions that are sent before the first answer is read.
const IN_FLIGHT: usize = 1024;

/// A store behind a TCPStore server. Each call in progress has a connection of its own, so a waiting call holds up no other.
pub struct TcpStore {
    address: Address,
    idle: Mutex<Vec<Connection>>,
    /// Out of step, so not used any more, but open: were it the last one, the server would think that this process has gone. Until another
    /// connection is there.
    retired: Mutex<Vec<Connection>>,
    /// Whether the server is one of this library, which can do more than PyTorch's.
    ours: AtomicBool,
    /// Key and word to leave on every connection.
    last_word: OnceCell<(Vec<u8>, Vec<u8>)>,
    /// Keys to be removed beside the next operations.
    forgotten: Mutex<Vec<String>>,
}

impl TcpStore {
    /// Connects to the server at `host:port`, trying again until the deadline while nobody listens there yet.
    ///
    /// Every address that the name has is tried, IPv6 and IPv4.
    pub fn connect(host: &str, port: u16, wait: &Wait) -> Result<TcpStore> {
        TcpStore::connect_with_secret(host, port, None, wait)
    }

    /// The same; with a secret the server must prove that it has it too.
    pub fn connect_with_secret(host: &str, port: u16, secret: Option<Secret>, wait: &Wait) -> Result<TcpStore> {
        let bracketed = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        let name = format!("tcp://{bracketed}:{port}");
        let address = Address { name, host: host.to_owned(), port, secret, reached: OnceCell::new() };
        let store = TcpStore {
            idle: Mutex::default(),
            retired: Mutex::default(),
            address,
            ours: AtomicBool::new(false),
            last_word: OnceCell::new(),
            forgotten: Mutex::default(),
        };
        loop {
            let connection = store.address.reach(wait)?;
            store.idle().push(connection);
            match store.all_there(&[SERVER_KEY.to_vec()], wait) {
                Ok(ours) => store.ours.store(ours, Ordering::SeqCst),
                // It was just going: the server of a world that rank 0 has freed. The next one is still to come.
                Err(error) if error.status() == Status::Store && !wait.deadline.passed() => {
                    std::thread::sleep(wait.deadline.slice());
                    continue;
                }
                Err(error) => return Err(error),
            }
            return Ok(store);
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn retired(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.retired.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, wait: &Wait) -> Result<Connection> {
        // A statement of its own: the lock is not held while connecting.
        let idle = self.idle().pop();
        if let Some(connection) = idle {
            return Ok(connection);
        }
        let mut connection = self.address.reach_again(wait)?;
        if let Some((key, word)) = self.last_word.get() {
            leave(&mut connection, key, word, wait).map_err(|broken| self.explain(broken, "LAST_WORD", wait))?;
        }
        self.retired().clear();
        Ok(connection)
    }

    /// Runs one exchange on a connection of its own. One that ended early is not used again: a late reply must not meet the next request.
    fn exchange<T>(
        &self,
        wait: &Wait,
        what: impl Fn() -> String,
        talk: impl FnOnce(&mut Connection) -> std::result::Result<T, Broken>,
    ) -> Result<T> {
        let mut connection = self.take(wait)?;
        if let Some((requests, answers)) = self.removals() {
            connection.send_ahead(requests, answers);
        }
        match talk(&mut connection) {
            Ok(value) => {
                self.idle().push(connection);
                Ok(value)
            }
            Err(broken) => {
                if !matches!(broken, Broken::Io(_)) {
                    self.retired().push(connection);
                }
                Err(self.explain(broken, &what(), wait))
            }
        }
    }

    fn forgotten(&self) -> MutexGuard<'_, Vec<String>> {
        self.forgotten.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests that remove some of the keys to be forgotten, and how many bytes their answers have.
    fn removals(&self) -> Option<(Vec<u8>, usize)> {
        let mut forgotten = self.forgotten();
        if forgotten.is_empty() {
            return None;
        }
        // So few that their answers always fit into the socket, read or not.
        let rest = forgotten.len().saturating_sub(IN_FLIGHT);
        let keys = forgotten.split_off(rest);
        let answers = size_of::<i64>() * keys.len();
        let writer = Writer::default();
        let remove = |writer: Writer, key: &String| writer.then(op::DELETE).string(&full(key));
        Some((keys.iter().fold(writer, remove).finish(), answers))
    }

    fn explain(&self, broken: Broken, what: &str, wait: &Wait) -> Error {
        let name = &self.address.name;
        match broken {
            Broken::Ended(error) => error,
            Broken::Late => Error::timeout(format!(
                "{what} at {name} had no answer within {} ms; the process that serves it (rank 0 or the launcher) is stopped or out of reach",
                wait.deadline.timeout().as_millis()
            )),
            Broken::Io(error) => self.full(what, wait).unwrap_or_else(|| Error::store_io(
                format!(
                    "the store at {name} closed the connection during {what}; the process that serves it (rank 0 or the launcher) may have ended"
                ),
                &error,
            )),
        }
    }

    /// That the store is full, if this is why it closed a connection: then another one finds it said under the key by which the server is known.
    fn full(&self, what: &str, wait: &Wait) -> Option<Error> {
        if !self.ours.load(Ordering::SeqCst) || wait.cancel.is_raised() {
            return None;
        }
        let short = Wait { watch: None, ..wait.with_deadline(Deadline::after(ASK_WHY)) };
        let mut connection = self.address.reach_again(&short).ok()?;
        connection.send(&Writer::new(op::GET).string(SERVER_KEY).finish(), &short).ok()?;
        let said = connection.string(&short).ok().filter(|said| !said.is_empty())?;
        let message = format!(
            "the store at {} is full and refused {what}: {}",
            self.address.name,
            String::from_utf8_lossy(&said)
        );
        Some(Error::store(message).with_os_error(libc::ENOSPC))
    }

    fn check(&self, key: &str, value: &[u8]) -> Result<()> {
        if key.len() + 1 > MAX_KEY || value.len() > MAX_VALUE {
            return Err(Error::store(format!(
                "a key of {} bytes with a value of {} bytes: the store takes at most {MAX_KEY} and {MAX_VALUE}",
                key.len() + 1,
                value.len()
            )));
        }
        Ok(())
    }

    fn all_there(&self, keys: &[Vec<u8>], wait: &Wait) -> Result<bool> {
        let request = with_keys(op::CHECK, keys);
        let reply = self.exchange(
            wait,
            || format!("CHECK of {} keys", keys.len()),
            |connection| {
                connection.send(&request, wait)?;
                connection.byte(wait)
            },
        )?;
        Ok(reply == 0)
    }

    /// WAIT for one key and GET; `None` when it has not come `until` then. Only the wait for the key ends then: connecting, and the answer to
    /// the cancellation, may take as long as `wait` lets them.
    fn wait_for(&self, key: &str, until: Deadline, wait: &Wait) -> Result<Option<Vec<u8>>> {
        let key_bytes = full(key);
        let request = with_keys(op::WAIT, std::slice::from_ref(&key_bytes));
        let talk = |connection: &mut Connection| {
            connection.send(&request, &at_once(wait))?;
            let waited = connection.byte(&wait.with_deadline(until));
            let at_once = at_once(wait);
            match waited {
                Err(Broken::Late) if !connection.cancel_wait(&at_once)? => return Ok(None),
                Ok(_) | Err(Broken::Late) => {}
                Err(broken) => return Err(broken),
            }
            connection.send(&Writer::new(op::GET).string(&key_bytes).finish(), &at_once)?;
            connection.string(&at_once).map(Some)
        };
        self.exchange(wait, || format!("GET {key}"), talk)
    }

    /// On our server: waits for any of the keys; `None` at the deadline.
    fn wait_any(&self, keys: &[&str], wait: &Wait) -> Result<Option<(usize, Vec<u8>)>> {
        let full: Vec<Vec<u8>> = keys.iter().map(|key| full(key)).collect();
        let request = with_keys(op::WAIT_ANY, &full);
        let answer = |connection: &mut Connection, at_once: &Wait| {
            let index = connection.number(at_once)?;
            let value = connection.string(at_once)?;
            match usize::try_from(index).ok().filter(|index| *index < keys.len()) {
                Some(index) => Ok(Some((index, value))),
                None => {
                    Err(Broken::Ended(Error::store(format!("WAIT_ANY of {} keys answers key {index}", keys.len()))))
                }
            }
        };
        let talk = |connection: &mut Connection| {
            connection.send(&request, wait)?;
            match connection.byte(wait) {
                Ok(_) => answer(connection, &at_once(wait)),
                Err(Broken::Late) => {
                    let short = wait.with_deadline(Deadline::after(CANCEL_ANSWER));
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
        };
        self.exchange(wait, || format!("GET {}", keys[0]), talk)
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8], wait: &Wait) -> Result<()> {
        self.check(key, value)?;
        let request = Writer::new(op::SET).string(&full(key)).string(value);
        let request = request.then(op::PING).word(0).finish();
        // SET has no reply, and what this thread does next may go over another connection and overtake it: so an answer to PING is awaited.
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
        let late = || super::no_key(self, keys[0], wait);
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

    fn try_get(&self, key: &str, wait: &Wait) -> Result<Option<Vec<u8>>> {
        self.check(key, &[])?;
        let (check, get) = (with_keys(op::CHECK, &[full(key)]), Writer::new(op::GET).string(&full(key)).finish());
        // GET of a missing key is an empty value on one server and a closed connection on another, so ask first.
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

    /// One question for each key, many of them in flight.
    fn present(&self, keys: &[String], wait: &Wait) -> Result<Vec<bool>> {
        let talk = |connection: &mut Connection| {
            let mut there = Vec::with_capacity(keys.len());
            for keys in keys.chunks(IN_FLIGHT) {
                let questions: Vec<u8> = keys.iter().flat_map(|key| with_keys(op::CHECK, &[full(key)])).collect();
                connection.send(&questions, wait)?;
                let mut answers = vec![0; keys.len()];
                connection.receive(&mut answers, wait)?;
                there.extend(answers.into_iter().map(|answer| answer == 0));
            }
            Ok(there)
        };
        self.exchange(wait, || format!("CHECK of {} keys", keys.len()), talk)
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

    /// Beside the next operation: no packet of its own.
    fn forget(&self, mut keys: Vec<String>, _wait: &Wait) {
        keys.retain(|key| self.check(key, &[]).is_ok());
        self.forgotten().append(&mut keys);
    }

    fn leave_last_word(&self, key: &str, word: &[u8], wait: &Wait) -> Result<bool> {
        if !self.ours.load(Ordering::SeqCst) {
            return Ok(false);
        }
        let (key, word) = self.last_word.get_or_init(|| (full(key), word.to_vec()));
        // Those that are open already; whoever opens another one leaves it there.
        let idle = std::mem::take(&mut *self.idle());
        for mut connection in idle {
            leave(&mut connection, key, word, wait).map_err(|broken| self.explain(broken, "LAST_WORD", wait))?;
            self.idle().push(connection);
        }
        Ok(true)
    }

    fn name(&self) -> &str {
        &self.address.name
    }
}

fn leave(connection: &mut Connection, key: &[u8], word: &[u8], wait: &Wait) -> std::result::Result<(), Broken> {
    connection.send(&Writer::new(op::LAST_WORD).string(key).string(word).finish(), wait)?;
    connection.byte(wait).map(drop)
}

/// For an answer that comes at once, also where the deadline is close or has passed.
fn at_once(wait: &Wait) -> Wait {
    wait.with_deadline(Deadline::after(wait.deadline.left().max(CANCEL_ANSWER)))
}

/// PyTorch's client puts a slash before every key; with it both see the same keys.
fn full(key: &str) -> Vec<u8> {
    format!("/{key}").into_bytes()
}

fn with_keys(op: u8, keys: &[Vec<u8>]) -> Vec<u8> {
    keys.iter().fold(Writer::new(op).number(keys.len() as i64), |writer, key| writer.string(key)).finish()
}
