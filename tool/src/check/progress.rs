//! Tells on rank 0's standard error how far the check has come. On a terminal it is one line that
//! is written over, else a line for each phase.

use std::cell::{Cell, RefCell};
use std::io::{self, IsTerminal, Write};

/// The progress of a check.
pub struct Progress {
    form: Form,
    /// The steps that have begun.
    done: Cell<usize>,
    /// The steps that there will be.
    steps: Cell<usize>,
    /// The phase that the last plain line named.
    said: RefCell<String>,
}

/// How the progress is told.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    /// Not at all.
    Silent,
    /// A line for each phase.
    Plain,
    /// One line that is written over.
    Line,
}

impl Progress {
    pub fn new(silent: bool) -> Progress {
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        let form = match (silent, io::stderr().is_terminal() && !dumb) {
            (true, _) => Form::Silent,
            (false, true) => Form::Line,
            (false, false) => Form::Plain,
        };
        Progress { form, done: Cell::new(0), steps: Cell::new(0), said: RefCell::default() }
    }

    /// Sets how many steps there will be.
    pub fn expect(&self, steps: usize) {
        self.steps.set(steps);
    }

    /// Begins the next step, for example "verifying tp: all_reduce". The part before the colon is
    /// the phase.
    pub fn step(&self, what: &str) {
        let done = self.done.get() + 1;
        self.done.set(done);
        let steps = self.steps.get().max(done);
        match self.form {
            Form::Silent => {}
            Form::Line => write(&format!("\r\x1b[K[{done}/{steps}] {what}")),
            Form::Plain => {
                let phase = what.split(':').next().unwrap_or(what);
                if *self.said.borrow() != phase {
                    write(&format!("devicemesh check: [{done}/{steps}] {phase}\n"));
                    phase.clone_into(&mut self.said.borrow_mut());
                }
            }
        }
    }

    /// Removes the line, so that something else can be written.
    pub fn clear(&self) {
        if self.form == Form::Line {
            write("\r\x1b[K");
        }
    }
}

/// Writes to standard error. An error is ignored, because the check does not depend on it.
fn write(text: &str) {
    let mut stderr = io::stderr().lock();
    let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
}
