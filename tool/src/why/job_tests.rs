//! Which processes are one job.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use recording::{Call, ChannelFacts, EntryState, NO_PEER, Operation, Recorder, Snapshot, layout};

use super::super::find::Found;
use super::super::judge_tests::text_of;
use super::super::process::{Origin, Process, State, Timeline};
use super::{Rank, jobs, jobs_within};

/// A process of a program that uses NCCL alone, with its rank in each of these communicators. In
/// each it has made `calls` calls.
fn process(number: u32, communicators: &[(u64, usize)], calls: usize) -> Process {
    let words: &'static [AtomicU64] = Vec::leak((0..layout::WORDS).map(|_| AtomicU64::new(0)).collect());
    let recorder = Recorder::new(words, 200 + number, "alpha", "0.2.0");
    for (key, rank) in communicators {
        let facts = ChannelFacts { kind: 2, key: *key, world: None, rank: *rank, members: &[], size: 2, name: "tp" };
        let channel = recorder.open_channel(&facts);
        let all_reduce =
            Call { operation: Operation::AllReduce, dtype: 7, reduction: 0, count: 4, peer: NO_PEER, stream: 0 };
        for _ in 0..calls {
            recorder.end(recorder.begin(channel, &all_reduce), EntryState::Issued);
        }
    }
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.load(Relaxed).to_ne_bytes()).collect();
    let snapshot = Snapshot::of_bytes(&bytes, &bytes, &bytes).unwrap();
    let mut now = snapshot.process.clock.moment();
    now.monotonic += 12_500_000_000;
    now.real += 12_500_000_000;
    now.ticks += 12_500_000_000;
    let timeline = Timeline::new(&snapshot, Some(now), now.real, None);
    let (pid, program) = (200 + number, "train".to_owned());
    Process { pid, state: State::Sleeps, snapshot, bytes, timeline, place: None, program, origin: Origin::Here }
}

#[test]
fn programs_that_use_nccl_alone_are_a_job_by_their_communicator() {
    let processes = vec![process(0, &[(5, 0)], 3), process(1, &[(5, 1)], 2)];
    let text = text_of(Found { processes, ..Found::default() });
    assert!(
        text.starts_with("train: rank 1 has not called all-reduce 3 of tp; rank 0 has waited in it for 12 s"),
        "{text}"
    );
}

/// Process 200 is not in the largest communicator, so it has no rank number by which duplicates are
/// found.
#[test]
fn a_process_that_another_host_has_found_too_is_one_rank() {
    let mut processes = vec![process(0, &[(5, 0)], 2), process(1, &[(5, 1), (6, 0)], 2), process(2, &[(6, 1)], 2)];
    let sent = |peer: usize, process: &Process| {
        let bytes = process.copy(usize::MAX);
        let snapshot = Snapshot::of_bytes(&bytes, &bytes, &bytes).unwrap();
        Process::of_copy(snapshot, Vec::new(), Origin::Sent(0, peer)).unwrap()
    };
    let others: Vec<Process> =
        (1..3).flat_map(|peer| processes.iter().map(move |process| sent(peer, process))).collect();
    processes.extend(others);
    let jobs = jobs(Found { processes, ..Found::default() });
    let [job] = &jobs[..] else { panic!("{} jobs", jobs.len()) };
    let known = job.ranks.iter().filter_map(Rank::process).map(|process| (process.pid, process.origin));
    // The recordings that this host has read itself stay.
    let mut known: Vec<(u32, Origin)> = known.collect();
    known.sort_unstable_by_key(|(pid, _)| *pid);
    assert_eq!(known, [200, 201, 202].map(|pid| (pid, Origin::Here)));
    assert_eq!(super::super::name(job), "train");
}

/// A process with two copies of the library has two recordings. One of them is its rank's, and both
/// are saved.
#[test]
fn both_recordings_of_a_process_are_saved() {
    let processes = vec![process(0, &[(5, 0)], 2), process(0, &[(5, 0)], 3), process(1, &[(5, 1)], 2)];
    let jobs = jobs(Found { processes, ..Found::default() });
    assert_eq!((jobs.len(), jobs[0].ranks.len()), (1, 2));
    let folder = std::env::temp_dir().join(format!("dm-save-{}", std::process::id()));
    assert!(super::super::save(&jobs, &folder).is_ok());
    let saved = super::super::find::of_files(std::slice::from_ref(&folder)).ok().unwrap().processes;
    std::fs::remove_dir_all(&folder).unwrap();
    let mut saved: Vec<_> = saved.iter().map(|it| (it.pid, it.snapshot.process.calls_begun)).collect();
    saved.sort_unstable();
    assert_eq!(saved, [(200, 2), (200, 3), (201, 2)]);
}

/// Two containers with one host name share a folder for recordings, and each sees its own processes
/// alone.
#[test]
fn a_live_process_elsewhere_counts_before_its_file_here() {
    let live = process(0, &[(5, 0)], 2);
    let bytes = live.copy(usize::MAX);
    let snapshot = Snapshot::of_bytes(&bytes, &bytes, &bytes).unwrap();
    let sent = Process::of_copy(snapshot, Vec::new(), Origin::Sent(0, 1)).unwrap();
    let file = Process { state: State::Gone, ..live };
    let jobs = jobs(Found { processes: vec![file, process(1, &[(5, 1)], 2), sent], ..Found::default() });
    let states: Vec<State> =
        jobs.iter().flat_map(|job| &job.ranks).filter_map(Rank::process).map(|it| it.state).collect();
    assert_eq!(states, [State::Sleeps; 2]);
}

/// A recording may claim any number of ranks, and an answer of another host has thousands of
/// recordings.
#[test]
fn all_jobs_together_have_a_limit() {
    let mut processes: Vec<Process> = (0..50).map(|number| process(number, &[(u64::from(number), 0)], 1)).collect();
    processes.iter_mut().flat_map(|process| &mut process.snapshot.channels).for_each(|channel| channel.size = 1 << 30);
    let jobs = jobs_within(Found { processes, ..Found::default() }, 1000);
    let ranks: usize = jobs.iter().map(|job| job.ranks.len()).sum();
    assert!(jobs.len() == 50 && ranks <= 1000 + 50, "{ranks}");
}
