//! The values on the command line of `devicemesh show`.

use std::str::FromStr;

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

/// A list of numbers, as "2,2,2".
#[derive(Debug, Clone)]
pub struct Numbers<T>(pub Vec<T>);

/// The sizes of the dimensions, as "2,2,2".
pub type Sizes = Numbers<usize>;

/// World ranks, as "7,5,3,1".
pub type Ranks = Numbers<i32>;

/// How much a rank exchanges along each dimension, as "1,100".
pub type Weights = Numbers<u32>;

/// A number of a [`Numbers`], with its words in messages.
pub trait Number: FromStr {
    /// The noun for the number.
    const NOUN: &'static str;
    /// A list of such numbers.
    const EXAMPLE: &'static str;
}

impl Number for usize {
    const NOUN: &'static str = "size";
    const EXAMPLE: &'static str = "2,2,2";
}

impl Number for i32 {
    const NOUN: &'static str = "rank";
    const EXAMPLE: &'static str = "7,5,3,1";
}

impl Number for u32 {
    const NOUN: &'static str = "weight";
    const EXAMPLE: &'static str = "1,100";
}

/// Names of dimensions, as "dp,cp,tp".
#[derive(Debug, Clone)]
pub struct Names(pub Vec<String>);

/// The number of hosts and of ranks on each, as "2x4".
#[derive(Debug, Clone, Copy)]
pub struct HostSizes {
    /// The number of hosts.
    pub hosts: usize,
    /// The number of ranks on each host.
    pub each: usize,
}

/// An operation on the mesh, with the arguments of the library's function of that name.
#[derive(Debug, Clone)]
pub enum Operation {
    Slice(Vec<String>),
    Flatten { dims: Vec<String>, name: Option<String> },
    Unflatten { dim: String, sizes: Vec<usize>, names: Vec<String> },
    Range { dim: String, start: usize, len: usize, step: usize },
    Reshape { sizes: Vec<usize>, names: Vec<String> },
}

/// All operations, in the order of the command line.
#[derive(Debug, Clone, Default)]
pub struct Operations(pub Vec<Operation>);

/// Reads a list of numbers. `what` and `example` stand in the message.
fn numbers<T: FromStr>(text: &str, separator: char, what: &str, example: &str) -> Result<Vec<T>, String> {
    let number =
        |part: &str| part.trim().parse().map_err(|_| format!("{part:?} is not a {what}; write it like {example}"));
    text.split(separator).map(number).collect()
}

impl<T: Number> FromStr for Numbers<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Numbers<T>, String> {
        numbers(text, ',', T::NOUN, T::EXAMPLE).map(Numbers)
    }
}

impl FromStr for Names {
    type Err = String;

    fn from_str(text: &str) -> Result<Names, String> {
        text.split(',').map(name).collect::<Result<_, _>>().map(Names)
    }
}

impl FromStr for HostSizes {
    type Err = String;

    fn from_str(text: &str) -> Result<HostSizes, String> {
        let sizes: Vec<usize> = numbers(text, 'x', "number of hosts or of ranks on each", "2x4")?;
        let [hosts, each] = sizes[..] else {
            return Err("write it like 2x4: two hosts of four ranks".to_owned());
        };
        match hosts > 0 && each > 0 && hosts.checked_mul(each).is_some() {
            true => Ok(HostSizes { hosts, each }),
            false => Err("there is at least 1 host with 1 rank, and no more ranks than a number can count".to_owned()),
        }
    }
}

/// Reads a name. It may not have characters that move the cursor or turn the text round, because a
/// terminal or a picture would then show another name.
pub fn name(text: &str) -> Result<String, String> {
    let unfit = |c: &char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{fffe}' | '\u{ffff}')
    };
    match text.chars().find(unfit) {
        Some(unfit) => Err(format!("the name {text:?} has the control character {unfit:?}; leave it out")),
        None => Ok(text.to_owned()),
    }
}

