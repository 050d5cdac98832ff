//! What a reader finds of what a recorder has written.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64, fence};

use recording::{
    Call, Channel, ChannelFacts, ChannelState, Entry, EntryState, NO_PEER, Operation, Recorder, Snapshot, Wait,
    WorldFacts, layout, metrics,
};

/// The memory of a recording. It lives as long as the process, as a recording does.
fn memory() -> &'static [AtomicU64] {
    Box::leak((0..layout::WORDS).map(|_| AtomicU64::new(0)).collect::<Vec<_>>().into_boxed_slice())
}

fn recorder(words: &'static [AtomicU64]) -> Recorder {
    Recorder::new(words, 4711, "alpha", "0.2.0")
}

fn copy(words: &[AtomicU64]) -> Vec<u8> {
    fence(SeqCst);
    let bytes = words.iter().flat_map(|word| word.load(Relaxed).to_ne_bytes()).collect();
    fence(SeqCst);
    bytes
}

fn read(words: &[AtomicU64]) -> Snapshot {
    Snapshot::of_bytes(&copy(words), &copy(words), &copy(words)).unwrap()
}

fn facts<'a>(key: u64, name: &'a str, members: &'a [u32]) -> ChannelFacts<'a> {
    ChannelFacts { kind: 0, key, world: None, rank: 1, members, size: members.len(), name }
}

fn all_reduce(count: u64) -> Call {
    Call { operation: Operation::AllReduce, dtype: 7, reduction: 2, count, peer: NO_PEER, stream: 0 }
}

#[test]
fn a_call_is_read_as_it_was_written() {
    let words = memory();
    let recorder = recorder(words);
    let world_facts =
        WorldFacts { key: 77, rank: 5, size: 8, job: "llama", store: "10.0.0.1:29500", launcher: "torchrun" };
    let world = recorder.open_world(&world_facts).unwrap();
    recorder.set_epoch(world, 3);
    let channel = recorder.open_channel(&ChannelFacts { world: Some(world), ..facts(9, "mesh/tp", &[4, 5, 6]) });
    let first = recorder.begin(channel, &all_reduce(1 << 40));
    recorder.end(first, EntryState::Done);
    let send = Call { operation: Operation::Send, peer: 2, stream: 0xabcd, ..all_reduce(3) };
    let _running = recorder.queue(channel, &send);
    let scope = recorder.open_channel(&ChannelFacts { kind: 1, ..facts(10, "the world", &[]) });
    let agreement = recorder.begin_agreement(scope, Operation::Agreement, "dm_init(shape=(2, 4))");
    recorder.end(agreement, EntryState::Failed);

    let snapshot = read(words);
    let process = &snapshot.process;
    assert_eq!((process.pid, process.host.as_str(), process.version.as_str()), (4711, "alpha", "0.2.0"));
    let world = &snapshot.worlds[0];
    assert_eq!((world.key, world.rank, world.size, world.epoch, world.has_ended), (77, 5, 8, 3, false));
    assert_eq!((&*world.job, &*world.store, &*world.launcher), ("llama", "10.0.0.1:29500", "torchrun"));
    let [tp, scope] = &snapshot.channels[..] else { panic!("{:?}", snapshot.channels) };
    assert_eq!((tp.key, tp.rank, tp.size, &*tp.members, &*tp.name), (9, 1, 3, &[4, 5, 6][..], "mesh/tp"));
    assert_eq!((tp.calls_begun, tp.calls_ended, tp.messages_begun, tp.last_call), (1, 1, 1, Some(0)));
    assert_eq!(snapshot.world_of(tp).unwrap().key, 77);
    let calls: Vec<_> = snapshot.calls_of(tp).collect();
    assert_eq!((calls[0].call, calls[0].state, calls[0].in_channel), (all_reduce(1 << 40), EntryState::Done, 1));
    assert!(calls[0].ended.unwrap() >= calls[0].begun);
    assert_eq!((calls[1].call, calls[1].state, calls[1].ended), (send, EntryState::Queued, None));
    assert!(scope.members.is_empty());
    let agreement = snapshot.calls_of(scope).next().unwrap();
    assert_eq!(snapshot.text(agreement), Some("dm_init(shape=(2, 4))"));
    assert_eq!((agreement.state, scope.calls_ended), (EntryState::Failed, 0));
}

