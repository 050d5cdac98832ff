//! Pure sizes:strides algebra over the positions `0..n` of a mesh's ranks: no I/O, no names.
//!
//! Positions are row-major: in a mesh of shape (2, 3, 4) the last dimension has stride 1, the
//! middle 4, the first 12. A [`Dim`] is one dimension as a list of (size, stride) pairs; slicing,
//! flattening and unflattening a mesh only ever picks, joins and splits such lists, so every
//! question about one rank is arithmetic on them, whatever the number of ranks.

mod digits;
mod dim;
mod subrange;

pub use digits::{Pair, complement, covers, is_disjoint};
pub use dim::{Dim, row_major};
pub use subrange::Subrange;
