//! FNV-1a, 64 bits (Fowler, Noll, Vo; draft-eastlake-fnv): a digest that is the same on every
//! machine and in every run.

/// A digest in the making.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fnv1a(u64);

impl Default for Fnv1a {
    fn default() -> Fnv1a {
        Fnv1a(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv1a {
    /// Returns the digest with these bytes added.
    #[must_use]
    pub(crate) fn bytes(self, bytes: impl IntoIterator<Item = u8>) -> Fnv1a {
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        Fnv1a(bytes.into_iter().fold(self.0, step))
    }

    /// Returns the digest with a number added, as eight bytes, little-endian.
    #[must_use]
    pub(crate) fn number(self, number: u64) -> Fnv1a {
        self.bytes(number.to_le_bytes())
    }

    /// Returns the digest with a string added. The length of the string comes first, so that
    /// neighbouring strings cannot run into each other.
    #[must_use]
    pub(crate) fn text(self, text: &str) -> Fnv1a {
        self.number(text.len() as u64).bytes(text.bytes())
    }

    /// The digest of all that was added.
    pub(crate) fn value(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::Fnv1a;

    #[test]
    fn the_drafts_test_vectors() {
        assert_eq!(Fnv1a::default().bytes(*b"").value(), 0xcbf2_9ce4_8422_2325);
        assert_eq!(Fnv1a::default().bytes(*b"foobar").value(), 0x8594_4171_f739_67e8);
    }
}
