//! Cuts texts for which there is too little room.

use std::borrow::Cow;

/// How many bytes of a failure's message the segment keeps, and a notice to other hosts has.
pub(crate) const MESSAGE_BYTES: usize = 512;
/// The end of a text that was cut.
const ELLIPSIS: &str = "…";

/// Returns `text`, or its beginning with an ellipsis where it has more than `most` bytes. The
/// result has at most `most` bytes. It is empty where not even the ellipsis has room.
pub(crate) fn cut(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        return Cow::Borrowed(text);
    }
    let Some(mut end) = most.checked_sub(ELLIPSIS.len()) else { return Cow::Borrowed("") };
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    Cow::Owned([&text[..end], ELLIPSIS].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_is_cut_ends_with_an_ellipsis() {
        assert_eq!((cut("abcde", 5), cut("abcdef", 5)), ("abcde".into(), "ab…".into()));
        assert_eq!((cut("aöbcde", 5), cut("öbcdef", 5)), ("a…".into(), "ö…".into()));
        assert_eq!((cut("abcd", 3), cut("abcd", 2), cut("", 0)), ("…".into(), "".into(), "".into()));
    }
}
