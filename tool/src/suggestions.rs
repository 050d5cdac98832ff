//! Adds to clap's errors the word that the user probably meant. clap itself suggests only words
//! that have most letters at the same place, so it has no suggestion for `rnu`.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command, Error};

use crate::other_launchers::{PREFIX, TEE, advice, is_streams, name};

/// Returns the error of this command line with what the user probably meant, where clap suggests
/// nothing or something that does not fit. Suggested options have hyphens, as the pages write them,
/// although torchrun's underscores work, too.
pub fn with_suggestion(mut error: Error, line: &[OsString], tool: &Command) -> Error {
    let words: Vec<&str> = line.iter().skip(1).map(|word| word.to_str().unwrap_or_default()).collect();
    if error.kind() == ErrorKind::UnknownArgument {
        // clap's advice is to write the option behind "--", where it would be taken for a value or
        // for the program.
        error.remove(ContextKind::Suggested);
    }
    let Some(run) = tool.find_subcommand("run") else { return error };
    match words.split_first() {
        Some((&"run", words)) => {
            let options = words.split(|word| *word == "--").next().unwrap_or_default();
            error = about_run(error, options, run);
        }
        Some((first, _)) => about_subcommands(&mut error, first, tool, run),
        None => {}
    }
    about_version(&mut error, &words);
    about_device(&mut error);
    if let Some(ContextValue::String(option)) = error.get(ContextKind::SuggestedArg) {
        let option = option.replace('_', "-");
        error.insert(ContextKind::SuggestedArg, ContextValue::String(option));
    }
    error
}

/// Says how to ask for the version, where the words ask for it in another way.
fn about_version(error: &mut Error, words: &[&str]) {
    if matches!(words, ["version" | "-v" | "-version"] | [_, "--version" | "-V"]) {
        error.remove(ContextKind::SuggestedArg);
        suggest(error, "`devicemesh --version` prints the version");
    }
}

/// Suggests a device type where the word is that of another library.
fn about_device(error: &mut Error) {
    let is_gpu = matches!(error.get(ContextKind::InvalidValue), Some(ContextValue::String(value)) if value == "gpu");
    if is_gpu && invalid_argument(error).starts_with("--device") {
        error.insert(ContextKind::SuggestedValue, ContextValue::String("cuda".to_owned()));
    }
}

/// Suggests a subcommand. Where the words are those of a launcher without `run`, suggests `run`.
fn about_subcommands(error: &mut Error, first: &str, tool: &Command, run: &Command) {
    let is_for_run = match error.kind() {
        ErrorKind::UnknownArgument => has_option(run, first) || (first.starts_with('-') && advice(first).is_some()),
        ErrorKind::InvalidSubcommand => first.contains(['/', '.']),
        _ => false,
    };
    if is_for_run {
        suggest(error, "`devicemesh run` starts programs: its options and the program follow `run`");
    }
    let Some(ContextValue::String(wrong)) = error.get(ContextKind::InvalidSubcommand) else { return };
    if error.get(ContextKind::SuggestedSubcommand).is_none() {
        let names = tool.get_subcommands().map(Command::get_name).filter(|name| is_close(wrong, name));
        let close = names.min_by_key(|name| strsim::osa_distance(wrong, name));
        let launcher = ["mpirun", "mpiexec", "torchrun", "launch", "start", "exec"].contains(&wrong.as_str());
        if let Some(name) = close.or(launcher.then_some("run")) {
            error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(vec![name.to_owned()]));
        }
    }
}

