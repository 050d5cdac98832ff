//! Gives libhostccl.so its SONAME, and makes a link of that name beside the library.
//!
//! The SONAME has MAJOR.MINOR until 1.0, because minor versions may break the ABI until then, and
//! MAJOR afterwards. The link lets a program that is linked against the build tree find the library
//! there.

use std::path::Path;
use std::{env, fs, os};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let variable = |name: &str| env::var(name).unwrap_or_default();
    if variable("CARGO_CFG_TARGET_OS") != "linux" {
        return;
    }
    let (major, minor) = (variable("CARGO_PKG_VERSION_MAJOR"), variable("CARGO_PKG_VERSION_MINOR"));
    let version = if major == "0" { format!("{major}.{minor}") } else { major };
    let soname = format!("libhostccl.so.{version}");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{soname}");

    // OUT_DIR is <profile>/build/<package>/out.
    if let Some(profile) = Path::new(&variable("OUT_DIR")).ancestors().nth(3) {
        let link = profile.join(&soname);
        let _ = fs::remove_file(&link);
        if let Err(error) = os::unix::fs::symlink("libhostccl.so", &link) {
            println!("cargo:warning=no link {}: {error}", link.display());
        }
    }
}
