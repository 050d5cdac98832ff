//! How often ranks were started again, which the names of their logs have.

use std::collections::BTreeMap;

/// The numbers of restarts.
#[derive(Default)]
pub struct Restarts {
    /// How often the whole job was started again.
    of_job: u32,
    /// How often single ranks were started again alone, by rank.
    of_rank: BTreeMap<u32, u32>,
}

impl Restarts {
    /// The numbers for a job that was started again that many times.
    pub fn of_job(of_job: u32) -> Restarts {
        Restarts { of_job, of_rank: BTreeMap::new() }
    }

    /// How often a rank was started again, alone or with all others.
    pub fn of(&self, rank: u32) -> u32 {
        self.of_job + self.of_rank.get(&rank).copied().unwrap_or(0)
    }

    /// Notes that a rank is started again alone. `again` is the number of this restart.
    pub fn note(&mut self, rank: u32, again: u32) {
        self.of_rank.insert(rank, again);
    }
}
