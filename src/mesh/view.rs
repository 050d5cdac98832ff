//! Views of views: slice, flatten, unflatten, concatenate, parallel copies.

use std::sync::{Arc, PoisonError};

use super::root::{Mesh, NamedDim, check_names};
use crate::error::{Error, Result};
use crate::layout::{Dim, Pair, complement, covers, is_disjoint};

impl Mesh {
    /// The named dimensions in the order given. Names are this view's, or those of flattened dimensions that this view holds.
    ///
    /// Wider than PyTorch, which wants the parent's order and knows flattened names at the root only.
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

    /// One dimension out of all of this view's, in their order; `None` joins their names with "_". The name is not known to other
    /// views before [`publish`](Mesh::publish).
    pub fn flatten(&self, name: Option<&str>) -> Result<Mesh> {
        let name = name.map_or_else(|| self.dim_names().join("_"), str::to_owned);
        if name.is_empty() {
            return Err(Error::invalid(format!("the name of the flattened {} is empty", self.describe())));
        }
        // A single dimension flattened under its own name is itself.
        if self.dims.len() == 1 && *self.dims[0].name == *name {
            return Ok(self.clone());
        }
        let flat = NamedDim { name: name.into(), dim: Dim::join(self.dims.iter().map(|named| &named.dim)) };
        self.check_flat_name(&flat, &self.root.flattened.read().unwrap_or_else(PoisonError::into_inner))?;
        self.view(vec![flat])
    }

    /// Whether this one-dimensional view's name is known to the root with this layout.
    pub fn is_known(&self) -> bool {
        let [named] = &*self.dims else { return false };
        let flattened = self.root.flattened.read().unwrap_or_else(PoisonError::into_inner);
        self.root.dims.contains(named) || flattened.contains(named)
    }

    /// Makes the name of a flattened dimension known to the root and so to every view that holds its digits. Again is no error.
    pub fn publish(&self) -> Result<()> {
        let [named] = &*self.dims else {
            return Err(Error::internal(format!("{} is not a flattened view", self.describe())));
        };
        if self.is_known() {
            return Ok(());
        }
        let mut flattened = self.root.flattened.write().unwrap_or_else(PoisonError::into_inner);
        self.check_flat_name(named, &flattened)?;
        if !flattened.contains(named) {
            flattened.push(named.clone());
        }
        Ok(())
    }

    /// The view with dimension `dim` replaced by several, the last fastest.
    pub fn unflatten(&self, dim: &str, sizes: &[usize], names: &[&str]) -> Result<Mesh> {
        let index = self.dim_index(dim)?;
        if sizes.len() != names.len() {
            return Err(Error::invalid(format!("{} names for {} sizes", names.len(), sizes.len())));
        }
        if let Some(index) = sizes.iter().position(|size| *size == 0) {
            return Err(Error::invalid(format!("size {index} of dimension {dim} is 0; each size is at least 1")));
        }
        let parts = self.dims[index].dim.split(sizes)?;
        let parts = names.iter().zip(parts).map(|(name, dim)| NamedDim { name: (*name).into(), dim });
        let mut dims = self.dims.to_vec();
        dims.splice(index..=index, parts);
        check_names(dims.iter().map(|named| &*named.name))?;
        Ok(Mesh { dims: dims.into(), ..self.clone() })
    }

