mod accepted;
pub(crate) mod client;

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use super::greeting::{self, Hello, Status};
use super::meeting::{Meeting, Outgoing};
use super::message::{MESSAGE_BYTES, Member, Message, Stage};
use crate::blame::Blame;
use crate::error::Error;
use crate::process::ProcessId;
use crate::segment::{self, Lobby, MAX_RANKS};
use crate::types::*;
use crate::wire::{ADDRESS_BYTES, Contact};

pub(crate) fn member(rank: u32, nranks: u32) -> Member {
    Member {
        rank,
        nranks,
        process: ProcessId { pid: 100 + rank, start: 7 },
        machine: 1,
        host: 2,
        namespace: 3,
        shares: true,
        fd: 5,
        token: [rank as u8; 16],
        contact: Contact { id: [9; 16], address: vec![1, 2, 3] },
    }
}

fn messages() -> Vec<Message> {
    vec![
        Message::Register(member(1, 3)),
        Message::StageDone(Stage::Opening, vec![0, 2]),
        Message::Table { comm: u64::MAX - 3, members: (0..3).map(|rank| member(rank, 3)).collect() },
        Message::Opened(2),
        Message::Groups(vec![0, 0, 2]),
        Message::Mapped,
        Message::Go,
        Message::Failed(Error::new(ncclRemoteError, "rank 1 has gone").by(Blame::of_lost([1]))),
    ]
}

#[test]
fn messages_survive_their_bytes_and_no_part_of_one_is_a_message() {
    for message in messages() {
        let bytes = message.encode();
        assert_eq!(Message::decode(&bytes), Some(message.clone()));
        for cut in 0..bytes.len() {
            assert_ne!(Message::decode(&bytes[..cut]), Some(message.clone()), "{cut} bytes of {message:?}");
        }
        assert_eq!(Message::decode(&[&bytes[..], &[0]].concat()), None);
    }
}

/// UCX's address is long where a host has many network cards.
#[test]
fn a_table_of_the_most_ranks_with_the_longest_addresses_is_a_message() {
    let longest = |rank, nranks| {
        let contact = Contact { id: [9; 16], address: vec![5; ADDRESS_BYTES] };
        Member { contact, ..member(rank, nranks) }
    };
    let registration = Message::Register(longest(2, 3));
    assert_eq!(Message::decode(&registration.encode()), Some(registration));
    let table = Message::Table { comm: 1, members: (0..MAX_RANKS).map(|rank| longest(rank, MAX_RANKS)).collect() };
    let bytes = table.encode();
    assert!(bytes.len() <= MESSAGE_BYTES, "{}", bytes.len());
    assert!(Message::decode(&bytes) == Some(table));
}

#[test]
fn garbage_is_no_message() {
    let mut state = 1_u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    for message in messages() {
        let bytes = message.encode();
        for _ in 0..2000 {
            let mut changed = bytes.clone();
            for _ in 0..1 + random() % 4 {
                let at = usize::from(random()) % changed.len();
                changed[at] = random();
            }
            // It is refused, or it is another message; it does not panic or take much memory.
            let _ = Message::decode(&changed);
        }
    }
    assert_eq!(Message::decode(&Message::Register(member(3, 3)).encode()), None, "rank 3 of 3");
    let swapped = Message::Table { comm: 1, members: vec![member(1, 2), member(0, 2)] };
    assert_eq!(Message::decode(&swapped.encode()), None, "a table in another order");
}

#[test]
fn only_who_knows_the_token_can_prove_it() {
    let (token, other) = ([4; 16], [5; 16]);
    let hello = Hello::write(&token, true, &[1; 16]);
    assert_eq!(Hello::read(&hello).map(|hello| (hello.sealed, hello.number)), Some((true, greeting::number(&token))));
    let answer = greeting::answer(Status::Welcome, Some(&token), &hello, &[2; 16]);
    assert!(greeting::is_proven(&token, &hello, &answer) && !greeting::is_proven(&other, &hello, &answer));
    let (mut changed, again) = (answer, Hello::write(&token, true, &[3; 16]));
    changed[0] = Status::MakerHasNoSecret as u8;
    assert!(!greeting::is_proven(&token, &hello, &changed), "the status is proven, too");
    assert!(!greeting::is_proven(&token, &again, &answer), "an answer to another greeting");
    let proof = greeting::proof(&token, &hello, &answer);
    assert!(greeting::is_proof(&token, &hello, &answer, &proof));
    assert!(
        !greeting::is_proof(&other, &hello, &answer, &proof) && !greeting::is_proof(&token, &hello, &changed, &proof)
    );
    assert_ne!(proof[..], answer[24..], "the two sides prove differently");
    assert_eq!(Hello::read(&[0; 40]), None);
}

