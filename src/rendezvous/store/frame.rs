//! PyTorch's TCPStore protocol on the wire (torch/csrc/distributed/c10d/TCPStoreBackend.hpp, 2.0 to
//! 2.15). Numbers are little-endian, and there is no frame header. A request is one operation byte
//! and its payload. A string is a u64 length and the bytes.
//!
//! Lengths from the wire are never trusted: each has a limit, and nothing is reserved before the
//! bytes are there.

use std::borrow::Cow;

mod strings;
#[cfg(test)]
mod tests;

pub use strings::Strings;

/// The longest key that the server takes, in bytes. PyTorch's libuv server has the same limit.
pub const MAX_KEY: usize = 8192;
/// The longest value, in bytes.
pub const MAX_VALUE: usize = 8 << 20;
/// The most keys in one request.
pub const MAX_KEYS: usize = 131_072;
/// The longest request, in bytes. The limits on keys and values alone would let one client fill the
/// memory.
pub const MAX_REQUEST: usize = 8 * MAX_VALUE;
/// The key by which a client knows a server of this library. This key is not listed or counted.
/// Under this key, a slash, and the nonce of a connection's greeting in hexadecimal digits, the
/// server says why it had no room for what that connection asked. The nonce is that of the first
/// PING, or the first four bytes of the client's message of the handshake.
pub const SERVER_KEY: &[u8] = b"/devicemesh/server";
/// The key under which a server of this library says how many connections it refused, because they
/// had the wrong secret or none. The key exists once there is such a connection, and is not listed
/// or counted.
pub const REFUSED_KEY: &[u8] = b"/devicemesh/refused";
/// The key that shows a client that the server carries out [`op::COUNT`]. The server does not list
/// or count this key, and the key is no nonce.
pub const COUNT_KEY: &[u8] = b"/devicemesh/server/count";
/// The key that shows a client that the server carries out [`op::TRUNK`]. The server does not list
/// or count this key, and the key is no nonce.
pub const TRUNK_KEY: &[u8] = b"/devicemesh/server/trunk";
/// A request that lists no more keys than this counts as short.
const FEW: usize = 16;
/// The first word a client sends.
pub const MAGIC: u32 = 0x3c85_f7ce;

/// Operation bytes.
pub mod op {
    /// u32 magic; no reply.
    pub const VALIDATE: u8 = 0;
    /// key, value; no reply.
    pub const SET: u8 = 1;
    /// key, expected, desired; replies with the value that stands now.
    pub const COMPARE_SET: u8 = 2;
    /// key; replies with the value.
    pub const GET: u8 = 3;
    /// key, i64; replies with the sum.
    pub const ADD: u8 = 4;
    /// keys; replies with a byte, 0 when all are there.
    pub const CHECK: u8 = 5;
    /// keys; replies with a byte 0 once all are there.
    pub const WAIT: u8 = 6;
    /// Nothing; replies with i64.
    pub const GETNUMKEYS: u8 = 7;
    /// key; replies with i64, the number removed.
    pub const DELETE: u8 = 8;
    /// key, value; no reply.
    pub const APPEND: u8 = 9;
    /// keys; replies with their values.
    pub const MULTI_GET: u8 = 10;
    /// pairs; no reply.
    pub const MULTI_SET: u8 = 11;
    /// Nothing; replies with a byte 1.
    pub const CANCEL_WAIT: u8 = 12;
    /// u32; replies with it.
    pub const PING: u8 = 13;
    /// key, value; no reply.
    pub const QUEUE_PUSH: u8 = 14;
    /// key; replies with i64, the queue's length, and the oldest value when that is not 0.
    pub const QUEUE_POP: u8 = 15;
    /// key; replies with i64.
    pub const QUEUE_LEN: u8 = 16;
    /// Nothing; replies with i64 and as many keys.
    pub const LIST_KEYS: u8 = 17;
    /// key, i64 world size; replies with a byte 0 once that many asked.
    pub const BARRIER: u8 = 18;

    // The operations below are this library's own, for a server at which the key SERVER_KEY exists.
    // PyTorch's server closes the connection.

