//! Computes with sizes and strides over the positions `0..n` of a mesh's ranks. There is no I/O
//! here, and there are no names.
//!
//! Positions are row-major. In a mesh of shape (2, 3, 4) the last dimension has stride 1, the
//! middle one 4, and the first one 12. A [`Dim`] is one dimension as a list of (size, stride)
//! pairs. Slicing, flattening and unflattening a mesh only pick, join and split such lists. So
//! every question about one rank is arithmetic on these lists, and takes no longer for more ranks.

mod digits;
mod dim;
mod subrange;

pub use digits::{Pair, complement, covers, is_disjoint};
pub use dim::{Dim, row_major};
pub use subrange::Subrange;