    /// Views of one root side by side, their dimensions in order. They may not overlap.
    pub fn concatenate(meshes: &[&Mesh]) -> Result<Mesh> {
        let Some(first) = meshes.first() else {
            return Err(Error::invalid("concatenate needs at least one mesh, got 0"));
        };
        if let Some(other) = meshes.iter().find(|mesh| !mesh.same_root(first)) {
            return Err(Error::invalid(format!(
                "cannot concatenate {} and {}: they are views of different root meshes",
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
        // Each lies in one parallel copy of all these dimensions: side by side they need to lie in the same one. Those that hold this rank do.
        let base = base_of(&dims, first.base);
        if meshes.iter().any(|mesh| base_of(&dims, mesh.base) != base) {
            return Err(overlapping());
        }
        let mine = first.root.position.is_some_and(|position| base_of(&dims, position) == base);
        Ok(Mesh { root: Arc::clone(&first.root), dims: dims.into(), base, mine })
    }

    /// How many parallel copies of the named dimensions the root has.
    pub fn submesh_count(&self, names: &[&str]) -> Result<usize> {
        let (_, rest) = self.picked_and_rest(names)?;
        Ok(rest.size())
    }

    /// One of the parallel copies of the named dimensions over the ranks of the root, ordered by the positions they start from.
    pub fn submesh(&self, names: &[&str], index: usize) -> Result<Mesh> {
        let (dims, rest) = self.picked_and_rest(names)?;
        if index >= rest.size() {
            return Err(Error::invalid(format!(
                "submesh {index} of ({}): {} has {} of them",
                names.join(", "),
                self.root().describe(),
                rest.size()
            )));
        }
        let base = rest.offset(index);
        let mine = self.root.position.is_some_and(|position| base_of(&dims, position) == base);
        Ok(Mesh { root: Arc::clone(&self.root), dims: dims.into(), base, mine })
    }

    /// Where the dimension of that name is: a dimension of this view, or the only one of the view of a flattened dimension that this view
    /// holds. No name is allowed on a one-dimensional view.
    pub fn along(&self, name: Option<&str>) -> Result<(Mesh, usize)> {
        match (self.dim_index_or_only(name), name) {
            (Ok(index), _) => Ok((self.clone(), index)),
            (Err(error), None) => Err(error),
            // The slice knows the flattened names, and lists them when there is none.
            (Err(_), Some(name)) => Ok((self.slice(&[name])?, 0)),
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
        let rest = Dim::new(&complement(&[(self.root.size, 1)], &picked));
        Ok((dims, rest))
    }

    /// The dimension of that name: this view's, or a flattened one whose digits this view has.
    fn named(&self, name: &str) -> Result<NamedDim> {
        if let Some(named) = self.dims.iter().find(|named| *named.name == *name) {
            return Ok(named.clone());
        }
        let mine = pairs_of(&self.dims);
        let flattened = self.root.flattened.read().unwrap_or_else(PoisonError::into_inner);
        let held = |named: &&NamedDim| covers(&mine, named.dim.pairs());
        match flattened.iter().filter(held).find(|named| *named.name == *name) {
            Some(named) => Ok(named.clone()),
            None => {
                let known = self.dims.iter().chain(flattened.iter().filter(held));
                let known: Vec<&str> = known.map(|named| &*named.name).collect();
                Err(Error::not_found(format!(
                    "dimension {name} does not exist in {}; there are ({})",
                    self.describe(),
                    known.join(", ")
                )))
            }
        }
    }

    /// The view of these dimensions that holds this rank. A rank outside can only reorder what it has.
    fn view(&self, dims: Vec<NamedDim>) -> Result<Mesh> {
        let size: usize = dims.iter().map(|named| named.dim.size()).product();
        let base = match self.root.position.filter(|_| self.mine) {
            Some(position) => base_of(&dims, position),
            None if size == self.size() => self.base,
            None => {
                return Err(Error::not_member(format!(
                    "rank {} is not in {}, so it has no view of some of its dimensions",
                    self.root.rank,
                    self.describe()
                )));
            }
        };
        Ok(Mesh { root: Arc::clone(&self.root), dims: dims.into(), base, mine: self.mine })
    }

    /// PyTorch's rules: not the name of a dimension, and not that of another flattened dimension.
    fn check_flat_name(&self, flat: &NamedDim, flattened: &[NamedDim]) -> Result<()> {
        let other = |named: &NamedDim| named.name == flat.name && named.dim != flat.dim;
        if flattened.iter().any(other) {
            return Err(Error::invalid(format!(
                "a flattened dimension {} over other ranks exists already; choose another name",
                flat.name
            )));
        }
        if self.root.dims.iter().chain(self.dims.iter()).any(|named| named.name == flat.name && named.dim != flat.dim)
            || self.root.dims.iter().any(|named| named.name == flat.name)
        {
            return Err(Error::invalid(format!(
                "{} is already a dimension of {}; choose another name for the flattened one",
                flat.name,
                self.root().describe()
            )));
        }
        Ok(())
    }
}

fn pairs_of(dims: &[NamedDim]) -> Vec<Pair> {
    dims.iter().flat_map(|named| named.dim.pairs().iter().copied()).collect()
}

fn base_of(dims: &[NamedDim], position: usize) -> usize {
    dims.iter().fold(position, |base, named| named.dim.base(base))
}
