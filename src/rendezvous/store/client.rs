//! Client of a TCPStore server: PyTorch's, torchrun's agent's, or ours.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::Store;
use super::connection::{Broken, CANCEL_ANSWER, Connection};
use super::frame::{MAGIC, MAX_KEY, MAX_VALUE, Writer, op};
use crate::error::{Error, Result};
use crate::wait::{Deadline, Wait};

/// The first pause between two attempts to connect; it doubles up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_millis(500);

/// A store behind a TCPStore server. Each call in progress has a connection of its own, so a waiting call holds up no other.
pub struct TcpStore {
    name: String,
    host: String,
    port: u16,
    idle: Mutex<Vec<Connection>>,
    open: AtomicUsize,
}

impl TcpStore {
    /// Connects to the server at `host:port`, trying again until the deadline while nobody listens there yet.
    ///
    /// Every address that the name has is tried, IPv6 and IPv4. Resolving the name is the system's and may take longer than the deadline.
    pub fn connect(host: &str, port: u16, wait: &Wait) -> Result<TcpStore> {
        let bracketed = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        let store = TcpStore {
            name: format!("tcp://{bracketed}:{port}"),
            host: host.to_owned(),
            port,
            idle: Mutex::default(),
            open: AtomicUsize::new(0),
        };
        let first = store.open(wait)?;
        store.give_back(first);
        Ok(store)
    }

    fn open(&self, wait: &Wait) -> Result<Connection> {
        let mut pause = FIRST_PAUSE;
        loop {
            wait.cancel.check()?;
            let error = match self.try_open(wait) {
                Ok(connection) => {
                    self.open.fetch_add(1, Ordering::SeqCst);
                    return Ok(connection);
                }
                Err(Attempt::Again(error)) => error,
                Err(Attempt::Final(error)) => return Err(error),
            };
            if wait.deadline.passed() {
                return Err(Error::new(
                    crate::error::Status::Store,
                    format!(
                        "no store at {} within {} ms: {error}; is the process that serves it (rank 0 or the launcher) running, and is this its address?",
                        self.name,
                        wait.deadline.timeout().as_millis()
                    ),
                )
                .with_os_error(error.raw_os_error().unwrap_or(0)));
            }
            let next = Deadline::after(pause.min(wait.deadline.left()));
            while !next.passed() {
                wait.cancel.check()?;
                std::thread::sleep(next.slice());
            }
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    fn try_open(&self, wait: &Wait) -> std::result::Result<Connection, Attempt> {
        let addresses: Vec<SocketAddr> =
            (self.host.as_str(), self.port).to_socket_addrs().map_err(Attempt::Again)?.collect();
        let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
        for address in addresses {
            let limit = wait.deadline.left().clamp(Duration::from_millis(1), Duration::from_secs(5));
            match TcpStream::connect_timeout(&address, limit) {
                Ok(stream) => return self.greet(stream, wait),
                Err(error) => last = error,
            }
        }
        Err(Attempt::Again(last))
    }

    /// One write of VALIDATE and PING, as PyTorch's client does (its libuv server closes when they come apart); the reply shows that a
    /// TCPStore listens there.
    fn greet(&self, stream: TcpStream, wait: &Wait) -> std::result::Result<Connection, Attempt> {
        static NONCE: AtomicU32 = AtomicU32::new(0);
        let nonce = std::process::id() ^ NONCE.fetch_add(0x9e37_79b9, Ordering::Relaxed);
        stream.set_nodelay(true).and_then(|()| stream.set_nonblocking(true)).map_err(Attempt::Again)?;
        let mut connection = Connection { stream };
        let greeting = Writer::new(op::VALIDATE).word(MAGIC).then(op::PING).word(nonce).finish();
        let mut echo = [0; 4];
        let answered = connection.send(&greeting, wait).and_then(|()| connection.receive(&mut echo, wait));
        match answered {
            Ok(()) if echo == nonce.to_le_bytes() => Ok(connection),
            Ok(()) => Err(Attempt::Final(Error::store(format!(
                "what listens at {} is no TCPStore: it answers a ping of {nonce:#010x} with {:#010x}",
                self.name,
                u32::from_le_bytes(echo)
            )))),
            // A server that is just going away closes; so does one that is no store. Try again until the deadline.
            Err(Broken::Io(error)) => Err(Attempt::Again(error)),
            Err(Broken::Late) => Err(Attempt::Again(io::Error::new(ErrorKind::TimedOut, "no answer to the greeting"))),
            Err(Broken::Ended(error)) => Err(Attempt::Final(error)),
        }
    }

    fn take(&self, wait: &Wait) -> Result<Connection> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if let Some(connection) = idle {
            return Ok(connection);
        }
        wait.cancel.check()?;
        // It was there before, so nobody listening now means that it has gone, not that it is still to come.
        match self.try_open(wait) {
            Ok(connection) => {
                self.open.fetch_add(1, Ordering::SeqCst);
                Ok(connection)
            }
            Err(Attempt::Final(error)) => Err(error),
            Err(Attempt::Again(error)) if wait.deadline.passed() => Err(Error::timeout(format!(
                "the store at {} took no other connection within {} ms: {error}",
                self.name,
                wait.deadline.timeout().as_millis()
            ))),
            Err(Attempt::Again(error)) => Err(Error::store_io(
                format!(
                    "no other connection to the store at {}; the process that serves it (rank 0 or the launcher) may have ended",
                    self.name
                ),
                &error,
            )),
        }
    }

    fn give_back(&self, connection: Connection) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
    }

