//! Replays the fuzzer's corpus, so that a defect that was ever found stays mended.

mod corpus;
mod frames;

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
