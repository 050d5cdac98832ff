//! Making root meshes.

use std::ffi::{CString, c_char};
use std::ptr::NonNull;
use std::sync::Arc;

use super::arguments::{list, names, optional_text, short_list, sizes};
use super::guard::guard;
use super::handles::Table;
use super::kinds::HandleKind;
use super::options::{InitOptions, read_init_options, read_init_world};
use super::pointers::{null, out};
use super::release;
use super::structs::dm_init_options;
use super::types::{dm_mesh, dm_status, ncclComm_t};
use super::world::find as find_world;
use crate::ccl::{self, RawComm};
use crate::comm::{
    DimComms, MeshOptions, RootComms, View, World, adopted_position, default_world, default_world_to_tell,
};
use crate::error::{Error, Result};
use crate::logging;
use crate::mesh::{Mesh, MeshSpec, MeshText};
use crate::wait::Deadline;

/// The part of a mesh handle that is read in place, without a lock, by functions that must be
/// quick.
pub(super) struct FastPart {
    /// The layout and the ranks.
    pub(super) mesh: Mesh,
    /// The communicators of its dimensions, for dm_get_comm.
    pub(super) comms: Arc<DimComms>,
    /// The names of its dimensions as C strings, which dm_dim_name lends.
    pub(super) names: Vec<CString>,
    /// This rank's coordinate; empty where the rank is not in the view.
    pub(super) coordinate: Vec<usize>,
}

pub(super) static MESHES: Table<FastPart, View> = Table::new(HandleKind::Mesh.number(), "dm_mesh");

/// Makes a mesh, and a communicator of this rank for every dimension. dm_finalize ends the
/// communicators; dm_free frees only the handle.
///
/// ```c
/// dm_init("cuda", (int[]){2, 4}, 2, (const char *[]){"replicate", "shard"}, NULL, &mesh);
/// dm_get_comm(mesh, "shard", &comm);
/// ```
///
/// Collective over the world: where the mesh is smaller than the world, the ranks outside it make
/// the call too. They get a handle, and calls on it that need a member give DM_STATUS_NOT_MEMBER.
/// Ranks lie in the mesh row-major: the last dimension is the fastest. device_type is "cuda", "cpu"
/// or NULL (the device type of options->world; without a world see dm_world_init). shape has ndim
/// sizes, each at least 1; their product is at most the world's size. dim_names are ndim different,
/// non-empty names; NULL names them dim_0, dim_1 ... options NULL: the default world, ranks 0 ..
/// n-1, the world's timeout. options->num_ranks and num_dim_options are the lengths of the lists
/// beside them. options->timeout_ms bounds the whole call, with the joining of the default world.
/// After a joining that failed, was late or was aborted, the next call joins anew. The caller frees
/// the handle with dm_free.
///
/// Before any communicator is made, the ranks agree that they all made this same call. Errors:
/// DM_STATUS_INVALID_ARGUMENT (see "refused" at the head of this file; a rank that is not in the
/// default world yet cannot tell the others), DM_STATUS_MISMATCH (says which rank asked for what),
/// DM_STATUS_TIMEOUT (names the ranks that did not come), DM_STATUS_INVALID_STATE (a CUDA graph is
/// being captured, where the driver tells), DM_STATUS_CCL, DM_STATUS_INVALID_HANDLE
/// (options->world), DM_STATUS_PEER_LOST, DM_STATUS_ABORTED (dm_world_abort on this rank ends the
/// call, also while it is blocked), and what dm_world_init gives when the default world is joined
/// here. When the call fails on any rank, it fails on all ranks and leaves nothing behind.
///
/// In a process that joins a running job (dm_world_options.join) the call waits for the next
/// dm_recover of the job, which lets this process in where its place is empty, and gives the mesh
/// of that recovery: dm_get_recovery says that this rank has joined. The dimensions that the job
/// has made exist, and no other rank takes part in this dm_init. The arguments are those of the
/// dm_init that began the job. A process whose rank the job did not have passes a larger size of
/// the outermost dimension, so that the mesh has this rank. It is let in when processes wait for
/// all ranks of its index (DM_RECOVER_GROW). Where a spare has the place, and where a rank of the
/// job is not in the mesh of its dm_init, this process becomes a spare. Errors of such a process:
/// DM_STATUS_TIMEOUT (no recovery has come; the next dm_init goes on waiting), DM_STATUS_MISMATCH
/// (it asks for another mesh, or its rank lives), DM_STATUS_INVALID_STATE (the job has ended),
/// DM_STATUS_NOT_MEMBER (the others take it for lost), and those of dm_recover.
///
/// # Safety
/// Pointers are NULL or point to as many elements as their counts say; strings are NUL-terminated;
/// mesh_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_init(
    device_type: *const c_char,
    shape: *const i32,
    ndim: usize,
    dim_names: *const *const c_char,
    options: *const dm_init_options,
    mesh_out: *mut *mut dm_mesh,
) -> dm_status {
    guard(|| {
        release::check()?;
        // SAFETY: the caller's contract.
        let (world, named) = unsafe { (given_world(options)?, optional_text("device_type", device_type)) };
        // A call with a world does not look for the default world: for a device type that is NULL
        // that may load a library for cuda.
        let default_world = || default_world_to_tell(named.and_then(ccl::device_type).ok());
        telling(world.clone().or_else(default_world), || {
            let mesh_out = out("mesh_out", mesh_out)?;
            // SAFETY: the caller's contract.
            let request = unsafe { MeshRequest::read(device_type, shape, ndim, dim_names, options, world)? };
            request.create(mesh_out)
        })
    })
}

