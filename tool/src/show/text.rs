//! The table and the grid of ranks for a terminal, with or without colours.

use super::blocks::blocks;
use super::view::{Axis, MAX_DRAWN, View};
use super::words::{WIDTH, crossing_text, group_text, short};
use crate::columns::Columns;
use crate::style::Style;

/// The most characters of a dimension's name.
const NAME: usize = 32;
/// The table and the grid. The ranks in the grid are coloured by their groups along `axis`.
pub fn text(view: &View, axis: Option<&Axis>, style: Style) -> String {
    let mut out = format!("{}\n{}\n", style.bold(&view.describe), view.summary());
    out.extend(view.plan_text().map(|text| text + "\n"));
    out += &table(view, style);
    out.extend(view.shared_text().into_iter().map(|text| style.dim(&text) + "\n"));
    if view.grid.ranks.len() <= MAX_DRAWN {
        out += &blocks(view, axis, style);
    }
    out
}

fn table(view: &View, style: Style) -> String {
    if view.axes.is_empty() {
        return String::new();
    }
    let mut heads = vec!["dimension", "size", "stride", "groups"];
    if view.hosts.is_some() {
        heads.push("across hosts");
    }
    let row = |axis: &Axis| {
        let mut row =
            vec![short(&axis.name, NAME), axis.size.to_string(), axis.stride(), view.groups(axis).to_string()];
        row.extend(crossing_text(view, axis));
        row
    };
    let rows: Vec<Vec<String>> = view.axes.iter().map(row).collect();
    let columns = Columns::new(&heads, &rows, |column| column == 0);
    let mut out = format!("\n{}\n", style.dim(&(columns.line(&heads) + "ranks of the groups")));
    for (axis, row) in view.axes.iter().zip(&rows) {
        let left = WIDTH.saturating_sub(columns.width());
        out += &format!("{}{}\n", columns.line(row), groups(view, axis, left, style));
    }
    if view.chosen.is_some() {
        out += &style.dim(&format!("* the groups of rank {}", view.rank));
        out.push('\n');
    }
    out
}

/// Lists as many groups as fit into the width. The group of the chosen rank is always among them.
fn groups(view: &View, axis: &Axis, width: usize, style: Style) -> String {
    let (all, chosen) = (view.groups(axis), view.chosen_group(axis));
    let mut parts = Vec::new();
    let (mut used, mut shown) = (0, 0);
    let add = |group: usize| {
        let mark = if chosen == Some(group) { "*" } else { "" };
        let text = group_text(view, axis, group);
        let length = text.len() + mark.len() + 1;
        (length, format!("{mark}{}", style.group(group, &text)))
    };
    for group in 0..all {
        let (length, text) = add(group);
        if group > 0 && used + length > width {
            break;
        }
        used += length;
        shown = group + 1;
        parts.push(text);
    }
    let mut left = all - shown;
    if let Some(chosen) = chosen.filter(|chosen| *chosen >= shown) {
        if chosen > shown {
            parts.push("...".to_owned());
        }
        parts.push(add(chosen).1);
        left -= 1;
    }
    if left > 0 {
        parts.push(format!("... {left} more"));
    }
    parts.join(" ")
}