/// Says what an option of another launcher is here. `options` are the words after `run` and before
/// "--".
fn about_run(mut error: Error, options: &[&str], run: &Command) -> Error {
    let wrong = match error.kind() {
        ErrorKind::UnknownArgument => invalid_argument(&error).to_owned(),
        // clap takes -np for -n with the value p, and -hosts for -h. For -h it shows the help with
        // exit code 0, and a script would go on as if the job had run.
        ErrorKind::ValueValidation if invalid_argument(&error).starts_with("--nproc-per-node") => "-n".to_owned(),
        ErrorKind::DisplayHelp => "-h".to_owned(),
        ErrorKind::TooManyValues | ErrorKind::MissingRequiredArgument if tees_streams(options) => {
            suggest(&mut error, TEE);
            return error;
        }
        ErrorKind::TooManyValues if invalid_argument(&error) == "--prefix" => {
            suggest(&mut error, PREFIX);
            return error;
        }
        _ => return error,
    };
    // clap takes -mca for the options -m, -c and -a.
    let word = options.iter().find(|word| word.starts_with(&wrong)).and_then(|word| word.split('=').next());
    let has_one_dash = |word: &str| !word.starts_with("--") && has_option(run, &format!("-{word}"));
    let tip = match word {
        Some(word) if has_one_dash(word) => Some((word, format!("write it with two dashes: --{}", name(word)))),
        Some(word) => advice(word).map(|advice| (word, advice.to_owned())),
        None => None,
    };
    // A short option may have its value in the same word. MPICH has many long words with one dash.
    let is_word = |word: &str| word.len() > 4 && word[1..].chars().all(|c| c.is_ascii_lowercase() || "-_".contains(c));
    let is_short = wrong.starts_with("--") || !word.is_some_and(is_word);
    let tip = tip.or_else(|| advice(&wrong).filter(|_| is_short).map(|advice| (wrong.as_str(), advice.to_owned())));
    if let Some((word, advice)) = tip {
        let mut run = run.clone().bin_name("devicemesh run");
        let mut better = Error::new(ErrorKind::UnknownArgument).with_cmd(&run);
        better.insert(ContextKind::InvalidArg, ContextValue::String(word.to_owned()));
        better.insert(ContextKind::Usage, ContextValue::StyledStr(run.render_usage()));
        suggest(&mut better, &advice);
        return better;
    }
    if let Some(word) = word.filter(|_| !is_short && error.kind() == ErrorKind::UnknownArgument) {
        error.insert(ContextKind::InvalidArg, ContextValue::String(word.to_owned()));
    }
    let suggested = error.get(ContextKind::SuggestedArg).map(|suggested| name(&suggested.to_string()));
    let mut hidden = run.get_arguments().filter(|argument| argument.is_hide_set()).filter_map(Arg::get_long);
    if suggested.is_some_and(|suggested| !is_close(&name(&wrong), &suggested) || hidden.any(|long| long == suggested)) {
        error.remove(ContextKind::SuggestedArg);
    }
    error
}

/// Whether the user may have meant `name`: at most a third of its letters are wrong, or one of the
/// two words begins with the other.
fn is_close(wrong: &str, name: &str) -> bool {
    let is_begin = wrong.len() > 1 && (name.starts_with(wrong) || wrong.starts_with(name));
    is_begin || strsim::osa_distance(wrong, name) * 3 <= name.len()
}

/// The argument that an error is about, or nothing.
fn invalid_argument(error: &Error) -> &str {
    match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(argument)) => argument,
        _ => "",
    }
}

/// Whether `--tee` has a value, as torchrun's `--tee` has.
fn tees_streams(options: &[&str]) -> bool {
    let next = options.windows(2).any(|pair| pair[0] == "--tee" && is_streams(pair[1]));
    next || options.iter().any(|word| word.starts_with("--tee="))
}

/// Whether `run` has this option, which may have a value in the same word.
fn has_option(run: &Command, word: &str) -> bool {
    let bare = word.trim_start_matches('-');
    let name = name(word);
    run.get_arguments().any(|argument| match word.len() - bare.len() {
        1 => argument.get_short().is_some_and(|short| bare.starts_with(short)),
        2 => argument.get_long() == Some(&name) || argument.get_all_aliases().is_some_and(|all| all.contains(&&*name)),
        _ => false,
    })
}

fn suggest(error: &mut Error, tip: &str) {
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.to_owned().into()]));
}
