//! Any operations of several clients in any order: what is counted as stored is what is there, and nothing is left in the end.

use proptest::prelude::*;

use super::*;

fn key() -> impl Strategy<Value = Key> {
    (0..4u8).prop_map(|number| vec![b'a' + number])
}

fn operation() -> impl Strategy<Value = Request> {
    let value = || proptest::collection::vec(b'0'..b'3', 0..4);
    let keys = || proptest::collection::vec(key(), 0..4);
    prop_oneof![
        (key(), value()).prop_map(|(key, value)| Request::Set(key, value)),
        (key(), value(), value()).prop_map(|(key, expected, value)| Request::CompareSet(key, expected, value)),
        (key(), any::<i64>()).prop_map(|(key, amount)| Request::Add(key, amount)),
        key().prop_map(Request::Delete),
        (key(), value()).prop_map(|(key, value)| Request::Append(key, value)),
        (key(), value()).prop_map(|(key, value)| Request::QueuePush(key, value)),
        key().prop_map(Request::QueuePop),
        (key(), -1..4i64).prop_map(|(key, world)| Request::Barrier(key, world)),
        (key(), value()).prop_map(|(key, word)| Request::LastWord(key, word)),
        keys().prop_map(Request::Wait),
        keys().prop_map(Request::WaitAny),
        Just(Request::CancelWait),
    ]
}

proptest! {
    #[test]
    fn what_is_counted_is_there(requests in proptest::collection::vec((0..4u64, operation()), 0..60)) {
        let (mut table, mut replies) = (Table::default(), Replies::new());
        for (client, request) in requests {
            if table.handle(client, request, &mut replies).is_err() {
                table.leave(client, &mut replies);
            }
            let pairs = table.values.iter().map(|(key, value)| cost(key, value));
            let queued = table.queues.iter().flat_map(|(key, queue)| queue.iter().map(move |value| cost(key, value)));
            let words = table.words_of.values().flatten().map(|(key, word)| 2 * cost(key, word));
            let waits = table.waiting.values().map(|waiting| waiting.bytes);
            prop_assert_eq!(table.stored, pairs.chain(queued).chain(words).chain(waits).sum::<usize>());
            for waiting in table.waiting.values() {
                let listed = |key: &Key| table.waiters.get(key).is_some_and(|of_key| of_key.contains_key(&waiting.ticket));
                prop_assert!(waiting.keys.is_empty() || waiting.keys.iter().any(listed), "nothing would wake it");
            }
        }
        (0..4).for_each(|client| table.leave(client, &mut replies));
        prop_assert!(table.waiting.is_empty() && table.waiters.is_empty() && table.words.is_empty());
        prop_assert!(table.barriers.is_empty() && table.at_barrier.is_empty() && table.words_of.is_empty());
        let keys: Vec<Key> = table.values.keys().chain(table.queues.keys()).cloned().collect();
        for key in keys {
            table.remove(&key);
            while table.queues.contains_key(&key) {
                table.handle(9, Request::QueuePop(key.clone()), &mut replies).unwrap();
            }
        }
        prop_assert_eq!(table.stored, 0);
    }
}

#[test]
fn where_there_is_no_room_what_stood_there_stays() {
    let (mut table, mut replies) = (Table::default(), Replies::new());
    table.handle(1, Request::Set(b"key".to_vec(), b"old".to_vec()), &mut replies).unwrap();
    table.stored = MAX_STORED;
    for request in [
        Request::Set(b"key".to_vec(), b"longer".to_vec()),
        Request::Append(b"key".to_vec(), b"more".to_vec()),
        Request::LastWord(b"gone".to_vec(), b"1".to_vec()),
        Request::Wait(vec![b"never".to_vec()]),
    ] {
        assert!(table.handle(1, request, &mut replies).is_err());
        assert_eq!((table.value(b"key"), table.stored), (&b"old"[..], MAX_STORED));
    }
    table.handle(1, Request::Set(b"key".to_vec(), b"new".to_vec()), &mut replies).unwrap();
    assert_eq!(table.value(b"key"), b"new");
}
