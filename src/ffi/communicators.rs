//! The raw communicators and the library they belong to.

use std::ffi::{c_char, c_void};

use super::arguments::{optional_text, text};
use super::dim::dim_text;
use super::guard::guard;
use super::make::{MESHES, find};
use super::pointers::out;
use super::types::{dm_mesh, dm_status, ncclComm_t};
use crate::ccl::{self, Resolver};
use crate::logging;

/// Gives the raw communicator of this rank's group along a dimension. A process's rank in it is the
/// process's coordinate along the dimension.
///
/// Local; with DM_INIT_LAZY the first call for a dimension is collective over this rank's group
/// along it. dim NULL is allowed on a 1-D mesh. All dimensions of size 1 share one communicator,
/// which holds this rank alone and is made at its first use.
///
/// The communicator is borrowed from the root mesh, and the caller never destroys it. It is valid
/// until the mesh has ended (see "ended" at the head of this file), also when all handles were
/// freed. Only a communicator that has failed ends with the last handle of its meshes. Another root
/// mesh that shares the communicator ends it by dm_abort, too. Only the library that made the
/// communicator can use it: call functions of dm_get_proc, or ask for device type "cuda" by name
/// and link that same copy of NCCL. A mesh of device type NULL may be on cpu, and a linked NCCL
/// crashes on its communicator. On NCCL the communicator is blocking, unless the dimension's
/// nccl_config says otherwise: operations are on the stream when they return. Once the communicator
/// is made, the call takes no lock and lasts a few nanoseconds.
///
/// Errors: DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_ABORTED, DM_STATUS_UNSUPPORTED (an
/// offline world), DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT; where the call makes the
/// communicator also DM_STATUS_INVALID_STATE (a CUDA graph is being captured), DM_STATUS_MISMATCH,
/// DM_STATUS_TIMEOUT, DM_STATUS_PEER_LOST and DM_STATUS_CCL.
///
/// # Safety
/// dim is NULL or NUL-terminated; comm_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_get_comm(mesh: *const dm_mesh, dim: *const c_char, comm_out: *mut ncclComm_t) -> dm_status {
    guard(|| {
        let comm_out = out("comm_out", comm_out)?;
        let quick = MESHES.with(mesh as usize, |quick| {
            // SAFETY: the caller's contract.
            unsafe { quick.index(dim) }.and_then(|index| quick.comms.ready(index))
        })?;
        let raw = match quick {
            Some(raw) => raw,
            None => {
                let view = find(mesh)?;
                // SAFETY: the caller's contract.
                let (along, index) = view.along(unsafe { dim_text(dim)? })?;
                along.comm(index)?
            }
        };
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { comm_out.write(raw.0.cast()) };
        Ok(())
    })
}

/// Gives the function of that name ("ncclAllReduce", ...) in the library that made this mesh's
/// communicators. When the process has several copies of NCCL, the function is of the right one.
/// The call also works on cpu, where no NCCL is linked.
///
/// Local. Cast *proc_out to the function's type, for example decltype(&ncclAllReduce). The address
/// stays valid until the end of the process. Errors: DM_STATUS_NOT_FOUND (names the library and its
/// version), DM_STATUS_UNSUPPORTED (an offline world), DM_STATUS_INVALID_HANDLE,
/// DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// symbol is NULL or NUL-terminated; proc_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_get_proc(
    mesh: *const dm_mesh,
    symbol: *const c_char,
    proc_out: *mut *mut c_void,
) -> dm_status {
    guard(|| {
        let proc_out = out("proc_out", proc_out)?;
        // SAFETY: the caller's contract.
        let symbol = unsafe { text("symbol", symbol)? };
        let address = find(mesh)?.symbol(symbol)?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { proc_out.write(address.cast_mut()) };
        Ok(())
    })
}

/// Gives the function of that name ("ncclMemAlloc", ...) in the library that meshes of device_type
/// will get, before there is a mesh.
///
/// Local. device_type is "cuda", "cpu" or NULL, as in dm_world_init. This is the library of a world
/// whose options name none. A program that names one (dm_world_options.ccl_library) calls
/// dm_get_proc with a mesh of that world. Errors: DM_STATUS_NOT_FOUND (names the library and its
/// version), DM_STATUS_LIBRARY, DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// Strings are NULL or NUL-terminated; proc_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_get_device_proc(
    device_type: *const c_char,
    symbol: *const c_char,
    proc_out: *mut *mut c_void,
) -> dm_status {
    guard(|| {
        let proc_out = out("proc_out", proc_out)?;
        // SAFETY: the caller's contract.
        let (device_type, symbol) = unsafe { (optional_text("device_type", device_type)?, text("symbol", symbol)?) };
        logging::init_from_environment();
        let address = ccl::for_device(ccl::device_type(device_type)?)?.required_symbol(symbol)?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { proc_out.write(address.cast_mut()) };
        Ok(())
    })
}

/// Makes the NCCL that is linked into the program the library of device type cuda. resolve returns
/// the address of NCCL's function of that name, or NULL where the program has none.
///
/// ```c
/// static void *resolve(void *user_data, const char *name) {
///   return strcmp(name, "ncclAllReduce") == 0 ? (void *)ncclAllReduce : ... : NULL;
/// }
/// dm_set_ccl_resolver(resolve, NULL);
/// ```
///
/// Local, for the whole process; call it before anything else of device type cuda or NULL. Without
/// this call the library loads a shared NCCL, and a communicator of that copy crashes in the
/// functions that the program links. dm_world_options.ccl_library goes before the resolver, and the
/// resolver before DM_CCL_LIBRARY. This call, dm_get_proc and dm_get_device_proc call resolve, from
/// any thread, until the process ends. resolve NULL removes an earlier resolver. Not every rank
/// needs one, but all ranks need the same release of NCCL. docs/nccl.md lists the functions that
/// must be there. Errors: DM_STATUS_LIBRARY (a function is missing; it is named),
/// DM_STATUS_INVALID_STATE (device type cuda is in use already).
///
/// # Safety
/// resolve is NULL or gives functions as nccl.h declares them, and may be called with user_data
/// from any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_set_ccl_resolver(
    resolve: Option<unsafe extern "C" fn(user_data: *mut c_void, name: *const c_char) -> *mut c_void>,
    user_data: *mut c_void,
) -> dm_status {
    // SAFETY: the caller's contract.
    guard(|| ccl::set_resolver(resolve.map(|resolve| unsafe { Resolver::new(resolve, user_data) })))
}
