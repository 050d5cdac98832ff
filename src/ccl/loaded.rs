//! Finds the copy of NCCL that made a communicator: the one that is loaded in this process.
//!
//! A communicator is valid only in the copy that made it, and nothing in the communicator tells
//! which copy that is. So the library of a communicator that a program made itself is never
//! guessed: it is the copy that the program named, or the only one that is loaded.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::Arc;

use libloading::os::unix;

use super::library::Library;
use super::load::{LIBRARY_VARIABLE, fill, for_device, note_in_use, of_program};
use crate::error::{Error, Result, Status};
use crate::logging::Me;

/// The library of communicators that the program has made for `device_type`. `of_world` is the
/// library of the world that the mesh joins.
pub(crate) fn to_adopt(device_type: &str, of_world: Option<&Arc<Library>>) -> Result<Arc<Library>> {
    if device_type != "cuda" {
        return of_world.map_or_else(|| for_device(device_type), |library| Ok(Arc::clone(library)));
    }
    if let Some(library) = of_world.filter(|library| library.is_vouched() || library.is_host_engine()) {
        return Ok(Arc::clone(library));
    }
    if let Some(library) = of_program() {
        return Ok(note_in_use(library));
    }
    let mut copies = copies();
    // The host engine stands beside NCCL in a program that has meshes of both device types.
    if copies.iter().any(|copy| !copy.is_host_engine()) {
        copies.retain(|copy| !copy.is_host_engine());
    }
    if let [_, _, ..] = copies[..] {
        let paths: Vec<String> = copies.iter().map(|copy| format!("{} ({})", copy.path(), copy.release())).collect();
        return Err(Error::new(
            Status::Library,
            format!(
                "{} copies of NCCL are in this process, and a communicator works only in the copy that made it: {}; name that copy in dm_world_options.ccl_library and pass the world in dm_init_options.world, or pass its functions by dm_set_ccl_resolver",
                copies.len(),
                paths.join(", ")
            ),
        ));
    }
    match (copies.pop(), of_world) {
        (Some(only), Some(world)) if only.is_same(world) => Ok(Arc::clone(world)),
        (Some(only), None) => {
            log::debug!("{Me}: adopts communicators of {} at {}, which is in this process", only.label(), only.path());
            Ok(note_in_use(Arc::new(only)))
        }
        (only, _) => Err(Error::new(
            Status::Library,
            format!(
                "no loaded library can have made this communicator ({}): where the program has NCCL linked into itself, pass its functions by dm_set_ccl_resolver; {LIBRARY_VARIABLE} is not looked at, because another copy cannot use the communicator",
                only.map_or_else(
                    || "this process has no shared NCCL".to_owned(),
                    |only| format!("found {}", only.path())
                )
            ),
        )),
    }
}

/// The libraries in this process that have NCCL's functions, each once.
fn copies() -> Vec<Library> {
    // The loader's lock is held while it lists the objects, so nothing else is done meanwhile.
    unsafe extern "C" fn note(info: *mut libc::dl_phdr_info, _size: usize, names: *mut c_void) -> c_int {
        // SAFETY: `names` is the vector of this call, and the loader gives a valid record, whose
        // name may be NULL.
        unsafe {
            let name = (*info).dlpi_name;
            if !name.is_null() {
                (*names.cast::<Vec<CString>>()).push(CStr::from_ptr(name).to_owned());
            }
        }
        0
    }
    let mut names: Vec<CString> = Vec::new();
    // SAFETY: the function keeps to the loader's contract, and the vector outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut names).cast()) };
    let mut copies = BTreeMap::new();
    for name in names {
        if let Some((base, path)) = nccl_behind(&name) {
            copies.entry(base).or_insert(path);
        }
    }
    copies.into_values().filter_map(|path| library_at(&path)).collect()
}

/// Finds NCCL's functions through the loaded object `name`, and returns the base address and the
/// path of the object that has them. An object finds the functions of the libraries that it is
/// linked to as well.
fn nccl_behind(name: &CStr) -> Option<(usize, CString)> {
    let handle = open(name)?;
    // SAFETY: the address is only looked up.
    let address = unsafe { handle.get::<*const c_void>(b"ncclCommInitRankConfig\0") }.ok()?.into_raw();
    // SAFETY: all fields of the struct are pointers, which may be NULL.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the address is only looked up, and `found` is writable.
    if unsafe { libc::dladdr(address.cast_const(), &raw mut found) } == 0 || found.dli_fname.is_null() {
        return None;
    }
    // The main program is listed without a name.
    let is_program = name.is_empty() && open(&owned(found.dli_fname)).is_none();
    Some((found.dli_fbase.addr(), if is_program { CString::default() } else { owned(found.dli_fname) }))
}

fn owned(name: *const std::ffi::c_char) -> CString {
    // SAFETY: the loader's string is not NULL, and lives as long as the object.
    unsafe { CStr::from_ptr(name) }.to_owned()
}

/// The object of that name, if it is loaded. The empty name stands for the main program.
fn open(name: &CStr) -> Option<unix::Library> {
    if name.is_empty() {
        return Some(unix::Library::this());
    }
    // SAFETY: an object that is loaded already runs no initialiser again.
    unsafe { unix::Library::open(Some(name.to_str().ok()?), libc::RTLD_NOW | libc::RTLD_NOLOAD) }.ok()
}

/// The library at `path`, unless it is too old or lacks a function.
fn library_at(path: &CStr) -> Option<Library> {
    let name = if path.is_empty() { "the program itself".into() } else { path.to_string_lossy() };
    fill(&name, open(path)?).inspect_err(|why| log::debug!("{Me}: cannot use {name}: {why}")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_nccl_adopts_nothing() {
        let error = to_adopt("cuda", None).unwrap_err();
        assert_eq!(error.status(), Status::Library);
        assert!(error.message().contains("this process has no shared NCCL"), "{error}");
        assert!(to_adopt("cpu", None).unwrap().is_host_engine());
    }
}
