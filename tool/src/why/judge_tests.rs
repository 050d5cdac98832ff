//! What is said of jobs of eight ranks that hang in every way. The recordings are written by the
//! recorder itself.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use recording::{
    Call, Channel, ChannelFacts, ChannelState, EntryState, NO_PEER, Operation, Recorder, Snapshot, WorldFacts, layout,
};

use super::find::Found;
use super::job::jobs;
use super::judge::{Kind, judge};
use super::lines::Lines;
use super::process::{Origin, Process, State, Timeline};
use super::report;
use super::stack::Stacks;
use crate::style::Style;
use devicemesh::rendezvous::launcher::Place;

/// The key of the world.
const WORLD: u64 = 77;

/// One rank of a job with the mesh (dp=2, tp=4).
pub(super) struct Rank {
    words: &'static [AtomicU64],
    recorder: Recorder,
    state: State,
    /// The number of ranks on each host.
    local_size: usize,
    pub(super) rank: u32,
    tp: Channel,
    dp: Channel,
    scope: Channel,
}

impl Rank {
    fn new(rank: u32) -> Rank {
        let words = Vec::leak((0..layout::WORDS).map(|_| AtomicU64::new(0)).collect());
        let recorder = Recorder::new(words, 100 + rank, "alpha", "0.2.0");
        let world_facts = WorldFacts {
            key: WORLD,
            rank: rank as usize,
            size: 8,
            job: "train",
            store: "",
            launcher: "devicemesh run",
        };
        let world = recorder.open_world(&world_facts);
        let (row, column) = (rank / 4, rank % 4);
        let open = |kind, key, rank: u32, members: &[u32], name| {
            recorder.open_channel(&ChannelFacts {
                kind,
                key,
                world,
                rank: rank as usize,
                members,
                size: members.len(),
                name,
            })
        };
        let scope = open(1, 1, rank, &[0, 1, 2, 3, 4, 5, 6, 7], "the world");
        let tp = open(0, 10 + u64::from(row), column, &[0, 1, 2, 3].map(|at| row * 4 + at), "mesh/tp");
        let dp = open(0, 20 + u64::from(column), row, &[column, column + 4], "mesh/dp");
        Rank { words, recorder, state: State::Sleeps, local_size: 8, rank, tp, dp, scope }
    }

    /// Makes this many all-reduces from beginning to end.
    fn done(&self, channel: Channel, times: usize) {
        for _ in 0..times {
            self.ends(channel, &all_reduce(4), EntryState::Done);
        }
    }

    /// Begins a call that does not end.
    fn begin(&self, channel: Channel, call: &Call) {
        let _ = self.recorder.begin(channel, call);
    }

    /// Begins a call that ends in this state.
    fn ends(&self, channel: Channel, call: &Call, state: EntryState) {
        self.recorder.end(self.recorder.begin(channel, call), state);
    }

    pub(super) fn process(&self) -> Process {
        let bytes: Vec<u8> = self.words.iter().flat_map(|word| word.load(Relaxed).to_ne_bytes()).collect();
        let snapshot = Snapshot::of_bytes(&bytes, &bytes, &bytes).unwrap();
        // Calls that began in the first 0.9 s of the recording are between 12 and 13 s old.
        const AGE: u64 = 12_900_000_000;
        let began = snapshot.process.began;
        let tick = began.nanoseconds_per_tick(&snapshot.process.clock.moment()).unwrap_or(1.0);
        let mut now = began;
        now.monotonic += AGE;
        now.real += AGE;
        now.ticks += (AGE as f64 / tick) as u64;
        let mut timeline = Timeline::new(&snapshot, Some(now), now.real, None);
        timeline.until = now.real;
        let rank = self.rank as usize;
        let mut place = Place::new("devicemesh run", rank, 8, Some(rank % self.local_size));
        place.local_size = Some(self.local_size);
        let (pid, place, origin) = (100 + self.rank, Some(place), Origin::Here);
        Process { pid, state: self.state, snapshot, bytes, timeline, place, program: String::new(), origin }
    }
}