/// Makes a mesh of communicators that exist already, one for each dimension, in the order of the
/// dimensions.
///
/// Local. Element i of comms is this rank's communicator along dimension i: it has as many ranks as
/// the dimension, and this process's rank in it is its coordinate (checked). On cuda the
/// communicators belong to the library that the program has named (dm_world_options.ccl_library of
/// options->world, or dm_set_ccl_resolver), or else to the only copy of NCCL that is loaded in the
/// process. DM_CCL_LIBRARY does not count here. Several copies are refused, and the message has
/// their paths. The communicators stay the caller's, must outlive the mesh, and are not aborted by
/// dm_abort, unless options->flags has DM_INIT_OWN_COMMS. options may not have DM_INIT_LAZY or
/// dim_options, because no communicator is made here. options->world NULL: the mesh belongs to no
/// world, and its ranks are 0 .. n-1 unless options->ranks says others. Local calls, collectives on
/// data and dm_finalize work on it. Calls that make something with other ranks (dm_flatten ...),
/// dm_shrink and the control plane need a world. The caller frees the handle with dm_free.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT (also when a communicator's size or rank does not fit),
/// DM_STATUS_INVALID_HANDLE, DM_STATUS_CCL, DM_STATUS_LIBRARY (several copies of NCCL are loaded,
/// or none), DM_STATUS_TIMEOUT (NCCL does not answer about a communicator), DM_STATUS_ABORTED
/// (options->world has ended), DM_STATUS_NOT_MEMBER (this rank is not among the ranks, or not in
/// the mesh of the last recovery), DM_STATUS_INVALID_STATE (this process waits to come into a
/// running job), DM_STATUS_UNSUPPORTED (options->world is offline).
///
/// # Safety
/// The conditions of dm_init hold; comms points to ndim live communicators of that library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_from_comms(
    device_type: *const c_char,
    shape: *const i32,
    ndim: usize,
    dim_names: *const *const c_char,
    comms: *const ncclComm_t,
    options: *const dm_init_options,
    mesh_out: *mut *mut dm_mesh,
) -> dm_status {
    guard(|| {
        release::check()?;
        let mesh_out = out("mesh_out", mesh_out)?;
        // SAFETY: the caller's contract.
        let (request, comms) = unsafe {
            (
                MeshRequest::read(device_type, shape, ndim, dim_names, options, given_world(options)?)?,
                short_list("comms", comms, ndim)?.iter().map(|comm| RawComm(comm.cast())).collect::<Vec<_>>(),
            )
        };
        request.check_adopting()?;
        if comms.is_empty() {
            return Err(Error::invalid("dm_from_comms needs at least one dimension, got ndim 0"));
        }
        if let Some(index) = comms.iter().position(|comm| comm.is_null()) {
            return Err(null(format_args!("comms[{index}]")));
        }
        let world = request.world.clone();
        let of_world = world.as_ref().map(|world| world.library()).transpose()?;
        let library = ccl::to_adopt(request.device_type, of_world)?;
        let mesh = match &world {
            Some(world) => request.mesh(world.size(), world.rank())?,
            None => request.mesh(MAX_WORLD, request.place(&library, &comms)?)?,
        };
        let timeout = request.options.mesh.timeout.or(world.as_ref().map(|world| world.rendezvous().timeout()));
        let timeout = timeout.unwrap_or(crate::rendezvous::DEFAULT_TIMEOUT);
        // SAFETY: the caller's contract.
        let root = unsafe { RootComms::adopt(world, library, mesh, &comms, request.options.own_comms, timeout)? };
        give(View::of_root(root), mesh_out)
    })
}

