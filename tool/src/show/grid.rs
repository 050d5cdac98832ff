//! Places the cell of each rank in a picture. The last dimension gives the columns, the one
//! before it the rows, and the others blocks of such grids. A dimension of size 1 takes no room. A
//! long one continues in the next line or block. All lengths are in pixels.

use super::canvas::{shorten, text_width};
use super::view::Ranks;

/// The width and height of a cell.
pub const CELL: (i32, i32) = (38, 28);
/// The room of a block around its cells.
const PADDING: i32 = 8;
/// The room of a block around its cells when it also holds the boxes of hosts.
const HOST_PADDING: i32 = 14;
/// The gap between two cells.
const GAP: i32 = 5;
/// The gap between two columns and two rows where the boxes of two hosts meet.
const HOST_GAP: (i32, i32) = (17, 21);
/// The gap between two blocks.
const BLOCK_GAP: i32 = 10;
/// The most cells in a row and rows in a block. A longer dimension continues elsewhere.
const LONGEST: usize = 16;
/// The widest row of blocks. Where blocks would be wider together, they stand below each other.
const WIDEST: i32 = 790;
/// The height of a block's title.
const TITLE_HEIGHT: i32 = 18;
/// The height of the labels of the columns.
const LABEL_HEIGHT: i32 = 14;
/// The widest name beside the number of a row.
const ROW_LABEL_WIDEST: i32 = 64;
/// The size of the labels' font.
const SMALL: f64 = 10.5;

/// The cell of a rank.
pub struct Cell {
    /// Its upper left corner in the picture.
    pub x: i32,
    pub y: i32,
    /// The number of its block, and its row and column in the block.
    pub block: usize,
    pub row: usize,
    pub column: usize,
}

/// The background of a block.
pub struct Block {
    /// Its upper left corner in the picture.
    pub x: i32,
    pub y: i32,
    pub width: i32,
    pub height: i32,
}

/// A text beside the cells.
pub struct Label {
    /// The place of its anchor, on the baseline.
    pub x: i32,
    pub y: i32,
    /// The part of the text that lies at the anchor, in the words of SVG: "middle" or "end".
    pub anchor: &'static str,
    /// Whether the label is the title of a block.
    pub title: bool,
    pub text: String,
}

/// Everything that has a place in the picture.
pub struct Grid {
    /// The cells by row-major index.
    pub cells: Vec<Cell>,
    pub blocks: Vec<Block>,
    pub labels: Vec<Label>,
    /// The height of the labels above the first block.
    pub head: i32,
    /// The size of the whole.
    pub width: i32,
    pub height: i32,
}

/// A direction in which the picture goes: a dimension, or a part of a long one.
#[derive(Clone, Copy)]
struct Step {
    /// The index of the dimension.
    dim: usize,
    /// The number by which the coordinate grows in one step.
    unit: usize,
    /// The number of steps.
    length: usize,
}

impl Step {
    fn at(&self, coordinate: &[usize]) -> usize {
        coordinate[self.dim] / self.unit % self.length
    }
}

/// The directions for dimensions of these sizes, the innermost first.
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

/// Returns the position at which each line of cells begins, from 0, and the end of the last line.
/// `wide` tells after which lines the gap is wide.
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

/// Places the ranks. `host` gives the host of a row-major index, where hosts are known.
pub fn place(ranks: &Ranks, host: Option<&dyn Fn(usize) -> usize>) -> Grid {
    let layout = Layout::new(ranks);
    let (wide_columns, wide_rows) = host.map(|host| layout.host_borders(host)).unwrap_or_default();
    let (xs, cells_width) = lines(layout.columns, CELL.0, &wide_columns, HOST_GAP.0);
    let (ys, cells_height) = lines(layout.rows, CELL.1, &wide_rows, HOST_GAP.1);
    let padding = if host.is_some() { HOST_PADDING } else { PADDING };
    let size = (cells_width + 2 * padding, cells_height + 2 * padding);
    let texts = Texts::new(&layout, size.0);
    let (corners, width, height) = layout.corners(size, &texts);
    let cell = |spot: &Spot| {
        let (x, y) = corners[spot.block];
        Cell {
            x: x + padding + xs[spot.column],
            y: y + padding + ys[spot.row],
            block: spot.block,
            row: spot.row,
            column: spot.column,
        }
    };
    let middles: Vec<i32> = xs.iter().map(|x| x + padding + CELL.0 / 2).collect();
    let baselines: Vec<i32> = ys.iter().map(|y| y + padding + CELL.1 / 2 + 4).collect();
    Grid {
        cells: layout.spots.iter().map(cell).collect(),
        blocks: corners.iter().map(|&(x, y)| Block { x, y, width: size.0, height: size.1 }).collect(),
        labels: texts.labels(&layout, &corners, &middles, &baselines),
        head: texts.head(),
        width,
        height,
    }
}

/// The block, row and column of a rank.
struct Spot {
    block: usize,
    row: usize,
    column: usize,
}