const FROM: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn meeting() -> Meeting {
    Meeting::new(Lobby::of(&segment::create([1; 16]).unwrap()).unwrap(), 7)
}

fn register(meeting: &mut Meeting, rank: u32, nranks: u32) -> Option<usize> {
    meeting.take(u64::from(rank), None, FROM, Message::Register(member(rank, nranks))).unwrap()
}

/// Returns the messages that go out, with their numbers of receivers.
fn out(meeting: &mut Meeting) -> Vec<(usize, Message)> {
    let read = |Outgoing { to, frame, .. }: Outgoing| (to.len(), Message::decode(&frame[4..]).unwrap());
    meeting.outgoing().into_iter().map(read).collect()
}

fn failure(meeting: &mut Meeting) -> Error {
    match out(meeting).pop() {
        Some((_, Message::Failed(error))) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_id_that_is_closed_after_a_failure_in_its_segment_gives_the_failure() {
    let fd = segment::create([1; 16]).unwrap();
    let mut meeting = Meeting::new(Lobby::of(&fd).unwrap(), 7);
    register(&mut meeting, 1, 2);
    assert!(segment::fail(&fd, 0, &Error::new(ncclSystemError, "no memory")));
    meeting.close(Some(Error::new(ncclRemoteError, "rank 0 gave up joining")));
    let error = failure(&mut meeting);
    assert_eq!((error.code(), error.message(), error.lost()), (ncclSystemError, "no memory", Some(0)));
}

#[test]
fn all_ranks_go_through_the_stages() {
    let mut meeting = meeting();
    for rank in [2, 0, 1] {
        assert_eq!(register(&mut meeting, rank, 3), Some(rank as usize));
    }
    let members = (0..3).map(|rank| member(rank, 3)).collect();
    assert_eq!(out(&mut meeting), [(3, Message::Table { comm: 7, members })]);
    for (rank, took) in [(1, 0), (0, 0), (2, 2)] {
        meeting.take(rank as u64, Some(rank), FROM, Message::Opened(took)).unwrap();
    }
    assert_eq!(out(&mut meeting), [(3, Message::Groups(vec![0, 0, 2]))]);
    assert!(meeting.take(0, Some(0), FROM, Message::Opened(0)).is_err(), "a message at the wrong time");
    for rank in 0..3 {
        meeting.take(rank as u64, Some(rank), FROM, Message::Mapped).unwrap();
    }
    assert_eq!(out(&mut meeting), [(3, Message::Go)]);
    meeting.lose(1);
    assert!(meeting.is_over() && meeting.tick(Instant::now()).is_none(), "a rank that ends now harms nobody");
}

#[test]
fn the_ranks_learn_who_has_come() {
    let mut meeting = meeting();
    register(&mut meeting, 2, 3);
    meeting.tick(Instant::now() + Duration::from_secs(1));
    assert_eq!(out(&mut meeting), [(1, Message::StageDone(Stage::Registering, vec![2]))]);
}

#[test]
fn ranks_that_end_together_are_named_together() {
    let mut meeting = meeting();
    for rank in 0..3 {
        register(&mut meeting, rank, 4);
    }
    meeting.lose(2);
    meeting.lose(0);
    meeting.tick(Instant::now());
    assert_eq!(out(&mut meeting), []);
    meeting.tick(Instant::now() + Duration::from_secs(1));
    let error = failure(&mut meeting);
    assert_eq!((error.code(), &error.blame().lost[..]), (ncclRemoteError, &[0, 2][..]), "{}", error.message());
    assert_eq!(register(&mut meeting, 3, 4), None);
    assert_eq!(failure(&mut meeting).message(), error.message(), "a rank that comes later reads the reason");
}

#[test]
fn the_smaller_side_of_other_numbers_is_to_blame() {
    let mut meeting = meeting();
    register(&mut meeting, 0, 3);
    assert_eq!(register(&mut meeting, 1, 4), None);
    meeting.tick(Instant::now());
    assert_eq!(out(&mut meeting), [], "two ranks cannot tell which of them is wrong");
    register(&mut meeting, 2, 3);
    meeting.tick(Instant::now());
    let error = failure(&mut meeting);
    assert_eq!(error.message(), "rank 1 (pid 101) passed nranks 4, but ranks 0, 2 passed 3");
    assert_eq!((error.code(), &error.blame().ranks[..]), (ncclInvalidUsage, &[1][..]));
}

#[test]
fn a_failure_names_no_rank_that_the_communicator_does_not_have() {
    let mut meeting = meeting();
    register(&mut meeting, 0, 2);
    let told = Error::new(ncclRemoteError, "it cannot join").by(Blame::of_lost([1, 2, 1023, usize::MAX]));
    meeting.take(0, Some(0), FROM, Message::Failed(told)).unwrap();
    let error = failure(&mut meeting);
    assert_eq!(error.blame(), &Blame::of_lost([1]));
}
