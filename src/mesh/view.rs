//! Views of views: slice, flatten, unflatten, reshape, concatenate, parallel copies.

use std::borrow::Cow;
use std::sync::Arc;

use super::make::{Mesh, check_names, list};
use super::root::{NamedDim, RankMap, Root};
use crate::error::{Error, Result};
use crate::layout::{Dim, Pair, complement, covers, is_disjoint};

impl Mesh {
    /// Returns the named dimensions in the order given. Names are this view's, or those of
    /// flattened dimensions that this view holds.
    ///
    /// This is wider than PyTorch, which wants the dimensions in the parent's order and knows
    /// flattened names at the root only.
    ///
    /// ```
    /// use devicemesh::mesh::{Mesh, MeshSpec};
    /// let names = ["dp", "cp", "tp"];
    /// let spec = MeshSpec::new("cuda", &[2, 2, 2], 8, 5).names(&names);
    /// let mesh = Mesh::new(&spec).unwrap(); // this rank is at (1, 0, 1)
    /// assert_eq!(mesh.slice(&["dp", "cp"]).unwrap().ranks(), [1, 3, 5, 7]);
    /// assert_eq!(mesh.slice(&["cp", "dp"]).unwrap().ranks(), [1, 5, 3, 7]); // the transposed view
    /// assert_eq!(mesh.slice(&["dp", "cp"]).unwrap().slice(&["cp"]).unwrap().ranks(), [5, 7]); // a view of a view
    /// ```
    pub fn slice(&self, names: &[&str]) -> Result<Mesh> {
        let dims = names.iter().map(|name| self.named(name)).collect::<Result<Vec<_>>>()?;
        check_names(names.iter().copied())?;
        if !is_disjoint(&pairs_of(&dims)) {
            return Err(Error::invalid(format!(
                "slicing overlapping dimensions ({}) of {}: each rank may appear once",
                names.join(", "),
                self.describe()
            )));
        }
        self.view(dims)
    }

    /// Returns the view in which all dimensions of this view, in their order, are one. `None` joins
    /// their names with "_". Other views do not know the name before [`publish`](Mesh::publish).
    ///
    /// ```
    /// use devicemesh::mesh::{Mesh, MeshSpec};
    /// let names = ["dp", "cp", "tp"];
    /// let spec = MeshSpec::new("cuda", &[2, 2, 2], 8, 5).names(&names);
    /// let mesh = Mesh::new(&spec).unwrap(); // this rank is at (1, 0, 1)
    /// let dp_tp = mesh.slice(&["dp", "tp"]).unwrap().flatten(None).unwrap();
    /// assert_eq!((dp_tp.dim_names(), dp_tp.ranks()), (vec!["dp_tp"], vec![0, 1, 4, 5]));
    /// dp_tp.publish().unwrap();
    /// assert_eq!(mesh.slice(&["dp_tp", "cp"]).unwrap().shape(), [4, 2]);
    /// ```
    pub fn flatten(&self, name: Option<&str>) -> Result<Mesh> {
        let name = name.map_or_else(|| self.dim_names().join("_"), str::to_owned);
        if name.is_empty() {
            return Err(Error::invalid(format!("the name of the flattened {} is empty", self.describe())));
        }
        // A dimension that is flattened alone, under its own name, stays the same.
        if self.dims.len() == 1 && *self.dims[0].name == *name {
            return Ok(self.clone());
        }
        let flat = NamedDim { name: name.into(), dim: self.joined(), named: true };
        self.check_flat_name(&flat, &self.root.flat_dims())?;
        self.view(vec![flat])
    }

    /// Whether the root knows the name of this one-dimensional view with this layout.
    pub fn is_known(&self) -> bool {
        let [named] = &*self.dims else { return false };
        let same = |known: &NamedDim| known.name == named.name && known.dim == named.dim;
        self.root.dims.iter().any(same) || self.root.flat_dims().iter().any(same)
    }

