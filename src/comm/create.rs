//! Root meshes: one with communicators of its own, and one over communicators that exist.

use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use super::background::Worker;
use super::call::Call;
use super::communicator::Communicator;
use super::dims::{SharedComms, WantedDims, make_dims};
use super::handle::PATIENCE;
use super::names::{names_text, ranks_text};
use super::options::{DimOptions, MeshOptions};
use super::polling::poll_until_done;
use super::root::{RootComms, RootSpec, mesh_id};
use super::world::{EndsWithWorld, World};
use crate::ccl::{Library, RawComm};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::rendezvous;
use crate::wait::{Deadline, Wait};

impl RootComms {
    /// A mesh with its communicators. **Collective over the world** (also for ranks outside the
    /// mesh). A process that joins a running job waits for its next recovery instead, and gets the
    /// mesh of that epoch.
    ///
    /// The mesh must have this world's device type and this process's rank, and only ranks of this
    /// world. If one rank gives another mesh, all ranks get `Status::InvalidArgument`.
    pub fn create(world: &Arc<World>, mesh: Mesh, options: &MeshOptions) -> Result<Arc<RootComms>> {
        RootComms::create_by(world, mesh, options, None)
    }

    /// Does what [`create`](RootComms::create) does, for a caller that has used a part of the
    /// call's time already. The call ends at `deadline`, if there is one.
    pub fn create_by(
        world: &Arc<World>,
        mesh: Mesh,
        options: &MeshOptions,
        deadline: Option<Deadline>,
    ) -> Result<Arc<RootComms>> {
        world.alive()?;
        world.tell_if_refused("dm_init", || check_fits(world, &mesh))?;
        options.check_dims(mesh.ndim())?;
        let timeout = options.timeout.unwrap_or(world.rendezvous().timeout());
        let spec = RootSpec {
            world: Some(Arc::clone(world)),
            library: None,
            mesh,
            id: String::new(),
            is_lazy: options.lazy,
            timeout,
            outer: None,
            options: options.dims.clone(),
        };
        if world.rendezvous().is_offline() {
            let root = RootComms::new(spec)?;
            world.register(as_weak(&root));
            return Ok(root);
        }
        if !options.lazy {
            world.library()?.check_no_capture("dm_init", None)?;
        }
        let mesh = &spec.mesh;
        let text = format!("dm_init({}{})", call_text(mesh), options.agreed());
        let wanted = WantedDims::all_of(mesh, |index| options.dim(index));
        let wait = world.wait(timeout);
        let wait = deadline.map_or_else(|| wait.clone(), |deadline| wait.with_deadline(deadline));

        if world.rendezvous().is_at_door() {
            return RootComms::come_in(world, spec, wait);
        }
        let scope = &*world.rendezvous().scope()?;
        let is_whole_world = mesh.root_size() == scope.num_ranks();
        if world.rendezvous().epoch() > 0 {
            world.rendezvous().check_in_epoch(mesh.root_ranks())?;
        }
        let call = Call::begin(world, None, wait)?;
        let (call, shared) = match is_whole_world {
            true => SharedComms::candidates_of_new(world, &wanted)?.agree(call, scope, &text)?,
            // Ranks outside the mesh do not know what its ranks share. The ranks of the mesh agree
            // on that among themselves, below.
            false => (call.agree(scope, &text)?, SharedComms::none(&wanted)),
        };
        let library = Arc::clone(world.library()?);
        let root = RootComms::new(RootSpec {
            id: mesh_id(world.rendezvous().epoch(), call.number()),
            library: Some(library),
            ..spec
        })?;
        world.register(as_weak(&root));
        call.run(|work| match root.scope() {
            None => Ok(()),
            Some(_) if is_whole_world => make_dims(work, &root, &root, &wanted, &shared),
            Some(scope) => {
                let shared = SharedComms::candidates(&root, None, &wanted).agree_inside(work.peers, scope, &text)?;
                make_dims(work, &root, &root, &wanted, &shared)
            }
        })?;
        Ok(root)
    }

    /// A root mesh over communicators that exist. Local.
    ///
    /// # Safety
    /// `comms` are live communicators of `library`, one for each dimension. They stay live until
    /// the mesh is finalized or aborted. With `is_owned` nobody else destroys or aborts them;
    /// without it nobody does so while a call of this mesh is in progress.
    pub unsafe fn adopt(
        world: Option<Arc<World>>,
        library: Arc<Library>,
        mesh: Mesh,
        comms: &[RawComm],
        is_owned: bool,
        timeout: Duration,
    ) -> Result<Arc<RootComms>> {
        if let Some(world) = &world {
            world.alive()?;
        }
        let mut adopted: Vec<Arc<Communicator>> = Vec::new();
        for (index, raw) in comms.iter().enumerate() {
            let (size, rank) = size_and_rank(&library, *raw)?;
            let (name, wanted) = (mesh.dim_name(index), mesh.dim_size(index));
            let coordinate = mesh.local_rank(index)?;
            if (size, rank) != (wanted, coordinate) {
                return Err(Error::invalid(format!(
                    "the communicator of dimension {name} has {size} ranks and is rank {rank} here, but the dimension has {wanted} ranks and coordinate {coordinate} here"
                )));
            }
            // A communicator that is given for several dimensions (of size 1) ends once.
            let known = adopted.iter().find(|known| known.raw() == *raw).cloned();
            adopted.push(match known {
                Some(known) => known,
                None => Arc::new(Communicator::adopted(Arc::clone(&library), mesh.slice(&[name])?, *raw, is_owned)?),
            });
        }
        // Adopting is local. The id is equal on all ranks of the mesh where they adopt the meshes
        // of these ranks in the same order.
        let id = world.as_ref().map(|world| world.next_adopted(&mesh.root_ranks())).unwrap_or_default();
        let root = RootComms::new(RootSpec {
            world,
            library: Some(library),
            mesh,
            id,
            is_lazy: false,
            timeout,
            outer: None,
            options: Vec::new(),
        })?;
        for (index, communicator) in adopted.iter().enumerate() {
            if !root.id().is_empty() {
                communicator.set_agreed_name(format!("{}/{index}", root.id()));
            }
            let (name, dim) = (root.mesh().dim_name(index), root.mesh().dim_layout(index));
            root.add_dim(name, dim, communicator, &DimOptions::default());
        }
        if let Some(world) = root.world() {
            world.register(as_weak(&root));
            adopted.iter().for_each(|communicator| communicator.end_with_recovery(world.rendezvous()));
            // From here on dm_world_abort on another thread can end the communicators that the root
            // owns. If this call failed now, the caller would own them again, and would end them a
            // second time. So this call does not fail after this point. If an abort came before the
            // root was registered, this rank aborts the root here. An abort that takes long
            // continues in the background.
            if root.alive().is_err() {
                let _ = root.abort();
            }
        }
        Ok(root)
    }
}

