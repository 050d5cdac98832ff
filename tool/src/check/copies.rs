//! Measures how fast each rank copies in its own memory, and finds the ranks that are slow. A copy
//! uses no network and no memory of another rank.

use std::time::{Duration, Instant};

use devicemesh::comm::{Buffer, Memory};
use devicemesh::error::Result;

use super::slow::{Rule, Slow};
use super::team::{Exchange, decode, encode};

/// The bytes of one copy, and the number of copies in a batch. A batch takes some tens of
/// milliseconds, so that on a rank with frequent short pauses each batch contains a pause.
const OF_HOST: (usize, usize) = (4 << 20, 150);
/// The bytes of one copy and the number of copies in a batch, on a GPU. A copy is larger than the
/// GPU's caches.
const OF_DEVICE: (usize, usize) = (64 << 20, 40);

/// The seconds after which a batch ends early, on a rank that copies slowly.
const BATCH: f64 = 0.25;
/// The least number of copies in a batch, however slow they are. The rule in [`slow`] needs it.
const LEAST: usize = 30;
/// A batch looks at the clock after this number of copies.
const COPIES_A_LOOK: usize = 10;

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
    let one = || {
        exchange.alive()?;
        batch_within(BATCH, most, |copies| recv.copy_from(send, bytes, copies))
    };
    recv.copy_from(send, bytes, most / 10)?;
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
    let longest = (slowest * most as f64).min(BATCH).max(slowest * LEAST.min(most) as f64) + PAUSE;
    let fitting = (LOOK / longest).clamp(1.0, ROUNDS).floor();
    if fitting * longest > left / 4.0 { 0.0 } else { fitting }
}

/// Makes a batch of `most` copies, which ends early once it has taken `limit` seconds and has
/// [`LEAST`] copies. `copy` makes that many copies. Returns the seconds for a copy.
fn batch_within(limit: f64, most: usize, mut copy: impl FnMut(usize) -> Result<()>) -> Result<f64> {
    let (began, mut done) = (Instant::now(), 0);
    while done < most && (done < LEAST || began.elapsed().as_secs_f64() < limit) {
        let some = COPIES_A_LOOK.min(most - done);
        copy(some)?;
        done += some;
    }
    Ok(began.elapsed().as_secs_f64() / done as f64)
}

/// The ranks that copy slowly, from the seconds per copy of each rank, by batch.
pub fn slow(copies: &[&[f64]], factor: f64, ranks_per_core: f64) -> Vec<Slow> {
    // The copies of a batch take long enough for several turns of the scheduler, so a turn is
    // spread over them.
    Rule::new(factor, ranks_per_core, LEAST as u32).slow(copies)
}

/// The bytes of one copy, and the copies of a batch.
pub fn batch(on_device: bool) -> (usize, usize) {
    if on_device { OF_DEVICE } else { OF_HOST }
}

#[cfg(test)]
mod tests {
    use super::{LEAST, batch_within, rounds};

    #[test]
    fn all_ranks_copy_again_where_one_looks_slow() {
        let well = || vec![0.5, 1e-3, 1e-3];
        let of = |third: f64, left| rounds(&[well(), vec![0.5, 45e-3, third], well()], 1.5, 150, left);
        assert_eq!(of(1e-3, 100.0), 0.0, "one quick batch clears it");
        assert_eq!(of(45e-3, 100.0), 1.0, "a batch of 30 copies and its pause take 1.75 s");
        assert_eq!(of(45e-3, 2.0), 0.0, "there is no time for it");
        assert_eq!(rounds(&[well(), vec![0.5, 2e-3, 2e-3]], 1.5, 150, 100.0), 3.0);
    }

    #[test]
    fn a_batch_ends_early_where_copies_are_slow() {
        let copies_of = |limit: f64, most: usize| {
            let mut made = 0;
            let seconds = batch_within(limit, most, |copies| {
                made += copies;
                Ok(())
            });
            assert!(seconds.is_ok_and(|seconds| seconds >= 0.0));
            made
        };
        assert_eq!(copies_of(60.0, 150), 150, "the batch is quick");
        assert_eq!(copies_of(60.0, 15), 15);
        assert_eq!(copies_of(0.0, 150), LEAST, "the batch is late from the beginning");
        assert_eq!(copies_of(0.0, 25), 25);
    }
}
