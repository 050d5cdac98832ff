//! Gives the store's frame decoder any bytes. It does not panic, it trusts no length, and bytes
//! that arrive in pieces measure as the whole.
//!
//! `make fuzz` runs it for SECONDS=60. `fuzz/corpus.py add frame FILE` keeps an
//! input that it found, and `cargo test --test store_frames` replays what is kept.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/frames/mod.rs"]
mod frames;

fuzz_target!(|bytes: &[u8]| frames::check_any_bytes(bytes));