/// Ranks are 32-bit, so this is as large as any world gets.
const MAX_WORLD: usize = i32::MAX as usize;

/// The arguments of a function that makes a mesh.
pub(super) struct MeshRequest<'a> {
    /// "cuda" or "cpu".
    device_type: &'static str,
    /// The size of each dimension.
    shape: Vec<usize>,
    /// The name of each dimension; `None` for the default names.
    names: Option<Vec<&'a str>>,
    /// The text of a mesh, which lists the ranks; `None` where the options list them.
    text: Option<&'a MeshText>,
    /// The world that the caller gave; `None` for the default world.
    world: Option<Arc<World>>,
    /// The other options of the caller.
    options: InitOptions,
}

impl<'a> MeshRequest<'a> {
    /// Reads the arguments. `world` is the world of the options; `None` for the default world.
    ///
    /// # Safety
    /// The conditions of `dm_init` hold, and the arguments stay where they are while the result is
    /// used.
    unsafe fn read(
        device_type: *const c_char,
        shape: *const i32,
        ndim: usize,
        dim_names: *const *const c_char,
        options: *const dm_init_options,
        world: Option<Arc<World>>,
    ) -> Result<MeshRequest<'a>> {
        logging::init_from_environment();
        // SAFETY: the caller's contract. The count of the dimensions is checked before the options
        // are read by it.
        let (device_type, shape, names, options) = unsafe {
            (
                optional_text("device_type", device_type)?,
                sizes("shape", shape, ndim)?,
                if dim_names.is_null() { None } else { Some(names("dim_names", dim_names, ndim)?) },
                read_init_options(options, ndim)?,
            )
        };
        MeshRequest::of(device_type, shape, names, world, options)
    }

    /// The request for the mesh that a text describes. `world` is the world of the options; `None`
    /// for the default world.
    ///
    /// # Safety
    /// The conditions of `dm_init` hold for `options`, for the dimensions of the text.
    pub(super) unsafe fn of_text(
        text: &'a MeshText,
        options: *const dm_init_options,
        world: Option<Arc<World>>,
    ) -> Result<MeshRequest<'a>> {
        // SAFETY: the caller's contract.
        let options = unsafe { read_init_options(options, text.shape().len())? };
        if options.ranks.is_some() {
            return Err(Error::invalid("options.ranks is not NULL, but the ranks are those of the text"));
        }
        let shape = text.shape().to_vec();
        let request = MeshRequest::of(Some(text.device_type()), shape, Some(text.names()), world, options)?;
        Ok(MeshRequest { text: Some(text), ..request })
    }

    fn of(
        device_type: Option<&str>,
        shape: Vec<usize>,
        names: Option<Vec<&'a str>>,
        world: Option<Arc<World>>,
        options: InitOptions,
    ) -> Result<MeshRequest<'a>> {
        let device_type = match (&world, device_type) {
            (Some(world), None) => ccl::device_type(Some(world.rendezvous().device_type()))?,
            (_, named) => ccl::device_type(named)?,
        };
        let theirs = world.as_ref().map(|world| world.rendezvous().device_type());
        if let Some(theirs) = theirs.filter(|theirs| *theirs != device_type) {
            return Err(Error::invalid(format!(
                "device_type is {device_type}, but options.world was joined for device type {theirs}"
            )));
        }
        Ok(MeshRequest { device_type, shape, names, text: None, world, options })
    }

    /// Makes the mesh with its communicators, and gives it to the caller.
    pub(super) fn create(&self, mesh_out: NonNull<*mut dm_mesh>) -> Result<()> {
        if self.options.own_comms {
            return Err(Error::invalid("DM_INIT_OWN_COMMS is for dm_from_comms; a mesh always owns what it makes"));
        }
        // One deadline for the whole call: the join of the default world is part of it.
        let deadline = self.options.mesh.timeout.map(Deadline::after);
        let world = match &self.world {
            Some(world) => Arc::clone(world),
            // Requests that can be refused without a world are refused before this process joins
            // one.
            None => {
                self.check()?;
                default_world(self.device_type, deadline)?
            }
        };
        let root = world.tell_if_refused("dm_init", || {
            let mesh = self.mesh(world.size(), world.rank())?;
            RootComms::create_by(&world, mesh, &self.options.mesh, deadline)
        })?;
        give(View::of_root(root), mesh_out)
    }

    /// Refuses the options that are for communicators that the library makes.
    fn check_adopting(&self) -> Result<()> {
        let MeshOptions { lazy, dims, .. } = &self.options.mesh;
        match (lazy, dims.is_empty()) {
            (true, _) => {
                Err(Error::invalid("dm_from_comms takes communicators that exist: DM_INIT_LAZY is not for it"))
            }
            (_, false) => {
                Err(Error::invalid("dm_from_comms takes communicators that exist: options.dim_options must be NULL"))
            }
            _ => Ok(()),
        }
    }

    /// Fails when the request cannot be met in any world. Does not read the ranks.
    fn check(&self) -> Result<()> {
        self.whole(MAX_WORLD, 0).map(drop)
    }

    /// The mesh of that shape with the ranks 0 .. n-1. Fails when the caller gave another number of
    /// ranks.
    fn whole(&self, world_size: usize, rank: usize) -> Result<Mesh> {
        let mesh = Mesh::new(&self.spec(world_size, rank))?;
        match self.options.ranks {
            Some((_, number)) if number != mesh.size() => Err(Error::invalid(format!(
                "options.num_ranks is {number}, but the shape ({}) has {} ranks",
                self.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
                mesh.size()
            ))),
            _ => Ok(mesh),
        }
    }

    fn mesh(&self, world_size: usize, rank: usize) -> Result<Mesh> {
        if let Some(text) = self.text {
            return text.mesh(world_size, rank);
        }
        let mesh = self.whole(world_size, rank)?;
        let Some((ranks, number)) = self.options.ranks else { return Ok(mesh) };
        // SAFETY: the number of ranks is that of the shape, and the caller vouches for it.
        let ranks = unsafe { list("options.ranks", ranks, number)? };
        Mesh::new(&MeshSpec { ranks: Some(ranks), ..self.spec(world_size, rank) })
    }

    fn spec(&self, world_size: usize, rank: usize) -> MeshSpec<'_> {
        let (shape, names) = (&*self.shape, self.names.as_deref());
        MeshSpec { device_type: self.device_type, shape, names, ranks: None, world_size, rank }
    }

    /// This process's rank in a mesh that joins no world: the rank at the coordinate that its
    /// communicators say.
    fn place(&self, library: &Arc<ccl::Library>, comms: &[RawComm]) -> Result<usize> {
        let whole = self.whole(MAX_WORLD, 0)?;
        let position = adopted_position(&whole, library, comms)?;
        let Some((ranks, number)) = self.options.ranks else { return Ok(position) };
        // SAFETY: the number of ranks is that of the shape, and the caller vouches for it.
        let ranks = unsafe { list("options.ranks", ranks, number)? };
        // The making of the mesh refuses a list with a negative rank, and names its entry.
        Ok(ranks.get(position).and_then(|rank| usize::try_from(*rank).ok()).unwrap_or(0))
    }
}

