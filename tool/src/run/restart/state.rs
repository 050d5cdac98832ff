//! What was started again on this node, what is to be, and when.

use std::time::{Duration, Instant};

use super::options::Standing;
use crate::run::cause::Cause;

/// The longest pause before a restart.
const LONGEST: Duration = Duration::from_secs(30);

/// The state of the restarts on this node.
#[derive(Default)]
pub struct Restarts {
    /// The options, and how often the whole job was started again.
    pub standing: Standing,
    /// How often each rank of this node was started again alone, by local rank.
    pub(super) of_rank: Vec<u32>,
    /// The ranks of this node that are to be started again alone, by local rank, and when.
    pub(super) due: Vec<(u32, Instant)>,
    /// Whether a rank of this node has ended well.
    pub(super) has_success: bool,
    /// The failure that led to the first restart, for the tool's last line.
    pub(super) first: Option<String>,
    /// Whether the last restart of the whole job has not happened yet.
    pub(super) is_pending: bool,
    /// When the ranks of the whole job may start again. `None` before the first restart.
    pub(super) not_before: Option<Instant>,
    /// Why a rank that has failed is not started again, for the message about it.
    pub(super) why_not: Option<String>,
    /// Why the job ends, where it would start again otherwise: because of the user, the starter,
    /// `--timeout`, lost output or a program that cannot be started. The nodes meet once more, so
    /// that all of them hear of it. Where this node tells the user of such a cause, it has done so.
    pub ended_by: Option<Cause>,
    /// Whether the nodes have met for this attempt.
    pub has_met: bool,
    /// When this node no longer waits to tell the others of `ended_by`.
    pub(super) patience: Option<Instant>,
}

impl Restarts {
    pub fn new(standing: Standing) -> Restarts {
        Restarts { standing, ..Restarts::default() }
    }

    /// Whether a rank is to be started again.
    pub fn has_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// Whether the job ends between two attempts, as soon as the other nodes can hear of it.
    pub fn is_ended(&self) -> bool {
        self.ended_by.is_some()
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
    pub(super) fn number(&self) -> u32 {
        self.standing.restarts - u32::from(self.is_pending) + self.of_rank.iter().sum::<u32>()
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
pub fn after(pause: Duration) -> String {
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
