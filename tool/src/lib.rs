//! The tool `devicemesh`. Its exit codes stand at the end of each subcommand's `--help`, and in
//! docs/tool.md.
//!
//! Two programs use this library: `devicemesh` in this package, and the program in the Python wheel
//! (bindings/python/native). Other crates must not use it.

#![deny(unsafe_code)]

mod byte_size;
mod check;
mod columns;
mod duration;
mod endpoint;
mod failure;
mod info;
mod labelled;
mod library;
mod new;
mod number_set;
mod other_launchers;
mod pages;
mod proc;
mod ps;
mod recordings;
mod run;
mod show;
mod stdio;
mod store;
mod style;
mod suggestions;
mod terminal;
mod trace;
mod why;
mod words;

use std::io::Write;

use clap::{CommandFactory, Parser, Subcommand};
use devicemesh::printable::printable;

use self::stdio::{cannot_print, ignore_gone_reader, say, stdout_is_open};
use self::style::{Style, When};
use self::suggestions::with_suggestion;

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
    #[command(after_long_help = run::HELP, override_usage = "devicemesh run [OPTIONS] [--] <PROGRAM> [ARGUMENT]...")]
    Run(Box<run::Options>),
    /// Serve the store in which the ranks of a job meet, so that it outlives every rank and node
    #[command(after_long_help = store::HELP)]
    Store(store::Options),
    /// List the jobs of this user on this host: ranks, elapsed time, state, memory and CPU
    #[command(after_long_help = ps::HELP)]
    Ps(ps::PsOptions),
    /// Say why a job stands still: which rank did not come to which call, where it is, and who
    /// waits
    #[command(after_long_help = why::HELP)]
    Why(why::Options),
    /// Become a node of a job (`devicemesh run --hosts` starts this on each host)
    #[command(hide = true)]
    Agent,
    /// Say what the ranks of this node do (`devicemesh run` starts this for `devicemesh why` on
    /// another node)
    #[command(hide = true)]
    Answer {
        /// Where the ranks meet, as HOST:PORT
        address: String,
    },
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
    #[command(after_long_help = check::HELP)]
    Check(check::Options),
    /// Show what the ranks of a job did, from their recordings: what each dimension costs, who
    /// waits for whom, and a trace for Perfetto
    #[command(after_long_help = trace::HELP)]
    Trace(trace::Options),
    /// Write a small project that trains on eight processes, to begin from
    #[command(after_long_help = new::HELP)]
    New(new::Options),
    /// Print the completions for a shell
    #[command(
        after_long_help = "Examples:\n  source <(devicemesh completions bash)\n  devicemesh completions zsh > ~/.zfunc/_devicemesh\n  devicemesh completions fish > ~/.config/fish/completions/devicemesh.fish"
    )]
    Completions(pages::Completions),
    /// Print the manual page of the tool or of a subcommand, or write the pages of all
    #[command(
        after_long_help = "Examples:\n  devicemesh man | man -l -\n  devicemesh man run | man -l -\n  devicemesh man --dir ~/.local/share/man/man1"
    )]
    Man(pages::Manual),
}

#[doc(hidden)]
pub use self::stdio::note_closed_stdout;

/// Does what the command line of this process asks for, and returns the exit code.
#[doc(hidden)]
pub fn main() -> u8 {
    run::survive_too_large_files();
    let line = run::command_line();
    let arguments = match Arguments::try_parse_from(&line) {
        Ok(arguments) => arguments,
        // Every rank of a check finds such a mistake, so rank 0 alone reports it.
        Err(error) if error.use_stderr() && check::is_other_rank() => {
            let text = error.render().to_string();
            let why = text.lines().next().unwrap_or_default();
            return check::refuse(why.strip_prefix("error: ").unwrap_or(why));
        }
        Err(error) => {
            // A help that fits the terminal takes time, so it is made only where it may be shown.
            let tool = pages::fitted(Arguments::command());
            let error = tool.clone().try_get_matches_from(&line).err().unwrap_or(error);
            return refuse(&with_suggestion(error, &line, &tool));
        }
    };
    let (name, done) = match arguments.command {
        Command::Run(options) => ("run", run::run(&options)),
        Command::Store(options) => ("store", store::store(&options)),
        Command::Ps(options) => ("ps", ps::ps(&options)),
        Command::Why(options) => ("why", why::why(&options)),
        Command::Agent => ("agent", run::agent()),
        Command::Answer { address } => ("answer", why::answer_for_parent(&address)),
        Command::Info(options) => ("info", info::info(&options)),
        Command::Show(options) => ("show", show::show(&options)),
        Command::Check(options) => ("check", check::check(&options)),
        Command::Trace(options) => ("trace", trace::trace(&options)),
        Command::New(options) => ("new", new::new(&options)),
        Command::Completions(options) => ("completions", pages::completions(&options, Arguments::command())),
        Command::Man(options) => ("man", pages::manual(&options, Arguments::command())),
    };
    match done {
        Ok(code) => code,
        Err(failure) => {
            let style = Style::new(When::Auto, &std::io::stderr());
            say(&format!("devicemesh {name}: {}", style.wrong(&printable(&failure.message))));
            failure.code
        }
    }
}

/// Prints what is wrong with the command line, or the help that was asked for. Returns the exit
/// code.
fn refuse(error: &clap::Error) -> u8 {
    let text = error.render().to_string();
    let lines: Vec<_> = text.lines().map(printable).collect();
    // The text may quote an argument that would act on the terminal. Then it is printed escaped,
    // without clap's colours.
    let is_plain = lines.iter().zip(text.lines()).all(|(shown, line)| shown == line);
    let print = || if is_plain { error.print() } else { writeln!(std::io::stderr(), "{}", lines.join("\n")) };
    let printed = if error.use_stderr() { print() } else { stdout_is_open().and_then(|()| print()) };
    match ignore_gone_reader(printed) {
        Err(lost) if !error.use_stderr() => {
            say(&format!("devicemesh: {}", cannot_print(&lost)));
            1
        }
        _ => error.exit_code() as u8,
    }
}
