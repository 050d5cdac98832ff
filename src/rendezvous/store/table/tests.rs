//! Any operations of several clients in any order: what is counted as stored is what is there, and
//! nothing is left in the end.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::super::frame::{REFUSED_KEY, Request, SERVER_KEY};
use super::super::split_last_word;
use super::limits::{ALLOWANCE, MAX_STORED, MAX_WAITS, MOST_STORED, cost, cost_of_word};
use super::state::Key;
use super::values::listed;
use super::*;

/// Carries out a request to its end.
fn carry_out(table: &mut Table, client: Client, request: Request, replies: &mut Replies) -> Result<(), Refusal> {
    if let Some(mut task) = table.handle(client, request, replies)? {
        while !table.advance(client, &mut task, replies)? {}
    }
    Ok(())
}

fn key() -> impl Strategy<Value = Key> {
    (0..4u8).prop_map(|number| vec![b'a' + number])
}

fn operation() -> impl Strategy<Value = Request> {
    let value = || proptest::collection::vec(b'0'..b'3', 0..4);
    let keys = || proptest::collection::vec(key(), 0..90).prop_map(|keys| keys.iter().collect());
    prop_oneof![
        (key(), value()).prop_map(|(key, value)| Request::Set(key, value)),
        (key(), value(), value()).prop_map(|(key, expected, value)| Request::CompareSet(key, expected, value)),
        (key(), any::<i64>()).prop_map(|(key, amount)| Request::Add(key, amount)),
        (key(), -2..3i64, -2..3i64, key(), value()).prop_map(|(counter, amount, last, key, value)| Request::Count {
            counter,
            amount,
            last,
            key,
            value
        }),
        key().prop_map(Request::Delete),
        (key(), value()).prop_map(|(key, value)| Request::Append(key, value)),
        (key(), value()).prop_map(|(key, value)| Request::QueuePush(key, value)),
        key().prop_map(Request::QueuePop),
        (key(), -1..4i64).prop_map(|(key, world)| Request::Barrier(key, world)),
        (key(), value()).prop_map(|(key, word)| Request::LastWord(key, word)),
        keys().prop_map(Request::Wait),
        keys().prop_map(Request::WaitAny),
        keys().prop_map(Request::Check),
        keys().prop_map(Request::MultiGet),
        Just(Request::ListKeys),
        Just(Request::CancelWait),
    ]
}

proptest! {
    #[test]
    fn what_is_counted_is_there(requests in proptest::collection::vec((0..4u64, operation()), 0..60)) {
        let (mut table, mut replies) = (Table::default(), Replies::new());
        for (client, request) in requests {
            if carry_out(&mut table, client, request, &mut replies).is_err() {
                table.leave(client, &mut replies);
            }
            let pairs = table.values.iter().map(|(key, value)| cost(key, value));
            let queued = table.queues.iter().flat_map(|(key, queue)| queue.iter().map(move |value| cost(key, value)));
            let words = table.words.keys().map(|word| cost_of_word(&word.0, &word.1));
            let waits = table.waiting.values().map(|waiting| waiting.bytes);
            let over = table.over.iter().map(|over| over.bytes);
            prop_assert_eq!(table.stored, pairs.chain(queued).chain(words).sum::<usize>());
            prop_assert_eq!(table.waits, waits.chain(over).sum::<usize>());
            prop_assert_eq!(table.listed, table.values.keys().map(|key| listed(key)).sum::<usize>());
            for waiting in table.waiting.values() {
                let mut keys = waiting.keys.clone().again();
                let mut is_listed = keys.count() == 0;
                while let Some(key) = keys.take() {
                    is_listed |= table.waiters.get(key).is_some_and(|tickets| tickets.contains_key(&waiting.ticket));
                }
                prop_assert!(is_listed, "nothing would wake it");
            }
        }
        (0..4).for_each(|client| table.leave(client, &mut replies));
        while table.tidy() {}
        prop_assert!(table.waiting.is_empty() && table.waiters.is_empty() && table.words.is_empty());
        prop_assert!(table.barriers.is_empty() && table.at_barrier.is_empty() && table.words_of.is_empty());
        let keys: Vec<Key> = table.values.keys().chain(table.queues.keys()).cloned().collect();
        for key in keys {
            table.remove(&key);
            while table.queues.contains_key(&key) {
                table.handle(9, Request::QueuePop(key.clone()), &mut replies).unwrap();
            }
        }
        prop_assert_eq!((table.stored, table.waits, table.listed, table.promised), (0, 0, 0, 0));
        drop(replies);
        prop_assert_eq!(table.loose(), 0);
    }
}

