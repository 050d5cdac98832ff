//! Where the ranks' output goes, and where their input comes from.

use std::io::{self, IsTerminal};
use std::path::PathBuf;

use crate::style::When;

/// The places to which the ranks' output goes, and the rank that gets the input.
pub struct Route {
    /// Whether the rank stands before each line.
    pub prefix: bool,
    /// Whether the time stands before each line.
    pub timestamps: bool,
    /// The folder in which each run has a folder with the files of its ranks, where there is one.
    pub logs: Option<PathBuf>,
    /// The limit on the size of the files in `logs`, where there is one.
    pub rotation: Option<Rotation>,
    /// Whether the output is also shown, where it goes into files.
    pub tee: bool,
    /// Whether standard error always passes through the tool, so that a report on any node can
    /// quote it.
    pub keep_stderr: bool,
    /// The rank that reads this tool's standard input, where one does.
    pub reader: Option<u32>,
    /// When the rank prefixes of the lines are coloured.
    pub color: When,
}

/// The limit on the size of a log.
#[derive(Clone, Copy)]
pub struct Rotation {
    /// The most bytes in a file. A longer line gets a file of its own.
    pub size: u64,
    /// How many older files are kept.
    pub keep: u32,
}

impl Route {
    /// The number of files that this process holds open for the output of one rank: pipes, and for
    /// each of them the log.
    pub fn files_per_rank(&self) -> u64 {
        let pipes = u64::from(self.reads(false)) + u64::from(self.reads(true));
        if self.logs.is_some() { pipes * 2 } else { pipes }
    }

    /// Whether the ranks have their logs as standard output and standard error, so that nothing
    /// passes through the tool.
    pub fn writes_logs_directly(&self) -> bool {
        self.logs.is_some() && !self.tee && !self.timestamps && self.rotation.is_none()
    }

    /// Whether the ranks' output goes to the tool's standard output and standard error.
    pub fn is_shown(&self) -> bool {
        self.logs.is_none() || self.tee
    }

    /// Whether the tool writes more into a line than the rank did.
    pub fn decorates(&self) -> bool {
        self.prefix || self.timestamps
    }

    /// Whether the ranks' standard error, else their standard output, passes through the tool.
    pub fn reads(&self, is_error: bool) -> bool {
        match &self.logs {
            Some(_) => !self.writes_logs_directly(),
            None => self.decorates() || (is_error && (self.keep_stderr || !io::stderr().is_terminal())),
        }
    }
}
