//! The key-value store in which the ranks meet. One interface covers PyTorch's TCPStore protocol, a
//! shared folder, this process's memory and the caller's own callbacks.

mod callbacks;
mod channels;
mod client;
mod connection;
mod dial;
mod file;
pub mod frame;
#[cfg(test)]
mod hooked;
mod loop_thread;
mod memory;
mod names;
mod outgoing;
mod poll;
#[doc(hidden)]
pub mod records;
mod relay;
mod secret;
mod server;
mod table;
mod value;

pub(crate) use callbacks::NOT_YET;
pub use callbacks::{CallbackStore, Callbacks};
pub use client::TcpStore;
pub use dial::RELAY;
pub use file::FileStore;
#[cfg(test)]
pub(crate) use hooked::Hooked;
pub use memory::MemoryStore;
pub use names::resolve;
pub(in crate::rendezvous) use names::{NotResolved, resolve_in_time};
pub use relay::Relay;
pub use secret::Secret;
pub use server::Server;
pub(in crate::rendezvous) use server::{NotListening, not_resolved};

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::IpAddr;

use crate::error::{Error, Result};
use crate::wait::Wait;

/// This text stands in place of a numbered note (agreement/notes.rs) that nobody has written.
pub(in crate::rendezvous) const GAP: &[u8] = b"-";

/// A server of this library puts this text behind a last word when the connections that left the
/// word have not been closed, but have failed because nothing came from their host any more.
const SILENT: &[u8] = b" silent";

/// How many numbers before a note are looked at for gaps.
pub(in crate::rendezvous) const LOOKED_BACK: i64 = 64;

/// A key-value service shared by all ranks of a job.
///
/// Every method may be called from several threads at once. A deadline that has passed is
/// `DM_STATUS_TIMEOUT`. A raised cancel flag is `DM_STATUS_ABORTED` (within about
/// [`crate::wait::CANCEL_SLICE`]). A lack of descriptors or memory is `DM_STATUS_EXHAUSTED`.
/// Everything else that goes wrong is `DM_STATUS_STORE`, with the store's [`name`](Store::name) in
/// the message.
pub trait Store: Send + Sync {
    /// Stores `value` under `key`, in place of what was there. This method may return before the
    /// store has the value, but operations of one handle take effect in order.
    fn set(&self, key: &str, value: &[u8], wait: &Wait) -> Result<()>;

    /// Returns the value under `key`, and waits until there is one.
    fn get(&self, key: &str, wait: &Wait) -> Result<Vec<u8>> {
        self.get_any(&[key], wait).map(|(_, value)| value)
    }

    /// Waits until any of the keys is there, and returns its index and value. Where several are
    /// there, the first one in the list counts. Calls the wait's watch now and then.
    fn get_any(&self, keys: &[&str], wait: &Wait) -> Result<(usize, Vec<u8>)>;

    /// Returns the value under `key` now; `None` when there is none.
    fn try_get(&self, key: &str, wait: &Wait) -> Result<Option<Vec<u8>>>;

    /// Returns the value under each key now; `None` where there is none. A server is asked for many
    /// values at once.
    fn try_get_each(&self, keys: &[String], wait: &Wait) -> Result<Vec<Option<Vec<u8>>>> {
        keys.iter().map(|key| self.try_get(key, wait)).collect()
    }

    /// Adds to the integer under `key` (0 when there is none) and returns the sum. This is atomic
    /// over all ranks.
    fn add(&self, key: &str, amount: i64, wait: &Wait) -> Result<i64>;

    /// Stores `value` under `key` unless a value stands there, and returns the value that stands
    /// there now. Exactly one value wins over all ranks, and every rank gets that one. `value` is
    /// not empty.
    fn set_once(&self, key: &str, value: &[u8], wait: &Wait) -> Result<Vec<u8>>;

    /// Does what a rank does at a place where ranks meet: stores a note, counts itself in, and
    /// waits for any of the keys. Returns what [`get_any`](Store::get_any) returns, or `None` where
    /// no keys are given. `counted` gets the sum before the wait begins. An error of `counted` ends
    /// the call, and `counted` may use the store. With a server of this library this method takes
    /// one round trip.
    fn arrive(
        &self,
        arrival: &Arrival<'_>,
        keys: &[&str],
        counted: &mut dyn FnMut(i64) -> Result<()>,
        wait: &Wait,
    ) -> Result<Option<(usize, Vec<u8>)>> {
        arrive_in_steps(self, arrival, keys, counted, wait)
    }