    /// Runs one exchange on a connection of its own. One that ended early is closed: a late reply must not meet the next request.
    fn exchange<T>(
        &self,
        wait: &Wait,
        what: impl Fn() -> String,
        talk: impl FnOnce(&mut Connection) -> std::result::Result<T, Broken>,
    ) -> Result<T> {
        let mut connection = self.take(wait)?;
        match talk(&mut connection) {
            Ok(value) => {
                self.give_back(connection);
                Ok(value)
            }
            Err(broken) => {
                self.open.fetch_sub(1, Ordering::SeqCst);
                Err(match broken {
                    Broken::Ended(error) => error,
                    Broken::Late => Error::timeout(format!(
                        "{} at {} had no answer within {} ms",
                        what(),
                        self.name,
                        wait.deadline.timeout().as_millis()
                    )),
                    Broken::Io(error) => Error::store_io(
                        format!(
                            "the store at {} closed the connection during {}; the process that serves it (rank 0 or the launcher) may have ended",
                            self.name,
                            what()
                        ),
                        &error,
                    ),
                })
            }
        }
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

    /// Which keys are there: one question while all or none of a part are, halves of it else.
    fn bisect(&self, keys: &[Vec<u8>], there: &mut [bool], wait: &Wait) -> Result<()> {
        if keys.is_empty() || self.all_there(keys, wait)? {
            there.fill(true);
        } else if keys.len() > 1 {
            let (left, right) = keys.split_at(keys.len() / 2);
            let (left_there, right_there) = there.split_at_mut(left.len());
            self.bisect(left, left_there, wait)?;
            self.bisect(right, right_there, wait)?;
        }
        Ok(())
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8], wait: &Wait) -> Result<()> {
        self.check(key, value)?;
        let request = Writer::new(op::SET).string(&full(key)).string(value);
        // SET has no reply. On one connection that is no matter; beside others, what this thread does next may overtake it.
        let confirm = self.open.load(Ordering::SeqCst) > 1;
        self.exchange(
            wait,
            || format!("SET {key}"),
            |connection| {
                if !confirm {
                    return connection.send(&request.finish(), wait);
                }
                connection.send(&request.then(op::PING).word(0).finish(), wait)?;
                connection.receive(&mut [0; 4], wait)
            },
        )
    }

    fn get(&self, key: &str, wait: &Wait) -> Result<Vec<u8>> {
        self.check(key, &[])?;
        let key_bytes = full(key);
        let request = with_keys(op::WAIT, std::slice::from_ref(&key_bytes));
        let talk = |connection: &mut Connection| {
            connection.send(&request, wait)?;
            match connection.byte(wait) {
                Err(Broken::Late) if !connection.cancel_wait(wait)? => return Ok(None),
                Ok(_) | Err(Broken::Late) => {}
                Err(broken) => return Err(broken),
            }
            // The key is there, so the answer comes at once, also where the deadline was close.
            let left = wait.deadline.left().max(CANCEL_ANSWER);
            let at_once = wait.with_deadline(Deadline::after(left));
            connection.send(&Writer::new(op::GET).string(&key_bytes).finish(), &at_once)?;
            connection.string(&at_once).map(Some)
        };
        let value = self.exchange(wait, || format!("GET {key}"), talk)?;
        value.ok_or_else(|| super::no_key(self, key, wait))
    }

    fn try_get(&self, key: &str, wait: &Wait) -> Result<Option<Vec<u8>>> {
        self.check(key, &[])?;
        // GET of a missing key is an empty value on one server and a closed connection on another, so ask first.
        if !self.all_there(&[full(key)], wait)? {
            return Ok(None);
        }
        let request = Writer::new(op::GET).string(&full(key)).finish();
        let value = self.exchange(
            wait,
            || format!("GET {key}"),
            |connection| {
                connection.send(&request, wait)?;
                connection.string(wait)
            },
        )?;
        Ok(Some(value))
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
        let full: Vec<Vec<u8>> = keys.iter().map(|key| full(key)).collect();
        let mut there = vec![false; keys.len()];
        for (keys, there) in full.chunks(1 << 16).zip(there.chunks_mut(1 << 16)) {
            self.bisect(keys, there, wait)?;
        }
        Ok(there)
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

    fn name(&self) -> &str {
        &self.name
    }
}

/// Why an attempt to connect failed.
enum Attempt {
    Again(io::Error),
    Final(Error),
}

/// PyTorch's client puts a slash before every key; with it both see the same keys.
fn full(key: &str) -> Vec<u8> {
    format!("/{key}").into_bytes()
}

fn with_keys(op: u8, keys: &[Vec<u8>]) -> Vec<u8> {
    keys.iter().fold(Writer::new(op).number(keys.len() as i64), |writer, key| writer.string(key)).finish()
}
