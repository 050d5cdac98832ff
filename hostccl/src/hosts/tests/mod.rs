//! Collectives among threads on several "hosts", over the memory wire.

mod beginnings;
mod data;
mod differences;
mod endings;
mod late;
mod names;
mod results;

use std::sync::Arc;
use std::time::Duration;

use super::Spanning;
use crate::blocks::Block;
use crate::call_name::{NAME_BYTES, Name};
use crate::collective::{Call, Kind, Ragged, Reduction};
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::hosts_of_threads;
use crate::news;
use crate::progress;
use crate::rails::Limits;
use crate::types::{DataType, ncclTimeout};
use crate::wire::memory::Memory;

/// A random number generator, so that a failing case can be run again.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % below
    }

    pub(super) fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.next(list.len())]
    }
}

/// A communicator of threads.
pub(super) struct Ranks {
    /// The ends by rank.
    pub(super) ends: Vec<Arc<Comm>>,
    /// The wire of each rank.
    pub(super) wires: Vec<Arc<Memory>>,
}

/// Limits with which small data takes the ways of large data.
const SMALL: Limits =
    Limits { contribution: 24 << 10, message: 16 << 10, reduction: 48 << 10, broadcast: 48 << 10, chain: 100 << 10 };

impl Ranks {
    pub(super) fn new(hosts: &[&[usize]]) -> Ranks {
        Ranks::with(hosts, SMALL)
    }

    pub(super) fn with(hosts: &[&[usize]], limits: Limits) -> Ranks {
        let (ends, wires) = hosts_of_threads::communicators_with(hosts, limits);
        for end in &ends {
            end.set_timeout(30_000);
            news::register(end);
        }
        Ranks { ends, wires }
    }

    /// Runs `rank` in a thread for each rank, and returns the answers by rank.
    pub(super) fn run<T: Send>(&self, rank: impl Fn(usize, &Arc<Comm>) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let rank = &rank;
            let threads: Vec<_> =
                self.ends.iter().enumerate().map(|(me, end)| scope.spawn(move || rank(me, end))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Returns the errors of the ranks, of which each must have one.
    pub(super) fn errors(&self, rank: impl Fn(usize, &Arc<Comm>) -> Result<()> + Sync) -> Vec<Error> {
        self.run(rank).into_iter().enumerate().map(|(me, it)| it.expect_err(&format!("rank {me}"))).collect()
    }
}

/// A name for calls.
pub(super) fn name(text: &str) -> Name {
    let mut bytes = [0; NAME_BYTES];
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    Name { tag: 2 + text.bytes().fold(0, |sum, byte| sum * 256 + u64::from(byte)), text: bytes }
}

/// The arguments of a call of a test.
#[derive(Debug, Clone)]
pub(super) struct Args {
    pub(super) kind: Kind,
    pub(super) count: usize,
    pub(super) dtype: DataType,
    pub(super) reduction: Option<Reduction>,
    pub(super) root: Option<usize>,
}

/// Returns a call with these arguments, which has no buffers.
pub(super) fn of_args(args: &Args) -> Call {
    let Args { kind, count, dtype, reduction, root } = args.clone();
    Call { kind, send: std::ptr::null(), recv: std::ptr::null_mut(), count, dtype, reduction, root }
}

/// Performs a call on one rank.
///
/// # Safety
/// The buffers hold what the call says.
pub(super) unsafe fn call(
    comm: &Arc<Comm>,
    args: &Args,
    send: *const u8,
    recv: *mut u8,
    blocks: Option<(Vec<Block>, Vec<Block>)>,
    name: Name,
) -> Result<()> {
    let call = Call { send, recv, ..of_args(args) };
    let ragged = blocks.map(|(sends, recvs)| Ragged::new(sends, recvs));
    // SAFETY: this function's contract.
    let mut operation = unsafe { Spanning::new(comm.clone(), call, ragged, name)? };
    progress::run(&mut operation)
}

/// Sums a number over the ranks, under a name.
pub(super) fn sum(comm: &Arc<Comm>, number: u64, under: Name) -> Result<u64> {
    let args = Args {
        kind: Kind::AllReduce,
        count: 1,
        dtype: DataType::Uint64,
        reduction: Some(Reduction::Plain(crate::types::ReduceOp::Sum)),
        root: None,
    };
    let mut result = 0_u64;
    // SAFETY: both numbers outlive the call.
    unsafe { call(comm, &args, (&raw const number).cast(), (&raw mut result).cast(), None, under)? };
    Ok(result)
}

/// Checks that a scene in which all ranks wait for `missing` gives errors which blame that rank
/// alone. The scene gets the time of the ranks. On a busy machine, another rank may come later than
/// that, and is blamed too. Then the ranks get more time.
fn only_the_missing_rank_is_blamed(missing: usize, timeout: Duration, play: impl Fn(Duration) -> Vec<Error>) {
    for factor in [1, 4, 16] {
        let errors = play(factor * timeout);
        let is_late = |error: &Error| error.blame().ranks.iter().any(|rank| *rank != missing);
        if factor < 16 && errors.iter().any(is_late) {
            continue;
        }
        for error in errors {
            let said = (error.code(), &error.blame().ranks[..]);
            assert_eq!(said, (ncclTimeout, &[missing][..]), "{}", error.message());
        }
        return;
    }
}
