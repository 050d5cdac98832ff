//! Spreads batches over seconds, for records and for rows that look slower than in a record.
//!
//! All batches of short calls lie within some milliseconds, so one busy moment of the machine can
//! spoil every one of them, and one lucky moment can flatter every one of them. The rows of a
//! record therefore get further batches, which are spread over seconds, and so do rows that look
//! slower than in a record. The rule of [`compare`](super::compare) then holds for all batches.

use std::time::Duration;

use devicemesh::error::{Error, Result, Status};
use serde::{Deserialize, Serialize};

use super::compare::{pairs_name, row_name};
use super::measure::{self, Schedule, Timed};
use super::operation::Collective;
use super::pairs::Meetings;
use super::report::Report;
use super::team::Exchange;
use super::verify::Bench;

/// The number of times that rank 0 looks whether rows are still slower, and has them measured
/// again.
pub const LOOKS: usize = 4;
/// The rounds after each look.
const ROUNDS: f64 = 5.0;
/// The rounds for a record.
const ROUNDS_OF_RECORD: f64 = 10.0;
/// The most batches of a row in a round for a record. So a record stays small.
const BATCHES_OF_RECORD: u32 = 3;
/// The pause before each round, in seconds.
const PAUSE: f64 = 0.4;
/// About how long the batches of a round take, in seconds, where one batch of each row does not
/// take longer.
const ROUND: f64 = 0.2;

/// The rows that are measured again, and how often. Rank 0 makes the plan, and all ranks follow
/// it.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Plan {
    /// The rows of the table: dimension, collective and size by their indices.
    rows: Vec<[usize; 3]>,
    /// The number of rows of the pairs. All pairs are measured where there is one such row.
    pairs: usize,
    rounds: u32,
    /// The batches of each row in a round.
    batches: u32,
    /// The pause before each round, in seconds.
    pause: f64,
}

impl Plan {
    /// The plan for the rows that the comparison of this report calls slower.
    pub fn of_slower(report: &Report, schedule: &Schedule, of_pairs: f64, left: Duration) -> Plan {
        let slower = report.comparison.iter().flat_map(|comparison| &comparison.slower);
        let slower: Vec<&str> = slower.map(|change| change.row.as_str()).collect();
        let is_slower = |name: &str| slower.contains(&name);
        Plan::of(report, schedule, of_pairs, left, &is_slower, (ROUNDS, schedule.repeats))
    }

    /// The plan for all rows of a record.
    pub fn of_record(report: &Report, schedule: &Schedule, of_pairs: f64, left: Duration) -> Plan {
        Plan::of(report, schedule, of_pairs, left, &|_| true, (ROUNDS_OF_RECORD, BATCHES_OF_RECORD))
    }

    /// The plan for the rows of this report that `takes` names. `of_pairs` is the seconds that a
    /// batch of all pairs takes, and `left` the time that is left for the check.
    fn of(
        report: &Report,
        schedule: &Schedule,
        of_pairs: f64,
        left: Duration,
        takes: &dyn Fn(&str) -> bool,
        (rounds, batches): (f64, u32),
    ) -> Plan {
        let sizes = schedule.sizes.len().max(1);
        let mut plan = Plan::default();
        let mut cost = 0.0;
        for (index, dimension) in report.dimensions.iter().enumerate() {
            for (at, row) in dimension.measurements.iter().enumerate() {
                let name = row_name(&dimension.name, dimension.size, dimension.groups, row.collective, row.bytes);
                if takes(&name) {
                    plan.rows.push([index, at / sizes, at % sizes]);
                    cost += row.slowest_seconds * f64::from(row.iterations);
                }
            }
        }
        plan.pairs = report.pairs.iter().filter(|pairs| takes(&pairs_name(pairs.kind, pairs.bytes))).count();
        if plan.pairs > 0 {
            cost += of_pairs;
        }
        let left = left.as_secs_f64();
        plan.pause = PAUSE.min(left / 100.0);
        plan.batches = ((ROUND / cost.max(1e-9)) as u32).clamp(1, batches);
        let round = cost * f64::from(plan.batches) + plan.pause;
        plan.rounds = (left / 4.0 / round.max(1e-9)).min(rounds) as u32;
        plan
    }

    /// The number of rows that are measured again.
    pub fn rows(&self) -> usize {
        if self.rounds == 0 { 0 } else { self.rows.len() + self.pairs }
    }

    /// The plan as it passes through the store.
    pub fn encode(&self) -> Vec<u8> {
        // The plan consists of types that can always become JSON.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Reads what [`encode`](Plan::encode) has written.
    pub fn decode(text: &[u8]) -> Result<Plan> {
        serde_json::from_slice(text).map_err(|error| Error::new(Status::Store, format!("rank 0's plan: {error}")))
    }
}

/// The dimensions, collectives and sizes that the rows of a plan name, on one rank.
pub struct Again<'a> {
    pub benches: &'a [Bench<'a>],
    pub collectives: &'a [Collective],
    pub schedule: &'a Schedule,
    /// The dimension that has all ranks.
    pub all_ranks: &'a Bench<'a>,
}

impl Again<'_> {
    /// Adds the batches of the plan to the times and to the meetings. This is called inside a
    /// step.
    pub fn measure(
        &self,
        plan: &Plan,
        times: &mut [Vec<Vec<Timed>>],
        meetings: &mut Meetings,
        exchange: &Exchange<'_>,
    ) -> Result<()> {
        for _ in 0..plan.rounds {
            std::thread::sleep(Duration::try_from_secs_f64(plan.pause).unwrap_or_default());
            for batch in 0..plan.batches {
                for [dimension, collective, size] in &plan.rows {
                    let timed = times.get_mut(*dimension).and_then(|times| times.get_mut(*collective)?.get_mut(*size));
                    let (Some(timed), Some(bench)) = (timed, self.benches.get(*dimension)) else { continue };
                    let call = measure::call(bench, self.collectives[*collective], self.schedule.sizes[*size]);
                    if batch == 0 {
                        // After the pause the first calls take longer, as at the beginning.
                        for _ in 0..self.schedule.warmup {
                            measure::batch(bench, &call, 1)?;
                        }
                    }
                    exchange.alive()?;
                    timed.seconds.push(measure::batch(bench, &call, timed.iterations)?);
                }
                if plan.pairs > 0 {
                    meetings.batch(self.all_ranks, exchange)?;
                }
            }
        }
        Ok(())
    }
}