/// In which block, row and column each rank is.
struct Layout<'a> {
    ranks: &'a Ranks,
    /// The direction of the columns, that of the rows, and then the directions that lead from block
    /// to block.
    steps: Vec<Step>,
    /// The number of columns and rows of a block, and of blocks.
    columns: usize,
    rows: usize,
    blocks: usize,
    /// The coordinates by row-major index.
    coordinates: Vec<Vec<usize>>,
    /// The spots by row-major index.
    spots: Vec<Spot>,
}

impl<'a> Layout<'a> {
    fn new(ranks: &'a Ranks) -> Layout<'a> {
        let steps = steps(&ranks.sizes);
        let coordinates: Vec<Vec<usize>> = (0..ranks.ranks.len()).map(|index| ranks.place(index)).collect();
        let at = |step: usize, coordinate: &[usize]| steps.get(step).map_or(0, |step| step.at(coordinate));
        let outer = &steps[steps.len().min(2)..];
        let spot = |coordinate: &Vec<usize>| Spot {
            block: outer.iter().rev().fold(0, |block, step| block * step.length + step.at(coordinate)),
            row: at(1, coordinate),
            column: at(0, coordinate),
        };
        let spots = coordinates.iter().map(spot).collect();
        let length = |step: usize| steps.get(step).map_or(1, |step| step.length);
        let (columns, rows) = (length(0), length(1));
        let blocks = outer.iter().map(|step| step.length).product();
        Layout { ranks, columns, rows, blocks, coordinates, spots, steps }
    }

    /// The directions that lead from block to block.
    fn outer(&self) -> &[Step] {
        &self.steps[self.steps.len().min(2)..]
    }

    /// Whether the directions `a` and `a + 1` are parts of one long dimension.
    fn is_long(&self, a: usize) -> bool {
        self.steps.len() > a + 1 && self.steps[a].dim == self.steps[a + 1].dim
    }

    /// For each column and row, whether two neighbours across its end are on different hosts.
    fn host_borders(&self, host: &dyn Fn(usize) -> usize) -> (Vec<bool>, Vec<bool>) {
        let mut hosts = vec![None; self.blocks * self.rows * self.columns];
        for (index, spot) in self.spots.iter().enumerate() {
            hosts[(spot.block * self.rows + spot.row) * self.columns + spot.column] = Some(host(index));
        }
        let (mut columns, mut rows) = (vec![false; self.columns], vec![false; self.rows]);
        let differ = |a: usize, b: usize| matches!((hosts[a], hosts[b]), (Some(a), Some(b)) if a != b);
        for at in 0..hosts.len() {
            let (row, column) = (at / self.columns % self.rows, at % self.columns);
            columns[column] |= column + 1 < self.columns && differ(at, at + 1);
            rows[row] |= row + 1 < self.rows && differ(at, at + self.columns);
        }
        (columns, rows)
    }

    /// Returns the corner of each block, and the width and height of all blocks. The directions go
    /// to the right and down in turn.
    fn corners(&self, block: (i32, i32), texts: &Texts) -> (Vec<(i32, i32)>, i32, i32) {
        let (mut width, mut height) = (texts.block_label + block.0, texts.head() + block.1);
        // For each direction: how many blocks stand beside each other, and how far it is to the
        // next one to the right and below.
        let mut pitches: Vec<(usize, i32, i32)> = Vec::new();
        let mut beside = true;
        for step in self.outer() {
            let n = step.length;
            let fits = |n: usize| (width + BLOCK_GAP) * n as i32 - BLOCK_GAP <= WIDEST - texts.first_label;
            let whole_rows = |across: &usize| n % across == 0 && fits(*across);
            let across = if beside { (1..=n).rev().find(whole_rows).unwrap_or(1) } else { 1 };
            pitches.push((across, width + BLOCK_GAP, height + BLOCK_GAP));
            (width, height) = (
                width + (width + BLOCK_GAP) * (across as i32 - 1),
                height + (height + BLOCK_GAP) * (n.div_ceil(across) as i32 - 1),
            );
            beside = across == 1;
        }
        let corner = |block: usize| {
            let (mut rest, mut x, mut y) = (block, texts.first_label + texts.block_label, texts.head());
            for (step, (across, right, down)) in self.outer().iter().zip(&pitches) {
                let at = rest % step.length;
                rest /= step.length;
                (x, y) = (x + (at % across) as i32 * right, y + (at / across) as i32 * down);
            }
            (x, y)
        };
        ((0..self.blocks).map(corner).collect(), texts.first_label + width, height)
    }
}

/// The texts around the cells, and the room that they take.
struct Texts {
    /// The labels of the rows, by block and row. A label is empty where there is none, here and
    /// below.
    rows: Vec<String>,
    /// The labels of the columns.
    columns: Vec<String>,
    /// The titles of the blocks.
    titles: Vec<String>,
    /// The name of the dimension of the columns, where it does not fit beside their numbers.
    column_name: Option<String>,
    /// The room to the left of all blocks.
    first_label: i32,
    /// The room to the left of each block.
    block_label: i32,
    /// The room above each block for its title.
    title_height: i32,
    /// The room above each block for the labels of the columns.
    column_height: i32,
}

impl Texts {
    /// The texts of a layout. `width` is the width of a block.
    fn new(layout: &Layout<'_>, width: i32) -> Texts {
        let Layout { ranks, steps, .. } = layout;
        let labelled = |step: usize, coordinate: &[usize]| {
            let dim = steps[step].dim;
            (shorten(&ranks.names[dim], f64::from(ROW_LABEL_WIDEST), SMALL), coordinate[dim].to_string())
        };
        let joined = |(name, number): (String, String)| format!("{name} {number}");
        let mut texts = Texts {
            rows: vec![String::new(); layout.blocks * layout.rows],
            columns: vec![String::new(); layout.columns],
            titles: vec![String::new(); layout.blocks],
            column_name: None,
            first_label: 0,
            block_label: 0,
            title_height: if steps.len() > 2 { TITLE_HEIGHT } else { 0 },
            column_height: 0,
        };
        let mut numbers = texts.columns.clone();
        for (coordinate, spot) in layout.coordinates.iter().zip(&layout.spots) {
            if steps.len() > 1 && spot.column == 0 {
                texts.rows[spot.block * layout.rows + spot.row] = joined(labelled(1, coordinate));
            }
            // The columns of a long dimension continue in the next row, whose label tells the
            // number.
            if !steps.is_empty() && !layout.is_long(0) {
                texts.columns[spot.column] = joined(labelled(0, coordinate));
                numbers[spot.column] = coordinate[steps[0].dim].to_string();
            }
            if steps.len() > 2 && (spot.row, spot.column) == (0, 0) {
                let outer = (2..steps.len()).rev().filter(|step| *step == 2 || !layout.is_long(*step - 1));
                texts.titles[spot.block] = title(outer.map(|step| labelled(step, coordinate)).collect(), width);
            }
        }
        if !steps.is_empty() && !layout.is_long(0) {
            texts.column_height = LABEL_HEIGHT;
            let wide = |text: &String| text_width(text, SMALL) > f64::from(CELL.0 + GAP - 2);
            if texts.columns.iter().any(wide) {
                texts.column_height = 2 * LABEL_HEIGHT - 2;
                texts.column_name = Some(shorten(&ranks.names[steps[0].dim], f64::from(width), SMALL));
                texts.columns = numbers;
            }
        }
        let room = texts.rows.iter().map(|text| text_width(text, SMALL) as i32 + 8).max().filter(|_| steps.len() > 1);
        // The rows of a long dimension have other numbers in each block.
        match layout.is_long(1) {
            true => texts.block_label = room.unwrap_or(0),
            false => texts.first_label = room.unwrap_or(0),
        }
        texts
    }