fn all_reduce(count: u64) -> Call {
    Call { operation: Operation::AllReduce, dtype: 7, reduction: 0, count, peer: NO_PEER, stream: 0 }
}

/// Eight ranks, of which rank 3 has not made call 2 of mesh/tp.
pub(super) fn a_rank_behind() -> Vec<Rank> {
    let ranks = ranks();
    for rank in &ranks {
        rank.done(rank.tp, 1);
        if rank.rank < 4 && rank.rank != 3 {
            rank.begin(rank.tp, &all_reduce(4));
        }
    }
    ranks
}

fn ranks() -> Vec<Rank> {
    (0..8).map(Rank::new).collect()
}

/// What is said of the job: the first finding's kind and ranks, and the whole text.
fn said(ranks: &[&Rank]) -> (Option<(Kind, Vec<u32>)>, String) {
    let found = Found { processes: ranks.iter().map(|rank| rank.process()).collect(), ..Found::default() };
    let jobs = jobs(found);
    let [job] = &jobs[..] else { panic!("{} jobs", jobs.len()) };
    let verdict = judge(job, 1.0);
    let text = report::text(&verdict, &Stacks::default(), 1.0, "train", None, Style { colour: false });
    let first = verdict.findings.first();
    (first.map(|first| (first.kind, first.ranks.iter().map(|rank| job.ranks[*rank].number).collect())), text)
}

/// Returns in words what is said of the findings.
pub(super) fn text_of(found: Found) -> String {
    let jobs = jobs(found);
    let [job] = &jobs[..] else { panic!("{} jobs", jobs.len()) };
    report::text(&judge(job, 1.0), &Stacks::default(), 1.0, "train", None, Style { colour: false })
}

fn headline(ranks: &[Rank], kind: Kind, culprits: &[u32], expected: &str) {
    let all: Vec<&Rank> = ranks.iter().collect();
    let (first, text) = said(&all);
    assert_eq!(first, Some((kind, culprits.to_vec())), "{text}");
    let line = text.lines().next().unwrap();
    assert!(line.starts_with("train: ") && line.contains(expected), "expected {expected:?}: {text}");
}

#[test]
fn nothing_is_stuck() {
    let ranks = ranks();
    ranks.iter().for_each(|rank| rank.done(rank.tp, 3));
    let all: Vec<&Rank> = ranks.iter().collect();
    let (first, text) = said(&all);
    assert_eq!(first, None, "{text}");
    assert!(text.starts_with("train: nothing is stuck: no rank has waited for 1.0 s\n"), "{text}");
    assert!(text.contains("mesh/tp  0-7       3  all-reduce of 4 float32 (sum)  done"), "{text}");
}

#[test]
fn a_rank_that_has_skipped_a_call_is_behind() {
    let ranks = ranks();
    for rank in &ranks {
        rank.done(rank.tp, 5);
        if rank.rank != 6 {
            rank.begin(rank.tp, &all_reduce(4));
        }
    }
    // Ranks 0 to 3 are all in their call, and rank 6 is missing in the other group.
    headline(
        &ranks,
        Kind::Behind,
        &[6],
        "rank 6 has not called all-reduce 6 of mesh/tp (ranks 4-7); the other 3 ranks have waited",
    );
}

#[test]
fn the_root_of_a_chain_is_named() {
    let ranks = ranks();
    for rank in &ranks {
        match rank.rank {
            // Rank 1 computes. Rank 5 waits for it in dp, and the others of its group for rank 5.
            1 => rank.done(rank.dp, 1),
            5 => {
                rank.done(rank.dp, 1);
                rank.begin(rank.dp, &all_reduce(4));
            }
            4 | 6 | 7 => rank.begin(rank.tp, &all_reduce(4)),
            _ => {}
        }
    }
    headline(
        &ranks,
        Kind::Behind,
        &[1],
        "rank 1 has not called all-reduce 2 of mesh/dp (ranks 1, 5); rank 5 has waited in it for 12 s; 3 more ranks wait for these in other groups",
    );
}

