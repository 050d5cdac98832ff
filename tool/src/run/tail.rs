//! The last lines of an output as plain text, for a report.

/// How many bytes of an output are kept.
pub const TAIL: usize = 4 << 10;
/// How many lines of it are shown.
const TAIL_LINES: usize = 10;

/// The last lines that are not blank, without escape sequences. Where a line was written over, as
/// progress bars do, the text that stood there last.
pub fn last_lines(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<String> = text.lines().map(plain).filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
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
    use super::last_lines;

    #[test]
    fn the_last_lines_are_plain_text() {
        assert_eq!(
            last_lines(b"one\n\x1b[1;31mtwo\x1b[0m\r\n\n 10%\r 99%\r100%\n\tthree\xff\x07"),
            "one\ntwo\n100%\n\tthree\u{fffd}"
        );
        let many: String = (0..30).map(|line| format!("{line}\n")).collect();
        assert_eq!(last_lines(many.as_bytes()), (20..30).map(|line| line.to_string()).collect::<Vec<_>>().join("\n"));
        assert_eq!(last_lines(b""), "");
    }
}