#[test]
fn where_there_is_no_room_what_stood_there_stays() {
    let (mut table, mut replies) = (Table::default(), Replies::new());
    table.handle(1, Request::Set(b"key".to_vec(), b"old".to_vec()), &mut replies).unwrap();
    table.stored = MAX_STORED;
    for request in
        [Request::Set(b"key".to_vec(), b"longer".to_vec()), Request::Append(b"key".to_vec(), b"more".to_vec())]
    {
        assert!(carry_out(&mut table, 1, request, &mut replies).is_err());
        assert_eq!((&table.values[&b"key"[..]][..], table.stored), (&b"old"[..], MAX_STORED));
    }
    table.handle(1, Request::Set(b"key".to_vec(), b"new".to_vec()), &mut replies).unwrap();
    assert_eq!(&table.values[&b"key"[..]][..], b"new");
}

#[test]
fn a_full_store_still_takes_what_all_ranks_learn_of_it_from() {
    let set = |key: &str, len: usize| Request::Set(key.as_bytes().to_vec(), vec![b'1'; len]);
    let word = Request::LastWord(b"/devicemesh/0/0/nonce/lost".to_vec(), b"1".to_vec());
    let (prefix, mine) = ("/devicemesh/0/0/nonce/world/7", "/devicemesh/0/0/nonce/world/7/here/0");
    for (stored, taken, refused) in [
        (
            MAX_STORED,
            vec![set(mine, 4096), set("/devicemesh/run/node/3", 4096)],
            vec![set("/key", 0), set(mine, 4097), set("/mine/verdict", 1)],
        ),
        (
            MOST_STORED - (128 << 20),
            vec![set(&format!("{prefix}/end/verdict"), 99), set(&format!("{prefix}/read/by/3"), 1), word.clone()],
            vec![set(mine, 0), set(&format!("{prefix}/verdict"), 5000)],
        ),
        (MOST_STORED, vec![], vec![set(&format!("{prefix}/verdict"), 1), word]),
    ] {
        for (requests, is_taken) in [(taken, true), (refused, false)] {
            for request in requests {
                let text = format!("{request:.120?} beside {stored}");
                let (mut table, mut replies) = (Table { stored, ..Table::default() }, Replies::new());
                assert_eq!(carry_out(&mut table, 1, request, &mut replies).is_ok(), is_taken, "{text}");
                table.leave(1, &mut replies);
            }
        }
    }
}

#[test]
fn a_last_word_is_passed_on_by_a_full_store() {
    let (mut table, mut replies) = (Table::default(), Replies::new());
    carry_out(&mut table, 1, Request::LastWord(b"gone".to_vec(), b"1".to_vec()), &mut replies).unwrap();
    table.stored = MOST_STORED;
    table.leave(1, &mut replies);
    assert_eq!((&table.values[&b"gone"[..]][..], &table.values[&b"gone/1"[..]][..]), (&b"1"[..], &b"1"[..]));
}

#[test]
fn a_last_word_of_a_silent_host_is_marked() {
    let (mut table, mut replies) = (Table::default(), Replies::new());
    for client in 1..4 {
        let word = Request::LastWord(b"gone".to_vec(), client.to_string().into_bytes());
        carry_out(&mut table, client, word, &mut replies).unwrap();
    }
    table.note_silent(2);
    table.note_silent(9);
    (1..4).for_each(|client| table.leave(client, &mut replies));
    let words = [1, 2, 3].map(|number| table.values[format!("gone/{number}").as_bytes()].to_vec());
    assert_eq!(words, [&b"1"[..], b"2 silent", b"3"]);
    assert_eq!(words.each_ref().map(|word| split_last_word(word)), [(&b"1"[..], false), (b"2", true), (b"3", false)]);
    // The memory that a word was given is enough with its mark, so all of it is free again.
    let numbers = [&b"gone"[..], b"gone/1", b"gone/2", b"gone/3"];
    assert_eq!(table.stored, numbers.iter().map(|key| cost(key, &table.values[*key])).sum::<usize>());
}

