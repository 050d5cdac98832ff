//! The line around cells that belong together. They may have any shape.

use std::collections::{BTreeMap, BTreeSet};

use super::grid::{CELL, Cell, Grid};

/// The distance between the cells and the line.
const MARGIN: i32 = 6;
/// The radius of the line's corners.
const RADIUS: i32 = 8;

/// A line around neighbouring cells.
pub struct Outline {
    /// The `d` attribute of an SVG path.
    pub path: String,
    /// The left end of the highest edge.
    pub x: i32,
    pub y: i32,
}

/// A point between cells: the upper left corner of the cell at that column and row.
type Corner = (usize, usize);

/// The outlines of the cells with these row-major indices. Each set of neighbours in one block has
/// an outline.
pub fn outlines(grid: &Grid, indices: &[usize]) -> Vec<Outline> {
    let mut left: BTreeMap<(usize, usize, usize), usize> = BTreeMap::new();
    for index in indices {
        let Cell { block, row, column, .. } = grid.cells[*index];
        left.insert((block, row, column), *index);
    }
    let mut found = Vec::new();
    while let Some((first, index)) = left.pop_first() {
        let mut members = BTreeMap::from([((first.1, first.2), index)]);
        let mut open = vec![first];
        while let Some((block, row, column)) = open.pop() {
            let near =
                [(row.wrapping_sub(1), column), (row + 1, column), (row, column.wrapping_sub(1)), (row, column + 1)];
            for (row, column) in near {
                if let Some(index) = left.remove(&(block, row, column)) {
                    members.insert((row, column), index);
                    open.push((block, row, column));
                }
            }
        }
        found.push(outline(grid, &members));
    }
    found
}

/// The outline of neighbours, which `members` has by row and column.
fn outline(grid: &Grid, members: &BTreeMap<(usize, usize), usize>) -> Outline {
    // Each edge has the inside to its right. Its number is x where the edge is upright, and y where
    // it is level.
    let mut edges: BTreeMap<Corner, Vec<(Corner, i32)>> = BTreeMap::new();
    let mut add = |from: Corner, to: Corner, at: i32| edges.entry(from).or_default().push((to, at));
    for (&(row, column), index) in members {
        let Cell { x, y, .. } = grid.cells[*index];
        let inside = |row: usize, column: usize| members.contains_key(&(row, column));
        if !inside(row.wrapping_sub(1), column) {
            add((column, row), (column + 1, row), y - MARGIN);
        }
        if !inside(row, column + 1) {
            add((column + 1, row), (column + 1, row + 1), x + CELL.0 + MARGIN);
        }
        if !inside(row + 1, column) {
            add((column + 1, row + 1), (column, row + 1), y + CELL.1 + MARGIN);
        }
        if !inside(row, column.wrapping_sub(1)) {
            add((column, row + 1), (column, row), x - MARGIN);
        }
    }
    let mut path = String::new();
    let mut start = None;
    while let Some(from) = edges.keys().next().copied() {
        let points = walk(&mut edges, from);
        start = start.or(points.iter().copied().min_by_key(|(x, y)| (*y, *x)));
        path += &rounded(&points);
    }
    let (x, y) = start.unwrap_or_default();
    Outline { path, x, y }
}

/// Removes one closed line of edges, and returns its corners in the picture.
fn walk(edges: &mut BTreeMap<Corner, Vec<(Corner, i32)>>, from: Corner) -> Vec<(i32, i32)> {
    let mut line: Vec<(bool, i32)> = Vec::new();
    let mut seen = BTreeSet::new();
    let (mut here, mut before): (Corner, Option<Corner>) = (from, None);
    while let Some(next) = edges.get_mut(&here) {
        // Where four edges meet, the line turns right, so that it goes around one cell and not
        // around two.
        let right = |to: Corner| before.is_some_and(|before| is_right(before, here, to));
        let pick = next.iter().position(|(to, _)| right(*to)).unwrap_or(0);
        let (to, at) = next.swap_remove(pick);
        if next.is_empty() {
            edges.remove(&here);
        }
        line.push((to.0 == here.0, at));
        seen.insert(here);
        (before, here) = (Some(here), to);
        if here == from {
            break;
        }
    }
    line.dedup();
    if line.len() > 1 && line.first() == line.last() {
        line.pop();
    }
    let corner = |index: usize| {
        let (a, b) = (line[index], line[(index + 1) % line.len()]);
        if a.0 { (a.1, b.1) } else { (b.1, a.1) }
    };
    (0..line.len()).map(corner).collect()
}

/// Whether the way from `before` over `here` to `to` turns right.
fn is_right(before: Corner, here: Corner, to: Corner) -> bool {
    let step = |a: Corner, b: Corner| (b.0 as i64 - a.0 as i64, b.1 as i64 - a.1 as i64);
    let (was, will) = (step(before, here), step(here, to));
    was.0 * will.1 - was.1 * will.0 > 0
}

/// A closed path through these points, with rounded corners.
fn rounded(points: &[(i32, i32)]) -> String {
    let mut path = String::new();
    let toward = |from: (i32, i32), to: (i32, i32)| {
        let step = |from: i32, to: i32| (to - from).signum() * RADIUS.min((to - from).abs() / 2);
        (from.0 + step(from.0, to.0), from.1 + step(from.1, to.1))
    };
    for (index, &point) in points.iter().enumerate() {
        let before = points[(index + points.len() - 1) % points.len()];
        let after = points[(index + 1) % points.len()];
        let (begin, end) = (toward(point, before), toward(point, after));
        let command = if index == 0 { 'M' } else { 'L' };
        path += &format!("{command}{} {}Q{} {} {} {}", begin.0, begin.1, point.0, point.1, end.0, end.1);
    }
    path + "Z"
}
