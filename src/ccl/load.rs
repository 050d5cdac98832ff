//! Which communicator library serves a device type, and how it is found.
//!
//! cpu: the library that the caller names, else the embedded host engine (also when `DM_CCL_LIBRARY` names a library that is
//! not a host engine, because a GPU job may set that variable for its cuda meshes). cuda: the library that the caller
//! names, else `DM_CCL_LIBRARY`, else a copy that is in the process already, else the usual names.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use once_cell::sync::OnceCell;

use super::library::Library;
use crate::error::{Error, Result, Status};

/// The environment variable that names a library with NCCL's C API.
pub const LIBRARY_VARIABLE: &str = "DM_CCL_LIBRARY";

/// What wheels and distributions ship, NVIDIA's and AMD's. The bare libnccl.so is a development link.
const USUAL_NAMES: [&str; 4] = ["libnccl.so.2", "librccl.so.1", "libnccl.so", "librccl.so"];

/// The embedded host engine.
pub fn embedded() -> Result<Arc<Library>> {
    static ENGINE: OnceCell<Arc<Library>> = OnceCell::new();
    ENGINE
        .get_or_try_init(|| {
            let library = Library::from_lookup("the embedded host engine", None, hostccl::symbol)?;
            Ok(Arc::new(library))
        })
        .cloned()
}

/// The library at `path` (a path, or a name for the dynamic loader).
pub fn open(path: &str) -> Result<Arc<Library>> {
    open_handle(path, libc::RTLD_NOW | libc::RTLD_LOCAL)
        .map(Arc::new)
        .map_err(|why| Error::new(Status::Library, format!("no usable communicator library at {path}: {why}")))
}

/// The library that makes communicators for `device_type`; `named` is the caller's choice.
pub fn for_device(device_type: &str, named: Option<&str>) -> Result<Arc<Library>> {
    let variable = std::env::var(LIBRARY_VARIABLE).ok().filter(|value| !value.is_empty());
    match (named, variable, device_type) {
        (Some(path), _, _) => open(path),
        (None, Some(path), "cpu") => match open(&path)? {
            library if library.is_host_engine() => Ok(library),
            _ => embedded(),
        },
        (None, None, "cpu") => embedded(),
        (None, Some(path), _) => open(&path),
        (None, None, _) => search(),
    }
}

fn search() -> Result<Arc<Library>> {
    let mut tried = Vec::new();
    for name in USUAL_NAMES {
        // A communicator is valid only in the copy that made it, so a copy that the program loaded itself comes first.
        if let Ok(library) = open_handle(name, libc::RTLD_NOW | libc::RTLD_NOLOAD) {
            return Ok(Arc::new(library));
        }
    }
    for name in USUAL_NAMES {
        match open_handle(name, libc::RTLD_NOW | libc::RTLD_LOCAL) {
            Ok(library) => return Ok(Arc::new(library)),
            Err(why) => tried.push(format!("{name} ({why})")),
        }
    }
    Err(Error::new(
        Status::Library,
        format!(
            "no communicator library for device type cuda; tried {}; set {LIBRARY_VARIABLE} or dm_world_options.ccl_library to the path of libnccl.so.2",
            tried.join(", ")
        ),
    ))
}

fn open_handle(name: &str, flags: i32) -> std::result::Result<Library, String> {
    use libloading::os::unix;
    CString::new(name).map_err(|_| "the path contains a NUL byte".to_owned())?;
    // SAFETY: a communicator library's initialisers are run by dlopen as in any program that links it.
    let handle = unsafe { unix::Library::open(Some(name), flags) }.map_err(|error| one_line(&error))?;
    // SAFETY: the address is only turned into a function pointer of the type nccl.h declares for that name.
    let lookup = |symbol: &str| unsafe {
        handle.get::<*const c_void>(symbol.as_bytes()).ok().map(|address| address.into_raw().cast_const())
    };
    let found = Library::from_lookup(name, None, lookup).map_err(|error| error.message().to_owned())?;
    Ok(found.keep(handle))
}

fn one_line(error: &libloading::Error) -> String {
    let mut text = error.to_string();
    if let Some(source) = std::error::Error::source(error) {
        text = source.to_string();
    }
    text.replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_engine_fills_the_whole_table() {
        let engine = embedded().unwrap();
        assert!(engine.is_host_engine());
        assert!(engine.version() >= 21_800, "{}", engine.version());
        assert!(engine.symbol("ncclAllReduce").is_some());
        assert!(engine.symbol("ncclNoSuchThing").is_none());
    }

    #[test]
    fn a_missing_library_is_named_with_the_reason() {
        let error = open("/nonexistent/libnccl.so.2").unwrap_err();
        assert_eq!(error.status(), Status::Library);
        assert!(error.message().contains("/nonexistent/libnccl.so.2"), "{error}");
    }

    #[test]
    fn a_library_without_nccl_is_refused_with_the_missing_symbol() {
        let error = open("libc.so.6").unwrap_err();
        assert_eq!(error.status(), Status::Library);
        assert!(error.message().contains("has no symbol nccl"), "{error}");
    }
}
