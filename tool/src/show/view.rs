//! The view of a mesh that is shown, with the groups of its dimensions. The table, the picture and
//! the page take it from here.

use devicemesh::error::{Error, Status};
use devicemesh::layout::{Dim, Pair};
use devicemesh::mesh::{Mesh, MeshSpec};
use devicemesh::topology::{Plan, plan};

use super::arguments::{HostSizes, Operation};
use super::hosts::{Hosts, MAX_RANKS};
use super::options::Options;
use crate::failure::Failure;
use crate::words::count;

/// The most ranks that are listed and drawn. A larger view has a summary.
pub const MAX_DRAWN: usize = 256;

/// The ranks of a mesh or of a view.
pub struct Ranks {
    /// The names of the dimensions.
    pub names: Vec<String>,
    /// The sizes of the dimensions.
    pub sizes: Vec<usize>,
    /// The world ranks in row-major order.
    pub ranks: Vec<i32>,
}

/// A dimension of the view, or a flattened one that the view holds.
pub struct Axis {
    pub name: String,
    pub size: usize,
    /// Its layout over the positions of the root, as pairs of size and stride.
    pub pairs: Vec<Pair>,
    /// The way along the dimension, over the row-major indices of the view.
    walk: Dim,
    /// The way from group to group, over the row-major indices of the view.
    rest: Dim,
}

/// A view of a mesh, as it is shown.
pub struct View {
    /// The mesh in the words of `dm_describe`.
    pub describe: String,
    pub device_type: String,
    /// The hash of the mesh.
    pub hash: u64,
    /// The ranks of the view.
    pub grid: Ranks,
    /// The ranks of the root, where the view has fewer.
    pub root: Option<Ranks>,
    /// The dimensions of the view, then the flattened ones that it holds.
    pub axes: Vec<Axis>,
    /// The names that share a communicator, as lists of at least two names. They are the dimensions
    /// of the view, of the root, and of all views on the way. After a range they are those of the
    /// range.
    pub shared: Vec<Vec<String>>,
    /// The number of parallel views like this one in the root mesh.
    parallel: usize,
    /// The rank whose view it is.
    pub rank: i32,
    /// The row-major index of the chosen rank, where it is in the view.
    pub chosen: Option<usize>,
    /// Whether a range has left out the chosen rank.
    rank_is_outside: bool,
    /// The hosts, where the command line has them.
    pub hosts: Option<Hosts>,
    /// The placement of the ranks, where the command line asks for it.
    pub plan: Option<Plan>,
}

impl View {
    /// Makes the mesh and carries out the operations of the command line.
    pub fn new(options: &Options) -> Result<View, Failure> {
        let shape = &options.sizes.0;
        let size = shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        let size = match size.filter(|size| *size <= MAX_RANKS) {
            Some(size) => size,
            None => {
                let size = size.map_or("more than 2^64".to_owned(), |size| size.to_string());
                return Err(wrong(format!("the mesh has {size} ranks; show goes up to {MAX_RANKS}")));
            }
        };
        let hosts = options.hosts.map(|sizes| Hosts { sizes, cyclic: options.cyclic });
        let world_size = match &hosts {
            Some(hosts) => hosts.room_for(size)?,
            None => options
                .ranks
                .iter()
                .flat_map(|ranks| &ranks.0)
                .fold(size, |most, rank| most.max((*rank).max(0) as usize + 1))
                .min(i32::MAX as usize),
        };
        let plan = match &hosts {
            Some(hosts) if options.plan => {
                let places: Vec<String> = (0..world_size).map(|rank| hosts.of(rank as i32).to_string()).collect();
                let places: Vec<&str> = places.iter().map(String::as_str).collect();
                Some(plan(&places, shape, options.traffic.as_ref().map(|weights| &*weights.0)).map_err(refused)?)
            }
            _ => None,
        };
        let ranks = plan.as_ref().map(|plan| &plan.ranks).or(options.ranks.as_ref().map(|ranks| &ranks.0));
        let rank =
            options.rank.unwrap_or_else(|| ranks.and_then(|ranks| ranks.first().copied()).unwrap_or(0).max(0) as usize);
        let names: Option<Vec<&str>> = options.names.as_ref().map(|names| names.0.iter().map(String::as_str).collect());
        let mut spec = MeshSpec::new(&options.device_type, shape, world_size, rank);
        spec.names = names.as_deref();
        spec.ranks = ranks.map(Vec::as_slice);
        let root = Mesh::new(&spec).map_err(refused)?;
        if !root.is_member() {
            let there = list(root.root_ranks().iter(), 8, ", ");
            return Err(wrong(format!("rank {rank} is not in the mesh; its ranks are {there}")));
        }
        let mut known = Known::default();
        known.add(&root);
        let (mesh, flattened) = operate(root, &options.operations.0, &mut known)?;
        let mut view = View::of(&mesh, options.rank.is_some())?;
        view.shared = known.shared();
        view.add_flattened(&mesh, &flattened)?;
        view.rank_is_outside = options.rank.is_some() && !mesh.is_member();
        (view.hosts, view.plan) = (hosts, plan);
        Ok(view)
    }

