//! A trunk is a connection that carries the connections of many clients, its *channels*.
//!
//! After [`op::TRUNK`](super::frame::op::TRUNK), both sides of a connection send frames. A frame
//! begins with two words of 32 bits, the number of a channel and one of these:
//!
//! | second word | meaning |
//! |---|---|
//! | 0 | the channel has ended |
//! | 1 to [`MOST`] | as many bytes of the channel follow |
//! | [`BEGINS`] | the channel begins |
//! | [`BEGINS`] + n | the sender of this frame has taken n bytes of the channel |
//!
//! The side that has begun the trunk begins the channels, too, and gives them growing numbers. Each
//! side may send [`WINDOW`] bytes of a channel before the other side has taken
//! them. So a client that does not read holds up no other client of its trunk.

use super::frame::Malformed;

/// How many bytes a frame has before the bytes of its channel.
pub(super) const HEADER: usize = 8;
/// The most bytes of a channel in one frame.
pub(super) const MOST: usize = 8 << 10;
/// How many bytes of a channel may be on their way in one direction. A small request waits behind
/// at most so many bytes of each other client of its trunk.
pub(super) const WINDOW: usize = 16 << 10;
/// The second word of the frame that begins a channel. With a number of bytes in its other bits,
/// the word says that this many bytes were taken.
const BEGINS: u32 = 1 << 31;

/// The meaning of a frame for its channel.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Frame<'a> {
    /// These bytes are the channel's next ones.
    Bytes(&'a [u8]),
    /// The channel begins.
    Begins,
    /// The other side has taken this many bytes.
    Taken(usize),
    /// The channel has ended.
    End,
}

/// Returns the length of the frame that `bytes` begins with; `None` while more bytes are needed.
pub(super) fn length(bytes: &[u8]) -> Result<Option<usize>, Malformed> {
    let Some((_, word, _)) = header(bytes) else { return Ok(None) };
    let following = if word & BEGINS == 0 { word as usize } else { 0 };
    if following > MOST || (word & !BEGINS) as usize > WINDOW {
        return Err(Malformed(format!("a frame of a channel with the word {word:#x}")));
    }
    Ok(Some(HEADER + following).filter(|length| *length <= bytes.len()))
}

/// Returns the channel of a whole frame, and what the frame says.
pub(super) fn frame(bytes: &[u8]) -> Option<(u32, Frame<'_>)> {
    let (channel, word, rest) = header(bytes)?;
    let frame = match word {
        0 => Frame::End,
        BEGINS => Frame::Begins,
        word if word & BEGINS != 0 => Frame::Taken((word & !BEGINS) as usize),
        word => Frame::Bytes(rest.get(..word as usize)?),
    };
    Some((channel, frame))
}

fn header(bytes: &[u8]) -> Option<(u32, u32, &[u8])> {
    let (channel, rest) = bytes.split_first_chunk()?;
    let (word, rest) = rest.split_first_chunk()?;
    Some((u32::from_le_bytes(*channel), u32::from_le_bytes(*word), rest))
}

/// Appends bytes of a channel, in as many frames as they need.
pub(super) fn put_bytes(frames: &mut Vec<u8>, channel: u32, bytes: &[u8]) {
    for piece in bytes.chunks(MOST) {
        frames.extend_from_slice(&with_word(channel, piece.len() as u32));
        frames.extend_from_slice(piece);
    }
}

/// Returns the frame that begins a channel.
pub(super) fn begin(channel: u32) -> [u8; HEADER] {
    with_word(channel, BEGINS)
}

/// Returns the frame that says that this many bytes of a channel were taken, which is at least one.
pub(super) fn taken(channel: u32, taken: usize) -> [u8; HEADER] {
    with_word(channel, BEGINS | taken as u32)
}

/// Returns the frame that ends a channel.
pub(super) fn end(channel: u32) -> [u8; HEADER] {
    with_word(channel, 0)
}

