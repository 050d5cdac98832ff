//! A mesh view with its communicators: what a mesh handle names.

use std::ffi::c_void;
use std::sync::Arc;

use super::communicator::{Communicator, State};
use super::dims::{Plan, Shared, config, unplanned};
use super::domain::Turn;
use super::groups::outside_groups;
use super::making::{Maker, millis, outcome, report};
use super::options::DimOptions;
use super::root::{LifeFlag, RootComms};
use crate::ccl::{CallName, Library, RawComm};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::rendezvous::Round;
use crate::wait::Wait;

/// The communicators of a view's dimensions, for reading in a few nanoseconds; keeps no world alive.
pub(crate) struct DimComms {
    life: Arc<LifeFlag>,
    /// By dimension; `None` where this rank is not in the view or there are no communicators at all.
    comms: Vec<Option<(Arc<Communicator>, CallName)>>,
}

impl DimComms {
    /// The raw communicator along dimension `index` when it is made and the root has not ended; else the view says why not.
    #[inline]
    pub(crate) fn ready(&self, index: usize) -> Option<RawComm> {
        let (communicator, _) = self.comms.get(index)?.as_ref()?;
        let raw = communicator.raw();
        (!raw.is_null() && self.life.is_alive()).then_some(raw)
    }
}

/// One rank's immutable view of a mesh, and for each dimension the communicator of this rank's group along it.
pub struct View {
    mesh: Mesh,
    /// Whose positions the dimensions are of: the root mesh, or a range of its ranks.
    pub(super) space: Arc<RootComms>,
    root: Arc<RootComms>,
    comms: Arc<DimComms>,
}

impl View {
    /// `mesh`, whose positions are those of `space`, with the communicators that exist or are planned by now.
    fn new(mesh: Mesh, space: Arc<RootComms>, root: Arc<RootComms>) -> View {
        let comms = (0..mesh.ndim())
            .map(|index| match mesh.is_member() {
                true => space.issued(mesh.dim_name(index), mesh.dim_layout(index)),
                false => None,
            })
            .collect();
        let comms = Arc::new(DimComms { life: root.life_flag(), comms });
        View { mesh, space, root, comms }
    }

    /// Another view of the same positions.
    pub(super) fn with(&self, mesh: Mesh) -> View {
        View::new(mesh, Arc::clone(&self.space), Arc::clone(&self.root))
    }

    /// Its communicators alone.
    pub(crate) fn dim_comms(&self) -> &Arc<DimComms> {
        &self.comms
    }

    /// The view of the whole root mesh.
    pub fn of_root(root: Arc<RootComms>) -> View {
        View::new(root.mesh().clone(), Arc::clone(&root), root)
    }

    /// The layout side of the view.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The communicators of the root mesh, with those of its ranges.
    pub fn root_comms(&self) -> &Arc<RootComms> {
        &self.root
    }

    /// The named dimensions in that order. Local.
    pub fn slice(&self, names: &[&str]) -> Result<View> {
        self.root.alive()?;
        Ok(self.with(self.mesh.slice(names)?))
    }

    /// One dimension out of all of this view's, with a communicator. **Collective over the root mesh**, but local when this
    /// dimension exists under this name already.
    pub fn flatten(&self, name: Option<&str>, options: DimOptions) -> Result<View> {
        self.root.alive()?;
        let flat = self.mesh.flatten(name)?;
        // A dimension under its own name is itself: there is nothing to make, nor a name to make known.
        if self.mesh.ndim() == 1 && flat.dim_name(0) == self.mesh.dim_name(0) {
            return Ok(self.with(flat));
        }
        let plan =
            Plan { view: flat.clone(), dims: vec![(0, options.clone())], part: None, apart: None, shrinking: None };
        let exists = flat.is_known() && plan.is_known(&self.space);
        if !(exists || self.root.is_offline()) {
            let call = format!(
                "dm_flatten(dims=({}), name={}{})",
                self.mesh.dim_names().join(", "),
                flat.dim_name(0),
                options.agreed_suffix()
            );
            self.carry_out(&call, &plan)?;
        }
        flat.publish()?;
        Ok(self.with(flat))
    }

    /// Dimension `dim` replaced by several, each with a communicator. **Collective over the root mesh**.
    pub fn unflatten(&self, dim: &str, sizes: &[usize], names: &[&str], options: &[DimOptions]) -> Result<View> {
        self.root.alive()?;
        let at = self.mesh.dim_index(dim)?;
        let split = self.mesh.unflatten(dim, sizes, names)?;
        let call = || format!("dm_unflatten(dims=({}), dim={dim}", self.mesh.dim_names().join(", "));
        self.replace(call, split, at, sizes, names, options)
    }

