//! Any bytes in place of the records of other hosts.

use super::record::{HEAD_BYTES, Head, calls_in, each, first};

/// The longest payload that the reader of the ring accepts here, in bytes.
const MOST: usize = 300;

/// The first byte of an input chooses the number of records, and the number of ranks of each host.
/// Each record that is accepted lies in the message, and the calls in it can be told to the user.
pub(crate) fn records(bytes: &[u8]) {
    are_accepted(bytes);
}

/// Does what [`records`] does. Returns whether the whole message was accepted.
fn are_accepted(bytes: &[u8]) -> bool {
    let Some((sizes, message)) = bytes.split_first() else { return false };
    let (hosts, ranks) = (1 + usize::from(sizes % 8), 1 + usize::from(sizes / 8 % 8));
    if let Ok(length) = first(message, 0, 0) {
        assert!((HEAD_BYTES..=message.len()).contains(&length), "a record of {length} bytes");
        tell(&message[..length], ranks);
    }
    let mut starts = Vec::new();
    if each(message, 0..hosts, 0, MOST, |host, at| starts.push((host, at))).is_err() {
        return false;
    }
    assert_eq!(starts.len(), hosts);
    for (index, (host, at)) in starts.iter().enumerate() {
        let end = starts.get(index + 1).map_or(message.len(), |next| next.1);
        assert!(*host == index && (HEAD_BYTES..=HEAD_BYTES + MOST).contains(&(end - at)), "{starts:?}");
        tell(&message[*at..end], ranks);
    }
    true
}

/// Describes the calls in a record.
fn tell(record: &[u8], ranks: usize) {
    let head = Head::read(record).expect("the record has a head");
    let Some(calls) = calls_in(&head, &record[HEAD_BYTES..], ranks) else { return };
    let told: Vec<String> = calls.map(|call| call.to_string()).collect();
    assert!(told.len() == ranks && told.iter().all(|text| !text.is_empty()), "{told:?}");
}

#[cfg(test)]
mod tests {
    /// A record has a descriptor in it, so a change of the descriptor needs other inputs
    /// (fuzz/corpus.py).
    #[test]
    fn the_corpus_has_messages_that_are_accepted() {
        let inputs = crate::any_bytes::tests::inputs();
        let accepted = inputs.filter(|input| input[0] == 9 && super::are_accepted(&input[1..])).count();
        assert!(accepted >= 4, "{accepted} inputs are accepted");
    }
}
