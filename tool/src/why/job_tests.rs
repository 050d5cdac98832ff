//! Which processes are one job.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use recording::{Call, ChannelFacts, EntryState, NO_PEER, Operation, Recorder, Snapshot, layout};

use super::super::find::Found;
use super::super::judge_tests::text_of;
use super::super::process::{Origin, Process, State, Timeline};

#[test]
fn programs_that_use_nccl_alone_are_a_job_by_their_communicator() {
    let process = |rank: u32, calls: usize| {
        let words: &'static [AtomicU64] = Vec::leak((0..layout::WORDS).map(|_| AtomicU64::new(0)).collect());
        let recorder = Recorder::new(words, 200 + rank, "alpha", "0.2.0");
        let facts =
            ChannelFacts { kind: 2, key: 5, world: None, rank: rank as usize, members: &[], size: 2, name: "tp" };
        let channel = recorder.open_channel(&facts);
        let all_reduce =
            Call { operation: Operation::AllReduce, dtype: 7, reduction: 0, count: 4, peer: NO_PEER, stream: 0 };
        for _ in 0..calls {
            recorder.end(recorder.begin(channel, &all_reduce), EntryState::Issued);
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.load(Relaxed).to_ne_bytes()).collect();
        let snapshot = Snapshot::of_bytes(&bytes, &bytes, &bytes).unwrap();
        let mut now = snapshot.process.clock.moment();
        now.monotonic += 12_500_000_000;
        now.real += 12_500_000_000;
        now.ticks += 12_500_000_000;
        let timeline = Timeline::new(&snapshot, Some(now), now.real, None);
        let (pid, state, origin) = (200 + rank, State::Sleeps, Origin::Here);
        Process { pid, state, snapshot, bytes, timeline, place: None, origin }
    };
    let text = text_of(Found { processes: vec![process(0, 3), process(1, 2)], ..Found::default() });
    assert!(
        text.starts_with("train: rank 1 has not called all-reduce 3 of tp; rank 0 has waited in it for 12 s"),
        "{text}"
    );
}
