//! The tables of a trace: what each dimension costs, and who waits for whom.

use std::collections::BTreeMap;

use recording::{EntryState, Operation};
use serde::Serialize;

use super::timeline::{TimedCall, Timeline, is_meeting};

/// The tables.
#[derive(Serialize)]
pub struct Summary {
    /// A row for each dimension, operation and class of sizes.
    pub costs: Vec<Cost>,
    /// A row for each rank that others have waited for, the longest wait first.
    pub stragglers: Vec<Straggler>,
}

/// What the calls of one dimension, one operation and one class of sizes cost.
#[derive(Serialize)]
pub struct Cost {
    /// The dimension, or the scope of an agreement.
    pub group: String,
    /// The operation.
    pub operation: &'static str,
    /// The largest size of the class in bytes: a power of 4 times 1 KiB. 0 for calls without data.
    pub size_class: u64,
    /// The number of calls on all ranks.
    pub calls: usize,
    /// The bytes of these calls together, as nccl-tests counts them: the larger buffer of each.
    pub bytes: u64,
    /// The time that the ranks spent in these calls together, in seconds. A wait for a late rank is
    /// a part of it.
    pub seconds: f64,
    /// The time from the last rank's beginning to the last rank's end, in seconds, as a sum over
    /// the collectives that all ranks have made: what the data took, without the waits for late
    /// ranks. `None` where no rank is known to have been the last.
    pub transfer_seconds: Option<f64>,
    /// The bus bandwidth of these transfers in GB/s (nccl-tests, doc/PERFORMANCE.md). `None` where
    /// it says nothing: below 1 KiB, or without a transfer.
    pub busbw_gbps: Option<f64>,
}

/// A rank for which others have waited.
#[derive(Serialize)]
pub struct Straggler {
    /// The rank.
    pub rank: u32,
    /// How many collectives it began as the last of its group.
    pub last_in: usize,
    /// The time that all other ranks together waited for it, in seconds.
    pub waited_seconds: f64,
    /// The dimension in which they waited longest for it.
    pub mostly_in: String,
    /// The rank that waited longest for it.
    pub mostly_rank: u32,
}

/// One collective: the call of each rank of its group.
type Together<'a> = Vec<&'a TimedCall>;

impl Summary {
    /// The tables of a timeline.
    pub fn new(timeline: &Timeline) -> Summary {
        let together = together(timeline);
        Summary { costs: costs(timeline, &together), stragglers: stragglers(timeline, &together) }
    }
}

/// The collectives that have ended on all ranks of their groups.
fn together(timeline: &Timeline) -> Vec<Together<'_>> {
    let mut calls: BTreeMap<(u64, u64), Together> = BTreeMap::new();
    for call in timeline.calls.iter().filter(|call| call.operation.is_compared()) {
        calls.entry((call.group, call.number)).or_default().push(call);
    }
    let is_whole = |calls: &Together| {
        calls.len() == timeline.groups[&calls[0].group].size as usize
            && calls.len() > 1
            && calls.iter().all(|call| call.state == EntryState::Done && call.operation == calls[0].operation)
    };
    calls.into_values().filter(is_whole).collect()
}

fn costs(timeline: &Timeline, together: &[Together]) -> Vec<Cost> {
    let key =
        |call: &TimedCall| (timeline.groups[&call.group].name.clone(), call.operation.name(), size_class(call.bytes));
    let mut costs: BTreeMap<_, Cost> = BTreeMap::new();
    for call in &timeline.calls {
        let (group, operation, size_class) = key(call);
        let cost = costs.entry(key(call)).or_insert(Cost {
            group,
            operation,
            size_class,
            calls: 0,
            bytes: 0,
            seconds: 0.0,
            transfer_seconds: None,
            busbw_gbps: None,
        });
        cost.calls += 1;
        cost.bytes = cost.bytes.saturating_add(call.bytes);
        cost.seconds += (call.ended - call.begun) / 1e9;
    }
    // The bytes on the bus and the seconds of the transfers.
    let mut transfers: BTreeMap<_, (f64, f64)> = BTreeMap::new();
    for calls in together.iter().filter(|calls| is_meeting(calls[0].operation)) {
        let first = calls[0];
        let begun = latest(calls, |call| call.begun);
        let ended = latest(calls, |call| call.ended);
        let (bytes, seconds) = transfers.entry(key(first)).or_default();
        *bytes += first.bytes as f64 * bus_factor(first.operation, calls.len());
        *seconds += (ended - begun).max(0.0) / 1e9;
    }
    for (key, (bytes, seconds)) in transfers {
        let Some(cost) = costs.get_mut(&key) else { continue };
        cost.transfer_seconds = Some(seconds);
        cost.busbw_gbps = (cost.size_class > 1 << 10 && seconds > 0.0).then(|| bytes / seconds / 1e9);
    }
    costs.into_values().collect()
}