    /// keys; replies with a byte 0, the i64 index of one that is there and its value, once there is
    /// one.
    pub const WAIT_ANY: u8 = 100;
    /// key, value; replies with a byte 0. When the last connection has ended that left this pair,
    /// the server adds 1 to the key, as ADD does. Then it stores the value under the key, a slash
    /// and the count.
    pub const LAST_WORD: u8 = 101;
    /// The client's message of a handshake; replies with the server's, and what follows in both
    /// directions is encrypted. The reply is empty where the server has no secret, and
    /// [`OTHER_SECRET`](super::OTHER_SECRET) where it has another one. Version 0.1 had 102 and 103
    /// in its place.
    pub const HANDSHAKE: u8 = 104;
    /// counter, i64 amount, i64 last, key, value; replies with the i64 sum. Adds to the counter, as
    /// ADD does. When the sum is `last`, the value is stored under the key unless one stands there.
    /// A server carries out this operation if [`COUNT_KEY`](super::COUNT_KEY) exists there.
    pub const COUNT: u8 = 105;
    /// Nothing; replies with a byte 0. From then on the connection is a trunk, which carries the
    /// connections of many clients (store/channels.rs). A server carries out this operation if
    /// [`TRUNK_KEY`](super::TRUNK_KEY) exists there.
    pub const TRUNK: u8 = 106;
}

/// The answer to a handshake with another secret. No message of a handshake is so short.
pub const OTHER_SECRET: &[u8] = &[0];

/// The answer to PING of a server that has a secret.
pub const DENIED: [u8; 4] = *b"DENY";

/// One request of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the operations are documented in `op`")]
#[non_exhaustive]
pub enum Request {
    Validate(u32),
    Set(Vec<u8>, Vec<u8>),
    CompareSet(Vec<u8>, Vec<u8>, Vec<u8>),
    Get(Vec<u8>),
    Add(Vec<u8>, i64),
    Check(Strings),
    Wait(Strings),
    NumKeys,
    Delete(Vec<u8>),
    Append(Vec<u8>, Vec<u8>),
    MultiGet(Strings),
    MultiSet(Strings),
    CancelWait,
    Ping(u32),
    QueuePush(Vec<u8>, Vec<u8>),
    QueuePop(Vec<u8>),
    QueueLen(Vec<u8>),
    ListKeys,
    Barrier(Vec<u8>, i64),
    WaitAny(Strings),
    LastWord(Vec<u8>, Vec<u8>),
    Handshake(Vec<u8>),
    Count { counter: Vec<u8>, amount: i64, last: i64, key: Vec<u8>, value: Vec<u8> },
    Trunk,
}

impl Request {
    /// Whether a connection begins with such a request. These requests ask for nothing that is
    /// kept.
    pub(super) fn is_greeting(&self) -> bool {
        matches!(self, Request::Validate(_) | Request::Ping(_) | Request::Handshake(_))
    }

    /// Whether the request is carried out in little work, so that also a client whose turn is short
    /// gets its answer at once. A list of many keys needs more work.
    pub(super) fn is_short(&self) -> bool {
        use Request::{Check, ListKeys, MultiGet, MultiSet, Wait, WaitAny};
        match self {
            Check(keys) | Wait(keys) | WaitAny(keys) | MultiGet(keys) | MultiSet(keys) => keys.count() <= FEW,
            ListKeys => false,
            _ => true,
        }
    }

    /// Whether the request lists keys, which are taken out of its bytes one by one.
    pub(super) fn is_list(&self) -> bool {
        use Request::{Check, MultiGet, MultiSet, Wait, WaitAny};
        matches!(self, Check(_) | Wait(_) | WaitAny(_) | MultiGet(_) | MultiSet(_))
    }
}

/// Why bytes are no request. The client broke the protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed(pub String);

/// One part of a request.
#[derive(Clone, Copy)]
enum Field {
    Word,
    Number,
    Key,
    Value,
}

