//! Gives the dimensions of a view their communicators: shared where the ranks are equal, else made
//! by the call.

use std::sync::Arc;

use super::call::{AgreedCall, Call, Peers, Work};
use super::communicator::{Communicator, FirstUse, State};
use super::maker::Maker;
use super::names::{name_key, named_config, parent_config};
use super::options::DimOptions;
use super::root::RootComms;
use super::world::World;
use crate::ccl::{NO_COLOR, RawComm};
use crate::error::Result;
use crate::mesh::Mesh;
use crate::rendezvous::Scope;

/// The dimensions of a view that a call gives communicators.
pub(super) struct WantedDims {
    pub(super) view: Mesh,
    /// The dimensions by their index in the view, with the caller's options.
    pub(super) dims: Vec<(usize, DimOptions)>,
}

impl WantedDims {
    /// All dimensions of a view, with these options.
    pub(super) fn all_of(view: &Mesh, options: impl Fn(usize) -> DimOptions) -> WantedDims {
        WantedDims { view: view.clone(), dims: (0..view.ndim()).map(|index| (index, options(index))).collect() }
    }

    /// Whether every dimension has a communicator, made or planned, already.
    pub(super) fn are_known(&self, root: &RootComms) -> bool {
        let known =
            |index: &usize| root.communicator(self.view.dim_name(*index), self.view.dim_layout(*index)).is_some();
        self.dims.iter().all(|(index, _)| known(index))
    }

    /// Whether `root` itself has a communicator, made or planned, for every dimension under its
    /// name.
    pub(super) fn are_own(&self, root: &RootComms) -> bool {
        let own = |index: &usize| root.own_dim(self.view.dim_name(*index), self.view.dim_layout(*index)).is_some();
        self.dims.iter().all(|(index, _)| own(index))
    }
}

/// Existing communicators that the wanted dimensions can take.
pub(super) struct SharedComms {
    /// The communicator of each wanted dimension, in the order of [`WantedDims`]; `None` where one
    /// has to be made.
    dims: Vec<Option<Arc<Communicator>>>,
    /// The communicator over all ranks of the root, to split from; `None` where one has to be made
    /// when it is needed.
    parent: Option<Arc<Communicator>>,
}

impl SharedComms {
    /// Shares nothing: everything is made anew.
    pub(super) fn none(wanted: &WantedDims) -> SharedComms {
        SharedComms { dims: vec![None; wanted.dims.len()], parent: None }
    }

    /// Returns what a root mesh that does not exist yet could share with the other meshes of the
    /// world.
    pub(super) fn candidates_of_new(world: &World, wanted: &WantedDims) -> Result<SharedComms> {
        let parent = world.comms().find_parent(&wanted.view, world.library()?);
        Ok(SharedComms { dims: SharedComms::candidates_of_dims(world, wanted, None), parent })
    }

    /// Returns what the dimensions of `holder`, which is `root` or a range of it, could share. The
    /// result may differ between ranks where a mesh over the same ranks has ended or failed on
    /// some of them. So the ranks agree on what they share.
    pub(super) fn candidates(root: &RootComms, holder: Option<&RootComms>, wanted: &WantedDims) -> SharedComms {
        match root.world().filter(|_| root.mesh().is_member()) {
            Some(world) => SharedComms {
                dims: SharedComms::candidates_of_dims(world, wanted, Some(holder.unwrap_or(root))),
                parent: root.working_parent(),
            },
            None => SharedComms::none(wanted),
        }
    }

    fn candidates_of_dims(
        world: &World,
        wanted: &WantedDims,
        holder: Option<&RootComms>,
    ) -> Vec<Option<Arc<Communicator>>> {
        let candidate = |(index, options): &(usize, DimOptions)| {
            let (name, dim) = (wanted.view.dim_name(*index), wanted.view.dim_layout(*index));
            // A dimension of size 1 needs no other rank.
            if dim.size() == 1 {
                return None;
            }
            // A dimension that exists under this name keeps its communicator.
            let own = holder.and_then(|holder| holder.own_dim(name, dim)).filter(|own| own.is_sound());
            own.or_else(|| world.comms().find(&wanted.view, dim).filter(|_| !options.is_exclusive()))
        };
        wanted.dims.iter().map(candidate).collect()
    }

