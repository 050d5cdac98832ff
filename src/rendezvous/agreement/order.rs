//! Ranks that wait for each other in different calls of different sets: each set waits for a rank that waits in the other.
//!
//! Within one set every call has a number, so another order is another call under the same number. Across sets there is no such number.
//! So a rank that has waited for a while in a call leaves word where it is, under `<prefix of the world>/at/<rank>`, and the first of
//! a call that has done so looks where those are who are missing. One that is in another call, which wants this rank too, can come no
//! more than this rank can go there: a rank makes its collective calls one after another.

use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::time::Duration;

use super::verdict::{DETAIL, Verdict};
use super::{Members, Round};
use crate::error::{Error, Result, Status};
use crate::wait::{Deadline, Wait};

/// The missing ranks that are looked for, and the largest sets that are written down.
const LOOKED_FOR: usize = 8;
const WRITTEN: usize = 4096;
const SHORT: Duration = Duration::from_millis(500);

/// One wait that looks now and then.
pub(super) struct Order {
    round: Round,
    looks: AtomicU32,
    /// Whose turn it is to look for the call: 1 is this rank; 0 while that is not known.
    turn: AtomicI64,
}

impl Order {
    /// For a wait in the first phase of `round`.
    pub(super) fn of(round: &Round) -> Order {
        Order { round: round.copy(), looks: AtomicU32::new(0), turn: AtomicI64::new(0) }
    }

    /// To be called now and then while waiting. What it finds it writes as the verdict of both calls, so it has nothing to say.
    pub(super) fn look(&self, deadline: Deadline) {
        let wait = Wait::after(SHORT.min(deadline.left()));
        match self.looks.fetch_add(1, Ordering::SeqCst) {
            0 => drop(self.leave_word(&wait)),
            // After half a second, one, two, four and so on: who waits for long waits for work, as a rule.
            look if look & (look + 1) == 0 && self.turn.load(Ordering::SeqCst) == 1 => {
                drop(self.look_for_missing(&wait));
            }
            _ => {}
        }
    }

    fn leave_word(&self, wait: &Wait) -> Result<()> {
        let Round { party, prefix, call, number } = &self.round;
        let members = match &party.members {
            Members::All(size) => format!("all {size}"),
            Members::Listed(ranks) if ranks.len() <= WRITTEN => {
                ranks.iter().map(i32::to_string).collect::<Vec<_>>().join(" ")
            }
            Members::Listed(_) => return Ok(()),
        };
        let word = format!("{prefix}\n{members}\n{number}\n{call}");
        party.store.set(&self.at(self.round.my_rank()), word.as_bytes(), wait)?;
        self.turn.store(party.store.add(&self.round.key("", "looks"), 1, wait)?, Ordering::SeqCst);
        Ok(())
    }

    fn look_for_missing(&self, wait: &Wait) -> Result<()> {
        let party = &self.round.party;
        let keys: Vec<String> = (0..party.members.len()).map(|position| self.round.here("", position)).collect();
        let present = party.store.present(&keys, wait)?;
        let missing = (0..keys.len()).filter(|position| !present[*position]).take(LOOKED_FOR);
        for rank in missing.map(|position| party.members.rank(position)) {
            let Some(word) = party.store.try_get(&self.at(rank), wait)? else { continue };
            let word = String::from_utf8_lossy(&word).into_owned();
            if let Some(other) = Elsewhere::read(&word) {
                self.compare(rank, &other, wait)?;
            }
        }
        Ok(())
    }

    /// Whether that rank waits in a call that cannot end before this one.
    fn compare(&self, rank: i32, other: &Elsewhere, wait: &Wait) -> Result<()> {
        let (store, me) = (&self.round.party.store, self.round.my_rank());
        let Some(position) = other.members.position(me).filter(|_| other.prefix != self.round.prefix) else {
            return Ok(());
        };
        // Word of a call that has ended, or that this rank has come to, is of the past.
        let over = format!("{}/verdict", other.prefix);
        let came = format!("{}/here/{position}", other.prefix);
        if store.present(&[over.clone(), came], wait)?.contains(&true) {
            return Ok(());
        }
        let message = format!(
            "rank {rank} called {} as call {}, while rank {me} called {} as call {}: each waits for the other; collective calls must come in the same order on every rank",
            other.call, other.number, self.round.call, self.round.number
        );
        let verdict = Verdict::of(&Error::new(Status::Mismatch, message)).encode();
        for key in [self.round.key("", "verdict"), over] {
            store.set_once(&key, &verdict, wait)?;
        }
        Ok(())
    }

    fn at(&self, rank: i32) -> String {
        format!("{}/at/{rank}", self.round.party.losses.prefix())
    }
}

/// Where another rank said that it waits.
struct Elsewhere<'a> {
    prefix: &'a str,
    members: Members,
    number: &'a str,
    call: &'a str,
}

impl Elsewhere<'_> {
    fn read(word: &str) -> Option<Elsewhere<'_>> {
        let mut lines = word.splitn(4, DETAIL);
        let (prefix, members, number, call) = (lines.next()?, lines.next()?, lines.next()?, lines.next()?);
        let members = match members.strip_prefix("all ") {
            Some(size) => Members::All(size.parse().ok()?),
            None => {
                Members::Listed(members.split(' ').map(|rank| rank.parse().ok()).collect::<Option<Vec<_>>>()?.into())
            }
        };
        Some(Elsewhere { prefix, members, number, call })
    }
}