    /// Makes the name of a flattened dimension known to the root, and so to every view that holds
    /// its digits. Publishing a name twice is no error.
    pub fn publish(&self) -> Result<()> {
        let [named] = &*self.dims else {
            return Err(Error::internal(format!("{} is not a flattened view", self.describe())));
        };
        if self.is_known() {
            return Ok(());
        }
        self.root.flattened.add(&self.dims, |flattened| self.check_flat_name(named, flattened))
    }

    /// Returns the view with dimension `dim` replaced by several, the last fastest.
    ///
    /// ```
    /// use devicemesh::mesh::{Mesh, MeshSpec};
    /// let spec = MeshSpec::new("cuda", &[2, 4], 8, 6).names(&["dp", "tp"]);
    /// let split = Mesh::new(&spec).unwrap().unflatten("tp", &[2, 2], &["node", "chip"]).unwrap();
    /// assert_eq!(split.describe(), "DeviceMesh((dp=2, node=2, chip=2), 'cuda', stride=(4, 2, 1))");
    /// assert_eq!((split.group_ranks(1).unwrap(), split.group_ranks(2).unwrap()), (vec![4, 6], vec![6, 7]));
    /// ```
    pub fn unflatten(&self, dim: &str, sizes: &[usize], names: &[&str]) -> Result<Mesh> {
        let index = self.dim_index(dim)?;
        if sizes.len() != names.len() {
            return Err(Error::invalid(format!("{} names for {} sizes", names.len(), sizes.len())));
        }
        if let Some(index) = sizes.iter().position(|size| *size == 0) {
            return Err(Error::invalid(format!("size {index} of dimension {dim} is 0; each size is at least 1")));
        }
        let parts = self.dims[index].dim.split(sizes)?;
        let parts = names.iter().zip(parts).map(|(name, dim)| NamedDim { name: (*name).into(), dim, named: true });
        let mut dims = self.dims.to_vec();
        dims.splice(index..=index, parts);
        check_names(dims.iter().map(|named| &*named.name))?;
        Ok(Mesh { dims: dims.into(), ..self.clone() })
    }

    /// Returns all ranks of this view, row-major, under another shape: a second factorisation of
    /// them. A name that this view or its root has already must mean the same groups in the new
    /// shape.
    ///
    /// ```
    /// use devicemesh::mesh::{Mesh, MeshSpec};
    /// let names = ["pp", "dp", "cp", "tp"];
    /// let spec = MeshSpec::new("cuda", &[2, 2, 2, 2], 16, 13).names(&names);
    /// let dense = Mesh::new(&spec).unwrap();
    /// // The same stages; within each, experts over 4 ranks where dense layers have cp x tp.
    /// let sparse = dense.reshape(&[2, 2, 4], &["pp", "edp", "ep"]).unwrap();
    /// assert_eq!(sparse.group_ranks(2).unwrap(), [12, 13, 14, 15]);
    /// assert_eq!(sparse.dim_layout(0), dense.dim_layout(0));
    /// // Four stages of the same name would not be the two.
    /// assert!(dense.reshape(&[4, 4], &["pp", "ep"]).is_err());
    /// ```
    pub fn reshape(&self, sizes: &[usize], names: &[&str]) -> Result<Mesh> {
        if sizes.len() != names.len() {
            return Err(Error::invalid(format!("{} names for {} sizes", names.len(), sizes.len())));
        }
        if let Some(index) = sizes.iter().position(|size| *size == 0) {
            return Err(Error::invalid(format!("size {index} is 0; each size is at least 1")));
        }
        check_names(names.iter().copied())?;
        let parts = self.joined().split(sizes).map_err(|error| error.within(&self.describe()))?;
        let parts = names.iter().zip(parts).map(|(name, dim)| NamedDim { name: (*name).into(), dim, named: true });
        let dims: Vec<NamedDim> = parts.collect();
        let flat = self.root.flat_dims();
        for named in &dims {
            let known = self.dims.iter().chain(self.root.dims.iter()).chain(&flat);
            if let Some(other) = known.into_iter().find(|known| known.is_namesake(named)) {
                return Err(Error::invalid(format!(
                    "dimension {} of shape ({}) would have (size, stride) {:?}, but {} has {:?} under that name: one name would mean two sets of groups",
                    named.name,
                    list(sizes),
                    named.dim.pairs(),
                    self.space().describe(),
                    other.dim.pairs()
                )));
            }
        }
        Ok(Mesh { dims: dims.into(), ..self.clone() })
    }

