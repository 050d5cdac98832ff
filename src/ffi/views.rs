//! Views of a mesh that exists.

use std::ffi::c_char;

use super::arguments::{names, natural, optional_text, short_list, sizes, text};
use super::dim::dim_text;
use super::guard::{ask, free, guard};
use super::make::{MESHES, find, give, handle};
use super::options::read_call_options;
use super::pointers::out;
use super::structs::dm_call_options;
use super::types::{dm_mesh, dm_status};
use crate::comm::View;
use crate::error::Result;

/// Gives the view that has the named dimensions, in that order. It shares the communicators of
/// mesh.
///
/// Local. Any view can be sliced, in any order of names: ("cp", "dp") gives the transposed view.
/// The root mesh, and every view that has the dimensions of a flattened dimension, also know the
/// name of the flattened one. num_names 0 gives a view without dimensions, of this rank alone. The
/// caller frees the handle with dm_free; mesh may be freed before.
///
/// Errors: DM_STATUS_NOT_FOUND (lists the names there are), DM_STATUS_INVALID_ARGUMENT (a repeated
/// name, or dimensions that overlap), DM_STATUS_NOT_MEMBER, DM_STATUS_ABORTED,
/// DM_STATUS_INVALID_HANDLE.
///
/// # Safety
/// dim_names is NULL or points to num_names NUL-terminated strings; mesh_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_slice(
    mesh: *const dm_mesh,
    dim_names: *const *const c_char,
    num_names: usize,
    mesh_out: *mut *mut dm_mesh,
) -> dm_status {
    guard(|| {
        let mesh_out = out("mesh_out", mesh_out)?;
        // SAFETY: the caller's contract.
        let names = unsafe { names("dim_names", dim_names, num_names)? };
        give(find(mesh)?.slice(&names)?, mesh_out)
    })
}

/// Joins all dimensions of this view into one, with a communicator over the ranks of the view in
/// row-major order.
///
/// Collective over the root mesh; for a view of a range, over the ranks of the range (see "range"
/// at the head of this file). name NULL joins the dimensions' names with "_". A second call with
/// these dimensions and this name gives the communicator that exists, without communication. With
/// another name the new dimension shares that communicator, unless options->dim_options says
/// DM_DIM_OWN_COMM. options NULL: the defaults; its dim_options has one element. The caller frees
/// the handle with dm_free.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT (a dimension has the name; dm_flatten or dm_reshape has given
/// the name to other groups), DM_STATUS_INVALID_STATE (a CUDA graph is being captured),
/// DM_STATUS_MISMATCH, DM_STATUS_TIMEOUT, DM_STATUS_PEER_LOST, DM_STATUS_CCL, DM_STATUS_NOT_MEMBER,
/// DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (a mesh of dm_from_comms
/// without a world).
///
/// # Safety
/// name is NULL or NUL-terminated; options is NULL or points to struct_size bytes, and its
/// dim_options is NULL or has one element; mesh_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_flatten(
    mesh: *const dm_mesh,
    name: *const c_char,
    options: *const dm_call_options,
    mesh_out: *mut *mut dm_mesh,
) -> dm_status {
    collective(mesh, "dm_flatten", || {
        let mesh_out = out("mesh_out", mesh_out)?;
        // SAFETY: the caller's contract.
        let (name, options) = unsafe { (optional_text("name", name)?, read_call_options(options, 1)?) };
        give(find(mesh)?.flatten(name, &options)?, mesh_out)
    })
}

/// Gives the view in which ndim new dimensions replace the dimension dim, each with a communicator.
/// Their sizes in shape multiply to the size of dim.
///
/// Collective over the root mesh. The first of the new dimensions is the slowest. Their names must
/// not be those of the view's other dimensions. options NULL: the defaults; its dim_options has
/// ndim elements, one per new dimension. The caller frees the handle with dm_free.
///
/// Errors: DM_STATUS_NOT_FOUND (no such dimension), DM_STATUS_INVALID_ARGUMENT (shape, names), and
/// those of dm_flatten.
///
/// # Safety
/// dim and each of the ndim names are NUL-terminated; shape has ndim elements; options is NULL or
/// points to struct_size bytes, and its dim_options is NULL or has as many elements as it says;
/// mesh_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_unflatten(
    mesh: *const dm_mesh,
    dim: *const c_char,
    shape: *const i32,
    ndim: usize,
    dim_names: *const *const c_char,
    options: *const dm_call_options,
    mesh_out: *mut *mut dm_mesh,
) -> dm_status {
    collective(mesh, "dm_unflatten", || {
        let mesh_out = out("mesh_out", mesh_out)?;
        // SAFETY: the caller's contract.
        let (dim, shape, names, options) = unsafe {
            (
                text("dim", dim)?,
                sizes("shape", shape, ndim)?,
                names("dim_names", dim_names, ndim)?,
                read_call_options(options, ndim)?,
            )
        };
        give(find(mesh)?.unflatten(dim, &shape, &names, &options)?, mesh_out)
    })
}

