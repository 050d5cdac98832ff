//! The library of the Python wheel: libdevicemesh.so, and the tool as one function more.
//!
//! The tool is linked to the whole library. As a program of its own it would have a second copy of
//! the library's machine code, and the wheel would be two thirds larger.

use std::ffi::c_int;
use std::panic::catch_unwind;

// Links the library, whose functions are then exported from here.
use devicemesh as _;

/// Does what the command line of this process asks the tool for, and returns the exit code. The
/// wheel's program `devicemesh` calls it, and nobody else may.
#[unsafe(no_mangle)]
pub extern "C" fn devicemesh_tool_main() -> c_int {
    // Rust's own main function returns 101 after a panic, too. The panic has printed its message.
    catch_unwind(devicemesh_tool::main).map_or(101, c_int::from)
}
