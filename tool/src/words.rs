//! The words of messages that several commands share: numbers with their nouns, the first
//! values of a long list, and the beginning of a long text.

use std::fmt::Display;

/// A number with its noun: "1 rank", "2 ranks".
pub fn count<N: Display + PartialEq + From<u8>>(n: N, noun: &str) -> String {
    let s = if n == N::from(1) { "" } else { "s" };
    format!("{n} {noun}{s}")
}

/// The first `most` values. Where there are more, the text says how many: "1, 2 and 3 more".
pub fn listed<T: ToString>(values: impl IntoIterator<Item = T>, most: usize) -> String {
    listed_with(values, most, ", ", |more| format!(" and {more} more"))
}

/// The first `most` values with `separator` between them. Where there are more, the text ends with
/// what `rest` makes of the number of the others.
pub fn listed_with<T: ToString>(
    values: impl IntoIterator<Item = T>,
    most: usize,
    separator: &str,
    rest: impl FnOnce(usize) -> String,
) -> String {
    let mut values = values.into_iter();
    let first: Vec<String> = values.by_ref().take(most).map(|value| value.to_string()).collect();
    let text = first.join(separator);
    match values.count() {
        0 => text,
        more => text + &rest(more),
    }
}

/// Ascending numbers, in which consecutive ones become a range: "0-3", "8".
pub fn ranges(numbers: impl IntoIterator<Item = usize>) -> impl Iterator<Item = String> {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    ranges.into_iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    })
}

/// The first `most` characters of a text. Where there are more, "..." follows them.
pub fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::{count, cut, listed, listed_with};

    #[test]
    fn a_long_text_is_cut_between_characters() {
        assert_eq!([cut("äöü", 3), cut("äöü", 2), cut("", 0)], ["äöü", "äö...", ""]);
    }

    #[test]
    fn one_thing_is_singular() {
        assert_eq!([count(0u32, "rank"), count(1u32, "rank"), count(2u32, "rank")], ["0 ranks", "1 rank", "2 ranks"]);
        assert_eq!(count(1usize, "node"), "1 node");
    }

    #[test]
    fn a_long_list_says_how_many_are_left_out() {
        assert_eq!(listed::<u32>([], 2), "");
        assert_eq!(listed([4, 5], 2), "4, 5");
        assert_eq!(listed([4, 5, 6, 7, 8], 2), "4, 5 and 3 more");
        let lines = ["a", "b", "c"].map(|line| format!("slow: {line}\n"));
        let more = |more| format!("... and {more} more (--json has all)\n");
        assert_eq!(listed_with(&lines, 2, "", more), "slow: a\nslow: b\n... and 1 more (--json has all)\n");
        assert_eq!(listed_with(&lines, 3, "", more), lines.concat());
    }
}
