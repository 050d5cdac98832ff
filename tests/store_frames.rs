//! Replays the fuzzer's corpora of frames and of encrypted connections, so that a defect that was
//! ever found stays mended.

mod corpus;
mod frames;
mod records;

use frames::check_any_bytes;

#[test]
fn the_corpus_is_taken_apart_as_ever() {
    let inputs = corpus::inputs("frame");
    for (place, bytes) in &inputs {
        println!("{place}");
        // Every beginning of the input is an input too.
        (0..=bytes.len()).for_each(|end| check_any_bytes(&bytes[..end]));
    }
    assert!(inputs.len() >= 30, "{} inputs", inputs.len());
}

#[test]
fn nothing_opens_but_what_was_sealed() {
    let inputs = corpus::inputs("records");
    for (place, bytes) in &inputs {
        println!("{place}");
        [0, 1, 2].into_iter().for_each(|kind| records::check_any_bytes(&[&[kind], &bytes[1..]].concat()));
    }
    assert!(inputs.len() >= 12, "{} inputs", inputs.len());
}

proptest::proptest! {
    #[test]
    fn nothing_opens_but_what_was_sealed_after_random_changes(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..60)) {
        records::check_any_bytes(&bytes);
    }
}