    fn of(mesh: &Mesh, rank_is_chosen: bool) -> Result<View, Failure> {
        let (grid, root) = (Ranks::of(mesh), mesh.root());
        let chosen = grid.ranks.iter().position(|rank| *rank == mesh.rank());
        let axes = (0..mesh.ndim())
            .map(|index| Axis::new(mesh.dim_name(index), mesh.dim_layout(index).pairs(), &[index], &grid.sizes));
        Ok(View {
            describe: mesh.describe(),
            device_type: mesh.device_type().to_owned(),
            hash: mesh.hash(),
            axes: axes.collect::<Result<_, _>>()?,
            shared: Vec::new(),
            root: (mesh.size() < root.size()).then(|| Ranks::of(&root)),
            parallel: mesh.root_size() / mesh.size(),
            rank: mesh.rank(),
            chosen: chosen.filter(|_| rank_is_chosen),
            rank_is_outside: false,
            grid,
            hosts: None,
            plan: None,
        })
    }

    /// Adds the flattened dimensions whose parts are all dimensions of this view.
    fn add_flattened(&mut self, mesh: &Mesh, flattened: &[Flattened]) -> Result<(), Failure> {
        let names = mesh.dim_names();
        for Flattened { name, .. } in flattened.iter().filter(|flat| !names.contains(&flat.name.as_str())) {
            let (Some(dims), Ok(flat)) = (parts(name, &names, flattened), mesh.slice(&[name])) else { continue };
            self.axes.push(Axis::new(name, flat.dim_layout(0).pairs(), &dims, &self.grid.sizes)?);
        }
        Ok(())
    }

    /// The world ranks of one group, in the order of their coordinates.
    pub fn members<'a>(&'a self, axis: &'a Axis, group: usize) -> impl ExactSizeIterator<Item = i32> + 'a {
        let first = axis.rest.offset(group);
        (0..axis.size).map(move |index| self.grid.ranks[first + axis.walk.offset(index)])
    }

    /// The number of groups along a dimension.
    pub fn groups(&self, axis: &Axis) -> usize {
        self.grid.ranks.len() / axis.size
    }

    /// How many groups of the dimension have ranks on several hosts. `None` where the hosts are not
    /// known.
    pub fn crossing(&self, axis: &Axis) -> Option<usize> {
        let hosts = self.hosts.as_ref()?;
        let crosses = |group: &usize| {
            let mut places = self.members(axis, *group).map(|rank| hosts.of(rank));
            let first = places.next();
            places.any(|place| Some(place) != first)
        };
        Some((0..self.groups(axis)).filter(crosses).count())
    }

    /// The group of the chosen rank.
    pub fn chosen_group(&self, axis: &Axis) -> Option<usize> {
        self.chosen.map(|index| axis.group(index))
    }

