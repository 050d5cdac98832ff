//! A buffer for the bytes of a connection that were read and not parsed.

/// A buffer of a fixed size.
#[derive(Debug)]
pub(super) struct Inbox {
    /// The bytes from `start` to `end` wait to be parsed.
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Inbox {
    pub(super) fn new(bytes: usize) -> Inbox {
        Inbox { buffer: vec![0; bytes].into_boxed_slice(), start: 0, end: 0 }
    }

    /// The bytes that wait to be parsed.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Drops the first bytes, which are parsed.
    pub(super) fn drop_first(&mut self, bytes: usize) {
        self.start += bytes;
    }

    /// Returns the free part of the buffer. It has at least `wanted` bytes, unless the bytes that
    /// wait take too much of the buffer.
    pub(super) fn room(&mut self, wanted: usize) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.buffer.len() - self.end < wanted {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.buffer[self.end..]
    }

    /// Notes that bytes were written to the beginning of the free part.
    pub(super) fn wrote(&mut self, bytes: usize) {
        self.end += bytes;
    }
}