    /// Agrees with the other ranks on the call `text`, and on which of these candidates all ranks
    /// have. A communicator that some rank knows to have failed or ended is left out on all ranks,
    /// and made anew.
    pub(super) fn agree<'a>(self, call: Call<'a>, scope: &Scope, text: &str) -> Result<(AgreedCall<'a>, SharedComms)> {
        let (agreed, shared) = call.agree_to_share(scope, text, &self.offers())?;
        Ok((agreed, self.restricted_to(&shared)))
    }

    /// Does what [`agree`](SharedComms::agree) does, for the ranks of a smaller mesh inside a call
    /// of the whole world.
    pub(super) fn agree_inside(self, peers: Peers<'_>, scope: &Scope, text: &str) -> Result<SharedComms> {
        let shared = peers.agree_to_share(scope, text, &self.offers())?;
        Ok(self.restricted_to(&shared))
    }

    /// Returns these candidates with `parent` as the communicator to split from.
    pub(super) fn split_from(self, parent: Arc<Communicator>) -> SharedComms {
        SharedComms { parent: Some(parent), ..self }
    }

    /// Whether the wanted dimension at that place takes an existing communicator.
    pub(super) fn has(&self, place: usize) -> bool {
        self.dims.get(place).is_some_and(Option::is_some)
    }

    /// The names by which the ranks agree: first the names of the dimensions' communicators, then
    /// the name of the parent.
    fn offers(&self) -> Vec<Option<String>> {
        let name = |known: &Arc<Communicator>| known.shareable_name().map(str::to_owned);
        self.dims.iter().chain([&self.parent]).map(|known| known.as_ref().and_then(name)).collect()
    }

    fn restricted_to(self, shared: &[bool]) -> SharedComms {
        let is_shared = |place: usize| shared.get(place).copied().unwrap_or(false);
        let parent = self.parent.filter(|_| is_shared(self.dims.len()));
        let dims = self.dims.into_iter().enumerate().map(|(place, known)| known.filter(|_| is_shared(place)));
        SharedComms { dims: dims.collect(), parent }
    }
}

/// Makes the communicators of dimensions inside a call. The communicators are made in the order of
/// the wanted dimensions. Communicator libraries need one order on all ranks, and the ranks have
/// agreed on a text with this order.
struct DimMaker<'w, 'a> {
    work: &'w mut Work<'a>,
    world: &'w World,
    /// The root whose ranks make the call. The communicators are split from its parent.
    root: &'w Arc<RootComms>,
    /// The root that gets the dimensions: `root`, or a range of it.
    holder: &'w Arc<RootComms>,
    maker: Maker<'w>,
    /// The communicator to split from, once there is one.
    parent: Option<Arc<Communicator>>,
}

/// Gives the wanted dimensions of `holder`, which is `root` or a range of it, their communicators.
pub(super) fn make_dims(
    work: &mut Work<'_>,
    root: &Arc<RootComms>,
    holder: &Arc<RootComms>,
    wanted: &WantedDims,
    shared: &SharedComms,
) -> Result<()> {
    let (Some(world), Some(library)) = (root.world(), root.library()) else {
        return Ok(());
    };
    world.select_device()?;
    let maker = Maker::new(library, work.peers, root.timeout());
    let mut dims = DimMaker { work, world, root, holder, maker, parent: shared.parent.clone() };
    for (place, (index, options)) in wanted.dims.iter().enumerate() {
        dims.make(&wanted.view, *index, options, shared.dims[place].as_ref())?;
    }
    Ok(())
}

impl DimMaker<'_, '_> {
    /// Gives one dimension the `shared` communicator, or one of its own.
    fn make(
        &mut self,
        view: &Mesh,
        index: usize,
        options: &DimOptions,
        shared: Option<&Arc<Communicator>>,
    ) -> Result<()> {
        let (name, dim) = (view.dim_name(index), view.dim_layout(index));
        let own = self.holder.own_dim(name, dim);
        let keeps_own = match (&own, shared) {
            (Some(own), Some(known)) => Arc::ptr_eq(own, known),
            (Some(own), None) => dim.size() == 1 && own.is_sound(),
            (None, _) => false,
        };
        if keeps_own {
            return Ok(());
        }
        let communicator = match shared {
            Some(known) => {
                log::info!(
                    "rank {}: dimension {name} of {} shares the communicator of {}",
                    view.rank(),
                    view.describe(),
                    known.label()
                );
                Arc::clone(known)
            }
            None => self.unmade_or_shared(view, index, options)?,
        };
        // The dimension is noted before its communicator is made, so that an abort meanwhile finds
        // the communicator.
        self.work.log.add_dim(self.holder, name, dim, &communicator, options);
        let is_wanted_now = !self.root.is_lazy() && dim.size() > 1;
        if is_wanted_now && communicator.state() == State::Unmade {
            let _expected = self.holder.expect(&communicator);
            let raw = self.make_raw(&communicator, view, index, options)?;
            self.work.log.made(&communicator, raw.unwrap_or(RawComm::NULL), self.root.timeout());
        }
        Ok(())
    }