fn stragglers(timeline: &Timeline, together: &[Together]) -> Vec<Straggler> {
    /// What is known of one rank: its calls as the last one, and who waited how long and where.
    #[derive(Default)]
    struct Late {
        calls: usize,
        waited: f64,
        by_group: BTreeMap<u64, f64>,
        by_rank: BTreeMap<u32, f64>,
    }
    let rank = |call: &TimedCall| timeline.ranks[call.process].rank;
    let mut late: BTreeMap<u32, Late> = BTreeMap::new();
    // Ranks that start or end at different times wait in scopes, and nobody is late there.
    let counts = |call: &TimedCall| is_meeting(call.operation) && !timeline.groups[&call.group].is_scope;
    for calls in together.iter().filter(|calls| counts(calls[0])) {
        let Some(last) = calls.iter().max_by(|one, other| one.begun.total_cmp(&other.begun)) else { continue };
        let entry = late.entry(rank(last)).or_default();
        entry.calls += 1;
        for call in calls {
            // A rank cannot wait for longer than its call took.
            let waited = (last.begun - call.begun).min(call.ended - call.begun).max(0.0) / 1e9;
            entry.waited += waited;
            *entry.by_group.entry(last.group).or_default() += waited;
            *entry.by_rank.entry(rank(call)).or_default() += waited;
        }
    }
    let row = |(rank, late): (u32, Late)| {
        let group = late.by_group.iter().max_by(|one, other| one.1.total_cmp(other.1))?;
        let waiting = late.by_rank.iter().max_by(|one, other| one.1.total_cmp(other.1))?;
        Some(Straggler {
            rank,
            last_in: late.calls,
            waited_seconds: late.waited,
            mostly_in: timeline.groups[group.0].name.clone(),
            mostly_rank: *waiting.0,
        })
    };
    let mut rows: Vec<Straggler> = late.into_iter().filter_map(row).filter(|row| row.waited_seconds > 0.0).collect();
    rows.sort_by(|one, other| other.waited_seconds.total_cmp(&one.waited_seconds));
    rows
}

fn latest(calls: &[&TimedCall], time: impl Fn(&TimedCall) -> f64) -> f64 {
    calls.iter().map(|call| time(call)).fold(f64::NEG_INFINITY, f64::max)
}

/// The class of a size: the smallest power of 4 times 1 KiB that holds it. 0 for no data.
fn size_class(bytes: u64) -> u64 {
    match bytes {
        0 => 0,
        bytes => std::iter::successors(Some(1u64 << 10), |class| class.checked_mul(4))
            .find(|class| *class >= bytes)
            .unwrap_or(u64::MAX),
    }
}

/// How often the bytes of a call cross a link in the best algorithm (nccl-tests,
/// doc/PERFORMANCE.md).
fn bus_factor(operation: Operation, ranks: usize) -> f64 {
    let ranks = ranks as f64;
    match operation {
        Operation::AllReduce => 2.0 * (ranks - 1.0) / ranks,
        Operation::AllGather | Operation::ReduceScatter | Operation::AllToAll => (ranks - 1.0) / ranks,
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::timeline::tests::{call, timeline};

    #[test]
    fn the_last_rank_is_the_one_for_which_the_others_waited() {
        // Rank 1 begins 900 ns after the others. The data takes 100 ns.
        let late = [(0, 0.0, 1000.0), (1, 900.0, 1000.0), (2, 0.0, 1000.0)];
        let summary = Summary::new(&timeline(late.map(|(rank, begun, ended)| call(rank, 1, 1 << 20, begun, ended))));
        let [cost] = &summary.costs[..] else { panic!("{}", summary.costs.len()) };
        assert_eq!((&*cost.group, cost.operation, cost.calls, cost.bytes), ("mesh/dp", "all-reduce", 3, 3 << 20));
        assert!((cost.seconds - 2100e-9).abs() < 1e-15 && (cost.transfer_seconds.unwrap() - 100e-9).abs() < 1e-15);
        let busbw = (1 << 20) as f64 * 4.0 / 3.0 / 100.0;
        assert!((cost.busbw_gbps.unwrap() - busbw).abs() < 1e-6, "{:?} GB/s, not {busbw}", cost.busbw_gbps);
        let [late] = &summary.stragglers[..] else { panic!("{}", summary.stragglers.len()) };
        assert_eq!((late.rank, late.last_in, &*late.mostly_in), (1, 1, "mesh/dp"));
        assert!((late.waited_seconds - 1800e-9).abs() < 1e-15, "{}", late.waited_seconds);
    }

    #[test]
    fn a_call_that_a_rank_has_not_made_tells_nothing_of_waits() {
        let missing = [(0, 0.0, 1000.0), (1, 900.0, 1000.0)];
        let summary = Summary::new(&timeline(missing.map(|(rank, begun, ended)| call(rank, 1, 64, begun, ended))));
        assert_eq!((summary.costs[0].calls, summary.costs[0].transfer_seconds), (2, None));
        assert!(summary.stragglers.is_empty());
    }

    /// Operations of the program's own and messages have numbers apart from those of collectives.
    #[test]
    fn only_collectives_are_put_together_by_their_numbers() {
        let collectives = [(0, 0.0, 1000.0), (1, 900.0, 1000.0), (2, 0.0, 1000.0)];
        let collectives = collectives.map(|(rank, begun, ended)| call(rank, 1, 64, begun, ended));
        let others =
            [Operation::Custom, Operation::Send].map(|operation| TimedCall { operation, ..call(2, 1, 64, 0.0, 9.0) });
        let summary = Summary::new(&timeline(collectives.into_iter().chain(others)));
        assert_eq!(summary.stragglers.iter().map(|late| late.rank).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn sizes_fall_into_classes() {
        let classes = [(0, 0), (1, 1 << 10), (1 << 10, 1 << 10), (1025, 4 << 10), (5 << 20, 16 << 20)];
        classes.iter().for_each(|(bytes, class)| assert_eq!(size_class(*bytes), *class));
    }
}