/// Gives all ranks of this view, row-major, another shape, and each of its dimensions a
/// communicator. So one set of ranks can have several factorisations.
///
/// Collective over the root mesh. The ndim sizes in shape multiply to the view's number of ranks;
/// the first of the new dimensions is the slowest. Where the view or its root mesh already has a
/// dimension of a name, the name must mean the same groups (the same pipeline stages, for example).
/// A new dimension with the groups of an existing one shares the communicator of the existing one.
/// Expert parallelism beside dense layers, on a mesh (pp=2, dp=2, cp=2, tp=2) of 16 ranks:
///
/// ```c
/// dm_reshape(dense, (int[]){2, 2, 2, 2}, 4, (const char *[]){"pp", "edp", "ep", "etp"}, NULL, &sparse);
/// ```
///
/// Here the call checks that pp has the same stages as before, and etp shares the communicator of
/// tp. From now on dm_flatten refuses edp, ep and etp as names for other groups. options NULL: the
/// defaults; its dim_options has ndim elements, one per new dimension. The caller frees the handle
/// with dm_free.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT (the shape; a repeated name; a name that means other groups,
/// and the message has both layouts), and those of dm_flatten.
///
/// # Safety
/// shape has ndim elements; each of the ndim names is NUL-terminated; options is NULL or points to
/// struct_size bytes, and its dim_options is NULL or has as many elements as it says; mesh_out is
/// NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_reshape(
    mesh: *const dm_mesh,
    shape: *const i32,
    ndim: usize,
    dim_names: *const *const c_char,
    options: *const dm_call_options,
    mesh_out: *mut *mut dm_mesh,
) -> dm_status {
    collective(mesh, "dm_reshape", || {
        let mesh_out = out("mesh_out", mesh_out)?;
        // SAFETY: the caller's contract.
        let (shape, names, options) = unsafe {
            (sizes("shape", shape, ndim)?, names("dim_names", dim_names, ndim)?, read_call_options(options, ndim)?)
        };
        give(find(mesh)?.reshape(&shape, &names, &options)?, mesh_out)
    })
}

/// Gives the view that keeps only len indices of dimension dim: start, start + step ... It has a
/// communicator of its own along dim. Examples are the first stages of a pipeline, every second
/// replica, and all ranks but the spare ones.
///
/// Collective over the root mesh of this view (where this view is one of a range itself, over the
/// ranks of that range), also for the ranks at other indices: they get a handle too, and calls on
/// it that need a member give DM_STATUS_NOT_MEMBER. dim NULL is allowed on a 1-D mesh. The result
/// is a range. Row-major positions, strides (dm_describe), dm_submesh and dm_replica_groups count
/// among the ranks that are left. Calls on the result that make something (dm_flatten ...) are
/// collective over these ranks. The other dimensions keep their communicators. dm_root gives the
/// root mesh that this view belongs to, with all its ranks; the result ends with that mesh. A range
/// of all indices is the view itself. The result knows those flattened dimensions of the root mesh
/// whose groups the range leaves whole. In the range, a name that a call on the range has given to
/// other groups means only these groups. options NULL: the defaults; its dim_options has one
/// element, for what is left of dim. The caller frees the handle with dm_free.
///
/// On a mesh (pp=4, tp=2) over ranks 0 .. 7, start 2, len 2, step 1 along pp gives (pp=2, tp=2)
/// over ranks 4 .. 7, in which rank 6 has coordinate (1, 0). Making the same range again gives the
/// communicators that it has.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT (len or step is less than 1, start is negative, an index past
/// the end), DM_STATUS_NOT_FOUND (no such dimension), and those of dm_flatten.
///
/// # Safety
/// dim is NULL or NUL-terminated; options is NULL or points to struct_size bytes, and its
/// dim_options is NULL or has one element; mesh_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_slice_range(
    mesh: *const dm_mesh,
    dim: *const c_char,
    start: i32,
    len: i32,
    step: i32,
    options: *const dm_call_options,
    mesh_out: *mut *mut dm_mesh,
) -> dm_status {
    collective(mesh, "dm_slice_range", || {
        let mesh_out = out("mesh_out", mesh_out)?;
        // SAFETY: the caller's contract.
        let (dim, options) = unsafe { (dim_text(dim)?, read_call_options(options, 1)?) };
        let (start, len, step) = (natural("start", start)?, natural("len", len)?, natural("step", step)?);
        give(find(mesh)?.slice_range(dim, start, len, step, &options)?, mesh_out)
    })
}

