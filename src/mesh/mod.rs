//! Holds one rank's view of a mesh: layout, dimension names, and the map from positions to world
//! ranks. There is no I/O here, and there are no communicators.
//!
//! A root mesh numbers its ranks 0 .. n-1 row-major. These numbers are positions, and a root may
//! map them to any distinct world ranks. Every other mesh is a view of a root: it has some
//! dimensions over the positions, and the position they start from. Views share the root. A range
//! of a dimension numbers the ranks that are left anew. It is a root of its own, whose ranks are
//! some positions of the other root.
//!
//! The semantics are those of PyTorch's DeviceMesh (2.15), wider and stricter on purpose. They are
//! wider, because slices come in any order and of any view, and any view that holds the dimensions
//! of a flattened name can use the name. They are stricter, because duplicate or out-of-range
//! ranks, sizes of zero and duplicate names are refused everywhere. A rank's coordinate along a
//! dimension is its rank in that dimension's group, also for permuted rank arrays.

mod ask;
mod describe;
mod make;
mod range;
mod rank_array;
mod root;
mod text;
mod view;
mod without;

pub use make::{Mesh, MeshSpec};
pub(crate) use root::RankMap;
pub use text::MeshText;
