//! A rank tells the others two things beside its proposals: that it refuses its own call, and that
//! it has read how a recovery has ended. The rank that serves the store waits for the second of
//! these.

use std::collections::BTreeSet;

use super::Recovery;
use crate::error::{Error, Result, Status};
use crate::rendezvous::agreement::comparing::MOMENT;
use crate::rendezvous::agreement::decision::{Decision, Failure, Why};
use crate::rendezvous::agreement::readers::stay_after;
use crate::rendezvous::agreement::scope::MOST_REFUSALS;
use crate::rendezvous::incarnation::Incarnation;
use crate::rendezvous::store::any_of;
use crate::wait::{Deadline, Wait};

impl Recovery {
    /// Tells the other ranks that this rank has refused its own call, for example because of a
    /// wrong argument, so that nobody waits for it. The refusal is the decision of the next turn:
    /// it ends no call of the others, and the recovery of those that have come fails. Does nothing
    /// when the store does not answer, and after 1,000 refusals in a row, because decisions stay in
    /// the store.
    pub fn refuse(&mut self, error: &Error, wait: &Wait) {
        if !self.is_in_mesh() || self.fenced_since.is_some() || self.refusals >= MOST_REFUSALS {
            return;
        }
        self.refusals += 1;
        loop {
            let (number, rank) = (self.number + 1, self.me.rank);
            let message = format!("rank {rank} refused its own call in recovery {number}: {}", error.message());
            let refusal = Error::new(error.status(), message).with_ranks(&[rank]);
            let refusal = Decision::Failure(Failure::new(Why::Refused, &refusal));
            match self.decide(number, &refusal, wait) {
                // The others gave this turn up, so those that wait for this rank are in a later
                // one.
                Ok(Decision::Failure(stands)) => {
                    self.pass(number);
                    if stands.why == Why::Refused {
                        return;
                    }
                }
                // The next call of this rank reads that decision.
                Ok(Decision::Epoch(_) | Decision::End) | Err(_) => return,
            }
        }
    }

    /// Notes that this process has read the decision of that number.
    pub(super) fn pass(&mut self, number: u64) {
        self.number = number;
        self.membership.losses.turns().pass(number);
    }

    /// Lets the rank that serves the store stay until the others know how the recovery has ended.
    /// Every other rank of the mesh notes that it has read this. The rank that serves waits for the
    /// notes of all ranks that are not lost.
    /// `name` is the part of the recovery that has ended, and `status` what the ranks return.
    pub(super) fn acknowledge(&self, name: &str, status: Status, wait: &Wait) {
        if !self.membership.served || !self.is_in_mesh() {
            return;
        }
        let stay = Wait { watch: None, ..wait.with_deadline(stay_after(status, wait)) };
        // The result does not matter, because the recovery has ended.
        let _ = if self.membership.serving { self.await_readers(name, &stay) } else { self.say_read(name, &stay) };
    }

    fn say_read(&self, name: &str, wait: &Wait) -> Result<()> {
        self.membership.put(self.read_by(name, self.me), b"1", wait)?;
        let count = self.membership.count(self.read(name), 1, wait)?;
        self.membership.put(format!("{}/{count}", self.read(name)), b"1", wait)
    }

    fn await_readers(&self, name: &str, wait: &Wait) -> Result<()> {
        let mut others = self.epoch.in_mesh();
        others.remove(&self.me);
        let all = format!("{}/{}", self.read(name), others.len());
        let (store, losses) = (&self.membership.store, &self.membership.losses);
        while !others.is_empty() {
            // Counting is not enough after a loss: the lost rank may have died after its note and
            // before it was counted.
            if losses.any(|lost| others.contains(&lost)) {
                let stay: BTreeSet<_> = others.difference(&losses.all(|_| true)).copied().collect();
                if self.which_left(stay.clone(), |process| self.read_by(name, process), wait)? == stay {
                    return Ok(());
                }
            }
            let (number, lost) = losses.next();
            let moment = wait.with_deadline(Deadline::after(MOMENT.min(wait.deadline.left())));
            match any_of(&**store, &[&all, &lost], &moment) {
                Ok((0, _)) => return Ok(()),
                Ok((_, value)) => losses.note(number, &value),
                Err(error) if error.status() == Status::Timeout && !wait.deadline.passed() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn read(&self, name: &str) -> String {
        self.turn_key(self.number, &format!("{name}/read"))
    }

    fn read_by(&self, name: &str, process: Incarnation) -> String {
        format!("{}/by/{process}", self.read(name))
    }
}
