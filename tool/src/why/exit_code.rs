//! The exit codes of `devicemesh why`.

/// Something is stuck.
pub const STUCK: u8 = 1;
/// There is no answer: what was named is not there, or the output cannot be written.
pub const NOT_MADE: u8 = 3;
