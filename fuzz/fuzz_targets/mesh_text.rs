//! Gives the parser of meshes as text any text. It does not panic, it trusts no length, and what it
//! accepts means what the text says.
//!
//! `make fuzz FUZZ=mesh_text` runs it for SECONDS=60. `fuzz/corpus.py add mesh_text FILE` keeps an
//! input that it found, and `cargo test --test mesh_text_random` replays what is kept.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/texts/mod.rs"]
mod texts;

fuzz_target!(|text: &str| texts::check_any_text(text, 64, 5));
