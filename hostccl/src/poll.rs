//! The answer of an operation that was polled: it is done, or it is blocked by something.

/// What a polled operation answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Poll {
    /// The operation is done, and its result is in place.
    Done,
    /// The operation cannot continue before the blocker's word differs from `seen`.
    Blocked {
        /// The value that the operation saw in the blocker's word.
        seen: u32,
        /// What the operation waits for.
        blocker: Blocker,
    },
}

/// What a blocked operation waits for. `Comm::event` has the word that changes when the wait ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blocker {
    /// Some ranks have not joined the communicator yet.
    Arrivals,
    /// Some ranks have not ended the step of that number.
    Step(u64),
    /// The next bytes from that rank have not been written yet.
    From(usize),
    /// That rank has not taken the bytes that were sent to it, and there is no reason to send
    /// another message first.
    To {
        /// The receiver.
        peer: usize,
        /// What the channel's word `order` held. It changes when there may be such a reason.
        order: u32,
    },
    /// Another thread of this rank has its turn. Its call has a deadline, so this wait needs none.
    Turn,
    /// That rank has not sent a message under this call's name, and no thread of this rank has made
    /// the call for which the message in the ring is.
    OtherCall(usize),
    /// This rank is rank 0, and the ranks whose calls differed in the step of that number have no
    /// call under one common name yet.
    CommonName(u64),
    /// Rank 0 has not decided yet which of the names in the step of that number goes first.
    Decision(u64),
    /// That rank has not made the segment of a smaller communicator yet. The failure of this
    /// communicator does not end the wait, because the operation itself looks for what does.
    NewSegment(usize),
}
