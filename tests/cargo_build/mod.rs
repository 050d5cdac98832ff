//! Builds a part of the workspace by cargo while a test runs.

use std::path::PathBuf;
use std::process::Command;

/// Has cargo build something in this test's profile, and gives the place of `file`.
pub fn cargo_build(what: &[&str], file: &str) -> PathBuf {
    let folder = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().to_owned();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet"]).args(what).arg("--target-dir").arg(folder.parent().unwrap());
    if folder.ends_with("release") {
        cargo.arg("--release");
    }
    assert!(cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success());
    folder.join(file)
}

/// Builds the host engine as a shared library of its own, with the features that its packages have
/// for `cargo test` (hostccl/tests/c_library.rs says why).
pub fn shared_engine() -> PathBuf {
    let engine = ["--package", "hostccl-capi", "--package", "hostccl", "--lib", "--test", "c_library"];
    cargo_build(&engine, "libhostccl.so")
}
