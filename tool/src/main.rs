//! The program `devicemesh`.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(devicemesh_tool::main())
}
