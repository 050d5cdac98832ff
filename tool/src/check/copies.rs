//! Measures how fast each rank copies in its own memory, and finds the ranks that are slow. A copy
//! uses no network and no memory of another rank.

use std::time::{Duration, Instant};

use devicemesh::comm::{Buffer, Memory};
use devicemesh::error::Result;

use super::slow::{Rule, Slow};
use super::team::{Exchange, decode, encode};

/// The bytes of one copy, and the number of copies in a batch. A batch takes several milliseconds,
/// so that on a rank with frequent short pauses each batch contains a pause.
const OF_HOST: (usize, usize) = (4 << 20, 150);
/// The bytes of one copy and the number of copies in a batch, on a GPU. A copy is larger than the
/// GPU's caches.
const OF_DEVICE: (usize, usize) = (64 << 20, 40);

/// The time of a batch in seconds, where a rank copies so slowly that a whole batch would take
/// longer, and the copies that a batch has nevertheless.
const BATCH: f64 = 0.25;
const LEAST: usize = 30;

/// The number of times that rank 0 looks whether ranks are slow, and has all ranks copy again.
const LOOKS: usize = 2;
/// The most batches after each look.
const ROUNDS: f64 = 4.0;
/// The pause before each of these batches, in seconds. So one busy moment of a host does not fall
/// on all batches.
const PAUSE: f64 = 0.4;
/// About how long the batches after a look take, in seconds.
const LOOK: f64 = 2.0;

/// Gives the seconds that this rank takes for a copy, by batch, while all ranks copy. Where a rank
/// looks slow, all ranks make further batches at other times. This is called inside a step.
pub fn measure(
    memory: &Memory,
    buffers: (&Buffer, &Buffer),
    repeats: u32,
    factor: f64,
    ranks_per_core: f64,
    exchange: &Exchange<'_>,
) -> Result<Vec<f64>> {
    let (send, recv) = buffers;
    let (bytes, most) = batch(memory.is_on_device());
    let timed = |copies: usize| {
        exchange.alive()?;
        let began = Instant::now();
        recv.copy_from(send, bytes, copies)?;
        Ok(began.elapsed().as_secs_f64() / copies as f64)
    };
    let copies = copies_of(timed(most / 10)?, most);
    let one = || timed(copies);
    let mut seconds = (0..repeats).map(|_| one()).collect::<Result<Vec<f64>>>()?;
    for look in 0..LOOKS {
        let mine = [&[ranks_per_core], &seconds[..]].concat();
        let all = exchange.gather(&format!("copies-{look}"), encode(&mine))?;
        let left = exchange.left().as_secs_f64();
        let plan = all.map(|all| {
            let all: Vec<Vec<f64>> = all.iter().map(|numbers| decode(numbers)).collect();
            encode(&[rounds(&all, factor, most, left)])
        });
        let rounds = decode(&exchange.share(&format!("rounds-{look}"), plan)?).first().copied().unwrap_or(0.0);
        if rounds < 1.0 {
            break;
        }
        for _ in 0..rounds as u32 {
            std::thread::sleep(Duration::try_from_secs_f64(PAUSE).unwrap_or_default());
            seconds.push(one()?);
        }
    }
    Ok(seconds)
}

/// The number of further batches: none where no rank looks slow, or where `left` seconds are too
/// short. `all` has for each rank its number of ranks per core and then its seconds per copy, and
/// `most` is the number of copies in a whole batch.
fn rounds(all: &[Vec<f64>], factor: f64, most: usize, left: f64) -> f64 {
    let ranks_per_core = all.iter().filter_map(|numbers| numbers.first().copied()).fold(0.0, f64::max);
    let batches: Vec<&[f64]> = all.iter().map(|numbers| numbers.get(1..).unwrap_or_default()).collect();
    if slow(&batches, factor, ranks_per_core).is_empty() {
        return 0.0;
    }
    let slowest = batches.iter().copied().flatten().copied().fold(0.0, f64::max);
    let longest = slowest * copies_of(slowest, most) as f64 + PAUSE;
    let fitting = (LOOK / longest).clamp(1.0, ROUNDS).floor();
    if fitting * longest > left / 4.0 { 0.0 } else { fitting }
}

/// The number of copies in a batch of a rank that takes this many seconds for a copy. `most` is the
/// number in a whole batch.
fn copies_of(seconds: f64, most: usize) -> usize {
    ((BATCH / seconds) as usize).clamp(LEAST.min(most), most)
}

/// The ranks that copy slowly, from the seconds per copy of each rank, by batch.
pub fn slow(copies: &[&[f64]], factor: f64, ranks_per_core: f64) -> Vec<Slow> {
    // The copies of a batch take long enough for several turns of the scheduler, so a turn is
    // spread over them.
    Rule::new(factor, ranks_per_core, 30).slow(copies)
}

/// The bytes of one copy, and the copies of a batch.
pub fn batch(on_device: bool) -> (usize, usize) {
    if on_device { OF_DEVICE } else { OF_HOST }
}

#[cfg(test)]
mod tests {
    use super::{copies_of, rounds};

    #[test]
    fn all_ranks_copy_again_where_one_looks_slow() {
        let well = || vec![0.5, 1e-3, 1e-3];
        let of = |third: f64, left| rounds(&[well(), vec![0.5, 45e-3, third], well()], 1.5, 150, left);
        assert_eq!(of(1e-3, 100.0), 0.0, "one quick batch clears it");
        assert_eq!(of(45e-3, 100.0), 1.0, "a batch of 30 copies takes 1.35 s");
        assert_eq!(of(45e-3, 2.0), 0.0, "there is no time for it");
        assert_eq!(rounds(&[well(), vec![0.5, 2e-3, 2e-3]], 1.5, 150, 100.0), 3.0);
    }

    #[test]
    fn a_batch_has_fewer_copies_where_they_are_slow() {
        assert_eq!(copies_of(1e-3, 150), 150);
        assert_eq!(copies_of(2.5e-3, 150), 100);
        assert_eq!(copies_of(28e-3, 150), 30);
        assert_eq!(copies_of(28e-3, 20), 20);
    }
}