#[test]
fn the_first_refused_connection_wakes_who_waits_for_it() {
    let (mut table, mut replies) = (Table::default(), Replies::new());
    let wait = || Request::WaitAny([&b"never"[..], REFUSED_KEY].into_iter().collect());
    carry_out(&mut table, 1, wait(), &mut replies).unwrap();
    assert!(replies.is_empty());
    table.note_refused(IpAddr::from([10, 0, 0, 7]), "because it has no secret", &mut replies);
    carry_out(&mut table, 2, wait(), &mut replies).unwrap();
    let found: Vec<_> =
        replies.iter().map(|reply| (reply.to, reply.bytes[1], &reply.value.as_ref().unwrap()[..])).collect();
    let said = &b"the store refused 1 connection, the last one from 10.0.0.7, because it has no secret"[..];
    assert_eq!(found, [(1, 1, said), (2, 1, said)]);
}

/// Client 2 has taken a number for a word of its own, and has gone before it wrote the word.
#[test]
fn a_last_word_fills_the_gaps_before_it() {
    let (mut table, mut replies) = (Table::default(), Replies::new());
    carry_out(&mut table, 1, Request::LastWord(b"gone".to_vec(), b"1".to_vec()), &mut replies).unwrap();
    for _ in 0..2 {
        carry_out(&mut table, 2, Request::Add(b"gone".to_vec(), 1), &mut replies).unwrap();
    }
    carry_out(&mut table, 2, Request::Set(b"gone/1".to_vec(), b"2".to_vec()), &mut replies).unwrap();
    [2, 1].into_iter().for_each(|client| table.leave(client, &mut replies));
    let words = [1, 2, 3].map(|number| table.values[format!("gone/{number}").as_bytes()].to_vec());
    assert_eq!(words, [&b"2"[..], b"-", b"1"]);
    carry_out(&mut table, 3, Request::LastWord(b"far".to_vec(), b"3".to_vec()), &mut replies).unwrap();
    carry_out(&mut table, 4, Request::Set(b"far".to_vec(), i64::MIN.to_string().into_bytes()), &mut replies).unwrap();
    table.leave(3, &mut replies);
}

#[test]
fn where_many_keys_are_waited_for_others_can_still_wait_and_store() {
    let (mut table, mut replies) = (Table::default(), Replies::new());
    table.waits = MAX_WAITS;
    let many: Vec<String> = (0..1000).map(|number| number.to_string()).collect();
    assert!(carry_out(&mut table, 1, Request::Wait(many.iter().collect()), &mut replies).is_err());
    carry_out(&mut table, 2, Request::Wait([b"few"].into_iter().collect()), &mut replies).unwrap();
    table.handle(3, Request::Set(b"few".to_vec(), b"1".to_vec()), &mut replies).unwrap();
    assert_eq!(replies.iter().filter(|reply| reply.to == 2).count(), 1);
    (1..4).for_each(|client| table.leave(client, &mut replies));
    while table.tidy() {}
    assert_eq!(table.waits, MAX_WAITS);
}

#[test]
fn who_finds_no_room_is_not_gone_and_is_told_why() {
    let words = |values: &[&str]| values.iter().collect();
    let many = (0..1000).map(|number| number.to_string()).collect();
    let cases: [(usize, usize, Request, &[u8]); 4] = [
        (MAX_STORED, 0, Request::Set(b"key".to_vec(), b"value".to_vec()), b" bytes in "),
        (MAX_STORED, 0, Request::MultiSet(words(&["key", "value"])), b" bytes in "),
        (0, MAX_WAITS, Request::Wait(many), b"wait for fewer keys"),
        // The request is taken at first, and is too large at a later step.
        (
            0,
            MAX_WAITS - (80 << 10),
            Request::WaitAny((0..1000).map(|number| number.to_string()).collect()),
            b"fewer keys",
        ),
    ];
    for (stored, waits, request, expected) in cases {
        let text = format!("{request:.40?}");
        let (mut table, mut replies) = (Table::default(), Replies::new());
        carry_out(&mut table, 1, Request::LastWord(b"gone".to_vec(), b"1".to_vec()), &mut replies).unwrap();
        let kept = table.stored;
        (table.stored, table.waits) = (kept + stored, waits);
        let refused = carry_out(&mut table, 1, request, &mut replies).unwrap_err();
        let Refusal::TurnedAway(said) = refused else { panic!("{text}: {refused:?}") };
        assert!(said.as_bytes().windows(expected.len()).any(|part| part == expected), "{text}: {said}");
        table.leave(1, &mut replies);
        assert!(!table.values.contains_key(&b"gone"[..]), "{text}");
        // The word of the client is kept until the client comes back, and is removed when the
        // client does not.
        assert_eq!((table.stored, table.words.len()), (kept + stored, 1), "{text}");
        table.forget_awaited(Instant::now());
        assert_eq!(table.words.len(), 1, "{text}");
        table.forget_awaited(Instant::now() + Duration::from_secs(3600));
        assert_eq!((table.stored, table.words.len(), table.awaited.len()), (stored, 0, 0), "{text}");
        table.note_turned_away(0x12ab, said.clone());
        (0..100).for_each(|other| table.note_turned_away(other, String::new()));
        for (nonce, expected) in [("000012ab", &said[..]), ("00012ab0", ""), ("", ""), ("00000063", "")] {
            replies.clear();
            let key = [SERVER_KEY, b"/", nonce.as_bytes()].concat();
            carry_out(&mut table, 2, Request::Get(key), &mut replies).unwrap();
            let found = replies[0].value.as_ref().map_or(&b""[..], |value| &value[..]);
            assert_eq!(found, expected.as_bytes(), "{text}: {nonce}");
        }
    }
}

