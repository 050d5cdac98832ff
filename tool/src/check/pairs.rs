//! Measures how fast ranks exchange data in pairs ([`meetings`](super::meetings) says which).

use std::time::{Duration, Instant};

use devicemesh::comm;
use devicemesh::error::Result;
use serde::{Deserialize, Serialize};

use super::measure::{Schedule, Timed};
use super::operation::{Call, Collective};
use super::team::{Exchange, decode, encode};
use super::verify::Bench;

/// About how long a batch takes at most, in seconds. A batch of one call may take longer.
const BATCH: f64 = 0.02;
/// About how long all batches take at most. Where they would take longer, there are fewer batches,
/// but at least [`LEAST`].
const ALL: Duration = Duration::from_secs(20);
/// The smallest number of batches, unless `--repeats` is smaller. One batch alone is often
/// disturbed.
const LEAST: u32 = 2;

/// The exchanges of each pair and size from which the calls of a batch are estimated.
const TRIES: usize = 4;

/// The times of a pair. The rank with the lower number keeps them.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Met {
    /// The world rank that this rank met.
    pub peer: usize,
    /// The times of one exchange, by size. Both ranks send that many bytes at the same time.
    pub timed: Vec<Timed>,
}

/// The pairs of this rank while they are measured.
#[derive(Default)]
pub struct Meetings {
    /// The number of elements of an exchange, by size.
    counts: Vec<usize>,
    /// The meeting of each round. It is `None` where this rank meets nobody.
    meetings: Vec<Option<Meeting>>,
    /// The seconds that one batch of all pairs takes on the slowest rank.
    pub cost: f64,
}

/// One pair of this rank, with what both ranks have agreed.
struct Meeting {
    peer: usize,
    timed: Vec<Timed>,
}

/// Measures the pairs of this rank, at the smallest and the largest size. `bench` is a dimension
/// that has all ranks. `peers` has the rank that this rank meets in each round. `limit` is the
/// time for the whole check. The caller is inside a step.
pub fn measure(
    bench: &Bench<'_>,
    peers: &[Option<usize>],
    schedule: &Schedule,
    limit: Duration,
    exchange: &Exchange<'_>,
) -> Result<Meetings> {
    let element = bench.kind.bytes();
    let mut counts: Vec<usize> = [schedule.sizes.first(), schedule.sizes.last()]
        .into_iter()
        .flatten()
        .map(|size| (size / element).max(1))
        .collect();
    counts.dedup();
    let mut meetings: Vec<Option<Meeting>> = Vec::with_capacity(peers.len());
    let mut cost = 0.0;
    for peer in peers {
        begin_round(bench, exchange)?;
        meetings.push(match peer {
            Some(peer) => {
                let (meeting, seconds) = first_meeting(bench, *peer, &counts, schedule.iterations)?;
                cost += seconds;
                Some(meeting)
            }
            None => None,
        });
    }
    // The slowest rank says how many batches there is time for.
    let cost = exchange.largest(&[cost])?[0];
    let most = ALL.min(limit / 10).as_secs_f64() / cost.max(1e-9);
    let batches = (most as u32).clamp(LEAST.min(schedule.repeats), schedule.repeats);
    let mut meetings = Meetings { counts, meetings, cost };
    for _ in 0..batches {
        meetings.batch(bench, exchange)?;
    }
    Ok(meetings)
}

impl Meetings {
    /// Adds a batch to the times of each pair and size. This is called inside a step.
    pub fn batch(&mut self, bench: &Bench<'_>, exchange: &Exchange<'_>) -> Result<()> {
        for meeting in &mut self.meetings {
            begin_round(bench, exchange)?;
            let Some(Meeting { peer, timed }) = meeting else { continue };
            for (count, timed) in self.counts.iter().zip(timed) {
                // A small exchange has both ranks begin at about the same time.
                swap(bench, *peer, 1, 1)?;
                timed.seconds.push(swap(bench, *peer, *count, timed.iterations)?);
            }
        }
        Ok(())
    }

    /// The times that this rank keeps.
    pub fn met(&self, bench: &Bench<'_>) -> Vec<Met> {
        let kept = self.meetings.iter().flatten().filter(|meeting| bench.position < meeting.peer);
        kept.map(|Meeting { peer, timed }| Met { peer: bench.group[*peer] as usize, timed: timed.clone() }).collect()
    }
}

/// Makes all ranks begin a round at about the same time.
fn begin_round(bench: &Bench<'_>, exchange: &Exchange<'_>) -> Result<()> {
    exchange.alive()?;
    bench.run(&Call::plain(Collective::AllReduce, 1), bench.send, (0, 0))
}

/// Connects the pair, and agrees with the other rank how many calls a batch has at each size. Also
/// returns the seconds that one batch of each size takes.
fn first_meeting(bench: &Bench<'_>, peer: usize, counts: &[usize], most: u32) -> Result<(Meeting, f64)> {
    let mut mine = Vec::new();
    for count in counts {
        // The first exchange connects. The quickest one counts, because a rank with frequent short
        // pauses must not get batches so short that they contain no pause.
        let mut quickest = f64::INFINITY;
        for _ in 0..TRIES {
            quickest = swap(bench, peer, *count, 1)?.min(quickest);
        }
        mine.push(quickest);
    }
    let encoded = encode(&mine);
    bench.send.write(0, &encoded)?;
    swap(bench, peer, encoded.len().div_ceil(bench.kind.bytes()), 1)?;
    let mut theirs = vec![0; encoded.len()];
    bench.recv.read(0, &mut theirs)?;
    let mut cost = 0.0;
    let timed = mine.iter().zip(decode(&theirs)).zip(counts).map(|((mine, theirs), count)| {
        let seconds = mine.max(theirs).max(1e-9);
        let iterations = ((BATCH / seconds) as u32).clamp(1, most);
        cost += seconds * f64::from(iterations);
        Timed { bytes: count * bench.kind.bytes(), iterations, seconds: Vec::new() }
    });
    let timed = timed.collect();
    Ok((Meeting { peer, timed }, cost))
}

/// The seconds of one exchange of `count` elements with the rank at position `peer`, when there are
/// `iterations` of them.
fn swap(bench: &Bench<'_>, peer: usize, count: usize, iterations: u32) -> Result<f64> {
    let began = Instant::now();
    for _ in 0..iterations {
        let (call, dtype) = (comm::Collective::Swap { peer }, bench.kind.dtype as i32);
        bench.view.collective(bench.index, call, dtype, count, bench.send.at(0), bench.recv.at(0))?;
    }
    bench.wait()?;
    Ok(began.elapsed().as_secs_f64() / f64::from(iterations))
}
