//! Publishes a verdict, and has the rank that serves the store stay until the other ranks have read
//! it.

use std::sync::mpsc::channel;
use std::time::Duration;

use super::comparing::MOMENT;
use super::round::{HURRIED, Membership, Round};
use super::verdict::Verdict;
use crate::error::{Result, Status};
use crate::rendezvous::store::{Arrival, Count, Last, any_of};
use crate::wait::{Deadline, Wait};

/// How long the verdict of an aborted rank may take to be written, while the rank itself waits for
/// [`HURRIED`] only. The other ranks wait for the verdict, so a busy store gets much time.
const FAREWELL: Duration = Duration::from_secs(10);

/// How long the rank that serves the store stays after a success, so that the others can read the
/// verdict. All ranks are known to be there.
const STAY: Duration = Duration::from_secs(10);

/// How long the rank that serves the store stays after a failure, because ranks may still come.
const STAY_AFTER_FAILURE: Duration = Duration::from_secs(2);

/// How long the rank that serves the store stays after a mismatch, because some ranks may never
/// come.
const STAY_AFTER_MISMATCH: Duration = Duration::from_millis(600);

/// How long the rank that serves the store stays after a loss or a timeout, because some ranks
/// never come.
const STAY_AFTER_LOSS: Duration = Duration::from_millis(100);

/// Returns until when the rank that serves the store stays after a call that has ended with this
/// status. `wait` is the wait of the call.
pub(super) fn stay_after(status: Status, wait: &Wait) -> Deadline {
    let stay = match status {
        Status::Mismatch => STAY_AFTER_MISMATCH,
        Status::Timeout | Status::PeerLost => STAY_AFTER_LOSS,
        Status::Ok => STAY,
        _ => STAY_AFTER_FAILURE,
    };
    Deadline::after(stay.min(wait.deadline.left().max(STAY_AFTER_LOSS)))
}

impl Round {
    /// Writes a verdict. With `reads` it also notes that this rank has read the verdict that
    /// stands. A rank that is aborted does not wait for a store that is slow or silent, because a
    /// thread writes the verdict. Returns whether a verdict stands in the store, as far as this
    /// rank waited for it.
    pub(super) fn publish_verdict(
        &self,
        phase: &str,
        verdict: &Verdict,
        longest: Duration,
        wait: &Wait,
        reads: bool,
    ) -> bool {
        let (round, phase, verdict) = (self.copy(), phase.to_owned(), verdict.clone());
        let say = move |longest| {
            let wait = Wait::after(longest);
            let stands = round.decide(&phase, &verdict, &wait).is_ok();
            let _ = if reads { round.say_read(&phase, &wait) } else { Ok(()) };
            stands
        };
        if !wait.cancel.is_raised() {
            return say(longest);
        }
        let (told, telling) = channel();
        let tell = move || {
            let _ = told.send(say(FAREWELL));
        };
        hostccl::thread::spawn("dm-farewell", tell).is_ok() && telling.recv_timeout(HURRIED).unwrap_or(false)
    }

    /// Every other rank notes that it has read the verdict. The rank that serves the store waits
    /// until all ranks that are not lost have left this note.
    pub(super) fn acknowledge(&self, phase: &str, verdict: &Verdict, wait: &Wait) {
        let stay = Wait { watch: None, ..wait.with_deadline(stay_after(verdict.status, wait)) };
        // The result does not matter, because the call has its verdict.
        let _ = if self.membership.serving { self.await_readers(phase, &stay) } else { self.say_read(phase, &stay) };
    }

    /// Leaves a note that this rank has read the verdict, and adds this rank to the count of all
    /// readers.
    pub(super) fn say_read(&self, phase: &str, wait: &Wait) -> Result<()> {
        let (mine, counter) = (self.read_by(phase, self.my_rank()), self.key(phase, "read"));
        let all = self.all_have_read(phase);
        let Membership { store, members, left, .. } = &*self.membership;
        left.note([mine.clone()]);
        let sum = members.len() as i64 - 1;
        let last = Last { sum, key: &all, value: b"1" };
        let count = Count { counter: &counter, amount: 1, last: Some(last) };
        let mut counted = |number| {
            let written = [(1, &counter), (sum, &all)].into_iter().filter(|(writer, _)| *writer == number);
            left.note(written.map(|(_, key)| key.clone()));
            Ok(())
        };
        let arrival = Arrival { note: Some((&mine, b"1")), count: Some(count) };
        store.arrive(&arrival, &[], &mut counted, wait).map(drop)
    }

    /// Waits until the count of readers is complete, or until each rank that is not lost has read.
    fn await_readers(&self, phase: &str, wait: &Wait) -> Result<()> {
        let Membership { store, losses, .. } = &*self.membership;
        loop {
            if self.has_lost() {
                return self.await_each_reader(phase, wait);
            }
            let (number, next) = losses.next();
            match any_of(&**store, &[&self.all_have_read(phase), &next], wait)? {
                (1, value) if !wait.deadline.passed() => losses.note(number, &value),
                _ => return Ok(()),
            }
        }
    }

    /// Waits until each rank that is not lost has read the verdict. Counting is not enough here,
    /// because a lost rank may have died after its note and before it was counted.
    fn await_each_reader(&self, phase: &str, wait: &Wait) -> Result<()> {
        let Membership { store, losses, .. } = &*self.membership;
        loop {
            let gone = self.membership.lost(|rank| self.is_other(rank));
            let stays = |rank| rank != self.my_rank() && !gone.contains(&rank);
            if self.all_left(|rank| self.read_by(phase, rank), stays, wait)? {
                return Ok(());
            }
            let (number, next) = losses.next();
            let moment = wait.with_deadline(Deadline::after(MOMENT.min(wait.deadline.left())));
            match store.get_any(&[&next], &moment) {
                Ok((_, value)) => losses.note(number, &value),
                Err(error) if error.status() == Status::Timeout && !wait.deadline.passed() => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns the key that is in the store once every rank has read the verdict, except the rank
    /// that serves the store.
    fn all_have_read(&self, phase: &str) -> String {
        self.key(phase, &format!("read/{}", self.membership.members.len() - 1))
    }

    fn read_by(&self, phase: &str, rank: i32) -> String {
        self.key(phase, &format!("read/by/{rank}"))
    }
}