    /// Notes the dimensions of this reshaped view in its root, so that [`flatten`](Mesh::flatten)
    /// refuses their names for other groups. Each rank has a root of its own, so every rank that
    /// has reshaped must call this function. A second call is no error.
    ///
    /// ```
    /// use devicemesh::mesh::{Mesh, MeshSpec};
    /// let names = ["pp", "dp", "tp"];
    /// let spec = MeshSpec::new("cuda", &[2, 2, 2], 8, 5).names(&names);
    /// let mesh = Mesh::new(&spec).unwrap();
    /// mesh.reshape(&[2, 4], &["pp", "ep"]).unwrap().keep_names();
    /// assert!(mesh.slice(&["dp", "tp"]).unwrap().flatten(Some("ep")).is_ok()); // the same groups
    /// assert!(mesh.slice(&["pp", "dp"]).unwrap().flatten(Some("ep")).is_err());
    /// ```
    pub fn keep_names(&self) {
        // Flattened dimensions never take the name of a dimension of the root.
        let is_new = |named: &&NamedDim| !self.root.dims.contains(named);
        let new: Vec<NamedDim> = self.dims.iter().filter(is_new).cloned().collect();
        let _ = self.root.reshaped.add(&new, |_| Ok(()));
    }

    /// Makes one view of several views of one root. It has the dimensions of all of them, in order.
    /// The views may not overlap.
    ///
    /// ```
    /// use devicemesh::mesh::{Mesh, MeshSpec};
    /// let names = ["dp", "cp", "tp"];
    /// let spec = MeshSpec::new("cuda", &[2, 2, 2], 8, 5).names(&names);
    /// let mesh = Mesh::new(&spec).unwrap(); // this rank is at (1, 0, 1)
    /// let (dp, tp) = (mesh.slice(&["dp"]).unwrap(), mesh.slice(&["tp"]).unwrap());
    /// assert_eq!(Mesh::concatenate(&[&tp, &dp]).unwrap().ranks(), [0, 4, 1, 5]);
    /// assert!(Mesh::concatenate(&[&dp, &mesh]).is_err()); // dp twice
    /// ```
    pub fn concatenate(meshes: &[&Mesh]) -> Result<Mesh> {
        let Some(first) = meshes.first() else {
            return Err(Error::invalid("concatenate needs at least one mesh, got 0"));
        };
        if let Some(other) = meshes.iter().find(|mesh| !mesh.same_root(first)) {
            let roots = match first.root().same_root(&other.root()) {
                true => "one of them is a view of a range of the other's ranks",
                false => "they are views of different root meshes",
            };
            return Err(Error::invalid(format!(
                "cannot concatenate {} and {}: {roots}",
                first.describe(),
                other.describe()
            )));
        }
        let dims: Vec<NamedDim> = meshes.iter().flat_map(|mesh| mesh.dims.iter().cloned()).collect();
        let overlapping = || {
            let all: Vec<String> = meshes.iter().map(|mesh| mesh.describe()).collect();
            Error::invalid(format!("cannot concatenate overlapping meshes: {}", all.join(", ")))
        };
        if !is_disjoint(&pairs_of(&dims)) {
            return Err(overlapping());
        }
        check_names(dims.iter().map(|named| &*named.name))?;
        // Each view lies in one parallel copy of all these dimensions, and all views must lie in
        // the same copy. Views that hold this rank do.
        let base = base_of(&dims, first.base);
        if meshes.iter().any(|mesh| base_of(&dims, mesh.base) != base) {
            return Err(overlapping());
        }
        let mine = first.root.position.is_some_and(|position| base_of(&dims, position) == base);
        Ok(Mesh { root: Arc::clone(&first.root), dims: dims.into(), base, mine })
    }

