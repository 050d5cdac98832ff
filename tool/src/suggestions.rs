//! Adds to clap's errors the word that the user probably meant. clap itself suggests only words
//! that have most letters at the same place, so it has no suggestion for `rnu`.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Error};

use crate::other_launchers::advice;

/// The error of this command line with the subcommand of `tool` that was probably meant, where clap
/// found none. Options are suggested as the pages write them, and not as torchrun writes some, which
/// works too.
pub fn with_suggestion(mut error: Error, line: &[OsString], tool: &Command) -> Error {
    let is_run = line.get(1).is_some_and(|command| command == "run");
    if error.kind() == ErrorKind::UnknownArgument && is_run {
        advise_on_option(&mut error, line);
    }
    if let Some(word) = hosts_with_one_dash(line).filter(|_| error.kind() == ErrorKind::DisplayHelp && is_run) {
        let run = tool.find_subcommand("run").unwrap_or(tool).clone();
        let message = format!("mpirun's {word} has two dashes here: -{word}");
        return run.bin_name("devicemesh run").error(ErrorKind::UnknownArgument, message);
    }
    if let Some(ContextValue::String(option)) = error.get(ContextKind::SuggestedArg) {
        let option = option.replace('_', "-");
        error.insert(ContextKind::SuggestedArg, ContextValue::String(option));
    }
    let Some(ContextValue::String(wrong)) = error.get(ContextKind::InvalidSubcommand) else { return error };
    if error.get(ContextKind::SuggestedSubcommand).is_none() {
        let names = tool.get_subcommands().map(Command::get_name);
        let distances = names.map(|name| (strsim::osa_distance(wrong, name), name));
        // A third of the letters may be wrong.
        let close = distances.filter(|(distance, name)| distance * 3 <= name.len()).min();
        if let Some((_, name)) = close {
            error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(vec![name.to_owned()]));
        }
    }
    error
}

/// The option `-host`, `-hosts` or `-hostfile` of this line. clap takes it for `-h` and shows the help,
/// and then a script would go on as if the job had run.
fn hosts_with_one_dash(line: &[OsString]) -> Option<&str> {
    let words = line.iter().filter_map(|word| word.to_str());
    words.take_while(|word| *word != "--").find(|word| word.starts_with("-host"))
}

/// Says what an option of another launcher is here, in place of clap's advice. That would be to write
/// the option behind "--", where it would be taken for the program.
fn advise_on_option(error: &mut Error, line: &[OsString]) {
    error.remove(ContextKind::Suggested);
    let Some(ContextValue::String(wrong)) = error.get(ContextKind::InvalidArg) else { return };
    // clap takes -mca for the options -m, -c and -a.
    let words = line.iter().filter_map(|word| word.to_str());
    let whole = words.take_while(|word| *word != "--").find(|word| word.starts_with(wrong.as_str()));
    if let Some(advice) = whole.and_then(advice).or_else(|| advice(wrong)) {
        error.remove(ContextKind::SuggestedArg);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![advice.to_owned().into()]));
    }
}
