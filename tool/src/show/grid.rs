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
/// Of a name beside its number.
const ROW_LABEL_WIDEST: i32 = 64;
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

/// Where a rank is: in which block, row and column.
struct Spot {
    block: usize,
    row: usize,
    column: usize,
}

struct Layout<'a> {
    ranks: &'a Ranks,
    /// Columns, rows, then what blocks stand for.
    steps: Vec<Step>,
    columns: usize,
    rows: usize,
    blocks: usize,
    coordinates: Vec<Vec<usize>>,
    /// By row-major index.
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

    /// The steps that blocks stand for.
    fn outer(&self) -> &[Step] {
        &self.steps[self.steps.len().min(2)..]
    }

    /// Whether step `a` and the next are parts of one long dimension.
    fn is_long(&self, a: usize) -> bool {
        self.steps.len() > a + 1 && self.steps[a].dim == self.steps[a + 1].dim
    }

    /// After which columns and rows some two neighbours are on different hosts.
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

    /// Where the blocks begin, and the width and height of all: beside each other and below each other in turn.
    fn corners(&self, block: (i32, i32), texts: &Texts) -> (Vec<(i32, i32)>, i32, i32) {
        let (mut width, mut height) = (texts.block_label + block.0, texts.head() + block.1);
        // Of each step: how many beside each other, and the way to the next beside and below.
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

/// What is written around the cells.
struct Texts {
    /// By block and row, by column, by block; empty where there is none.
    rows: Vec<String>,
    columns: Vec<String>,
    titles: Vec<String>,
    /// The columns' name, where it does not fit beside their numbers.
    column_name: Option<String>,
    /// The room at the left of all blocks, and of each.
    first_label: i32,
    block_label: i32,
    /// The room above each block.
    title_height: i32,
    column_height: i32,
}

impl Texts {
    /// `width` is that of a block.
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
            // The numbers of a long dimension go on in the next row, whose label says where.
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
        // Rows of a long dimension are others in each block.
        match layout.is_long(1) {
            true => texts.block_label = room.unwrap_or(0),
            false => texts.first_label = room.unwrap_or(0),
        }
        texts
    }

    /// What is above a block.
    fn head(&self) -> i32 {
        self.title_height + self.column_height + 2
    }

    /// `middles` of the columns and `baselines` of the rows are counted from a block's corner.
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

/// "pp 0 · dp 1", or where that is wider than a block "(0, 1)".
fn title(parts: Vec<(String, String)>, width: i32) -> String {
    let named: Vec<String> = parts.iter().map(|(name, number)| format!("{name} {number}")).collect();
    let named = named.join(" · ");
    if text_width(&named, 11.0) <= f64::from(width + BLOCK_GAP) {
        return named;
    }
    let numbers: Vec<String> = parts.into_iter().map(|(_, number)| number).collect();
    format!("({})", numbers.join(", "))
}
