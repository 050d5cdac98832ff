//! Which processes are one job.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use recording::{Call, ChannelFacts, EntryState, NO_PEER, Operation, Recorder, Snapshot, layout};

use super::super::find::{Found, Node, Started};
use super::super::judge_tests::{a_rank_behind, text_of};
use super::super::process::{Origin, Process, State, Timeline};
use super::{Rank, Seen, jobs, jobs_within};

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

/// Others may write in the folder, too. They cannot read a copy, as they cannot read its recording.
#[test]
fn a_copy_follows_no_link_and_is_readable_by_its_user_alone() {
    let jobs = jobs(Found { processes: vec![process(0, &[(5, 0)], 2), process(1, &[(5, 1)], 2)], ..Found::default() });
    let folder = std::env::temp_dir().join(format!("dm-link-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let victim = folder.join("victim");
    fs::write(&victim, "precious").unwrap();
    let copies: Vec<PathBuf> = jobs[0].recordings().map(|process| folder.join(process.file_name(1))).collect();
    copies.iter().for_each(|copy| symlink(&victim, copy.with_extension("new")).unwrap());
    let is_saved = super::super::save(&jobs, &folder).is_ok();
    let precious = fs::read(&victim).unwrap();
    let kinds: Vec<_> =
        copies.iter().map(|copy| copy.symlink_metadata().map(|it| (it.is_file(), it.mode() & 0o777))).collect();
    fs::remove_dir_all(&folder).unwrap();
    assert!(is_saved && precious == b"precious", "a copy was written to where the link leads");
    assert!(kinds.iter().all(|kind| matches!(kind, Ok((true, 0o600)))), "{kinds:?}");
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

/// The processes of a job of eight ranks that this host sees: for each one its rank, and its local
/// rank among `local_size` ones, which the launcher has told.
fn of_job(seen: &[(u32, usize)], local_size: Option<usize>) -> Vec<Process> {
    let mut ranks = a_rank_behind();
    ranks.retain(|rank| seen.iter().any(|(number, _)| *number == rank.rank));
    let mut processes: Vec<Process> = ranks.iter().map(super::super::judge_tests::Rank::process).collect();
    for (process, (_, local_rank)) in processes.iter_mut().zip(seen) {
        let place = process.place.as_mut().unwrap();
        (place.local_rank, place.local_size) = (Some(*local_rank), local_size);
    }
    processes
}

/// The ranks that are said to be gone.
fn gone(found: Found) -> Vec<u32> {
    let jobs = jobs(found);
    let [job] = &jobs[..] else { panic!("{} jobs", jobs.len()) };
    job.ranks.iter().filter(|rank| matches!(rank.seen, Seen::Gone)).map(|rank| rank.number).collect()
}

#[test]
fn the_places_of_a_host_say_which_of_its_ranks_are_gone() {
    let gone =
        |seen: &[(u32, usize)], local_size| gone(Found { processes: of_job(seen, local_size), ..Found::default() });
    // One host has all ranks.
    assert_eq!(gone(&[(0, 0), (5, 5)], Some(8)), [1, 2, 3, 4, 6, 7]);
    // Two hosts have four ranks each.
    assert_eq!(gone(&[(4, 0), (6, 2)], Some(4)), [5, 7]);
    // One place alone may be that of a job whose ranks are dealt out in turn.
    assert_eq!(gone(&[(6, 2)], Some(4)), [0; 0]);
    assert_eq!(gone(&[(6, 6)], Some(8)), [0, 1, 2, 3, 4, 5, 7]);
    // Three hosts have two, three and three ranks. Two ranks of the second host make it certain.
    assert_eq!(gone(&[(2, 0), (4, 2)], Some(3)), [3]);
    assert_eq!(gone(&[(4, 2)], Some(3)), [0; 0]);
    // Two nodes share one machine.
    assert_eq!(gone(&[(0, 0), (1, 1), (5, 1), (6, 2)], Some(4)), [2, 3, 4, 7]);
    // Two hosts, or three hosts with two ranks each, get the ranks in turn.
    assert_eq!(gone(&[(0, 0), (2, 1), (6, 3)], Some(4)), [0; 0]);
    assert_eq!(gone(&[(3, 1)], Some(4)), [0; 0]);
    assert_eq!(gone(&[(0, 0), (3, 1)], Some(2)), [0; 0]);
    // Three hosts get two ranks at a time (`srun --distribution=plane=2`).
    assert_eq!(gone(&[(0, 0), (1, 1), (6, 2), (7, 3)], Some(4)), [0; 0]);
    // In a job with spares, nobody knows how many of the local ranks have consecutive numbers.
    assert_eq!(gone(&[(0, 0), (1, 1)], None), [0; 0]);
}

#[test]
fn the_ranks_of_a_node_that_gives_no_answer_are_not_gone() {
    let node = |name: &str, ranks: &[u32], silence: Option<&str>| Node {
        name: name.to_owned(),
        address: None,
        ranks: ranks.to_vec(),
        silence: silence.map(str::to_owned),
    };
    // The places fit a host with ranks 0 to 3. The nodes know better.
    let processes = of_job(&[(0, 0), (1, 1)], Some(4));
    let nodes = vec![node("node 0", &[0, 1, 4], None), node("node 1", &[2, 3, 5, 6, 7], Some("is silent"))];
    assert_eq!(gone(Found { processes, nodes, ..Found::default() }), [4]);
}

/// A script starts the program and then does something else, or the rank was started again.
#[test]
fn a_process_of_a_rank_whose_world_is_there_is_not_waited_for() {
    let processes = of_job(&[(0, 0), (1, 1), (2, 2), (4, 4), (5, 5), (6, 6), (7, 7)], Some(8));
    let mut place = processes[0].place.clone().unwrap();
    place.rank = 3;
    let started = vec![Started { pid: 4711, host: None, place }];
    let text = text_of(Found { processes, started, ..Found::default() });
    assert!(
        text.starts_with(
            "train: rank 3 has a process outside the world: its earlier one has ended, or records nothing; \
             the other 3 ranks have waited in all-reduce 2 of mesh/tp (ranks 0-3) for 12 s\n"
        ),
        "{text}"
    );
    assert!(text.contains("rank 3 (pid 4711) runs and has not joined the world"), "{text}");
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
