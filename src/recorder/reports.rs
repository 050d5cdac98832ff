//! Reports of the recordings of other hosts: each host leaves extracts of its recordings in the
//! store when a call fails, and reads those of the other hosts.
//!
//! | key | who writes it | when |
//! |---|---|---|
//! | `<group>/<rank>` | the rank itself | when a call of the group has failed on it |
//! | `late/<rank>` | a rank of its host | when the rank did not come to a call, and so says nothing itself |
//!
//! A group fails once, so the first kind is never old. The second kind has the time at which it
//! was written, and [`FRESH`] says how old it may be.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use recording::{EntryState, RecordedCall, Snapshot, extract, of_extract};

use super::Group;
use crate::wait::Deadline;

/// The first pause between two looks. Each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// How old a report by another rank may be.
const FRESH: Duration = Duration::from_secs(5);
/// The most calls of the failed group in a report.
const CALLS: u64 = 32;
/// The most ranks that are read beside those that are late.
const OTHERS: usize = 8;

/// The place in the store where the hosts leave their reports, for one error.
pub(crate) trait Reports {
    /// Returns when the error must be ready. Nothing here takes longer.
    fn deadline(&self) -> Deadline;

    /// Leaves a value. Returns `false` where the store does not take it before the deadline.
    fn leave(&self, key: &str, value: &[u8]) -> bool;

    /// Returns the value of each key that is there now.
    fn look(&self, keys: &[String]) -> Vec<Option<Vec<u8>>>;
}

/// A recording on this host: the rank, what was read, and the memory from which it was read.
pub(super) struct Local<'a> {
    pub(super) rank: u32,
    pub(super) snapshot: &'a Snapshot,
    pub(super) memory: &'a [u8],
}

/// Leaves the report of this rank, and those of ranks of this host that are late. Returns `false`,
/// and leaves no further one, where the store did not take a report before the deadline.
pub(super) fn leave(reports: &dyn Reports, group: &Group, world: u64, me: &Local<'_>, late: &[Local<'_>]) -> bool {
    let of_me = report_of(me, group, world).map(|report| (own(group, me.rank), report));
    let of_late = late.iter().filter_map(|rank| {
        let report = report_of(rank, group, world)?;
        Some((of_late(rank.rank), [&now().to_le_bytes()[..], &report].concat()))
    });
    of_me.into_iter().chain(of_late).all(|(key, report)| reports.leave(&key, &report))
}

/// Returns what other hosts say of the ranks `late` and of some of the ranks `others`. Waits until
/// all of these have said something, and until the deadline of `reports` at most.
pub(super) fn read(reports: &dyn Reports, group: &Group, late: &[u32], others: &[u32]) -> BTreeMap<u32, Snapshot> {
    let wanted: Vec<u32> = late.iter().chain(others.iter().take(OTHERS)).copied().collect();
    let (deadline, mut pause, mut found) = (reports.deadline(), FIRST_PAUSE, BTreeMap::new());
    while !deadline.passed() {
        let missing: Vec<u32> = wanted.iter().filter(|rank| !found.contains_key(*rank)).copied().collect();
        let keys: Vec<String> = missing.iter().flat_map(|rank| [own(group, *rank), of_late(*rank)]).collect();
        for (rank, values) in missing.iter().zip(reports.look(&keys).chunks(2)) {
            let said = values[0].as_deref().or_else(|| values.get(1)?.as_deref().and_then(fresh));
            if let Some(snapshot) = said.and_then(of_extract) {
                found.insert(*rank, snapshot);
            }
        }
        if found.len() == wanted.len() {
            break;
        }
        std::thread::sleep(pause.min(deadline.left()));
        pause *= 2;
    }
    found
}

/// The extract of a rank's recording: its groups in this world, the last calls of the group, the
/// last call of each other group, and the calls that run.
fn report_of(rank: &Local<'_>, group: &Group, world: u64) -> Option<Vec<u8>> {
    let Local { snapshot, memory, .. } = rank;
    let world = snapshot.worlds.iter().find(|it| it.key == world && it.rank == rank.rank)?;
    let is_wanted = |call: &RecordedCall| {
        let Some(channel) = snapshot.channels.iter().find(|channel| channel.place == call.channel) else {
            return false;
        };
        let last = if call.call.operation.is_message() { channel.messages_begun } else { channel.calls_begun };
        let kept = if channel.key == group.key { CALLS } else { 1 };
        call.state == EntryState::Running || call.in_channel + kept > last
    };
    Some(extract(snapshot, memory, world, is_wanted))
}

fn own(group: &Group, rank: u32) -> String {
    format!("{:016x}/{rank}", group.key)
}

fn of_late(rank: u32) -> String {
    format!("late/{rank}")
}

/// Returns the report that follows its time in `value`. Returns `None` where the report is older
/// than [`FRESH`].
fn fresh(value: &[u8]) -> Option<&[u8]> {
    let (time, report) = value.split_first_chunk::<8>()?;
    (u64::from_le_bytes(*time).abs_diff(now()) < FRESH.as_millis() as u64).then_some(report)
}

/// The milliseconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}
