//! The picture of a view as SVG without scripts. Equal input gives equal text, and the picture is
//! readable on light and dark pages.

use super::canvas::{Canvas, GROUPS, PATTERNS, escape, shorten, text_width};
use super::panel::{HEAD, Panel, panels};
use super::view::{Axis, View};

/// The widest row of panels. Where panels would be wider together, they stand below each other.
const WIDEST: i32 = 840;
/// The widest title that makes a picture wider. A longer one is cut.
const WIDEST_TITLE: i32 = 640;
/// The least width of a picture.
const NARROWEST: i32 = 430;
/// The room between the border of the picture and everything in it.
const MARGIN: i32 = 18;
/// The gap between two panels.
const PANEL_GAP: i32 = 24;
/// The width of a character of the title.
const MONOSPACE: f64 = 7.9;

const STYLE: &str = "text{font-family:system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}
.card{fill:#fff;stroke:#d8dee4}.block{fill:#f2f4f7}.page{fill:#f2f4f7}
.title{font:600 13px ui-monospace,Menlo,Consolas,monospace}.note{font-size:12px;fill:#59636e}
.head{font-size:14px;font-weight:700}.small{font-size:11px;font-weight:400;fill:#59636e}.label{font-size:10.5px;fill:#59636e}
.block-title{font-size:11px;font-weight:600;fill:#59636e}.legend{font-size:11px}.mine{font-weight:700}
.rank{font-size:14px;font-weight:600;fill:#1a1d21;text-anchor:middle}.others{fill:#9aa3ad;font-weight:400}
.cell{stroke:#000;stroke-opacity:.16}.away{fill:#e3e7ec}
.host{fill:none;stroke:#59636e;stroke-width:1.3}.host-name{font-size:9.5px;font-weight:600;fill:#59636e}
.ring{fill:none;stroke:#1f2328;stroke-width:2.6}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.card{fill:#0d1117;stroke:#30363d}.block,.page{fill:#1b212b}
.note,.small,.label,.block-title,.host-name{fill:#9da7b3}.rank{fill:#1a1d21}.others{fill:#6e7781}.away{fill:#2b323d}
.host{stroke:#9da7b3}.ring{stroke:#fff}}";

/// The picture with the groups of these dimensions.
pub fn svg(view: &View, axes: &[&Axis]) -> String {
    let panels = panels(view, axes);
    let rows = flow(&panels);
    let row_width = |row: &[usize]| row.iter().map(|panel| panels[*panel].width + PANEL_GAP).sum::<i32>() - PANEL_GAP;
    let title_width = (view.describe.chars().count() as f64 * MONOSPACE).ceil() as i32;
    let widest_row = rows.iter().map(|row| row_width(row)).max().unwrap_or(0);
    let inner = widest_row.max(NARROWEST - 2 * MARGIN).max(title_width.min(WIDEST_TITLE));

    let mut canvas = Canvas::default();
    let mut y = MARGIN + 12;
    canvas.text("title", MARGIN, y, &cut(&view.describe, f64::from(inner)));
    let mut notes: Vec<String> = view.summary().split("; ").map(str::to_owned).collect();
    if text_width(&notes.join("; "), 12.0) < f64::from(inner) {
        notes = vec![notes.join("; ")];
    }
    for note in notes.into_iter().chain(view.plan_text()) {
        y += 19;
        canvas.text("note", MARGIN, y, &shorten(&note, f64::from(inner), 12.0));
    }
    y += 22;
    for row in &rows {
        let mut x = MARGIN;
        let head = row.iter().map(|panel| panels[*panel].head).max().unwrap_or(0);
        let below = row.iter().map(|panel| panels[*panel].height - panels[*panel].head).max().unwrap_or(0);
        for panel in row {
            let Panel { heading, body, head: own, width, .. } = &panels[*panel];
            canvas.raw(&format!("<g transform=\"translate({x} {y})\">\n{heading}</g>\n"));
            canvas.raw(&format!("<g transform=\"translate({x} {})\">\n{body}</g>\n", y + HEAD + head - own));
            x += width + PANEL_GAP;
        }
        y += HEAD + head + below + PANEL_GAP;
    }
    let (width, height) = (inner + 2 * MARGIN, y - PANEL_GAP + MARGIN);
    let title = escape(&format!("{}: {}", view.describe, view.summary()));
    let colours: String =
        GROUPS.iter().enumerate().map(|(index, colour)| format!(".g{index}{{fill:{colour}}}")).collect();
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\">\n\
         <title>{title}</title>\n<style>{STYLE}\n{colours}</style>\n{PATTERNS}\
         <rect class=\"card\" x=\".5\" y=\".5\" width=\"{}\" height=\"{}\" rx=\"10\"/>\n{}</svg>\n",
        width - 1,
        height - 1,
        canvas.out
    )
}

/// The rows of panels, by index. A row is not wider than WIDEST, unless one panel alone is wider.
/// There are as few rows as possible, and about as many panels in each.
fn flow(panels: &[Panel]) -> Vec<Vec<usize>> {
    let fewest = fill(panels, panels.len()).len().max(1);
    fill(panels, panels.len().div_ceil(fewest))
}

/// Fills one row after the other, with at most that many panels in each.
fn fill(panels: &[Panel], most: usize) -> Vec<Vec<usize>> {
    let mut rows: Vec<Vec<usize>> = Vec::new();
    let mut room = 0;
    for (index, panel) in panels.iter().enumerate() {
        match rows.last_mut().filter(|row| panel.width <= room && row.len() < most) {
            Some(row) => row.push(index),
            None => {
                rows.push(vec![index]);
                room = WIDEST - 2 * MARGIN + PANEL_GAP;
            }
        }
        room -= panel.width + PANEL_GAP;
    }
    rows
}

/// The title, or as much of it as fits with "…" at its end.
fn cut(title: &str, width: f64) -> String {
    let room = (width / MONOSPACE) as usize;
    match title.chars().count() <= room {
        true => title.to_owned(),
        false => title.chars().take(room.saturating_sub(1)).chain(['…']).collect(),
    }
}
