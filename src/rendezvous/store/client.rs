//! The client of a TCPStore server: PyTorch's, that of torchrun's agent, or the server of this
//! library.

mod operations;
mod watch;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use once_cell::sync::OnceCell;

use super::connection::{Connection, ExchangeError};
use super::dial::{Address, RELAY, RelayAddress};
use super::frame::{COUNT_KEY, MAX_KEY, MAX_VALUE, SERVER_KEY, TRUNK_KEY, Writer, op};
use super::secret::Secret;
use crate::error::{Error, Result, Status};
use crate::wait::{Deadline, Wait};

/// How long a server may take to say why it has closed a connection.
const ASK_WHY: Duration = Duration::from_millis(500);

/// How many questions are sent before the first answer is read.
const IN_FLIGHT: usize = 1024;

/// How many questions with short keys are sent at once where the answers may be long. So many
/// questions fit into the socket, so they are sent whole even if the server waits until its answers
/// are read.
const FEW_IN_FLIGHT: usize = 64;

/// The longest key, in bytes, that is short in this sense.
const SHORT_KEY: usize = 256;

/// A store behind a TCPStore server. Each call in progress has a connection of its own, so a call
/// that waits holds up no other call.
pub struct TcpStore {
    /// Where the server listens, and how to greet it.
    address: Address,
    /// Connections that no call uses now. Open questions give their connections back here.
    idle: Arc<Mutex<Vec<Connection>>>,
    /// Connections on which an answer is still to come, so they are not used any more. These
    /// connections stay open until there is another one, because the server takes this process for
    /// gone when its last connection ends.
    retired: Mutex<Vec<Connection>>,
    /// Whether the server is one of this library, which knows more operations than PyTorch's.
    ours: AtomicBool,
    /// Whether the server carries out COUNT.
    counts: AtomicBool,
    /// The key and the word to leave on every connection.
    last_word: OnceCell<(Vec<u8>, Vec<u8>)>,
    /// The keys to be removed together with the next operations.
    forgotten: Mutex<Vec<String>>,
}

impl TcpStore {
    /// Connects to the server at `host:port`. Tries again until the deadline while nobody listens
    /// there yet. Every address that the name has is tried, IPv6 and IPv4.
    pub fn connect(host: &str, port: u16, wait: &Wait) -> Result<TcpStore> {
        TcpStore::connect_with_secret(host, port, None, wait)
    }

    /// Does what [`TcpStore::connect`] does. With a secret the server must prove that it has the
    /// secret too.
    pub fn connect_with_secret(host: &str, port: u16, secret: Option<Secret>, wait: &Wait) -> Result<TcpStore> {
        let bracketed = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        let name = format!("tcp://{bracketed}:{port}");
        let relay = std::env::var(RELAY).ok().and_then(|variable| RelayAddress::of_store(&name, &variable));
        let address = Address {
            name,
            host: host.to_owned(),
            port,
            secret,
            reached: OnceCell::new(),
            from: OnceCell::new(),
            relay: relay.into(),
        };
        let store = TcpStore {
            idle: Arc::default(),
            retired: Mutex::default(),
            address,
            ours: AtomicBool::new(false),
            counts: AtomicBool::new(false),
            last_word: OnceCell::new(),
            forgotten: Mutex::default(),
        };
        loop {
            let connection = store.address.reach(wait)?;
            store.idle().push(connection);
            match store.each_there(&[SERVER_KEY, COUNT_KEY], wait) {
                Ok(there) => {
                    store.ours.store(there[0], Ordering::SeqCst);
                    store.counts.store(there[1], Ordering::SeqCst);
                }
                // This server was about to end, for example because rank 0 has freed its world. The
                // next server is still to come.
                Err(error) if error.status() == Status::Store && !wait.deadline.passed() => {
                    std::thread::sleep(wait.deadline.slice());
                    continue;
                }
                Err(error) => return Err(error),
            }
            return Ok(store);
        }
    }

