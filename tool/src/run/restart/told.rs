//! What the tool says of restarts, and when it looks at them again.

use std::time::{Duration, Instant};

use devicemesh::rendezvous::host_name;

use super::options::Unit;
use crate::run::cause::{Cause, Ended};
use crate::run::job::Job;
use crate::words::count;

/// The pause before this node looks again whether it can tell the others of the end.
const LOOK: Duration = Duration::from_millis(50);

impl Job<'_> {
    /// When a rank is to be started again, or when this node looks again whether it can tell the
    /// others why the job ends.
    pub fn restart_moment(&self) -> Option<Instant> {
        if self.restarts.ended_by.is_some() && self.cause.is_none() {
            return Some(Instant::now() + LOOK);
        }
        let due = self.restarts.due.iter().filter(|_| self.stopped.is_none());
        due.map(|(_, moment)| *moment).chain(self.restarts.not_before.filter(|moment| *moment > Instant::now())).min()
    }

    /// Returns what the last line says of the restarts, or nothing where there were none.
    pub fn told_restarts(&self) -> String {
        let restarts = count(self.restarts.number(), "restart");
        let first = match (&self.restarts.first, self.restarts.number()) {
            (_, 0) => return String::new(),
            (Some(first), 1) => format!(", because {first}"),
            (Some(first), _) => format!(", the first because {first}"),
            // The tool of this node was started anew in between.
            (None, _) => String::new(),
        };
        match self.restarts.standing.unit {
            Some(Unit::Rank) => {
                let on_host = self.reporter.as_ref().map_or(String::new(), |_| format!(" on {}", host_name()));
                format!("; ranks{on_host} had {restarts}{first}")
            }
            _ => format!("; the job had {restarts}{first}"),
        }
    }

    /// Says at the end of a job that all ranks have ended well, where there were restarts.
    pub fn tell_success(&self, restarts: &str) {
        // Where one terminal shows all nodes, each node knows the restarts of its own ranks, and
        // all know those of the job.
        let is_known = self.tells(&Cause::Done) || self.restarts.standing.unit == Some(Unit::Rank);
        if let Some(restarts) = restarts.strip_prefix("; ").filter(|_| is_known) {
            self.say(&format!("{}, and {restarts}", Cause::Done));
        }
    }

    /// Notes the failure that leads to a restart, if it is the first one.
    pub(super) fn note_failure(&mut self, told: String) {
        self.restarts.first.get_or_insert(told);
    }

    /// The words for a rank that has failed, in the last line.
    pub(super) fn told_briefly(&self, ended: &Ended, on_host: &str) -> String {
        format!("rank {}{on_host} {}{}", ended.rank, ended.how, ended.core())
    }
}
