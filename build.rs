//! Gives the shared library its SONAME and its symbols a version, and puts the link of that name
//! beside the library, so that a program linked against the build tree finds it there.

use std::path::Path;
use std::{env, fs, os};

const LIBRARY: &str = "libdevicemesh.so";

fn main() {
    // The library of the Python wheel (bindings/python/native) has this script, too, and no file
    // build.rs. Cargo runs a script again anyway when it has compiled the script again.
    println!("cargo::rerun-if-changed=Cargo.toml");
    let part = |name| env::var(format!("CARGO_PKG_VERSION_{name}")).expect("cargo sets the version's parts");
    // Below 1.0 a minor version may break the ABI, so it is part of the name.
    let soname = match part("MAJOR").as_str() {
        "0" => format!("{LIBRARY}.0.{}", part("MINOR")),
        major => format!("{LIBRARY}.{major}"),
    };
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,{soname}");
    // The SONAME becomes the version of every exported symbol: dm_init@@libdevicemesh.so.0.2. No
    // version script of our own can do this, because rustc passes one without a version, and a
    // linker takes no second one beside it. GNU ld alone has this option, and rustc's default on
    // x86_64 is rust-lld.
    println!("cargo::rustc-cdylib-link-arg=-fuse-ld=bfd");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--default-symver");
    // dlclose leaves the library mapped, because threads, handlers of pthread_atfork and the
    // recording outlive the call. NCCL closes its profiler plugin when its last communicator ends.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");

    // The wheel needs no link, and its build must not touch a link that programs use.
    if env::var("CARGO_PKG_NAME").is_ok_and(|name| name != "devicemesh") {
        return;
    }
    // OUT_DIR is <profile>/build/<package>/out.
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    if let Some(profile) = Path::new(&out).ancestors().nth(3) {
        remove_links(profile);
        let link = profile.join(&soname);
        if let Err(error) = os::unix::fs::symlink(LIBRARY, &link) {
            println!("cargo::warning=no link {}: {error}", link.display());
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
