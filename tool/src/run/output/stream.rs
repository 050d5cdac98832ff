//! The pipe between a rank and the tool.

use std::fs::File;
use std::time::Instant;

use super::lines::Lines;
use super::logs::Log;

/// One output of one rank.
pub struct Stream {
    pub rank: u32,
    /// The end from which the tool reads. It is non-blocking.
    pub pipe: File,
    /// Whether this is standard error.
    pub is_error: bool,
    /// The rank's file, where there is one that can be written.
    pub log: Option<Log>,
    /// The line that the rank has begun and not ended.
    pub lines: Lines,
    /// When the line that has not ended is shown, where that is due: only of the rank that reads
    /// the input, because it may be a prompt.
    pub prompt: Option<Instant>,
}