#[test]
fn digests_are_equal_for_equal_calls_alone() {
    let words = memory();
    let recorder = recorder(words);
    let open = |key| recorder.open_channel(&facts(key, "mesh/dp", &[0, 1]));
    let calls = [
        [all_reduce(1), all_reduce(2)],
        [all_reduce(1), all_reduce(2)],
        [all_reduce(2), all_reduce(1)],
        [all_reduce(1), Call { dtype: 6, ..all_reduce(2) }],
        [all_reduce(1), Call { operation: Operation::Reduce, peer: 0, ..all_reduce(2) }],
        [all_reduce(1), Call { operation: Operation::Reduce, peer: 1, ..all_reduce(2) }],
    ];
    // The counts of such a call differ between the ranks.
    let ragged = |count| Call { operation: Operation::AllToAllV, ..all_reduce(count) };
    for (key, calls) in calls.iter().enumerate() {
        let channel = open(key as u64);
        let calls = calls.iter().chain([&ragged(key as u64)]).copied().collect::<Vec<_>>();
        calls.iter().for_each(|call| recorder.end(recorder.begin(channel, call), EntryState::Done));
        // Messages differ between the ranks of a group.
        let _ = recorder.begin(channel, &Call { operation: Operation::Recv, peer: 1, ..all_reduce(key as u64) });
    }
    let digests: Vec<u64> = read(words).channels.iter().map(|channel| channel.digest).collect();
    assert_eq!(digests[0], digests[1]);
    for (at, digest) in digests.iter().enumerate().skip(2) {
        assert!(!digests[..at].contains(digest), "{at}: {digests:?}");
    }
}

#[test]
fn the_digest_of_agreements_is_that_of_their_texts() {
    let digest = |earlier: usize, texts: [&str; 2]| {
        let words = memory();
        let recorder = recorder(words);
        let open = |key| recorder.open_channel(&ChannelFacts { kind: 1, ..facts(key, "the world", &[0, 1]) });
        let (other, scope) = (open(1), open(2));
        let agree = |scope, text: &str| {
            recorder.end(recorder.begin_agreement(scope, Operation::Agreement, text), EntryState::Done)
        };
        (0..earlier).for_each(|_| agree(other, "dm_barrier(dim=dp)"));
        texts.iter().for_each(|text| agree(scope, text));
        let snapshot = read(words);
        let last = snapshot.calls_of(&snapshot.channels[1]).next_back().unwrap();
        assert_eq!(snapshot.text(last), Some(texts[1]));
        snapshot.channels[1].digest
    };
    let texts = ["dm_init(shape=(2))", "dm_flatten(dp, tp)"];
    assert_eq!(digest(0, texts), digest(3, texts), "the numbers of the texts do not count");
    assert_ne!(digest(0, texts), digest(0, [texts[1], texts[0]]));
}

#[test]
fn an_agreed_call_goes_on_to_make_communicators() {
    let words = memory();
    let recorder = recorder(words);
    let scope = recorder.open_channel(&ChannelFacts { kind: 1, ..facts(1, "the world", &[0, 1]) });
    let entry = recorder.begin_agreement(scope, Operation::Agreement, "dm_init(shape=(2))");
    recorder.set_operation(entry, Operation::MakeComms);
    let snapshot = read(words);
    let call = snapshot.calls[0];
    assert_eq!((call.call.operation, call.state), (Operation::MakeComms, EntryState::Running));
    assert_eq!(snapshot.text(&call), Some("dm_init(shape=(2))"));
    recorder.end(entry, EntryState::Done);
    recorder.set_operation(Entry::NONE, Operation::MakeComms);
    assert_eq!(read(words).calls.len(), 1);
}

