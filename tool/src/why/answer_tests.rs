//! Recordings that another host has sent are judged as those of this host, and nothing that comes
//! is trusted.

use super::super::find::{Found, Node};
use super::super::judge_tests::{a_rank_behind, text_of};
use super::super::process::{Origin, State, Timeline};
use super::*;

const HOUR: u64 = 3_600_000_000_000;

/// The answer of a host that has these ranks of the job, and whose clock differs by `ahead`
/// nanoseconds.
fn sent(ranks: std::ops::Range<usize>, ahead: u64) -> Vec<u8> {
    let all = a_rank_behind();
    let process = |rank: usize| {
        let mut process = all[rank].process();
        let mut now = process.snapshot.process.clock.moment();
        now.monotonic += 12_500_000_000;
        now.ticks += 12_500_000_000;
        now.real += 12_500_000_000 + ahead;
        process.timeline = Timeline::new(&process.snapshot, Some(now), now.real, None);
        // The launcher has said nothing of hosts.
        process.place = None;
        process.state = if rank == 3 { State::Stopped } else { State::Sleeps };
        process.program = "pretrain".to_owned();
        process
    };
    let found = Found { processes: ranks.map(process).collect(), ..Found::default() };
    let header = Header { format: FORMAT, host: "beta".to_owned(), ..Header::default() };
    framed_found(header, &found, &|_, _| true, MOST_BYTES)
}

#[test]
fn hosts_whose_clocks_differ_by_an_hour_say_how_long_ranks_wait() {
    for (one, other) in [(0, HOUR), (HOUR, 0)] {
        let mut found = Found::default();
        for (peer, bytes) in [sent(0..3, one), sent(3..8, other)].iter().enumerate() {
            found.processes.extend(Answer::read(bytes, Origin::Sent(0, peer)).unwrap().found.processes);
        }
        let text = text_of(found);
        let expected = "rank 3 is stopped by a signal (`kill -CONT 103` on alpha continues it); \
                        the other 3 ranks have waited in all-reduce 2 of mesh/tp (ranks 0-3) for 12 s";
        assert!(text.contains(expected), "{text}");
        assert!(text.contains("rank 3 (pid 103 on alpha) is stopped; its last call, all-reduce 1 of mesh/tp (ranks 0-3), ended 12 s ago"), "{text}");
    }
}

#[test]
fn a_job_without_an_id_has_the_name_of_the_program_on_another_host() {
    let found = Answer::read(&sent(0..8, 0), Origin::Sent(0, 0)).unwrap().found;
    let mut job = super::super::job::jobs(found).remove(0);
    job.id.clear();
    assert_eq!(super::super::name(&job), "pretrain");
}

/// The process ends between the moments at which its recording and its state are read.
#[test]
fn a_rank_that_ends_while_its_host_looks_is_gone_and_the_others_are_seen() {
    let all = a_rank_behind();
    let mut processes: Vec<Process> = (0..4).map(|rank| all[rank].process()).collect();
    processes[3].state = State::Gone;
    let found = Found { processes, ..Found::default() };
    let header = Header { format: FORMAT, host: "beta".to_owned(), ..Header::default() };
    let bytes = framed_found(header, &found, &|_, _| true, MOST_BYTES);
    let found = Answer::read(&bytes, Origin::Sent(0, 0)).unwrap().found;
    let states: Vec<State> = found.processes.iter().map(|process| process.state).collect();
    assert_eq!(states, [State::Sleeps, State::Sleeps, State::Sleeps, State::Gone]);
    assert_eq!(found.unreadable, Vec::<String>::new());
}

/// A tool of an earlier version notes no state for a process that ends while the tool looks at it.
#[test]
fn a_recording_without_a_state_is_left_out_alone() {
    let process = a_rank_behind()[0].process();
    let packed = pack(&process.bytes);
    let told = Told { pid: 100, seat: None, program: String::new(), bytes: packed.len() };
    let header = Header { format: FORMAT, host: "beta".to_owned(), processes: vec![told], ..Header::default() };
    let found = Answer::read(&framed(&header, &[packed]), Origin::Sent(0, 0)).unwrap().found;
    assert_eq!(found.unreadable, ["beta: process 100 has ended meanwhile"]);
}

