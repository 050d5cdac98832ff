//! The store's frame decoder on any bytes: no panic, no length taken on trust, and bytes that come in pieces measure as the whole.
//!
//! `make fuzz` (SECONDS=60). What it finds goes into fuzz/corpus/frame, which `cargo test --test store_frames` replays.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/frames/mod.rs"]
mod frames;

fuzz_target!(|bytes: &[u8]| frames::check_any_bytes(bytes));
