//! A mesh view with its communicators. A mesh handle names such a view.

use std::ffi::c_void;
use std::ops::Deref;
use std::sync::Arc;

use super::communicator::{Communicator, State};
use super::path::{Path, Step};
use super::root::{Issued, LifeFlag, RootComms};
use super::world::World;
use crate::ccl::{CallName, Library, RawComm};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::recorder::Group;

/// The communicators of a view's dimensions, which can be read in a few nanoseconds. Holding them
/// keeps no world alive.
pub(crate) struct DimComms {
    /// Whether the root mesh is alive.
    life: Arc<LifeFlag>,
    /// The communicator of each dimension, with what calls along the dimension need beside it.
    /// `None` where this rank is not in the view, or there are no communicators at all.
    comms: Vec<Option<Issued>>,
}

impl DimComms {
    /// The raw communicator along dimension `index`. `None` when it is not made yet or the root has
    /// ended; the view then says why.
    #[inline]
    pub(crate) fn ready(&self, index: usize) -> Option<RawComm> {
        let raw = self.comms.get(index)?.as_ref()?.communicator.raw();
        (!raw.is_null() && self.life.is_alive()).then_some(raw)
    }
}

/// One rank's immutable view of a mesh, and for each dimension the communicator of this rank's
/// group along it.
pub struct View {
    /// The layout and the ranks.
    mesh: Mesh,
    /// The root mesh over whose positions the view's dimensions stride: the root of the view, or a
    /// range of that root.
    space: Arc<RootComms>,
    /// The root mesh of the view.
    root: Arc<RootComms>,
    /// The communicators, apart from the rest so that a handle can have them in place.
    comms: Arc<DimComms>,
    /// The steps from the root mesh to this view. `None` for a range and its views, because another
    /// root mesh does not have the range. `None` also where the job cannot recover: the mesh has no
    /// world, or an offline one.
    path: Option<Path>,
}

/// The view that has a dimension: the view that was asked, or the view of one of its flattened
/// dimensions.
pub(crate) enum Along<'v> {
    /// The view itself.
    This(&'v View),
    /// The view of a flattened dimension.
    Flattened(Box<View>),
}

impl Deref for Along<'_> {
    type Target = View;

    #[inline]
    fn deref(&self) -> &View {
        match self {
            Along::This(view) => view,
            Along::Flattened(view) => view,
        }
    }
}

impl View {
    /// A view of `mesh`, which strides over the positions of `space`, with the communicators that
    /// exist or are planned by now.
    pub(super) fn new(mesh: Mesh, space: Arc<RootComms>, root: Arc<RootComms>) -> View {
        let comms = (0..mesh.ndim())
            .map(|index| match mesh.is_member() {
                true => space.issued(mesh.dim_name(index), mesh.dim_layout(index)),
                false => None,
            })
            .collect();
        let comms = Arc::new(DimComms { life: root.life_flag(), comms });
        View { mesh, space, root, comms, path: None }
    }

    /// Returns a view of another mesh over the positions of this view.
    pub(super) fn with(&self, mesh: Mesh) -> View {
        View::new(mesh, Arc::clone(&self.space), Arc::clone(&self.root))
    }

    /// Returns a view that was taken from this one by that step.
    pub(super) fn taken(&self, mesh: Mesh, step: impl FnOnce(&Mesh) -> Step) -> View {
        let path = self.path.as_ref().map(|path| path.iter().cloned().chain([step(&mesh)]).collect());
        View { path, ..self.with(mesh) }
    }

    /// How the view was taken from its root mesh; `None` as the field says.
    pub(super) fn path(&self) -> Option<&Path> {
        self.path.as_ref()
    }

    /// Whether both are views of one root mesh.
    pub(crate) fn is_of_same_root(&self, other: &View) -> bool {
        Arc::ptr_eq(&self.root, &other.root)
    }

    /// The view of the root mesh `next` that was taken as this one was from its own root. `None`
    /// where `next` has no such view. Local.
    pub(crate) fn followed_in(&self, next: &View) -> Option<View> {
        next.follow(self.path()?).ok()
    }

