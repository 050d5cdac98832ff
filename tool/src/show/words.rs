//! The words that the table, the pictures and the page share.

use super::view::{Axis, View, list};

/// The largest width of a line in characters, unless one part of the line is longer. On a narrower
/// terminal the limit is the terminal's width.
pub const WIDTH: usize = 100;
/// The most ranks of a group that are listed.
const MEMBERS: usize = 8;

/// A group as "{0, 4}".
pub fn group_text(view: &View, axis: &Axis, group: usize) -> String {
    format!("{{{}}}", list(view.members(axis, group), MEMBERS, ", "))
}

/// How many groups of a dimension have ranks on several hosts: "no", "2 of 4".
pub fn crossing_text(view: &View, axis: &Axis) -> Option<String> {
    view.crossing(axis).map(|crossing| match crossing {
        0 => "no".to_owned(),
        crossing => format!("{crossing} of {}", view.groups(axis)),
    })
}

/// The name, or its beginning with "…" where it is longer.
pub fn short(name: &str, most: usize) -> String {
    match name.chars().count() <= most {
        true => name.to_owned(),
        false => name.chars().take(most - 1).chain(['…']).collect(),
    }
}
