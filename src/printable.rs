//! Escapes text from outside, so that a terminal can show it. This is the one place where such text
//! is escaped.

use std::borrow::Cow;

/// Returns the text with escapes in place of the characters that act on a terminal or turn its
/// lines round. These are control characters (C0, DEL and C1, line breaks and ESC among them), line
/// separators and marks of direction. Every text that a peer, a file or the environment gives
/// passes through this function before it is shown.
///
/// ```
/// use devicemesh::printable::printable;
/// assert_eq!(printable("tp"), "tp");
/// assert_eq!(printable("two\nlines, \x1b[31mred\u{202e}"), r"two\nlines, \x1b[31mred\u{202e}");
/// ```
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(acts) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        match character {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            _ if !acts(character) => out.push(character),
            _ if character.is_ascii() => out.push_str(&format!("\\x{:02x}", character as u32)),
            _ => out.extend(character.escape_unicode()),
        }
    }
    Cow::Owned(out)
}

/// Whether a terminal does anything else with this character than show it.
fn acts(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}
