//! The end of a job in which processes wait for a seat. The ranks of the mesh agree on the end as
//! on any other call (dm_world_finalize), and write it as the next decision. So the processes that
//! wait read this decision, whatever they have missed.

use std::collections::BTreeSet;
use std::time::Duration;

use super::Recovery;
use crate::error::{Result, Status};
use crate::rendezvous::agreement::comparing::MOMENT;
use crate::rendezvous::agreement::decision::Decision;
use crate::rendezvous::agreement::readers::stay_after;
use crate::rendezvous::incarnation::Incarnation;
use crate::rendezvous::store::any_of;
use crate::rendezvous::turns::prefix_of_epoch;
use crate::wait::{Deadline, Wait};

impl Recovery {
    /// Tells the processes that wait for a seat that the job has ended, after the ranks of the mesh
    /// have agreed on it. The rank that serves the store stays until all spare and benched ranks
    /// have read it, or are lost, for two seconds at most.
    pub fn end(&mut self, wait: &Wait) -> Result<()> {
        if self.fenced_since.is_some() {
            return Ok(());
        }
        loop {
            let number = self.number + 1;
            let stands = self.decide(number, &Decision::End, wait)?;
            match stands {
                // A rank may have refused a call of its own under this number.
                Decision::Failure(_) => self.pass(number),
                Decision::Epoch(_) => return Ok(()),
                Decision::End => break,
            }
        }
        if self.membership.served && self.membership.serving {
            // The result does not matter, because the job has ended.
            let _ = self.await_waiting(self.number + 1, &wait.with_deadline(stay_after(Status::InvalidState, wait)));
        }
        self.pass(self.number + 1);
        Ok(())
    }

    /// If the rank that serves the store waits for a seat, tells it that this rank has left
    /// dm_world_finalize. The serving rank stays until all ranks of the mesh have said so.
    pub fn tell_ended(&self, wait: &Wait) {
        let in_mesh = self.epoch.in_mesh();
        if self.membership.served && in_mesh.contains(&self.me) && in_mesh.iter().all(|process| process.rank != 0) {
            // Where the store does not answer, nobody can be told.
            let _ = self.membership.put(self.ended(self.me), b"1", wait);
        }
    }

    /// Waits until the members of the world without a place in the mesh have read that the job has
    /// ended, by decision `number`. Some of them may not have come to the last turn yet: a rank
    /// that was benched by the last recovery may just be about to wait.
    fn await_waiting(&self, number: u64, wait: &Wait) -> Result<()> {
        let waiting = &self.epoch.members() - &self.epoch.in_mesh();
        self.await_each(waiting, |process| self.end_read(number, process), wait)
    }

    /// Waits until each of these processes has left its key, or is lost.
    fn await_each(
        &self,
        processes: BTreeSet<Incarnation>,
        key: impl Fn(Incarnation) -> String,
        wait: &Wait,
    ) -> Result<()> {
        let (store, losses) = (&self.membership.store, &self.membership.losses);
        for process in processes.into_iter().filter(|process| *process != self.me) {
            while !losses.any(|lost| lost == process) {
                let (next, lost) = losses.next();
                let moment = wait.with_deadline(Deadline::after(MOMENT.min(wait.deadline.left())));
                match any_of(&**store, &[&key(process), &lost], &moment) {
                    Ok((0, _)) => break,
                    Ok((_, value)) => losses.note(next, &value),
                    Err(error) if error.status() == Status::Timeout && !wait.deadline.passed() => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// Notes that this process has read that the job has ended. The rank that serves the store
    /// waits for this note. If this process serves the store and has no seat, it stays until the
    /// ranks of the mesh have left dm_world_finalize, because they still read their second verdict
    /// here. It stays for `longest` at most, which is the time of its own call.
    pub(super) fn acknowledge_end(&self, longest: Duration, wait: &Wait) {
        if self.is_in_mesh() {
            return self.acknowledge("decision", Status::Ok, wait);
        }
        if !self.membership.served {
            return;
        }
        let soon = wait.with_deadline(stay_after(Status::Ok, wait));
        if !self.membership.serving {
            let _ = self.membership.put(self.end_read(self.number, self.me), b"1", &soon);
            return;
        }
        // The results do not matter, because the job has ended.
        let stay = Deadline::after(longest);
        let _ = self.await_each(self.epoch.in_mesh(), |process| self.ended(process), &wait.with_deadline(stay));
        let _ = self.await_waiting(self.number, &wait.with_deadline(stay_after(Status::InvalidState, wait)));
    }

    /// Returns the key of the note that a process without a place has read that the job has ended.
    fn end_read(&self, number: u64, process: Incarnation) -> String {
        self.turn_key(number, &format!("decision/read/by/{process}"))
    }

    /// Returns the key of the note that a rank of the mesh has left the call that ends the job. The
    /// key has the number of the epoch, which is equal on all members. A rank to which the store
    /// did not answer may not know the number of the decision that ends the job.
    fn ended(&self, process: Incarnation) -> String {
        let epoch = prefix_of_epoch(self.membership.losses.prefix(), self.epoch_number);
        format!("{epoch}/ended/by/{process}")
    }
}
