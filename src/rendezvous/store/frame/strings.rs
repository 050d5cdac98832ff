//! The strings of a request that lists many, taken out of its bytes one by one.

use super::{Reader, Writer};

/// The strings of a request that lists many. The strings stay in the bytes of the request and are
/// taken out one by one, so a long request can be carried out in pieces.
#[derive(Debug, Clone, Default)]
pub struct Strings {
    /// The bytes of the request.
    bytes: Vec<u8>,
    /// Where the first string begins.
    first: usize,
    /// Where the next string begins.
    at: usize,
    /// How many strings there are.
    count: usize,
    /// How many of them were taken.
    taken: usize,
}

impl Strings {
    /// Returns the strings of a measured request that begins with its operation and a count. Each
    /// of the counted parts is `width` strings.
    pub(super) fn of_request(bytes: Vec<u8>, width: usize) -> Option<Strings> {
        let count = Reader { bytes: bytes.get(1..)? }.number()?;
        let count = usize::try_from(count).ok()?.checked_mul(width)?;
        Some(Strings { bytes, first: 9, at: 9, count, taken: 0 })
    }

    /// Returns how many strings there are, taken or not.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns how many strings were taken.
    pub fn taken(&self) -> usize {
        self.taken
    }

    /// Returns how many bytes of memory they take.
    pub fn memory(&self) -> usize {
        self.bytes.capacity()
    }

    /// Returns only the strings that were taken so far, to be taken again.
    #[must_use]
    pub fn again(self) -> Strings {
        Strings { at: self.first, count: self.taken, taken: 0, ..self }
    }

    /// Takes the next string.
    pub fn take(&mut self) -> Option<&[u8]> {
        if self.taken == self.count {
            return None;
        }
        let mut reader = Reader { bytes: self.bytes.get(self.at..)? };
        let len = usize::try_from(reader.number()?).ok()?;
        let from = self.at + 8;
        let string = self.bytes.get(from..from.checked_add(len)?)?;
        (self.at, self.taken) = (from + len, self.taken + 1);
        Some(string)
    }
}

impl<S: AsRef<[u8]>> FromIterator<S> for Strings {
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> Strings {
        let mut count = 0;
        let bytes = strings.into_iter().fold(Writer::default(), |writer, string| {
            count += 1;
            writer.string(string.as_ref())
        });
        Strings { bytes: bytes.finish(), count, ..Strings::default() }
    }
}

/// Two lists are equal when the same strings are still to be taken.
impl PartialEq for Strings {
    fn eq(&self, other: &Strings) -> bool {
        (self.count - self.taken, self.bytes.get(self.at..)) == (other.count - other.taken, other.bytes.get(other.at..))
    }
}

impl Eq for Strings {}
