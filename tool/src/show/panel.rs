//! The panels of a picture. A panel is a grid of ranks with a heading and a legend. It shows the
//! groups of one dimension, or where the view lies in its root.

use super::canvas::{Canvas, escape, shorten, text_width};
use super::grid::{CELL, Grid, place};
use super::outline::outlines;
use super::view::{Axis, MAX_DRAWN, Ranks, View};
use super::words::group_text;
use crate::words::count;

/// The least width of a panel.
const NARROWEST: i32 = 170;
/// The distance from the heading to the grid.
pub const HEAD: i32 = 42;
/// The size of the coloured square before a group in a legend.
const CHIP: i32 = 11;
/// The height of a line of a legend.
const LEGEND_LINE: i32 = 18;
/// The most groups in a legend.
const GROUPS_LISTED: usize = 8;
/// The size of a legend's font.
const LEGEND_SIZE: f64 = 11.0;

/// A panel as SVG.
pub struct Panel {
    pub heading: String,
    /// The grid and the legend, with y from 0.
    pub body: String,
    /// The height above the cells. Panels beside each other are moved so that their cells are at
    /// one height.
    pub head: i32,
    pub width: i32,
    pub height: i32,
}

/// The panels of a view: where it lies in its root, when that is larger and can be drawn, and the
/// groups of each of these dimensions.
pub fn panels(view: &View, axes: &[&Axis]) -> Vec<Panel> {
    let mut panels = Vec::new();
    if let Some(root) = view.root.as_ref().filter(|root| root.ranks.len() <= MAX_DRAWN) {
        panels.push(root_panel(view, root));
    }
    panels.extend(axes.iter().map(|axis| dim_panel(view, axis)));
    if panels.is_empty() {
        panels.push(plain_panel(view));
    }
    panels
}

/// The panel of a dimension, whose groups have a colour each.
fn dim_panel(view: &View, axis: &Axis) -> Panel {
    let groups = view.groups(axis);
    let mut notes = vec![format!("stride {}", axis.stride())];
    notes.extend(view.crossing(axis).map(|crossing| match crossing {
        0 => "inside hosts".to_owned(),
        crossing => format!("{crossing} of {groups} across hosts"),
    }));
    let heading = (axis.name.as_str(), format!("{} of {}", count(groups, "group"), axis.size), notes.join(" · "));
    panel(view, &view.grid, heading, &|index| Some(axis.group(index)), Some(axis))
}

/// The panel of the root's ranks. Those of the view have a colour.
fn root_panel(view: &View, root: &Ranks) -> Panel {
    let held: std::collections::HashSet<i32> = view.grid.ranks.iter().copied().collect();
    let heading = ("root", count(root.ranks.len(), "rank"), "the view in it".to_owned());
    panel(view, root, heading, &|index| held.contains(&root.ranks[index]).then_some(0), None)
}

/// The panel of a view in which all dimensions have size 1.
fn plain_panel(view: &View) -> Panel {
    let heading = ("", count(view.grid.ranks.len(), "rank"), String::new());
    panel(view, &view.grid, heading, &|_| Some(0), None)
}

/// Draws a panel. The heading is a name, what there is, and a note. `group` gives the group of a
/// row-major index, whose colour its cell gets.
fn panel(
    view: &View,
    ranks: &Ranks,
    heading: (&str, String, String),
    group: &dyn Fn(usize) -> Option<usize>,
    axis: Option<&Axis>,
) -> Panel {
    let host = view.hosts.as_ref().map(|hosts| move |index: usize| hosts.of(ranks.ranks[index]));
    let grid = place(ranks, host.as_ref().map(|host| host as &dyn Fn(usize) -> usize));
    let width = grid.width.max(NARROWEST);
    let mut canvas = Canvas::default();

    let (name, what, note) = heading;
    let name = escape(&shorten(name, f64::from(width - 80), 14.0));
    let space = if name.is_empty() { 0 } else { 9 };
    let what = format!("<tspan class=\"small\" dx=\"{space}\">{}</tspan>", escape(&what));
    canvas.raw(&format!("<text class=\"head\" y=\"12\">{name}{what}</text>\n"));
    canvas.text("small", 0, 29, &shorten(&note, f64::from(width), LEGEND_SIZE));

    let heading = std::mem::take(&mut canvas.out);
    draw(&mut canvas, view, ranks, &grid, group, axis);
    let mut height = grid.height;
    if let Some(axis) = axis {
        height += legend(&mut canvas, view, axis, height + 12, width);
    }
    Panel { heading, body: canvas.out, head: grid.head, width, height }
}

