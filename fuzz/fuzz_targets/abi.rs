//! The C ABI on any sequence of calls: no memory error, no panic, no leak, and the contract of the header after each call.
//!
//! `make fuzz-abi` (SECONDS=60), with AddressSanitizer. What it finds goes into fuzz/corpus/abi, which `cargo test --test abi_corpus` replays.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/abi/mod.rs"]
mod abi;

fuzz_target!(|bytes: &[u8]| abi::check_any_calls(bytes));
