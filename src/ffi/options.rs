//! The options structs, read into the types of the layers below.

use std::sync::Arc;

use super::arguments::{check_flags, check_reserved, natural, optional_text, read_struct, text, timeout};
use super::structs::{
    DM_DIM_OWN_COMM, DM_INIT_LAZY, DM_INIT_OWN_COMMS, DM_JOIN_AUTO, DM_JOIN_NEW, DM_JOIN_RUNNING, DM_STORE_NOT_YET,
    DM_WORLD_DEVICE, DM_WORLD_OFFLINE, dm_call_options, dm_dim_options, dm_init_options, dm_store_callbacks,
    dm_world_options,
};
use super::types::dm_world;
use crate::ccl::copied_config;
use crate::comm::{self, CallOptions, DimOptions, MeshOptions};
use crate::error::{Error, Result};
use crate::rendezvous::store::{self, CallbackStore, Callbacks, Store};
use crate::rendezvous::{Join, JoinOptions};

const _: () = assert!(DM_STORE_NOT_YET == store::NOT_YET);

/// The contents of `dm_init_options`, without the world.
#[derive(Default)]
pub(super) struct InitOptions {
    /// The options of the mesh itself.
    pub(super) mesh: MeshOptions,
    /// The caller's ranks and their number, which is not compared with the shape yet; `None` where
    /// the caller gave none.
    pub(super) ranks: Option<(*const i32, usize)>,
    /// Whether the library ends communicators that it adopts.
    pub(super) own_comms: bool,
}

/// The contents of `dm_world_options`.
pub(super) struct WorldOptions {
    /// How the world is joined.
    pub(super) world: comm::WorldOptions,
    /// The caller's callbacks, which are kept once a world was made with them.
    pub(super) callbacks: Option<Arc<CallbackStore>>,
    /// The place for the token that ends the join, or NULL.
    pub(super) joining_out: *mut *mut dm_world,
}

impl WorldOptions {
    /// Waits until nobody uses the caller's callbacks any more, after no world was made with them.
    /// A join that was ended early tells the other ranks so on a thread of its own, which takes
    /// about ten seconds at most where the callbacks return soon. The wait has no deadline, because
    /// the caller may free the data of the callbacks when dm_world_init has returned.
    pub(super) fn let_callbacks_go(&self) {
        if let Some(callbacks) = &self.callbacks {
            callbacks.await_owners(1 + usize::from(self.world.join.store.is_some()));
        }
    }
}

impl Default for WorldOptions {
    fn default() -> WorldOptions {
        WorldOptions { world: comm::WorldOptions::default(), callbacks: None, joining_out: std::ptr::null_mut() }
    }
}

/// # Safety
/// `options` is NULL or as `dm_world_init` demands.
pub(super) unsafe fn read_world_options(options: *const dm_world_options) -> Result<WorldOptions> {
    if options.is_null() {
        return Ok(WorldOptions::default());
    }
    // SAFETY: not NULL, and the caller's contract.
    let options = unsafe { read_struct("options", options)? };
    check_flags("options", options.flags, DM_WORLD_OFFLINE | DM_WORLD_DEVICE)?;
    let join = match options.join {
        DM_JOIN_AUTO => Join::Auto,
        DM_JOIN_NEW => Join::New,
        DM_JOIN_RUNNING => Join::Running,
        other => {
            return Err(Error::invalid(format!(
                "options.join is {other}: it must be DM_JOIN_AUTO (0), DM_JOIN_NEW (1) or DM_JOIN_RUNNING (2)"
            )));
        }
    };
    let names_device = options.flags & DM_WORLD_DEVICE != 0;
    if !names_device && options.device != 0 {
        return Err(Error::invalid(format!(
            "options.device is {}, but options.flags does not have DM_WORLD_DEVICE: set that flag, or leave options.device at 0",
            options.device
        )));
    }
    let device = natural("options.device", options.device)?;
    let size = natural("options.world_size", options.world_size)?;
    let rank = natural("options.rank", options.rank)?;
    if size > 0 && rank >= size {
        return Err(Error::invalid(format!("options.rank is {rank}, but options.world_size is {size}")));
    }
    if size == 0 && (rank > 0 || options.local_rank != 0) {
        return Err(Error::invalid(format!(
            "options.rank is {rank} and options.local_rank is {}, but options.world_size is 0, which takes all three from the environment",
            options.local_rank
        )));
    }
    // SAFETY: the caller's contract.
    let (init_method, library) = unsafe {
        (
            optional_text("options.init_method", options.init_method)?,
            optional_text("options.ccl_library", options.ccl_library)?,
        )
    };
    // SAFETY: the caller's contract.
    let callbacks = unsafe { read_store(options.store)? };
    let world = comm::WorldOptions {
        join: JoinOptions {
            offline: options.flags & DM_WORLD_OFFLINE != 0,
            world_size: (size > 0).then_some(size),
            rank,
            // A 0 may be a local rank that nobody set.
            local_rank: Some(natural("options.local_rank", options.local_rank)?).filter(|rank| *rank > 0),
            timeout: timeout("options.timeout_ms", options.timeout_ms)?,
            init_method: init_method.map(str::to_owned),
            join,
            store: callbacks.clone().map(|store| store as Arc<dyn Store>),
            ..JoinOptions::default()
        },
        library: library.map(str::to_owned),
        device: names_device.then_some(device),
    };
    Ok(WorldOptions { world, callbacks, joining_out: options.joining_out })
}