    /// Returns a new communicator for this dimension, which is not made yet. A dimension of size 1
    /// gets the communicator that all dimensions of size 1 share.
    fn unmade_or_shared(&self, view: &Mesh, index: usize, options: &DimOptions) -> Result<Arc<Communicator>> {
        let library = self.maker.library;
        let (name, dim) = (view.dim_name(index), view.dim_layout(index));
        // A rank outside a range has no group along the dimension.
        let group = if view.is_member() { view.slice(&[name])? } else { view.clone() };
        let is_exclusive = options.is_exclusive();
        if dim.size() == 1 && !is_exclusive {
            let alone = || Communicator::unmade(Arc::clone(library), group, FirstUse::alone());
            // All dimensions of size 1 share one communicator, which holds this rank alone. So a
            // rank outside the range does not set it.
            return Ok(if view.is_member() { self.world.comms().single(alone) } else { Arc::new(alone()) });
        }
        let color = view.is_member().then(|| view.split_color_key(index)).transpose()?.map_or(NO_COLOR, |own| own.0);
        // The name of the scope contains the name of the call that planned the dimension. So a
        // later dimension with an equal name meets in a scope of its own.
        let scope_id = |call: String| format!("{}{call}/{color}", self.holder.id());
        let lazily = self.work.peers.name_of(&name_key(name)).filter(|_| self.root.is_lazy()).map(scope_id);
        let first_use =
            FirstUse { scope_id: lazily, config: options.config.clone(), comm_name: Some(comm_name(name, options)) };
        let planned = Arc::new(Communicator::unmade(Arc::clone(library), group, first_use));
        if let Some(name) = self.work.peers.name_of(&index.to_string()) {
            planned.set_agreed_name(name);
        }
        if !is_exclusive {
            self.world.comms().share(view, dim, &planned);
        }
        Ok(planned)
    }

    /// Makes the raw communicator of a dimension. `None` on a rank that has no part in it, because
    /// it is outside the view's range.
    fn make_raw(
        &mut self,
        communicator: &Communicator,
        view: &Mesh,
        index: usize,
        options: &DimOptions,
    ) -> Result<Option<RawComm>> {
        let library = self.maker.library;
        let (name, group) = (view.dim_name(index), communicator.group());
        let place = view.is_member().then(|| view.split_color_key(index)).transpose()?;
        let config = named_config(library, options.config.as_ref(), &comm_name(name, options));
        // Communicators are made by a fresh id, and not by a split, in three cases. The first case
        // is a communicator over all ranks of the root on the host engine: it needs no parent. With
        // streams it is split from a parent that stays until the mesh ends, because the end of a
        // communicator of NCCL takes up to half a second. The second case is a communicator that
        // another mesh planned lazily: some of its groups may have made theirs already, so not all
        // ranks would take part in a split. The third case is a library that cannot split.
        let is_whole = view.dim_size(index) == self.root.mesh().root_size();
        let from_parent = !is_whole || library.has_streams();
        if !from_parent || communicator.first_use().is_lazy() || !library.can_split() {
            let meet = |(color, _)| self.maker.meet_for_use(&format!("comm/{}/{color}", name_key(name)), group, config);
            return place.map(meet).transpose();
        }
        let parent = self.parent()?;
        self.maker.split(&parent, group, place, config.blocking_by_default())
    }

    /// Returns the communicator over all ranks of the root in row-major order, to split from. Other
    /// roots of the same ranks share this communicator. A dimension over all ranks shares it, too,
    /// if the dimension's communicator can be split.
    fn parent(&mut self) -> Result<Arc<Communicator>> {
        let parent = match &self.parent {
            Some(known) => Arc::clone(known),
            None => {
                let all = self.root.mesh().all_ranks();
                let config = parent_config(self.maker.library, Some(&parent_name(self.root.mesh())));
                let raw = self.maker.meet("comm/root", &all, config)?;
                new_parent(&self.maker, all, raw)?
            }
        };
        self.work.log.set_parent(self.root, &parent);
        self.parent = Some(Arc::clone(&parent));
        Ok(parent)
    }
}

/// Returns the parent over `all` ranks of a root, whose raw communicator is `raw`.
pub(super) fn new_parent(maker: &Maker<'_>, all: Mesh, raw: RawComm) -> Result<Arc<Communicator>> {
    let made = Arc::new(Communicator::unmade(Arc::clone(maker.library), all, FirstUse::default()));
    if let Some(name) = maker.peers.name_of("root") {
        made.set_agreed_name(name);
    }
    made.set_ready(raw)?;
    Ok(made)
}

/// Returns the name that the communicator over all ranks of a root has in the library's logs.
pub(super) fn parent_name(root: &Mesh) -> String {
    format!("mesh_{}", root.dim_names().join("_"))
}

fn comm_name(dim: &str, options: &DimOptions) -> String {
    options.name.clone().unwrap_or_else(|| format!("mesh_{dim}"))
}
