//! The answer of an operation that was polled: it is done, or it is blocked by something.

/// The answer of an operation that was polled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Poll {
    /// The operation is done, and its result is in place.
    Done,
    /// The operation cannot continue before the blocker's word differs from `seen`.
    Blocked {
        /// The value that the operation saw in the blocker's word.
        seen: u32,
        /// The reason why the operation is blocked.
        blocker: Blocker,
    },
    /// The operation waits for a connection, for the wire or for time, and not for a word of a
    /// communicator. The operation checks a deadline of its own.
    Outside,
}

/// The reason why an operation is blocked. `Comm::event` returns the word that changes when the
/// reason goes away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blocker {
    /// Some ranks have not joined the communicator yet.
    Arrivals,
    /// Some ranks have not ended the step of that number.
    Step(u64),
    /// This rank has seat 0 of its host, and waits until all other ranks of the host have ended
    /// the step of that number, because seat 0 ends a step last.
    OtherSeats(u64),
    /// The next bytes from the rank with that seat have not been written yet.
    From(usize),
    /// The receiver has not taken this rank's message, and has not asked for another message of
    /// this rank first.
    To {
        /// The receiver's seat.
        peer: usize,
        /// The value of the channel's word `order`. The word changes when there may be a reason to
        /// send another message first.
        order: u32,
    },
    /// Another thread of this rank has its turn. Its call has a deadline, so this wait needs none.
    Turn,
    /// The message in the ring from the rank with that seat has another name than this call, and no
    /// thread of this rank has made a call with the message's name.
    OtherCall(usize),
    /// This rank has seat 0, and the ranks whose calls differed in the step of that number have no
    /// call under one common name yet.
    CommonName(u64),
    /// Seat 0 has not decided yet which of the names in the step of that number goes first.
    Decision(u64),
    /// This rank has the seat 0 of its host. The hosts, whose calls differed in the step of that
    /// number, have no call under one common name yet.
    HostNames {
        /// The step in which the seats of this host posted their calls.
        step: u64,
        /// The value of the wire's word `moved`, which changes when another host tells other names.
        moved: u32,
    },
    /// Nothing has come yet from that rank of the whole communicator, which is on another host.
    /// That rank may itself wait for a third rank. So a call whose time is up asks that rank before
    /// the call fails.
    Wire {
        /// The rank.
        from: usize,
    },
    /// A message to or from that rank of another host waits for the rank's part. The rank may wait
    /// for another one, as with [`Wire`](Blocker::Wire).
    RemoteMessage {
        /// The other rank, in the whole communicator.
        peer: usize,
        /// Whether this rank sends.
        sends: bool,
        /// The tag of the message's name.
        tag: u64,
    },
    /// The rank with that seat has not made the segment of a smaller communicator yet. A failure of
    /// this communicator does not end the wait. The operation itself checks the deadline and
    /// whether the remaining ranks live.
    NewSegment(usize),
}
