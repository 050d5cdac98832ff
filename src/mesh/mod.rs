//! One rank's view of a mesh: layout, dimension names and the map from positions to world ranks. Pure: no I/O, no communicators.
//!
//! A root mesh numbers its ranks 0 .. n-1 row-major (their positions) and may map positions to any distinct world ranks. Every other
//! mesh is a view of a root: some dimensions over its positions, and the position they start from. Views share the root. A range of a dimension
//! numbers the ranks that are left anew: it is a root of its own, whose ranks are some positions of the other.
//!
//! Semantics are PyTorch's DeviceMesh (2.15), wider and stricter on purpose: slices in any order, views of views, a flattened name usable from
//! any view that holds its dimensions; duplicate or out-of-range ranks, zero sizes and duplicate names refused everywhere. A rank's
//! coordinate along a dimension is its rank in that dimension's group, also for permuted rank arrays.

mod ask;
mod describe;
mod make;
mod rank_array;
mod root;
mod text;
mod view;
mod without;

pub use make::{Mesh, MeshSpec};
pub(crate) use root::RankMap;
pub use text::MeshText;
