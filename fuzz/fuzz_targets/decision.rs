//! Gives the parser of decisions any text. It does not panic, it trusts no length, and what it
//! reads is written as it was.
//!
//! `make fuzz FUZZ=decision` runs it for SECONDS=60. `fuzz/corpus.py add decision FILE` keeps an
//! input that it found, and `cargo test --test decisions` replays what is kept.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/decision_texts/mod.rs"]
mod decision_texts;

fuzz_target!(|text: &str| decision_texts::check_any_text(text));