    /// Returns the view to which these steps lead from this one. Local.
    pub(super) fn follow(&self, path: &[Step]) -> Result<View> {
        let mut view = View { path: self.path.clone(), ..self.with(self.mesh.clone()) };
        for step in path {
            let mesh = match step {
                Step::Slice(names) => view.mesh.slice(&texts(names))?,
                Step::Flatten(name) => view.mesh.flatten(Some(name))?,
                Step::Unflatten { dim, sizes, names } => view.mesh.unflatten(dim, sizes, &texts(names))?,
                Step::Reshape { sizes, names } => view.mesh.reshape(sizes, &texts(names))?,
                Step::Submesh { names, index } => view.mesh.submesh(&texts(names), *index)?,
                Step::Concatenate(paths) => {
                    let views = paths.iter().map(|path| view.follow(path)).collect::<Result<Vec<_>>>()?;
                    Mesh::concatenate(&views.iter().map(|view| &view.mesh).collect::<Vec<_>>())?
                }
            };
            view = view.taken(mesh, |_| step.clone());
        }
        Ok(view)
    }

    /// The root mesh over whose positions the view's dimensions stride.
    pub(super) fn space(&self) -> &Arc<RootComms> {
        &self.space
    }

    /// The view's communicators alone.
    pub(crate) fn dim_comms(&self) -> &Arc<DimComms> {
        &self.comms
    }

    /// Runs `call`, which is a call of `function` that is collective over the root mesh. If this
    /// rank refuses the call, the other ranks are told.
    pub(crate) fn tell_if_refused<T>(&self, function: &str, call: impl FnOnce() -> Result<T>) -> Result<T> {
        self.space.tell_if_refused(function, call)
    }

    /// Does what [`tell_if_refused`](View::tell_if_refused) does, for a call that is collective
    /// over the whole root mesh also where this view is one of a range.
    pub(crate) fn tell_root_if_refused<T>(&self, function: &str, call: impl FnOnce() -> Result<T>) -> Result<T> {
        self.root.tell_if_refused(function, call)
    }

    /// The view of the whole root mesh.
    pub fn of_root(root: Arc<RootComms>) -> View {
        // A mesh whose job cannot recover needs no paths.
        let can_recover = root.world().is_some_and(|world| !world.rendezvous().is_offline());
        View { path: can_recover.then(Path::new), ..View::new(root.mesh().clone(), Arc::clone(&root), root) }
    }

    /// The layout and the ranks of the view.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The world of the mesh. Fails with `DM_STATUS_UNSUPPORTED` for a mesh over existing
    /// communicators that was made without a world.
    pub fn world(&self) -> Result<&Arc<World>> {
        self.root.world().ok_or_else(|| {
            Error::unsupported(format!(
                "{} was made over existing communicators without a world; pass dm_init_options.world",
                self.root.mesh().describe()
            ))
        })
    }

    /// The communicators of the root mesh, with those of its ranges.
    pub fn root_comms(&self) -> &Arc<RootComms> {
        &self.root
    }

    /// Returns the view of the named dimensions in that order. Local.
    pub fn slice(&self, names: &[&str]) -> Result<View> {
        self.root.alive()?;
        Ok(self.taken(self.mesh.slice(names)?, |_| Step::Slice(owned(names))))
    }

    /// The view in which the dimension of that name is, and its index there: this view, or the view
    /// of a flattened dimension of this one.
    pub(crate) fn along(&self, name: Option<&str>) -> Result<(Along<'_>, usize)> {
        match self.mesh.dim_index_or_only(name) {
            Ok(index) => Ok((Along::This(self), index)),
            Err(_) => {
                let along = self.mesh.along(name).inspect_err(|_| self.space.note_refused_first_use())?;
                Ok((Along::Flattened(Box::new(self.with(along.0))), along.1))
            }
        }
    }

    /// A view with the dimensions of several views of one root, in order. Local.
    pub fn concatenate(views: &[&View]) -> Result<View> {
        let Some(first) = views.first() else {
            return Err(Error::invalid("concatenate needs at least one mesh, got 0"));
        };
        for view in views {
            view.root.alive()?;
        }
        let meshes: Vec<&Mesh> = views.iter().map(|view| &view.mesh).collect();
        let mesh = Mesh::concatenate(&meshes)?;
        let paths = views.iter().map(|view| view.path.clone()).collect::<Option<Vec<Path>>>();
        Ok(match paths {
            Some(paths) => View { path: Some(vec![Step::Concatenate(paths)]), ..first.with(mesh) },
            None => first.with(mesh),
        })
    }

