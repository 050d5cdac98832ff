//! The fuzzer's corpus, replayed: what was ever found stays mended.

mod frames;

use frames::check_any_bytes;

#[test]
fn the_corpus_is_taken_apart_as_ever() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/frame");
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        // All beginnings of it too.
        (0..=bytes.len()).for_each(|end| check_any_bytes(&bytes[..end]));
        files += 1;
    }
    assert!(files >= 30, "{files} files in {folder}");
}
