//! The view of a rank, [`Mesh`], and how a root mesh is made.

use std::collections::HashSet;
use std::sync::Arc;

use ndarray::ArrayView1;

use super::root::{Appended, Listed, NamedDim, RankMap, Root};
use crate::error::{Error, Result};
use crate::layout::{Dim, row_major};

/// The arguments from which a root mesh is made.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct MeshSpec<'a> {
    /// "cuda", "cpu" or another type without an index. The caller decides which types work.
    pub device_type: &'a str,
    /// The sizes of the dimensions, each at least 1.
    pub shape: &'a [usize],
    /// One name per dimension; `None` names them dim_0, dim_1 ...
    pub names: Option<&'a [&'a str]>,
    /// World ranks, row-major; `None` is 0 .. n-1.
    pub ranks: Option<&'a [i32]>,
    /// The number of ranks of the world. The mesh may have fewer.
    pub world_size: usize,
    /// This process's rank in the world.
    pub rank: usize,
}

impl<'a> MeshSpec<'a> {
    /// Describes a mesh of that shape over the first ranks of the world, row-major, as rank `rank`
    /// sees it. Its dimensions are dim_0, dim_1 ...
    pub fn new(device_type: &'a str, shape: &'a [usize], world_size: usize, rank: usize) -> MeshSpec<'a> {
        MeshSpec { device_type, shape, names: None, ranks: None, world_size, rank }
    }

    /// Gives the dimensions these names, one for each.
    #[must_use]
    pub fn names(self, names: &'a [&'a str]) -> MeshSpec<'a> {
        MeshSpec { names: Some(names), ..self }
    }

    /// Gives the mesh these world ranks, row-major.
    #[must_use]
    pub fn ranks(self, ranks: &'a [i32]) -> MeshSpec<'a> {
        MeshSpec { ranks: Some(ranks), ..self }
    }
}

/// One rank's immutable view of a mesh. Cloning is cheap, and a view can be used from any thread.
///
/// ```
/// use devicemesh::mesh::{Mesh, MeshSpec};
/// let names = ["dp", "tp"];
/// let spec = MeshSpec::new("cpu", &[2, 4], 8, 6).names(&names);
/// let mesh = Mesh::new(&spec).unwrap();
/// assert_eq!(mesh.coordinate().unwrap(), [1, 2]);
/// assert_eq!(mesh.group_ranks(0).unwrap(), [2, 6]);
/// assert_eq!(mesh.slice(&["tp"]).unwrap().ranks(), [4, 5, 6, 7]);
/// ```
#[derive(Debug, Clone)]
pub struct Mesh {
    /// The part that all views of the root share.
    pub(super) root: Arc<Root>,
    /// The dimensions of this view over the root's positions.
    pub(super) dims: Arc<[NamedDim]>,
    /// The position at coordinate zero.
    pub(super) base: usize,
    /// Whether this rank is in the view.
    pub(super) mine: bool,
}

impl Mesh {
    /// Makes a root mesh. Everything that is wrong with the arguments is found here, without
    /// communication.
    pub fn new(spec: &MeshSpec<'_>) -> Result<Mesh> {
        let device_type = spec.device_type;
        if device_type.is_empty() || device_type.contains(':') {
            return Err(Error::invalid(format!(
                "device type with index is not supported, got {device_type:?}: pass the type alone, for example \"cuda\""
            )));
        }
        let layout = row_major(spec.shape)?;
        let names = dim_names(spec.names, spec.shape.len())?;
        let size: usize = spec.shape.iter().product();
        if spec.world_size > i32::MAX as usize || size > spec.world_size {
            return Err(Error::invalid(format!(
                "a mesh of shape ({}) has {size} ranks, but the world has {}",
                list(spec.shape),
                spec.world_size
            )));
        }
        let ranks = match spec.ranks {
            None => RankMap::Identity,
            Some(ranks) => rank_map(ranks, size, spec.world_size)?,
        };
        let rank = i32::try_from(spec.rank).ok().filter(|_| spec.rank < spec.world_size);
        let Some(rank) = rank else {
            return Err(Error::invalid(format!("rank {} is not in a world of {} ranks", spec.rank, spec.world_size)));
        };
        let position = match &ranks {
            // A search is cheaper than an index, because this is the only question.
            RankMap::Listed(listed) => listed.ranks().iter().position(|known| *known == rank),
            ranks => ranks.position(rank, size),
        };
        let named = spec.names.is_some();
        let dims = names.into_iter().zip(layout).map(|(name, dim)| NamedDim { name, dim, named });
        let dims: Arc<[NamedDim]> = dims.collect();
        let root = Root {
            device_type: device_type.to_owned(),
            size,
            ranks,
            dims: Arc::clone(&dims),
            rank,
            position,
            flattened: Appended::default(),
            reshaped: Appended::default(),
        };
        Ok(Mesh { root: Arc::new(root), dims, base: 0, mine: position.is_some() })
    }

    /// Returns the root mesh of this view. For a view of a range this is the mesh that the first
    /// range was taken from.
    pub fn root(&self) -> Mesh {
        let mut root = &self.root;
        while let RankMap::Within(outer, _) = &root.ranks {
            root = outer;
        }
        Mesh::of(Arc::clone(root))
    }

    /// Returns the view of all ranks that have a position here. They are the ranks of the root, or
    /// of the range that this is a view of.
    pub fn space(&self) -> Mesh {
        Mesh::of(Arc::clone(&self.root))
    }

