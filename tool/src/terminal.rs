//! The width of the terminal, text that is broken between words so that it fits, and whether the
//! terminal stops those who write in the background.

use std::fs::File;
use std::io::{stderr, stdin, stdout};
use std::os::fd::AsFd;

use rustix::termios::{LocalModes, tcgetattr, tcgetwinsize};
use unicode_width::UnicodeWidthStr;

/// The smallest width for which lines are broken. A narrower terminal gets lines for this width.
const LEAST: usize = 40;
/// The width of a help text where there is no terminal.
const PLAIN: usize = 100;

/// The variable that has the width where the terminal does not say it, as for ls and ps.
pub const COLUMNS: &str = "COLUMNS";

/// The width of standard output in character cells, where that is a terminal which says its width,
/// else the value of [`COLUMNS`]. `None` without both: there a line may have any length, so that a
/// reader (grep, a file) gets it whole.
pub fn width() -> Option<usize> {
    width_of(stdout()).or_else(|| columns(std::env::var(COLUMNS).ok()?.as_str()))
}

/// The width of a help text in character cells. Where standard output is no terminal, for example a
/// pager's pipe, and [`COLUMNS`] is not set, it is the width of the terminal from which the tool
/// was started. Where there is no terminal, it is 100, because very long lines are hard to read.
pub fn width_of_help() -> usize {
    width().or_else(|| width_of(stderr())).or_else(|| width_of(stdin())).unwrap_or(PLAIN)
}

fn width_of(terminal: impl AsFd) -> Option<usize> {
    limited(tcgetwinsize(terminal).ok()?.ws_col)
}

/// Reads the width from a text. A text that is no width counts as none.
fn columns(text: &str) -> Option<usize> {
    limited(text.trim().parse().ok()?)
}

/// The width for which lines are broken, on a terminal of that many cells. A terminal that does not
/// know its width says 0.
fn limited(cells: u16) -> Option<usize> {
    (cells > 0).then(|| usize::from(cells).max(LEAST))
}

/// Whether the terminal that controls this process stops processes that write to it in the
/// background (`stty tostop`).
pub fn stops_writers() -> bool {
    let settings = File::open("/dev/tty").map(tcgetattr);
    settings.is_ok_and(|settings| settings.is_ok_and(|settings| settings.local_modes.contains(LocalModes::TOSTOP)))
}

/// Breaks each line of `text` between its words so that it fits into `width`. The lines after a
/// break begin with the spaces of the line itself and two more. A word that is wider than the
/// terminal stays whole.
pub fn wrap(text: &str, width: Option<usize>) -> String {
    let Some(width) = width else { return text.to_owned() };
    text.split_inclusive('\n').map(|line| wrap_line(line, width)).collect()
}

fn wrap_line(line: &str, width: usize) -> String {
    let (text, end) = line.strip_suffix('\n').map_or((line, ""), |text| (text, "\n"));
    let words = text.trim_start_matches(' ');
    let indent = text.len() - words.len();
    format!("{}{}{end}", " ".repeat(indent), hanging(words, indent, indent + 2, Some(width)))
}

/// The words of a text in lines of at most `limit` cells. The first line begins after `first`
/// cells, which the result does not have, and each of the others with `indent` spaces. A word that
/// is longer than a line stays whole.
pub fn hanging(text: &str, first: usize, indent: usize, limit: Option<usize>) -> String {
    let (mut out, mut used) = (String::new(), first);
    for (at, word) in text.split(' ').enumerate() {
        let length = visible(word);
        if at > 0 && limit.is_some_and(|limit| used + 1 + length > limit) {
            out.truncate(out.trim_end().len());
            out += &format!("\n{}", " ".repeat(indent));
            used = indent;
        } else if at > 0 {
            out.push(' ');
            used += 1;
        }
        out += word;
        used += length;
    }
    out
}

/// The width of a text in a terminal. Escape sequences of colours take no room.
pub fn visible(text: &str) -> usize {
    let mut parts = text.split('\x1b');
    let first = parts.next().map_or(0, UnicodeWidthStr::width);
    first + parts.map(|part| part.split_once('m').map_or(0, |(_, rest)| rest.width())).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::{columns, hanging, visible, wrap};

    #[test]
    fn a_variable_has_the_width() {
        assert_eq!(
            ["200", " 60\n", "7", "0", "-1", "wide", ""].map(columns),
            [Some(200), Some(60), Some(40), None, None, None, None]
        );
    }

    #[test]
    fn lines_are_broken_between_words() {
        let text = "  slow: the host gamma takes long\nshort\n";
        assert_eq!(wrap(text, None), text);
        assert_eq!(wrap(text, Some(18)), "  slow: the host\n    gamma takes\n    long\nshort\n");
        assert_eq!(wrap("averylongword a", Some(5)), "averylongword\n  a");
    }

    #[test]
    fn lines_after_a_label_are_indented() {
        assert_eq!(hanging("A=1 BB=2 C=3", 2, 2, Some(10)), "A=1 BB=2\n  C=3");
        assert_eq!(hanging("A=1 BB=2 C=3", 2, 2, None), "A=1 BB=2 C=3");
        assert_eq!(hanging("a /very/long/path b", 1, 1, Some(6)), "a\n /very/long/path\n b");
        assert_eq!(hanging("A=1 BB=2 C=3", 5, 2, Some(10)), "A=1\n  BB=2 C=3");
    }

    #[test]
    fn lines_are_broken_by_the_cells_of_the_terminal() {
        // An é has two bytes and takes one cell. A 数 takes two cells.
        assert_eq!(hanging("é é é é", 0, 0, Some(7)), "é é é é");
        assert_eq!(hanging("数 数 数", 0, 0, Some(7)), "数 数\n数");
    }

    #[test]
    fn colours_take_no_room() {
        assert_eq!(visible("\x1b[1mslow:\x1b[0m a"), 7);
    }
}