/// Fails where the mesh was made for another device type, for another rank, or for a larger world.
fn check_fits(world: &World, mesh: &Mesh) -> Result<()> {
    let (device_type, rank, size) = (world.rendezvous().device_type(), world.rank(), world.size());
    if mesh.device_type() != device_type {
        return Err(Error::invalid(format!(
            "{} has device type {}, but the world was joined for device type {device_type}",
            mesh.describe(),
            mesh.device_type()
        )));
    }
    if usize::try_from(mesh.rank()) != Ok(rank) {
        return Err(Error::invalid(format!(
            "{} was made for rank {}, but this is rank {rank} of the world",
            mesh.describe(),
            mesh.rank()
        )));
    }
    match mesh.largest_root_rank().filter(|largest| usize::try_from(*largest).is_ok_and(|largest| largest >= size)) {
        Some(beyond) => {
            Err(Error::invalid(format!("{} has rank {beyond}, but the world has {size} ranks", mesh.describe())))
        }
        None => Ok(()),
    }
}

/// The position of this process in a mesh of that shape that joins no world. The rank of this
/// process in each communicator is its coordinate along that dimension.
pub(crate) fn adopted_position(whole: &Mesh, library: &Arc<Library>, comms: &[RawComm]) -> Result<usize> {
    let mut position = 0;
    for (index, comm) in comms.iter().enumerate() {
        let (size, (ranks, coordinate)) = (whole.dim_size(index), size_and_rank(library, *comm)?);
        if ranks != size {
            return Err(Error::invalid(format!(
                "the communicator of dimension {} has {ranks} ranks, but the dimension has {size}",
                whole.dim_name(index)
            )));
        }
        position = position * size + coordinate;
    }
    Ok(position)
}

/// The size of a communicator that exists, and this process's rank in it. On a library with streams
/// the question runs on a thread of its own, because the communicator may be in any state.
fn size_and_rank(library: &Arc<Library>, raw: RawComm) -> Result<(usize, usize)> {
    if !library.has_streams() {
        return library.size_and_rank(raw);
    }
    let (asked, wait) = (Arc::clone(library), Wait::after(PATIENCE));
    let what = || format!("ncclCommCount and ncclCommUserRank of {} on a communicator to adopt", library.label());
    let worker = Worker::new(library, "dm-background");
    worker.run(move || asked.size_and_rank(raw), drop, |is_done| poll_until_done(&wait, what, sleep, is_done))?
}

/// Returns the reference by which a world notes a root mesh.
pub(super) fn as_weak(root: &Arc<RootComms>) -> std::sync::Weak<dyn EndsWithWorld> {
    let root: Arc<dyn EndsWithWorld> = Arc::clone(root) as _;
    Arc::downgrade(&root)
}

/// Returns the text of the `dm_init` that gives a root mesh like this one. A process that joins a
/// running job must ask for this mesh, or for one with more indices of the outermost dimension.
pub(super) fn mesh_text(root: &RootComms) -> String {
    let mesh = root.mesh();
    let options = MeshOptions { lazy: root.is_lazy(), ..MeshOptions::default() };
    let options = options.dims(root.options_of_dims().to_vec()).agreed();
    let shape = mesh.shape();
    let (outermost, inner) = shape.split_first().map_or((1, &[][..]), |(first, rest)| (*first, rest));
    let sizes = [&["*".to_owned()][..], &texts(inner)].concat();
    let rest = format!("dm_init({}{options})", shape_text(&sizes, mesh));
    let call = format!("dm_init({}{options})", call_text(mesh));
    rendezvous::mesh_text(outermost, inner.iter().product(), &rest, &call)
}

fn texts(sizes: &[usize]) -> Vec<String> {
    sizes.iter().map(usize::to_string).collect()
}

fn shape_text(sizes: &[String], mesh: &Mesh) -> String {
    format!("shape=({}), names=({})", sizes.join(", "), names_text(&mesh.dim_names()))
}

/// Returns the arguments of `dm_init` as the text on which all ranks must agree.
fn call_text(mesh: &Mesh) -> String {
    let mut text = shape_text(&texts(&mesh.shape()), mesh);
    if let Some(ranks) = mesh.rank_map() {
        text.push_str(&format!(", ranks={}", ranks_text(ranks.as_slice().unwrap_or_default())));
    }
    text
}
