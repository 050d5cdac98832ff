//! The layout of a recording: which word holds which value.
//!
//! A recording is [`WORDS`] words of 64 bits, in the byte order of the machine:
//!
//! ```text
//! word      0  header       512 words   who writes, which clock, the worlds, the next place in the ring
//!         512  channels    8192 words   256 channels of 32 words: one for each mesh dimension and agreement scope
//!        8704  ring       16384 words   the last 2048 calls of all channels, 8 words each
//!       25088  members     4096 words   the world ranks of the channels' members, two in a word
//!       29184  texts       1536 words   the last 64 texts of agreements, 24 words each
//! ```
//!
//! Every word is written by one atomic store, so no reader sees half of one. A slot of several
//! words that is written more than once has a stamp in its first word. The writer sets the stamp to
//! an odd number before it changes the slot, and to the next even number afterwards. A reader that
//! finds an odd stamp skips the slot. A reader that looks at a live process may read a slot while
//! it is written. So it copies the memory three times, and takes the second copy of those slots
//! whose stamps are equal in the first and the third. When a call ends, the writer sets its end and
//! then its state, and leaves the stamp of the call as it is.

/// The first word of every recording: "dm-rec" and the version of this layout, 3.
pub const MAGIC: u64 = u64::from_le_bytes(*b"dm-rec\x00\x03");

/// The number of words of a recording: 240 KiB.
pub const WORDS: usize = TEXTS + TEXT_COUNT * TEXT_WORDS;

/// The words of the header.
pub mod header {
    /// [`MAGIC`](super::MAGIC). It is written last, so a recording that has it is complete.
    pub const MAGIC: usize = 0;
    /// The kind of the clock: see [`clock`](crate::clock).
    pub const CLOCK: usize = 1;
    /// The ticks, the monotonic time and the real time (both in nanoseconds) of one moment, when
    /// the recording began.
    pub const BEGAN: usize = 2;
    /// These three values of a later moment. The writer renews them from time to time, so that
    /// a reader can compute the length of a tick from a recording whose process is gone. They have
    /// the stamp [`LATER_STAMP`].
    pub const LATER: usize = 5;
    /// The writing process: its process number, in its own process-id namespace.
    pub const PID: usize = 8;
    /// How many calls the process has begun: the number of the next one. Call `n` stands at place
    /// `n % 2048` of the ring.
    pub const NEXT_CALL: usize = 9;
    /// How many channels were opened. The channels 0 to 255 have places of their own; later ones
    /// take the places of channels that were closed, or are not recorded.
    pub const CHANNELS_OPENED: usize = 10;
    /// How many words of the members are in use.
    pub const MEMBERS_USED: usize = 11;
    /// How many texts were written: the number of the next one.
    pub const NEXT_TEXT: usize = 12;
    /// How many channels could not be recorded because all places were taken.
    pub const CHANNELS_LEFT_OUT: usize = 13;
    /// The version of the library, as bytes of text: three words.
    pub const VERSION: usize = 14;
    /// The number of words of [`VERSION`].
    pub const VERSION_WORDS: usize = 3;
    /// The stamp of [`LATER`].
    pub const LATER_STAMP: usize = 17;
    /// How many worlds the process has joined: the number of the last one.
    pub const WORLDS_JOINED: usize = 18;
    /// The name of the host, as bytes of text: eight words.
    pub const HOST: usize = 20;
    /// The number of words of [`HOST`].
    pub const HOST_WORDS: usize = 8;
    /// 0 in the recording of a process. In a copy for another host: the state of the process when
    /// it was copied, as the number that the copying tool gives this state, plus 1. Then [`LATER`]
    /// is the moment of the copy.
    pub const COPIED: usize = 28;
    /// The worlds: eight of 48 words.
    pub const WORLDS: usize = 64;
    /// The number of worlds that are recorded.
    pub const WORLD_COUNT: usize = 8;
    /// The number of words of a world.
    pub const WORLD_WORDS: usize = 48;
}

/// The words of a world.
pub mod world {
    /// The stamp; 0 where no world is recorded here.
    pub const STAMP: usize = 0;
    /// The key of the world: equal on all its ranks, and on no rank of another world.
    pub const KEY: usize = 1;
    /// This process's rank (low 32 bits) and the number of ranks (high 32 bits).
    pub const RANK: usize = 2;
    /// The epoch (low 32 bits), and whether the world has ended (bit 32).
    pub const EPOCH: usize = 3;
    /// The job's id, as bytes of text: 16 words.
    pub const JOB: usize = 4;
    /// The number of words of [`JOB`].
    pub const JOB_WORDS: usize = 16;
    /// The address of the store, as bytes of text: 16 words. Empty where the world has none.
    pub const STORE: usize = 20;
    /// The number of words of [`STORE`].
    pub const STORE_WORDS: usize = 16;
    /// The launcher, as bytes of text: 4 words.
    pub const LAUNCHER: usize = 36;
    /// The number of words of [`LAUNCHER`].
    pub const LAUNCHER_WORDS: usize = 4;
    /// The number of the world. The worlds of a process have the numbers 1, 2 and so on in the
    /// order of joining. Places are used again, numbers are not.
    pub const NUMBER: usize = 40;
}

