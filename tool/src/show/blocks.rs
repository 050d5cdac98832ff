//! The grid of ranks for a terminal. The last two dimensions are rows and columns. The others are
//! blocks of such grids, which stand beside each other.

use super::view::{Axis, Ranks, View};
use super::words::short;
use crate::style::Style;
use crate::words::count;

/// The largest number of ranks in a line. A narrow terminal has fewer. A longer row continues in
/// the next line.
const COLUMNS: usize = 16;
/// The most characters of a dimension's name.
const NAME: usize = 12;
/// The spaces between two blocks.
const BETWEEN: usize = 3;

/// A line, after its length without escape sequences.
type Line = (usize, String);

/// The arrangement of the ranks in rows, columns and blocks.
struct Layout<'a> {
    view: &'a View,
    /// The dimension whose groups are coloured.
    axis: Option<&'a Axis>,
    style: Style,
    /// The number of rows and columns of a block.
    rows: usize,
    columns: usize,
    /// The number of dimensions that tell the blocks apart. The last two dimensions are the rows
    /// and columns of a block.
    outer: usize,
    /// The names of the last two dimensions, shortened.
    row_name: String,
    column_name: String,
    /// The characters of the longest rank.
    digits: usize,
    /// The characters of the labels to the left of the ranks.
    head: usize,
    /// The most ranks in a line.
    in_line: usize,
}

/// All blocks, in lines of that width. The ranks are coloured by their groups along `axis`.
pub fn blocks(view: &View, axis: Option<&Axis>, style: Style, width: usize) -> String {
    let layout = Layout::new(view, axis, style, width);
    let size = layout.rows * layout.columns;
    let blocks: Vec<Vec<Line>> = (0..view.grid.ranks.len()).step_by(size).map(|first| layout.block(first)).collect();
    let wide = blocks.iter().flatten().map(|line| line.0).max().unwrap_or(0);
    let beside = ((width + BETWEEN) / (wide + BETWEEN)).max(1);
    let mut out = String::new();
    for blocks in blocks.chunks(beside) {
        out.push('\n');
        for line in 0..blocks[0].len() {
            let mut text = String::new();
            for block in blocks {
                let (length, part) = &block[line];
                text += &format!("{part}{}", " ".repeat(wide - length + BETWEEN));
            }
            out += text.trim_end();
            out.push('\n');
        }
    }
    if let Some(axis) = axis.filter(|_| style.colour) {
        let groups = count(view.groups(axis), "group");
        out += &style.dim(&format!("coloured by {}: {groups} of {}", axis.name, axis.size));
        out.push('\n');
    }
    out
}

impl<'a> Layout<'a> {
    fn new(view: &'a View, axis: Option<&'a Axis>, style: Style, width: usize) -> Layout<'a> {
        let Ranks { names, sizes, ranks } = &view.grid;
        let from_end = |index: usize| sizes.len().checked_sub(index).map(|dim| (short(&names[dim], NAME), sizes[dim]));
        let (column_name, columns) = from_end(1).unwrap_or((String::new(), 1));
        let (row_name, rows) = from_end(2).unwrap_or((String::new(), 1));
        let length = |text: &str| text.chars().count();
        let digits = ranks.iter().map(|rank| length(&rank.to_string())).max().unwrap_or(1);
        let labels = if sizes.len() > 1 { length(&format!("{row_name} {}", rows - 1)) } else { 0 };
        let head = labels.max(length(&column_name));
        Layout {
            view,
            axis,
            style,
            rows,
            columns,
            outer: sizes.len().saturating_sub(2),
            head,
            in_line: (width.saturating_sub(head + 1) / (digits + 2)).clamp(1, COLUMNS),
            row_name,
            column_name,
            digits,
        }
    }

    /// The block whose first rank has this row-major index.
    fn block(&self, first: usize) -> Vec<Line> {
        let mut lines = Vec::new();
        if self.outer > 0 {
            let coordinate = self.view.grid.place(first);
            let names = self.view.grid.names.iter().take(self.outer);
            let parts: Vec<String> =
                names.zip(coordinate).map(|(name, at)| format!("{} {at}", short(name, NAME))).collect();
            let title = parts.join(", ");
            lines.push((title.chars().count(), self.style.bold(&title)));
        }
        if self.columns <= self.in_line && !self.view.grid.sizes.is_empty() {
            let digits = self.digits;
            let numbers: String = (0..self.columns).map(|column| format!(" {column:>digits$} ")).collect();
            let text = format!("{} {}", self.label(&self.column_name), numbers.trim_end());
            lines.push((text.chars().count(), self.style.dim(&text)));
        }
        for row in 0..self.rows {
            for start in (0..self.columns).step_by(self.in_line) {
                let label = match start == 0 && self.view.grid.sizes.len() > 1 {
                    true => format!("{} {row}", self.row_name),
                    false => String::new(),
                };
                let end = self.columns.min(start + self.in_line);
                let mut text = self.style.dim(&self.label(&label)) + " ";
                text.extend((start..end).map(|column| self.cell(first + row * self.columns + column)));
                lines.push((self.head + 1 + (end - start) * (self.digits + 2), text));
            }
        }
        lines
    }

    /// A label, with spaces before it that fill its room.
    fn label(&self, text: &str) -> String {
        format!("{}{text}", " ".repeat(self.head - text.chars().count()))
    }

    /// One rank, in brackets where it is the chosen one.
    fn cell(&self, index: usize) -> String {
        let (rank, digits) = (self.view.grid.ranks[index].to_string(), self.digits);
        let cell = match self.view.chosen == Some(index) {
            true => format!("{:>width$}", format!("[{rank}]"), width = digits + 2),
            false => format!(" {rank:>digits$} "),
        };
        match self.axis {
            Some(axis) => self.style.group(axis.group(index), &cell),
            None => cell,
        }
    }
}
