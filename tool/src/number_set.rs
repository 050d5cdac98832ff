//! A set of CPUs, NUMA nodes or ranks, in the text form that the kernel uses: "0-3,8".

use std::collections::BTreeSet;
use std::fmt::{self, Display, Formatter};

use crate::words::ranges;

/// The largest number of numbers in one range, so that a broken file cannot fill the memory. No
/// kernel is built for so many CPUs.
const LONGEST_RANGE: u32 = 1 << 16;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumberSet(BTreeSet<u32>);

impl NumberSet {
    /// Reads the text form. Returns `None` for a text that is no such list. An empty text is the
    /// empty set.
    pub fn parse(text: &str) -> Option<NumberSet> {
        let mut set = BTreeSet::new();
        for part in text.trim().split(',').filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
            if last.checked_sub(first)? >= LONGEST_RANGE {
                return None;
            }
            set.extend(first..=last);
        }
        Some(NumberSet(set))
    }

    pub fn contains(&self, number: u32) -> bool {
        self.0.contains(&number)
    }

    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().copied()
    }

    pub fn largest(&self) -> Option<u32> {
        self.0.last().copied()
    }
}

impl FromIterator<u32> for NumberSet {
    fn from_iter<I: IntoIterator<Item = u32>>(numbers: I) -> NumberSet {
        NumberSet(numbers.into_iter().collect())
    }
}

impl Display for NumberSet {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let ranges = ranges(self.iter().map(|number| number as usize));
        f.write_str(&ranges.collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::NumberSet;

    #[test]
    fn the_kernels_lists_are_read_and_written() {
        for text in ["", "0", "0-3", "0-3,8", "1,3,5-6"] {
            assert_eq!(NumberSet::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(NumberSet::parse("0,1,2\n").unwrap().to_string(), "0-2");
        for wrong in ["x", "3-1", "1-", "-1", "0-4294967295", "0:2"] {
            assert_eq!(NumberSet::parse(wrong), None, "{wrong}");
        }
    }
}
