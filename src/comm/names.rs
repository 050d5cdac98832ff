//! How ranks and communicators are called in messages, in the text of a call, and in the library's
//! logs.

use std::borrow::Cow;
use std::ffi::CString;

use crate::ccl::{CommConfig, Library, lasting};
use crate::digest::Fnv1a;
use crate::mesh::Mesh;
use crate::printable::printable;

/// The longest list of ranks that a text has in full.
const LONGEST_LIST: usize = 32;

/// Returns the name of a dimension for a text on which ranks must agree. A name may have any
/// characters, so the characters that separate the parts of such a text get a backslash, and a
/// line break and other control characters are escaped. Different names give different texts, and
/// a name of letters, digits, `_`, `-` and `.` stays as it is.
pub(super) fn name_text(name: &str) -> Cow<'_, str> {
    const SEPARATORS: [char; 4] = ['\\', ',', '(', ')'];
    if !name.contains(SEPARATORS) {
        return printable(name);
    }
    let mut text = String::with_capacity(name.len() + 8);
    for character in name.chars() {
        if SEPARATORS.contains(&character) {
            text.push('\\');
        }
        text.push(character);
    }
    Cow::Owned(printable(&text).into_owned())
}

/// Returns the name of a dimension for a key of the store, because keys are short printable ASCII.
/// A short name of letters, digits, `_`, `-` and `.` stays as it is. Any other name becomes `~` and
/// a hash of it.
pub(super) fn name_key(name: &str) -> Cow<'_, str> {
    const LONGEST: usize = 32;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    match name.len() <= LONGEST && name.bytes().all(is_plain) {
        true => Cow::Borrowed(name),
        false => Cow::Owned(format!("~{:016x}", Fnv1a::default().text(name).value())),
    }
}

/// Returns the names of dimensions for a text on which ranks must agree. Different lists give
/// different texts.
pub(super) fn names_text(names: &[&str]) -> String {
    names.iter().map(|name| name_text(name)).collect::<Vec<_>>().join(", ")
}

/// A list of ranks as text. A long list is its first ranks, its length and a digest, so that any
/// difference between two lists shows.
pub(super) fn ranks_text(ranks: &[i32]) -> String {
    let list = |ranks: &[i32]| ranks.iter().map(i32::to_string).collect::<Vec<_>>().join(", ");
    if ranks.len() <= LONGEST_LIST {
        return format!("({})", list(ranks));
    }
    let bytes = ranks.iter().flat_map(|rank| rank.to_le_bytes());
    let digest = Fnv1a::default().bytes(bytes).value();
    format!("({}, ... {} ranks, digest {digest:016x})", list(&ranks[..8]), ranks.len())
}

/// The world ranks of a group, in the group's order.
pub(super) fn world_ranks(group: &Mesh) -> String {
    ranks_text(group.ranks().as_slice())
}

/// Returns which call made the root mesh with that id, for a text on which ranks must agree.
/// Different ids give different texts.
pub(super) fn made_by(id: &str) -> String {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if let Some((outer, call)) = id.rsplit_once("/range").filter(|(_, call)| is_number(call)) {
        return format!("that call {call} took as a range of the mesh {}", made_by(outer));
    }
    if let Some((outer, attempt)) = id.rsplit_once("/shrunk") {
        return format!("that attempt {attempt} of dm_shrink made of the mesh {}", made_by(outer));
    }
    if let Some(number) = id.strip_prefix("recovery") {
        return format!("that recovery {number} made");
    }
    match id.strip_prefix("mesh").map(|numbers| numbers.split_once('.').unwrap_or(("0", numbers))) {
        Some(("0", call)) => format!("that call {call} made"),
        Some((epoch, call)) => format!("that call {call} of epoch {epoch} made"),
        None => format!("\"{id}\""),
    }
}

/// The configuration of a non-blocking communicator from which others are split, with that name. No
/// operation ever runs on it, so it takes as little of the device as NCCL allows. A child that is
/// split with a configuration of its own inherits nothing of this one. If the environment has
/// `NCCL_COMM_SPLIT_SHARE_RESOURCES`, a child uses its parent's channels, so the parent then gets
/// all of them.
pub(super) fn parent_config(library: &Library, name: Option<&str>) -> CommConfig {
    let shares = std::env::var("NCCL_COMM_SPLIT_SHARE_RESOURCES").is_ok_and(|value| !matches!(value.trim(), "" | "0"));
    let config = match shares {
        true => CommConfig::unset(library.version()),
        false => CommConfig::least(library.version()),
    };
    match name {
        Some(name) => named_config(library, Some(&config.blocking(false)), name),
        None => config.blocking(false),
    }
}

/// The caller's `ncclConfig_t`, or one in which nothing is set, with `name` as the communicator's
/// name.
pub(super) fn named_config(library: &Library, callers: Option<&CommConfig>, name: &str) -> CommConfig {
    let name = CString::new(name.replace('\0', "")).unwrap_or_default();
    callers.cloned().unwrap_or_else(|| CommConfig::unset(library.version())).named(lasting(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_mesh_is_told_by_the_calls_that_made_it() {
        assert_eq!(made_by("mesh3"), "that call 3 made");
        assert_eq!(made_by("mesh2.5"), "that call 5 of epoch 2 made");
        assert_eq!(made_by("recovery2/range7"), "that call 7 took as a range of the mesh that recovery 2 made");
        assert_eq!(
            made_by("mesh3/shrunk1/0/range5"),
            "that call 5 took as a range of the mesh that attempt 1/0 of dm_shrink made of the mesh that call 3 made"
        );
    }

    #[test]
    fn keys_have_short_printable_names() {
        assert_eq!(name_key("tp_1-a.b"), "tp_1-a.b");
        for name in ["\u{5bc6}", "a b", "a/b", "a\nb", "~", &"a".repeat(33)] {
            let key = name_key(name);
            assert!(key.len() == 17 && key.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/'), "{key}");
        }
        assert_ne!(name_key("a b"), name_key("a c"));
    }

    #[test]
    fn different_names_give_different_texts_of_one_line() {
        let lists: [&[&str]; 12] = [
            &["a, b", "c"],
            &["a", "b, c"],
            &["a", "b", "c"],
            &["a\\", "b"],
            &["a\\, b"],
            &["a, b"],
            &["a\nb"],
            &["a\\nb"],
            &["a b"],
            &["a)"],
            &["a\u{1f}b"],
            &["a\\x1fb"],
        ];
        let texts: Vec<String> = lists.iter().map(|names| names_text(names)).collect();
        for (index, text) in texts.iter().enumerate() {
            assert!(!text.contains(char::is_control), "{text:?}");
            assert!(!texts[..index].contains(text), "{:?} gives {text:?} again", lists[index]);
        }
        assert_eq!(names_text(&["dp", "tp_1", "e-p", "a.b"]), "dp, tp_1, e-p, a.b");
        assert_eq!(names_text(&["a, b", "c\n(d)"]), r"a\, b, c\n\(d\)");
    }
}
