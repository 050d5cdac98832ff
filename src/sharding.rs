//! Computes which block of a tensor a rank of a mesh holds, when dimensions of the tensor are split
//! over dimensions of the mesh.
//!
//! The semantics are those of PyTorch's DTensor (2.15, `Shard` and `Replicate`). Sizes are those
//! that `torch.chunk` makes: every chunk has ceil(size / parts) indices but the last ones, which
//! are shorter or empty. Several mesh dimensions may split one tensor dimension one after another,
//! and each splits the chunk that the ones before it left. They split in the order of the mesh,
//! from left to right, or in the caller's order. tests/vectors/torch_dtensor_shards.jsonl holds
//! what DTensor answered.

use crate::error::{Error, Result};
use crate::mesh::Mesh;

/// The way in which a tensor lies over one mesh dimension: split or replicated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Placement {
    /// Every rank along this mesh dimension holds the same data.
    Replicate,
    /// This mesh dimension splits a dimension of the tensor.
    Shard {
        /// The dimension of the tensor, from 0.
        tensor_dim: usize,
        /// The order among the mesh dimensions that split the same `tensor_dim`. A lower number
        /// splits first, and equal numbers split in the order of the mesh.
        order: i32,
    },
}

/// A rank's block of a tensor: `shape[i]` indices from `offset[i]` along each tensor dimension.
///
/// Where a split left nothing, the size is 0 and the offset is the size of the tensor's dimension,
/// as in DTensor.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LocalShard {
    /// The block's sizes.
    pub shape: Vec<usize>,
    /// The index at which the block begins, along each dimension of the tensor.
    pub offset: Vec<usize>,
}

/// Returns where chunk `index` of `size` indices begins and how many indices it has. The indices
/// are cut into `parts` as `torch.chunk` does, with empty chunks at the end when there are not
/// enough indices. `parts` 0 counts as 1.
///
/// ```
/// use devicemesh::sharding::chunk;
/// // 5 in 4 parts: chunks of ceil(5 / 4) = 2.
/// assert_eq!((0..4).map(|index| chunk(5, 4, index)).collect::<Vec<_>>(), [(0, 2), (2, 2), (4, 1), (5, 0)]);
/// assert_eq!(chunk(usize::MAX, 2, 1), (1 << 63, (1 << 63) - 1));
/// ```
pub fn chunk(size: usize, parts: usize, index: usize) -> (usize, usize) {
    let full = size.div_ceil(parts.max(1));
    // A product that is too large for a number is past the end as well.
    let start = full.saturating_mul(index).min(size);
    (start, full.min(size - start))
}

/// Returns the block of a tensor of shape `tensor` that `rank` holds, with one placement for each
/// dimension of `mesh`. A `rank` of `None` stands for this process.
///
/// ```
/// use devicemesh::mesh::{Mesh, MeshSpec};
/// use devicemesh::sharding::{Placement, local_shard};
/// let names = ["fsdp", "tp"];
/// let spec = MeshSpec::new("cpu", &[2, 4], 8, 6).names(&names);
/// let mesh = Mesh::new(&spec).unwrap();                       // rank 6 is at (1, 2)
/// let rows = |order| Placement::Shard { tensor_dim: 0, order };
///
/// // 16 rows over fsdp first (8..16), then over tp: the third pair of those.
/// let shard = local_shard(&mesh, None, &[rows(0), rows(0)], &[16, 6]).unwrap();
/// assert_eq!((shard.shape, shard.offset), (vec![2, 6], vec![12, 0]));
/// // Over tp first (8..12), then over fsdp: the second half of those. This is what FSDP of a tensor-parallel model holds.
/// let shard = local_shard(&mesh, None, &[rows(1), rows(0)], &[16, 6]).unwrap();
/// assert_eq!((shard.shape, shard.offset), (vec![2, 6], vec![10, 0]));
/// // Rank 3, at (0, 3): 5 rows over tp are 2, 2, 1 and none.
/// let shard = local_shard(&mesh, Some(3), &[Placement::Replicate, rows(0)], &[5, 6]).unwrap();
/// assert_eq!((shard.shape, shard.offset), (vec![0, 6], vec![5, 0]));
/// ```
pub fn local_shard(mesh: &Mesh, rank: Option<i32>, placements: &[Placement], tensor: &[usize]) -> Result<LocalShard> {
    if placements.len() != mesh.ndim() {
        return Err(Error::invalid(format!(
            "{} placements for {}, which has {} dimensions",
            placements.len(),
            mesh.describe(),
            mesh.ndim()
        )));
    }
    let mut splits = Vec::with_capacity(placements.len());
    for (mesh_dim, placement) in placements.iter().enumerate() {
        let Placement::Shard { tensor_dim, order } = *placement else { continue };
        if tensor_dim >= tensor.len() {
            return Err(Error::invalid(format!(
                "mesh dimension {} shards tensor dimension {tensor_dim}, but the tensor has {} dimensions, counted from 0",
                mesh.dim_name(mesh_dim),
                tensor.len()
            )));
        }
        splits.push((order, mesh_dim, tensor_dim));
    }
    // Splits of different tensor dimensions do not depend on each other, so one order of all splits
    // serves every tensor dimension.
    splits.sort_unstable();
    let coordinate = match rank {
        None => mesh.coordinate()?,
        Some(rank) => mesh.coordinate_of(rank)?,
    };
    let mut shard = LocalShard { shape: tensor.to_vec(), offset: vec![0; tensor.len()] };
    for (_, mesh_dim, dim) in splits {
        let (start, size) = chunk(shard.shape[dim], mesh.dim_size(mesh_dim), coordinate[mesh_dim]);
        shard.shape[dim] = size;
        shard.offset[dim] = if size == 0 { tensor[dim] } else { shard.offset[dim] + start };
    }
    Ok(shard)
}