    /// Makes a trunk of a connection, and ends the other ones. Returns `None` where the server
    /// knows no trunks.
    pub(super) fn into_trunk(self, wait: &Wait) -> Result<Option<Connection>> {
        if !self.each_there(&[TRUNK_KEY], wait)?[0] {
            return Ok(None);
        }
        let mut connection = self.take(wait)?;
        let begun = connection.send(&[op::TRUNK], wait).and_then(|()| connection.byte(wait));
        match begun {
            // The server sends nothing else before the relay does.
            Ok(_) if connection.has_more() => {
                Err(Error::store(format!("the store at {} sends more than the answer to TRUNK", self.address.name)))
            }
            Ok(_) => Ok(Some(connection)),
            Err(broken) => Err(self.explain(broken, connection.nonce, "TRUNK", wait)),
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn retired(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.retired.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an idle connection, or makes another one.
    fn take(&self, wait: &Wait) -> Result<Connection> {
        // This is a statement of its own, so the lock is not held while connecting.
        let idle = self.idle().pop();
        if let Some(connection) = idle {
            return Ok(connection);
        }
        let mut connection = self.address.reach_again(wait)?;
        if let Some((key, word)) = self.last_word.get() {
            let left = leave(&mut connection, key, word, wait);
            left.map_err(|broken| self.explain(broken, connection.nonce, "LAST_WORD", wait))?;
        }
        self.retired().clear();
        Ok(connection)
    }

    /// Runs one exchange on a connection of its own. A connection whose exchange ended early is not
    /// used again, because a late reply must not meet the next request.
    fn exchange<T>(
        &self,
        wait: &Wait,
        what: impl Fn() -> String,
        talk: impl FnOnce(&mut Connection) -> std::result::Result<T, ExchangeError>,
    ) -> Result<T> {
        let mut connection = self.take(wait)?;
        let removed = self.to_forget();
        if !removed.is_empty() {
            connection.send_ahead(removals(&removed), size_of::<i64>() * removed.len());
        }
        match talk(&mut connection) {
            Ok(value) => {
                self.idle().push(connection);
                Ok(value)
            }
            Err(broken) => {
                // Nobody knows whether the server has read the removals. To remove a key twice does
                // no harm.
                self.forgotten().extend(removed);
                let nonce = connection.nonce;
                if !matches!(broken, ExchangeError::Io(_)) {
                    self.retired().push(connection);
                }
                Err(self.explain(broken, nonce, &what(), wait))
            }
        }
    }

    fn forgotten(&self) -> MutexGuard<'_, Vec<String>> {
        self.forgotten.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes some of the keys to be forgotten. They are so few that the answers to their removals
    /// always fit into the socket, even if nobody reads them.
    fn to_forget(&self) -> Vec<String> {
        let mut forgotten = self.forgotten();
        let rest = forgotten.len().saturating_sub(IN_FLIGHT);
        forgotten.split_off(rest)
    }

    /// Returns the error of an exchange that ended early. `nonce` is that of the connection's
    /// greeting.
    fn explain(&self, broken: ExchangeError, nonce: u32, what: &str, wait: &Wait) -> Error {
        let name = &self.address.name;
        match broken {
            ExchangeError::Ended(error) => error,
            ExchangeError::Late => Error::timeout(format!(
                "{what} at {name} had no answer within {} ms; the process that serves it (rank 0 or the launcher) is stopped or out of reach",
                wait.deadline.timeout().as_millis()
            )),
            ExchangeError::Io(error) => self.come_back(nonce, what, wait).unwrap_or_else(|| Error::store_io(
                format!(
                    "the store at {name} closed the connection during {what}; the process that serves it (rank 0 or the launcher) may have ended"
                ),
                &error,
            )),
        }
    }

    /// Makes a connection in place of one that a server of this library has closed, and leaves the
    /// last word on it at once, so the server notices when this process ends now. Returns the
    /// error that there was no room for what the closed connection asked, if the server says so
    /// under that connection's nonce.
    fn come_back(&self, nonce: u32, what: &str, wait: &Wait) -> Option<Error> {
        if !self.ours.load(Ordering::SeqCst) || wait.cancel.is_raised() {
            return None;
        }
        let short = Wait { watch: None, ..wait.with_deadline(Deadline::after(ASK_WHY)) };
        let mut connection = self.address.reach_again(&short).ok()?;
        let why = [SERVER_KEY, format!("/{nonce:08x}").as_bytes()].concat();
        connection.send(&Writer::new(op::GET).string(&why).finish(), &short).ok()?;
        let said = connection.string(&short).ok();
        let left = match self.last_word.get() {
            _ if said.is_none() => false,
            Some((key, word)) => leave(&mut connection, key, word, &short).is_ok(),
            None => true,
        };
        if left {
            self.idle().push(connection);
        }
        let said = said.filter(|said| !said.is_empty())?;
        let message = format!(
            "the store at {} is full and refused {what}: {}",
            self.address.name,
            String::from_utf8_lossy(&said)
        );
        Some(Error::store(message).with_os_error(libc::ENOSPC))
    }

    /// Refuses a key or value that is too long before anything is sent. This is the caller's error:
    /// the server still runs.
    fn check(&self, key: &str, value: &[u8]) -> Result<()> {
        let (key, value) = (key.len() + 1, value.len());
        if key > MAX_KEY {
            return Err(Error::invalid(format!(
                "a key of the store has {key} bytes, and at most {MAX_KEY} are taken: use shorter dimension names"
            )));
        }
        if value > MAX_VALUE {
            return Err(Error::invalid(format!(
                "a value for the store has {value} bytes, and at most {MAX_VALUE} are taken"
            )));
        }
        Ok(())
    }

    /// Returns for each key, given in full, whether it exists now. One question is sent for each
    /// key, and many of them before the first answer is read.
    fn each_there(&self, keys: &[impl AsRef<[u8]>], wait: &Wait) -> Result<Vec<bool>> {
        let talk = |connection: &mut Connection| {
            let mut there = Vec::with_capacity(keys.len());
            for keys in keys.chunks(IN_FLIGHT) {
                there.extend(check_each(connection, keys, wait)?);
            }
            Ok(there)
        };
        self.exchange(wait, || format!("CHECK of {} keys", keys.len()), talk)
    }
}

/// Asks for each key, given in full, whether it exists now. Sends all questions before it reads the
/// first answer.
fn check_each(
    connection: &mut Connection,
    keys: &[impl AsRef<[u8]>],
    wait: &Wait,
) -> std::result::Result<Vec<bool>, ExchangeError> {
    let questions: Vec<u8> = keys.iter().flat_map(|key| with_keys(op::CHECK, &[key.as_ref().to_vec()])).collect();
    connection.send(&questions, wait)?;
    let mut answers = vec![0; keys.len()];
    connection.receive(&mut answers, wait)?;
    Ok(answers.into_iter().map(|answer| answer == 0).collect())
}

fn leave(connection: &mut Connection, key: &[u8], word: &[u8], wait: &Wait) -> std::result::Result<(), ExchangeError> {
    connection.send(&Writer::new(op::LAST_WORD).string(key).string(word).finish(), wait)?;
    connection.byte(wait).map(drop)
}

/// Adds the slash that PyTorch's client puts before every key, so both clients see the same keys.
fn full(key: &str) -> Vec<u8> {
    format!("/{key}").into_bytes()
}

/// Makes the requests that remove the keys.
fn removals(keys: &[String]) -> Vec<u8> {
    let remove = |writer: Writer, key: &String| writer.then(op::DELETE).string(&full(key));
    keys.iter().fold(Writer::default(), remove).finish()
}

fn with_keys(op: u8, keys: &[Vec<u8>]) -> Vec<u8> {
    keys.iter().fold(Writer::new(op).number(keys.len() as i64), |writer, key| writer.string(key)).finish()
}

#[cfg(test)]
mod tests {
    use super::super::{Server, Store};
    use super::*;

    #[test]
    fn keys_whose_removal_was_not_sent_are_removed_later() {
        let (server, wait) = (Server::bind("127.0.0.1:0").unwrap(), Wait::after(Duration::from_secs(20)));
        let store = TcpStore::connect("127.0.0.1", server.local_addr().port(), &wait).unwrap();
        store.set("old", b"1", &wait).unwrap();
        store.forget(vec!["old".to_owned()], &wait);
        let late = store.exchange(&wait, || "a request".to_owned(), |_| Err::<(), _>(ExchangeError::Late));
        assert_eq!(late.unwrap_err().status(), Status::Timeout);
        assert_eq!(store.present(&["old".to_owned()], &wait).unwrap(), [false]);
    }
}
