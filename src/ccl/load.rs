//! Finds the communicator library for a device type.
//!
//! The caller may name a library, and `DM_CCL_LIBRARY` may name one: by a path, by a name for the
//! dynamic loader, or as `python` for the wheel of a Python environment. The caller's choice comes
//! first. Where nobody names a library, cuda takes a copy that is in this process already, because
//! a communicator is valid only in the copy that made it; if there is none, it tries the usual
//! names. A program that has NCCL linked into itself gives its functions by a resolver, which comes
//! before `DM_CCL_LIBRARY`. cpu takes the embedded host engine, also when `DM_CCL_LIBRARY` names a
//! library that is not a host engine, because a GPU job may set that variable for its cuda meshes.

use std::ffi::{CString, c_void};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use libloading::os::unix;
use once_cell::sync::OnceCell;

use super::driver::has_device;
use super::hip::Hip;
use super::library::Library;
use super::resolver::Resolver;
use super::wheel;
use crate::error::{Error, Result, Status};
use crate::logging::Me;

/// The environment variable that names a library with NCCL's C API.
pub const LIBRARY_VARIABLE: &str = "DM_CCL_LIBRARY";

/// This word in place of a path means the NCCL wheel of a Python environment.
const PYTHON: &str = "python";

/// The names under which wheels and distributions ship NVIDIA's and AMD's libraries. The bare
/// libnccl.so is a development link.
const USUAL_NAMES: [&str; 4] = ["libnccl.so.2", "librccl.so.1", "libnccl.so", "librccl.so"];

/// The library that the program has linked into itself, and whether it can still be set.
#[derive(Default)]
struct OfProgram {
    /// The library behind the program's resolver.
    library: Option<Arc<Library>>,
    /// Whether a library for cuda was given out.
    is_in_use: bool,
}

static OF_PROGRAM: Mutex<OfProgram> = Mutex::new(OfProgram { library: None, is_in_use: false });

/// Makes the functions that `resolver` gives the library for device type cuda. `None` takes an
/// earlier resolver back. Fails where a library for cuda was given out already, because the new
/// library could not use the communicators of the earlier one.
pub(crate) fn set_resolver(resolver: Option<Resolver>) -> Result<()> {
    let library = resolver.map(|resolver| -> Result<Arc<Library>> {
        let name = "the program's own NCCL (dm_set_ccl_resolver)";
        let library = Library::from_lookup(name, |symbol| resolver.find(symbol))?;
        Ok(Arc::new(library.keep_resolver(resolver)))
    });
    // The program's functions have run before the lock, because they may call this library.
    let mut of_program = OF_PROGRAM.lock().unwrap_or_else(PoisonError::into_inner);
    if of_program.is_in_use {
        return Err(Error::invalid_state(
            "dm_set_ccl_resolver: a library for device type cuda is in use already; call it before the first dm_init, dm_world_init and dm_get_device_proc of device type cuda or NULL",
        ));
    }
    of_program.library = library.transpose()?;
    Ok(())
}

/// The library that the program gave for device type cuda.
pub(super) fn of_program() -> Option<Arc<Library>> {
    OF_PROGRAM.lock().unwrap_or_else(PoisonError::into_inner).library.clone()
}

/// Notes that a library for device type cuda is in use.
pub(super) fn note_in_use(found: Arc<Library>) -> Arc<Library> {
    OF_PROGRAM.lock().unwrap_or_else(PoisonError::into_inner).is_in_use = true;
    found
}

/// The embedded host engine.
pub(crate) fn embedded() -> Result<Arc<Library>> {
    static ENGINE: OnceCell<Arc<Library>> = OnceCell::new();
    ENGINE
        .get_or_try_init(|| {
            let library = Library::from_lookup("the embedded host engine", hostccl::symbol)?;
            Ok(Arc::new(library))
        })
        .cloned()
}

/// Says how the host engine of this process would reach ranks on other hosts: "TCP at 10.0.0.2
/// (eth0)". `address` is the address of this host that reaches the store. Fails where the
/// environment leaves the engine no way.
pub fn describe_wire(address: Option<IpAddr>) -> Result<String> {
    hostccl::describe_wire(address).map_err(Error::invalid)
}