/// # Safety
/// `callbacks` is NULL or points to a `dm_store_callbacks` whose functions keep their promises.
unsafe fn read_store(callbacks: *const dm_store_callbacks) -> Result<Option<Arc<CallbackStore>>> {
    if callbacks.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL, and the caller's contract.
    let given = unsafe { read_struct("options.store", callbacks)? };
    let dm_store_callbacks { user_data, set, get, add, drop, remove, compare_set, .. } = given;
    let callbacks = Callbacks { user_data, set, get, add, drop, remove, compare_set };
    // SAFETY: the caller vouches for the functions.
    Ok(Some(Arc::new(unsafe { CallbackStore::new(callbacks)? })))
}

/// The world that the options of `dm_init` name; NULL for the default world.
///
/// # Safety
/// `options` is NULL or as `dm_init` demands.
pub(super) unsafe fn read_init_world(options: *const dm_init_options) -> Result<*mut dm_world> {
    if options.is_null() {
        return Ok(std::ptr::null_mut());
    }
    // SAFETY: not NULL, and the caller's contract.
    Ok(unsafe { read_struct("options", options)? }.world)
}

/// # Safety
/// `options` is NULL or as `dm_init` demands for `ndim` dimensions.
pub(super) unsafe fn read_init_options(options: *const dm_init_options, ndim: usize) -> Result<InitOptions> {
    if options.is_null() {
        return Ok(InitOptions::default());
    }
    // SAFETY: not NULL, and the caller's contract.
    let options = unsafe { read_struct("options", options)? };
    check_flags("options", options.flags, DM_INIT_LAZY | DM_INIT_OWN_COMMS)?;
    check_reserved("options", &[options.reserved])?;
    if options.ranks.is_null() && options.num_ranks > 0 {
        return Err(Error::invalid(format!("options.ranks is NULL, but options.num_ranks is {}", options.num_ranks)));
    }
    let given = GivenDims { options: options.dim_options, number: options.num_dim_options };
    // SAFETY: the caller's contract.
    let dims = unsafe { read_dim_options(given, ndim, "the mesh has")? };
    Ok(InitOptions {
        mesh: MeshOptions {
            lazy: options.flags & DM_INIT_LAZY != 0,
            dims,
            timeout: timeout("options.timeout_ms", options.timeout_ms)?,
        },
        ranks: (!options.ranks.is_null()).then_some((options.ranks, options.num_ranks)),
        own_comms: options.flags & DM_INIT_OWN_COMMS != 0,
    })
}

/// # Safety
/// `options` is NULL or as a call that makes `count` dimensions demands.
pub(super) unsafe fn read_call_options(options: *const dm_call_options, count: usize) -> Result<CallOptions> {
    if options.is_null() {
        return Ok(CallOptions::default());
    }
    // SAFETY: not NULL, and the caller's contract.
    let given = unsafe { read_struct("options", options)? };
    check_flags("options", given.flags, 0)?;
    check_reserved("options", &[given.reserved])?;
    let dims = GivenDims { options: given.dim_options, number: given.num_dim_options };
    // SAFETY: the caller's contract.
    let dims = unsafe { read_dim_options(dims, count, "this call makes")? };
    let mut options = CallOptions::default().dims(dims);
    options.timeout = timeout("options.timeout_ms", given.timeout_ms)?;
    Ok(options)
}

/// The options of dimensions as the caller gave them.
pub(super) struct GivenDims {
    /// The first element, or NULL.
    pub(super) options: *const dm_dim_options,
    /// The number of elements.
    pub(super) number: usize,
}

/// Reads the options of `count` dimensions. `owner` says in a message who has these dimensions. The
/// struct_size of each element says where the next one begins.
///
/// # Safety
/// `given` has NULL, or as many initialised elements as it says.
pub(super) unsafe fn read_dim_options(given: GivenDims, count: usize, owner: &str) -> Result<Vec<DimOptions>> {
    let what = "options.dim_options";
    let GivenDims { options, number } = given;
    match (options.is_null(), number) {
        (true, 0) => return Ok(Vec::new()),
        (true, _) => return Err(Error::invalid(format!("{what} is NULL, but options.num_dim_options is {number}"))),
        (false, _) if number != count => {
            return Err(Error::invalid(format!(
                "options.num_dim_options is {number}, but {owner} {count} {}",
                if count == 1 { "dimension" } else { "dimensions" }
            )));
        }
        (false, _) => {}
    }
    let mut list = Vec::new();
    let mut next = options;
    for index in 0..count {
        // SAFETY: the caller's contract; `next` lies within the caller's array.
        let given = unsafe { read_struct(&format!("{what}[{index}]"), next)? };
        check_flags(&format!("{what}[{index}]"), given.flags, DM_DIM_OWN_COMM)?;
        check_reserved(&format!("{what}[{index}]"), &[given.reserved])?;
        let config = match given.nccl_config.is_null() {
            true => None,
            // SAFETY: the caller's contract.
            false => Some(unsafe { copied_config(given.nccl_config)? }),
        };
        let name = match given.comm_name.is_null() {
            true => None,
            // SAFETY: the caller's contract.
            false => Some(unsafe { text(format_args!("{what}[{index}].comm_name"), given.comm_name)?.to_owned() }),
        };
        list.push(DimOptions { own: given.flags & DM_DIM_OWN_COMM != 0, config, name });
        // SAFETY: still within the array or one past its end.
        next = unsafe { next.byte_add(given.struct_size) };
    }
    Ok(list)
}
