//! Where each rank's cell lies in a picture: the last dimension as columns, the one before as rows, the others as blocks of such grids. Dimensions of
//! size 1 take no room, long ones go on in the next line or block.

use super::svg::{shorten, text_width};
use super::view::Ranks;

/// A cell's width and height.
pub const CELL: (i32, i32) = (38, 28);
/// The room of a block around its cells; with hosts their boxes need more.
const PADDING: i32 = 8;
const HOST_PADDING: i32 = 14;
/// Between cells, and where a host's box ends between them.
const GAP: i32 = 5;
const HOST_GAP: (i32, i32) = (17, 21);
/// Between blocks.
const BLOCK_GAP: i32 = 10;
/// Cells in a row or rows in a block before a long dimension goes on elsewhere.
const LONGEST: usize = 16;
/// Blocks go below each other where they would be wider together.
const WIDEST: i32 = 790;
const TITLE_HEIGHT: i32 = 18;
const LABEL_HEIGHT: i32 = 14;
const ROW_LABEL_WIDEST: i32 = 84;
const SMALL: f64 = 10.5;

pub struct Cell {
    pub x: i32,
    pub y: i32,
    pub block: usize,
    pub row: usize,
    pub column: usize,
}

pub struct Block {
    pub x: i32,
    pub y: i32,
    pub width: i32,
    pub height: i32,
}

pub struct Label {
    pub x: i32,
    pub y: i32,
    pub anchor: &'static str,
    pub title: bool,
    pub text: String,
}

pub struct Grid {
    /// By row-major index.
    pub cells: Vec<Cell>,
    pub blocks: Vec<Block>,
    pub labels: Vec<Label>,
    /// What is above the first block.
    pub head: i32,
    pub width: i32,
    pub height: i32,
}

/// A direction of the picture: a dimension, or a part of a long one.
#[derive(Clone, Copy)]
struct Step {
    dim: usize,
    /// One step is so many of the dimension's.
    unit: usize,
    length: usize,
}

impl Step {
    fn at(&self, coordinate: &[usize]) -> usize {
        coordinate[self.dim] / self.unit % self.length
    }
}

/// The innermost first.
fn steps(sizes: &[usize]) -> Vec<Step> {
    let mut steps = Vec::new();
    for (dim, &size) in sizes.iter().enumerate().rev().filter(|(_, size)| **size > 1) {
        steps.push(Step { dim, unit: 1, length: size.min(LONGEST) });
        if size > LONGEST {
            steps.push(Step { dim, unit: LONGEST, length: size.div_ceil(LONGEST) });
        }
    }
    steps
}

/// Where the lines of cells begin, from 0, when some gaps are wide; and the end of the last.
fn lines(count: usize, cell: i32, wide: &[bool], gap: i32) -> (Vec<i32>, i32) {
    let mut at = 0;
    let mut starts = Vec::with_capacity(count);
    for line in 0..count {
        starts.push(at);
        at += cell + if wide.get(line).copied().unwrap_or(false) { gap } else { GAP };
    }
    let end = starts.last().map_or(0, |last| last + cell);
    (starts, end)
}