#[test]
fn a_rank_that_does_not_come_to_an_agreement_is_named() {
    let ranks = ranks();
    for rank in ranks.iter().filter(|rank| rank.rank != 3) {
        let _ = rank.recorder.begin_agreement(rank.scope, Operation::Agreement, "dm_flatten(dims=(dp, tp))");
    }
    headline(
        &ranks,
        Kind::Behind,
        &[3],
        "rank 3 has not called dm_flatten(dims=(dp, tp)); the other 7 ranks have waited in it for 12 s",
    );
}

#[test]
fn other_counts_are_the_first_difference() {
    let ranks = ranks();
    for rank in ranks.iter().take(4) {
        rank.done(rank.tp, 2);
        let count = if rank.rank == 2 { 8 } else { 4 };
        rank.ends(rank.tp, &all_reduce(count), EntryState::Done);
        rank.begin(rank.tp, &all_reduce(4));
    }
    let expected = "rank 2 calls all-reduce of 8 float32 (sum) as call 3 of mesh/tp (ranks 0-3), and the other 3 ranks call all-reduce of 4 float32 (sum)";
    headline(&ranks, Kind::Differs, &[2], expected);
}

#[test]
fn crossed_dimensions_are_a_circle() {
    let ranks = ranks();
    // Rank 0 waits in dp for rank 4, rank 4 in tp for rank 5, and so on: 5 in dp for 1, 1 in tp
    // for 0.
    for rank in [0, 5] {
        ranks[rank].begin(ranks[rank].dp, &all_reduce(4));
    }
    for rank in [1, 2, 3, 4, 6, 7] {
        ranks[rank].begin(ranks[rank].tp, &all_reduce(4));
    }
    let all: Vec<&Rank> = ranks.iter().collect();
    let (first, text) = said(&all);
    assert_eq!(first.unwrap().0, Kind::Crossed, "{text}");
    assert!(text.starts_with("train: two dimensions are crossed: rank 0 waits in all-reduce 1 of mesh/dp (ranks 0, 4) for rank 4, rank 4 waits in all-reduce 1 of mesh/tp"), "{text}");
}

#[test]
fn a_stopped_rank_is_named_even_inside_the_call() {
    let mut ranks = ranks();
    ranks.iter().take(4).for_each(|rank| rank.begin(rank.tp, &all_reduce(4)));
    ranks[2].state = State::Stopped;
    headline(
        &ranks,
        Kind::Stopped,
        &[2],
        "rank 2 is stopped by a signal (`kill -CONT 102` continues it); the other 3 ranks have waited in all-reduce 1 of mesh/tp (ranks 0-3) for 12 s",
    );
}

#[test]
fn a_rank_whose_process_is_gone_has_died() {
    let ranks = ranks();
    ranks.iter().for_each(|rank| rank.begin(rank.tp, &all_reduce(4)));
    let living: Vec<&Rank> = ranks.iter().filter(|rank| rank.rank != 6).collect();
    let (first, text) = said(&living);
    assert_eq!(first, Some((Kind::Gone, vec![6])), "{text}");
    assert!(
        text.contains("rank 6 has died: its process is gone; the other 3 ranks have waited in all-reduce 1 of mesh/tp"),
        "{text}"
    );
    assert!(text.contains("rank 6 has no process on this host"), "{text}");
}

#[test]
fn ranks_of_other_hosts_are_not_called_dead() {
    let mut ranks = ranks();
    ranks.truncate(4);
    for rank in &mut ranks {
        rank.local_size = 4;
        let _ = rank.recorder.begin_agreement(rank.scope, Operation::Barrier, "dm_barrier()");
    }
    headline(
        &ranks,
        Kind::Elsewhere,
        &[0, 1, 2, 3],
        "ranks 0-3 have waited in dm_barrier() for 12 s for ranks 4-7, which are not seen on this host",
    );
    // A rank of this host that is missing, too, is the one that is named.
    let three: Vec<&Rank> = ranks.iter().take(3).collect();
    let (first, text) = said(&three);
    assert_eq!(first, Some((Kind::Gone, vec![3])), "{text}");
}

