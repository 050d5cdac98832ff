//! The last lines of each rank's standard error as plain text, for a report.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use crate::run::reason::{Reason, reason};

/// How many bytes of an output are kept. An error may be followed by a long list of stack frames.
pub const TAIL: usize = 16 << 10;
/// How many lines of an output are shown.
const TAIL_LINES: usize = 10;

/// The last bytes of each rank's standard error, by rank, for those that have written any.
#[derive(Default)]
pub struct Tails(Vec<(u32, Vec<u8>)>);

impl Tails {
    /// Keeps the last bytes of what a rank has written.
    pub fn keep(&mut self, rank: u32, bytes: &[u8]) {
        let index = self.0.iter().position(|(known, _)| *known == rank).unwrap_or_else(|| {
            self.0.push((rank, Vec::new()));
            self.0.len() - 1
        });
        let tail = &mut self.0[index].1;
        tail.extend_from_slice(&bytes[bytes.len().saturating_sub(TAIL)..]);
        let too_long = tail.len().saturating_sub(TAIL);
        tail.drain(..too_long);
    }

    /// Forgets what this rank has written.
    pub fn forget(&mut self, rank: u32) {
        self.0.retain(|(known, _)| *known != rank);
    }

    /// The last lines that this rank has written.
    pub fn last_words(&self, rank: u32) -> LastWords {
        let tail = self.0.iter().find(|(known, _)| *known == rank);
        tail.map_or_else(LastWords::default, |(_, tail)| LastWords::of(tail))
    }
}

/// The last lines of a file. Empty where it cannot be read.
pub fn last_words_of(path: &Path) -> LastWords {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL as u64)))?;
        let mut text = Vec::new();
        file.take(TAIL as u64).read_to_end(&mut text)?;
        Ok(text)
    };
    LastWords::of(&read().unwrap_or_default())
}

/// The last words that a rank wrote before it ended.
#[derive(Default)]
pub struct LastWords {
    /// The last lines that are not blank, without escape sequences. Where a line was written over,
    /// as progress bars do, its last text is kept.
    pub lines: String,
    /// Why the rank failed, as [`reason`] gives it.
    pub reason: Option<Reason>,
}

impl LastWords {
    /// Reads the end of an output.
    pub fn of(bytes: &[u8]) -> LastWords {
        let text = String::from_utf8_lossy(bytes);
        let lines: Vec<String> = text.lines().map(plain).filter(|line| !line.trim().is_empty()).collect();
        LastWords { lines: lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n"), reason: reason(&lines) }
    }
}

/// One line without escape sequences and control characters.
fn plain(line: &str) -> String {
    let mut out = String::new();
    let mut characters = line.trim_end_matches('\r').rsplit('\r').next().unwrap_or_default().chars();
    while let Some(character) = characters.next() {
        match character {
            // A control sequence, ESC [ ..., ends with a letter or with one of @[\]^_`{|}~
            // (ECMA-48).
            '\x1b' if characters.as_str().starts_with('[') => {
                characters.next();
                characters.find(|character| ('@'..='~').contains(character));
            }
            '\t' => out.push('\t'),
            character if character.is_control() => {}
            character => out.push(character),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::LastWords;

    #[test]
    fn the_last_lines_are_plain_text() {
        assert_eq!(
            LastWords::of(b"one\n\x1b[1;31mtwo\x1b[0m\r\n\n 10%\r 99%\r100%\n\tthree\xff\x07").lines,
            "one\ntwo\n100%\n\tthree\u{fffd}"
        );
        let many: String = (0..30).map(|line| format!("{line}\n")).collect();
        assert_eq!(
            LastWords::of(many.as_bytes()).lines,
            (20..30).map(|line| line.to_string()).collect::<Vec<_>>().join("\n")
        );
        assert_eq!(LastWords::of(b"").lines, "");
    }
}