#[test]
fn the_ring_keeps_the_last_calls() {
    let words = memory();
    let recorder = recorder(words);
    let channel = recorder.open_channel(&facts(1, "mesh/dp", &[0]));
    let slow = recorder.begin(channel, &all_reduce(0));
    for count in 1..=3000 {
        recorder.end(recorder.begin(channel, &all_reduce(count)), EntryState::Done);
    }
    // Another call has the place of this one by now, and keeps its state.
    recorder.end(slow, EntryState::Failed);
    let snapshot = read(words);
    let counts: Vec<u64> = snapshot.calls.iter().map(|call| call.call.count).collect();
    assert_eq!(counts, (953..=3000).collect::<Vec<u64>>());
    assert!(snapshot.calls.iter().all(|call| call.state == EntryState::Done));
    assert_eq!(snapshot.channels[0].calls_ended, 3001);
}

#[test]
fn a_closed_group_gives_its_place_away() {
    let words = memory();
    let recorder = recorder(words);
    let open: Vec<Channel> = (0..256).map(|key| recorder.open_channel(&facts(key, "mesh/dp", &[0, 1]))).collect();
    assert_eq!(recorder.open_channel(&facts(256, "one too many", &[0, 1])), Channel::NONE);
    let entry = recorder.begin(Channel::NONE, &all_reduce(1));
    recorder.end(entry, EntryState::Done);
    recorder.end(Entry::NONE, EntryState::Done);
    assert_eq!((read(words).process.channels_left_out, read(words).calls.len()), (1, 0));
    recorder.end(recorder.begin(open[7], &all_reduce(1)), EntryState::Done);
    recorder.set_channel_state(open[7], ChannelState::Closed);
    let new = recorder.open_channel(&facts(999, "mesh/cp", &[3, 4]));
    recorder.end(recorder.begin(new, &all_reduce(5)), EntryState::Done);
    let snapshot = read(words);
    let channel = snapshot.channels.iter().find(|channel| channel.key == 999).unwrap();
    assert_eq!((channel.calls_begun, &*channel.members), (1, &[3, 4][..]));
    assert_eq!(snapshot.calls_of(channel).map(|call| call.call.count).collect::<Vec<_>>(), [5]);
    // 256 groups of the same two members take one word.
    assert_eq!(words[layout::header::MEMBERS_USED].load(Relaxed), 2);
}

#[test]
fn members_that_do_not_fit_are_left_out() {
    let words = memory();
    let recorder = recorder(words);
    let many: Vec<u32> = (0..9000).collect();
    recorder.open_channel(&facts(1, "mesh/all", &many));
    recorder.open_channel(&facts(2, "mesh/most", &many[..8191]));
    recorder.open_channel(&facts(3, "mesh/none", &many[10..14]));
    let sizes: Vec<_> = read(words).channels.iter().map(|it| (it.size, it.members.len())).collect();
    assert_eq!(sizes, [(9000, 0), (8191, 8191), (4, 4)], "the last ones stand inside the ones before");
}

/// A job that recovers again and again makes groups of other members each time.
#[test]
fn the_members_of_closed_groups_give_way_to_those_of_new_ones() {
    let words = memory();
    let recorder = Recorder::new(words, 1, "alpha", "0.2.0");
    recorder.open_channel(&facts(1, "the world", &[0, 1, 2, 3]));
    let most = layout::MEMBER_WORDS as u32 * 2;
    for round in 0..50 {
        let key = 2 + u64::from(round);
        // The first half of the members fits beside the world's once.
        let members: Vec<u32> = (0..most / 2 + 100).map(|member| member * 100 + round).collect();
        let group = recorder.open_channel(&facts(key, "mesh/dp", &members));
        let channels = read(words).channels;
        let of_key =
            |key: u64| channels.iter().find(|channel| channel.key == key).map(|channel| channel.members.to_vec());
        assert_eq!(of_key(1).unwrap(), [0, 1, 2, 3]);
        assert!(of_key(key).unwrap() == members, "round {round}");
        // The group before has no members, and not those of another group.
        assert!(round == 0 || of_key(key - 1).unwrap_or_default().is_empty(), "round {round}");
        recorder.set_channel_state(group, ChannelState::Closed);
    }
}

/// Each group of a recording may name all members.
#[test]
fn groups_share_the_memory_of_their_members() {
    let words = memory();
    let recorder = recorder(words);
    let many: Vec<u32> = (0..8192).collect();
    for key in 0..256 {
        recorder.open_channel(&facts(key, "mesh/all", &many));
    }
    let channels = read(words).channels;
    assert!(channels.iter().all(|channel| *channel.members == many[..]));
    assert!(channels.iter().all(|channel| channel.members.as_ptr() == channels[0].members.as_ptr()));
}

