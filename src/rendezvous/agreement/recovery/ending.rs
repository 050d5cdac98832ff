//! The end of a job in which processes wait for a seat. The ranks of the mesh agree on the end as
//! on any other call (dm_world_finalize), and write it as the next decision. So the processes that
//! wait read this decision, whatever they have missed.

use super::Recovery;
use crate::error::{Result, Status};
use crate::rendezvous::agreement::comparing::MOMENT;
use crate::rendezvous::agreement::decision::Decision;
use crate::rendezvous::agreement::readers::stay_after;
use crate::rendezvous::store::any_of;
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
            let _ = self.await_waiting(&wait.with_deadline(stay_after(Status::InvalidState, wait)));
        }
        self.pass(self.number + 1);
        Ok(())
    }

    /// Waits until the members of the world without a place in the mesh have read that the job has
    /// ended. Some of them may not have come to the last turn yet: a rank that was benched by the
    /// last recovery may just be about to wait.
    fn await_waiting(&self, wait: &Wait) -> Result<()> {
        let number = self.number + 1;
        let read = |process| self.turn_key(number, &format!("decision/read/by/{process}"));
        let (store, losses) = (&self.membership.store, &self.membership.losses);
        for &process in self.epoch.members().difference(&self.epoch.in_mesh()) {
            while !losses.any(|lost| lost == process) {
                let (next, lost) = losses.next();
                let moment = wait.with_deadline(Deadline::after(MOMENT.min(wait.deadline.left())));
                match any_of(&**store, &[&read(process), &lost], &moment) {
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
    /// waits for this note.
    pub(super) fn acknowledge_end(&self, wait: &Wait) {
        if self.is_in_mesh() {
            return self.acknowledge("decision", Status::Ok, wait);
        }
        if self.membership.served {
            let soon = wait.with_deadline(stay_after(Status::Ok, wait));
            let key = self.turn_key(self.number, &format!("decision/read/by/{}", self.me));
            let _ = self.membership.put(key, b"1", &soon);
        }
    }
}
