//! The library of the Python wheel: libdevicemesh.so with one more function, which is the tool.
//!
//! The tool is linked to the whole library. As a program of its own it would have a second copy of
//! the library's machine code, and the wheel would be a third larger.

use std::ffi::c_int;
use std::io::{Write, stdout};
use std::panic::catch_unwind;

// Links the library, whose functions are then exported from here.
use devicemesh as _;

/// Does what the command line of this process asks the tool for, and returns the exit code.
/// `stdout_was_closed` is not 0 where the process was started without a standard output. Only the
/// wheel's program `devicemesh` may call this.
#[unsafe(no_mangle)]
pub extern "C" fn devicemesh_tool_main(stdout_was_closed: c_int) -> c_int {
    devicemesh_tool::note_closed_stdout(stdout_was_closed != 0);
    // Rust's own main function returns 101 after a panic, too. The panic has printed its message.
    let code = catch_unwind(devicemesh_tool::main).map_or(101, c_int::from);
    // The program has a standard library of its own, which does not know this one's output.
    let _ = stdout().flush();
    code
}
