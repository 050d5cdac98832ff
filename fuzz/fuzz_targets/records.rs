//! Gives both sides of an encrypted connection any bytes in place of a handshake and of records. No
//! side panics, and nothing opens but what the other side has sealed, in its order.
//!
//! `make fuzz FUZZ=records` runs it for SECONDS=60. `fuzz/corpus.py add records FILE` keeps an
//! input that it found, and `cargo test --test store_frames` replays what is kept.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/records/mod.rs"]
mod records;

fuzz_target!(|bytes: &[u8]| records::check_any_bytes(bytes));
