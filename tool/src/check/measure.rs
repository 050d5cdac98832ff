//! How long the collectives along a dimension take, while all its groups run them at the same time; and how fast each rank copies by itself.

use std::time::Instant;

use devicemesh::comm::{Buffer, Memory};
use devicemesh::error::Result;
use serde::{Deserialize, Serialize};

use super::operation::{Call, Collective};
use super::team::{Exchange, Team};
use super::verify::Bench;

/// A batch takes about as long at most, in seconds, where one call does not take longer.
const BATCH: f64 = 0.05;
/// The memory test: bytes of one copy, and copies of a batch. On a host some milliseconds at the least, so that a rank that stands still now and then has
/// no batch without it; on a GPU more than its caches hold.
const COPIES_OF_HOST: (usize, usize) = (4 << 20, 150);
const COPIES_OF_DEVICE: (usize, usize) = (64 << 20, 40);

/// What is measured, and how often.
#[derive(Debug, Clone)]
pub struct Plan {
    pub sizes: Vec<usize>,
    pub iterations: u32,
    pub warmup: u32,
    pub repeats: u32,
}

/// One collective at one size, on this rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Timed {
    /// Bytes of the larger buffer, as they really were.
    pub bytes: usize,
    pub iterations: u32,
    /// Seconds per call, of each batch.
    pub seconds: Vec<f64>,
}

/// Measures one collective at all sizes. Inside a step: every rank makes as many calls, so many as the slowest has time for.
pub fn measure(bench: &Bench<'_>, collective: Collective, plan: &Plan, exchange: &Exchange<'_>) -> Result<Vec<Timed>> {
    let element = bench.kind.bytes();
    let calls: Vec<Call> = plan
        .sizes
        .iter()
        .map(|bytes| Call::plain(collective, collective.count(*bytes, element, bench.size())))
        .collect();
    let mut estimates = Vec::new();
    for call in &calls {
        let mut seconds = 0.0;
        for _ in 0..plan.warmup {
            seconds = batch(bench, call, 1)?;
        }
        estimates.push(seconds);
    }
    let iterations: Vec<u32> = exchange
        .largest(&estimates)?
        .iter()
        .map(|seconds| ((BATCH / seconds.max(1e-9)) as u32).clamp(1, plan.iterations))
        .collect();
    let (send, recv) = collective.blocks(bench.size());
    let mut timed: Vec<Timed> = calls
        .iter()
        .zip(&iterations)
        .map(|(call, iterations)| Timed {
            bytes: call.count * send.max(recv) * element,
            iterations: *iterations,
            seconds: Vec::new(),
        })
        .collect();
    // The batches of one size lie apart in time, so that one disturbance does not spoil all.
    for _ in 0..plan.repeats {
        for (call, timed) in calls.iter().zip(&mut timed) {
            exchange.alive()?;
            timed.seconds.push(batch(bench, call, timed.iterations)?);
        }
    }
    Ok(timed)
}

/// Seconds per call. The group begins together, as far as one call of its own can bring that about.
fn batch(bench: &Bench<'_>, call: &Call, iterations: u32) -> Result<f64> {
    bench.run(&Call::plain(Collective::AllReduce, 1), bench.send, (0, 0))?;
    let began = Instant::now();
    for _ in 0..iterations {
        bench.issue(call, bench.send, (0, 0))?;
    }
    bench.wait()?;
    Ok(began.elapsed().as_secs_f64() / f64::from(iterations))
}

/// Seconds that this rank takes to copy in its own memory, while all ranks do: no other rank or network has a part in it. Inside a step.
pub fn copy(
    memory: &Memory,
    (send, recv): (&Buffer, &Buffer),
    repeats: u32,
    exchange: &Exchange<'_>,
) -> Result<Vec<f64>> {
    let (bytes, copies) = copies(memory.is_on_device());
    recv.copy_from(send, bytes, copies / 10)?;
    (0..repeats)
        .map(|_| {
            exchange.alive()?;
            let began = Instant::now();
            recv.copy_from(send, bytes, copies)?;
            Ok(began.elapsed().as_secs_f64() / copies as f64)
        })
        .collect()
}

/// Bytes of one copy, and how many make a batch.
pub fn copies(on_device: bool) -> (usize, usize) {
    if on_device { COPIES_OF_DEVICE } else { COPIES_OF_HOST }
}

/// How many ranks of this host share one of its cores: above 1 their times are those of the scheduler. Devices do not share.
pub fn crowding(team: &Team, memory: &Memory) -> f64 {
    let here = team.hosts.iter().filter(|host| *host == team.host()).count();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if memory.is_on_device() { 0.0 } else { here as f64 / cores as f64 }
}
