//! The head of a message: its count, its type, its name, and behind it the data of a short message.

use crate::call_name::NAME_BYTES;
use crate::types::DataType;

/// The size of a head in bytes: count, type and name.
pub(super) const HEAD_BYTES: usize = 8 + 4 + NAME_BYTES;
/// The size in bytes of a receiver's question: the count and the type.
pub(super) const QUESTION_BYTES: usize = 8 + 4;
/// The longest message that travels behind its head, in bytes.
pub(super) const INLINE_BYTES: usize = 4 << 10;

/// The first bytes of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    /// How many elements the sender sends.
    pub(super) count: u64,
    /// The sender's element type.
    pub(super) dtype: i32,
    /// The text of the name under which the sender sends.
    pub(super) text: [u8; NAME_BYTES],
}

impl Head {
    pub(super) fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[..8].copy_from_slice(&self.count.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.dtype.to_le_bytes());
        bytes[12..].copy_from_slice(&self.text);
        bytes
    }

    /// Returns the question of a receiver that expects a message with this head.
    pub(super) fn question(&self) -> [u8; QUESTION_BYTES] {
        let mut bytes = [0; QUESTION_BYTES];
        bytes.copy_from_slice(&self.encode()[..QUESTION_BYTES]);
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Head> {
        let (head, _) = bytes.split_at_checked(HEAD_BYTES)?;
        Some(Head {
            count: u64::from_le_bytes(head[..8].try_into().ok()?),
            dtype: i32::from_le_bytes(head[8..12].try_into().ok()?),
            text: head[12..].try_into().ok()?,
        })
    }
}

/// Why the first bytes of a message are not those of the message that this rank expects.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unread {
    /// The number of bytes is wrong. The value is the right number.
    Length(usize),
    /// The sender sends another count or another type. The value holds the sender's count and
    /// type.
    Other((u64, i32)),
}

/// Returns how many bytes of a message of that length travel behind its head.
pub(super) fn inline_bytes(bytes: usize) -> usize {
    if bytes <= INLINE_BYTES { bytes } else { 0 }
}

/// Reads the first bytes of a message of `count` elements, and returns the data behind the head:
/// all data, or nothing where the data comes in a message of its own. This function trusts none of
/// the bytes.
pub(super) fn inline_data(arrived: &[u8], count: usize, dtype: DataType) -> std::result::Result<&[u8], Unread> {
    let head = Head::decode(arrived).ok_or(Unread::Length(HEAD_BYTES))?;
    if (head.count, head.dtype) != (count as u64, dtype as i32) {
        return Err(Unread::Other((head.count, head.dtype)));
    }
    let data = &arrived[HEAD_BYTES..];
    let expected = inline_bytes(count * dtype.size());
    if data.len() == expected { Ok(data) } else { Err(Unread::Length(HEAD_BYTES + expected)) }
}

/// Checks two things for arbitrary bytes in place of the first bytes of a message. The bytes are
/// accepted only if they hold exactly the data that the receive expects. What their head says can
/// be put into an error message. The first byte of an input is a sixteenth of the count that the
/// receive expects, and the second byte stands for the type that the receive expects.
#[cfg(any(test, fuzzing))]
pub(crate) fn any_bytes(bytes: &[u8]) {
    let Some(([count, dtype], arrived)) = bytes.split_first_chunk::<2>() else { return };
    let (count, dtype) = (16 * usize::from(*count), DataType::ALL[usize::from(*dtype) % DataType::ALL.len()]);
    if let Some(head) = Head::decode(arrived) {
        assert_eq!(head.encode(), arrived[..HEAD_BYTES]);
        let name = crate::call_name::Name { tag: 1, text: head.text };
        assert!(name.along().is_empty() || name.along().starts_with(" along "), "{name:?}");
    }
    match inline_data(arrived, count, dtype) {
        Ok(data) => assert_eq!(data.len(), inline_bytes(count * dtype.size())),
        Err(Unread::Length(expected)) => assert_ne!(arrived.len(), expected),
        Err(Unread::Other(sent)) => assert_ne!(sent, (count as u64, dtype as i32)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(count: u64, dtype: DataType, data: &[u8]) -> Vec<u8> {
        let head = Head { count, dtype: dtype as i32, text: [0; NAME_BYTES] };
        [&head.encode()[..], data].concat()
    }

    #[test]
    fn a_short_message_has_its_data_behind_the_head_and_a_long_one_has_not() {
        let short = message(2, DataType::Int32, &[1; 8]);
        assert_eq!(inline_data(&short, 2, DataType::Int32), Ok(&[1_u8; 8][..]));
        let longest = INLINE_BYTES as u64;
        let full = message(longest, DataType::Uint8, &[3; INLINE_BYTES]);
        assert_eq!(inline_data(&full, INLINE_BYTES, DataType::Uint8).map(<[u8]>::len), Ok(INLINE_BYTES));
        let long = message(longest + 1, DataType::Uint8, b"");
        assert_eq!(inline_data(&long, INLINE_BYTES + 1, DataType::Uint8), Ok(&b""[..]));
    }

    #[test]
    fn bytes_that_are_not_the_message_that_is_expected_are_refused() {
        let good = message(2, DataType::Int32, &[1; 8]);
        let read = |bytes: &[u8]| inline_data(bytes, 2, DataType::Int32).unwrap_err();
        assert_eq!(read(&good[..HEAD_BYTES - 1]), Unread::Length(HEAD_BYTES));
        assert_eq!(read(&good[..good.len() - 1]), Unread::Length(HEAD_BYTES + 8));
        assert_eq!(read(&[&good[..], b"x"].concat()), Unread::Length(HEAD_BYTES + 8));
        assert_eq!(read(&message(3, DataType::Int32, &[1; 12])), Unread::Other((3, DataType::Int32 as i32)));
        // The sizes are equal, and the types are not.
        assert_eq!(read(&message(2, DataType::Float32, &[1; 8])), Unread::Other((2, DataType::Float32 as i32)));
        let long = message(2 << 20, DataType::Int32, b"x");
        assert_eq!(inline_data(&long, 2 << 20, DataType::Int32), Err(Unread::Length(HEAD_BYTES)));
    }
}