/// The library at `path`: a path, a name for the dynamic loader, or `python`.
///
/// # Safety
/// The library's code runs in this process. Its functions that have names of NCCL's C API are
/// called as nccl.h declares them, so they must be those functions.
pub unsafe fn open(path: &str) -> Result<Arc<Library>> {
    let mut search = Search::default();
    let found = match path {
        PYTHON => {
            let (wheels, folders) = wheel::find();
            if wheels.is_empty() {
                search.tried.push(format!("{PYTHON} (no {} below {folders})", wheel::INSIDE));
            }
            wheels.iter().find_map(|wheel| search.load(&wheel.to_string_lossy()))
        }
        path => search.load(path),
    };
    found.map(Arc::new).ok_or_else(|| search.failure())
}

/// The library that makes communicators for `device_type` where the caller names none: for cuda the
/// program's own, then the library that [`LIBRARY_VARIABLE`] names, or the usual one. Whoever sets
/// that variable decides which code runs in the process, as with LD_PRELOAD.
pub fn for_device(device_type: &str) -> Result<Arc<Library>> {
    // SAFETY: nothing is named.
    unsafe { named_or_usual(device_type, None) }
}

/// The device type that is named. Where none is named, it is "cuda" if this machine has a device
/// and NCCL or RCCL, else "cpu".
pub(crate) fn device_type(named: Option<&str>) -> Result<&'static str> {
    match named {
        Some("cuda") => Ok("cuda"),
        Some("cpu") => Ok("cpu"),
        None if has_device() && for_device("cuda").is_ok() => Ok("cuda"),
        // An AMD device has the type "cuda" too, which is PyTorch's rule.
        None if Hip::may_have_device() && has_amd_device() => Ok("cuda"),
        None => Ok("cpu"),
        Some(other) => Err(match other.split_once(':') {
            Some((device_type, _)) => Error::invalid(format!(
                "device type with index is not supported, got {other}: pass {device_type}; the device is chosen by the local rank, or by dm_world_options.device"
            )),
            None => Error::invalid(format!("device_type is {other:?}, not \"cuda\" or \"cpu\"")),
        }),
    }
}

/// Whether the library for device type cuda is RCCL, and its runtime sees a device.
fn has_amd_device() -> bool {
    for_device("cuda").is_ok_and(|library| library.hip().is_some_and(|hip| hip.has_device()))
}

/// The library that makes communicators for `device_type`; `named` is the caller's choice.
///
/// # Safety
/// The conditions of [`open`] hold for the library that is named.
pub unsafe fn named_or_usual(device_type: &str, named: Option<&str>) -> Result<Arc<Library>> {
    // SAFETY: the caller's word for what it names, and that of whoever set the environment for the
    // variable.
    let open = |path: &str| unsafe { open(path) };
    let variable = std::env::var(LIBRARY_VARIABLE).ok().filter(|value| !value.is_empty());
    log::debug!(
        "{Me}: looks for a library of device type {device_type}: the options name {}, {LIBRARY_VARIABLE} is {}",
        named.unwrap_or("none"),
        variable.as_deref().unwrap_or("not set")
    );
    match (named, variable, device_type) {
        (Some(path), _, "cpu") => open(path).and_then(|library| match library.is_host_engine() {
            true => Ok(library),
            false => Err(Error::new(
                Status::Library,
                format!(
                    "{} is for devices, and device type cpu needs a library for host memory: leave dm_world_options.ccl_library NULL for the embedded one",
                    library.label()
                ),
            )),
        }),
        (None, Some(path), "cpu") => match open(&path)? {
            library if library.is_host_engine() => Ok(library),
            _ => embedded(),
        },
        (None, None, "cpu") => embedded(),
        (Some(path), ..) => open(path).map(vouched).map(note_in_use),
        (None, variable, _) => match (of_program(), variable) {
            (Some(library), _) => Ok(library),
            (None, Some(path)) => open(&path),
            (None, None) => search(),
        }
        .map(note_in_use),
    }
}

/// Notes that the program has named the library.
fn vouched(mut library: Arc<Library>) -> Arc<Library> {
    if let Some(own) = Arc::get_mut(&mut library) {
        own.vouch();
    }
    library
}

/// The copy that is in the process, or else the first of the usual names that can be used.
fn search() -> Result<Arc<Library>> {
    let mut search = Search::default();
    let found = USUAL_NAMES.iter().find_map(|name| search.loaded(name));
    let found = found.or_else(|| USUAL_NAMES.iter().find_map(|name| search.load(name)));
    found.map(Arc::new).ok_or_else(|| search.failure())
}