/// Draws the grid of a panel.
fn draw(
    canvas: &mut Canvas,
    view: &View,
    ranks: &Ranks,
    grid: &Grid,
    group: &dyn Fn(usize) -> Option<usize>,
    axis: Option<&Axis>,
) {
    for block in &grid.blocks {
        canvas.rect("block", (block.x, block.y), (block.width, block.height), 8);
    }
    for label in &grid.labels {
        let class = if label.title { "block-title" } else { "label" };
        canvas.anchored(class, label.anchor, label.x, label.y, &label.text);
    }
    draw_hosts(canvas, view, ranks, grid);
    for (index, cell) in grid.cells.iter().enumerate() {
        let (rank, group) = (ranks.ranks[index], group(index));
        let mut about = format!("rank {rank} at {}", ranks.coordinate(index));
        if let Some(hosts) = &view.hosts {
            about += &format!(", host {}", hosts.of(rank));
        }
        if let (Some(axis), Some(group)) = (axis, group) {
            about += &format!(", {} group {}", axis.name, group_text(view, axis, group));
        }
        canvas.raw(&format!("<g><title>{}</title>", escape(&about)));
        match group {
            Some(group) => canvas.group(group, (cell.x, cell.y), CELL, 6),
            None => canvas.rect("away", (cell.x, cell.y), CELL, 6),
        }
        let class = if group.is_some() { "rank" } else { "rank others" };
        canvas.text(class, cell.x + CELL.0 / 2, cell.y + CELL.1 / 2 + 5, &rank.to_string());
        if view.chosen.is_some() && rank == view.rank {
            canvas.rect("ring", (cell.x - 2, cell.y - 2), (CELL.0 + 4, CELL.1 + 4), 8);
        }
        canvas.raw("</g>\n");
    }
}

/// Draws a line around the ranks of each host, with the name of the host in it.
fn draw_hosts(canvas: &mut Canvas, view: &View, ranks: &Ranks, grid: &Grid) {
    let Some(hosts) = &view.hosts else { return };
    let mut members: std::collections::BTreeMap<usize, Vec<usize>> = Default::default();
    for (index, rank) in ranks.ranks.iter().enumerate() {
        members.entry(hosts.of(*rank)).or_default().push(index);
    }
    for (host, indices) in members {
        for outline in outlines(grid, &indices) {
            canvas.raw(&format!("<path class=\"host\" d=\"{}\"/>\n", outline.path));
            let name = format!("host {host}");
            let width = text_width(&name, 9.5) as i32 + 4;
            canvas.rect("page", (outline.x + 9, outline.y - 5), (width, 10), 0);
            canvas.anchored("host-name", "middle", outline.x + 9 + width / 2, outline.y + 3, &name);
        }
    }
}

/// Draws the legend: the first groups, and the group of the chosen rank. Returns its height.
fn legend(canvas: &mut Canvas, view: &View, axis: &Axis, top: i32, width: i32) -> i32 {
    let (all, chosen) = (view.groups(axis), view.chosen_group(axis));
    let mut listed: Vec<usize> = (0..all.min(GROUPS_LISTED)).collect();
    if let Some(chosen) = chosen.filter(|chosen| *chosen >= GROUPS_LISTED) {
        listed[GROUPS_LISTED - 1] = chosen;
    }
    let text = |group: usize| shorten(&group_text(view, axis, group), f64::from(width - CHIP - 7), LEGEND_SIZE);
    let entry = listed.iter().map(|group| text_width(&text(*group), LEGEND_SIZE) as i32).max().unwrap_or(0) + CHIP + 20;
    let columns = (((width + 13) / entry).max(1) as usize).min(listed.len().max(1));
    let lines = listed.len().div_ceil(columns).max(1);
    let columns = listed.len().div_ceil(lines).max(1);
    let mut y = top;
    for line in listed.chunks(columns) {
        for (column, &group) in line.iter().enumerate() {
            let x = column as i32 * entry;
            canvas.group(group, (x, y), (CHIP, CHIP), 3);
            let mine = chosen == Some(group);
            if mine {
                canvas.rect("ring", (x - 2, y - 2), (CHIP + 4, CHIP + 4), 4);
            }
            canvas.text(if mine { "legend mine" } else { "legend" }, x + CHIP + 6, y + 10, &text(group));
        }
        y += LEGEND_LINE;
    }
    if all > listed.len() {
        canvas.text("small", 0, y + 10, &format!("and {} more groups", all - listed.len()));
        y += LEGEND_LINE;
    }
    y - top + 6
}
