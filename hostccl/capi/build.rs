//! Gives libhostccl.so its SONAME, and makes a link of that name beside the library. Its symbols
//! have no version, because programs that were linked against libnccl ask for none.
//!
//! The SONAME has MAJOR.MINOR until 1.0, because minor versions may break the ABI until then, and
//! MAJOR afterwards. The link lets a program that is linked against the build tree find the library
//! there.

use std::path::Path;
use std::{env, fs, os};

const LIBRARY: &str = "libhostccl.so";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let variable = |name: &str| env::var(name).unwrap_or_default();
    if variable("CARGO_CFG_TARGET_OS") != "linux" {
        return;
    }
    let (major, minor) = (variable("CARGO_PKG_VERSION_MAJOR"), variable("CARGO_PKG_VERSION_MINOR"));
    let version = if major == "0" { format!("{major}.{minor}") } else { major };
    let soname = format!("{LIBRARY}.{version}");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{soname}");

    // OUT_DIR is <profile>/build/<package>/out.
    if let Some(profile) = Path::new(&variable("OUT_DIR")).ancestors().nth(3) {
        remove_links(profile);
        let link = profile.join(&soname);
        if let Err(error) = os::unix::fs::symlink(LIBRARY, &link) {
            println!("cargo:warning=no link {}: {error}", link.display());
        }
    }
}

/// Removes the links that builds of this and of other versions have left beside the library.
/// Otherwise a program that was linked against an earlier version would load this one.
fn remove_links(profile: &Path) {
    for entry in fs::read_dir(profile).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().to_string_lossy().starts_with(&format!("{LIBRARY}."));
        if is_ours && fs::read_link(entry.path()).is_ok_and(|target| target == Path::new(LIBRARY)) {
            let _ = fs::remove_file(entry.path());
        }
    }
}