fn names(text: &str) -> Result<Vec<String>, String> {
    text.parse::<Names>().map(|names| names.0)
}

fn slice(text: &str) -> Result<Operation, String> {
    names(text).map(Operation::Slice)
}

fn flatten(text: &str) -> Result<Operation, String> {
    let (dims, flat) = match text.split_once('=') {
        Some((dims, flat)) => (dims, Some(name(flat)?)),
        None => (text, None),
    };
    Ok(Operation::Flatten { dims: names(dims)?, name: flat })
}

fn unflatten(text: &str) -> Result<Operation, String> {
    let (dim, parts) = text.split_once('=').ok_or("write it like tp=2x4:node,chip")?;
    let (sizes, names) = sizes_and_names(parts, "tp=2x4:node,chip")?;
    Ok(Operation::Unflatten { dim: name(dim)?, sizes, names })
}

fn reshape(text: &str) -> Result<Operation, String> {
    let (sizes, names) = sizes_and_names(text, "2x4x2:edp,ep,etp")?;
    Ok(Operation::Reshape { sizes, names })
}

fn sizes_and_names(text: &str, example: &str) -> Result<(Vec<usize>, Vec<String>), String> {
    let (sizes, parts) = text.split_once(':').ok_or(format!("write it like {example}"))?;
    Ok((numbers(sizes, 'x', "size", example)?, names(parts)?))
}

fn range(text: &str) -> Result<Operation, String> {
    let form = "write it like pp=0:2, which is 2 indices from 0 on, or pp=0:2:4, every fourth of them";
    let (dim, range) = text.split_once('=').ok_or(form)?;
    let (start, len, step) = match numbers(range, ':', "number", "pp=0:2")?[..] {
        [start, len] => (start, len, 1),
        [start, len, step] => (start, len, step),
        _ => return Err(form.to_owned()),
    };
    Ok(Operation::Range { dim: name(dim)?, start, len, step })
}

type Parse = fn(&str) -> Result<Operation, String>;

/// The options that are operations: name, form of the value, help, and the function that reads the
/// value.
const OPERATIONS: [(&str, &str, &str, Parse); 5] = [
    (
        "slice",
        "NAMES",
        "The view of these dimensions that holds the rank, in the order given: cp,dp is the transposed view",
        slice,
    ),
    (
        "flatten",
        "NAMES[=NAME]",
        "One more dimension out of several, as dp,cp=dpcp; slices can name it from then on",
        flatten,
    ),
    ("unflatten", "NAME=SIZES:NAMES", "One dimension as several, as tp=2x4:node,chip", unflatten),
    ("range", "NAME=START:LEN[:STEP]", "LEN indices of a dimension from START on, every STEP-th, as pp=0:2", range),
    ("reshape", "SIZES:NAMES", "All ranks of the view under another shape, as 2x4x2:edp,ep,etp", reshape),
];

// This is written by hand, because the order of different options matters. clap keeps that order in
// the indices of the values.
impl FromArgMatches for Operations {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Operations, clap::Error> {
        let mut found: Vec<(usize, Operation)> = Vec::new();
        for (id, ..) in OPERATIONS {
            let indices = matches.indices_of(id).into_iter().flatten();
            let values = matches.get_many::<Operation>(id).into_iter().flatten();
            found.extend(indices.zip(values.cloned()));
        }
        found.sort_by_key(|(index, _)| *index);
        Ok(Operations(found.into_iter().map(|(_, operation)| operation).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Operations::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for Operations {
    fn augment_args(command: Command) -> Command {
        OPERATIONS.into_iter().fold(command, |command, (id, value, help, parse)| {
            let option =
                Arg::new(id).long(id).value_name(value).help(help).help_heading("Operations, in the order given");
            command.arg(option.action(ArgAction::Append).value_parser(parse))
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Operations::augment_args(command)
    }
}
