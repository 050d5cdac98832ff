//! Colours: on a terminal, unless NO_COLOR is set.

use std::io::IsTerminal;

use clap::ValueEnum;

/// When to colour.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum When {
    Auto,
    Always,
    Never,
}

/// Writes with escape sequences, or without.
#[derive(Clone, Copy)]
pub struct Style {
    pub colour: bool,
}

impl Style {
    /// As asked; auto: on a terminal that is not dumb, unless NO_COLOR holds anything (no-color.org).
    pub fn new(when: When, stream: &impl IsTerminal) -> Style {
        let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let colour = match when {
            When::Always => true,
            When::Never => false,
            When::Auto => {
                let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
                !dumb && !set("NO_COLOR") && stream.is_terminal()
            }
        };
        Style { colour }
    }

    pub fn bold(self, text: &str) -> String {
        self.sequence("1", text)
    }

    pub fn dim(self, text: &str) -> String {
        self.sequence("2", text)
    }

    /// Something went wrong.
    pub fn wrong(self, text: &str) -> String {
        self.sequence("1;31", text)
    }

    /// One of six colours that are readable on dark and on light.
    pub fn numbered(self, number: u32, text: &str) -> String {
        self.sequence(&format!("{}", 31 + (number + 1) % 6), text)
    }

    pub fn sequence(self, codes: &str, text: &str) -> String {
        match self.colour {
            true => format!("\x1b[{codes}m{text}\x1b[0m"),
            false => text.to_owned(),
        }
    }
}
