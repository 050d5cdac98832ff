//! Builds a part of the workspace by cargo while a test runs.

use std::path::PathBuf;
use std::process::Command;

/// The packages and features with which tests/support/cargo.py builds the tests. With these, cargo
/// finds the libraries that it compiled for them.
const WORKSPACE: [&str; 9] = [
    "--workspace",
    "--exclude",
    "devicemesh-benches",
    "--exclude",
    "devicemesh-header",
    "--exclude",
    "devicemesh-wheel",
    "--features",
    "cudarc",
];

/// Has cargo build something in this test's profile, and gives the place of `file`.
pub fn cargo_build(what: &[&str], file: &str) -> PathBuf {
    let folder = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().to_owned();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet"]).args(WORKSPACE).args(what).arg("--target-dir").arg(folder.parent().unwrap());
    if folder.ends_with("release") {
        cargo.arg("--release");
    }
    assert!(cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success());
    folder.join(file)
}

/// Builds the host engine as a shared library of its own. A test among the targets
/// lets cargo give all packages the features that they have for `cargo test`.
pub fn shared_engine() -> PathBuf {
    cargo_build(&["--lib", "--test", "c_library"], "libhostccl.so")
}
