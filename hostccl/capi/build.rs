//! Gives libhostccl.so a SONAME: MAJOR.MINOR until 1.0, when minor versions may still break the ABI, then MAJOR.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let variable = |name: &str| env::var(name).unwrap_or_default();
    if variable("CARGO_CFG_TARGET_OS") != "linux" {
        return;
    }
    let (major, minor) = (variable("CARGO_PKG_VERSION_MAJOR"), variable("CARGO_PKG_VERSION_MINOR"));
    let version = if major == "0" { format!("{major}.{minor}") } else { major };
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libhostccl.so.{version}");
}