/// Where the channels begin.
pub const CHANNELS: usize = 512;
/// The number of channels.
pub const CHANNEL_COUNT: usize = 256;
/// The number of words of a channel.
pub const CHANNEL_WORDS: usize = 32;

/// The words of a channel. Those from [`CALLS_BEGUN`](channel::CALLS_BEGUN) to
/// [`DIGEST`](channel::DIGEST), and [`CALLS_FAILED`](channel::CALLS_FAILED), change with each call,
/// without the stamp. Each of these words is right by itself, but a copy may have some words from
/// before a call and others from after it.
pub mod channel {
    /// The stamp; 0 where no channel has this place.
    pub const STAMP: usize = 0;
    /// The kind (bits 0 to 7): 0 a mesh dimension, 1 an agreement scope, 2 a raw communicator. Its
    /// state (bits 8 to 15): 0 open, 1 failed, 2 closed. The [number](super::world::NUMBER) of its
    /// world (bits 16 to 63); 0 for none.
    pub const KIND: usize = 1;
    /// The key of the group: equal on all its ranks, and on no rank of another group.
    pub const KEY: usize = 2;
    /// This process's rank in the group (low 32 bits) and the size of the group (high 32 bits).
    pub const RANK: usize = 3;
    /// Where the world ranks of the members stand, as the number of the first 32-bit value in the
    /// members. [`NO_MEMBERS`] where they did not fit.
    pub const MEMBERS: usize = 4;
    /// The value of [`MEMBERS`] for members that are not recorded.
    pub const NO_MEMBERS: u64 = u64::MAX;
    /// How many collective calls were begun. The first one has the number 1.
    pub const CALLS_BEGUN: usize = 5;
    /// The number of the last collective call that has ended well.
    pub const CALLS_ENDED: usize = 6;
    /// How many other calls were begun: sends, receives, and operations that the program itself
    /// issues on the communicator.
    pub const MESSAGES_BEGUN: usize = 7;
    /// The number, in the ring, of the last collective call that was begun, plus 1. 0 for none.
    pub const LAST_CALL: usize = 8;
    /// The digest of all collective calls that were begun: equal on all ranks that have begun equal
    /// calls in one order.
    pub const DIGEST: usize = 9;
    /// The name, as bytes of text: 20 words.
    pub const NAME: usize = 10;
    /// The number of words of [`NAME`].
    pub const NAME_WORDS: usize = 20;
    /// The number of the process's next call when the group got this place. Earlier calls in the
    /// ring belong to a group that had the place before.
    pub const FIRST_CALL: usize = 30;
    /// How many collective calls have ended with an error.
    pub const CALLS_FAILED: usize = 31;
}

/// Where the ring of calls begins.
pub const RING: usize = CHANNELS + CHANNEL_COUNT * CHANNEL_WORDS;
/// The number of calls that the ring holds.
pub const CALL_COUNT: usize = 2048;
/// The number of words of a call.
pub const CALL_WORDS: usize = 8;

/// The words of a call.
pub mod call {
    /// The number of the call in this process, plus 1, times 2. It is one less (odd) while the
    /// call is written.
    pub const STAMP: usize = 0;
    /// The channel (bits 0 to 15), the operation (bits 16 to 23), the type of the elements (bits 24
    /// to 31), the reduction (bits 32 to 39) and the state (bits 40 to 47): see
    /// [`EntryState`](crate::EntryState).
    pub const WHAT: usize = 1;
    /// The number of the call in its channel: collective calls and other calls are counted apart.
    pub const NUMBER: usize = 2;
    /// The number of elements; for an agreement the number of its text.
    pub const COUNT: usize = 3;
    /// The root or the peer as its rank in the group (low 32 bits; all ones for none), and the low
    /// 32 bits of the stream's address.
    pub const PEER: usize = 4;
    /// When the call was begun, in ticks. A call that is queued in a group has the time at which it
    /// was queued, until the group runs. In a call of few elements it is 0 at first, for less than
    /// a microsecond, because the writer reads the clock only once the other ranks can see the
    /// call.
    pub const BEGUN: usize = 5;
    /// When it ended, in ticks. 0 while it runs. For a call that did not wait for another rank,
    /// this is the time at which it began. A call of few elements that has waited has the time of
    /// the last look before the end of the wait, some hundred nanoseconds earlier.
    pub const ENDED: usize = 6;
    /// The channel's digest after this call.
    pub const DIGEST: usize = 7;
}

/// Where the members begin.
pub const MEMBERS: usize = RING + CALL_COUNT * CALL_WORDS;
/// The number of words for members.
pub const MEMBER_WORDS: usize = 4096;

/// Where the texts begin.
pub const TEXTS: usize = MEMBERS + MEMBER_WORDS;
/// The number of texts. Text `n` stands at place `n % 64`.
pub const TEXT_COUNT: usize = 64;
/// The number of words of a text: the stamp (the number of the text, plus 1, times 2; one less
/// while it is written), and 184 bytes.
pub const TEXT_WORDS: usize = 24;

const _: () = assert!(WORDS * 8 <= 256 * 1024);