#[test]
fn an_open_group_of_calls_is_named() {
    let ranks = ranks();
    for rank in &ranks[..4] {
        match rank.rank {
            1 => {
                let _ = rank.recorder.queue(rank.tp, &all_reduce(4));
            }
            _ => rank.begin(rank.tp, &all_reduce(4)),
        }
    }
    headline(
        &ranks,
        Kind::Queued,
        &[1],
        "rank 1 has put all-reduce 1 of mesh/tp (ranks 0-3) into a group of calls and has not ended the group; the other 3 ranks",
    );
}

/// All calls of a group of calls run from the moment at which the group has ended. So the oldest
/// call of a rank need not be the one in which a rank is missing.
#[test]
fn a_rank_that_is_missing_in_the_newest_of_several_running_calls_is_named() {
    let ranks = ranks();
    for rank in &ranks[..4] {
        match rank.rank {
            3 => rank.done(rank.tp, 1),
            _ => (0..2).for_each(|_| rank.begin(rank.tp, &all_reduce(4))),
        }
    }
    headline(
        &ranks,
        Kind::Behind,
        &[3],
        "rank 3 has not called all-reduce 2 of mesh/tp (ranks 0-3); the other 3 ranks have waited in it for 12 s",
    );
}

#[test]
fn a_call_in_which_nobody_is_missing_is_slow() {
    let ranks = ranks();
    ranks.iter().take(4).for_each(|rank| rank.begin(rank.tp, &all_reduce(1 << 30)));
    headline(
        &ranks,
        Kind::Slow,
        &[0, 1, 2, 3],
        "all of ranks 0-3 have been in all-reduce 1 of mesh/tp (ranks 0-3) for 12 s, and no rank is missing",
    );
}

#[test]
fn a_message_that_nobody_sends_is_named() {
    let ranks = ranks();
    let receive = Call { operation: Operation::Recv, reduction: 0, peer: 1, ..all_reduce(4) };
    ranks[0].begin(ranks[0].tp, &receive);
    headline(
        &ranks,
        Kind::NoMessage,
        &[1],
        "rank 1 does not send; rank 0 has waited in recv 1 of mesh/tp (ranks 0-3) for 12 s",
    );
    ranks[0].done(ranks[0].tp, 1);
    ranks[1].begin(ranks[1].tp, &Call { operation: Operation::Send, peer: 0, ..receive });
    let said = |kind: &str| format!("in {kind} 1 of mesh/tp (ranks 0-3) for 12 s, and no rank");
    headline(&ranks, Kind::Slow, &[1], &format!("rank 1 has been {}", said("send")));
}

/// A rank may make operations of the program's own that the other ranks do not make.
#[test]
fn an_operation_of_the_programs_own_has_no_place_in_the_order() {
    let ranks = ranks();
    let own = Call { operation: Operation::Custom, ..all_reduce(4) };
    for rank in &ranks[..4] {
        (0..if rank.rank == 1 { 3 } else { 0 }).for_each(|_| rank.ends(rank.tp, &own, EntryState::Done));
        rank.done(rank.tp, 1);
        if rank.rank != 1 {
            rank.begin(rank.tp, &all_reduce(4));
        }
    }
    let behind = "rank 1 has not called all-reduce 2 of mesh/tp (ranks 0-3); the other 3 ranks have waited in it";
    headline(&ranks, Kind::Behind, &[1], behind);
}

