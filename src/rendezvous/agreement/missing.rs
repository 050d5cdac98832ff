//! Finds out which ranks are missing in a call. The memory for the search grows with the number of
//! ranks that are looked at. The memory does not grow with the size of the world, because the
//! caller may state any size.

use std::time::Duration;

use super::round::Round;
use super::verdict::Verdict;
use crate::error::{Error, Result};
use crate::rank_list::ranges;
use crate::rendezvous::store::refused_connections;
use crate::wait::{Deadline, Wait};

/// How many ranks, counted from position 0, look for the missing ranks as soon as their deadline
/// has passed. The ranks at higher positions give these ranks some time to write the verdict.
pub(super) const FIRST_AT_DEADLINE: usize = 4;

/// About how many ranks the first request asks. The first request asks few ranks, so that a slow
/// store can answer soon.
const AT_FIRST: usize = 256;

/// About how many ranks each later request asks.
pub(super) const AT_ONCE: usize = 4096;

/// The most ranks that the whole search looks at.
const AT_MOST: usize = 1 << 20;

const NEVER_CALLED: &str = "never called";

/// How long the store may take to say who is missing, for a line in the log.
const SHORT: Duration = Duration::from_millis(500);

/// The result of a search for ranks that have left no key.
pub(super) struct Absent {
    /// The positions of the missing ranks, in ascending order.
    positions: Vec<usize>,
    /// The missing ranks, as ranks of the world. Ranks that are known to be lost are not among
    /// them.
    pub(super) ranks: Vec<i32>,
    /// How many members were looked at, counted from position 0.
    pub(super) looked_at: usize,
}

impl Round {
    /// Returns the verdict of a call whose deadline has passed. The verdict names the ranks that
    /// are not here. `why` is the error that has ended this rank's wait.
    pub(super) fn name_missing(&self, phase: &str, timeout: Duration, why: &Error, soon: &Wait) -> Result<Verdict> {
        let size = self.membership.members.len();
        let half = || Deadline::after(soon.deadline.left() / 2);
        let mut absent = self.absent(|position| self.here(phase, position), half(), soon)?;
        let mut what = if phase.is_empty() { NEVER_CALLED } else { "did not get through" };
        // This text says why no rank is named where none is missing.
        let mut unknown = "all were here".to_owned();
        if absent.ranks.is_empty() && absent.looked_at == size {
            // All ranks have come. If the last of them are only late, they count themselves in
            // soon, and the verdict appears. If a rank has stopped before it counted itself in, no
            // verdict appears.
            let late = if size > FIRST_AT_DEADLINE { soon.deadline.left() * 3 / 4 } else { soon.deadline.left() / 4 };
            let key = self.key(phase, "verdict");
            if let Ok(stands) = self.membership.store.get(&key, &soon.with_deadline(Deadline::after(late))) {
                return Ok(self.verdict_in(&stands, &key));
            }
            match self.absent(|position| self.stuck(phase, position), half(), soon) {
                Ok(stuck) => absent = stuck,
                Err(error) => unknown = format!("the store does not say which: {}", error.message()),
            }
            // A rank outside of the call may have stopped while it had the lock of the store.
            if absent.ranks.is_empty() && !why.ranks().is_empty() {
                let (call, number, millis) = (&self.call, self.number, timeout.as_millis());
                let message = format!("{call} as call {number} did not end within {millis} ms: {}", why.message());
                return Ok(Verdict::of(&Error::timeout(message).with_ranks(why.ranks())));
            }
            what = "came but got no further in";
        }
        let who = match (absent.ranks.is_empty(), absent.looked_at == size) {
            (true, true) => format!("some ranks ({unknown})"),
            (true, false) => {
                let rank = |position| self.membership.members.rank(position);
                format!("some ranks from rank {} to {}", rank(absent.looked_at), rank(size - 1))
            }
            (false, true) => ranges(&absent.ranks),
            (false, false) => {
                format!("{}, as far as the first {} of {size} ranks go,", ranges(&absent.ranks), absent.looked_at)
            }
        };
        let mut message =
            format!("{who} {what} {} as call {} within {} ms", self.call, self.number, timeout.as_millis());
        if what != NEVER_CALLED {
            return Ok(Verdict::of(&Error::timeout(message).with_ranks(&absent.ranks)));
        }
        // A rank that the store refused writes the reason into its own log only. So all ranks are
        // told that the store refused a connection.
        if let Some(refused) = (self.number == 0).then(|| refused_connections(&*self.membership.store, soon)).flatten()
        {
            message = format!("{message}; {refused}");
        }
        self.list_missing(&absent.positions, soon);
        Ok(Verdict::of_missing(&absent.ranks, message, self.my_rank(), timeout))
    }

    /// Warns in the log when half and 90 % of the call's time have passed, with the ranks that are
    /// not here.
    pub(super) fn warn_if_near(&self, phase: &str, of_caller: &Wait) {
        let Some(percent) = self.search.nearing.due(&of_caller.deadline) else { return };
        let soon = Deadline::after(SHORT.min(of_caller.deadline.left()));
        let wait = Wait { watch: None, ..of_caller.with_deadline(soon) };
        let who = match self.absent(|position| self.here(phase, position), soon, &wait) {
            Ok(absent) if !absent.ranks.is_empty() => ranges(&absent.ranks),
            Ok(_) => "ranks that have come but got no further".to_owned(),
            Err(_) => "other ranks (the store does not say which)".to_owned(),
        };
        log::warn!(
            "rank {}: {} as call {} waits for {who}: {percent} % of its {} ms have passed",
            self.my_rank(),
            self.call,
            self.number,
            of_caller.deadline.timeout().as_millis()
        );
    }

    /// Returns the ranks that have not left their key and are not known to be lost. When there is
    /// no time for all ranks, only the first ranks are looked at.
    pub(super) fn absent(&self, key: impl Fn(usize) -> String, until: Deadline, wait: &Wait) -> Result<Absent> {
        let (members, mut positions, mut at) = (&self.membership.members, Vec::new(), 0);
        while at < members.len().min(AT_MOST) && (at == 0 || !until.passed()) {
            let end = members.len().min(at + if at == 0 { AT_FIRST } else { AT_ONCE });
            let keys: Vec<String> = (at..end).map(&key).collect();
            let present = match self.membership.store.present(&keys, wait) {
                // When a later request fails, the missing ranks that are known already are
                // reported.
                Err(_) if at > 0 => break,
                present => present?,
            };
            let missing = present.into_iter().zip(at..end).filter(|(here, _)| !here);
            positions.extend(missing.map(|(_, position)| position));
            at = end;
        }
        let lost = self.membership.lost(|_| true);
        positions.retain(|position| !lost.contains(&members.rank(*position)));
        let ranks = positions.iter().map(|position| members.rank(*position)).collect();
        Ok(Absent { positions, ranks, looked_at: at })
    }

    /// Whether all ranks for which `counts` holds have left their key.
    pub(super) fn all_left(
        &self,
        key: impl Fn(i32) -> String,
        counts: impl Fn(i32) -> bool,
        wait: &Wait,
    ) -> Result<bool> {
        let members = &self.membership.members;
        let mut ranks = (0..members.len()).map(|position| members.rank(position)).filter(|rank| counts(*rank));
        loop {
            let keys: Vec<String> = ranks.by_ref().take(AT_ONCE).map(&key).collect();
            if keys.is_empty() {
                return Ok(true);
            }
            if self.membership.store.present(&keys, wait)?.contains(&false) {
                return Ok(false);
            }
        }
    }
}
