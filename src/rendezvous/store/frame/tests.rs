//! Any bytes, and requests that come in pieces.

use super::*;
use proptest::prelude::*;

fn encoded(request: &Request) -> Vec<u8> {
    match request {
        Request::Set(key, value) => Writer::new(op::SET).string(key).string(value).finish(),
        Request::Add(key, amount) => Writer::new(op::ADD).string(key).number(*amount).finish(),
        Request::Count { counter, amount, last, key, value } => {
            let counter = Writer::new(op::COUNT).string(counter).number(*amount);
            counter.number(*last).string(key).string(value).finish()
        }
        Request::Wait(keys) => {
            let (mut keys, mut bytes) = (keys.clone(), Writer::new(op::WAIT).number(keys.count() as i64));
            while let Some(key) = keys.take() {
                bytes = bytes.string(key);
            }
            bytes.finish()
        }
        _ => unreachable!("not made by the strategy below"),
    }
}

proptest! {
    #[test]
    fn any_bytes_are_decoded_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(Some((_, used))) = decode(&bytes) {
            prop_assert!(used <= bytes.len() && used > 0);
        }
    }

    #[test]
    fn requests_survive_the_wire_and_are_incomplete_before_their_last_byte(
        key in proptest::collection::vec(any::<u8>(), 0..40),
        value in proptest::collection::vec(any::<u8>(), 0..40),
        amount in any::<i64>(),
        which in 0..4,
    ) {
        let request = match which {
            0 => Request::Set(key, value),
            1 => Request::Add(key, amount),
            2 => Request::Count { counter: key.clone(), amount, last: !amount, key, value },
            _ => Request::Wait([key, value].into_iter().collect()),
        };
        let bytes = encoded(&request);
        prop_assert_eq!(decode(&bytes).unwrap(), Some((request, bytes.len())));
        prop_assert_eq!(decode(&bytes[..bytes.len() - 1]).unwrap(), None);
    }

    #[test]
    fn pieces_measure_as_the_whole(
        keys in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..20), 0..6),
        ends in proptest::collection::vec(0usize..200, 0..10),
    ) {
        let bytes = keys.iter().fold(Writer::new(op::WAIT_ANY).number(keys.len() as i64), |w, key| w.string(key));
        let bytes = bytes.finish();
        let mut ends: Vec<usize> = ends.into_iter().filter(|end| *end < bytes.len()).collect();
        ends.sort_unstable();
        let mut measure = Measure::default();
        for end in ends {
            prop_assert_eq!(measure.length(&bytes[..end]).unwrap(), None);
        }
        prop_assert_eq!(measure.length(&bytes).unwrap(), Some(bytes.len()));
        prop_assert_eq!(decode(&bytes).unwrap(), Some((Request::WaitAny(keys.iter().collect()), bytes.len())));
    }
}

#[test]
fn huge_lengths_are_refused_before_their_bytes_come() {
    let mut key = vec![op::GET];
    key.extend(u64::MAX.to_le_bytes());
    assert!(decode(&key).is_err());
    let mut keys = vec![op::WAIT];
    keys.extend((MAX_KEYS as u64 + 1).to_le_bytes());
    assert!(decode(&keys).is_err());
    assert!(decode(&[99]).is_err());
    let (mut many, value) = (vec![op::MULTI_SET], vec![0; MAX_VALUE]);
    many.extend(9u64.to_le_bytes());
    for _ in 0..8 {
        many = Writer(many).string(b"k").string(&value).finish();
    }
    assert!(decode(&many).is_err(), "each value is allowed, all of them are not");
}
