//! The table and the grid of ranks for a terminal, with or without colours.

use super::blocks::blocks;
use super::view::{Axis, MAX_DRAWN, View};
use super::words::{WIDTH, crossing_text, group_text, short};
use crate::columns::Columns;
use crate::style::Style;
use crate::terminal::{visible, wrap};

/// The most characters of a dimension's name.
const NAME: usize = 32;
/// The least room for a dimension's name in the table of a narrow terminal.
const LEAST_NAME: usize = 8;
/// The width of the other columns.
const OTHERS: usize = 40;

/// The table and the grid. The ranks in the grid are coloured by their groups along `axis`.
/// `terminal` is the width of the terminal that shows the text.
pub fn text(view: &View, axis: Option<&Axis>, style: Style, terminal: Option<usize>) -> String {
    let mut out = format!("{}\n{}\n", style.bold(&view.describe), view.summary());
    out.extend(view.plan_text().map(|text| text + "\n"));
    out += &table(view, style, terminal);
    out.extend(view.shared_text().into_iter().map(|text| style.dim(&text) + "\n"));
    if view.grid.ranks.len() <= MAX_DRAWN {
        out += &blocks(view, axis, style, terminal.map_or(WIDTH, |terminal| terminal.min(WIDTH)));
    }
    wrap(&out, terminal)
}

/// The table of the dimensions. Where a line with its groups is wider than the terminal, the groups
/// stand below the row.
fn table(view: &View, style: Style, terminal: Option<usize>) -> String {
    if view.axes.is_empty() {
        return String::new();
    }
    let mut heads = vec!["dimension", "size", "stride", "groups"];
    if view.hosts.is_some() {
        heads.push("across hosts");
    }
    let name = terminal.map_or(NAME, |terminal| terminal.saturating_sub(OTHERS).clamp(LEAST_NAME, NAME));
    let row = |axis: &Axis| {
        let mut row =
            vec![short(&axis.name, name), axis.size.to_string(), axis.stride(), view.groups(axis).to_string()];
        row.extend(crossing_text(view, axis));
        row
    };
    let rows: Vec<Vec<String>> = view.axes.iter().map(row).collect();
    let columns = Columns::new(&heads, &rows, |column| column == 0);
    let groups = |room: usize| view.axes.iter().map(move |axis| groups(view, axis, room, style));
    let beside: Vec<String> =
        groups(terminal.map_or(WIDTH, |terminal| terminal.min(WIDTH)).saturating_sub(columns.width())).collect();
    let is_narrow =
        beside.iter().any(|groups| terminal.is_some_and(|terminal| columns.width() + visible(groups) > terminal));
    let mut out = match is_narrow {
        false => format!("\n{}\n", style.dim(&(columns.line(&heads) + "ranks of the groups"))),
        true => format!("\n{}\n  {}\n", style.dim(columns.line(&heads).trim_end()), style.dim("ranks of the groups")),
    };
    let below: Vec<String> = groups(terminal.unwrap_or(WIDTH).saturating_sub(2)).collect();
    for (at, row) in rows.iter().enumerate() {
        out += &match is_narrow {
            false => format!("{}{}\n", columns.line(row), beside[at]),
            true => format!("{}\n  {}\n", columns.line(row).trim_end(), below[at]),
        };
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
