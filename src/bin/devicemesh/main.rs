//! The tool `devicemesh`.
//!
//! Exit codes of `run`: 0 when all went well, that of the first rank that failed (128 + signal when a signal ended it), 124 when `--timeout` passed,
//! 126 or 127 when the program could not be started, 2 for a wrong command line, 1 for everything else. Of `show`: 0, 2 for a wrong
//! command line and for what does not fit together in it, 1 when the output cannot be written; of `info`: 0, and 1 likewise.

mod cause;
mod info;
mod nodes;
mod output;
mod ranks;
mod run;
mod show;
mod signals;
mod style;

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
    /// Say which libraries, devices and launcher are found here, with their versions, and what was tried where none is
    Info(info::Options),
    /// Show a mesh: its ranks, the groups of each dimension and the hosts they cross, as text or as a picture
    ///
    /// Examples:
    ///   devicemesh show 2,2,2 dp,cp,tp --rank 3 --hosts 2x4
    ///   devicemesh show 2,2,2 dp,cp,tp --flatten dp,cp=dpcp --slice dpcp,tp --svg -o mesh.svg
    ///
    /// Exit codes: 0; 2 for a wrong command line and for what does not fit together in it; 1 when the output cannot be written.
    #[command(verbatim_doc_comment)]
    Show(show::Options),
}

fn main() -> ExitCode {
    let (name, done) = match Arguments::parse().command {
        Command::Run(options) => ("run", run::run(&options)),
        Command::Info(options) => ("info", info::info(&options)),
        Command::Show(options) => ("show", show::show(&options)),
    };
    match done {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            eprintln!("devicemesh {name}: {}", failure.message);
            ExitCode::from(failure.code)
        }
    }
}