    fn of(root: Arc<Root>) -> Mesh {
        Mesh { dims: Arc::clone(&root.dims), base: 0, mine: root.position.is_some(), root }
    }

    /// Returns all positions as one dimension.
    pub(crate) fn whole(&self) -> Dim {
        Dim::known(&[(self.root.size, 1)])
    }

    /// Returns a view that has all positions as one dimension.
    pub(crate) fn all_ranks(&self) -> Mesh {
        let all = NamedDim { name: "all ranks".into(), dim: self.whole(), named: true };
        Mesh { dims: [all].into(), ..self.space() }
    }

    /// Whether both are views of one root and one range. Two roots that are equal but were made
    /// apart are not one.
    pub fn same_root(&self, other: &Mesh) -> bool {
        Arc::ptr_eq(&self.root, &other.root)
    }

    /// Returns the number of ranks of the root, or of the range that this is a view of.
    pub fn root_size(&self) -> usize {
        self.root.size
    }

    /// Returns this rank's row-major position in the root, or `None` when the rank is not in the
    /// root.
    pub fn root_position(&self) -> Option<usize> {
        self.root.position
    }

    /// Returns the map from positions to ranks, as a key. It is cheap to clone, and equal keys give
    /// the same ranks.
    pub(crate) fn rank_map_key(&self) -> &RankMap {
        &self.root.ranks
    }

    /// Returns the world rank at a position of the root.
    pub fn rank_at(&self, position: usize) -> i32 {
        self.root.ranks.rank(position)
    }
}

fn dim_names(names: Option<&[&str]>, ndim: usize) -> Result<Vec<Arc<str>>> {
    let Some(names) = names else {
        return Ok((0..ndim).map(|index| format!("dim_{index}").into()).collect());
    };
    if names.len() != ndim {
        let dims = if ndim == 1 { "1 dimension" } else { &format!("{ndim} dimensions") };
        let count = if names.len() == 1 { "is 1 name" } else { &format!("are {} names", names.len()) };
        return Err(Error::invalid(format!("the shape has {dims}, but there {count}")));
    }
    check_names(names.iter().copied())?;
    Ok(names.iter().map(|name| (*name).into()).collect())
}

/// Refuses empty and repeated names.
pub(super) fn check_names<'a>(names: impl Iterator<Item = &'a str> + Clone) -> Result<()> {
    if let Some(index) = names.clone().position(str::is_empty) {
        return Err(Error::invalid(format!("the name of dimension {index} is empty")));
    }
    let mut sorted: Vec<&str> = names.clone().collect();
    sorted.sort_unstable();
    if let Some(two) = sorted.windows(2).find(|two| two[0] == two[1]) {
        let all: Vec<&str> = names.collect();
        return Err(Error::invalid(format!("dimension name {} is repeated in ({})", two[0], all.join(", "))));
    }
    Ok(())
}

/// The ranks that were met so far.
enum Seen {
    /// A flag for each rank of the world, when the world is not much larger than the list.
    Flags(Vec<bool>),
    /// The ranks themselves, when the world is much larger.
    Set(HashSet<usize>),
}

impl Seen {
    fn new(listed: usize, world_size: usize) -> Seen {
        match world_size / 16 <= listed {
            true => Seen::Flags(vec![false; world_size]),
            false => Seen::Set(HashSet::with_capacity(listed)),
        }
    }

    /// Adds a rank. Returns whether the rank was not met before.
    fn insert(&mut self, rank: usize) -> bool {
        match self {
            Seen::Flags(flags) => !std::mem::replace(&mut flags[rank], true),
            Seen::Set(set) => set.insert(rank),
        }
    }
}

/// The most ranks that a mesh keeps as a list. The list takes 4 bytes for each rank, on every rank.
pub const MAX_LISTED: usize = 1 << 24;

/// Refuses more ranks than are kept as a list.
pub(super) fn check_listed(size: usize) -> Result<()> {
    if size <= MAX_LISTED {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "the mesh has {size} ranks that do not lie in row-major order; such ranks are kept as a list, which has at most {MAX_LISTED}"
    )))
}

/// Returns the map of explicit ranks. It is [`RankMap::Identity`] when the ranks are 0 .. n-1.
fn rank_map(ranks: &[i32], size: usize, world_size: usize) -> Result<RankMap> {
    if ranks.len() != size {
        return Err(Error::invalid(format!("the shape has {size} ranks, but {} are listed", ranks.len())));
    }
    check_listed(size)?;
    let mut seen = Seen::new(size, world_size);
    for (index, &rank) in ranks.iter().enumerate() {
        let Some(known) = usize::try_from(rank).ok().filter(|rank| *rank < world_size) else {
            return Err(Error::invalid(format!(
                "rank {rank} at index {index} is out of range: the world has ranks 0 to {}",
                world_size - 1
            )));
        };
        if !seen.insert(known) {
            let first = ranks.iter().position(|known| *known == rank).unwrap_or(index);
            return Err(Error::invalid(format!("rank {rank} is listed twice, at index {first} and index {index}")));
        }
    }
    let identity = ranks.iter().enumerate().all(|(index, rank)| *rank as usize == index);
    Ok(match identity {
        true => RankMap::Identity,
        false => RankMap::Listed(Arc::new(Listed::new(ArrayView1::from(ranks).to_owned()))),
    })
}

pub(super) fn list(sizes: &[usize]) -> String {
    sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}
