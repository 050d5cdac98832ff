//! An HTML page with the picture and the table.

use super::canvas::escape;
use super::svg::svg;
use super::view::{Axis, View};
use super::words::{crossing_text, group_text};

const STYLE: &str = ":root{color-scheme:light dark}body{font:15px system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}
h1{font:600 1.1rem ui-monospace,monospace;overflow-wrap:anywhere}svg{max-width:100%;height:auto}
table{border-collapse:collapse;margin-top:1.5rem}th,td{text-align:left;vertical-align:top;padding:.35rem .9rem .35rem 0;border-bottom:1px solid #8886}
td:last-child{font-family:ui-monospace,monospace;font-size:.85rem}.mine{font-weight:700;text-decoration:underline}";

/// The page. It has no script and loads nothing.
pub fn html(view: &View, axes: &[&Axis]) -> String {
    let title = escape(&view.describe);
    let hosts = if view.hosts.is_some() { "<th>across hosts</th>" } else { "" };
    let rows: String = view.axes.iter().map(|axis| row(view, axis)).collect();
    let plan = view.plan_text().map(|text| format!("<p>{}.</p>\n", escape(&text))).unwrap_or_default();
    let line = |text: String| format!("<p>{}.</p>\n", escape(&text));
    let shared: String = view.shared_text().into_iter().map(line).collect();
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n<p>{}.</p>\n{plan}{}\
         <table>\n<tr><th>dimension</th><th>size</th><th>stride</th><th>groups</th>{hosts}<th>ranks of the groups</th></tr>\n{rows}</table>\n{shared}\
         </body>\n</html>\n",
        escape(&view.summary()),
        svg(view, axes)
    )
}

/// The row of a dimension in the table.
fn row(view: &View, axis: &Axis) -> String {
    let chosen = view.chosen_group(axis);
    let group = |group: usize| match chosen == Some(group) {
        true => format!("<span class=\"mine\">{}</span>", group_text(view, axis, group)),
        false => group_text(view, axis, group),
    };
    let groups: Vec<String> = (0..view.groups(axis)).map(group).collect();
    let crossing = crossing_text(view, axis).map(|text| format!("<td>{text}</td>")).unwrap_or_default();
    format!(
        "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td>{crossing}<td>{}</td></tr>\n",
        escape(&axis.name),
        axis.size,
        axis.stride(),
        view.groups(axis),
        groups.join(" ")
    )
}
