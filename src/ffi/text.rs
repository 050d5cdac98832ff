//! Meshes as text.

use std::ffi::c_char;

use super::arguments::{self, give_text};
use super::guard::{ask, guard};
use super::make::{MeshRequest, find, given_world, telling};
use super::pointers::out;
use super::release;
use super::structs::dm_init_options;
use super::types::{dm_mesh, dm_status};
use crate::ccl;
use crate::comm::default_world_to_tell;
use crate::error::Error;
use crate::mesh::MeshText;

/// Writes the view as one line of JSON, from which dm_deserialize makes it again, for example in
/// another job or from another language.
///
/// Local. *len_out is the length in bytes with the NUL. This is the text of row 1 of a mesh (dp=2,
/// tp=4) over 8 ranks, which dm_slice(mesh, {"tp"}) gives on ranks 4 to 7:
///
/// ```c
/// {"devicemesh":1,"device_type":"cuda","shape":[4],"names":["tp"],"layout":[[[4,1]]],"base":4,"ranks":[[0,8]]}
/// ```
///
/// devicemesh is the version of the format, 1. ranks is a list of world ranks in runs of count
/// ranks: [first, count] stands for first, first + 1 ..., and [first, count, step] for first,
/// first + step ...; step may be negative. layout has for each dimension its (size, stride) pairs,
/// the most significant first; their sizes multiply to the dimension's in shape, and a dimension of
/// size 1 may have none. The rank at a coordinate is element
///
/// ```c
/// base + sum over dimensions and their pairs of  digit * stride
/// ```
///
/// of ranks. The digits of a dimension are its coordinate, written in the mixed radix of the
/// dimension's sizes: coordinate 5 of `[[2,8],[4,1]]` has the digits (1, 1), which give 1 * 8 + 1 *
/// 1 = 9. So in the text above, the rank at coordinate 2 is element 4 + 2 * 1 of 0 .. 7. When the
/// pairs are in the order of their strides, each stride is a multiple of size * stride of the pair
/// before it, so no rank appears twice. ranks may have more elements than the layout reaches.
///
/// A mesh (64, 32, 64, 8) of 1,048,576 ranks in a row has a text of 171 bytes, and the texts of
/// its views are no longer. A mesh made with a rank array has as many runs as its list of ranks.
/// Equal views can have different texts: compare with dm_equal. After dm_slice, ranks that hold
/// different views have different texts.
///
/// Errors: DM_STATUS_BUFFER_TOO_SMALL, DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// text is NULL or has room for capacity bytes; len_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_serialize(
    mesh: *const dm_mesh,
    text: *mut c_char,
    capacity: usize,
    len_out: *mut usize,
) -> dm_status {
    ask(|| {
        let serialized = find(mesh)?.mesh().serialize();
        // SAFETY: the caller's contract.
        unsafe { give_text("text", &serialized, text, capacity, len_out) }
    })
}

/// Makes the mesh that a text of dm_serialize describes: does what dm_init does with the device
/// type, the shape, the names and the ranks of the text. It is a root mesh, equal (dm_equal) to the
/// view that was written, with a communicator for every dimension.
///
/// Collective over the world. To the ranks it is a call of dm_init, and messages name it so: every
/// rank passes a text of the same mesh, or calls dm_init with the same arguments. (After dm_slice
/// ranks have different views: pass the text of one of them on all ranks.) options are those of
/// dm_init, with dim_options for the dimensions of the text; options->ranks is NULL. Without
/// options->world it is the default world of the text's device type, which may be larger than the
/// one the text comes from. The caller frees the handle with dm_free.
///
/// Keys may come in any order and with spaces between. All seven are needed and there are no
/// others; numbers are integers; there are at most 65536 dimensions. The text may come from a
/// stranger: it is checked before this rank waits for anybody, and takes memory in proportion to
/// its length and the world's size, not to the numbers in it. Errors: DM_STATUS_INVALID_ARGUMENT
/// (says where the text is no JSON, which key is missing, which numbers contradict each other, or
/// which rank is listed twice or is not in the world), and those of dm_init.
///
/// # Safety
/// The conditions of dm_init hold; text is NULL or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_deserialize(
    text: *const c_char,
    options: *const dm_init_options,
    mesh_out: *mut *mut dm_mesh,
) -> dm_status {
    guard(|| {
        release::check()?;
        // SAFETY: the caller's contract.
        let (world, text) = unsafe { (given_world(options)?, arguments::text("text", text)) };
        let text = text.and_then(MeshText::parse);
        // A text may name a device type that does not exist. Then no default world belongs to it,
        // as if none were named.
        let named = text.as_ref().ok().and_then(|text| ccl::device_type(Some(text.device_type())).ok());
        telling(world.clone().or_else(|| default_world_to_tell(named)), || {
            let (mesh_out, text) = (out("mesh_out", mesh_out)?, text.as_ref().map_err(Error::clone)?);
            // SAFETY: the caller's contract.
            unsafe { MeshRequest::of_text(text, options, world)? }.create(mesh_out)
        })
    })
}
