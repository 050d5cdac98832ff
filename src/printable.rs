//! Text from outside as a terminal may show it: the one place where it is escaped.

use std::borrow::Cow;

/// The text, with what would act on a terminal or turn its lines round written as escapes: control characters (C0, DEL and C1, line breaks and
/// ESC among them), line separators and marks of direction. Whatever a peer, a file or the environment says goes through here before it
/// is shown.
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

/// Whether a terminal does something at this character but show it.
fn acts(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}