/// Makes one view of n views of one root mesh: it has the dimensions of all of them, in the order
/// of meshes.
///
/// Local. The dimensions may not overlap: each rank appears once. The caller frees the handle with
/// dm_free.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT (no mesh, different roots, overlap, a repeated name),
/// DM_STATUS_INVALID_HANDLE, DM_STATUS_NOT_MEMBER, DM_STATUS_ABORTED.
///
/// # Safety
/// meshes is NULL or points to n handles; mesh_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_concatenate(
    meshes: *const *const dm_mesh,
    n: usize,
    mesh_out: *mut *mut dm_mesh,
) -> dm_status {
    guard(|| {
        let mesh_out = out("mesh_out", mesh_out)?;
        // SAFETY: the caller's contract.
        let handles = unsafe { short_list("meshes", meshes, n)? };
        let views = handles.iter().map(|mesh| find(*mesh)).collect::<Result<Vec<_>>>()?;
        let views: Vec<&View> = views.iter().map(|view| &**view).collect();
        give(View::concatenate(&views)?, mesh_out)
    })
}

/// Gives the root mesh of a view: the one that dm_init, dm_deserialize, dm_from_comms, dm_shrink or
/// dm_recover made.
///
/// Local. The caller frees the handle with dm_free. Errors: DM_STATUS_INVALID_HANDLE,
/// DM_STATUS_ABORTED.
///
/// # Safety
/// mesh_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_root(mesh: *const dm_mesh, mesh_out: *mut *mut dm_mesh) -> dm_status {
    guard(|| {
        let mesh_out = out("mesh_out", mesh_out)?;
        give(find(mesh)?.root()?, mesh_out)
    })
}

/// Gives the number of parallel copies of the named dimensions over the ranks of the root mesh: the
/// size of the root mesh divided by the sizes of the dimensions.
///
/// Local. Errors: as dm_slice; DM_STATUS_INVALID_ARGUMENT when count_out is NULL.
///
/// # Safety
/// dim_names is NULL or points to num_names NUL-terminated strings; count_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_submesh_count(
    mesh: *const dm_mesh,
    dim_names: *const *const c_char,
    num_names: usize,
    count_out: *mut i32,
) -> dm_status {
    ask(|| {
        let count_out = out("count_out", count_out)?;
        // SAFETY: the caller's contract.
        let names = unsafe { names("dim_names", dim_names, num_names)? };
        let count = find(mesh)?.submesh_count(&names)?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { count_out.write(count as i32) };
        Ok(())
    })
}

/// Gives one of the parallel copies of the named dimensions over the ranks of the root mesh, by its
/// index. The copies are ordered by the row-major position of their first rank.
///
/// Local. The copy that holds this rank equals dm_slice of those names. The other copies answer
/// questions about their ranks, and give DM_STATUS_NOT_MEMBER for questions about this rank's own
/// place or communicator. The caller frees the handle with dm_free.
///
/// Errors: as dm_slice; DM_STATUS_INVALID_ARGUMENT when index is not below dm_submesh_count.
///
/// # Safety
/// dim_names is NULL or points to num_names NUL-terminated strings; mesh_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_submesh(
    mesh: *const dm_mesh,
    dim_names: *const *const c_char,
    num_names: usize,
    index: i32,
    mesh_out: *mut *mut dm_mesh,
) -> dm_status {
    guard(|| {
        let mesh_out = out("mesh_out", mesh_out)?;
        // SAFETY: the caller's contract.
        let names = unsafe { names("dim_names", dim_names, num_names)? };
        give(find(mesh)?.submesh(&names, natural("index", index)?)?, mesh_out)
    })
}

/// Gives another handle of the view. The caller frees it with dm_free, like the first one.
///
/// Local. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (mesh_out is NULL).
///
/// # Safety
/// mesh_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_clone(mesh: *const dm_mesh, mesh_out: *mut *mut dm_mesh) -> dm_status {
    guard(|| {
        let mesh_out = out("mesh_out", mesh_out)?;
        let token = handle(find(mesh)?)?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { mesh_out.write(token as *mut dm_mesh) };
        Ok(())
    })
}

/// Frees a mesh handle. It ends no working communicator, because raw pointers to it may be in use:
/// call dm_finalize (or dm_world_finalize, dm_abort) before, which ends the communicators.
///
/// Local, waits for no rank; NULL is a no-op, and so are a handle that was freed before and any
/// handle in a forked child. Other views are not touched. A program that makes meshes and only
/// frees them keeps the memory of every communicator until dm_world_finalize. Where this was the
/// last handle, a thread of the library ends what takes time: failed communicators that no mesh has
/// any more, and the world. The end of the process waits one second at most for that thread.
#[unsafe(no_mangle)]
pub extern "C" fn dm_free(mesh: *mut dm_mesh) {
    if !mesh.is_null() {
        // A handle that was freed before is no failing call: the last error stays.
        free(|| drop(MESHES.remove(mesh as usize)));
    }
}

/// Does what [`guard`] does, for a call of `function` that is collective over the root mesh. If
/// this rank refuses the call, the other ranks are told.
fn collective(mesh: *const dm_mesh, function: &str, body: impl FnOnce() -> Result<()>) -> dm_status {
    guard(|| match find(mesh) {
        Ok(view) => view.tell_if_refused(function, body),
        // The body says what is wrong.
        Err(_) => body(),
    })
}
