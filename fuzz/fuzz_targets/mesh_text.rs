//! The parser of meshes as text on any text: no panic, no length taken on trust, and what is accepted means what it says.
//!
//! `make fuzz FUZZ=mesh_text` (SECONDS=60). What it finds goes into fuzz/corpus/mesh_text, which `cargo test --test mesh_text_random` replays.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/texts/mod.rs"]
mod texts;

fuzz_target!(|text: &str| texts::check_any_text(text, 64, 5));