    /// Returns how many parallel copies of the named dimensions the root has.
    pub fn submesh_count(&self, names: &[&str]) -> Result<usize> {
        let (_, rest) = self.picked_and_rest(names)?;
        Ok(rest.size())
    }

    /// Returns one of the parallel copies of the named dimensions over the ranks of the root,
    /// ordered by the positions they start from.
    ///
    /// ```
    /// use devicemesh::mesh::{Mesh, MeshSpec};
    /// let names = ["dp", "cp", "tp"];
    /// let spec = MeshSpec::new("cuda", &[2, 2, 2], 8, 5).names(&names);
    /// let mesh = Mesh::new(&spec).unwrap(); // this rank is at (1, 0, 1)
    /// assert_eq!(mesh.submesh_count(&["dp"]).unwrap(), 4);
    /// assert_eq!((0..4).map(|index| mesh.submesh(&["dp"], index).unwrap().ranks()).collect::<Vec<_>>(), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    /// assert!(mesh.submesh(&["dp"], 1).unwrap().is_member());
    /// ```
    pub fn submesh(&self, names: &[&str], index: usize) -> Result<Mesh> {
        let (dims, rest) = self.picked_and_rest(names)?;
        if index >= rest.size() {
            return Err(Error::invalid(format!(
                "submesh {index} of ({}): {} has {} of them",
                names.join(", "),
                self.space().describe(),
                rest.size()
            )));
        }
        let base = rest.offset(index);
        let mine = self.root.position.is_some_and(|position| base_of(&dims, position) == base);
        Ok(Mesh { root: Arc::clone(&self.root), dims: dims.into(), base, mine })
    }

    /// Finds the dimension of that name. It is a dimension of this view, or the only dimension of
    /// the view of a flattened dimension that this view holds. On a one-dimensional view the name
    /// may be left out.
    pub fn along(&self, name: Option<&str>) -> Result<(Mesh, usize)> {
        match (self.dim_index_or_only(name), name) {
            (Ok(index), _) => Ok((self.clone(), index)),
            (Err(error), None) => Err(error),
            // The slice knows the flattened names, and lists them when there is none.
            (Err(_), Some(name)) => Ok((self.slice(&[name])?, 0)),
        }
    }

