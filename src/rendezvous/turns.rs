//! Where this process is among the epochs of its job (docs/recovery.md), and what it knows of the
//! next turn.
//!
//! The first rank that comes to a turn adds a note to the list of lost processes (losses.rs), which
//! every rank reads, whatever it waits for. So the calls of all ranks end when a recovery begins,
//! and while nothing is wrong no wait asks the store for more than before.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// The note that a rank of the mesh has come to a turn, for example `turn 3 by 5`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Turn {
    /// The number of the turn, and of the decision that ends it.
    pub(super) number: u64,
    /// The rank that has come.
    pub(super) by: i32,
}

impl Turn {
    /// Why a call of this rank has ended, in words that follow the name of the call.
    pub(super) fn reason(self) -> String {
        format!("rank {} has begun recovery {} of the job, for which all ranks are needed", self.by, self.number)
    }
}

impl Display for Turn {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        write!(out, "turn {} by {}", self.number, self.by)
    }
}

impl FromStr for Turn {
    type Err = ();

    /// Reads a text that [`Display`] has written. Any other text is an error.
    fn from_str(text: &str) -> Result<Turn, ()> {
        let (number, by) = text.strip_prefix("turn ").and_then(|rest| rest.split_once(" by ")).ok_or(())?;
        let read = Turn { number: number.parse().map_err(drop)?, by: by.parse().map_err(drop)? };
        if read.by >= 0 && read.to_string() == text { Ok(read) } else { Err(()) }
    }
}

/// The turns of the world, as far as this process knows them. All scopes of the world share this
/// value.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// The number of this process's epoch.
    epoch: AtomicU64,
    /// The number of the last decision that this process has read.
    passed: AtomicU64,
    /// The highest turn to which a rank has come, as far as this process has read the notes. 0 is
    /// no turn.
    begun: AtomicU64,
    /// The rank that has come to that turn.
    by: AtomicI32,
}

impl Turns {
    /// Notes that a rank has come to a turn. The notes are read one after another.
    pub(super) fn note(&self, turn: Turn) {
        if turn.number > self.begun.load(Ordering::SeqCst) {
            self.by.store(turn.by, Ordering::SeqCst);
            self.begun.store(turn.number, Ordering::SeqCst);
        }
    }

    /// Notes that this process has read decision `number`.
    pub(super) fn pass(&self, number: u64) {
        self.passed.fetch_max(number, Ordering::SeqCst);
    }

    /// Notes that this process is in epoch `number`.
    pub(super) fn enter(&self, number: u64) {
        self.epoch.fetch_max(number, Ordering::SeqCst);
    }

    /// Returns the number of this process's epoch.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// Whether this process has read decision `number`.
    pub(super) fn has_passed(&self, number: u64) -> bool {
        self.passed.load(Ordering::SeqCst) >= number
    }

    /// Whether a note says that a rank has come to that turn or to a later one.
    pub(super) fn is_begun(&self, number: u64) -> bool {
        self.begun.load(Ordering::SeqCst) >= number
    }

    /// Returns the turn to which a rank has come and whose decision this process has not read;
    /// `None` where there is none.
    pub(super) fn next(&self) -> Option<Turn> {
        let number = self.begun.load(Ordering::SeqCst);
        (!self.has_passed(number)).then(|| Turn { number, by: self.by.load(Ordering::SeqCst) })
    }
}

/// Returns the prefix of the keys of an epoch, in the world whose keys begin with `world`. Epoch 0
/// has no prefix of its own.
pub(super) fn prefix_of_epoch(world: &str, number: u64) -> String {
    match number {
        0 => world.to_owned(),
        number => format!("{world}/e{number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_as_it_is_written() {
        let turn = Turn { number: 3, by: 5 };
        assert_eq!((turn.to_string().as_str(), "turn 3 by 5".parse()), ("turn 3 by 5", Ok(turn)));
        for text in
            ["", "3", "turn", "turn 3", "turn 3 by", "turn 3 by -1", "turn 03 by 5", "turn 3 by 5 ", "turn -3 by 5"]
        {
            assert_eq!(text.parse::<Turn>(), Err(()), "{text:?}");
        }
    }

    #[test]
    fn a_turn_is_the_next_one_until_its_decision_is_read() {
        let turns = Turns::default();
        assert_eq!(turns.next(), None);
        turns.note(Turn { number: 2, by: 5 });
        turns.note(Turn { number: 1, by: 4 });
        turns.note(Turn { number: 2, by: 6 });
        assert_eq!((turns.next(), turns.is_begun(2)), (Some(Turn { number: 2, by: 5 }), true));
        turns.pass(1);
        assert_eq!(turns.next(), Some(Turn { number: 2, by: 5 }));
        turns.pass(2);
        assert_eq!((turns.next(), turns.has_passed(2), turns.has_passed(3)), (None, true, false));
    }
}
