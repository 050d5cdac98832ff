//! The frames of a connection. A frame is a header of 48 bytes, and as many bytes as the header
//! says.

use crate::wire::{EAGER_BYTES, NOTICE_BYTES, Tag};

/// The length of a header in bytes.
pub(super) const HEADER: usize = 48;

/// The most bytes of a long message that go in one frame. Frames of other messages go in between.
pub(super) const PIECE: usize = 512 << 10;

/// The value of `extra` in a `Void` frame whose sender has left the communicator.
pub(super) const OVER: usize = 1;

/// The outcome of a frame: an error is the reason why the connection cannot go on.
pub(super) type Judged<T> = Result<T, String>;

/// The meaning of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// A whole short message, which the receiver need not have asked for.
    Eager = 1,
    /// A piece of a message for which the receiver has asked. `extra` is the message's length.
    Data = 2,
    /// A message waits at the sender until the receiver asks. `extra` is the message's length.
    Announce = 3,
    /// The receiver asks for a message. `extra` is the room of its buffer.
    Want = 4,
    /// The message for which the receiver has asked is longer than its buffer. `extra` is the
    /// message's length.
    TooLong = 5,
    /// The receiver has taken short messages. `extra` is their cost, which the sender may use
    /// again.
    Credit = 6,
    /// A notice about a communicator.
    Notice = 7,
    /// The sender has no use for the connection any more.
    Idle = 8,
    /// The sender has a use for the connection again.
    Busy = 9,
    /// Both sides have no use for the connection: the sender is about to close it. `extra` is the
    /// number of `Idle` frames that the sender has read from the connection.
    Close = 10,
    /// An answer to `Close`: the sender sends nothing more.
    Closed = 11,
    /// A message will not come, because its send was cancelled or the sending rank has left the
    /// communicator. The receiver drops the part that has come. `extra` is [`OVER`] where the rank
    /// has left.
    Void = 12,
    /// The sender is alive. The frame goes when nothing else is on the way. The other host's
    /// kernel acknowledges the frame, so both hosts hear of each other.
    Alive = 13,
    /// The other answer to `Close`: the connection stays, because the sender uses it, has
    /// something to send, or has said more `Idle` frames than `Close` counts.
    Open = 14,
}

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// The meaning of the frame.
    pub(super) kind: Kind,
    /// How many bytes follow the header.
    pub(super) bytes: usize,
    /// The message's tag. A notice uses only the communicator in it.
    pub(super) tag: Tag,
    /// The message's number among those of its tag, from 0.
    pub(super) index: u64,
    /// A number whose meaning depends on the kind.
    pub(super) extra: u64,
}

impl Header {
    /// Returns a header without a message.
    pub(super) fn plain(kind: Kind, extra: u64) -> Header {
        Header { kind, bytes: 0, tag: Tag { comm: 0, stream: 0, from: 0, to: 0 }, index: 0, extra }
    }

    /// Returns the header's bytes.
    pub(super) fn to_bytes(self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[0] = self.kind as u8;
        out[4..8].copy_from_slice(&(self.bytes as u32).to_le_bytes());
        out[8..16].copy_from_slice(&self.tag.comm.to_le_bytes());
        out[16..24].copy_from_slice(&self.tag.stream.to_le_bytes());
        out[24..28].copy_from_slice(&self.tag.from.to_le_bytes());
        out[28..32].copy_from_slice(&self.tag.to.to_le_bytes());
        out[32..40].copy_from_slice(&self.index.to_le_bytes());
        out[40..48].copy_from_slice(&self.extra.to_le_bytes());
        out
    }

    /// Reads a header. Fails with the reason where the bytes are no header, or the length is longer
    /// than that kind of frame may be.
    pub(super) fn parse(raw: &[u8; HEADER]) -> Result<Header, String> {
        let four = |at: usize| u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
        let eight = |at: usize| u64::from(four(at)) | u64::from(four(at + 4)) << 32;
        let kind = match raw[0] {
            1 => Kind::Eager,
            2 => Kind::Data,
            3 => Kind::Announce,
            4 => Kind::Want,
            5 => Kind::TooLong,
            6 => Kind::Credit,
            7 => Kind::Notice,
            8 => Kind::Idle,
            9 => Kind::Busy,
            10 => Kind::Close,
            11 => Kind::Closed,
            12 => Kind::Void,
            13 => Kind::Alive,
            14 => Kind::Open,
            other => return Err(format!("a frame of the unknown kind {other}")),
        };
        let (bytes, extra) = (four(4) as usize, eight(40));
        let most = match kind {
            Kind::Eager => EAGER_BYTES,
            Kind::Data => PIECE,
            Kind::Notice => NOTICE_BYTES,
            _ => 0,
        };
        if bytes > most || raw[1..4] != [0; 3] {
            return Err(format!("a frame of kind {} with {bytes} bytes, more than {most}", raw[0]));
        }
        if extra > isize::MAX as u64 {
            return Err(format!("a frame of kind {} with the number {extra}", raw[0]));
        }
        let tag = Tag { comm: eight(8), stream: eight(16), from: four(24), to: four(28) };
        Ok(Header { kind, bytes, tag, index: eight(32), extra })
    }
}
