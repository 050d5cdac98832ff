//! Measures how long the collectives along a dimension take, while all its groups run them at the
//! same time.

use std::time::Instant;

use devicemesh::comm::Memory;
use devicemesh::error::Result;
use serde::{Deserialize, Serialize};

use super::operation::{Call, Collective};
use super::team::{Exchange, Team};
use super::verify::Bench;

/// About how long a batch takes at most, in seconds. A batch of one call may take longer.
const BATCH: f64 = 0.05;
/// The sizes that are measured, and how often.
#[derive(Debug, Clone)]
pub struct Schedule {
    /// The sizes in bytes, in growing order.
    pub sizes: Vec<usize>,
    /// The most calls of a batch.
    pub iterations: u32,
    /// The calls before the first batch.
    pub warmup: u32,
    /// The number of batches.
    pub repeats: u32,
}

/// The times of one collective at one size on this rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Timed {
    /// The size of the larger buffer in bytes, after it was rounded to whole elements for each
    /// rank.
    pub bytes: usize,
    /// The calls of a batch.
    pub iterations: u32,
    /// The seconds per call of each batch.
    pub seconds: Vec<f64>,
}

/// Measures one collective at all sizes. This is called inside a step. Every rank makes equally
/// many calls, as many as the slowest rank has time for.
pub fn measure(
    bench: &Bench<'_>,
    collective: Collective,
    schedule: &Schedule,
    exchange: &Exchange<'_>,
) -> Result<Vec<Timed>> {
    let element = bench.kind.bytes();
    let calls: Vec<Call> = schedule.sizes.iter().map(|bytes| call(bench, collective, *bytes)).collect();
    let mut estimates = Vec::new();
    for call in &calls {
        let mut seconds = 0.0;
        for _ in 0..schedule.warmup {
            seconds = batch(bench, call, 1)?;
        }
        estimates.push(seconds);
    }
    let iterations: Vec<u32> = exchange
        .largest(&estimates)?
        .iter()
        .map(|seconds| ((BATCH / seconds.max(1e-9)) as u32).clamp(1, schedule.iterations))
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
    // The batches of one size lie apart in time, so that one disturbance does not spoil all of
    // them.
    for _ in 0..schedule.repeats {
        for (call, timed) in calls.iter().zip(&mut timed) {
            exchange.alive()?;
            timed.seconds.push(batch(bench, call, timed.iterations)?);
        }
    }
    Ok(timed)
}

/// The call that is measured where the larger buffer is to have that many bytes.
pub fn call(bench: &Bench<'_>, collective: Collective, bytes: usize) -> Call {
    Call::plain(collective, collective.count(bytes, bench.kind.bytes(), bench.size()))
}

/// The seconds per call of one batch. A small all_reduce before it has the ranks of the group begin
/// at about the same time.
pub fn batch(bench: &Bench<'_>, call: &Call, iterations: u32) -> Result<f64> {
    bench.run(&Call::plain(Collective::AllReduce, 1), bench.send, (0, 0))?;
    let began = Instant::now();
    for _ in 0..iterations {
        bench.issue(call, bench.send, (0, 0))?;
    }
    bench.wait()?;
    Ok(began.elapsed().as_secs_f64() / f64::from(iterations))
}

/// The bandwidth in GB/s.
pub fn gbps(bytes: usize, seconds: f64) -> f64 {
    if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 }
}

/// The number of ranks of this host for each of its cores. Above 1 the measured times also contain
/// waits for a core. It is 0 on devices, which ranks do not share.
pub fn ranks_per_core(team: &Team, memory: &Memory) -> f64 {
    let here = team.hosts.iter().filter(|host| *host == team.host()).count();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if memory.is_on_device() { 0.0 } else { here as f64 / cores as f64 }
}
