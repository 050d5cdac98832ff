//! Calls libdevicemesh.so as a C program does: through its exported functions, with handles and C
//! strings. Calls of the rlib's functions would leave out the cost of a shared library, mainly
//! that of its thread-local storage.

use std::ffi::{CStr, c_char};
use std::ptr;

use devicemesh::ffi::{dm_call_options, dm_init_options, dm_mesh, dm_status, dm_world, dm_world_options, ncclComm_t};

type Slice = unsafe extern "C" fn(*const dm_mesh, *const *const c_char, usize, *mut *mut dm_mesh) -> dm_status;
type Init = unsafe extern "C" fn(
    *const c_char,
    *const i32,
    usize,
    *const *const c_char,
    *const dm_init_options,
    *mut *mut dm_mesh,
) -> dm_status;
type Flatten =
    unsafe extern "C" fn(*const dm_mesh, *const c_char, *const dm_call_options, *mut *mut dm_mesh) -> dm_status;
type Unflatten = unsafe extern "C" fn(
    *const dm_mesh,
    *const c_char,
    *const i32,
    usize,
    *const *const c_char,
    *const dm_call_options,
    *mut *mut dm_mesh,
) -> dm_status;

/// The library's functions under their names without the prefix.
pub struct Library {
    pub last_error: extern "C" fn() -> *const c_char,
    pub world_init: unsafe extern "C" fn(*const c_char, *const dm_world_options, *mut *mut dm_world) -> dm_status,
    pub world_free: unsafe extern "C" fn(*mut dm_world),
    pub init: Init,
    pub slice: Slice,
    pub flatten: Flatten,
    pub unflatten: Unflatten,
    pub free: unsafe extern "C" fn(*mut dm_mesh),
    pub finalize: unsafe extern "C" fn(*const dm_mesh, *const dm_call_options) -> dm_status,
    pub get_local_rank: unsafe extern "C" fn(*const dm_mesh, *const c_char, *mut i32) -> dm_status,
    pub get_comm: unsafe extern "C" fn(*const dm_mesh, *const c_char, *mut ncclComm_t) -> dm_status,
    pub get_coordinate: unsafe extern "C" fn(*const dm_mesh, *mut i32, usize, *mut usize) -> dm_status,
    pub hash: unsafe extern "C" fn(*const dm_mesh, *mut u64) -> dm_status,
    pub equal: unsafe extern "C" fn(*const dm_mesh, *const dm_mesh, *mut bool) -> dm_status,
}

impl Library {
    /// Loads the library that cargo built together with this program.
    pub fn load() -> &'static Library {
        let program = std::env::current_exe().expect("a program has a path");
        let path = program.with_file_name("libdevicemesh.so");
        // SAFETY: this is the project's own library, which has no initialisers that run when it is
        // loaded.
        let library = unsafe { libloading::Library::new(&path) };
        let library = library.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        macro_rules! functions {
            ($($field:ident),+) => {
                // SAFETY: include/devicemesh.h, generated from the same source, declares them with
                // these types.
                Library { $($field: unsafe { *library.get(concat!("dm_", stringify!($field), "\0").as_bytes()).expect("exported") }),+ }
            };
        }
        let functions = functions!(
            last_error,
            world_init,
            world_free,
            init,
            slice,
            flatten,
            unflatten,
            free,
            finalize,
            get_local_rank,
            get_comm,
            get_coordinate,
            hash,
            equal
        );
        // The library stays loaded until the process ends.
        std::mem::forget(library);
        Box::leak(Box::new(functions))
    }

    pub fn check(&self, status: dm_status) {
        if status != 0 {
            // SAFETY: a C string, valid until this thread's next failing call.
            panic!("{}", unsafe { CStr::from_ptr((self.last_error)()) }.to_string_lossy());
        }
    }

    /// Calls a function whose last parameter gives a handle.
    pub fn made<T>(&self, call: impl FnOnce(*mut *mut T) -> dm_status) -> *mut T {
        let mut handle = ptr::null_mut();
        self.check(call(&mut handle));
        handle
    }
}

/// A mesh handle, freed when dropped.
pub struct Mesh {
    pub library: &'static Library,
    pub handle: *mut dm_mesh,
}

// SAFETY: handles are numbers, good in every thread.
unsafe impl Send for Mesh {}
// SAFETY: as above.
unsafe impl Sync for Mesh {}

impl Mesh {
    pub fn new(library: &'static Library, call: impl FnOnce(*mut *mut dm_mesh) -> dm_status) -> Mesh {
        Mesh { library, handle: library.made(call) }
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        // SAFETY: a handle of this library.
        unsafe { (self.library.free)(self.handle) }
    }
}
