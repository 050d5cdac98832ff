//! The tool `devicemesh`.
//!
//! Exit codes: 0 when all went well, that of the first rank that failed (128 + signal when a signal ended it), 124 when `--timeout` passed,
//! 126 or 127 when the program could not be started, 2 for a wrong command line, 1 for everything else.

mod output;
mod ranks;
mod run;
mod signals;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "devicemesh", version, about = "Start and check device meshes")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start local ranks of a program, with the environment that torchrun gives, and end all when one fails
    Run(run::Options),
}

fn main() -> ExitCode {
    match Arguments::parse().command {
        Command::Run(options) => match run::run(&options) {
            Ok(code) => ExitCode::from(code),
            Err(failure) => {
                eprintln!("devicemesh run: {}", failure.message);
                ExitCode::from(failure.code)
            }
        },
    }
}
