//! Aligns the cells of a table: names to the left, numbers to the right.

use unicode_width::UnicodeWidthStr;

/// The columns of a table that is written line by line.
pub struct Columns {
    /// The width of each column, in the character cells of a terminal.
    widths: Vec<usize>,
    /// Whether the column of that index holds names.
    is_name: fn(usize) -> bool,
}

impl Columns {
    /// Columns that are as wide as their widest cell or head.
    pub fn new(heads: &[&str], rows: &[impl AsRef<[String]>], is_name: fn(usize) -> bool) -> Columns {
        let widest = |column: usize| rows.iter().map(|row| row.as_ref()[column].width()).max().unwrap_or(0);
        let width = |column: usize| widest(column).max(heads[column].width());
        Columns { widths: (0..heads.len()).map(width).collect(), is_name }
    }

    /// One line of the table. Two spaces follow each cell.
    pub fn line(&self, cells: &[impl AsRef<str>]) -> String {
        let mut line = String::new();
        for (column, cell) in cells.iter().enumerate() {
            let cell = cell.as_ref();
            let space = " ".repeat(self.widths[column] - cell.width());
            line += &if (self.is_name)(column) { format!("{cell}{space}  ") } else { format!("{space}{cell}  ") };
        }
        line
    }

    /// The width of a whole line.
    pub fn width(&self) -> usize {
        self.widths.iter().sum::<usize>() + 2 * self.widths.len()
    }
}

#[cfg(test)]
mod tests {
    use super::Columns;

    #[test]
    fn wide_characters_take_two_cells() {
        let rows = [["数据".to_owned(), "8".to_owned()], ["tp".to_owned(), "16".to_owned()]];
        let columns = Columns::new(&["name", "size"], &rows, |column| column == 0);
        assert_eq!(columns.line(&rows[0]), "数据     8  ");
        assert_eq!(columns.line(&rows[1]), "tp      16  ");
    }
}
