//! The join of a communicator over several hosts.
//!
//! The process that made the unique id serves the join: a thread of it, "dm-join", listens at the
//! address in the id. The maker need not be a rank. Each rank connects, both sides prove that they
//! know the id's token, and then they exchange messages:
//!
//! | rank | maker | content |
//! |---|---|---|
//! | `Register` | | who the rank is, the segment that it offers, and the contact of its wire |
//! | | `StageDone` | which ranks have done their part in the stage, for the message at a deadline |
//! | | `Table` | what all ranks have registered, once all have |
//! | `Opened` | | whose segment this rank has opened: that of the lowest rank of its host |
//! | | `Groups` | whose segment each rank has opened: ranks that opened one segment are one host |
//! | `Mapped` | | this rank has its seat in the segment of its host |
//! | | `Go` | all ranks have their seats |
//! | `Failed` | `Failed` | the join is over for all ranks, with the reason |
//!
//! Where a secret is set, everything after the proofs is encrypted (module `noise`).
//!
//! Files, from the bottom up: `message` (the messages), `link` (a connection), `greeting` (the
//! proofs), `client` (the rank's side), `meeting` (the state of one join at the maker), `accepted`
//! (a connection at the maker), `shared` and `server` (the maker's thread).

mod accepted;
#[cfg(any(test, fuzzing))]
pub(crate) mod any_bytes;
pub(crate) mod client;
mod greeting;
mod link;
mod meeting;
mod message;
pub(crate) mod server;
mod shared;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use self::greeting::wire_token;
use self::greeting::{ANSWER_BYTES, HELLO_BYTES};
pub(crate) use self::message::{Member, Message, Stage};

/// Returns the bytes that bind an encrypted session to the greeting before it.
fn prologue(hello: &[u8; HELLO_BYTES], answer: &[u8; ANSWER_BYTES]) -> Vec<u8> {
    [b"hostccl join 1:", &hello[..], answer].concat()
}
