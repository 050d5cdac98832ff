//! The parts of which pictures are made: SVG elements, their colours, and how wide a text is.

/// The colours of groups: Paul Tol's "light" scheme (https://personal.sron.nl/~pault/). People with
/// any colour vision can tell them apart, and dark text is readable on them.
pub const GROUPS: [&str; 8] = ["#77aadd", "#ee8866", "#44bb99", "#eedd88", "#ffaabb", "#bbcc33", "#99ddff", "#aaaa00"];

/// The patterns on a colour that stands for a second and a third group, where there are more groups
/// than colours.
pub const PATTERNS: &str = "<defs>\
<pattern id=\"stripes\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
<rect width=\"2.5\" height=\"6\" fill=\"#fff\" fill-opacity=\".5\"/></pattern>\
<pattern id=\"dots\" width=\"7\" height=\"7\" patternUnits=\"userSpaceOnUse\">\
<circle cx=\"2\" cy=\"2\" r=\"1.4\" fill=\"#fff\" fill-opacity=\".65\"/></pattern></defs>\n";

/// Writes SVG elements one after the other.
#[derive(Default)]
pub struct Canvas {
    /// The elements so far.
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

    /// A rectangle in the colour of a group. Where there are more groups than colours, a pattern
    /// lies on it.
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

/// Escapes a text for XML and HTML, also inside an attribute.
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

/// The width of a text, estimated. The pictures only need that the text is not much wider.
pub fn text_width(text: &str, size: f64) -> f64 {
    let width = |c: char| match c {
        'i' | 'l' | 'j' | 'I' | '.' | ',' | ' ' | '|' | ':' | ';' | '(' | ')' | '{' | '}' => 0.34,
        'm' | 'w' | 'M' | 'W' => 0.88,
        c if c.is_ascii() => 0.58,
        _ => 1.0,
    };
    text.chars().map(width).sum::<f64>() * size
}

/// The text, or as much of it as fits with "…" at its end.
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