fn with_word(channel: u32, word: u32) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..4].copy_from_slice(&channel.to_le_bytes());
    header[4..].copy_from_slice(&word.to_le_bytes());
    header
}

/// How many bytes of a channel one side may send, and how many have come to it.
#[derive(Debug)]
pub(super) struct Window {
    /// How many bytes this side may still send.
    room: usize,
    /// How many bytes have come and were not taken yet.
    held: usize,
    /// How many bytes were taken of which the other side does not know yet.
    taken: usize,
}

impl Window {
    /// Returns the window of a channel that is new.
    pub(super) fn new() -> Window {
        Window { room: WINDOW, held: 0, taken: 0 }
    }

    /// Returns how many bytes this side may send now.
    pub(super) fn room(&self) -> usize {
        self.room
    }

    /// Notes that this side has sent this many bytes, for which there was room.
    pub(super) fn sent(&mut self, count: usize) {
        self.room -= count;
    }

    /// Notes that the other side has taken this many bytes. Fails where this side has not sent
    /// them.
    pub(super) fn widen(&mut self, count: usize) -> Result<(), Malformed> {
        self.room += count;
        match self.room <= WINDOW {
            true => Ok(()),
            false => Err(Malformed(format!("{count} bytes of a channel were taken that were not sent"))),
        }
    }

    /// Notes that this many bytes have come. Fails where the other side was not allowed to send
    /// them.
    pub(super) fn came(&mut self, count: usize) -> Result<(), Malformed> {
        self.held += count;
        match self.held + self.taken <= WINDOW {
            true => Ok(()),
            false => Err(Malformed(format!("{count} bytes of a channel more than its window"))),
        }
    }

    /// Notes that this many of the bytes that have come were taken.
    pub(super) fn took(&mut self, count: usize) {
        self.held -= count;
        self.taken += count;
    }

    /// Returns how many bytes the other side should be told of now, if any. A frame for each few
    /// bytes would cost more than it helps.
    pub(super) fn take_untold(&mut self) -> Option<usize> {
        (self.taken >= WINDOW / 2).then(|| std::mem::take(&mut self.taken))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_read_as_they_are_written() {
        let mut bytes = Vec::new();
        let text = vec![7; MOST + 3];
        put_bytes(&mut bytes, 5, &text);
        bytes.extend([begin(6), taken(6, WINDOW), end(u32::MAX)].concat());
        let mut rest = &bytes[..];
        let expected = [
            (5, Frame::Bytes(&text[..MOST])),
            (5, Frame::Bytes(&text[MOST..])),
            (6, Frame::Begins),
            (6, Frame::Taken(WINDOW)),
            (u32::MAX, Frame::End),
        ];
        for expected in expected {
            let whole = length(rest).unwrap().unwrap();
            // Every shorter piece of the frame needs more bytes.
            assert!((0..whole).all(|short| length(&rest[..short]) == Ok(None)));
            assert_eq!(frame(&rest[..whole]), Some(expected));
            rest = &rest[whole..];
        }
        assert!(rest.is_empty());
    }

    #[test]
    fn no_frame_is_longer_than_the_most() {
        for word in [MOST as u32 + 1, BEGINS - 1, BEGINS | (WINDOW as u32 + 1), u32::MAX] {
            assert!(length(&with_word(1, word)).is_err(), "{word:#x}");
        }
    }

    #[test]
    fn a_window_refuses_what_was_not_agreed() {
        let mut window = Window::new();
        window.sent(WINDOW);
        assert_eq!(window.room(), 0);
        assert!(window.widen(WINDOW).is_ok() && window.widen(1).is_err());

        let mut window = Window::new();
        assert!(window.came(WINDOW).is_ok());
        window.took(WINDOW / 2 - 1);
        assert_eq!(window.take_untold(), None);
        window.took(1);
        // The bytes that were taken count until the other side is told.
        assert!(window.came(1).is_err());
        assert_eq!(window.take_untold(), Some(WINDOW / 2));
    }
}
