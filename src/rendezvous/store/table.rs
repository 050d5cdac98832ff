//! The server's table keeps values, queues, barriers, last words, and which clients wait for what.
//! The table knows no sockets.
//!
//! One call does a bounded amount of work, whatever a client asks for. A request that lists keys
//! becomes a [`Task`], which is carried out in steps. Values are handed out by reference. A map
//! that hostile clients can make large is a BTreeMap, because a hash table copies all of itself at
//! once when it grows.

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
