//! Ranks that wait for each other in different calls of different sets: each set waits for a rank that waits in the other.
//!
//! Within one set every call has a number, so another order is another call under the same number. Across sets there is no such number.
//! So a rank that has waited for a while in a call leaves word where it is, under `<prefix of the world>/at/<rank>`, and the first of
//! a call that has done so looks where those are who are missing, and for whom they wait there. A ring that leads back to a rank that waits
//! in this call never ends by itself: a rank makes its collective calls one after another.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};
use std::time::Duration;

use super::verdict::Verdict;
use super::{FAREWELL_HERE, Members, Round};
use crate::error::{Error, Result, Status};
use crate::wait::{Deadline, Wait};

/// The missing ranks of a call that are looked for, and the calls that are looked into.
const LOOKED_FOR: usize = 8;
const CALLS: usize = 8;
/// The largest set whose ranks are looked for: each search asks for all of them.
const LARGEST: usize = 1 << 16;
const SHORT: Duration = Duration::from_millis(500);

/// How often a rank has looked during one call.
#[derive(Default)]
pub(super) struct Looks {
    number: AtomicU32,
    /// Whose turn it is to look for the call: 1 is this rank; 0 while that is not known.
    turn: AtomicI64,
    /// How many ranks had left word when it last looked.
    seen: AtomicI64,
    /// Whether this rank has left word.
    word: AtomicBool,
}

/// The waits of one call that look now and then.
pub(super) struct Order(Round);

/// A call that ranks wait in.
struct Call {
    prefix: String,
    members: Members,
    number: String,
    call: String,
    /// The call, by its place in the search, that waits for this rank, which waits in this one.
    wanted: Option<(usize, i32)>,
    /// What that rank said of itself.
    word: Vec<u8>,
}

impl Looks {
    /// Removes the word that this rank left, which no longer waits in `round`. `wait` is that of the call.
    pub(super) fn take_back_word(&self, round: &Round, wait: &Wait) {
        if self.word.swap(false, Ordering::SeqCst) {
            // A rank whose deadline has passed may have a store that is silent. The request goes out also where no answer is waited for.
            let hurried = wait.cancel.is_raised() || wait.deadline.passed();
            let longest = if hurried { FAREWELL_HERE } else { SHORT };
            let _ = round.party.store.delete(&at(round, round.my_rank()), &Wait::after(longest));
        }
    }
}

/// Where a rank says in which call it waits.
fn at(round: &Round, rank: i32) -> String {
    format!("{}/at/{rank}", round.party.losses.prefix())
}

impl Order {
    /// For the waits in the first phase of `round`.
    pub(super) fn of(round: &Round) -> Order {
        Order(round.copy())
    }

    /// To be called now and then by a rank that waits so. What it finds it writes as the verdict of the calls, so it has nothing to say.
    pub(super) fn look(&self, of_caller: &Wait) {
        let soon = Deadline::after(SHORT.min(of_caller.deadline.left()));
        let wait = Wait { watch: None, ..of_caller.with_deadline(soon) };
        let looks = &self.0.looks;
        let look = looks.number.fetch_add(1, Ordering::SeqCst);
        if look == 0 {
            drop(self.leave_word(&wait));
        } else if looks.turn.load(Ordering::SeqCst) == 1 {
            drop(self.look_for_missing(look, &wait));
        }
    }

    fn leave_word(&self, wait: &Wait) -> Result<()> {
        let Round { party, prefix, call, number, looks, .. } = &self.0;
        looks.word.store(true, Ordering::SeqCst);
        let word = format!("{prefix}\n{number}\n{call}");
        party.store.set(&at(&self.0, self.0.my_rank()), word.as_bytes(), wait)?;
        let turn = self.0.count(self.0.key("", "looks"), 1, wait)?;
        if turn == 1 {
            self.0.leave(self.0.key("", "members"), party.members.to_text().as_bytes(), wait)?;
        }
        looks.turn.store(turn, Ordering::SeqCst);
        Ok(())
    }

    /// Whenever another rank has come and waits, and after half a second, one, two, four and so on.
    fn look_for_missing(&self, look: u32, wait: &Wait) -> Result<()> {
        let looks = &self.0.looks;
        let left_word = self.0.party.store.add(&self.0.key("", "looks"), 0, wait)?;
        let due = look & (look + 1) == 0;
        if (due || left_word != looks.seen.load(Ordering::SeqCst)) && self.search(wait)? {
            looks.seen.store(left_word, Ordering::SeqCst);
        }
        Ok(())
    }

