//! The keys by which the nodes of a job know each other (see [`super`]).

use std::fmt::Display;

pub const OVER: &str = "run/over";
pub const NODES: &str = "run/nodes";
pub const SERVED: &str = "run/served";
pub const GONE: &str = "run/gone";

pub fn node(arrival: impl Display) -> String {
    format!("run/node/{arrival}")
}

pub fn finished(arrival: u32) -> String {
    format!("run/finished/{arrival}")
}

pub fn gone(count: usize) -> String {
    format!("{GONE}/{count}")
}