#[test]
fn a_host_that_gives_no_answer_is_named_with_its_ranks() {
    let mut found = Answer::read(&sent(0..3, 0), Origin::Sent(0, 0)).unwrap().found;
    let silence = Some("did not answer within 2 s".to_owned());
    found.nodes.push(Node { name: "node 1 (beta)".to_owned(), address: None, ranks: (3..8).collect(), silence });
    let text = text_of(found);
    assert!(text.contains("for rank 3, which is on node 1 (beta), from where no answer came\n"), "{text}");
    assert!(text.contains("\n  node 1 (beta) (ranks 3-7) did not answer within 2 s\n"), "{text}");
}

#[test]
fn a_rank_that_no_host_has_is_gone() {
    let mut found = Answer::read(&sent(0..3, 0), Origin::Sent(0, 0)).unwrap().found;
    found.nodes.push(Node { name: "node 1 (beta)".to_owned(), address: None, ranks: (3..8).collect(), silence: None });
    let text = text_of(found);
    assert!(text.starts_with("train: rank 3 has died: its process is gone; the other 3 ranks have waited"), "{text}");
    assert!(text.contains("rank 3 has no process on node 1 (beta)"), "{text}");
}

#[test]
fn what_is_no_answer_is_an_error_and_nothing_worse() {
    let whole = sent(2..5, 0);
    let read = |bytes: &[u8]| Answer::read(bytes, Origin::Sent(0, 0));
    assert_eq!(read(&whole).unwrap().found.processes.len(), 3);
    for length in (0..whole.len()).step_by(101) {
        assert!(read(&whole[..length]).is_err(), "{length} bytes");
    }
    // A changed byte may be one of a text or of a number. Then the answer is read, and judged.
    for at in (0..whole.len()).step_by(37) {
        let mut changed = whole.clone();
        changed[at] ^= 0x41;
        if let Ok(answer) = read(&changed) {
            super::super::job::jobs(answer.found).iter().for_each(|job| {
                super::super::judge::judge(job, 1.0).headline(1.0);
            });
        }
    }
    assert!(read(&vec![b'{'; MOST_BYTES + 1]).is_err());
    let other = framed(&Header { format: FORMAT + 1, ..Header::default() }, &[]);
    assert!(read(&other).err().unwrap().contains("another version"));
    // A question of another version is answered with the version.
    assert!(read(&answer(b"{\"format\": 9}", &|_, _| true)).is_ok());
}

/// A job's store may have a question about any process of the user.
#[test]
fn stacks_are_those_of_the_job_alone() {
    let path = std::env::temp_dir().join(format!("of-another-job-{}.dmrec", std::process::id()));
    let recording = std::fs::File::create(&path).unwrap();
    let mut child = std::process::Command::new("sleep").arg("60").stdout(recording).spawn().unwrap();
    let pid = child.id();
    let asked = |is_of_job: bool| {
        let answer = answer(Request::stacks(vec![pid]).text().as_bytes(), &|asked, _| asked == pid && is_of_job);
        Answer::read(&answer, Origin::File).unwrap().stacks.len()
    };
    let found = (asked(false), asked(true));
    child.kill().unwrap();
    child.wait().unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(found, (0, 1));
}

#[test]
fn a_long_answer_has_fewer_calls_and_then_fewer_processes() {
    let all = a_rank_behind();
    let answer = |most: usize| {
        let header = Header { format: FORMAT, ..Header::default() };
        let processes = all.iter().map(super::super::judge_tests::Rank::process).collect();
        let bytes = framed_found(header, &Found { processes, ..Found::default() }, &|_, _| true, most);
        Answer::read(&bytes, Origin::Sent(0, 0)).unwrap().found
    };
    assert_eq!(answer(1 << 20).processes.len(), 8);
    let found = answer(4 << 10);
    assert!((1..8).contains(&found.processes.len()), "{}", found.processes.len());
    assert!(found.unreadable[0].contains("more processes than fit into its answer"), "{:?}", found.unreadable);
}