    /// From this call through the missing ranks of each to the calls where those wait. `false`: somebody is just leaving word.
    fn search(&self, wait: &Wait) -> Result<bool> {
        let Round { party, prefix, call, number, .. } = &self.0;
        let mut calls = vec![Call {
            prefix: prefix.clone(),
            members: party.members.clone(),
            number: number.to_string(),
            call: call.clone(),
            wanted: None,
            word: Vec::new(),
        }];
        let mut waiting = HashSet::new();
        let (mut at_call, mut complete) = (0, true);
        while at_call < calls.len() {
            let (came, missing) = self.attendance(&calls[at_call], wait)?;
            if at_call == 0 {
                waiting = HashSet::from_iter(came);
            } else if let Some(rank) = missing.iter().find(|rank| waiting.contains(rank)) {
                return self.tell(&calls, at_call, *rank, wait).map(|()| true);
            }
            for rank in missing.into_iter().take(LOOKED_FOR) {
                let Some(word) = party.store.try_get(&at(&self.0, rank), wait)? else { continue };
                let text = String::from_utf8_lossy(&word).into_owned();
                let Some((prefix, number, call)) = read(&text) else { continue };
                if calls.len() == CALLS || calls.iter().any(|known| known.prefix == prefix) {
                    continue;
                }
                let Some(members) = party.store.try_get(&format!("{prefix}/members"), wait)? else {
                    complete = false;
                    continue;
                };
                let Some(members) = Members::from_text(&String::from_utf8_lossy(&members)) else { continue };
                let (prefix, number, call) = (prefix.to_owned(), number.to_owned(), call.to_owned());
                let found = Call { prefix, members, number, call, wanted: Some((at_call, rank)), word };
                if self.waits_in(rank, &found, wait)? {
                    calls.push(found);
                }
            }
            at_call += 1;
        }
        Ok(complete)
    }

    /// The ranks that have come to a call, and those that have not.
    fn attendance(&self, call: &Call, wait: &Wait) -> Result<(Vec<i32>, Vec<i32>)> {
        if call.members.len() > LARGEST {
            return Ok((Vec::new(), Vec::new()));
        }
        let keys: Vec<String> = (0..call.members.len()).map(|position| call.here(position)).collect();
        let present = self.0.party.store.present(&keys, wait)?;
        let (came, missing): (Vec<_>, Vec<_>) = present.into_iter().enumerate().partition(|(_, here)| *here);
        let ranks = |positions: Vec<(usize, bool)>| {
            positions.into_iter().map(|(position, _)| call.members.rank(position)).collect::<Vec<i32>>()
        };
        Ok((ranks(came), ranks(missing)))
    }

    /// Word of a call that has ended is of the past.
    fn waits_in(&self, rank: i32, call: &Call, wait: &Wait) -> Result<bool> {
        let Some(position) = call.members.position(rank) else { return Ok(false) };
        Ok(self.0.party.store.present(&[call.here(position), call.verdict()], wait)? == [true, false])
    }

    /// The last of the calls waits for a rank that waits in the first one.
    fn tell(&self, calls: &[Call], last: usize, rank: i32, wait: &Wait) -> Result<()> {
        let mut ring = vec![(rank, &calls[0])];
        let mut at_call = last;
        while let Some((by, wanted)) = calls[at_call].wanted {
            // What was read of a call is true only while this rank is in it: it takes its word back when it leaves, and only then can keys be removed.
            if self.0.party.store.try_get(&at(&self.0, wanted), wait)?.as_ref() != Some(&calls[at_call].word) {
                return Ok(());
            }
            ring.push((wanted, &calls[at_call]));
            at_call = by;
        }
        ring.reverse();
        let says = |(rank, call): &(i32, &Call)| format!("rank {rank} called {} as call {}", call.call, call.number);
        let (ends, others): (&(i32, &Call), _) = (&ring[ring.len() - 1], &ring[..ring.len() - 1]);
        let message = format!(
            "{}, while {}: each waits for the {}; collective calls must come in the same order on every rank",
            others.iter().map(says).collect::<Vec<_>>().join(", "),
            says(ends),
            if others.len() == 1 { "other" } else { "one before" },
        );
        let verdict = Verdict::of(&Error::new(Status::Mismatch, message));
        let theirs: Vec<String> = others.iter().map(|(_, call)| call.verdict()).collect();
        // Where one of them has ended meanwhile, its ranks go on to the next.
        if self.0.party.store.present(&theirs, wait)?.contains(&true)
            || self.0.decide_at(calls[0].verdict(), &verdict, wait)? != verdict
        {
            return Ok(());
        }
        theirs.into_iter().try_for_each(|key| self.0.decide_at(key, &verdict, wait).map(drop))
    }
}

impl Call {
    fn here(&self, position: usize) -> String {
        format!("{}/here/{position}", self.prefix)
    }

    fn verdict(&self) -> String {
        format!("{}/verdict", self.prefix)
    }
}

impl Members {
    fn to_text(&self) -> String {
        match self {
            Members::All(size) => format!("all {size}"),
            Members::Listed(ranks) => ranks.iter().map(i32::to_string).collect::<Vec<_>>().join(" "),
        }
    }

    fn from_text(text: &str) -> Option<Members> {
        match text.strip_prefix("all ") {
            Some(size) => size.parse().ok().map(Members::All),
            None => {
                let ranks = text.split(' ').map(|rank| rank.parse().ok()).collect::<Option<Arc<[i32]>>>();
                ranks.map(Members::Listed)
            }
        }
    }
}

/// Prefix, number and text of the call where a rank said that it waits.
fn read(word: &str) -> Option<(&str, &str, &str)> {
    let mut lines = word.splitn(3, '\n');
    Some((lines.next()?, lines.next()?, lines.next()?))
}

#[cfg(test)]
mod tests;