/// A stranger that writes keys like those of the ranks, and leaves last words like theirs, cannot
/// fill the room that was promised to a rank before.
#[test]
fn a_rank_has_room_for_its_verdict_whatever_strangers_fill() {
    let (mut table, mut replies) = (Table::default(), Replies::new());
    let word = || Request::LastWord(b"/devicemesh/0/0/nonce/lost".to_vec(), b"1".to_vec());
    let verdict = |name: &str, len: usize| {
        Request::Set(format!("/devicemesh/0/0/nonce/{name}/verdict").into_bytes(), vec![b'1'; len])
    };
    carry_out(&mut table, 1, word(), &mut replies).unwrap();
    assert_eq!((table.promised, table.words_of[&1].allowance), (ALLOWANCE, ALLOWANCE));
    // Strangers imitate the rank's last word, and then take all that there is.
    table.stored = MOST_STORED - table.promised - 100_000;
    for (stranger, len) in [(7, 4096), (8, 0)] {
        carry_out(&mut table, stranger, word(), &mut replies).unwrap();
        let mut number = 0;
        while carry_out(&mut table, stranger, verdict(&format!("{len}/{number}"), len), &mut replies).is_ok() {
            number += 1;
        }
        table.leave(stranger, &mut replies);
    }
    assert!(carry_out(&mut table, 9, Request::LastWord(b"/other".to_vec(), vec![]), &mut replies).is_err());
    // The rank is turned away with a value of its own, comes back, and says so to all.
    assert!(carry_out(&mut table, 1, Request::Set(b"/mine".to_vec(), vec![]), &mut replies).is_err());
    table.leave(1, &mut replies);
    carry_out(&mut table, 2, word(), &mut replies).unwrap();
    for (name, len) in [("call", 4096), ("read/by/1", 1), ("read", 1), ("read/1", 1)] {
        carry_out(&mut table, 2, verdict(name, len), &mut replies).unwrap();
    }
    // Beyond what was promised there is no room for the rank either.
    assert!(carry_out(&mut table, 2, verdict("more", 4096), &mut replies).is_err());
    assert!(table.stored + table.promised <= MOST_STORED);
}

#[test]
fn connections_with_one_last_word_take_the_room_of_one() {
    let (mut table, mut replies) = (Table::default(), Replies::new());
    let word = || Request::LastWord(b"gone".to_vec(), b"1".to_vec());
    carry_out(&mut table, 1, word(), &mut replies).unwrap();
    table.stored = MOST_STORED;
    carry_out(&mut table, 2, word(), &mut replies).unwrap();
    table.leave(1, &mut replies);
    assert!(!table.values.contains_key(&b"gone"[..]));
    table.leave(2, &mut replies);
    assert!(table.values.contains_key(&b"gone"[..]));
}