    /// All ranks of this view, row-major, under another shape, each dimension with a communicator. **Collective over the root mesh**.
    pub fn reshape(&self, sizes: &[usize], names: &[&str], options: &[DimOptions]) -> Result<View> {
        self.root.alive()?;
        let other = self.mesh.reshape(sizes, names)?;
        let call = || format!("dm_reshape(dims=({})", self.mesh.dim_names().join(", "));
        self.replace(call, other, 0, sizes, names, options)
    }

    /// `mesh` with communicators for the new dimensions from index `at`.
    fn replace(
        &self,
        call: impl FnOnce() -> String,
        mesh: Mesh,
        at: usize,
        sizes: &[usize],
        names: &[&str],
        options: &[DimOptions],
    ) -> Result<View> {
        if !self.root.is_offline() {
            let dims: Vec<(usize, DimOptions)> =
                (0..sizes.len()).map(|index| (at + index, options.get(index).cloned().unwrap_or_default())).collect();
            let suffix: String = dims.iter().map(|(_, options)| options.agreed_suffix()).collect();
            let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
            let call = format!("{}, sizes=({}), names=({}){suffix})", call(), sizes.join(", "), names.join(", "));
            self.carry_out(&call, &Plan { view: mesh.clone(), dims, part: None, apart: None, shrinking: None })?;
        }
        Ok(self.with(mesh))
    }

    /// The view with a dimension restricted to its indices `start`, `start + step` ... (`len` of them), and a communicator for what is left of it.
    /// **Collective over the root mesh**, also for the ranks at the other indices.
    pub fn slice_range(&self, dim: Option<&str>, start: usize, len: usize, step: usize) -> Result<View> {
        self.root.alive()?;
        let (along, index) = self.mesh.along(dim)?;
        let name = along.dim_name(index);
        let cut = along.slice_range(name, start, len, step)?;
        if self.root.is_offline() {
            return Ok(self.with(cut));
        }
        let call = format!(
            "dm_slice_range(dims=({}), dim={name}, start={start}, len={len}, step={step})",
            along.dim_names().join(", ")
        );
        // All of the indices: there is nothing to make, but all ranks agree on that.
        let whole = cut.same_root(&along);
        let dims = if whole { Vec::new() } else { vec![(index, DimOptions::default())] };
        let mut plan = Plan { view: cut.clone(), dims, part: None, apart: None, shrinking: None };
        let known = self.space.part_like(&cut, index).filter(|_| !whole);
        plan.part = known.clone();
        let (_turn, round, shared, wait) = self.begin(&call, &plan)?;
        if whole {
            return self.space.carry_out(&plan, shared, round, &wait).map(|()| self.with(cut));
        }
        let known = known.filter(|_| shared.has(0));
        let part = match &known {
            Some(known) => Arc::clone(known),
            None => self.space.add_part(&cut, round.number())?,
        };
        plan.part = Some(Arc::clone(&part));
        let made = self.space.carry_out(&plan, shared, round, &wait);
        drop(plan);
        self.space.drop_failed_parts();
        match made {
            Ok(()) => Ok(View::new(cut, part, Arc::clone(&self.root))),
            Err(error) => {
                if known.is_none() {
                    self.space.drop_part(&part);
                }
                Err(error)
            }
        }
    }

    /// Where the dimension of that name is: in this view, or the view of a flattened one that it holds.
    pub(crate) fn along(self: &Arc<Self>, name: Option<&str>) -> Result<(Arc<View>, usize)> {
        match self.mesh.dim_index_or_only(name) {
            Ok(index) => Ok((Arc::clone(self), index)),
            Err(_) => self.mesh.along(name).map(|(mesh, index)| (Arc::new(self.with(mesh)), index)),
        }
    }

    /// Views of one root side by side. Local.
    pub fn concatenate(views: &[&View]) -> Result<View> {
        let Some(first) = views.first() else {
            return Err(Error::invalid("concatenate needs at least one mesh, got 0"));
        };
        for view in views {
            view.root.alive()?;
        }
        let meshes: Vec<&Mesh> = views.iter().map(|view| &view.mesh).collect();
        Ok(first.with(Mesh::concatenate(&meshes)?))
    }

    /// The root mesh. Local.
    pub fn root(&self) -> Result<View> {
        self.root.alive()?;
        Ok(View::of_root(Arc::clone(&self.root)))
    }

    /// How many parallel copies of the named dimensions there are. Local.
    pub fn submesh_count(&self, names: &[&str]) -> Result<usize> {
        self.root.alive()?;
        self.mesh.submesh_count(names)
    }

    /// One of the parallel copies of the named dimensions. Local.
    pub fn submesh(&self, names: &[&str], index: usize) -> Result<View> {
        self.root.alive()?;
        Ok(self.with(self.mesh.submesh(names, index)?))
    }

