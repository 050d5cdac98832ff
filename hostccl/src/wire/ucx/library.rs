//! Finds and opens UCX's library, `libucp.so.0`, at run time.
//!
//! Two copies of UCX in one process disturb each other, so a copy that the program has loaded comes
//! first. Otherwise the library is opened by the path in `DM_UCX_LIBRARY`, or by its name.
//!
//! # The environment
//! When UCX is loaded it replaces `mmap` and other functions of the C library, and installs signal
//! handlers. Only variables of the environment keep UCX from that, and UCX reads the variables
//! while it is being loaded. So [`open`] sets those of [`SETTINGS`] that the program has not set,
//! if no copy is in the process yet. `setenv` must not run while another thread of the program
//! reads the environment. `setenv` runs once in the life of the process, when the first
//! communicator over several hosts is made, and only with `DM_WIRE=ucx`. A program that cannot
//! allow a call of `setenv` at that time has to be started with the variables set. Then nothing is
//! set here. The variables stay set, because removing them would be a second change. Processes
//! that the program starts later inherit them.

use std::ffi::{CStr, CString, c_void};
use std::fmt;
use std::sync::OnceLock;

use super::api::{Functions, Status};

/// The name under which UCX's library is found.
const NAME: &CStr = c"libucp.so.0";

/// The oldest release whose layouts [`super::api`] has.
const OLDEST: (u32, u32) = (1, 13);

/// The variables that keep UCX from changing the process, and their values.
const SETTINGS: [(&str, &str); 3] = [("UCX_MEM_EVENTS", "n"), ("UCX_ERROR_SIGNALS", ""), ("UCX_HANDLE_ERRORS", "none")];

/// UCX's library, which stays open until the process ends.
#[derive(Debug)]
pub(super) struct Library {
    /// The library's functions.
    pub(super) functions: Functions,
    /// Major, minor and release number.
    pub(super) version: (u32, u32, u32),
}

impl Library {
    /// Returns the text that UCX has for a status.
    pub(super) fn text(&self, status: Status) -> String {
        // SAFETY: the function returns a static string for every number.
        let text = unsafe { (self.functions.status_text)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: as above.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor, release) = self.version;
        write!(f, "UCX {major}.{minor}.{release}")
    }
}

/// Returns UCX's library. Fails with the reason and what to do. Later calls return the answer of
/// the first call.
pub(super) fn open() -> Result<&'static Library, String> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    LIBRARY.get_or_init(load).as_ref().map_err(Clone::clone)
}

fn load() -> Result<Library, String> {
    let handle = handle()?;
    // SAFETY: the handle is never closed, and the names are C strings.
    let functions = Functions::load(|symbol| unsafe { libc::dlsym(handle, symbol.as_ptr()) });
    let functions = functions.map_err(|symbol| {
        format!("DM_WIRE=ucx: the UCX library lacks {symbol}: UCX {}.{} or later is needed", OLDEST.0, OLDEST.1)
    })?;
    let (mut major, mut minor, mut release) = (0, 0, 0);
    // SAFETY: the function writes three numbers.
    unsafe { (functions.get_version)(&raw mut major, &raw mut minor, &raw mut release) };
    check_version((major, minor, release))?;
    Ok(Library { functions, version: (major, minor, release) })
}

/// Refuses releases whose layouts are not known.
fn check_version((major, minor, release): (u32, u32, u32)) -> Result<(), String> {
    if major == OLDEST.0 && minor >= OLDEST.1 {
        return Ok(());
    }
    Err(format!(
        "DM_WIRE=ucx: the UCX library is release {major}.{minor}.{release}, and a release from {}.{} on, before {}.0, is needed: name another one in DM_UCX_LIBRARY, or unset DM_WIRE to use TCP",
        OLDEST.0,
        OLDEST.1,
        OLDEST.0 + 1
    ))
}

/// Opens the library.
fn handle() -> Result<*mut c_void, String> {
    // SAFETY: with RTLD_NOLOAD no code of the library runs.
    let there = unsafe { libc::dlopen(NAME.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    if !there.is_null() {
        return Ok(there);
    }
    for (name, value) in SETTINGS {
        if std::env::var_os(name).is_none() {
            // SAFETY: the head of this file says when this is sound, and what a program does that
            // cannot allow it.
            unsafe { std::env::set_var(name, value) };
        }
    }
    let named = std::env::var_os("DM_UCX_LIBRARY").filter(|path| !path.is_empty());
    let wanted = match &named {
        Some(path) => CString::new(path.as_encoded_bytes())
            .map_err(|_| "DM_UCX_LIBRARY contains a zero byte, which no path does".to_owned())?,
        None => NAME.to_owned(),
    };
    // SAFETY: the initialisers of UCX's library run as in any program that links it.
    let opened = unsafe { libc::dlopen(wanted.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !opened.is_null() {
        return Ok(opened);
    }
    // SAFETY: the text belongs to this thread until its next call of that kind.
    let reason = unsafe {
        let text = libc::dlerror();
        if text.is_null() { wanted.to_string_lossy() } else { CStr::from_ptr(text).to_string_lossy() }
    };
    Err(format!(
        "DM_WIRE=ucx needs UCX, which does not load: {reason}: install it (Debian: apt-get install libucx0; PyPI: libucx-cu12), name its libucp.so.0 in DM_UCX_LIBRARY, or unset DM_WIRE to use TCP"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_with_other_layouts_are_refused_with_the_number() {
        for good in [(1, 13, 0), (1, 13, 1), (1, 22, 0), (1, 99, 0)] {
            assert_eq!(check_version(good), Ok(()), "{good:?}");
        }
        for bad in [(1, 12, 1), (0, 99, 0), (2, 0, 0)] {
            let refused = check_version(bad).unwrap_err();
            assert!(refused.contains(&format!("release {}.{}.{}", bad.0, bad.1, bad.2)), "{refused}");
        }
    }
}
