//! Lines that begin with a label, as "store       at tcp://head:29400".

use crate::style::Style;
use crate::terminal::hanging;

/// The width of the labels in character cells, with the space after them.
const LABEL: usize = 12;
/// The width of the lines of a dry run where the output is no terminal, in character cells.
pub const PLAIN: usize = 100;

/// A text of such lines.
pub struct Labelled {
    text: String,
    style: Style,
    /// The width into which a line is broken. `None` breaks no line.
    width: Option<usize>,
}

impl Labelled {
    /// A text without lines, in which no line is wider than `width` cells. `None` leaves the lines
    /// whole.
    pub fn new(style: Style, width: Option<usize>) -> Labelled {
        Labelled { text: String::new(), style, width }
    }

    /// Adds a line. Where the line is broken, its text goes on below its beginning. A label that is
    /// longer than the others moves the first line of the text to the right.
    pub fn line(&mut self, label: &str, text: &str) {
        let label = self.style.bold(&format!("{label:<width$} ", width = LABEL - 1));
        self.text += &format!("{label}{}\n", hanging(text, LABEL, LABEL, self.width));
    }

    /// The lines, each of which ends with a line feed.
    pub fn into_text(self) -> String {
        self.text
    }
}

#[cfg(test)]
mod tests {
    use super::Labelled;
    use crate::style::Style;

    #[test]
    fn a_broken_line_goes_on_below_its_text() {
        let mut lines = Labelled::new(Style { colour: false }, Some(24));
        lines.line("store", "at tcp://head:29400");
        lines.line("a-long-host-name", "-n 4");
        assert_eq!(lines.into_text(), "store       at\n            tcp://head:29400\na-long-host-name -n 4\n");
        let mut lines = Labelled::new(Style { colour: true }, None);
        lines.line("", "a b c d e f g h i j k");
        assert_eq!(lines.into_text(), "\u{1b}[1m            \u{1b}[0ma b c d e f g h i j k\n");
    }
}
