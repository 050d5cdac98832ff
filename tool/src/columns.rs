//! Aligns the cells of a table: names to the left, numbers to the right. A table that is wider
//! than the terminal is written as several tables below each other, so that the terminal breaks no
//! line.

use unicode_width::UnicodeWidthStr;

/// The spaces between two columns.
pub const GAP: usize = 2;

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
        let all: Vec<usize> = (0..cells.len()).collect();
        self.part(cells, &all)
    }

    /// The part of a line that has these columns.
    pub fn part(&self, cells: &[impl AsRef<str>], columns: &[usize]) -> String {
        let mut line = String::new();
        for column in columns.iter().copied() {
            let cell = cells[column].as_ref();
            let space = " ".repeat(self.widths[column].saturating_sub(cell.width()));
            line += &if (self.is_name)(column) { format!("{cell}{space}  ") } else { format!("{space}{cell}  ") };
        }
        line
    }

    /// The width of a whole line.
    pub fn width(&self) -> usize {
        self.widths.iter().sum::<usize>() + GAP * self.widths.len()
    }

    /// The columns of each of the tables into which this one is split, so that no line is wider
    /// than `limit`. The first `keys` columns, which tell the rows apart, are in all of them.
    /// There is one table where everything fits. A column that is too wide even beside the keys
    /// alone gets its own table.
    pub fn split(&self, limit: Option<usize>, keys: usize) -> Vec<Vec<usize>> {
        let key: Vec<usize> = (0..keys.min(self.widths.len())).collect();
        let room = |columns: &[usize]| columns.iter().map(|column| self.widths[*column] + GAP).sum::<usize>() - GAP;
        let mut tables = vec![key.clone()];
        for column in key.len()..self.widths.len() {
            let mut last = tables.pop().unwrap_or_default();
            last.push(column);
            if last.len() > key.len() + 1 && limit.is_some_and(|limit| room(&last) > limit) {
                last.pop();
                tables.push(last);
                last = key.iter().copied().chain([column]).collect();
            }
            tables.push(last);
        }
        tables
    }
}

/// A whole table with its heads, which `style` may colour, split where it is wider than `limit`
/// ([`Columns::split`]). Each line ends with a line feed.
pub fn table(
    heads: &[&str],
    rows: &[impl AsRef<[String]>],
    is_name: fn(usize) -> bool,
    keys: usize,
    limit: Option<usize>,
    style: impl Fn(&str) -> String,
) -> String {
    let columns = Columns::new(heads, rows, is_name);
    let part = |chosen: Vec<usize>| {
        let head = style(columns.part(heads, &chosen).trim_end());
        let lines = rows.iter().map(|row| format!("{}\n", columns.part(row.as_ref(), &chosen).trim_end()));
        format!("{head}\n{}", lines.collect::<String>())
    };
    columns.split(limit, keys).into_iter().map(part).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::{Columns, table};

    #[test]
    fn wide_characters_take_two_cells() {
        let rows = [["数据".to_owned(), "8".to_owned()], ["tp".to_owned(), "16".to_owned()]];
        let columns = Columns::new(&["name", "size"], &rows, |column| column == 0);
        assert_eq!(columns.line(&rows[0]), "数据     8  ");
        assert_eq!(columns.line(&rows[1]), "tp      16  ");
    }

    #[test]
    fn a_table_that_is_too_wide_is_split_between_columns() {
        let rows = [["0", "12345", "1.5 GiB"], ["10", "7", "20 MiB"]].map(|row| row.map(str::to_owned));
        let shown = |limit| table(&["rank", "pid", "memory"], &rows, |_| false, 1, limit, str::to_owned);
        let whole = "rank    pid   memory\n   0  12345  1.5 GiB\n  10      7   20 MiB\n";
        assert_eq!(shown(None), whole);
        assert_eq!(shown(Some(20)), whole);
        let split = "rank    pid\n   0  12345\n  10      7\n\nrank   memory\n   0  1.5 GiB\n  10   20 MiB\n";
        assert_eq!(shown(Some(19)), split);
        assert_eq!(shown(Some(3)), split, "no column is broken");
    }
}