#[test]
fn a_reader_sees_no_half_of_a_call() {
    let words = memory();
    let recorder = recorder(words);
    let channel = recorder.open_channel(&facts(1, "mesh/dp", &[0]));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The values of a call belong together: the count is that of the number in the channel.
            for count in (1..).take_while(|_| !is_over.load(Relaxed)) {
                recorder.end(recorder.begin(channel, &all_reduce(count)), EntryState::Done);
                // Without a pause the writer could change every slot while a slow reader copies.
                if count % 64 == 0 {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
            }
        });
        // On a busy machine, the writer may begin later than all snapshots are made.
        while read(words).calls.is_empty() {
            std::thread::yield_now();
        }
        let snapshots: Vec<Snapshot> = (0..50).map(|_| read(words)).collect();
        // The writer ends before anything is compared: a failure must not leave it running.
        is_over.store(true, Relaxed);
        let calls = || snapshots.iter().flat_map(|snapshot| &snapshot.calls);
        let torn: Vec<_> = calls().filter(|call| call.call.count != call.in_channel).collect();
        assert!(torn.is_empty(), "{} of {}, the first: {:?}", torn.len(), calls().count(), torn[0]);
    });
    let last = read(words).calls;
    assert!(!last.is_empty() && last.iter().all(|call| call.call.count == call.in_channel));
}

