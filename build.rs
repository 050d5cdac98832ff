//! Gives the shared library its SONAME, and puts the link of that name beside it, so that a program linked against the build
//! tree finds it there.

use std::path::Path;
use std::{env, fs, os};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let part = |name| env::var(format!("CARGO_PKG_VERSION_{name}")).expect("cargo sets the version's parts");
    // Below 1.0 a minor version may break the ABI, so it is part of the name.
    let soname = match part("MAJOR").as_str() {
        "0" => format!("libdevicemesh.so.0.{}", part("MINOR")),
        major => format!("libdevicemesh.so.{major}"),
    };
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,{soname}");

    // OUT_DIR is <profile>/build/<package>/out.
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    if let Some(profile) = Path::new(&out).ancestors().nth(3) {
        let link = profile.join(&soname);
        let _ = fs::remove_file(&link);
        if let Err(error) = os::unix::fs::symlink("libdevicemesh.so", &link) {
            println!("cargo::warning=no link {}: {error}", link.display());
        }
    }
}
