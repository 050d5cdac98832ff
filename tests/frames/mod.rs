//! Shared by the replay of the corpus and the fuzz target.

use devicemesh::rendezvous::store::frame::{MAX_REQUEST, Measure, decode};

/// What holds for any bytes: panics where it does not. They are taken apart as the server does it, at once and again
/// in two pieces that end somewhere in the middle of each request.
pub fn check_any_bytes(bytes: &[u8]) {
    let (mut rest, mut taken) = (bytes, 0);
    loop {
        let whole = decode(rest);
        let mut measure = Measure::default();
        let cut = rest.len().min(1 + taken % 97);
        let first = measure.length(&rest[..cut]);
        match (&whole, first) {
            // What is wrong with the first piece is wrong with the whole; a request that it holds whole is the same one.
            (whole, Err(why)) => assert_eq!(whole.as_ref().err(), Some(&why)),
            (whole, Ok(Some(length))) => assert!(matches!(whole, Ok(Some((_, used))) if *used == length)),
            (whole, Ok(None)) => match (measure.length(rest), whole) {
                (Ok(measured), Ok(whole)) => assert_eq!(measured, whole.as_ref().map(|(_, used)| *used)),
                (measured, whole) => assert_eq!(measured.err().as_ref(), whole.as_ref().err()),
            },
        }
        let Ok(Some((_, used))) = whole else { return };
        assert!(used > 0 && used <= rest.len() && used <= MAX_REQUEST);
        (rest, taken) = (&rest[used..], taken + used);
    }
}
