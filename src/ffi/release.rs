//! Refuses programs that were linked against another release, which loaded this library all the
//! same because a file or link has that release's name. Such a program passes arguments of other
//! types: without this check it would fail in the middle, or compute something else.

use std::ffi::{CStr, c_void};
use std::path::Path;
use std::sync::OnceLock;

use crate::error::{Error, Result};

/// The part of the shared library's name that stands before the version.
const STEM: &str = "libdevicemesh.so.";

/// Refuses the call in a process that loaded this library under another release's name.
/// dm_world_init, dm_init, dm_from_comms, dm_deserialize and dm_plan_ranks call it, because nearly
/// every program begins with one of them.
pub(super) fn check() -> Result<()> {
    static REFUSED: OnceLock<Option<String>> = OnceLock::new();
    match REFUSED.get_or_init(|| refusal(&loaded_as()?)) {
        None => Ok(()),
        Some(message) => Err(Error::unsupported(message.as_str())),
    }
}

/// The path under which the dynamic linker found this library, or the program's own name in a
/// program that is linked statically.
fn loaded_as() -> Option<String> {
    static HERE: u8 = 0;
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: the address is only compared with those of the loaded objects, and info is writable.
    let found = unsafe { libc::dladdr(std::ptr::from_ref(&HERE).cast::<c_void>(), &mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr gave a NUL-terminated name, which lives as long as this library is loaded.
    Some(unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned())
}

/// Why a library that was loaded as `path` must not be used, or None.
fn refusal(path: &str) -> Option<String> {
    let asked = Path::new(path).file_name()?.to_str()?.strip_prefix(STEM)?;
    let is_version = asked.split('.').all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()));
    let ours = env!("CARGO_PKG_VERSION");
    // 0.2, 0.2.0 and 0.2.1 are one SONAME: the major version, and below 1.0 the minor one.
    let series = |version: &str| {
        let parts = if version.starts_with("0.") { 2 } else { 1 };
        version.split('.').take(parts).map(str::to_owned).collect::<Vec<_>>()
    };
    if !is_version || series(asked) == series(ours) {
        return None;
    }
    Some(format!(
        "this program asks for libdevicemesh {asked}, but {path} is libdevicemesh {ours}, whose ABI differs: compile and link the program with {ours}, or install {asked} under that name"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_another_release_is_refused() {
        let ours = env!("CARGO_PKG_VERSION");
        let (series, _) = ours.rsplit_once('.').unwrap();
        let names = [
            "libdevicemesh.so",
            "libdevicemesh.so.old",
            "libdevicemesh.so.",
            "train",
            "/tmp/libdevicemesh.so.0.1/train",
        ];
        for name in names
            .map(str::to_owned)
            .into_iter()
            .chain([format!("/usr/lib/libdevicemesh.so.{series}"), format!("libdevicemesh.so.{ours}")])
        {
            assert_eq!(refusal(&name), None, "{name}");
        }
        for asked in ["0.1", "0.1.0", "0.99", "9", "9.2"] {
            let path = format!("/usr/lib/libdevicemesh.so.{asked}");
            let message = refusal(&path).expect(asked);
            let said = format!("asks for libdevicemesh {asked}, but {path} is libdevicemesh {ours}");
            assert!(message.contains(&said), "{message}");
        }
    }
}