/// Places the ranks; `host` says on which host a row-major index is, where there are hosts.
pub fn place(grid: &Ranks, host: Option<&dyn Fn(usize) -> usize>) -> Grid {
    let steps = steps(&grid.sizes);
    let coordinates: Vec<Vec<usize>> = (0..grid.ranks.len()).map(|index| grid.place(index)).collect();
    let length = |step: usize| steps.get(step).map_or(1, |step| step.length);
    let at = |step: usize, coordinate: &[usize]| steps.get(step).map_or(0, |step| step.at(coordinate));
    let (columns, rows) = (length(0), length(1));
    let block_of = |coordinate: &[usize]| {
        (2..steps.len()).rev().fold(0, |block, step| block * length(step) + at(step, coordinate))
    };
    let spots: Vec<(usize, usize, usize)> =
        coordinates.iter().map(|coordinate| (block_of(coordinate), at(1, coordinate), at(0, coordinate))).collect();
    let blocks = (2..steps.len()).map(length).product::<usize>();

    // Where two neighbours of any block are on different hosts, their boxes need room.
    let mut table = vec![None; blocks * rows * columns];
    if let Some(host) = host {
        for (index, (block, row, column)) in spots.iter().enumerate() {
            table[(block * rows + row) * columns + column] = Some(host(index));
        }
    }
    let differ = |a: usize, b: usize| matches!((table[a], table[b]), (Some(a), Some(b)) if a != b);
    let lines_of = |block: usize| (0..rows).map(move |row| (block * rows + row) * columns);
    let all_lines: Vec<usize> = (0..blocks).flat_map(lines_of).collect();
    let wide_columns: Vec<bool> =
        (1..columns).map(|column| all_lines.iter().any(|line| differ(line + column - 1, line + column))).collect();
    let wide_rows: Vec<bool> = (1..rows)
        .map(|row| {
            (0..blocks).any(|block| {
                (0..columns).any(|column| {
                    let line = (block * rows + row) * columns + column;
                    differ(line - columns, line)
                })
            })
        })
        .collect();
    let (xs, cells_width) = lines(columns, CELL.0, &wide_columns, HOST_GAP.0);
    let (ys, cells_height) = lines(rows, CELL.1, &wide_rows, HOST_GAP.1);
    let padding = if host.is_some() { HOST_PADDING } else { PADDING };

    // Labels: rows at the left, columns and the block's title above.
    let labelled = |step: usize, coordinate: &[usize]| {
        let step = steps[step];
        format!("{} {}", shorten(&grid.names[step.dim], f64::from(ROW_LABEL_WIDEST - 20), SMALL), coordinate[step.dim])
    };
    let long_rows = steps.len() > 2 && steps[1].dim == steps[2].dim;
    let long_columns = steps.len() > 1 && steps[0].dim == steps[1].dim;
    let mut row_texts = vec![String::new(); blocks * rows];
    let mut column_texts = vec![String::new(); columns];
    let mut titles: Vec<Vec<String>> = vec![Vec::new(); blocks];
    for (coordinate, (block, row, column)) in coordinates.iter().zip(&spots) {
        if steps.len() > 1 && *column == 0 {
            row_texts[block * rows + row] = labelled(1, coordinate);
        }
        if !steps.is_empty() && !long_columns {
            column_texts[*column] = labelled(0, coordinate);
        }
        if *row == 0 && *column == 0 && steps.len() > 2 {
            let outer = (2..steps.len()).rev().filter(|step| *step == 2 || steps[*step].dim != steps[*step - 1].dim);
            titles[*block] = outer.map(|step| labelled(step, coordinate)).collect();
        }
    }
    let row_label =
        row_texts.iter().map(|text| text_width(text, SMALL) as i32 + 8).max().filter(|_| steps.len() > 1).unwrap_or(0);
    let bare = column_texts.iter().any(|text| text_width(text, SMALL) > f64::from(CELL.0 + GAP - 2));
    let column_label = match (steps.is_empty() || long_columns, bare) {
        (true, _) => 0,
        (false, false) => LABEL_HEIGHT,
        (false, true) => 2 * LABEL_HEIGHT - 2,
    };
    let title = if steps.len() > 2 { TITLE_HEIGHT } else { 0 };
    let block_label = if long_rows { row_label } else { 0 };
    let first_label = row_label - block_label;
    let head = title + column_label + 2;
    let size = (cells_width + 2 * padding, cells_height + 2 * padding);

    // Blocks in turn beside and below each other.
    let (mut width, mut height) = (block_label + size.0, head + size.1);
    // Of each step: how many beside each other, and the way to the next beside and below.
    let mut pitches: Vec<(usize, i32, i32)> = Vec::new();
    let mut beside = true;
    for step in &steps[2.min(steps.len())..] {
        let n = step.length;
        let fits = |n: usize| (width + BLOCK_GAP) * n as i32 - BLOCK_GAP <= WIDEST - first_label;
        let across =
            if beside { (1..=n).rev().find(|across| n % across == 0 && fits(*across)).unwrap_or(1) } else { 1 };
        let pitch = (across, width + BLOCK_GAP, height + BLOCK_GAP);
        width += pitch.1 * (across as i32 - 1);
        height += pitch.2 * (n.div_ceil(across) as i32 - 1);
        beside = across == 1;
        pitches.push(pitch);
    }
    let corner = |block: usize| {
        let (mut rest, mut x, mut y) = (block, first_label + block_label, head);
        for (step, (across, right, down)) in pitches.iter().enumerate() {
            let at = rest % length(step + 2);
            rest /= length(step + 2);
            (x, y) = (x + (at % across) as i32 * right, y + (at / across) as i32 * down);
        }
        (x, y)
    };
    let cell = |&(block, row, column): &(usize, usize, usize)| {
        let (x, y) = corner(block);
        Cell { x: x + padding + xs[column], y: y + padding + ys[row], block, row, column }
    };
    let mut labels = Vec::new();
    for (block, title) in titles.iter().enumerate() {
        let (x, y) = corner(block);
        let middle = |column: usize| x + padding + xs[column] + CELL.0 / 2;
        let text = title.join(" · ");
        if !text.is_empty() {
            let text = if text_width(&text, 11.0) > f64::from(size.0 + BLOCK_GAP) { numbers(title) } else { text };
            labels.push(Label { x: x + size.0 / 2, y: y - column_label - 7, anchor: "middle", title: true, text });
        }
        if bare && column_label > 0 {
            let name = &grid.names[steps[0].dim];
            let text = shorten(name, f64::from(size.0), SMALL);
            labels.push(Label { x: x + size.0 / 2, y: y - LABEL_HEIGHT - 3, anchor: "middle", title: false, text });
        }
        for (column, text) in column_texts.iter().enumerate().filter(|(_, text)| !text.is_empty()) {
            let text = if bare { column.to_string() } else { text.clone() };
            labels.push(Label { x: middle(column), y: y - 5, anchor: "middle", title: false, text });
        }
        if long_rows || x == first_label {
            for (row, at) in ys.iter().enumerate() {
                let text = row_texts[block * rows + row].clone();
                labels.push(Label {
                    x: x - 6,
                    y: y + padding + at + CELL.1 / 2 + 4,
                    anchor: "end",
                    title: false,
                    text,
                });
            }
        }
    }
    labels.retain(|label| !label.text.is_empty());
    Grid {
        cells: spots.iter().map(cell).collect(),
        blocks: (0..blocks)
            .map(|block| (corner(block), size))
            .map(|((x, y), (width, height))| Block { x, y, width, height })
            .collect(),
        labels,
        head,
        width: first_label + width,
        height,
    }
}

/// A title without its names: "(1, 0)".
fn numbers(title: &[String]) -> String {
    let numbers: Vec<&str> = title.iter().map(|part| part.rsplit(' ').next().unwrap_or_default()).collect();
    format!("({})", numbers.join(", "))
}
