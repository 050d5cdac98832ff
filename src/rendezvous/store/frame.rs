//! PyTorch's TCPStore protocol on the wire (torch/csrc/distributed/c10d/TCPStoreBackend.hpp, 2.0 to 2.15): little-endian, no frame
//! header; a request is one operation byte and its payload, a string is a u64 length and the bytes.
//!
//! Lengths from the wire are never trusted: each has a cap, and nothing is reserved before the bytes are there.

/// The longest key the server takes, in bytes; PyTorch's libuv server has the same limit.
pub const MAX_KEY: usize = 8192;
/// The longest value, in bytes.
pub const MAX_VALUE: usize = 8 << 20;
/// The most keys in one request.
pub const MAX_KEYS: usize = 131_072;
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
}

/// One request of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the operations are documented in `op`")]
pub enum Request {
    Validate(u32),
    Set(Vec<u8>, Vec<u8>),
    CompareSet(Vec<u8>, Vec<u8>, Vec<u8>),
    Get(Vec<u8>),
    Add(Vec<u8>, i64),
    Check(Vec<Vec<u8>>),
    Wait(Vec<Vec<u8>>),
    NumKeys,
    Delete(Vec<u8>),
    Append(Vec<u8>, Vec<u8>),
    MultiGet(Vec<Vec<u8>>),
    MultiSet(Vec<(Vec<u8>, Vec<u8>)>),
    CancelWait,
    Ping(u32),
    QueuePush(Vec<u8>, Vec<u8>),
    QueuePop(Vec<u8>),
    QueueLen(Vec<u8>),
    ListKeys,
    Barrier(Vec<u8>, i64),
}

/// Why bytes are no request: the client broke the protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed(pub String);

/// What is at the start of `bytes`: a request and how many bytes it took, or `None` while more bytes are needed.
///
/// ```
/// use devicemesh::rendezvous::store::frame::{Request, decode};
/// let bytes = [0, 0xce, 0xf7, 0x85, 0x3c, 13];
/// assert_eq!(decode(&bytes).unwrap(), Some((Request::Validate(0x3c85f7ce), 5)));
/// assert_eq!(decode(&bytes[5..]).unwrap(), None); // a PING whose nonce is still to come
/// ```
pub fn decode(bytes: &[u8]) -> Result<Option<(Request, usize)>, Malformed> {
    // Lengths first: what comes in many pieces is looked at again and again, but copied once, when all of it is there.
    let mut reader = Reader { bytes, at: 0, copies: false };
    let measured = reader.request();
    let mut reader = Reader { bytes, at: 0, copies: true };
    match measured.and_then(|_| reader.request()) {
        Ok(request) => Ok(Some((request, reader.at))),
        Err(Stop::Incomplete) => Ok(None),
        Err(Stop::Malformed(why)) => Err(Malformed(why)),
    }
}

enum Stop {
    Incomplete,
    Malformed(String),
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    copies: bool,
}