/// Returns the parts of an operation's request, and whether a count comes first that says how often
/// they follow.
fn shape(op: u8) -> Result<(&'static [Field], bool), Malformed> {
    use Field::{Key, Number, Value, Word};
    Ok(match op {
        op::VALIDATE | op::PING => (&[Word], false),
        op::SET | op::APPEND | op::QUEUE_PUSH | op::LAST_WORD => (&[Key, Value], false),
        op::COMPARE_SET => (&[Key, Value, Value], false),
        op::GET | op::DELETE | op::QUEUE_POP | op::QUEUE_LEN | op::HANDSHAKE => (&[Key], false),
        op::ADD | op::BARRIER => (&[Key, Number], false),
        op::COUNT => (&[Key, Number, Number, Key, Value], false),
        op::CHECK | op::WAIT | op::MULTI_GET | op::WAIT_ANY => (&[Key], true),
        op::MULTI_SET => (&[Key, Value], true),
        op::GETNUMKEYS | op::CANCEL_WAIT | op::LIST_KEYS | op::TRUNK => (&[], false),
        unknown => return Err(Malformed(format!("operation {unknown}"))),
    })
}

/// How far a request that comes in pieces has been measured. Each part is looked at once, however
/// many pieces the request comes in.
#[derive(Debug, Clone, Default)]
pub struct Measure {
    /// Where the next part begins, in bytes.
    at: usize,
    /// How many parts were measured.
    done: usize,
    /// How many parts the request has, once that is known.
    parts: Option<usize>,
}

impl Measure {
    /// Returns the length in bytes of the request that `bytes` begins with, or `None` while more
    /// bytes are needed. `bytes` begins with what was given the last time. After a length is
    /// returned, the next call measures the next request.
    pub fn length(&mut self, bytes: &[u8]) -> Result<Option<usize>, Malformed> {
        let Some(op) = bytes.first() else { return Ok(None) };
        let (fields, counted) = shape(*op)?;
        let number = |at: usize| {
            let bytes = bytes.get(at..at + 8)?;
            Some(u64::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7]]))
        };
        let parts = match self.parts {
            Some(parts) => parts,
            None if !counted => {
                self.at = 1;
                *self.parts.insert(fields.len())
            }
            None => {
                let Some(count) = number(1) else { return Ok(None) };
                if count > MAX_KEYS as u64 {
                    return Err(Malformed(format!("{count} keys in one request; at most {MAX_KEYS}")));
                }
                self.at = 9;
                *self.parts.insert(count as usize * fields.len())
            }
        };
        while self.done < parts {
            let len = match fields[self.done % fields.len()] {
                Field::Word => 4,
                Field::Number => 8,
                string @ (Field::Key | Field::Value) => {
                    let cap = if matches!(string, Field::Key) { MAX_KEY } else { MAX_VALUE };
                    let Some(len) = number(self.at) else { return Ok(None) };
                    if len > cap as u64 {
                        return Err(Malformed(format!("a string of {len} bytes where at most {cap} are taken")));
                    }
                    8 + len as usize
                }
            };
            if self.at + len > MAX_REQUEST {
                return Err(Malformed(format!("a request of more than {MAX_REQUEST} bytes")));
            }
            if self.at + len > bytes.len() {
                return Ok(None);
            }
            self.at += len;
            self.done += 1;
        }
        let length = self.at;
        *self = Measure::default();
        Ok(Some(length))
    }
}

/// Decodes what is at the start of `bytes`: a request, and how many bytes it took; `None` while
/// more bytes are needed.
///
/// ```
/// use devicemesh::rendezvous::store::frame::{Request, decode};
/// let bytes = [0, 0xce, 0xf7, 0x85, 0x3c, 13];
/// assert_eq!(decode(&bytes).unwrap(), Some((Request::Validate(0x3c85f7ce), 5)));
/// assert_eq!(decode(&bytes[5..]).unwrap(), None); // a PING whose nonce is still to come
/// ```
pub fn decode(bytes: &[u8]) -> Result<Option<(Request, usize)>, Malformed> {
    let Some(length) = Measure::default().length(bytes)? else { return Ok(None) };
    Ok(request(bytes[..length].into()).map(|request| (request, length)))
}

