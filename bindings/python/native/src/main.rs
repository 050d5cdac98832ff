//! The program `devicemesh` of the Python wheel. The tool is in the library beside it (lib.rs).

use std::env;
use std::ffi::c_int;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use libloading::Library;

/// Whether standard output was closed when the program was started.
static STDOUT_WAS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Sets [`STDOUT_WAS_CLOSED`] before `main`, as the tool's own program does (tool/src/stdio.rs).
#[used]
// SAFETY: the loader calls each function of this section once, before `main` and on one thread.
// This function makes one system call and stores the outcome, so it needs nothing that is set up
// later.
#[unsafe(link_section = ".init_array")]
static LOOK_AT_STDOUT: extern "C" fn() = look_at_stdout;

extern "C" fn look_at_stdout() {
    // SAFETY: the call only asks about a number.
    let is_closed = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) } < 0;
    STDOUT_WAS_CLOSED.store(is_closed, Ordering::Relaxed);
}

fn main() -> ExitCode {
    match tool() {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("devicemesh: {error}; the tool of the Python package needs the package's library beside it");
            ExitCode::FAILURE
        }
    }
}

/// Runs the tool and returns its exit code.
fn tool() -> Result<u8, String> {
    let program = env::current_exe().map_err(|error| format!("cannot find out where this program is: {error}"))?;
    let path = program.with_file_name("libdevicemesh.so");
    let stdout_was_closed = c_int::from(STDOUT_WAS_CLOSED.load(Ordering::Relaxed));
    // SAFETY: loading this library has no preconditions, and its function has this type.
    let code = unsafe {
        let library = Library::new(&path).map_err(|error| error.to_string())?;
        let main = library.get::<unsafe extern "C" fn(c_int) -> c_int>(b"devicemesh_tool_main\0");
        main.map_err(|error| error.to_string())?(stdout_was_closed)
    };
    // The tool's exit codes are those of a process, so they fit.
    Ok(code as u8)
}
