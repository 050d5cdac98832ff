//! The program `devicemesh` of the Python wheel. The tool is in the library beside it (lib.rs).

use std::env;
use std::ffi::c_int;
use std::process::ExitCode;

use libloading::Library;

fn main() -> ExitCode {
    match tool() {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("devicemesh: {error}");
            ExitCode::FAILURE
        }
    }
}

fn tool() -> Result<u8, String> {
    let program = env::current_exe().map_err(|error| format!("cannot find out where this program is: {error}"))?;
    let path = program.with_file_name("libdevicemesh.so");
    // SAFETY: the library of this wheel may be loaded at any time, and its function has this type.
    // An exit code fits one byte.
    unsafe {
        let library = Library::new(&path).map_err(|error| error.to_string())?;
        let main = library.get::<unsafe extern "C" fn() -> c_int>(b"devicemesh_tool_main\0");
        Ok(main.map_err(|error| error.to_string())?() as u8)
    }
}