    /// Whether [`set_once`](Store::set_once) is one operation of the store. Where it is several, a
    /// rank that dies between them leaves a key on which nobody can decide any more.
    fn decides_at_once(&self) -> bool {
        true
    }

    /// Returns for each key whether it exists now. This takes few round trips when most keys
    /// exist.
    fn present(&self, keys: &[String], wait: &Wait) -> Result<Vec<bool>>;

    /// Removes `key`. It is no error when the key is not there.
    fn delete(&self, key: &str, wait: &Wait) -> Result<()>;

    /// Removes keys that nobody needs any more, soon. Errors do not matter. A store that can remove
    /// the keys together with its next operation does not wait.
    fn forget(&self, keys: Vec<String>, wait: &Wait) {
        for key in keys {
            let _ = self.delete(&key, wait);
        }
    }

    /// Asks the store to tell the others when this process has gone, or has dropped this handle.
    /// Then `key` counts one more, and `word` stands under `<key>/<count>`. Where a client has
    /// counted and has written no word, the text "-" stands under the number. [`split_last_word`]
    /// reads the word. Returns `false` when this store cannot know. This method is called once for
    /// a handle.
    fn leave_last_word(&self, _key: &str, _word: &[u8], _wait: &Wait) -> Result<bool> {
        Ok(false)
    }

    /// Whether the store itself knows whose process has ended, so that
    /// [`leave_last_word`](Store::leave_last_word) returns `true`.
    fn knows_losses(&self) -> bool {
        false
    }

    /// Asks whether `key` is there, and leaves the question open, so that looking for the answer
    /// costs the store nothing. Returns `None` when this store answers each question at once.
    fn watch_key(&self, _key: &str, _wait: &Wait) -> Result<Option<Box<dyn KeyWatch>>> {
        Ok(None)
    }

    /// Notes that a rank has left a world in order. A store that nobody serves removes what the
    /// world has left in it when all ranks have left. The other stores end with their server.
    #[doc(hidden)]
    fn leave_world(&self, _world: &LeftWorld<'_>, _wait: &Wait) {}

    /// Returns the address of this host from which the store is reached; `None` for a store that is
    /// not reached over a network.
    fn local_address(&self) -> Option<IpAddr> {
        None
    }

    /// Returns the name of this store in messages, for example `tcp://127.0.0.1:29500`.
    fn name(&self) -> &str;
}

/// The things that a rank stores and counts when it [arrives](Store::arrive).
#[derive(Debug, Default, Clone, Copy)]
pub struct Arrival<'a> {
    /// A key that only this rank writes, and its value.
    pub note: Option<(&'a str, &'a [u8])>,
    /// How the rank counts itself in, if it does.
    pub count: Option<Count<'a>>,
}

/// How a rank counts itself in when it [arrives](Store::arrive).
#[derive(Debug, Clone, Copy)]
pub struct Count<'a> {
    /// The counter.
    pub counter: &'a str,
    /// The number that is added to the counter.
    pub amount: i64,
    /// The thing that the rank which is counted last stores, if it stores anything.
    pub last: Option<Last<'a>>,
}

/// The pair that the rank which is counted last stores, unless a value stands under the key.
#[derive(Debug, Clone, Copy)]
pub struct Last<'a> {
    /// The sum of that rank.
    pub sum: i64,
    /// The key.
    pub key: &'a str,
    /// The value. It is not empty.
    pub value: &'a [u8],
}

/// An open question whether a key is there.
pub trait KeyWatch: Send {
    /// Whether the key is there. This method waits for nothing and sends nothing. Once the key is
    /// there, or after an error, the question is over.
    fn has_come(&mut self) -> Result<bool>;
}