    /// The height of everything above a block.
    fn head(&self) -> i32 {
        self.title_height + self.column_height + 2
    }

    /// The labels at their places. The middles of the columns and the baselines of the rows are
    /// relative to the corner of a block.
    fn labels(&self, layout: &Layout<'_>, corners: &[(i32, i32)], middles: &[i32], baselines: &[i32]) -> Vec<Label> {
        let mut labels = Vec::new();
        let mut add = |x: i32, y: i32, anchor: &'static str, title: bool, text: &str| {
            if !text.is_empty() {
                labels.push(Label { x, y, anchor, title, text: text.to_owned() });
            }
        };
        let center = (middles.first().unwrap_or(&0) + middles.last().unwrap_or(&0)) / 2;
        for (block, &(x, y)) in corners.iter().enumerate() {
            add(x + center, y - self.column_height - 7, "middle", true, &self.titles[block]);
            add(x + center, y - LABEL_HEIGHT - 3, "middle", false, self.column_name.as_deref().unwrap_or_default());
            for (middle, text) in middles.iter().zip(&self.columns) {
                add(x + middle, y - 5, "middle", false, text);
            }
            if self.block_label > 0 || x == self.first_label {
                for (row, baseline) in baselines.iter().enumerate() {
                    add(x - 6, y + baseline, "end", false, &self.rows[block * layout.rows + row]);
                }
            }
        }
        labels
    }
}

/// The title of a block: "pp 0 · dp 1", or "(0, 1)" where that is wider than the block.
fn title(parts: Vec<(String, String)>, width: i32) -> String {
    let named: Vec<String> = parts.iter().map(|(name, number)| format!("{name} {number}")).collect();
    let named = named.join(" · ");
    if text_width(&named, 11.0) <= f64::from(width + BLOCK_GAP) {
        return named;
    }
    let numbers: Vec<String> = parts.into_iter().map(|(_, number)| number).collect();
    format!("({})", numbers.join(", "))
}
