//! The options of `devicemesh run` for what the ranks write and read.

use std::path::PathBuf;

use clap::Args;

use super::route::{Rotation, Route};
use crate::byte_size::byte_size;
use crate::failure::Failure;
use crate::style::When;

/// The options for the ranks' output and input. The comments of the fields are their help.
#[derive(Args)]
pub struct OutputOptions {
    /// Put "[rank R] " before every line that a rank writes, on several nodes "[rank R on HOST] "
    #[arg(long)]
    pub prefix: bool,
    /// Put the time in UTC before every line that a rank writes, here and in --log-dir
    #[arg(long)]
    pub timestamps: bool,
    /// Write what each rank says to files instead of to the terminal: rank-R.out and rank-R.err,
    /// in a new folder of DIR for each run. DIR/latest leads to the newest
    #[arg(long, alias = "log_dir", value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// With --log-dir: also show the output on the terminal
    #[arg(long, requires = "log_dir")]
    pub tee: bool,
    /// With --log-dir: begin a new file before one gets larger; the older ones are rank-R.out.1
    /// (the newest), .2 and so on
    #[arg(long, alias = "log_max_size", requires = "log_dir", value_name = "SIZE", value_parser = log_size, allow_negative_numbers = true)]
    pub log_max_size: Option<usize>,
    /// With --log-max-size: how many older files to keep
    #[arg(
        long,
        alias = "log_keep",
        requires = "log_max_size",
        value_name = "N",
        default_value_t = 5,
        allow_negative_numbers = true
    )]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub log_keep: u32,
    /// The rank that reads the standard input of the devicemesh run that starts it; the others read
    /// nothing. "none": no rank
    #[arg(long, value_name = "RANK", default_value = "none", value_parser = reader, allow_negative_numbers = true)]
    pub stdin: Reader,
}

/// The rank that reads standard input, where one does: the value of `--stdin`.
#[derive(Clone, Copy)]
pub struct Reader(pub Option<u32>);

fn reader(text: &str) -> Result<Reader, String> {
    match (text, text.parse()) {
        ("none", _) => Ok(Reader(None)),
        (_, Ok(rank)) => Ok(Reader(Some(rank))),
        _ => Err("a rank, as 0, or none".to_owned()),
    }
}

/// The smallest size of a log before a new file begins. A file for each line takes a long time.
const LEAST_LOG: usize = 4 << 10;

fn log_size(text: &str) -> Result<usize, String> {
    match byte_size(text)? {
        size if size < LEAST_LOG => Err(format!("{size} B is too small: the smallest size is 4K; write it like 100M")),
        size => Ok(size),
    }
}

impl OutputOptions {
    /// Checks what clap cannot: options that do not fit together.
    pub fn check(&self) -> Result<(), Failure> {
        if self.prefix && self.log_dir.is_some() && !self.tee {
            let message = "--prefix is for the terminal, and --log-dir takes the output from there: add --tee";
            return Err(Failure::new(2, message));
        }
        Ok(())
    }

    /// Returns where the ranks' output goes. `keep_stderr` is the field of [`Route`].
    pub fn route(&self, keep_stderr: bool, color: When) -> Route {
        let (keep, logs) = (self.log_keep, self.log_dir.clone());
        let rotation = self.log_max_size.map(|size| Rotation { size: size as u64, keep });
        let (prefix, timestamps, tee, reader) = (self.prefix, self.timestamps, self.tee, self.stdin.0);
        Route { prefix, timestamps, logs, rotation, tee, keep_stderr, reader, color }
    }
}