/// A world that one of its ranks has left.
#[doc(hidden)]
pub struct LeftWorld<'a> {
    /// The keys of the world begin with this prefix. Its last part is the world's nonce.
    pub prefix: &'a str,
    /// The key that counts the joins of this rank of this process in the store.
    pub counter: &'a str,
    /// This process's rank in the world.
    pub rank: usize,
    /// The number of ranks of the world.
    pub size: usize,
}

/// Splits what stands in a list of [last words](Store::leave_last_word): the word as it was left,
/// and whether its host was silent. A process that has ended closes its connections, so a silent
/// host is down or out of reach.
#[doc(hidden)]
pub fn split_last_word(found: &[u8]) -> (&[u8], bool) {
    found.strip_suffix(SILENT).map_or((found, false), |word| (word, true))
}

/// Does what [`Store::arrive`] does, in one operation after the other.
fn arrive_in_steps<S: Store + ?Sized>(
    store: &S,
    arrival: &Arrival<'_>,
    keys: &[&str],
    counted: &mut dyn FnMut(i64) -> Result<()>,
    wait: &Wait,
) -> Result<Option<(usize, Vec<u8>)>> {
    if let Some((key, value)) = arrival.note {
        store.set(key, value, wait)?;
    }
    if let Some(count) = &arrival.count {
        let sum = store.add(count.counter, count.amount, wait)?;
        counted(sum)?;
        if let Some(Last { key, value, .. }) = count.last.filter(|last| last.sum == sum) {
            let stands = store.set_once(key, value, wait)?;
            if let Some(index) = keys.iter().position(|other| *other == key) {
                return Ok(Some((index, stands)));
            }
        }
    }
    if keys.is_empty() { Ok(None) } else { store.get_any(keys, wait).map(Some) }
}

/// Returns which of the keys came first, and its value. Fails when a store of the caller gives an
/// index that no key has.
pub(super) fn any_of(store: &dyn Store, keys: &[&str], wait: &Wait) -> Result<(usize, Vec<u8>)> {
    checked(store, keys, store.get_any(keys, wait)?)
}

/// Does what [`Store::arrive`] does with at least one key, and then what [`any_of`] does.
pub(super) fn arrive_for_any(
    store: &dyn Store,
    arrival: &Arrival<'_>,
    keys: &[&str],
    counted: &mut dyn FnMut(i64) -> Result<()>,
    wait: &Wait,
) -> Result<(usize, Vec<u8>)> {
    match store.arrive(arrival, keys, counted, wait)? {
        Some(found) => checked(store, keys, found),
        None => Err(Error::internal("a wait for no keys")),
    }
}

fn checked(store: &dyn Store, keys: &[&str], (index, value): (usize, Vec<u8>)) -> Result<(usize, Vec<u8>)> {
    if index >= keys.len() {
        return Err(Error::store(format!(
            "the store at {} gave index {index} in get_any of {} keys: it must be the index of one of these keys",
            store.name(),
            keys.len()
        )));
    }
    Ok((index, value))
}

/// Returns what a server of this library says about connections that it refused because they had
/// the wrong secret or none. Returns `None` when there were none, or the store cannot say.
pub(super) fn refused_connections(store: &dyn Store, wait: &Wait) -> Option<String> {
    let key = std::str::from_utf8(frame::REFUSED_KEY).ok()?.strip_prefix('/')?;
    let said = store.try_get(key, wait).ok()??;
    Some(String::from_utf8_lossy(&said).into_owned())
}

/// Returns the error of a wait for a key that did not come.
fn no_key(store: &dyn Store, key: &str, wait: &Wait) -> Error {
    Error::timeout(format!(
        "key {key} did not come to {} within {} ms",
        store.name(),
        wait.deadline.timeout().as_millis()
    ))
}

/// Returns the integer that a counter holds; 0 when there is none.
fn parse_integer(store: &dyn Store, key: &str, value: Option<&[u8]>) -> Result<i64> {
    let Some(value) = value else { return Ok(0) };
    let text = String::from_utf8_lossy(value);
    text.trim()
        .parse()
        .map_err(|_| Error::store(format!("key {key} of {} holds {text:?}, which is no integer", store.name())))
}

/// Returns a number that no other process or call has, and that nobody can foresee. Each
/// RandomState is keyed from the system's randomness and a counter.
pub(super) fn random() -> u64 {
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish()
}