#[test]
fn what_is_no_recording_is_refused_or_read_without_harm() {
    let words = memory();
    recorder(words);
    let good = copy(words);
    assert!(Snapshot::of_bytes(&good, &good[..100], &good).unwrap_err().to_string().contains("too short"));
    assert!(Snapshot::of_bytes(&good, &vec![0; good.len()], &good).unwrap_err().to_string().contains("no recording"));
    // Garbage behind a good beginning: a simple generator of numbers (Knuth's LCG) fills the rest.
    let mut state = 1u64;
    for _ in 0..20 {
        let mut bytes = good.clone();
        for byte in &mut bytes[16..] {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
        let snapshot = Snapshot::of_bytes(&bytes, &bytes, &bytes).unwrap();
        assert!(snapshot.channels.iter().all(|channel| snapshot.calls_of(channel).count() <= layout::CALL_COUNT));
    }
}

#[test]
fn a_digest_counts_when_all_calls_of_its_group_have_ended_well() {
    let words = memory();
    let recorder = recorder(words);
    let channel = recorder.open_channel(&facts(1, "mesh/dp", &[0, 1]));
    assert_eq!(recorder.settled_digest(channel), Some(0));
    let first = recorder.begin(channel, &all_reduce(8));
    assert_eq!(recorder.settled_digest(channel), None, "a call runs");
    recorder.end(first, EntryState::Issued);
    let digest = recorder.settled_digest(channel).unwrap();
    assert_eq!(all_reduce(8).digest_before(digest), 0);
    // Ranks may leave these out.
    let own = Call { operation: Operation::Custom, ..all_reduce(3) };
    for call in [all_reduce(0), own, Call { operation: Operation::Send, peer: 1, ..all_reduce(2) }] {
        recorder.end(recorder.begin(channel, &call), EntryState::Done);
    }
    assert_eq!(recorder.settled_digest(channel), Some(digest));
    recorder.end(recorder.begin(channel, &all_reduce(8)), EntryState::Failed);
    assert_eq!(recorder.settled_digest(channel), None, "a call has failed");
    recorder.end(recorder.begin(channel, &all_reduce(8)), EntryState::Done);
    assert_eq!(recorder.settled_digest(channel), None, "the failed call may have been made again");
    let recorded = &read(words).channels[0];
    assert_eq!((recorded.calls_begun, recorded.messages_begun, recorded.calls_failed), (4, 2, 1));

    recorder.set_channel_state(channel, ChannelState::Closed);
    assert_eq!((recorder.settled_digest(channel), recorder.settled_digest(Channel::NONE)), (None, None));
}

/// Two threads may call at the same time, and the later call may end first.
#[test]
fn no_digest_counts_while_an_earlier_call_runs() {
    let recorder = recorder(memory());
    let [channel, other] = [1, 2].map(|key| recorder.open_channel(&facts(key, "mesh/dp", &[0, 1])));
    let first = recorder.begin(channel, &all_reduce(8));
    recorder.end(recorder.begin(channel, &all_reduce(4)), EntryState::Done);
    assert_eq!(recorder.settled_digest(channel), None, "the first call runs");
    recorder.end(first, EntryState::Done);
    // Calls of other groups and messages do not count.
    let _running = recorder.begin(other, &all_reduce(8));
    let _message = recorder.begin(channel, &Call { operation: Operation::Recv, peer: 1, ..all_reduce(2) });
    assert!(recorder.settled_digest(channel).is_some());
}

/// A world that has ended gives its place away when no other place is left, and its groups are
/// closed but recorded.
#[test]
fn a_group_of_an_ended_world_does_not_pass_to_the_next_world() {
    let words = memory();
    let recorder = recorder(words);
    let join = |key, job| {
        let facts = WorldFacts { key, rank: key as usize, size: 10, job, store: "", launcher: "torchrun" };
        recorder.open_world(&facts).unwrap()
    };
    let call = |world, key| {
        let channel = recorder.open_channel(&ChannelFacts { world: Some(world), ..facts(key, "mesh/tp", &[0, 1]) });
        recorder.end(recorder.begin(channel, &all_reduce(1)), EntryState::Done);
        channel
    };
    let first = join(1, "one");
    let closed = call(first, 9);
    recorder.set_channel_state(closed, ChannelState::Closed);
    let others: Vec<_> = (2..9).map(|key| join(key, "others")).collect();
    recorder.close_world(others[3]);
    recorder.close_world(first);
    let ended = read(words);
    assert_eq!(ended.world_of(&ended.channels[0]).unwrap().key, 1, "the place is not taken yet");
    let ninth = join(9, "ninth");
    call(ninth, 10);

    let snapshot = read(words);
    let numbers: Vec<u64> = snapshot.worlds.iter().map(|world| world.number).collect();
    assert_eq!(numbers, [9, 2, 3, 4, 5, 6, 7, 8], "the world that was joined first has given its place away");
    let of: Vec<_> = snapshot.channels.iter().map(|channel| snapshot.world_of(channel).map(|it| it.key)).collect();
    assert_eq!(of, [None, Some(9)]);
    let text = metrics::text(&[metrics::Source { snapshot: &snapshot, pid: 12, now: None }]);
    let begun: Vec<&str> = text.lines().filter(|line| line.starts_with("devicemesh_calls_begun_total{")).collect();
    let labels = r#"pid="12",host="alpha",job_id="ninth",rank="9",group="mesh/tp",kind="dimension""#;
    assert_eq!(begun, [format!("devicemesh_calls_begun_total{{{labels}}} 1")]);

    // The first world ends once, and its end does not concern the world in its place.
    recorder.close_world(first);
    assert!(!read(words).worlds[0].has_ended);
    recorder.set_epoch(others[0], 4);
    assert_eq!(read(words).worlds[1].epoch, 4);
}

#[test]
fn an_extract_is_read_back_as_a_recording() {
    let words = memory();
    let recorder = recorder(words);
    let world = |key| WorldFacts { key, rank: 5, size: 8, job: "llama", store: "10.0.0.1:29500", launcher: "torchrun" };
    let (first, second) = (recorder.open_world(&world(77)).unwrap(), recorder.open_world(&world(78)).unwrap());
    let open = |key, name, world| recorder.open_channel(&ChannelFacts { world, ..facts(key, name, &[4, 5, 6]) });
    let (tp, dp) = (open(9, "mesh/tp", Some(first)), open(10, "mesh/dp", Some(first)));
    let other = open(11, "mesh/pp", Some(second));
    open(12, "mesh_tp", None);
    for count in 1..=40 {
        recorder.end(recorder.begin(tp, &all_reduce(count)), EntryState::Done);
        recorder.end(recorder.begin(other, &all_reduce(count)), EntryState::Done);
    }
    let _running = recorder.begin(dp, &all_reduce(1 << 40));
    let agreement = recorder.begin_agreement(dp, Operation::Barrier, "dm_barrier(dim=tp)");
    recorder.end(agreement, EntryState::Done);

    let (snapshot, memory) = (read(words), copy(words));
    let extract = |wanted: &dyn Fn(&recording::RecordedCall) -> bool| {
        recording::extract(&snapshot, &memory, &snapshot.worlds[0], wanted)
    };
    let bytes = extract(&|call| call.in_channel > 38 || call.channel == 1);
    assert!(bytes.len() < 1500, "{} bytes", bytes.len());
    let back = recording::of_extract(&bytes).unwrap();
    assert_eq!((back.process.pid, &*back.process.host), (4711, "alpha"));
    assert_eq!(back.worlds.iter().map(|world| (world.key, world.rank)).collect::<Vec<_>>(), [(77, 5)]);
    let names: Vec<&str> = back.channels.iter().map(|channel| &*channel.name).collect();
    assert_eq!(names, ["mesh/tp", "mesh/dp", "mesh_tp"]);
    for (known, channel) in [(&snapshot.channels[0], &back.channels[0]), (&snapshot.channels[1], &back.channels[1])] {
        assert_eq!(
            (&known.members, known.digest, known.calls_begun),
            (&channel.members, channel.digest, channel.calls_begun)
        );
    }
    let counts: Vec<u64> = back.calls_of(&back.channels[0]).map(|call| call.call.count).collect();
    assert_eq!(counts, [39, 40]);
    let of_dp: Vec<_> = back.calls_of(&back.channels[1]).collect();
    assert_eq!((of_dp[0].state, of_dp[0].call), (EntryState::Running, all_reduce(1 << 40)));
    assert_eq!(back.text(of_dp[1]), Some("dm_barrier(dim=tp)"));
    assert!(recording::of_extract(&extract(&|_| false)).unwrap().calls.is_empty());

    // Bytes that are no extract are none, whatever they say.
    for end in 0..bytes.len() {
        let _ = recording::of_extract(&bytes[..end]);
    }
    assert!(recording::of_extract(&bytes[..bytes.len() - 1]).is_none());
    for bytes in
        [&b""[..], b"\0\x01\0", &[0xff; 30], &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0xff, 1]]
    {
        assert!(recording::of_extract(bytes).is_none(), "{bytes:?}");
    }
}

