//! The corpora of the fuzz targets, for the tests that replay them. fuzz/corpus.py writes them.

/// Returns every input of a target with its place (`fuzz/corpus/abi.hex:12`), which tells on which
/// input a check fails.
pub fn inputs(target: &str) -> Vec<(String, Vec<u8>)> {
    let name = format!("fuzz/corpus/{target}.hex");
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(&name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    let line = |(index, line): (usize, &str)| {
        assert!(line.len() % 2 == 0, "{name}:{}: half a byte at the end", index + 1);
        (format!("{name}:{}", index + 1), line.as_bytes().chunks(2).map(byte).collect())
    };
    text.lines().enumerate().map(line).collect()
}