/// Returns the request that is exactly `bytes`, which were measured. A list of strings keeps its
/// bytes. When the bytes are owned, nothing is copied.
pub(super) fn request(bytes: Cow<'_, [u8]>) -> Option<Request> {
    let op = *bytes.first()?;
    if let op::CHECK | op::WAIT | op::MULTI_GET | op::WAIT_ANY | op::MULTI_SET = op {
        let strings = Strings::of_request(bytes.into_owned(), if op == op::MULTI_SET { 2 } else { 1 })?;
        return Some(match op {
            op::CHECK => Request::Check(strings),
            op::WAIT => Request::Wait(strings),
            op::MULTI_GET => Request::MultiGet(strings),
            op::WAIT_ANY => Request::WaitAny(strings),
            _ => Request::MultiSet(strings),
        });
    }
    let mut reader = Reader { bytes: bytes.get(1..)? };
    Some(match op {
        op::VALIDATE => Request::Validate(reader.word()?),
        op::SET => Request::Set(reader.string()?, reader.string()?),
        op::COMPARE_SET => Request::CompareSet(reader.string()?, reader.string()?, reader.string()?),
        op::GET => Request::Get(reader.string()?),
        op::ADD => Request::Add(reader.string()?, reader.number()?),
        op::GETNUMKEYS => Request::NumKeys,
        op::DELETE => Request::Delete(reader.string()?),
        op::APPEND => Request::Append(reader.string()?, reader.string()?),
        op::CANCEL_WAIT => Request::CancelWait,
        op::PING => Request::Ping(reader.word()?),
        op::QUEUE_PUSH => Request::QueuePush(reader.string()?, reader.string()?),
        op::QUEUE_POP => Request::QueuePop(reader.string()?),
        op::QUEUE_LEN => Request::QueueLen(reader.string()?),
        op::LIST_KEYS => Request::ListKeys,
        op::BARRIER => Request::Barrier(reader.string()?, reader.number()?),
        op::LAST_WORD => Request::LastWord(reader.string()?, reader.string()?),
        op::HANDSHAKE => Request::Handshake(reader.string()?),
        op::COUNT => Request::Count {
            counter: reader.string()?,
            amount: reader.number()?,
            last: reader.number()?,
            key: reader.string()?,
            value: reader.string()?,
        },
        op::TRUNK => Request::Trunk,
        _ => return None,
    })
}

/// Reads the parts of a request that was measured.
struct Reader<'a> {
    /// The bytes that are still to be read.
    bytes: &'a [u8],
}

impl Reader<'_> {
    fn string(&mut self) -> Option<Vec<u8>> {
        let len = usize::try_from(self.number()?).ok()?;
        let (string, rest) = self.bytes.split_at_checked(len)?;
        self.bytes = rest;
        Some(string.to_vec())
    }

    fn number(&mut self) -> Option<i64> {
        self.array().map(i64::from_le_bytes)
    }

    fn word(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.bytes.split_first_chunk()?;
        self.bytes = rest;
        Some(*array)
    }
}

/// Builds a request.
#[derive(Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// Begins a request with that operation.
    pub fn new(op: u8) -> Writer {
        Writer(vec![op])
    }

    /// Appends a length and the bytes.
    #[must_use]
    pub fn string(mut self, bytes: &[u8]) -> Writer {
        self.0.extend((bytes.len() as u64).to_le_bytes());
        self.0.extend(bytes);
        self
    }

    /// Appends a 64-bit number.
    #[must_use]
    pub fn number(mut self, number: i64) -> Writer {
        self.0.extend(number.to_le_bytes());
        self
    }

    /// Appends a 32-bit number.
    #[must_use]
    pub fn word(mut self, word: u32) -> Writer {
        self.0.extend(word.to_le_bytes());
        self
    }

    /// Appends a single operation byte.
    #[must_use]
    pub fn then(mut self, op: u8) -> Writer {
        self.0.push(op);
        self
    }

    /// Returns the bytes.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}
