//! The exit codes of `devicemesh check`. They are the same on every rank.

/// Some collective gave wrong data.
pub const WRONG_DATA: u8 = 1;
/// The command line is wrong, or its shape does not fit the world.
pub const WRONG_COMMAND: u8 = 2;
/// The check could not be made, or its report could not be written. A report that cannot be written
/// is not [`WRONG_DATA`], because a full disk says nothing about the hosts that are checked.
pub const NOT_MADE: u8 = 3;
/// Something is slow, and `--fail-slow` asks to fail then.
pub const SLOW: u8 = 4;
/// `--timeout` has passed. The code is timeout(1)'s.
pub const TIMED_OUT: u8 = 124;