impl Reader<'_> {
    fn request(&mut self) -> Result<Request, Stop> {
        Ok(match self.array::<1>()?[0] {
            op::VALIDATE => Request::Validate(u32::from_le_bytes(self.array()?)),
            op::SET => Request::Set(self.key()?, self.value()?),
            op::COMPARE_SET => Request::CompareSet(self.key()?, self.value()?, self.value()?),
            op::GET => Request::Get(self.key()?),
            op::ADD => Request::Add(self.key()?, i64::from_le_bytes(self.array()?)),
            op::CHECK => Request::Check(self.keys()?),
            op::WAIT => Request::Wait(self.keys()?),
            op::GETNUMKEYS => Request::NumKeys,
            op::DELETE => Request::Delete(self.key()?),
            op::APPEND => Request::Append(self.key()?, self.value()?),
            op::MULTI_GET => Request::MultiGet(self.keys()?),
            op::MULTI_SET => {
                let count = self.count()?;
                let mut pairs = Vec::new();
                for _ in 0..count {
                    pairs.push((self.key()?, self.value()?));
                }
                Request::MultiSet(pairs)
            }
            op::CANCEL_WAIT => Request::CancelWait,
            op::PING => Request::Ping(u32::from_le_bytes(self.array()?)),
            op::QUEUE_PUSH => Request::QueuePush(self.key()?, self.value()?),
            op::QUEUE_POP => Request::QueuePop(self.key()?),
            op::QUEUE_LEN => Request::QueueLen(self.key()?),
            op::LIST_KEYS => Request::ListKeys,
            op::BARRIER => Request::Barrier(self.key()?, i64::from_le_bytes(self.array()?)),
            unknown => return Err(Stop::Malformed(format!("operation {unknown}"))),
        })
    }

    fn keys(&mut self) -> Result<Vec<Vec<u8>>, Stop> {
        let count = self.count()?;
        let mut keys = Vec::new();
        for _ in 0..count {
            keys.push(self.key()?);
        }
        Ok(keys)
    }

    fn count(&mut self) -> Result<usize, Stop> {
        let count = u64::from_le_bytes(self.array()?);
        if count > MAX_KEYS as u64 {
            return Err(Stop::Malformed(format!("{count} keys in one request; at most {MAX_KEYS}")));
        }
        Ok(count as usize)
    }

    fn key(&mut self) -> Result<Vec<u8>, Stop> {
        self.string(MAX_KEY)
    }

    fn value(&mut self) -> Result<Vec<u8>, Stop> {
        self.string(MAX_VALUE)
    }

    fn string(&mut self, cap: usize) -> Result<Vec<u8>, Stop> {
        let len = u64::from_le_bytes(self.array()?);
        if len > cap as u64 {
            return Err(Stop::Malformed(format!("a string of {len} bytes where at most {cap} are taken")));
        }
        let end = self.at + len as usize;
        let string = self.bytes.get(self.at..end).ok_or(Stop::Incomplete)?;
        self.at = end;
        Ok(if self.copies { string.to_vec() } else { Vec::new() })
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        let bytes = self.bytes.get(self.at..self.at + N).ok_or(Stop::Incomplete)?;
        self.at += N;
        let mut array = [0; N];
        array.copy_from_slice(bytes);
        Ok(array)
    }
}

/// Builds a request.
#[derive(Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// A request that begins with that operation.
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

    /// The bytes.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encoded(request: &Request) -> Vec<u8> {
        match request {
            Request::Set(key, value) => Writer::new(op::SET).string(key).string(value).finish(),
            Request::Add(key, amount) => Writer::new(op::ADD).string(key).number(*amount).finish(),
            Request::Wait(keys) => {
                keys.iter().fold(Writer::new(op::WAIT).number(keys.len() as i64), |w, key| w.string(key)).finish()
            }
            _ => unreachable!("not made by the strategy below"),
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(Some((_, used))) = decode(&bytes) {
                prop_assert!(used <= bytes.len() && used > 0);
            }
        }

        #[test]
        fn requests_survive_the_wire_and_are_incomplete_before_their_last_byte(
            key in proptest::collection::vec(any::<u8>(), 0..40),
            value in proptest::collection::vec(any::<u8>(), 0..40),
            amount in any::<i64>(),
            which in 0..3,
        ) {
            let request = match which {
                0 => Request::Set(key, value),
                1 => Request::Add(key, amount),
                _ => Request::Wait(vec![key, value]),
            };
            let bytes = encoded(&request);
            prop_assert_eq!(decode(&bytes).unwrap(), Some((request, bytes.len())));
            prop_assert_eq!(decode(&bytes[..bytes.len() - 1]).unwrap(), None);
        }
    }

    #[test]
    fn huge_lengths_are_refused_before_their_bytes_come() {
        let mut key = vec![op::GET];
        key.extend(u64::MAX.to_le_bytes());
        assert!(decode(&key).is_err());
        let mut keys = vec![op::WAIT];
        keys.extend((MAX_KEYS as u64 + 1).to_le_bytes());
        assert!(decode(&keys).is_err());
        assert!(decode(&[99]).is_err());
    }
}
