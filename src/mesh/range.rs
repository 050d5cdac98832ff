//! Ranges of a dimension: views that hold some of its indices.

use std::sync::Arc;

use super::make::Mesh;
use super::root::{Appended, NamedDim, RankMap, Root};
use crate::error::{Error, Result};
use crate::layout::{Dim, Subrange};

impl Mesh {
    /// Returns the view with dimension `dim` restricted to its indices `start`, `start + step` ...
    /// (`len` of them). Ranks at the other indices are not members of the view, so they have no
    /// positions in it. Positions and strides count only the members.
    ///
    /// ```
    /// use devicemesh::mesh::{Mesh, MeshSpec};
    /// let names = ["pp", "tp"];
    /// let spec = MeshSpec::new("cuda", &[4, 2], 8, 5).names(&names);
    /// let mesh = Mesh::new(&spec).unwrap();
    /// let last = mesh.slice_range("pp", 2, 2, 1).unwrap(); // the last two stages
    /// assert_eq!((last.ranks(), last.coordinate().unwrap()), (vec![4, 5, 6, 7], vec![0, 1]));
    /// let even = mesh.slice_range("pp", 0, 2, 2).unwrap();
    /// assert_eq!(even.ranks(), [0, 1, 4, 5]);
    /// assert!(!mesh.slice_range("pp", 0, 2, 1).unwrap().is_member());
    /// assert!(mesh.slice_range("pp", 3, 2, 1).is_err());
    /// ```
    pub fn slice_range(&self, dim: &str, start: usize, len: usize, step: usize) -> Result<Mesh> {
        let index = self.dim_index(dim)?;
        let cut = &self.dims[index].dim;
        let range = Subrange::new(self.root.size, cut, start, len, step)
            .map_err(|error| error.within(&format!("dimension {dim} of {}", self.describe())))?;
        if len == cut.size() {
            return Ok(self.clone());
        }
        let inner = |(at, named): (usize, &NamedDim)| {
            let dim = if at == index { Some(range.dim()) } else { range.inner_dim(&named.dim) };
            match dim {
                Some(dim) => Ok(NamedDim { dim, ..named.clone() }),
                None => Err(Error::internal(format!(
                    "dimension {} shares ranks with {}",
                    named.name, self.dims[index].name
                ))),
            }
        };
        let dims: Arc<[NamedDim]> = self.dims.iter().enumerate().map(inner).collect::<Result<_>>()?;
        let position = self.root.position.and_then(|position| range.inner(position));
        let base = range.at_start(self.base);
        let root = Root {
            device_type: self.root.device_type.clone(),
            size: range.size(),
            ranks: RankMap::Within(Arc::clone(&self.root), Arc::new(range)),
            dims: Arc::clone(&dims),
            rank: self.root.rank,
            position,
            flattened: Appended::default(),
            reshaped: Appended::default(),
        };
        Ok(Mesh { root: Arc::new(root), dims, base, mine: self.mine && position.is_some() })
    }

    /// For a view of a range, returns the whole view from which the range was taken, and the
    /// dimension of the whole view that is `dim` of this view. `None` for other views, and when the
    /// groups of the two dimensions differ.
    pub(crate) fn outer_dim(&self, dim: &Dim) -> Option<(Mesh, Dim)> {
        let RankMap::Within(outer, range) = &self.root.ranks else { return None };
        let whole =
            Mesh { root: Arc::clone(outer), dims: Arc::clone(&outer.dims), base: 0, mine: outer.position.is_some() };
        Some((whole, range.outer_dim(dim)?))
    }
}