/// The libraries that were tried, each with the reason why it could not be used.
#[derive(Default)]
struct Search {
    /// The name of each library, with the reason.
    tried: Vec<String>,
}

impl Search {
    /// The copy with that SONAME that is in this process.
    fn loaded(&mut self, name: &str) -> Option<Library> {
        let handle = open_handle(name, libc::RTLD_NOW | libc::RTLD_NOLOAD).ok()?;
        let used = fill(name, handle);
        if let Ok(library) = &used {
            log::debug!("{Me}: takes {} from {}, which is in this process", library.label(), library.path());
        }
        used.map_err(|why| self.tried.push(format!("{name}, which is in this process ({why})"))).ok()
    }

    fn load(&mut self, name: &str) -> Option<Library> {
        let used = open_handle(name, libc::RTLD_NOW | libc::RTLD_LOCAL).and_then(|handle| fill(name, handle));
        match &used {
            Ok(library) => log::debug!("{Me}: loaded {} from {}", library.label(), library.path()),
            Err(why) => log::debug!("{Me}: cannot use {name}: {why}"),
        }
        used.map_err(|why| self.tried.push(format!("{name} ({why})"))).ok()
    }

    fn failure(&self) -> Error {
        Error::new(
            Status::Library,
            format!(
                "no usable communicator library: tried {}; set {LIBRARY_VARIABLE} or dm_world_options.ccl_library to the path of libnccl.so.2 or librccl.so.1, or to {PYTHON}",
                self.tried.join(", ")
            ),
        )
    }
}

fn open_handle(name: &str, flags: i32) -> std::result::Result<unix::Library, String> {
    CString::new(name).map_err(|_| "the path contains a NUL byte".to_owned())?;
    // SAFETY: a communicator library's initialisers are run by dlopen as in any program that links
    // it.
    unsafe { unix::Library::open(Some(name), flags) }.map_err(|error| one_line(&error))
}

pub(super) fn fill(name: &str, handle: unix::Library) -> std::result::Result<Library, String> {
    // SAFETY: the address is only turned into a function pointer of the type nccl.h declares for
    // that name.
    let lookup = |symbol: &str| unsafe {
        handle.get::<*const c_void>(symbol.as_bytes()).ok().map(|address| address.into_raw().cast_const())
    };
    let found = Library::from_lookup(name, lookup).map_err(|error| error.message().to_owned())?;
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
    use std::ffi::c_char;

    use super::*;

    #[test]
    fn the_embedded_engine_fills_the_whole_table() {
        let engine = embedded().unwrap();
        assert!(engine.is_host_engine());
        assert!(engine.version() >= 21_800, "{}", engine.version());
        assert!(engine.symbol("ncclAllReduce").is_some());
        assert!(engine.symbol("ncclNoSuchThing").is_none());
    }

    /// Gives no function, but the lock was free when it was called.
    unsafe extern "C" fn asks_itself(_: *mut c_void, _: *const c_char) -> *mut c_void {
        drop(of_program());
        std::ptr::null_mut()
    }

    #[test]
    fn a_resolver_may_ask_for_the_library_of_the_program() {
        let (ended, end) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            // SAFETY: the function may be called at any time, and gives NULL.
            let resolver = unsafe { Resolver::new(asks_itself, std::ptr::null_mut()) };
            ended.send(set_resolver(Some(resolver))).unwrap();
        });
        let outcome = end.recv_timeout(std::time::Duration::from_secs(30)).expect("the resolver returns");
        assert!(outcome.unwrap_err().message().contains("has no symbol ncclGetVersion"));
    }

    #[test]
    fn a_missing_library_is_named_with_the_reason() {
        // SAFETY: there is no such file.
        let error = unsafe { open("/nonexistent/libnccl.so.2") }.unwrap_err();
        assert_eq!(error.status(), Status::Library);
        assert!(error.message().contains("/nonexistent/libnccl.so.2"), "{error}");
    }

    #[test]
    fn a_library_without_nccl_is_refused_with_the_missing_symbol() {
        // SAFETY: the C library has no function of NCCL's.
        let error = unsafe { open("libc.so.6") }.unwrap_err();
        assert_eq!(error.status(), Status::Library);
        assert!(error.message().contains("has no symbol nccl"), "{error}");
    }
}
