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
    /// When to show the line that has not ended. It may be a prompt, so only the rank that reads
    /// the input has such a time.
    pub prompt: Option<Instant>,
}
