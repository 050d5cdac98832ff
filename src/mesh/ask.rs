//! Questions to a view.

use ndarray::{Array1, CowArray, Ix1};

use super::make::Mesh;
use super::root::RankMap;
use crate::error::{Error, Result};
use crate::layout::{Dim, Pair};

impl Mesh {
    /// Returns the device type, for example "cuda" or "cpu".
    pub fn device_type(&self) -> &str {
        &self.root.device_type
    }

    /// Returns the number of dimensions.
    pub fn ndim(&self) -> usize {
        self.dims.len()
    }

    /// Returns the sizes of the dimensions.
    pub fn shape(&self) -> Vec<usize> {
        self.dims.iter().map(|named| named.dim.size()).collect()
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.dims.iter().map(|named| named.dim.size()).product()
    }

    /// Returns the name of a dimension.
    ///
    /// # Panics
    /// Panics where no dimension has this index, as a slice does.
    pub fn dim_name(&self, index: usize) -> &str {
        &self.dims[index].name
    }

    /// Returns the names of all dimensions.
    pub fn dim_names(&self) -> Vec<&str> {
        self.dims.iter().map(|named| &*named.name).collect()
    }

    /// Returns the layout of a dimension over the root's positions.
    ///
    /// # Panics
    /// Panics where no dimension has this index, as a slice does.
    pub fn dim_layout(&self, index: usize) -> &Dim {
        &self.dims[index].dim
    }

    /// Returns the root's position at coordinate zero.
    pub fn base(&self) -> usize {
        self.base
    }

    /// Returns the size of a dimension in ranks.
    ///
    /// # Panics
    /// Panics where no dimension has this index, as a slice does.
    pub fn dim_size(&self, index: usize) -> usize {
        self.dims[index].dim.size()
    }

    /// Returns the index of the dimension of that name.
    pub fn dim_index(&self, name: &str) -> Result<usize> {
        self.dims.iter().position(|named| *named.name == *name).ok_or_else(|| {
            Error::not_found(format!(
                "dimension {name} does not exist in {}; there are ({})",
                self.describe(),
                self.dim_names().join(", ")
            ))
        })
    }

    /// Returns the index of the dimension of that name, or of the only dimension.
    pub fn dim_index_or_only(&self, name: Option<&str>) -> Result<usize> {
        match name {
            Some(name) => self.dim_index(name),
            None if self.dims.len() == 1 => Ok(0),
            None => Err(Error::invalid(format!(
                "{} has {} dimensions: say which one; without a name there must be exactly 1",
                self.describe(),
                self.dims.len()
            ))),
        }
    }

    /// Returns this process's rank in the world.
    pub fn rank(&self) -> i32 {
        self.root.rank
    }

    /// Whether this rank is in the view.
    pub fn is_member(&self) -> bool {
        self.mine
    }

    /// Returns this rank's coordinate along a dimension, which is its rank in that dimension's
    /// group.
    #[inline]
    pub fn local_rank(&self, index: usize) -> Result<usize> {
        let dim = self.dim_at(index)?;
        match self.root.position {
            Some(position) if self.mine => Ok(dim.coordinate(position)),
            _ => Err(self.outsider()),
        }
    }

    /// Returns this rank's coordinates.
    pub fn coordinate(&self) -> Result<Vec<usize>> {
        (0..self.dims.len())
            .map(|index| self.local_rank(index))
            .collect::<Result<_>>()
            .and_then(|coordinate: Vec<usize>| if self.mine { Ok(coordinate) } else { Err(self.outsider()) })
    }

    /// Returns the coordinates of any rank of the view. This takes O(dimensions). With an explicit
    /// rank array the first such question sorts the array, and each question takes O(log ranks).
    ///
    /// ```
    /// use devicemesh::mesh::{Mesh, MeshSpec};
    /// let spec = MeshSpec::new("cpu", &[2, 2], 8, 7).ranks(&[7, 5, 3, 1]);
    /// let mesh = Mesh::new(&spec).unwrap();
    /// assert_eq!(mesh.coordinate_of(3).unwrap(), [1, 0]);
    /// assert!(mesh.coordinate_of(0).is_err());
    /// assert!(mesh.slice(&["dim_1"]).unwrap().coordinate_of(3).is_err()); // it holds 7 and 5
    /// ```
    pub fn coordinate_of(&self, rank: i32) -> Result<Vec<usize>> {
        let position = self.root.ranks.position(rank, self.root.size);
        let start = |position| self.dims.iter().fold(position, |base, named| named.dim.base(base));
        match position.filter(|position| start(*position) == self.base) {
            Some(position) => Ok(self.dims.iter().map(|named| named.dim.coordinate(position)).collect()),
            None => Err(Error::not_member(format!("rank {rank} is not in {}", self.describe()))),
        }
    }

