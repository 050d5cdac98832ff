//! The state of the messages from one rank to another. The state consists of atomics, and
//! of the bytes beside them ([`Event::beside`]).

use crate::call_name::{NAME_BYTES, Name};
use crate::event::{Event, LoneEvent};
use crate::sync::{AtomicU64, Ordering};

/// The state of the messages from one rank to another. The counters are in bytes and wrap.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Channel {
    /// How many bytes the sender has written.
    pub(crate) head: LoneEvent,
    /// How many bytes the receiver has taken.
    pub(crate) tail: LoneEvent,
    /// Changes when one more call of either side waits for its turn at this channel, when the
    /// receiver has written `expects`, and when the sender has taken back its message.
    pub(crate) order: Event,
    /// The messages for which the receiver waits, while the message in the ring is for none of its
    /// calls.
    pub(crate) expects: Expected,
}

/// The names of the receives that wait at a channel whose message has another name.
///
/// The word `state` also says who may touch the message in the ring. While it is 0, the receiver
/// may read the message, and the sender may not take it back. While it holds a tag, the receiver
/// leaves the message alone, and the sender may take it back. While it is [`TAKING_BACK`], the
/// sender takes its message back, and the receiver waits.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Expected {
    /// 0, the tag of the receive that is inside the place, or [`TAKING_BACK`].
    state: AtomicU64,
    /// The text of the name of the receive that is inside the place, for messages.
    text: [AtomicU64; NAME_BYTES / 8],
    /// The tags of the receives that wait behind the receive that is inside the place, as many as
    /// there is room for; 0 in a free cell.
    waiting: [AtomicU64; 15],
}

/// The state of [`Expected`] while the sender takes back its message. No name has this tag.
const TAKING_BACK: u64 = u64::MAX;

impl Expected {
    /// Tells the sender the names under which the receiver waits, and lets the sender take back
    /// its message. The receiver calls this.
    pub(crate) fn publish(&self, name: &Name, waiting: impl Iterator<Item = u64>) {
        for (word, bytes) in self.text.iter().zip(name.text.chunks_exact(8)) {
            word.store(u64::from_ne_bytes(bytes.try_into().expect("eight bytes")), Ordering::Relaxed);
        }
        for (cell, tag) in self.waiting.iter().zip(waiting.chain(std::iter::repeat(0))) {
            cell.store(tag, Ordering::Relaxed);
        }
        self.state.store(name.tag, Ordering::Release);
    }

    /// Whether a receive has told the sender the names for which the receiver waits, or the sender
    /// takes its message back. This check costs one load.
    #[inline]
    pub(crate) fn is_in_use(&self) -> bool {
        self.state.load(Ordering::Acquire) != 0
    }

    /// Forbids the sender to take back its message. Returns whether the receiver may touch the
    /// message now; it may not while the sender is just taking the message back. The receiver
    /// calls this.
    #[inline]
    pub(crate) fn withdraw(&self) -> bool {
        let state = self.state.load(Ordering::Acquire);
        state == 0 || state != TAKING_BACK && self.exchange(state, 0)
    }

    /// Begins to take back the message if the receiver waits under a name for whose tag `has_call`
    /// returns true. Returns that name's tag. The sender calls this, and
    /// [`took_back`](Expected::took_back) afterwards.
    pub(crate) fn take_back(&self, has_call: impl Fn(u64) -> bool) -> Option<u64> {
        let state = self.state.load(Ordering::Relaxed);
        if state == 0 {
            return None;
        }
        // The receiver may change the cells meanwhile. A name under which nobody waits any more
        // does no harm: the receiver then only finds once more that the message has another name.
        let waiting = self.waiting.iter().map(|cell| cell.load(Ordering::Relaxed)).filter(|tag| *tag != 0);
        let tag = std::iter::once(state).chain(waiting).find(|tag| has_call(*tag))?;
        self.exchange(state, TAKING_BACK).then_some(tag)
    }

    /// Ends what [`take_back`](Expected::take_back) began: the receiver may look at the ring
    /// again.
    pub(crate) fn took_back(&self) {
        self.state.store(0, Ordering::Release);
    }

    fn exchange(&self, from: u64, to: u64) -> bool {
        // The receiver may have withdrawn the tag, looked at the message, and published the tag
        // again. The sender's writes must then come after the receiver's last look. So `publish`
        // releases, and this exchange acquires.
        self.state.compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Returns the name of the receive that is inside, while the message in the ring has another
    /// name.
    pub(crate) fn name(&self) -> Option<Name> {
        let tag = self.state.load(Ordering::Acquire);
        let mut text = [0; NAME_BYTES];
        for (word, bytes) in self.text.iter().zip(text.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        (tag != 0 && tag != TAKING_BACK).then_some(Name { tag, text })
    }
}
