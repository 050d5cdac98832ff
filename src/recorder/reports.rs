//! Reports of the recordings of other hosts: each host leaves extracts of its recordings in the
//! store when a call fails, and reads those of the other hosts.
//!
//! | key | who writes it | when |
//! |---|---|---|
//! | `<group>/<rank>` | the rank itself | when a call of the group has failed on it |
//! | `late/<rank>` | a rank of its host | when the rank did not come to a call, and so says nothing itself |
//!
//! Each report begins with the time at which it was written, and [`FRESH`] says how old it may be.
//! A call may fail and leave its group as it was, for example `dm_stream_wait` at its deadline. The
//! group goes on then, and a report of this failure is of no use for a later one.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use recording::{EntryState, RecordedCall, Snapshot, extract, of_extract};

use super::Group;
use crate::wait::Deadline;

/// The first pause between two looks. Each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// How old a report may be.
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
    let all = std::iter::once((own(group, me.rank), me)).chain(late.iter().map(|rank| (of_late(rank.rank), rank)));
    let mut written = all.filter_map(|(key, rank)| Some((key, report_of(rank, group, world)?)));
    written.all(|(key, report)| reports.leave(&key, &[&now().to_le_bytes()[..], &report].concat()))
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
            let last = values.iter().flatten().filter_map(|value| fresh(value)).max_by_key(|(time, _)| *time);
            if let Some(snapshot) = last.and_then(|(_, report)| of_extract(report)) {
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
        let last = if call.call.operation.is_compared() { channel.calls_begun } else { channel.messages_begun };
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

/// Returns the time that stands at the beginning of `value`, and the report that follows it.
/// Returns `None` where the report is older than [`FRESH`].
fn fresh(value: &[u8]) -> Option<(u64, &[u8])> {
    let (time, report) = value.split_first_chunk::<8>()?;
    let time = u64::from_le_bytes(*time);
    (time.abs_diff(now()) < FRESH.as_millis() as u64).then_some((time, report))
}

/// The milliseconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::sync::atomic::AtomicU64;

    use recording::{Call, ChannelFacts, NO_PEER, Operation, Recorder, WorldFacts, layout};

    use super::*;
    use crate::digest::Fnv1a;
    use crate::recorder::{Kind, World};

    /// A place for reports in this process, which is looked at for that long.
    struct Here(RefCell<BTreeMap<String, Vec<u8>>>, Cell<Duration>);

    impl Here {
        /// Makes the report under that key older.
        fn age(&self, key: &str, by: Duration) {
            let mut values = self.0.borrow_mut();
            let time = values.get_mut(key).unwrap().first_chunk_mut::<8>().unwrap();
            *time = (u64::from_le_bytes(*time) - by.as_millis() as u64).to_le_bytes();
        }
    }

    impl Reports for Here {
        fn deadline(&self) -> Deadline {
            Deadline::after(self.1.get())
        }

        fn leave(&self, key: &str, value: &[u8]) -> bool {
            self.0.borrow_mut().insert(key.to_owned(), value.to_owned());
            true
        }

        fn look(&self, keys: &[String]) -> Vec<Option<Vec<u8>>> {
            keys.iter().map(|key| self.0.borrow().get(key).cloned()).collect()
        }
    }

    /// The wait for a stream fails at its deadline, and the group goes on.
    #[test]
    fn a_report_of_an_earlier_failure_is_not_read() {
        let group =
            Group::open(Kind::Dimension, &World::default(), Fnv1a::default().text("reports"), (1, 2), &[], "dp");
        let words = Vec::leak((0..layout::WORDS).map(|_| AtomicU64::new(0)).collect());
        let recorder = Recorder::new(words, 100, "alpha", "0.2.0");
        let world = WorldFacts { key: 7, rank: 1, size: 2, job: "", store: "", launcher: "" };
        let world = recorder.open_world(&world);
        let facts = ChannelFacts { kind: 0, key: group.key(), world, rank: 1, members: &[], size: 2, name: "mesh/dp" };
        let channel = recorder.open_channel(&facts);
        let reports = Here(RefCell::default(), Cell::new(Duration::from_secs(60)));
        let call = || {
            let (operation, peer) = (Operation::AllReduce, NO_PEER);
            let call = Call { operation, dtype: 7, reduction: 0, count: 4, peer, stream: 0 };
            recorder.end(recorder.begin(channel, &call), EntryState::Issued);
        };
        let leave = |is_late: bool| {
            let (snapshot, memory) = recorder.with_memory().unwrap();
            let local = |rank| Local { rank, snapshot: &snapshot, memory: &memory };
            match is_late {
                true => leave(&reports, &group, 7, &local(0), &[local(1)]),
                false => leave(&reports, &group, 7, &local(1), &[]),
            }
        };
        let read = || read(&reports, &group, &[1], &[]).get(&1).map(|found| found.channels[0].calls_begun);
        call();
        assert!(leave(false));
        assert_eq!(read(), Some(1));
        reports.age(&own(&group, 1), FRESH);
        reports.1.set(Duration::from_millis(50));
        assert_eq!(read(), None, "the report is old");
        reports.1.set(Duration::from_secs(60));
        // The last report of a rank counts, whoever has written it.
        call();
        assert!(leave(false));
        reports.age(&own(&group, 1), Duration::from_secs(1));
        call();
        assert!(leave(true));
        assert_eq!(read(), Some(3));
    }
}
