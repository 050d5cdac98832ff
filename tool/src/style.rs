//! Colours for what the tool writes.

use anstream::stream::RawStream;
use anstream::{AutoStream, ColorChoice};
use anstyle::{Ansi256Color, AnsiColor, Color, Effects};
use clap::ValueEnum;

/// Eight colours for groups, among the 256 of a terminal. They are close to those of the pictures.
const GROUPS: [u8; 8] = [110, 209, 79, 222, 217, 149, 117, 142];
const BLACK: u8 = 16;
/// Six colours that are readable on a dark and on a light background.
const NUMBERED: [AnsiColor; 6] =
    [AnsiColor::Green, AnsiColor::Yellow, AnsiColor::Blue, AnsiColor::Magenta, AnsiColor::Cyan, AnsiColor::Red];

/// When the tool writes in colour.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum When {
    Auto,
    Always,
    Never,
}

/// Wraps texts in the escape sequences of a style, or leaves them plain.
#[derive(Clone, Copy)]
pub struct Style {
    /// Whether escape sequences are written.
    pub colour: bool,
}

impl Style {
    /// The style for `stream`. `When::Auto` means colour on a terminal, unless the environment asks
    /// for none (NO_COLOR, or TERM=dumb outside CI).
    pub fn new(when: When, stream: &impl RawStream) -> Style {
        let colour = match when {
            When::Always => true,
            When::Never => false,
            When::Auto => AutoStream::choice(stream) != ColorChoice::Never,
        };
        Style { colour }
    }

    pub fn bold(self, text: &str) -> String {
        self.wrap(Effects::BOLD.into(), text)
    }

    pub fn dim(self, text: &str) -> String {
        self.wrap(Effects::DIMMED.into(), text)
    }

    /// The style of an error.
    pub fn wrong(self, text: &str) -> String {
        self.wrap(AnsiColor::Red.on_default().bold(), text)
    }

    /// The colour of a rank.
    pub fn numbered(self, rank: u32, text: &str) -> String {
        self.wrap(NUMBERED[rank as usize % NUMBERED.len()].on_default(), text)
    }

    /// Black text on the colour of a group of ranks.
    pub fn group(self, group: usize, text: &str) -> String {
        let colour = |number| Some(Color::Ansi256(Ansi256Color(number)));
        let background = colour(GROUPS[group % GROUPS.len()]);
        self.wrap(anstyle::Style::new().fg_color(colour(BLACK)).bg_color(background), text)
    }

    fn wrap(self, style: anstyle::Style, text: &str) -> String {
        match self.colour {
            true => format!("{style}{text}{style:#}"),
            false => text.to_owned(),
        }
    }
}