    /// One line about the view, as "8 ranks on 2 hosts of 4; rank 3 is at (dp=0, cp=1, tp=1)".
    pub fn summary(&self) -> String {
        let mut ranks = count(self.grid.ranks.len(), "rank");
        if let Some(root) = &self.root {
            ranks = format!("{} of {}", self.grid.ranks.len(), count(root.ranks.len(), "rank"));
        }
        if let Some(hosts) = &self.hosts {
            let HostSizes { hosts: all, each } = hosts.sizes;
            let used = hosts.used_by(&self.grid.ranks);
            let dealt = if hosts.cyclic { ", dealt out in turn" } else { "" };
            let some = if used < all { format!("{used} of ") } else { String::new() };
            ranks += &format!(" on {some}{} of {each}{dealt}", count(all, "host"));
        }
        let mut parts = vec![ranks];
        if self.parallel > 1 {
            parts.push(format!("the view of rank {}, one of {} parallel ones", self.rank, self.parallel));
        }
        match self.chosen {
            Some(index) => parts.push(format!("rank {} is at {}", self.rank, self.grid.coordinate(index))),
            None if self.rank_is_outside => parts.push(format!("rank {} is not among them", self.rank)),
            None => {}
        }
        parts.join("; ")
    }

    /// One line for each communicator that several names share.
    pub fn shared_text(&self) -> Vec<String> {
        let line = |names: &Vec<String>| match names.split_last() {
            Some((last, others)) => format!("{} and {last} share one communicator", others.join(", ")),
            None => String::new(),
        };
        self.shared.iter().map(line).collect()
    }

    /// One line about what the plan saves.
    pub fn plan_text(&self) -> Option<String> {
        let plan = self.plan.as_ref()?;
        let (cost, usual) = (plan.cost(), plan.identity_cost);
        Some(format!("planned for these hosts: cost {cost}; the usual order of ranks costs {usual}"))
    }
}

impl Ranks {
    fn of(mesh: &Mesh) -> Ranks {
        let names = mesh.dim_names().into_iter().map(str::to_owned).collect();
        Ranks { names, sizes: mesh.shape(), ranks: mesh.ranks() }
    }

    /// The coordinates of a row-major index.
    pub fn place(&self, index: usize) -> Vec<usize> {
        let mut rest = self.ranks.len();
        let along = |size: &usize| {
            rest /= size;
            index / rest % size
        };
        self.sizes.iter().map(along).collect()
    }

    /// The coordinates of a row-major index, as "(dp=0, cp=1)".
    pub fn coordinate(&self, index: usize) -> String {
        let part = |(name, at): (&String, usize)| format!("{name}={at}");
        let parts: Vec<String> = self.names.iter().zip(self.place(index)).map(part).collect();
        format!("({})", parts.join(", "))
    }
}

impl Axis {
    /// The dimension that consists of the dimensions `dims` of a view with these sizes.
    fn new(name: &str, pairs: &[Pair], dims: &[usize], sizes: &[usize]) -> Result<Axis, Failure> {
        let step = |dim: usize| (sizes[dim], sizes[dim + 1..].iter().product());
        let walk: Vec<Pair> = dims.iter().map(|dim| step(*dim)).collect();
        let rest: Vec<Pair> = (0..sizes.len()).filter(|dim| !dims.contains(dim)).map(step).collect();
        let walk = Dim::new(&walk).map_err(refused)?;
        let rest = Dim::new(&rest).map_err(refused)?;
        Ok(Axis { name: name.to_owned(), size: walk.size(), pairs: pairs.to_vec(), walk, rest })
    }

    /// The group that holds a row-major index of the view.
    pub fn group(&self, index: usize) -> usize {
        self.rest.coordinate(index)
    }

    /// The stride in words: "4", "(4, 1)" where there are several, "-" for a dimension of size 1.
    pub fn stride(&self) -> String {
        match &self.pairs[..] {
            [] => "-".to_owned(),
            [(_, stride)] => stride.to_string(),
            pairs => format!("({})", pairs.iter().map(|(_, stride)| stride.to_string()).collect::<Vec<_>>().join(", ")),
        }
    }
}

/// A flattened dimension, with the names of its parts.
struct Flattened {
    name: String,
    dims: Vec<String>,
}

/// The dimensions of one root, with the layouts that decide about their communicators.
#[derive(Default)]
struct Known(Vec<(String, Vec<Pair>)>);

