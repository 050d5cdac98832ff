//! `--restart job`: after a failure all ranks of all nodes end, the nodes meet anew, and all ranks
//! start again in a new store. torchrun does the same.
//!
//! The cause for which an attempt ends stands in the store, so all nodes decide alike whether the
//! job starts again. A node that has been lost is waited for in the next meeting, for
//! `--rdzv-timeout`.

use std::time::Instant;

use devicemesh::rendezvous::host_name;
use devicemesh::rendezvous::store::{Secret, Server};

use super::options::Unit;
use super::state::{after, pause};
use crate::failure::Failure;
use crate::run::assignment::Assignment;
use crate::run::cause::Cause;
use crate::run::ending::STAY;
use crate::run::job::{Job, Phase};
use crate::run::nodes::Nodes;
use crate::run::relaying::{start_relay, threshold};
use crate::run::rendezvous::{Rendezvous, Run};

impl Job<'_> {
    /// Runs this node's part of the job, again after each failure for which the job starts again.
    pub fn run(&mut self, mut rendezvous: Rendezvous) -> Result<(), Failure> {
        loop {
            self.attempt(&rendezvous)?;
            if !self.begin_again(&mut rendezvous) {
                return Ok(());
            }
        }
    }

    /// Runs the job once.
    fn attempt(&mut self, rendezvous: &Rendezvous) -> Result<(), Failure> {
        let relayed_from = threshold()?;
        // The ranks of one node need the server until they have ended.
        let mut server = None;
        let assignment = if rendezvous.is_private() {
            let server = server.insert(
                Secret::from_environment()
                    .and_then(|secret| Server::at(&rendezvous.host, rendezvous.port, secret))
                    .map_err(|error| Failure::new(1, error.message()))?,
            );
            server.expect_ranks(rendezvous.ranks as usize);
            Some(Assignment::whole_job(rendezvous, server.local_addr().port()))
        } else {
            if rendezvous.nodes > 1 {
                self.reporter.get_or_insert_with(host_name);
            }
            self.nodes = Some(Nodes::meet(rendezvous.clone())?);
            self.wait_for_nodes()
        };
        // The relay, too, is there until the ranks have ended.
        let mut relay = None;
        if let Some(mut assignment) = assignment {
            // Ctrl-Z may have come before this node could do anything.
            self.handle_signals();
            self.wait_for_start();
            if self.cause.is_none() {
                let serves = self.nodes.as_ref().is_some_and(Nodes::serves);
                relay = start_relay(&mut assignment, relayed_from, serves, |text| self.say(text))?;
                self.start(assignment)?;
            }
        }
        self.watch();
        drop(relay);
        Ok(())
    }

    /// Waits for the end of the pause before the restart, or for the end of the job. While the job
    /// is stopped (Ctrl-Z), no rank starts.
    fn wait_for_start(&mut self) {
        let must_wait =
            |job: &Self| job.stopped.is_some() || job.restarts.not_before.is_some_and(|moment| Instant::now() < moment);
        while self.cause.is_none() && must_wait(self) {
            self.step();
        }
    }

    /// Whether the job starts again after that cause. All nodes give the same answer.
    pub fn starts_again(&self, cause: &Cause) -> bool {
        let standing = &self.restarts.standing;
        let is_restarted = match cause {
            Cause::Rank { ended, .. } => self.may_start_again(ended),
            // Where a starter has lost a host, it ends the job.
            Cause::Gone { .. } | Cause::Lost { .. } => self.control.is_none() && self.nodes.is_some(),
            _ => false,
        };
        is_restarted && standing.unit == Some(Unit::Job) && standing.restarts < standing.most
    }

    /// Returns two texts for the message about that cause: one that stands directly behind the
    /// cause, and the end of the message. The end is empty where the job does not start again.
    pub fn told_restart(&self, cause: &Cause) -> (String, String) {
        if !self.starts_again(cause) || self.restarts.is_ended() {
            let why_not = self.restarts.why_not.as_ref().filter(|_| matches!(cause, Cause::Rank { .. }));
            return (why_not.map_or(String::new(), |why_not| format!("; {why_not}")), String::new());
        }
        // At the end of a job that does not start again, the last line has the reason.
        let reason = if let Cause::Rank { reason, .. } = cause { reason.clone() } else { String::new() };
        let (number, most) = (self.restarts.standing.restarts + 1, self.restarts.standing.most);
        (reason, format!("; then all ranks start again{} (restart {number} of {most})", after(pause(number))))
    }

    /// Prepares the next attempt. Returns whether there is one.
    fn begin_again(&mut self, rendezvous: &mut Rendezvous) -> bool {
        let Some(cause) = self.cause.take_if(|_| true) else { return false };
        // The other nodes meet anew, so this one meets them, too, to tell them why the job ends.
        // They know already what the starter tells.
        let must_tell = self.nodes.is_some()
            && rendezvous.nodes > 1
            && self.restarts.ended_by.as_ref().is_some_and(|cause| !self.starter_tells(cause));
        let must_end = self.output.loss().is_some() || self.gives_up;
        if !self.starts_again(&cause) || (must_end && !must_tell) {
            self.cause = Some(cause);
            return false;
        }
        if self.restarts.ended_by.is_some() && !must_tell {
            self.cause = self.restarts.ended_by.take();
            return false;
        }
        let told = match &cause {
            Cause::Rank { ended, host, .. } => {
                let on_host = host.as_ref().map_or(String::new(), |host| format!(" on {host}"));
                self.told_briefly(ended, &on_host)
            }
            other => other.to_string(),
        };
        self.note_failure(told);
        self.restarts.standing.restarts += 1;
        self.restarts.is_pending = true;
        self.restarts.not_before = Some(Instant::now() + pause(self.restarts.standing.restarts));
        rendezvous.restart = self.restarts.standing;
        if let Some(assignment) = self.assignment.take() {
            // The ranks keep their numbers.
            rendezvous.node = Some(assignment.node);
            rendezvous.run = Some(Run { folder: assignment.run, id: assignment.id });
        }
        // This ends the thread that waits in the old store, and the server of that store.
        self.nodes = None;
        self.restarts.has_met = false;
        // The other nodes may still end their ranks.
        self.restarts.patience = Some(Instant::now() + self.options.ending.longest() + STAY);
        self.ranks = None;
        (self.phase, self.deadline, self.next_look) = (Phase::Running, None, None);
        self.unended_is_told = false;
        self.failed_together = 0;
        self.store_is_unused = false;
        true
    }

    /// Whether the starter of the job tells all nodes of this cause.
    fn starter_tells(&self, cause: &Cause) -> bool {
        let is_known = matches!(cause, Cause::Signal { .. } | Cause::Ordered | Cause::Gone { .. } | Cause::Lost { .. });
        is_known && self.control.is_some()
    }

    /// Whether the job is between two attempts. Then other nodes cannot hear of this cause now: a
    /// job that has ended when they come looks like an old one to them.
    fn is_between_attempts(&self, cause: &Cause) -> bool {
        match &self.cause {
            Some(stands) => self.starts_again(stands),
            None => {
                let is_meeting = self.nodes.is_some() && !self.restarts.has_met;
                self.restarts.standing.restarts > 0 && is_meeting && !self.starter_tells(cause)
            }
        }
    }

    /// Notes that the job ends for this cause, if it is about to start again. Returns whether it
    /// is.
    pub fn end_between_attempts(&mut self, cause: &Cause) -> bool {
        let is_between = self.is_between_attempts(cause);
        if is_between {
            self.end_in_next_meeting(cause.clone());
        }
        is_between
    }

    /// Notes that the job ends for this cause when the nodes have met again. A cause that was noted
    /// before stays, except where the starter ends the job now without another meeting.
    pub fn end_in_next_meeting(&mut self, cause: Cause) {
        let stays = |noted: &Cause| self.starter_tells(noted) || !self.starter_tells(&cause);
        if !self.restarts.ended_by.as_ref().is_some_and(stays) {
            self.restarts.ended_by = Some(cause);
        }
    }

    /// Ends the job on all nodes for the cause that was noted between two attempts, as soon as the
    /// nodes have met, at the latest when `at_once` is set or the patience is over.
    pub fn end_if_asked_between_attempts(&mut self, at_once: bool) {
        let is_over = at_once || self.restarts.patience.is_some_and(|moment| Instant::now() >= moment);
        let can_tell = self.nodes.is_none() || self.restarts.has_met;
        if self.cause.is_none() && (is_over || can_tell) {
            if let Some(cause) = self.restarts.ended_by.clone() {
                self.agree_and_end(cause);
            }
        }
    }
}