/// Runs a call that makes a mesh. If this rank refuses the call, the other ranks of the world are
/// told. `None` is a world that this process has not joined.
pub(super) fn telling<T>(world: Option<Arc<World>>, call: impl FnOnce() -> Result<T>) -> Result<T> {
    match world {
        Some(world) => world.tell_if_refused("dm_init", call),
        None => call(),
    }
}

/// The world that the options of the caller name; `None` for the default world.
///
/// # Safety
/// `options` is NULL or as `dm_init` demands.
pub(super) unsafe fn given_world(options: *const dm_init_options) -> Result<Option<Arc<World>>> {
    // SAFETY: the caller's contract.
    let given = unsafe { read_init_world(options)? };
    if given.is_null() { Ok(None) } else { find_world(given).map(Some) }
}

/// Gives a view to the caller as a new handle.
pub(super) fn give(view: View, mesh_out: NonNull<*mut dm_mesh>) -> Result<()> {
    let token = handle(Arc::new(view))?;
    // SAFETY: `mesh_out` is what the caller passed as writable.
    unsafe { mesh_out.write(token as *mut dm_mesh) };
    Ok(())
}

/// A new handle of a view.
pub(super) fn handle(view: Arc<View>) -> Result<usize> {
    let mesh = view.mesh().clone();
    let names = mesh.dim_names().iter().map(|name| CString::new(*name).unwrap_or_default()).collect();
    let coordinate = if mesh.is_member() { mesh.coordinate()? } else { Vec::new() };
    MESHES.insert(FastPart { mesh, comms: Arc::clone(view.dim_comms()), names, coordinate }, view)
}

/// Returns the view that a mesh handle names.
pub(super) fn find(mesh: *const dm_mesh) -> Result<Arc<View>> {
    MESHES.get(mesh as usize)
}
