//! Tells on rank 0's standard error how far the check has come. On a terminal it is one line that
//! is written over, else a line for each step.

use std::cell::Cell;
use std::io::{self, IsTerminal, Write};

use signal_hook::consts::{SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::run::is_ignored;

/// Empties the line of a terminal.
pub const CLEAR: &str = "\r\x1b[K";

/// The progress of a check.
pub struct Progress {
    form: Form,
    /// The steps that have begun.
    done: Cell<usize>,
    /// The steps that there will be.
    steps: Cell<usize>,
}

/// The form in which the progress is told.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    /// Nothing is told.
    Silent,
    /// Each step gets a line.
    Plain,
    /// Each step writes over the line of the step before.
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
        if form == Form::Line {
            clear_before_a_signal_ends();
        }
        Progress { form, done: Cell::new(0), steps: Cell::new(0) }
    }

    /// Sets how many steps there will be.
    pub fn expect(&self, steps: usize) {
        self.steps.set(steps);
    }

    /// Begins the next step, for example "verifying tp: all_reduce".
    pub fn step(&self, what: &str) {
        let done = self.done.get() + 1;
        self.done.set(done);
        let steps = self.steps.get().max(done);
        match self.form {
            Form::Silent => {}
            Form::Line => write(&format!("{CLEAR}[{done}/{steps}] {what}")),
            Form::Plain => write(&format!("devicemesh check: [{done}/{steps}] {what}\n")),
        }
    }

    /// Removes the line, so that something else can be written.
    pub fn clear(&self) {
        if self.form == Form::Line {
            write(CLEAR);
        }
    }
}

/// Removes the line when a signal ends the check, so that whoever writes next has a line of their
/// own. Where no thread or no pipe can be had for this, the line stays, because the check does not
/// depend on it.
fn clear_before_a_signal_ends() {
    let _ = std::thread::Builder::new().name("dm-check-signals".to_owned()).spawn(|| {
        // The signals are caught here, because they would be lost if there were no thread.
        let caught = [SIGINT, SIGQUIT, SIGTERM].into_iter().filter(|signal| !is_ignored(*signal));
        let Ok(mut signals) = Signals::new(caught) else { return };
        if let Some(signal) = signals.forever().next() {
            // The lock keeps the next step from writing its line again.
            let mut stderr = io::stderr().lock();
            let _ = stderr.write_all(CLEAR.as_bytes()).and_then(|()| stderr.flush());
            let _ = emulate_default_handler(signal);
        }
    });
}

/// Writes to standard error. An error is ignored, because the check does not depend on it.
fn write(text: &str) {
    let mut stderr = io::stderr().lock();
    let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
}
