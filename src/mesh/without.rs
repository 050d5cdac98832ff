//! A mesh without some of its ranks.

use std::collections::HashSet;

use super::make::{Mesh, MeshSpec, check_listed};
use crate::error::{Error, Result};

impl Mesh {
    /// Makes the root mesh of the ranks that are left when whole replicas are left out: all ranks
    /// whose index along dimension `index` is that of a lost rank. The new mesh is for a world of
    /// `world_size` ranks. Fails unless this view has all ranks of its root.
    ///
    /// ```
    /// use devicemesh::mesh::{Mesh, MeshSpec};
    /// let names = ["dp", "tp"];
    /// let spec = MeshSpec::new("cuda", &[4, 2], 8, 6).names(&names);
    /// let mesh = Mesh::new(&spec).unwrap();
    /// let left = mesh.without(0, &[5], 8).unwrap(); // rank 5 is in replica 2, with rank 4
    /// assert_eq!((left.shape(), left.ranks()), (vec![3, 2], vec![0, 1, 2, 3, 6, 7]));
    /// assert_eq!(left.coordinate().unwrap(), [2, 0]);
    /// assert!(mesh.without(0, &[6], 8).is_err()); // this rank itself
    /// assert!(mesh.without(1, &[0, 1], 8).is_err()); // nothing would be left
    /// ```
    pub fn without(&self, index: usize, lost: &[i32], world_size: usize) -> Result<Mesh> {
        self.dim_at(index)?;
        let name = self.dim_name(index);
        self.check_whole()?;
        if lost.contains(&self.rank()) && self.is_member() {
            return Err(Error::invalid(format!("rank {} is this one, which is not lost", self.rank())));
        }
        let (size, mut gone) = (self.dim_size(index), HashSet::new());
        for rank in lost {
            let coordinate = self.coordinate_of(*rank).map_err(|error| Error::invalid(error.message()))?;
            gone.insert(coordinate[index]);
        }
        let left = size - gone.len();
        if left == 0 {
            return Err(Error::invalid(format!(
                "each index of dimension {name} of {} holds a lost rank",
                self.describe()
            )));
        }
        // The index changes every `inner` ranks, because the ranks are row-major.
        let inner: usize = self.shape()[index + 1..].iter().product();
        let kept = |(at, rank): (usize, i32)| (!gone.contains(&(at / inner % size))).then_some(rank);
        check_listed(self.size())?;
        let ranks: Vec<i32> = self.each_rank().enumerate().filter_map(kept).collect();
        let mut shape = self.shape();
        shape[index] = left;
        self.like(&shape, &ranks, world_size)
    }

    /// Makes a root mesh with the dimensions of this view, in other sizes and over other ranks of a
    /// world of `world_size` ranks.
    pub(crate) fn like(&self, shape: &[usize], ranks: &[i32], world_size: usize) -> Result<Mesh> {
        check_listed(ranks.len())?;
        let names = self.dim_names();
        // A name that nobody gave says the index of a dimension. A transposed view has the names in
        // another order, and they are kept.
        let in_order = || names.iter().enumerate().all(|(index, name)| *name == format!("dim_{index}"));
        let named = self.dims.iter().any(|dim| dim.named) || !in_order();
        Mesh::new(&MeshSpec {
            device_type: self.device_type(),
            shape,
            names: named.then_some(&names),
            ranks: Some(ranks),
            world_size,
            rank: self.rank() as usize,
        })
    }

    /// Fails unless this view has all ranks of its root, so that replicas of it can be left out.
    pub(crate) fn check_whole(&self) -> Result<()> {
        if self.size() == self.root_size() {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "{} has {} of the {} ranks of {}: pass a view that has all of these ranks",
            self.describe(),
            self.size(),
            self.root_size(),
            self.space().describe()
        )))
    }
}
