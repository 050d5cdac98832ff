//! Starts again what has failed: all ranks of the job (`--restart job`, see [`job`]), or one rank
//! alone (`--restart rank`, see [`rank`]).
//!
//! | `--restart` | who decides | what runs meanwhile |
//! |---|---|---|
//! | `job` | all nodes, by the cause in the store, which is the same for all | nothing: every node ends its ranks, and the nodes meet anew |
//! | `rank` | the node of the rank, alone | all other ranks. No cause is written |
//!
//! A rank or a job that fails at once is started again after a pause ([`pause`]), which grows.

mod job;
mod options;
mod rank;

use std::time::{Duration, Instant};

use devicemesh::rendezvous::host_name;

pub use self::options::{RestartOptions, Standing, Unit};
use super::cause::{Cause, Ended};
use super::job::Job;
use crate::words::count;

/// The pause before this node looks again whether it can tell the others of the end.
const LOOK: Duration = Duration::from_millis(50);
/// The longest pause before a restart.
const LONGEST: Duration = Duration::from_secs(30);

/// The state of the restarts on this node.
#[derive(Default)]
pub struct Restarts {
    /// The options, and how often the whole job was started again.
    pub standing: Standing,
    /// How often each rank of this node was started again alone, by local rank.
    of_rank: Vec<u32>,
    /// The ranks of this node that are to be started again alone, by local rank, and when.
    due: Vec<(u32, Instant)>,
    /// Whether a rank of this node has ended well.
    has_success: bool,
    /// The failure that led to the first restart, for the tool's last line.
    first: Option<String>,
    /// Whether the last restart of the whole job has not happened yet.
    is_pending: bool,
    /// When the ranks of the whole job may start again. `None` before the first restart.
    not_before: Option<Instant>,
    /// Why a rank that has failed is not started again, for the message about it.
    why_not: Option<String>,
    /// Why the user, or the starter, ends a job that is about to be started again. The nodes still
    /// meet once more, so that the others hear of it.
    ended_by: Option<Cause>,
    /// When this node no longer waits to tell the others of `ended_by`.
    patience: Option<Instant>,
}

impl Restarts {
    pub fn new(standing: Standing) -> Restarts {
        Restarts { standing, ..Restarts::default() }
    }

    /// Whether a rank is to be started again.
    pub fn has_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// Forgets the ranks that are to be started again, because the job ends.
    pub fn forget_due(&mut self) {
        for (local_rank, _) in self.due.drain(..) {
            self.of_rank[local_rank as usize] -= 1;
        }
    }

    /// Notes that all ranks have started.
    pub fn has_started(&mut self) {
        self.is_pending = false;
    }

    /// The number of restarts that have happened, of the job or of single ranks of this node.
    fn number(&self) -> u32 {
        self.standing.restarts - u32::from(self.is_pending) + self.of_rank.iter().sum::<u32>()
    }
}

impl Job<'_> {
    /// When a rank is to be started again, or when this node looks again whether it can tell the
    /// others that the user has ended the job.
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
    fn note_failure(&mut self, told: String) {
        self.restarts.first.get_or_insert(told);
    }

    /// The words for a rank that has failed, in the last line.
    fn told_briefly(&self, ended: &Ended, on_host: &str) -> String {
        format!("rank {}{on_host} {}{}", ended.rank, ended.how, ended.core())
    }
}

/// The pause before the restart of that number, the first of which is 1: 0, 1, 2, 4 ... seconds.
pub fn pause(restart: u32) -> Duration {
    match restart {
        0 | 1 => Duration::ZERO,
        restart => LONGEST.min(Duration::from_secs(1 << (restart - 2).min(16))),
    }
}

/// The end of a message about a restart: nothing, or " after 2 s".
fn after(pause: Duration) -> String {
    if pause.is_zero() { String::new() } else { format!(" after {} s", pause.as_secs()) }
}

#[cfg(test)]
mod tests {
    use super::pause;

    #[test]
    fn the_pause_grows_up_to_half_a_minute() {
        let seconds: Vec<u64> = (1..=8).map(|restart| pause(restart).as_secs()).collect();
        assert_eq!(seconds, [0, 1, 2, 4, 8, 16, 30, 30]);
        assert_eq!(pause(u32::MAX).as_secs(), 30);
    }
}
