//! The check of frames that the replay of the corpus and the fuzz target share.

use devicemesh::rendezvous::store::frame::{MAX_REQUEST, Measure, decode};

/// Checks what holds for any bytes, and panics where it does not hold. The bytes are read as the
/// server reads them: at once, and again in two pieces that end somewhere in the middle of each
/// request.
pub fn check_any_bytes(bytes: &[u8]) {
    let (mut rest, mut taken) = (bytes, 0);
    loop {
        let whole = decode(rest);
        let mut measure = Measure::default();
        let cut = rest.len().min(1 + taken % 97);
        let first = measure.length(&rest[..cut]);
        match (&whole, first) {
            // An error in the first piece is an error in the whole. A request that the first piece
            // holds whole is equal to the first request of the whole.
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