    /// The root mesh. Local.
    pub fn root(&self) -> Result<View> {
        self.root.alive()?;
        Ok(View::of_root(Arc::clone(&self.root)))
    }

    /// How many parallel copies of the named dimensions there are. Local.
    pub fn submesh_count(&self, names: &[&str]) -> Result<usize> {
        self.mesh.submesh_count(names)
    }

    /// One of the parallel copies of the named dimensions. Local.
    pub fn submesh(&self, names: &[&str], index: usize) -> Result<View> {
        self.root.alive()?;
        Ok(self.taken(self.mesh.submesh(names, index)?, |_| Step::Submesh { names: owned(names), index }))
    }

    /// The raw communicator of this rank's group along dimension `index`. Local. On a lazy mesh the
    /// first call for a dimension is collective over the group.
    pub fn comm(&self, index: usize) -> Result<RawComm> {
        match self.comms.ready(index) {
            Some(raw) => Ok(raw),
            None => self
                .communicator(index)
                .and_then(|communicator| communicator.ready())
                .map_err(|error| self.with_dim(error, index)),
        }
    }

    /// The error of a call along dimension `index`, with the dimension's name.
    pub(crate) fn with_dim(&self, error: Error, index: usize) -> Error {
        match index < self.mesh.ndim() {
            true => error.along(self.mesh.dim_name(index)),
            false => error,
        }
    }

    /// Returns the communicator along dimension `index`, and makes it now if it was only planned.
    /// Where there is none, the error says why.
    pub(crate) fn communicator(&self, index: usize) -> Result<&Arc<Communicator>> {
        let communicator = self.planned_communicator(index)?;
        if communicator.state() == State::Unmade {
            self.root.make_at_first_use(communicator, self.mesh.dim_name(index))?;
        }
        Ok(communicator)
    }

    /// The communicator along dimension `index`, which may be planned only. Where there is none,
    /// the error says why.
    pub(super) fn planned_communicator(&self, index: usize) -> Result<&Arc<Communicator>> {
        self.check_index(index)?;
        self.root.alive()?;
        if self.root.is_offline() {
            return Err(Error::unsupported(format!(
                "{} belongs to an offline world (DM_WORLD_OFFLINE), which has no communicators",
                self.mesh.describe()
            )));
        }
        if !self.mesh.is_member() {
            return Err(Error::not_member(format!(
                "rank {} is not in {}, so it has no communicator there",
                self.mesh.rank(),
                self.mesh.describe()
            )));
        }
        let Some(Some(issued)) = self.comms.comms.get(index) else {
            return Err(Error::internal(format!(
                "dimension {} of {} has no communicator planned",
                self.mesh.dim_name(index),
                self.mesh.describe()
            )));
        };
        Ok(&issued.communicator)
    }

    /// The communicator along dimension `index` that was planned and is not made yet.
    pub(super) fn planned(&self, index: usize) -> Option<&Arc<Communicator>> {
        let communicator = &self.comms.comms.get(index)?.as_ref()?.communicator;
        (communicator.state() == State::Unmade).then_some(communicator)
    }

    /// The name under which calls along dimension `index` are issued.
    pub(super) fn call_name(&self, index: usize) -> &CallName {
        self.comms.comms.get(index).and_then(Option::as_ref).map_or(&CallName::NONE, |issued| &issued.call)
    }

    /// The group along dimension `index` in the recording of this process.
    pub(super) fn recorded_group(&self, index: usize) -> Option<&Arc<Group>> {
        Some(&self.comms.comms.get(index)?.as_ref()?.group)
    }

    /// Fails for an index that no dimension has. The C ABI takes names, but Rust programs pass an
    /// index.
    pub(super) fn check_index(&self, index: usize) -> Result<()> {
        match index < self.mesh.ndim() {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "there is no dimension {index} in {}, which has {} dimensions",
                self.mesh.describe(),
                self.mesh.ndim()
            ))),
        }
    }

    /// The library of this mesh's communicators.
    pub fn library(&self) -> Result<&Arc<Library>> {
        self.root
            .library()
            .ok_or_else(|| Error::unsupported("an offline world (DM_WORLD_OFFLINE) has no communicator library"))
    }

    /// The address of a function of that library.
    pub fn symbol(&self, name: &str) -> Result<*const c_void> {
        self.library()?.required_symbol(name)
    }
}

/// Names as a path keeps them.
pub(super) fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// The names of a path as calls take them.
pub(super) fn texts(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}
