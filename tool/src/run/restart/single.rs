//! `--restart rank`: a rank that fails is started again alone, on its node, and joins the running
//! job (DM_JOIN=running). The other ranks go on, and the other nodes need not know.

use std::time::Instant;

use devicemesh::rendezvous::host_name;
use rustix::process::Signal;

use super::options::Unit;
use super::state::{after, pause};
use crate::run::cause::{Cause, Ended, How};
use crate::run::job::Job;
use crate::run::nodes::Nodes;
use crate::words::count;

impl Job<'_> {
    /// Handles the ranks that have ended: they are started again, or they end the job.
    pub fn ranks_ended(&mut self, ended: Vec<Ended>) {
        if self.cause.is_some() {
            return;
        }
        let is_for_ranks = self.restarts.standing.unit == Some(Unit::Rank);
        // A restarted process may exit with 0 only because a spare took its place. So its exit says
        // nothing about the end of the job. This also holds for the ranks of a node that replaced a
        // lost node.
        let rejoins = self.assignment.as_ref().map_or(0, |assignment| assignment.rejoins);
        let is_first = |ended: &Ended| rejoins == 0 && self.restarts_left(ended) == self.restarts.standing.most;
        if is_for_ranks && ended.iter().any(|ended| !ended.failed() && is_first(ended)) {
            self.note_success();
        }
        let mut failed: Vec<Ended> = ended.into_iter().filter(Ended::failed).collect();
        if failed.is_empty() {
            return;
        }
        let is_final = |ended: &Ended| !is_for_ranks || !self.may_start_again(ended) || self.restarts_left(ended) == 0;
        let last = failed.iter().position(is_final);
        if last.is_none() && !self.has_success() {
            return failed.into_iter().for_each(|ended| self.plan_restart(&ended));
        }
        self.restarts.why_not = is_for_ranks.then(|| match last {
            Some(at) if self.restarts_left(&failed[at]) > 0 => "no restart would change this".to_owned(),
            Some(_) => format!("it has had {}", count(self.restarts.standing.most, "restart")),
            None => "it does not start again, because another rank has ended with exit code 0".to_owned(),
        });
        let first = failed.remove(last.unwrap_or(0));
        self.rank_failed(first, failed.len());
    }

    /// Whether a restart can help this rank: not where the command line is wrong, and not where the
    /// reader of its output has gone.
    pub fn may_start_again(&self, ended: &Ended) -> bool {
        !self.is_told(ended.how) && ended.how != How::Signalled(Signal::PIPE.as_raw())
    }

    /// How often this rank may still be started again.
    fn restarts_left(&self, ended: &Ended) -> u32 {
        let local_rank = self.local_rank(ended) as usize;
        self.restarts.standing.most - self.restarts.of_rank.get(local_rank).copied().unwrap_or(0)
    }

    fn local_rank(&self, ended: &Ended) -> u32 {
        self.assignment.as_ref().map_or(0, |assignment| assignment.local_rank(ended.rank))
    }

    /// Notes, on all nodes, that a rank has ended well that was never started again. A rank that
    /// fails after that ends the job, because the job that it would join is about to end.
    fn note_success(&mut self) {
        if !std::mem::replace(&mut self.restarts.has_success, true) {
            self.nodes.as_ref().inspect(|nodes| nodes.tell_success());
        }
    }

    /// Whether a rank of the job has ended well.
    fn has_success(&self) -> bool {
        self.restarts.has_success || self.nodes.as_ref().is_some_and(Nodes::has_success)
    }

    /// Plans to start a rank again, and says so.
    fn plan_restart(&mut self, ended: &Ended) {
        let (local_rank, most) = (self.local_rank(ended), self.restarts.standing.most);
        let counts = &mut self.restarts.of_rank;
        counts.resize(counts.len().max(local_rank as usize + 1), 0);
        counts[local_rank as usize] += 1;
        let number = counts[local_rank as usize];
        let pause = pause(number);
        self.restarts.due.push((local_rank, Instant::now() + pause));
        let on_host = self.reporter.as_ref().map_or(String::new(), |_| format!(" on {}", host_name()));
        let reason = self.output.last_words(ended.rank).reason.map_or(String::new(), |reason| reason.to_string());
        let told = self.style.wrong(&format!("{}{reason}", ended.told(&on_host)));
        self.say(&format!("{told}; it starts again{} (restart {number} of {most})", after(pause)));
        let told = self.told_briefly(ended, &on_host);
        self.note_failure(told);
        if let Some(ranks) = &mut self.ranks {
            ranks.forget(ended.rank);
        }
    }

    /// Starts again each rank whose pause is over. While the ranks are stopped (Ctrl-Z), none is
    /// started.
    pub fn start_due_ranks(&mut self) {
        let now = Instant::now();
        while let Some(at) = self.restarts.due.iter().position(|(_, moment)| *moment <= now) {
            if self.stopped.is_some() || self.cause.is_some() {
                return;
            }
            let (local_rank, _) = self.restarts.due.swap_remove(at);
            let (Some(ranks), Some(assignment)) = (&mut self.ranks, &self.assignment) else { return };
            let again = self.restarts.of_rank.get(local_rank as usize).copied().unwrap_or(0);
            let command = &self.options.command;
            let started = ranks.start_again(local_rank, again, assignment, command, &self.binding, &mut self.output);
            if let Err(failure) = started {
                let (code, message, node) = (failure.code, failure.message, self.reporter.clone());
                self.end_everywhere(Cause::Start { code, message, node });
            }
        }
    }
}
