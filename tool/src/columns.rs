//! Rows of cells under heads: names to the left, numbers to the right.

pub struct Columns {
    widths: Vec<usize>,
    is_name: fn(usize) -> bool,
}

impl Columns {
    /// As wide as the widest of each column.
    pub fn new(heads: &[&str], rows: &[impl AsRef<[String]>], is_name: fn(usize) -> bool) -> Columns {
        let widest = |column: usize| rows.iter().map(|row| length(&row.as_ref()[column])).max().unwrap_or(0);
        let width = |column: usize| widest(column).max(heads[column].len());
        Columns { widths: (0..heads.len()).map(width).collect(), is_name }
    }

    /// One row; two spaces follow each cell.
    pub fn line(&self, cells: &[impl AsRef<str>]) -> String {
        let mut line = String::new();
        for (column, cell) in cells.iter().enumerate() {
            let cell = cell.as_ref();
            let space = " ".repeat(self.widths[column] - length(cell));
            line += &if (self.is_name)(column) { format!("{cell}{space}  ") } else { format!("{space}{cell}  ") };
        }
        line
    }

    /// Of a whole line.
    pub fn width(&self) -> usize {
        self.widths.iter().sum::<usize>() + 2 * self.widths.len()
    }
}

fn length(text: &str) -> usize {
    text.chars().count()
}