#[test]
fn a_process_finds_its_own_calls_that_run() {
    let words = memory();
    let recorder = recorder(words);
    let channel = recorder.open_channel(&facts(9, "mesh/tp", &[4, 5]));
    let done = recorder.begin(channel, &all_reduce(1));
    recorder.end(done, EntryState::Done);
    let running = recorder.begin(channel, &all_reduce(2));
    let _queued = recorder.queue(channel, &all_reduce(3));
    let issued = recorder.begin(channel, &all_reduce(4));
    recorder.end(issued, EntryState::Issued);
    std::thread::sleep(std::time::Duration::from_millis(20));
    let numbers = |launched: &[Entry]| {
        let mut numbers: Vec<u64> = recorder.running(launched).iter().map(|call| call.number).collect();
        numbers.sort_unstable();
        numbers
    };
    assert_eq!(numbers(&[]), [1]);
    assert_eq!(numbers(&[done, issued]), [1, 3], "a stream has not ended the call that was issued");
    let time = recorder.running(&[])[0].time;
    assert!(time.as_millis() >= 20 && time.as_secs() < 600, "{time:?}");
    recorder.end(running, EntryState::Done);
    assert_eq!(numbers(&[]), []);
    assert_eq!(recorder.snapshot().unwrap().calls.len(), 4);

    // Each call has the place of its group, and the calls of a closed group do not count.
    let other = recorder.open_channel(&facts(10, "mesh/dp", &[4, 6]));
    let (_first, _second) = (recorder.begin(channel, &all_reduce(5)), recorder.begin(other, &all_reduce(6)));
    let groups = || recorder.running(&[]).iter().map(|call| (call.number, call.group)).collect::<Vec<_>>();
    assert_eq!(groups(), [(4, 0), (5, 1)]);
    recorder.set_channel_state(channel, ChannelState::Closed);
    assert_eq!(groups(), [(5, 1)]);
}

