//! Gives any bytes to everything that reads bytes from the network, for the fuzz target `wire` and
//! for the replay of its corpus. The module is not in the library: only tests and fuzzers have it.

use crate::notice::Said;
use crate::wire::{NOTICE_BYTES, address, tcp, ucx};
use crate::{bootstrap, gathering, remote_message, shrink};

/// The readers. The first byte of an input chooses one.
const READERS: [fn(&[u8]); 11] = [
    bootstrap::any_bytes::message,
    bootstrap::any_bytes::connection,
    tcp::any_bytes::hello,
    tcp::any_bytes::header,
    tcp::any_bytes::frames,
    tcp::any_bytes::records,
    ucx::any_bytes::check,
    notice,
    shrink::check_letter,
    gathering::any_bytes::records,
    remote_message::any_bytes,
];

/// Checks what holds for any bytes of another process, and panics where it does not hold.
pub fn check(bytes: &[u8]) {
    let Some((reader, bytes)) = bytes.split_first() else { return };
    READERS[usize::from(*reader) % READERS.len()](bytes);
}

/// A notice that can be read has at most [`NOTICE_BYTES`] bytes when it is written again, and names
/// only ranks that exist. Addresses are as short as notices, so this function reads them, too.
fn notice(bytes: &[u8]) {
    if let Some(address) = address::parse(bytes, 3) {
        assert_eq!(address::parse(&address::to_bytes(&address), 3), Some(address));
    }
    let nranks = 1024.min(bytes.len() * 5);
    let Some(said) = Said::decode(bytes, nranks) else { return };
    let again = said.encode();
    assert!(again.len() <= NOTICE_BYTES, "{} bytes for {said:?}", again.len());
    assert!(Said::decode(&again, nranks).is_some(), "{said:?}");
}

#[cfg(test)]
pub(crate) mod tests {
    /// Returns the inputs of the corpus, in the order of their lines.
    pub(crate) fn inputs() -> impl Iterator<Item = Vec<u8>> {
        include_str!("../../fuzz/corpus/wire.hex").lines().map(|text| {
            let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
            (0..text.len()).step_by(2).map(byte).collect()
        })
    }

    /// `make fuzz FUZZ=wire` finds inputs, and fuzz/corpus.py keeps them.
    #[test]
    fn the_corpus_harms_no_reader() {
        for (line, bytes) in inputs().enumerate() {
            println!("fuzz/corpus/wire.hex:{}", line + 1);
            super::check(&bytes);
        }
        assert!(inputs().count() >= 60, "{} inputs", inputs().count());
    }
}
