//! How far the check has come, on rank 0's standard error: one line that is written over on a terminal, else a line for each dimension.

use std::cell::{Cell, RefCell};
use std::io::{self, IsTerminal, Write};

pub struct Progress {
    form: Form,
    done: Cell<usize>,
    steps: Cell<usize>,
    /// What the last plain line said.
    said: RefCell<String>,
}

#[derive(Clone, Copy, PartialEq)]
enum Form {
    Silent,
    Plain,
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

    /// How many steps there will be.
    pub fn expect(&self, steps: usize) {
        self.steps.set(steps);
    }

    /// The next step, as "verifying tp: all_reduce"; what is before the colon is a phase.
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

    /// Takes the line away, for what is written next.
    pub fn clear(&self) {
        if self.form == Form::Line {
            write("\r\x1b[K");
        }
    }
}

/// Nobody may be there to read it.
fn write(text: &str) {
    let mut stderr = io::stderr().lock();
    let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
}