    /// The raw communicator of this rank's group along dimension `index`. Local, but collective over the group at the first call
    /// for a lazily planned one.
    pub fn comm(&self, index: usize) -> Result<RawComm> {
        match self.comms.ready(index) {
            Some(raw) => Ok(raw),
            None => self.communicator(index)?.ready(),
        }
    }

    /// The communicator along dimension `index`, made now if it was only planned; an error that says why when there is none.
    pub(crate) fn communicator(&self, index: usize) -> Result<&Arc<Communicator>> {
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
        let Some(Some((communicator, _))) = self.comms.comms.get(index) else {
            return Err(unplanned(&self.mesh, index));
        };
        if communicator.state() == State::Unmade {
            self.make_lazily(communicator, self.mesh.dim_name(index))?;
        }
        Ok(communicator)
    }

    /// Under what name calls along dimension `index` are issued.
    pub(super) fn call_name(&self, index: usize) -> &CallName {
        self.comms.comms.get(index).and_then(Option::as_ref).map_or(&CallName::NONE, |(_, call)| call)
    }

    /// Fails for an index that no dimension has: the C ABI takes names, but Rust programs count.
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
            .library
            .as_ref()
            .ok_or_else(|| Error::unsupported("an offline world (DM_WORLD_OFFLINE) has no communicator library"))
    }

    /// The address of a function of that library.
    pub fn symbol(&self, name: &str) -> Result<*const c_void> {
        let library = self.library()?;
        library.symbol(name).ok_or_else(|| Error::not_found(format!("{} has no symbol {name}", library.label())))
    }

    fn carry_out(&self, call: &str, plan: &Plan) -> Result<()> {
        let (_turn, round, shared, wait) = self.begin(call, plan)?;
        self.space.carry_out(plan, shared, round, &wait)
    }

    /// Begins a collective call of this view's ranks and those beside it.
    fn begin(&self, call: &str, plan: &Plan) -> Result<(Turn<'_>, Round, Shared, Wait)> {
        if !self.mesh.is_member() {
            return Err(Error::not_member(format!(
                "{call}: rank {} is not in {}",
                self.mesh.rank(),
                self.mesh.describe()
            )));
        }
        self.space.begin_plan(call, plan)
    }

    /// Makes a communicator that was only planned: alone, or with the other ranks of its group.
    fn make_lazily(&self, communicator: &Arc<Communicator>, dim: &str) -> Result<()> {
        outside_groups(communicator.library(), || self.make_now(communicator, dim))
    }

    fn make_now(&self, communicator: &Arc<Communicator>, dim: &str) -> Result<()> {
        let domain = self.root.domain.as_ref().ok_or_else(|| unplanned(&self.mesh, 0))?;
        domain.select_device()?;
        let (library, plan, group) = (communicator.library(), communicator.plan(), communicator.group());
        let name = plan.comm_name.as_deref().unwrap_or(dim);
        let wait = self.root.wait(None);
        let maker = |round| Maker { library, round, wait: &wait, timeout: self.root.timeout };
        let config = config(library, plan.config.as_ref(), name);
        let (_alone, _turn);
        let raw = match &plan.scope {
            _ if group.size() == 1 => {
                _alone = domain.single_turn();
                if communicator.state() != State::Unmade {
                    return Ok(());
                }
                // There is nobody to wait for.
                maker(None).meet("comm/single", group, config.blocking(true))?
            }
            None => return Err(Error::internal(format!("the communicator of {dim} was planned eagerly but not made"))),
            Some(scope) => {
                _turn = domain.take_turn(&wait)?;
                if communicator.state() != State::Unmade {
                    return Ok(());
                }
                self.root.alive()?;
                let position = group.local_rank(0)?;
                let scope = communicator.scope(|| domain.world().subscope(scope, group.ranks().into(), position))?;
                let round = wait.outcome(scope.agree(&format!("dm_get_comm(dim={dim})"), &wait))?;
                let made = maker(Some(&round)).meet_for_use("comm/lazy", group, config);
                if let Err(error) = &made {
                    report(&round, error, &wait);
                }
                let fresh = made.as_ref().ok().copied();
                wait.outcome(outcome(made, round.finish(&wait))).inspect_err(|_| {
                    fresh.map(|raw| library.abort(raw));
                })?
            }
        };
        communicator.set_ready(raw)?;
        domain.keep(communicator);
        if let Err(error) = self.root.alive().and_then(|()| communicator.limit(millis(self.root.timeout))) {
            let _ = communicator.abort();
            domain.forget(communicator);
            return Err(error);
        }
        Ok(())
    }
}
