//! The tool `devicemesh`. Its exit codes stand at the end of each subcommand's `--help`, and in
//! docs/tool.md.

#![deny(unsafe_code)]

mod check;
mod columns;
mod endpoint;
mod failure;
mod info;
mod library;
mod pages;
mod run;
mod show;
mod stdio;
mod style;

use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use devicemesh::printable::printable;

use self::stdio::{cannot_print, ignore_gone_reader, say};
use self::style::{Style, When};

/// The end of `--help` and of the manual page.
const HELP: &str = "\
Exit codes:
  0  well; each subcommand's --help has the others
  2  wrong command line";

#[derive(Parser)]
#[command(name = "devicemesh", version, about = "Start and check device meshes", after_long_help = HELP)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start the ranks of a program on this host, or on each of several, with the environment that
    /// torchrun gives, and end all when one fails
    #[command(after_long_help = run::HELP)]
    Run(run::Options),
    /// Say which libraries, devices and launcher are found here, with their versions, what was
    /// tried where none is, and whether the store is in reach
    #[command(after_long_help = info::HELP)]
    Info(info::Options),
    /// Show a mesh: its ranks, the groups of each dimension and the hosts they cross, as text or as
    /// a picture
    #[command(after_long_help = show::HELP)]
    Show(show::Options),
    /// Check a mesh before a big job: every collective along every dimension with real data,
    /// bandwidths and latencies, and what is slow
    ///
    /// Start it as the job: under devicemesh run, torchrun, mpirun or srun. Rank 0 reports.
    ///
    /// Examples:
    ///   devicemesh run -n 8 -- devicemesh check 2,2,2 dp,cp,tp --flatten dp,cp=dpcp
    ///   srun devicemesh check -1,8 dp,tp --device cuda --sizes 4B:256MiB --json
    ///
    /// Exit codes, on every rank: 0 all is well (and with slow ones too, unless --fail-slow); 1
    /// wrong data; 2 a wrong command line, or a shape that does not fit the world; 3 the check
    /// could not be made, for example because a rank died; 4 slow, with --fail-slow; 124 not done
    /// by --timeout.
    #[command(verbatim_doc_comment)]
    Check(check::Options),
    /// Print the completions for a shell
    #[command(
        after_long_help = "Examples:\n  source <(devicemesh completions bash)\n  devicemesh completions zsh > ~/.zfunc/_devicemesh\n  devicemesh completions fish > ~/.config/fish/completions/devicemesh.fish"
    )]
    Completions(pages::Completions),
    /// Print the manual page, or write those of all subcommands
    #[command(
        after_long_help = "Examples:\n  devicemesh man | man -l -\n  devicemesh man --dir ~/.local/share/man/man1"
    )]
    Man(pages::Manual),
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return refuse(&error),
    };
    let (name, done) = match arguments.command {
        Command::Run(options) => ("run", run::run(&options)),
        Command::Info(options) => ("info", info::info(&options)),
        Command::Show(options) => ("show", show::show(&options)),
        Command::Check(options) => ("check", check::check(&options)),
        Command::Completions(options) => ("completions", pages::completions(&options, Arguments::command())),
        Command::Man(options) => ("man", pages::manual(&options, Arguments::command())),
    };
    match done {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            let style = Style::new(When::Auto, &std::io::stderr());
            say(&format!("devicemesh {name}: {}", style.wrong(&printable(&failure.message))));
            ExitCode::from(failure.code)
        }
    }
}

/// Prints what is wrong with the command line, or the help that was asked for.
fn refuse(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    let lines: Vec<_> = text.lines().map(printable).collect();
    // The text may quote an argument that would act on the terminal. Then it is printed escaped,
    // without clap's colours.
    let is_plain = lines.iter().zip(text.lines()).all(|(shown, line)| shown == line);
    let printed = if is_plain { error.print() } else { writeln!(std::io::stderr(), "{}", lines.join("\n")) };
    match ignore_gone_reader(printed) {
        Err(lost) if !error.use_stderr() => {
            say(&format!("devicemesh: {}", cannot_print(&lost)));
            ExitCode::from(1)
        }
        _ => ExitCode::from(error.exit_code() as u8),
    }
}
