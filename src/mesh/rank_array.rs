//! A mesh from an n-dimensional array of ranks, and its ranks as one: PyTorch's
//! `DeviceMesh(device_type, mesh)` and `mesh.mesh`.

use ndarray::{ArrayD, ArrayView, Dimension, IxDyn};

use super::make::{Mesh, MeshSpec, check_listed};
use crate::error::Result;

impl Mesh {
    /// Makes a root mesh of the array's shape, in which the rank at each coordinate is the array's
    /// element there.
    ///
    /// The array has any number of dimensions and any strides, so it may be a transposed or sliced
    /// view of another one. Its elements are distinct ranks of the world, as [`MeshSpec::ranks`]
    /// wants them; errors name an element by its row-major index. The mesh copies them. `names` has
    /// one name for each dimension; `None` names them dim_0, dim_1 ...
    ///
    /// ```
    /// use devicemesh::mesh::Mesh;
    /// use devicemesh::ndarray::{Array, array};
    /// // Ranks 0 to 7 as (tp=2, dp=4), where the neighbours in tp are 4 apart: rank 6 is at (1, 2).
    /// let ranks = array![[0, 1, 2, 3], [4, 5, 6, 7]];
    /// let mesh = Mesh::from_rank_array("cpu", ranks.view(), Some(&["tp", "dp"]), 8, 6).unwrap();
    /// assert_eq!(mesh.coordinate().unwrap(), [1, 2]);
    /// // The transposed array is the mesh (dp=4, tp=2).
    /// let mesh = Mesh::from_rank_array("cpu", ranks.t(), Some(&["dp", "tp"]), 8, 6).unwrap();
    /// assert_eq!(mesh.coordinate().unwrap(), [2, 1]);
    /// assert_eq!(mesh.group_ranks(1).unwrap(), [2, 6]);
    /// assert_eq!(mesh.rank_array(), ranks.t().into_dyn());
    /// // A number of dimensions that is known at run time alone.
    /// let cube = Array::from_shape_vec(vec![2, 2, 2], (0..8).rev().collect()).unwrap();
    /// let mesh = Mesh::from_rank_array("cpu", cube.view(), None, 8, 6).unwrap();
    /// assert_eq!((mesh.dim_names(), mesh.coordinate().unwrap()), (vec!["dim_0", "dim_1", "dim_2"], vec![0, 0, 1]));
    /// // Each rank is in a mesh once.
    /// let error = Mesh::from_rank_array("cpu", array![[0, 1], [1, 2]].view(), None, 8, 0).unwrap_err();
    /// assert_eq!(error.message(), "rank 1 is listed twice, at index 1 and index 2");
    /// ```
    pub fn from_rank_array<D: Dimension>(
        device_type: &str,
        ranks: ArrayView<'_, i32, D>,
        names: Option<&[&str]>,
        world_size: usize,
        rank: usize,
    ) -> Result<Mesh> {
        let spec = MeshSpec { device_type, shape: ranks.shape(), names, ranks: None, world_size, rank };
        // A broadcast array says a large shape with few elements, so it is copied only when the
        // shape fits the world.
        let in_order = Mesh::new(&spec)?;
        check_listed(in_order.size())?;
        let listed: Vec<i32> = ranks.iter().copied().collect();
        Mesh::new(&spec.ranks(&listed))
    }

    /// Returns the world ranks of the view, as an array of its shape: element `[i, j, ...]` is the
    /// rank at coordinate `[i, j, ...]`.
    ///
    /// ```
    /// use devicemesh::mesh::{Mesh, MeshSpec};
    /// use devicemesh::ndarray::{Axis, array};
    /// let names = ["dp", "cp", "tp"];
    /// let mesh = Mesh::new(&MeshSpec::new("cuda", &[2, 2, 2], 8, 5).names(&names)).unwrap();
    /// let ranks = mesh.rank_array();
    /// assert_eq!(ranks, array![[[0, 1], [2, 3]], [[4, 5], [6, 7]]].into_dyn());
    /// assert_eq!(ranks.index_axis(Axis(0), 1), array![[4, 5], [6, 7]].into_dyn());
    /// assert_eq!(mesh.slice(&["tp", "dp"]).unwrap().rank_array(), array![[0, 4], [1, 5]].into_dyn());
    /// ```
    pub fn rank_array(&self) -> ArrayD<i32> {
        let rank_at = |coordinate: IxDyn| {
            let offsets = self.dims.iter().zip(coordinate.slice()).map(|(named, index)| named.dim.offset(*index));
            self.rank_at(self.base + offsets.sum::<usize>())
        };
        ArrayD::from_shape_fn(self.shape(), rank_at)
    }
}