    /// Returns the world ranks of the view, row-major.
    pub fn ranks(&self) -> Vec<i32> {
        self.each_rank().collect()
    }

    /// Returns the world ranks of the view one by one, row-major. No list of them is made.
    pub fn each_rank(&self) -> impl Iterator<Item = i32> + '_ {
        let all = self.joined();
        (0..all.size()).map(move |index| self.rank_at(self.base + all.offset(index)))
    }

    /// Returns the world ranks by position, or `None` when each rank is equal to its position.
    pub fn rank_map(&self) -> Option<CowArray<'_, i32, Ix1>> {
        match &self.root.ranks {
            RankMap::Identity => None,
            RankMap::Listed(listed) => Some(CowArray::from(listed.ranks().view())),
            RankMap::Within(..) => Some(CowArray::from(Array1::from(self.root_ranks()))),
        }
    }

    /// Returns the world ranks of the root, row-major.
    pub fn root_ranks(&self) -> Vec<i32> {
        (0..self.root.size).map(|position| self.rank_at(position)).collect()
    }

    /// Returns the largest world rank of the root; `None` where the root has no ranks.
    pub(crate) fn largest_root_rank(&self) -> Option<i32> {
        self.root.ranks.largest(self.root.size)
    }

    /// Returns the world ranks of this rank's group along a dimension, in the order of their
    /// coordinates.
    pub fn group_ranks(&self, index: usize) -> Result<Vec<i32>> {
        self.each_group_rank(index).map(Iterator::collect)
    }

    /// Returns the world ranks of this rank's group one by one, in the order of their coordinates.
    /// No list of them is made.
    pub fn each_group_rank(&self, index: usize) -> Result<impl Iterator<Item = i32> + '_> {
        let dim = self.dim_at(index)?;
        match self.root.position {
            Some(position) if self.mine => {
                let base = dim.base(position);
                Ok((0..dim.size()).map(move |index| self.rank_at(base + dim.offset(index))))
            }
            _ => Err(self.outsider()),
        }
    }

    /// Returns the world rank of the rank that is `dim_rank` in this rank's group along a
    /// dimension.
    ///
    /// ```
    /// use devicemesh::mesh::{Mesh, MeshSpec};
    /// let names = ["dp", "cp", "tp"];
    /// let spec = MeshSpec::new("cuda", &[2, 2, 2], 8, 5).names(&names);
    /// let mesh = Mesh::new(&spec).unwrap(); // this rank is at (1, 0, 1)
    /// assert_eq!(mesh.group_ranks(0).unwrap(), [1, 5]);
    /// assert_eq!((mesh.translate_rank(0, 0).unwrap(), mesh.translate_rank(2, 0).unwrap()), (1, 4));
    /// ```
    pub fn translate_rank(&self, index: usize, dim_rank: usize) -> Result<i32> {
        let dim = self.dim_at(index)?;
        let position = self.root.position.filter(|_| self.mine).ok_or_else(|| self.outsider())?;
        if dim_rank >= dim.size() {
            return Err(Error::invalid(format!(
                "rank {dim_rank} along dimension {} of {}: the ranks along it are 0 to {}",
                self.dim_name(index),
                self.describe(),
                dim.size() - 1
            )));
        }
        Ok(self.rank_at(dim.base(position) + dim.offset(dim_rank)))
    }

    /// Returns the rank along a dimension of a world rank in this rank's group along it. This is
    /// the way back from [`translate_rank`](Mesh::translate_rank).
    ///
    /// ```
    /// use devicemesh::mesh::{Mesh, MeshSpec};
    /// let spec = MeshSpec::new("cuda", &[4, 2], 8, 6).names(&["pp", "tp"]);
    /// let mesh = Mesh::new(&spec).unwrap(); // this rank is at (3, 0)
    /// assert_eq!(mesh.dim_rank(0, 4).unwrap(), 2);
    /// assert!(mesh.dim_rank(0, 5).is_err()); // rank 5 is in another group along pp
    /// ```
    pub fn dim_rank(&self, index: usize, world_rank: i32) -> Result<usize> {
        let dim = self.dim_at(index)?;
        let mine = self.root.position.filter(|_| self.mine).ok_or_else(|| self.outsider())?;
        let theirs = self.root.ranks.position(world_rank, self.root.size);
        match theirs.filter(|theirs| dim.base(*theirs) == dim.base(mine)) {
            Some(theirs) => Ok(dim.coordinate(theirs)),
            None => Err(Error::not_member(format!(
                "rank {world_rank} is not in the group of rank {} along dimension {} of {}",
                self.rank(),
                self.dim_name(index),
                self.describe()
            ))),
        }
    }

    /// Returns the rank along a dimension that lies `offset` steps from this one. Past the edge
    /// there is none, unless the steps wrap.
    ///
    /// ```
    /// use devicemesh::mesh::{Mesh, MeshSpec};
    /// let spec = MeshSpec::new("cuda", &[4, 2], 8, 7).names(&["pp", "tp"]);
    /// let mesh = Mesh::new(&spec).unwrap(); // the last stage
    /// assert_eq!(mesh.neighbor(0, -1, false).unwrap(), Some(2));
    /// assert_eq!((mesh.neighbor(0, 1, false).unwrap(), mesh.neighbor(0, 1, true).unwrap()), (None, Some(0)));
    /// ```
    pub fn neighbor(&self, index: usize, offset: i64, wrap: bool) -> Result<Option<usize>> {
        let (here, size) = (self.local_rank(index)? as i128, self.dim_size(index) as i128);
        let there = here + i128::from(offset);
        match wrap {
            true => Ok(Some(there.rem_euclid(size) as usize)),
            false => Ok((0..size).contains(&there).then_some(there as usize)),
        }
    }

    /// Returns all groups along a dimension over the root's ranks, as `[groups, size of the
    /// dimension]` row-major. Each rank of the root is there once, and the groups are in the order
    /// of their first positions.
    ///
    /// ```
    /// use devicemesh::mesh::{Mesh, MeshSpec};
    /// let names = ["dp", "cp", "tp"];
    /// let spec = MeshSpec::new("cuda", &[2, 2, 2], 8, 5).names(&names);
    /// let mesh = Mesh::new(&spec).unwrap(); // this rank is at (1, 0, 1)
    /// assert_eq!(mesh.replica_groups(1), [0, 2, 1, 3, 4, 6, 5, 7]); // of cp: {0, 2}, {1, 3}, {4, 6}, {5, 7}
    /// ```
    ///
    /// # Panics
    /// Panics where no dimension has this index, as a slice does.
    pub fn replica_groups(&self, index: usize) -> Vec<i32> {
        self.groups_along(&self.dims[index].dim)
    }

    /// Returns all groups along a dimension of that layout over the root's positions, which cover
    /// the root mesh. Otherwise does what [`replica_groups`](Mesh::replica_groups) does.
    pub(crate) fn groups_along(&self, dim: &Dim) -> Vec<i32> {
        let firsts = (0..self.root.size).filter(|position| dim.base(*position) == *position);
        let group = |first| (0..dim.size()).map(move |index| self.rank_at(first + dim.offset(index)));
        firsts.flat_map(group).collect()
    }

    /// Returns the colour and the key for `ncclCommSplit` over the root's ranks. The colour is the
    /// base position of this rank's group along the dimension, so it is equal exactly within the
    /// group. The key is the coordinate.
    pub fn split_color_key(&self, index: usize) -> Result<(i32, i32)> {
        let dim = self.dim_at(index)?;
        match self.root.position {
            // A root has at most i32::MAX ranks.
            Some(position) if self.mine => Ok((dim.base(position) as i32, dim.coordinate(position) as i32)),
            _ => Err(self.outsider()),
        }
    }

    /// Returns the layout of a dimension that the caller names by its index.
    #[inline]
    pub(super) fn dim_at(&self, index: usize) -> Result<&Dim> {
        self.dims.get(index).map(|named| &named.dim).ok_or_else(|| self.no_dim(index))
    }

    #[cold]
    fn no_dim(&self, index: usize) -> Error {
        Error::invalid(format!(
            "there is no dimension {index} in {}, which has {} dimensions",
            self.describe(),
            self.dims.len()
        ))
    }

    /// Returns all dimensions as one.
    pub(super) fn joined(&self) -> Dim {
        let pairs: Vec<Pair> = self.dims.iter().flat_map(|named| named.dim.pairs().iter().copied()).collect();
        // The dimensions are digits of one space, so together they reach no further than the space
        // does.
        Dim::known(&pairs)
    }

    fn outsider(&self) -> Error {
        Error::not_member(format!("rank {} is not in {}", self.root.rank, self.describe()))
    }
}
