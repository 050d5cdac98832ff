//! Gives any bytes to everything in the host engine that reads bytes from the network: the
//! messages of a join, hellos, frames, encrypted records, notices, letters, the records of a
//! gathering, and the heads of messages. No reader panics or trusts a length, and frames never
//! write outside of the buffer of a receive.
//!
//! `make fuzz FUZZ=wire` runs it for SECONDS=60. `fuzz/corpus.py add wire FILE` keeps an input that
//! it found, and `cargo test -p hostccl any_bytes` replays what is kept.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| hostccl::any_bytes::check(bytes));
