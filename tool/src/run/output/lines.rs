//! Cuts what a rank writes into whole lines, and puts the time and the rank before each.

/// The longest line that is kept until it ends, in bytes. A longer line is passed on in parts.
const MAX_LINE: usize = 1 << 20;
/// Stands at the end of a part after which the line goes on.
const CUT: &str = " [line cut at 1 MiB]";
/// Stands before a part that continues a line.
const GOES_ON: &str = "[line goes on] ";

/// The bytes of one output of a rank that are not passed on yet.
#[derive(Default)]
pub struct Lines {
    /// The line that has begun and not ended.
    rest: Vec<u8>,
    /// Whether a part of that line was passed on already.
    is_cut: bool,
    /// How many bytes of `rest` are shown already.
    shown: usize,
}

/// Whole lines. Only the first may be the end of a longer line, and the last one its beginning.
pub struct Block {
    pub bytes: Vec<u8>,
    /// Whether the first line began in an earlier block.
    goes_on: bool,
    /// Whether the last line ends in a later block.
    is_cut: bool,
    /// How many bytes are shown already.
    shown: usize,
}

impl Lines {
    /// Takes what a rank has written, and gives the lines that have ended. With
    /// `at_carriage_return` a line also ends where it will be written over, as progress bars do.
    pub fn take(&mut self, bytes: &[u8], at_carriage_return: bool) -> Option<Block> {
        let ends = |byte: &u8| *byte == b'\n' || (at_carriage_return && *byte == b'\r');
        let end = bytes.iter().rposition(ends).map(|at| at + 1);
        let (now, later) = bytes.split_at(end.unwrap_or(0));
        if end.is_none() && self.rest.len() + later.len() <= MAX_LINE {
            self.rest.extend_from_slice(later);
            return None;
        }
        let is_cut = end.is_none();
        let goes_on = std::mem::replace(&mut self.is_cut, is_cut);
        let mut block = std::mem::take(&mut self.rest);
        match is_cut {
            true => block.extend_from_slice(later),
            false => {
                block.extend_from_slice(now);
                self.rest.extend_from_slice(later);
            }
        }
        Some(Block { bytes: block, goes_on, is_cut, shown: std::mem::take(&mut self.shown) })
    }

    /// Whether the line that has not ended has bytes that are not shown.
    pub fn has_news(&self) -> bool {
        self.rest.len() > self.shown
    }

    /// Gives what is not shown of the line that has not ended. It stays in the line.
    pub fn show(&mut self) -> &[u8] {
        let from = std::mem::replace(&mut self.shown, self.rest.len());
        &self.rest[from..]
    }

    /// Gives the last line, where it has no end.
    pub fn finish(&mut self) -> Option<Block> {
        let bytes = std::mem::take(&mut self.rest);
        let goes_on = std::mem::take(&mut self.is_cut);
        let shown = std::mem::take(&mut self.shown);
        (!bytes.is_empty()).then_some(Block { bytes, goes_on, is_cut: false, shown })
    }
}

impl Block {
    /// Removes the bytes that were shown already from the block, and returns whether there were
    /// any.
    pub fn without_shown(&mut self) -> bool {
        let shown = std::mem::take(&mut self.shown);
        self.bytes.drain(..shown);
        self.goes_on &= shown == 0;
        shown > 0
    }

    /// The lines with this text before each. Each of them ends with a line break, and those that
    /// were cut say so.
    pub fn decorated(&self, before: &str) -> Vec<u8> {
        let mut text = Vec::with_capacity(self.bytes.len() + self.bytes.len() / 8 + before.len() + 64);
        let mut goes_on = self.goes_on;
        for line in self.bytes.split_inclusive(|byte| *byte == b'\n') {
            text.extend_from_slice(before.as_bytes());
            if std::mem::take(&mut goes_on) {
                text.extend_from_slice(GOES_ON.as_bytes());
            }
            text.extend_from_slice(line);
        }
        if text.last() != Some(&b'\n') {
            let mark = if self.is_cut { CUT } else { "" };
            text.extend_from_slice(mark.as_bytes());
            text.push(b'\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_whole() {
        let mut lines = Lines::default();
        assert!(lines.take(b"one", false).is_none());
        let block = lines.take(b" line\ntwo\nthr", false).unwrap();
        assert_eq!(block.decorated("> "), b"> one line\n> two\n");
        assert!(lines.take(b"ee\r", false).is_none());
        assert_eq!(lines.finish().unwrap().decorated("> "), b"> three\r\n");
        assert!(lines.finish().is_none());
    }

    #[test]
    fn a_line_that_is_written_over_ends_there() {
        let mut lines = Lines::default();
        assert_eq!(lines.take(b"\r 10%\r 20%", true).unwrap().bytes, b"\r 10%\r");
        assert_eq!(lines.finish().unwrap().bytes, b" 20%");
    }

    #[test]
    fn a_line_that_is_too_long_is_marked_where_it_is_cut() {
        let mut lines = Lines::default();
        assert!(lines.take(&vec![b'x'; MAX_LINE], false).is_none(), "it is not longer");
        let cut = lines.take(b"yy", false).unwrap().decorated("> ");
        assert!(cut.starts_with(b"> xx") && cut.ends_with(b"xyy [line cut at 1 MiB]\n"));
        assert_eq!(cut.len(), 2 + MAX_LINE + 2 + CUT.len() + 1, "nothing is lost");
        let block = lines.take(b"the end\nnext\n", false).unwrap();
        assert_eq!(block.decorated("> "), b"> [line goes on] the end\n> next\n");
    }
}
