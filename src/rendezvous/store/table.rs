//! The server's table keeps values, queues, barriers, last words, and which clients wait for what.
//! No sockets here.
//!
//! One call does a bounded amount of work, whatever a client asks for: a request that lists keys
//! becomes a [`Task`], which is carried out in steps; values are handed out by reference; what
//! hostile clients can make large is a BTreeMap, which never stops to copy all of itself.

mod leaving;
mod limits;
mod requests;
mod state;
mod task;
#[cfg(test)]
mod tests;
mod values;
mod waits;

pub(super) use limits::Refusal;
pub(super) use state::{Client, Replies, Table};
pub(super) use task::Task;