#[test]
fn a_client_that_is_turned_away_hides_no_end_of_the_others() {
    let (mut table, mut replies) = (Table::default(), Replies::new());
    let word = || Request::LastWord(b"gone".to_vec(), b"1".to_vec());
    carry_out(&mut table, 1, word(), &mut replies).unwrap();
    carry_out(&mut table, 2, word(), &mut replies).unwrap();
    table.stored += MAX_STORED;
    carry_out(&mut table, 1, Request::Set(b"key".to_vec(), b"value".to_vec()), &mut replies).unwrap_err();
    table.leave(1, &mut replies);
    assert!(!table.values.contains_key(&b"gone"[..]));
    table.leave(2, &mut replies);
    assert_eq!(&table.values[&b"gone"[..]][..], b"1");
}

#[test]
fn values_that_only_replies_keep_are_counted() {
    let (mut table, mut replies) = (Table::default(), Replies::new());
    let set = |value: u8| Request::Set(b"key".to_vec(), vec![value; 1000]);
    table.handle(1, set(1), &mut replies).unwrap();
    table.handle(1, Request::Get(b"key".to_vec()), &mut replies).unwrap();
    table.handle(1, Request::Get(b"key".to_vec()), &mut replies).unwrap();
    assert_eq!(table.loose(), 0, "the table has it too");
    table.handle(1, set(2), &mut replies).unwrap();
    assert_eq!(table.loose(), 1000, "both replies share it");
    table.handle(1, Request::Append(b"key".to_vec(), vec![3]), &mut replies).unwrap();
    assert_eq!(table.loose(), 1000, "nobody else had the value that was appended to");
    table.handle(1, Request::Get(b"key".to_vec()), &mut replies).unwrap();
    table.handle(1, Request::Append(b"key".to_vec(), vec![4]), &mut replies).unwrap();
    assert_eq!(table.loose(), 2001, "the reply keeps the value as it was");
    replies.clear();
    assert_eq!(table.loose(), 0);
}

#[test]
fn a_step_does_little_whatever_is_asked_for() {
    let (mut table, mut replies) = (Table::default(), Replies::new());
    let keys: Vec<String> = (0..20_000).map(|number| format!("{number:08}")).collect();
    let pairs = keys.iter().flat_map(|key| [key.as_bytes(), b"1"]).collect();
    let absent = || keys.iter().map(|key| format!("absent{key}")).collect();
    for request in [
        Request::MultiSet(pairs),
        Request::Check(keys.iter().collect()),
        Request::MultiGet(keys.iter().collect()),
        Request::ListKeys,
        Request::Wait(keys.iter().collect()),
        Request::Wait(absent()),
        Request::WaitAny(absent()),
        Request::CancelWait,
    ] {
        let text = format!("{request:.20?}");
        let mut task = table.handle(1, request, &mut replies).unwrap();
        let mut steps = 0;
        while let Some(mut begun) = task.take() {
            let is_done = table.advance(1, &mut begun, &mut replies).unwrap();
            let work = table.take_work();
            assert!(work < 256 * 600, "{work} in one step of {text}");
            steps += 1;
            task = (!is_done).then_some(begun);
        }
        assert!(steps == 0 || steps > 20_000 / 300, "{steps} steps of {text}");
        assert!(table.take_work() < 1000, "{text}");
    }
    let mut tidied = 0;
    while table.tidy() {
        assert!(table.take_work() < 256 * 600);
        tidied += 1;
    }
    assert!(tidied > 2 * 20_000 / 300 && table.waiters.is_empty(), "{tidied}");
}

#[test]
fn a_step_of_long_keys_looks_at_few_of_them() {
    let (mut table, mut replies) = (Table::default(), Replies::new());
    let keys: Vec<String> = (0..1000).map(|number| format!("{number:08192}")).collect();
    let absent = || keys.iter().map(|key| format!("{}x", &key[1..])).collect();
    for request in [
        Request::MultiSet(keys.iter().flat_map(|key| [key.as_bytes(), b"1"]).collect()),
        Request::Check(keys.iter().collect()),
        Request::MultiGet(keys.iter().collect()),
        Request::Wait(keys.iter().collect()),
        Request::Wait(absent()),
        Request::WaitAny(absent()),
        Request::CancelWait,
    ] {
        let text = format!("{request:.20?}");
        let mut task = table.handle(1, request, &mut replies).unwrap();
        table.take_work();
        while let Some(mut begun) = task.take() {
            let is_done = table.advance(1, &mut begun, &mut replies).unwrap();
            let work = table.take_work();
            assert!(work < 128 << 10, "{work} in one step of {text}");
            task = (!is_done).then_some(begun);
        }
    }
    while table.tidy() {
        assert!(table.take_work() < 128 << 10);
    }
}