impl Known {
    /// Adds the dimensions of a view.
    fn add(&mut self, mesh: &Mesh) {
        for index in 0..mesh.ndim() {
            let dim = (mesh.dim_name(index).to_owned(), mesh.dim_layout(index).pairs().to_vec());
            if !self.0.contains(&dim) {
                self.0.push(dim);
            }
        }
    }

    /// The names that share a communicator: dimensions with equal layouts have the same ranks in
    /// the same order.
    fn shared(&self) -> Vec<Vec<String>> {
        let mut groups: Vec<(&[Pair], Vec<String>)> = Vec::new();
        for (name, pairs) in &self.0 {
            match groups.iter_mut().find(|(known, _)| known == pairs) {
                Some((_, names)) => names.push(name.clone()),
                None => groups.push((pairs, vec![name.clone()])),
            }
        }
        groups.into_iter().map(|(_, names)| names).filter(|names| names.len() > 1).collect()
    }
}

/// The view to which the operations lead, and the dimensions that were flattened on the way. Adds
/// the dimensions of all views to `known`.
fn operate(root: Mesh, operations: &[Operation], known: &mut Known) -> Result<(Mesh, Vec<Flattened>), Failure> {
    fn borrowed(names: &[String]) -> Vec<&str> {
        names.iter().map(String::as_str).collect()
    }
    let (mut mesh, mut flattened) = (root, Vec::new());
    for operation in operations {
        mesh = match operation {
            Operation::Slice(names) => mesh.slice(&borrowed(names)).map_err(refused)?,
            Operation::Unflatten { dim, sizes, names } => {
                mesh.unflatten(dim, sizes, &borrowed(names)).map_err(refused)?
            }
            Operation::Range { dim, start, len, step } => {
                mesh.slice_range(dim, *start, *len, *step).map_err(refused)?
            }
            Operation::Reshape { sizes, names } => {
                let other = mesh.reshape(sizes, &borrowed(names)).map_err(refused)?;
                other.keep_names();
                other
            }
            Operation::Flatten { dims, name } => {
                let part = mesh.slice(&borrowed(dims)).map_err(refused)?;
                let flat = part.flatten(name.as_deref()).map_err(refused)?;
                flat.publish().map_err(refused)?;
                known.add(&flat);
                flattened.push(Flattened { name: flat.dim_name(0).to_owned(), dims: dims.clone() });
                mesh
            }
        };
        if matches!(operation, Operation::Range { .. }) {
            // A range makes a root of its own, whose layouts count its own ranks.
            *known = Known::default();
        }
        known.add(&mesh);
    }
    Ok((mesh, flattened))
}

/// The indices of the dimensions for which a name stands: one, or those of the parts of a flattened
/// one.
fn parts(name: &str, names: &[&str], flattened: &[Flattened]) -> Option<Vec<usize>> {
    if let Some(index) = names.iter().position(|known| *known == name) {
        return Some(vec![index]);
    }
    let flat = flattened.iter().find(|flat| flat.name == name && !flat.dims.contains(&flat.name))?;
    let dims: Vec<Vec<usize>> = flat.dims.iter().map(|dim| parts(dim, names, flattened)).collect::<Option<_>>()?;
    Some(dims.concat())
}

/// All values where there are at most `most`, else the first ones and the last.
pub fn list<T: ToString>(mut values: impl ExactSizeIterator<Item = T>, most: usize, separator: &str) -> String {
    let count = values.len();
    if count <= most {
        return values.map(|value| value.to_string()).collect::<Vec<_>>().join(separator);
    }
    let mut text: Vec<String> =
        values.by_ref().take(most.saturating_sub(2).max(1)).map(|value| value.to_string()).collect();
    text.push(format!("... {}", values.last().map(|value| value.to_string()).unwrap_or_default()));
    text.join(separator)
}

/// The failure of a command line whose parts do not fit together.
pub fn wrong(message: String) -> Failure {
    Failure::new(2, message)
}

/// The failure of an operation that the library refuses.
fn refused(error: Error) -> Failure {
    let next = if error.status() == Status::NotMember { "; choose a rank of it with --rank" } else { "" };
    wrong(format!("{}{next}", error.message()))
}
