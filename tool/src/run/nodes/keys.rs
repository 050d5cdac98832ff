//! The keys by which the nodes of a job know each other (see [`super`]). They begin as all keys of
//! the library do, because the store keeps room for such keys when it is full.

use std::fmt::Display;

/// The beginning of the keys of a job.
pub const PREFIX: &str = "devicemesh/run/";
pub const OVER: &str = "devicemesh/run/over";
pub const AT_ONCE: &str = "devicemesh/run/at_once";
pub const SUCCESS: &str = "devicemesh/run/success";
pub const NODES: &str = "devicemesh/run/nodes";
pub const SERVED: &str = "devicemesh/run/served";
pub const GONE: &str = "devicemesh/run/gone";
/// The server itself writes this key, where it has refused connections because of their secrets.
pub const LOCKED_OUT: &str = "devicemesh/refused";
/// The number of the newest job in the store of a service, or of one before it.
pub const JOBS: &str = "devicemesh/run/jobs";
/// Set by the node that begins a job in the store of a service. It is a key of that job.
pub const FIRST: &str = "first";
pub const STRANGERS: &str = "devicemesh/run/strangers";

pub fn node(arrival: impl Display) -> String {
    format!("devicemesh/run/node/{arrival}")
}

pub fn finished(arrival: u32) -> String {
    format!("devicemesh/run/finished/{arrival}")
}

pub fn gone(count: usize) -> String {
    format!("{GONE}/{count}")
}

/// The arrival number of the node that has taken the post of a node that is lost.
pub fn heir(lost: u32) -> String {
    format!("devicemesh/run/heir/{lost}")
}

pub fn stranger(count: impl Display) -> String {
    format!("devicemesh/run/stranger/{count}")
}

/// A question for the node with that arrival number. The node takes the key away.
pub fn question(arrival: u32) -> String {
    format!("devicemesh/run/question/{arrival}")
}

/// The answer of a node to a question. `asker` is a text that no other question has.
pub fn answer(asker: &str, arrival: u32) -> String {
    format!("devicemesh/run/answer/{asker}/{arrival}")
}

/// How many of the processes that answer have read that nobody asks any more.
pub const LEFT: &str = "devicemesh/run/left";