#[test]
fn an_operation_of_the_programs_own_waits_for_ranks_that_nobody_knows() {
    let mut ranks = ranks();
    let own = Call { operation: Operation::Custom, ..all_reduce(4) };
    ranks[0].begin(ranks[0].tp, &own);
    let unknown =
        "rank 0 has been in own operation 1 of mesh/tp (ranks 0-3) for 12 s: nobody knows for which ranks it waits";
    headline(&ranks, Kind::Slow, &[0], unknown);
    ranks[2].state = State::Stopped;
    let stopped = "rank 2 is stopped by a signal (`kill -CONT 102` continues it); rank 0 has waited in own operation 1 of mesh/tp (ranks 0-3) for 12 s";
    headline(&ranks, Kind::Stopped, &[2], stopped);
}

#[test]
fn a_message_in_an_open_group_of_calls_is_named() {
    for (operation, half, said) in
        [(Operation::Recv, Operation::Send, "send"), (Operation::Send, Operation::Recv, "recv")]
    {
        let ranks = ranks();
        let waits = Call { operation, reduction: 0, peer: 1, ..all_reduce(4) };
        ranks[0].begin(ranks[0].tp, &waits);
        // An earlier call of the group, so that calls and messages have different numbers.
        ranks[1].done(ranks[1].tp, 1);
        let _ = ranks[1].recorder.queue(ranks[1].tp, &Call { operation: half, peer: 0, ..waits });
        let expected = format!(
            "rank 1 has put the {said} into a group of calls and has not ended the group; rank 0 has waited in {} 1 of mesh/tp (ranks 0-3) for 12 s",
            operation.name()
        );
        headline(&ranks, Kind::Queued, &[1], &expected);
    }
}

#[test]
fn a_rank_that_has_left_is_named() {
    let ranks = ranks();
    for rank in &ranks[..4] {
        match rank.rank {
            3 => rank.recorder.set_channel_state(rank.tp, ChannelState::Closed),
            _ => rank.begin(rank.tp, &all_reduce(4)),
        }
    }
    headline(
        &ranks,
        Kind::Left,
        &[3],
        "rank 3 has left mesh/tp (ranks 0-3); the other 3 ranks have waited in all-reduce 1",
    );
}

#[test]
fn a_job_that_is_gone_is_judged_by_its_last_calls() {
    let mut ranks = ranks();
    for rank in &mut ranks {
        rank.state = State::Gone;
        rank.done(rank.tp, 2);
        if rank.rank < 4 && rank.rank != 2 {
            rank.ends(rank.tp, &all_reduce(4), EntryState::Failed);
        }
    }
    headline(
        &ranks,
        Kind::Behind,
        &[2],
        "rank 2 has not called all-reduce 3 of mesh/tp (ranks 0-3); the other 3 ranks failed in it",
    );
}

#[test]
fn calls_that_streams_have_are_compared_by_their_numbers() {
    let ranks = ranks();
    for rank in &ranks[..4] {
        for _ in 0..if rank.rank == 2 { 5 } else { 9 } {
            rank.ends(rank.tp, &all_reduce(4), EntryState::Issued);
        }
    }
    headline(
        &ranks,
        Kind::Behind,
        &[2],
        "rank 2 has not called all-reduce 6 of mesh/tp (ranks 0-3); the other 3 ranks have waited in all-reduce 9",
    );
    ranks[2].done(ranks[2].tp, 4);
    let all: Vec<&Rank> = ranks.iter().collect();
    assert_eq!(said(&all).0, None);
}

/// One rank may be the cause in several findings, and its place is shown once.
#[test]
fn the_ranks_that_are_shown_have_stacks() {
    let mut processes: Vec<Process> = a_rank_behind().iter().map(Rank::process).collect();
    // Each rank is this process, which has threads.
    processes.iter_mut().for_each(|process| process.pid = std::process::id());
    let jobs = jobs(Found { processes, ..Found::default() });
    let mut verdict = judge(&jobs[0], 1.0);
    verdict.findings[0].ranks = [[3; report::MOST_RANKS], [0, 1, 2, 3, 4, 5, 6, 7]].concat();
    let stacks = super::stacks(&verdict, false, &Lines::none());
    let has_stack = |rank: &usize| !stacks.of(*rank).is_empty();
    assert_eq!((0..8).filter(has_stack).count(), 8);
}
