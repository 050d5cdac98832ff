//! Calls the C ABI in any sequence. No call panics, leaks or breaks memory, and after each call
//! the contract of the header holds.
//!
//! `make fuzz-abi` runs it for SECONDS=60. AddressSanitizer runs beside it.
//! `fuzz/corpus.py add abi FILE` keeps an input that it found, and `cargo test --test abi_corpus`
//! replays what is kept.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/abi/mod.rs"]
mod abi;

fuzz_target!(|bytes: &[u8]| abi::check_any_calls(bytes));
