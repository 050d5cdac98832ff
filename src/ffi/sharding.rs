//! Computes which block of a tensor a rank holds.

use super::arguments::{check_reserved, short_list};
use super::guard::ask;
use super::make::find;
use super::pointers::null;
use super::structs::{DM_PARTIAL, DM_REPLICATE, DM_SHARD, dm_placement};
use super::types::{dm_mesh, dm_status};
use crate::error::{Error, Result};
use crate::sharding::{Placement, local_shard};

/// Gives the shape and the offsets of one rank's block of a tensor whose dimensions are split over
/// dimensions of the mesh.
///
/// Local, no communication. placements has one element per dimension of mesh, so num_placements is
/// dm_ndim(mesh). tensor_shape, local_shape_out and offset_out have tensor_ndim elements each; all
/// three may be NULL when it is 0. world_rank is a rank of the mesh, or -1 for the caller's.
/// Element i of the block along tensor dimension d is element `offset_out[d] + i` of the tensor.
///
/// A dimension of n indices over p ranks is cut as torch.chunk cuts it: into chunks of ceil(n / p),
/// the last ones shorter or empty. 5 indices over 4 ranks give 2, 2, 1 and 0. When several mesh
/// dimensions shard one tensor_dim, each splits the chunks of those before it, and
/// dm_placement.order says which are before. On a mesh (fsdp=2, tp=4) that shards 16 rows over
/// both, rank 6, at (1, 2), has
///
/// ```c
/// {{DM_SHARD, 0, 0}, {DM_SHARD, 0, 0}}   fsdp first, PyTorch's default: rows 12 and 13
/// {{DM_SHARD, 0, 1}, {DM_SHARD, 0, 0}}   tp first, what FSDP of a tensor-parallel model holds: rows 10 and 11
/// ```
///
/// A rank whose block has no elements gets local size 0, and the size of the tensor's dimension as
/// offset. A block is always contiguous. With all orders 0 the answers are those of PyTorch's
/// DTensor. The second placement above is _StridedShard in PyTorch. Where the sizes divide evenly,
/// the blocks are PyTorch's; otherwise PyTorch may cut in another way (for example 13 rows over a
/// (3, 2) mesh).
///
/// Errors: DM_STATUS_INVALID_ARGUMENT (num_placements is another number, an unknown kind, a
/// tensor_dim that is negative or past the end, world_rank below -1), DM_STATUS_NOT_MEMBER (the
/// rank is not in this view), DM_STATUS_INVALID_HANDLE.
///
/// # Safety
/// placements is NULL or has num_placements elements; the other pointers are
/// NULL or have tensor_ndim elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_local_shard(
    mesh: *const dm_mesh,
    placements: *const dm_placement,
    num_placements: usize,
    tensor_shape: *const usize,
    tensor_ndim: usize,
    world_rank: i32,
    local_shape_out: *mut usize,
    offset_out: *mut usize,
) -> dm_status {
    ask(|| {
        let view = find(mesh)?;
        let mesh = view.mesh();
        if num_placements != mesh.ndim() {
            return Err(Error::invalid(format!(
                "num_placements is {num_placements}, but {} has {} dimensions",
                mesh.describe(),
                mesh.ndim()
            )));
        }
        // SAFETY: the caller's contract.
        let placements = unsafe { short_list("placements", placements, num_placements)? };
        let placements = placements.iter().enumerate().map(read_placement).collect::<Result<Vec<_>>>()?;
        // SAFETY: the caller's contract. Copied, as the caller may want the answer in the same
        // place.
        let tensor = unsafe { short_list("tensor_shape", tensor_shape, tensor_ndim)? }.to_vec();
        let rank = match world_rank {
            -1 => None,
            0.. => Some(world_rank),
            _ => {
                return Err(Error::invalid(format!(
                    "world_rank is {world_rank}; a rank is at least 0, and -1 is the caller's"
                )));
            }
        };
        for (what, place) in [("local_shape_out", local_shape_out), ("offset_out", offset_out)] {
            if place.is_null() && tensor_ndim > 0 {
                return Err(null(what));
            }
        }
        let shard = local_shard(mesh, rank, &placements, &tensor)?;
        for (place, values) in [(local_shape_out, &shard.shape), (offset_out, &shard.offset)] {
            if !values.is_empty() {
                // SAFETY: not NULL, and tensor_ndim elements are writable by the caller's word.
                unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), place, values.len()) };
            }
        }
        Ok(())
    })
}

fn read_placement((index, given): (usize, &dm_placement)) -> Result<Placement> {
    let dm_placement { kind, tensor_dim, order, reserved } = *given;
    check_reserved(&format!("placements[{index}]"), &reserved)?;
    match kind {
        // Each part of a sum that is still to be made has the whole shape, as a replica has.
        DM_REPLICATE | DM_PARTIAL => Ok(Placement::Replicate),
        DM_SHARD => match usize::try_from(tensor_dim) {
            Ok(tensor_dim) => Ok(Placement::Shard { tensor_dim, order }),
            Err(_) => Err(Error::invalid(format!(
                "placements[{index}].tensor_dim is {tensor_dim}; dimensions of the tensor are counted from 0"
            ))),
        },
        _ => Err(Error::invalid(format!(
            "placements[{index}].kind is {kind}; it is DM_REPLICATE ({DM_REPLICATE}), DM_SHARD ({DM_SHARD}) or DM_PARTIAL ({DM_PARTIAL})"
        ))),
    }
}
