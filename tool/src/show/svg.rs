//! Pictures: SVG text without scripts, the same for the same input, readable on light and dark pages.

use super::panel::{HEAD, Panel, panels};
use super::view::{Axis, View};

/// Panels go below each other where they would be wider together.
const WIDEST: i32 = 840;
/// Up to so much a title makes a picture wider.
const WIDEST_TITLE: i32 = 640;
const NARROWEST: i32 = 430;
const MARGIN: i32 = 18;
const PANEL_GAP: i32 = 24;
/// The width of a character of the title.
const MONOSPACE: f64 = 7.9;

/// Paul Tol's "light" scheme, which people with any colour vision can tell apart and dark text stands on
/// (https://personal.sron.nl/~pault/).
const GROUPS: [&str; 8] = ["#77aadd", "#ee8866", "#44bb99", "#eedd88", "#ffaabb", "#bbcc33", "#99ddff", "#aaaa00"];

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

/// The whole picture.
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

/// When there are more groups than colours, the same colour comes again with stripes, then with dots.
const PATTERNS: &str = "<defs>\
<pattern id=\"stripes\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
<rect width=\"2.5\" height=\"6\" fill=\"#fff\" fill-opacity=\".5\"/></pattern>\
<pattern id=\"dots\" width=\"7\" height=\"7\" patternUnits=\"userSpaceOnUse\">\
<circle cx=\"2\" cy=\"2\" r=\"1.4\" fill=\"#fff\" fill-opacity=\".65\"/></pattern></defs>\n";

/// Rows of panels, by index, none wider than it may be unless one panel alone is; with as many in each as can be.
fn flow(panels: &[Panel]) -> Vec<Vec<usize>> {
    let fewest = fill(panels, panels.len()).len().max(1);
    fill(panels, panels.len().div_ceil(fewest))
}

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

/// SVG text in the making.
#[derive(Default)]
pub struct Canvas {
    pub out: String,
}

impl Canvas {
    pub fn raw(&mut self, text: &str) {
        self.out += text;
    }

    pub fn text(&mut self, class: &str, x: i32, y: i32, text: &str) {
        self.out += &format!("<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{}</text>\n", escape(text));
    }

    pub fn anchored(&mut self, class: &str, anchor: &str, x: i32, y: i32, text: &str) {
        let text = escape(text);
        self.out += &format!("<text class=\"{class}\" text-anchor=\"{anchor}\" x=\"{x}\" y=\"{y}\">{text}</text>\n");
    }

    pub fn rect(&mut self, class: &str, (x, y): (i32, i32), (width, height): (i32, i32), radius: i32) {
        self.out += &format!(
            "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"{radius}\"/>\n"
        );
    }

    /// A rectangle in the colour of a group; its pattern when the colours come again.
    pub fn group(&mut self, group: usize, at: (i32, i32), size: (i32, i32), radius: i32) {
        self.rect(&format!("cell g{}", group % GROUPS.len()), at, size, radius);
        if let Some(pattern) = [None, Some("stripes"), Some("dots")][group / GROUPS.len() % 3] {
            let ((x, y), (width, height)) = (at, size);
            self.out += &format!(
                "<rect fill=\"url(#{pattern})\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"{radius}\"/>\n"
            );
        }
    }
}

/// Text for XML and HTML, inside an attribute too.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c => out.push(c),
        }
    }
    out
}

/// About how wide a text is. Nothing depends on more than that it is not much wider.
pub fn text_width(text: &str, size: f64) -> f64 {
    let width = |c: char| match c {
        'i' | 'l' | 'j' | 'I' | '.' | ',' | ' ' | '|' | ':' | ';' | '(' | ')' | '{' | '}' => 0.34,
        'm' | 'w' | 'M' | 'W' => 0.88,
        c if c.is_ascii() => 0.58,
        _ => 1.0,
    };
    text.chars().map(width).sum::<f64>() * size
}

/// The title in the width there is.
fn cut(title: &str, width: f64) -> String {
    let room = (width / MONOSPACE) as usize;
    match title.chars().count() <= room {
        true => title.to_owned(),
        false => title.chars().take(room.saturating_sub(1)).chain(['…']).collect(),
    }
}

/// As much of a text as fits, with "…" where it was cut.
pub fn shorten(text: &str, width: f64, size: f64) -> String {
    if text_width(text, size) <= width {
        return text.to_owned();
    }
    let mut cut = String::new();
    for c in text.chars() {
        if text_width(&cut, size) + text_width("m…", size) > width {
            break;
        }
        cut.push(c);
    }
    cut + "…"
}
