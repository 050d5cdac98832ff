//! Checks what must hold when a peer sends arbitrary bytes in place of a header, a greeting or an
//! address.

use super::frame::{Greeting, Header, parse_address};

/// Checks that a header or a greeting that can be read is written as the bytes from which it was
/// read. Checks that an address that can be read has UCX's own part.
pub(crate) fn check(bytes: &[u8]) {
    if let Some(header) = Header::parse(bytes) {
        assert_eq!(header.to_bytes(), bytes);
    }
    if let Some(greeting) = Greeting::parse(bytes) {
        assert_eq!(greeting.to_bytes(), bytes);
    }
    if let Some((place, worker)) = parse_address(bytes) {
        assert!(!worker.is_empty() && bytes.ends_with(worker) && !place.contains(char::is_control));
    }
}