    /// Returns the layout of the dimension of that name, which this view has, or which is a
    /// flattened dimension that this view holds. This rank need not be in the view. On a
    /// one-dimensional view the name may be left out.
    pub(crate) fn layout_along(&self, name: Option<&str>) -> Result<Cow<'_, Dim>> {
        match (self.dim_index_or_only(name), name) {
            (Ok(index), _) => Ok(Cow::Borrowed(&self.dims[index].dim)),
            (Err(error), None) => Err(error),
            (Err(_), Some(name)) => Ok(Cow::Owned(self.named(name)?.dim)),
        }
    }

    fn picked_and_rest(&self, names: &[&str]) -> Result<(Vec<NamedDim>, Dim)> {
        let dims = names.iter().map(|name| self.named(name)).collect::<Result<Vec<_>>>()?;
        let picked = pairs_of(&dims);
        check_names(names.iter().copied())?;
        if !is_disjoint(&picked) {
            return Err(Error::invalid(format!(
                "submeshes over overlapping dimensions ({}) of {}",
                names.join(", "),
                self.describe()
            )));
        }
        let rest = Dim::known(&complement(&[(self.root.size, 1)], &picked)?);
        Ok((dims, rest))
    }

    /// Returns the dimension of that name. It is a dimension of this view, or a flattened
    /// dimension. The digits of the flattened dimension must be digits of this view, in whatever
    /// dimensions the view has them.
    fn named(&self, name: &str) -> Result<NamedDim> {
        if let Some(named) = self.dims.iter().find(|named| *named.name == *name) {
            return Ok(named.clone());
        }
        let mut mine = pairs_of(&self.dims);
        mine.sort_unstable_by_key(|pair| std::cmp::Reverse(pair.1));
        let (mine, flattened) = (Dim::known(&mine), self.root.flat_dims());
        let held = |named: &&NamedDim| covers(mine.pairs(), named.dim.pairs());
        match flattened.iter().filter(held).find(|named| *named.name == *name) {
            Some(named) => Ok(named.clone()),
            None => {
                let mine = self.dims.iter();
                let is_new = |named: &&NamedDim| !mine.clone().any(|known| known.name == named.name);
                let known = mine.clone().chain(flattened.iter().filter(held).filter(is_new));
                let known: Vec<&str> = known.map(|named| &*named.name).collect();
                Err(Error::not_found(format!(
                    "dimension {name} does not exist in {}; there are ({})",
                    self.describe(),
                    known.join(", ")
                )))
            }
        }
    }

    /// Returns the view of these dimensions that holds this rank. A rank outside this view gets
    /// only views of all its ranks.
    fn view(&self, dims: Vec<NamedDim>) -> Result<Mesh> {
        let size: usize = dims.iter().map(|named| named.dim.size()).product();
        let base = match self.root.position.filter(|_| self.mine) {
            Some(position) => base_of(&dims, position),
            None if size == self.size() => self.base,
            None => {
                return Err(Error::not_member(format!(
                    "rank {} is not in {}, so this rank cannot take a view of only some of its dimensions",
                    self.root.rank,
                    self.describe()
                )));
            }
        };
        Ok(Mesh { root: Arc::clone(&self.root), dims: dims.into(), base, mine: self.mine })
    }

    /// Fails when the name belongs to a dimension of the root. Fails also when a dimension of this
    /// view, a reshaped dimension or a flattened dimension has the name for other groups. PyTorch
    /// compares the name with the root's dimensions only, not with those that only the view has.
    fn check_flat_name(&self, flat: &NamedDim, flattened: &[NamedDim]) -> Result<()> {
        if flattened.iter().any(|known| known.is_namesake(flat)) {
            return Err(Error::invalid(format!(
                "a flattened dimension {} over other ranks exists already; choose another name",
                flat.name
            )));
        }
        if self.root.reshaped.all().iter().any(|known| known.is_namesake(flat)) {
            return Err(Error::invalid(format!(
                "a reshaped view has a dimension {} over other ranks; choose another name for the flattened one",
                flat.name
            )));
        }
        let owner = if self.root.dims.iter().any(|named| named.name == flat.name) {
            self.space().describe()
        } else if self.dims.iter().any(|known| known.is_namesake(flat)) {
            self.describe()
        } else {
            return Ok(());
        };
        Err(Error::invalid(format!(
            "{} is already a dimension of {owner}; choose another name for the flattened one",
            flat.name
        )))
    }
}

impl Root {
    /// Returns the flattened dimensions that are known here. They are those of this root, and those
    /// of the root that it is a range of, as far as the range leaves their groups whole. A
    /// dimension of the outer root is left out where this root has its name for other groups.
    fn flat_dims(&self) -> Vec<NamedDim> {
        let mut known = self.flattened.all();
        if let RankMap::Within(outer, range) = &self.ranks {
            let inner = |named: NamedDim| Some(NamedDim { dim: range.inner_dim(&named.dim)?, ..named });
            let mut outer: Vec<NamedDim> = outer.flat_dims().into_iter().filter_map(inner).collect();
            let reshaped = self.reshaped.all();
            outer.retain(|named| {
                let mut own = known.iter().chain(&reshaped).chain(self.dims.iter());
                !own.any(|own| own.is_namesake(named))
            });
            known.extend(outer);
        }
        known
    }
}

impl NamedDim {
    /// Whether the other dimension has the same name and other groups.
    fn is_namesake(&self, other: &NamedDim) -> bool {
        self.name == other.name && self.dim != other.dim
    }
}

fn pairs_of(dims: &[NamedDim]) -> Vec<Pair> {
    dims.iter().flat_map(|named| named.dim.pairs().iter().copied()).collect()
}

fn base_of(dims: &[NamedDim], position: usize) -> usize {
    dims.iter().fold(position, |base, named| named.dim.base(base))
}