/// The program may have other work while it puts calls into a group.
#[test]
fn queued_calls_begin_when_their_group_runs() {
    let words = memory();
    let recorder = recorder(words);
    let channel = recorder.open_channel(&facts(9, "mesh/tp", &[4, 5]));
    let [first, second] = [1, 2].map(|count| recorder.queue(channel, &all_reduce(count)));
    let times = || read(words).calls.iter().map(|call| (call.state, call.begun)).collect::<Vec<_>>();
    let [(EntryState::Queued, _), (EntryState::Queued, queued)] = times()[..] else { panic!("{:?}", times()) };
    let after = read(words).process.clock.ticks();
    recorder.start([Entry::NONE, first, second]);
    let [(EntryState::Running, one), (EntryState::Running, other)] = times()[..] else { panic!("{:?}", times()) };
    assert!(queued <= after && after <= one && one == other, "{queued}, {after}, {one}, {other}");
    // A call that waits for nobody has one time, and this is not the time at which it was queued.
    recorder.end_after(first, EntryState::Done, Wait::None);
    assert_eq!(read(words).calls[0].ended, Some(one));
}

#[test]
fn counters_are_text_for_prometheus() {
    let words = memory();
    let recorder = recorder(words);
    let world_facts = WorldFacts { key: 77, rank: 5, size: 8, job: "ll\"ama\\\n", store: "", launcher: "torchrun" };
    let world = recorder.open_world(&world_facts).unwrap();
    recorder.set_epoch(world, 3);
    let of_world = |key, name| recorder.open_channel(&ChannelFacts { world: Some(world), ..facts(key, name, &[4, 5]) });
    let (tp, dp) = (of_world(9, "mesh/tp"), of_world(10, "mesh/dp"));
    for _ in 0..3 {
        let call = recorder.begin(tp, &all_reduce(1));
        recorder.end(call, EntryState::Done);
    }
    let _running = recorder.begin(tp, &all_reduce(1));
    let message = recorder.begin(dp, &Call { operation: Operation::Send, peer: 0, ..all_reduce(1) });
    recorder.end(message, EntryState::Done);
    // A later group with the same labels is added, as after a communicator has been made anew.
    recorder.set_channel_state(dp, ChannelState::Closed);
    let again = of_world(11, "mesh/dp");
    let call = recorder.begin(again, &all_reduce(1));
    recorder.end(call, EntryState::Done);
    std::thread::sleep(std::time::Duration::from_millis(20));

    let snapshot = read(words);
    let now = snapshot.process.clock.moment();
    let source = metrics::Source { snapshot: &snapshot, pid: 12, now: Some(now) };
    let text = metrics::text(&[source]);
    let of = |group: &str| {
        format!(r#"{{pid="12",host="alpha",job_id="ll\"ama\\\n",rank="5",group="mesh/{group}",kind="dimension"}}"#)
    };
    let lines: Vec<&str> = text.lines().collect();
    for line in [
        r#"devicemesh_process_info{pid="12",host="alpha",version="0.2.0"} 1"#.to_owned(),
        r#"devicemesh_recorded_calls_total{pid="12",host="alpha"} 6"#.to_owned(),
        r#"devicemesh_unrecorded_groups_total{pid="12",host="alpha"} 0"#.to_owned(),
        r#"devicemesh_world_size{pid="12",host="alpha",job_id="ll\"ama\\\n",rank="5"} 8"#.to_owned(),
        r#"devicemesh_world_epoch{pid="12",host="alpha",job_id="ll\"ama\\\n",rank="5"} 3"#.to_owned(),
        format!("devicemesh_calls_begun_total{} 4", of("tp")),
        format!("devicemesh_calls_ended_total{} 3", of("tp")),
        format!("devicemesh_calls_begun_total{} 1", of("dp")),
        format!("devicemesh_messages_begun_total{} 1", of("dp")),
        format!("devicemesh_running_call_seconds{} 0", of("dp")),
    ] {
        assert!(lines.contains(&line.as_str()), "{line} is not in\n{text}");
    }
    let running = format!("devicemesh_running_call_seconds{} ", of("tp"));
    let seconds: f64 = lines.iter().find_map(|line| line.strip_prefix(&running)).unwrap().parse().unwrap();
    assert!((0.02..600.0).contains(&seconds), "{text}");
    // Each metric has its help and its type before its samples, once.
    for line in lines.iter().filter(|line| !line.starts_with('#')) {
        let name = line.split('{').next().unwrap();
        let of_name = |prefix: &str| lines.iter().position(|line| line.starts_with(&format!("# {prefix} {name} ")));
        let at = lines.iter().position(|other| other == line);
        assert!(of_name("HELP") < of_name("TYPE") && of_name("TYPE") < at, "{line}\n{text}");
    }
    // Processes of two hosts may have one number.
    let mut other = snapshot.clone();
    other.process.host = "beta".to_owned();
    let both = metrics::text(&[source, metrics::Source { snapshot: &other, ..source }]);
    for line in lines.iter().filter(|line| line.contains("{") && !line.contains(&running)) {
        let of_other = line.replace(r#"host="alpha""#, r#"host="beta""#);
        assert!(
            both.lines().any(|it| it == *line) && both.lines().any(|it| it == of_other),
            "{line} is not in\n{both}"
        );
    }
    let ended = metrics::text(&[metrics::Source { now: None, ..source }]);
    assert!(!ended.contains("devicemesh_running_call_seconds{"), "{ended}");
}

#[test]
fn a_brief_call_gets_its_times_from_its_wait() {
    let words = memory();
    let recorder = recorder(words);
    let channel = recorder.open_channel(&facts(1, "mesh/tp", &[0, 1]));
    let earlier = recorder.begin(channel, &all_reduce(1));
    recorder.end(earlier, EntryState::Done);
    let times = |entry: Entry| {
        let snapshot = read(words);
        let call = *snapshot.calls.iter().find(|call| call.number == entry.number()).unwrap();
        (call.state, call.begun, call.ended)
    };
    let (_, _, earlier) = times(earlier);

    // A process that is stopped before the look at the clock is in the call all the same.
    let waits = recorder.begin_untimed(channel, &all_reduce(2));
    assert_eq!(times(waits), (EntryState::Running, earlier.unwrap(), None));
    assert_eq!(read(words).channels[0].calls_begun, 2);
    recorder.set_begun(waits.number());
    let (_, begun, _) = times(waits);
    assert!(begun > earlier.unwrap());
    recorder.set_begun(waits.number());
    assert_eq!(times(waits), (EntryState::Running, begun, None), "the first look counts");
    recorder.end_after(waits, EntryState::Done, Wait::Until(begun + 5));
    assert_eq!(times(waits), (EntryState::Done, begun, Some(begun + 5)));

    // A call that does not wait has one time, and an end that nobody has looked at is looked at.
    let at_once = recorder.begin_untimed(channel, &all_reduce(3));
    recorder.end_after(at_once, EntryState::Done, Wait::None);
    let (state, began, ended) = times(at_once);
    assert_eq!((state, ended), (EntryState::Done, Some(began)));
    assert!(began > begun);
    let unknown = recorder.begin_untimed(channel, &all_reduce(4));
    recorder.set_begun(unknown.number());
    recorder.end_after(unknown, EntryState::Done, Wait::Unknown);
    let (_, begun, ended) = times(unknown);
    assert!(ended.unwrap() > begun && begun > began);

    // The end of a call that is not brief is exact.
    let long = recorder.begin(channel, &all_reduce(5));
    let (_, begun, _) = times(long);
    recorder.end_after(long, EntryState::Done, Wait::Until(begun + 5));
    assert!(times(long).2.unwrap() > begun + 5);
    let failed = recorder.begin_untimed(channel, &all_reduce(6));
    recorder.end(failed, EntryState::Failed);
    let (state, begun, ended) = times(failed);
    assert_eq!((state, ended), (EntryState::Failed, Some(begun)));
    // The place of a call that later calls have taken is not written to.
    for _ in 0..layout::CALL_COUNT {
        let _running = recorder.begin_untimed(channel, &all_reduce(7));
    }
    recorder.set_begun(failed.number());
    recorder.end_after(failed, EntryState::Done, Wait::None);
    assert!(read(words).calls.iter().all(|call| call.state == EntryState::Running));
}
