//! The world ranks of a mesh's text, in runs.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, SeqAccess, Visitor};

use crate::error::{Error, Result};

/// Ranks are 32-bit. So they are 0 to one less than this, and a mesh has at most this many.
pub(super) const MAX_RANKS: usize = i32::MAX as usize;

/// A run of `count` ranks: first, first + step ...
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    /// The first rank.
    pub(super) first: i64,
    /// The number of ranks.
    pub(super) count: u64,
    /// The difference between two neighbours. It may be negative.
    pub(super) step: i64,
}

impl Run {
    /// Returns the rank at an index of a run that was checked.
    pub(super) fn rank(&self, index: u64) -> i32 {
        (self.first + index as i64 * self.step) as i32
    }

    pub(super) fn is_in_order(&self, size: usize) -> bool {
        self.first == 0 && self.count >= size as u64 && (self.step == 1 || size == 1)
    }

    /// Fails unless the run has ranks and each of them can be a rank.
    fn check(&self, index: usize) -> Result<()> {
        if self.count == 0 || self.step == 0 {
            return Err(Error::invalid(format!("ranks[{index}] is {self}: its count is at least 1, its step not 0")));
        }
        // The number is smaller than 2^64 * 2^63 + 2^63.
        let last = i128::from(self.first) + i128::from(self.count - 1) * i128::from(self.step);
        let known = 0..MAX_RANKS as i128;
        if !known.contains(&self.first.into()) || !known.contains(&last) {
            return Err(Error::invalid(format!(
                "ranks[{index}] is {self}, from rank {} to rank {last}; ranks are 0 to {}",
                self.first,
                MAX_RANKS - 1
            )));
        }
        Ok(())
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            1 => write!(f, "[{},{}]", self.first, self.count),
            step => write!(f, "[{},{},{step}]", self.first, self.count),
        }
    }
}

impl<'de> Deserialize<'de> for Run {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Run, D::Error> {
        struct Numbers;

        impl<'de> Visitor<'de> for Numbers {
            type Value = Run;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a run of ranks, [first, count] or [first, count, step]")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut numbers: A) -> std::result::Result<Run, A::Error> {
                let first = numbers.next_element()?.ok_or_else(|| A::Error::invalid_length(0, &self))?;
                let count = numbers.next_element()?.ok_or_else(|| A::Error::invalid_length(1, &self))?;
                let step = numbers.next_element()?.unwrap_or(1);
                match numbers.next_element::<IgnoredAny>()? {
                    None => Ok(Run { first, count, step }),
                    Some(_) => Err(A::Error::invalid_length(4, &self)),
                }
            }
        }

        deserializer.deserialize_seq(Numbers)
    }
}

/// Checks each run, and returns how many positions the runs make.
pub(super) fn length(runs: &[Run]) -> Result<usize> {
    let mut length = 0u64;
    for (index, run) in runs.iter().enumerate() {
        run.check(index)?;
        // Both numbers are below 2^31.
        length += run.count;
        if length > MAX_RANKS as u64 {
            return Err(Error::invalid(format!(
                "ranks has {length} ranks up to ranks[{index}]; there are at most {MAX_RANKS}"
            )));
        }
    }
    Ok(length as usize)
}

/// Makes runs of ranks. Two ranks whose difference is not 1 make no run of two, so that the second
/// rank can begin a longer run.
pub(super) fn runs_of(ranks: impl Iterator<Item = i32>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for rank in ranks.map(i64::from) {
        match runs.last_mut() {
            Some(run) if run.count == 1 => (run.count, run.step) = (2, rank - run.first),
            Some(run) if rank == run.first + run.step * run.count as i64 => run.count += 1,
            // The second of these two ranks may begin a longer run.
            Some(run) if run.count == 2 && run.step != 1 => {
                let second = run.first + run.step;
                (run.count, run.step) = (1, 1);
                runs.push(Run { first: second, count: 2, step: rank - second });
            }
            _ => runs.push(Run { first: rank, count: 1, step: 1 }),
        }
    }
    // The last two ranks make no run of two either when their difference is not 1.
    if let Some(run) = runs.last_mut().filter(|run| run.count == 2 && run.step != 1) {
        let second = run.first + run.step;
        (run.count, run.step) = (1, 1);
        runs.push(Run { first: second, count: 1, step: 1 });
    }
    runs
}
