//! Calls that make root meshes, keep them and free them.

use std::ffi::c_void;

use devicemesh::ffi::*;

use super::memory::{Room, Text, Texts};
use super::worlds::sized;
use super::{Call, Given, Handle, Session, last_error};

pub const CALLS: &[Call] = &[plain_mesh, any_mesh, over_communicators, clone, free, register, lookup];

/// What is registered, so that it can be forgotten at the end.
const REGISTERED: [&[u8]; 3] = [b"trainer", b"two\nlines", "\u{e9}".as_bytes()];

/// The most ranks that are listed one by one.
const MOST_LISTED: usize = 4096;

/// A good mesh of the latest world.
pub fn plain_mesh(session: &mut Session<'_>) {
    let Some(world) = session.worlds.iter().rev().find(|world| world.alive) else { return };
    let (token, real) = (world.token, world.real);
    let mut size = 0;
    // SAFETY: writable.
    let status = unsafe { dm_world_size(token as *const dm_world, &mut size) };
    session.ended("dm_world_size", status, Given::default(), &[]);
    let mut left = size;
    let mut shape = Vec::new();
    for _ in 0..session.below(4) {
        let size = 1 + session.below(4) as i32;
        if left % size == 0 {
            shape.push(size);
            left /= size;
        }
    }
    // All ranks of the world, however many.
    if session.rarely(3) {
        shape.push(left);
    }
    let names = ["dp", "tp", "cp", "pp"].map(|name| Text::new(name.as_bytes()));
    let names = Texts::new(names.into_iter().take(shape.len()).collect());
    let options = sized(size_of::<dm_init_options>(), dm_init_options { world: token as *mut dm_world, ..none() });
    init(session, &Text::null(), &Room::with(&shape), shape.len(), &names, &options, real, Given::default());
}

/// Any arguments.
fn any_mesh(session: &mut Session<'_>) {
    let shape: Vec<i32> = (0..session.below(5)).map(|_| session.number() as i32).collect();
    // What is said to be longer than it is is only allowed where it is refused unread.
    let ndim = if session.rarely(16) { usize::MAX - session.below(3) } else { shape.len() };
    let names = match session.below(3) {
        0 => Texts::null(),
        _ => Texts::new((0..shape.len()).map(|_| session.text()).collect()),
    };
    let device = match session.below(6) {
        0 => session.text(),
        _ => Text::new(b"cpu"),
    };
    let world = match session.below(6) {
        // The default world: this process alone.
        0 => Handle { token: 0, alive: true, real: true },
        _ => session.world(),
    };
    let world = if world.token == 0 { Handle { alive: true, real: true, ..world } } else { world };
    let ranks = ranks(session, world, &shape);
    let size = session.struct_size(size_of::<dm_init_options>());
    let dims = dim_options(session, shape.len()).filter(|_| ndim == shape.len());
    let (num_ranks, num_dims) =
        (number_of(session, ranks.count()), number_of(session, dims.as_ref().map_or(0, |_| ndim)));
    let options = dm_init_options {
        flags: if session.rarely(3) { session.number() as u32 & 5 } else { 0 },
        reserved: if session.rarely(32) { session.number() as u32 } else { 0 },
        world: world.world(),
        ranks: ranks.as_ptr(),
        num_ranks,
        dim_options: dims.as_ref().map_or(std::ptr::null(), |dims| dims.as_ptr()),
        num_dim_options: num_dims,
        timeout_ms: if session.rarely(6) { session.number() as i64 } else { 0 },
        ..none()
    };
    let place = if session.rarely(8) { Room::null() } else { sized(size, options) };
    // Without a name there is no device to find: this machine may have one.
    let device = if device.is_null() { Text::new(b"cpu") } else { device };
    let wrong = !device.is_utf8()
        || ndim > 1 << 16
        || shape.iter().any(|size| *size < 1)
        || !names.pointers.is_null() && !names.are_names()
        || !place.is_null()
            && (!(64..=4096).contains(&size)
                || num_ranks != ranks.count()
                || num_dims != dims.as_ref().map_or(0, |_| ndim)
                || options.flags & !3 != 0
                || options.reserved != 0
                || options.timeout_ms < 0);
    let (dead, real) = if place.is_null() { (false, true) } else { (!world.alive, world.real) };
    init(session, &device, &Room::with(&shape), ndim, &names, &place, real, Given { dead, wrong, unsure: true });
}

#[allow(clippy::too_many_arguments)]
fn init(
    session: &mut Session<'_>,
    device: &Text,
    shape: &Room<i32>,
    ndim: usize,
    names: &Texts,
    options: &Room<dm_init_options>,
    real: bool,
    given: Given,
) {
    let out = session.out::<*mut dm_mesh>();
    let given = Given { wrong: given.wrong || out.is_null(), ..given };
    // SAFETY: as much memory as said, or a count that is refused; strings end with NUL.
    let status = unsafe {
        dm_init(device.as_ptr(), shape.as_ptr(), ndim, names.pointers.as_ptr(), options.as_ptr(), out.as_ptr())
    };
    if session.ended("dm_init", status, given, &[out.untouched()]) {
        root_made(session, out.get(0), real);
        assert_eq!(dm_ndim(out.get(0)), ndim);
    }
}

pub fn root_made(session: &mut Session<'_>, mesh: *mut dm_mesh, real: bool) {
    session.made(mesh, real);
    if real {
        let keeper = Room::<*mut dm_mesh>::new(1);
        // SAFETY: writable.
        assert_eq!(unsafe { dm_clone(mesh, keeper.as_ptr()) }, DM_STATUS_OK);
        session.keepers.push(keeper.get(0) as usize);
    }
}

/// As many ranks as the shape says where it fits the world; where it does not they may not be looked at.
fn ranks(session: &mut Session<'_>, world: Handle, shape: &[i32]) -> Room<i32> {
    let mut size = 1;
    if world.token != 0 && world.alive {
        // SAFETY: writable.
        unsafe { dm_world_size(world.world(), &mut size) };
    }
    if !session.rarely(3) {
        return Room::null();
    }
    match shape.iter().try_fold(1usize, |product, size| product.checked_mul(usize::try_from(*size).ok()?)) {
        Some(product) if product <= size as usize && product <= MOST_LISTED => {
            let first = session.below(3) as i32;
            let listed: Vec<i32> = (0..product as i32).rev().map(|rank| rank + first - 1).collect();
            Room::with(&listed)
        }
        Some(product) if product <= size as usize => Room::null(),
        _ => Room::new(0),
    }
}

/// The number of elements of a list that has `count`, rarely another one.
pub fn number_of(session: &mut Session<'_>, count: usize) -> usize {
    if session.rarely(24) { session.number() as usize } else { count }
}

/// An array of options, each as large as it says; `None` for NULL.
pub fn dim_options(session: &mut Session<'_>, count: usize) -> Option<DimOptions> {
    if !session.rarely(4) {
        return None;
    }
    let (mut parts, mut kept, mut texts) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..count {
        let size = session.struct_size(size_of::<dm_dim_options>());
        let name = if session.rarely(3) { session.text() } else { Text::null() };
        let config = if session.rarely(4) { config(session) } else { Room::null() };
        let options = dm_dim_options {
            struct_size: size,
            flags: if session.rarely(6) { session.number() as u32 } else { session.below(2) as u32 },
            reserved: if session.rarely(32) { session.number() as u32 } else { 0 },
            nccl_config: config.as_ptr().cast::<c_void>(),
            comm_name: name.as_ptr(),
        };
        parts.push((size, sized(size, options)));
        texts.push(name);
        kept.push(config);
        // Nothing is read behind one that is refused.
        if !(32..=4096).contains(&size) {
            break;
        }
    }
    let total = parts.iter().map(|(size, _)| (*size).clamp(8, 8 + 4096)).sum();
    let array = Room::of_bytes(total);
    let mut at = 0;
    for (size, part) in &parts {
        for offset in 0..(*size).clamp(8, 8 + 4096) {
            // SAFETY: within the part.
            array.put(at + offset, unsafe { part.as_ptr().cast::<u8>().add(offset).read() });
        }
        at += (*size).clamp(8, 8 + 4096);
    }
    Some(DimOptions { array, _texts: texts, _configs: kept })
}

/// An array of dm_dim_options with what its elements point to.
pub struct DimOptions {
    array: Room<dm_dim_options>,
    _texts: Vec<Text>,
    _configs: Vec<Room<u64>>,
}

impl DimOptions {
    pub fn as_ptr(&self) -> *const dm_dim_options {
        self.array.as_ptr()
    }
}

/// Options of a call that makes `count` dimensions, as large as they say; `None` for NULL.
pub fn call_options(session: &mut Session<'_>, count: usize) -> Option<CallOptions> {
    if !session.rarely(3) {
        return None;
    }
    let dims = dim_options(session, count);
    let size = session.struct_size(size_of::<dm_call_options>());
    let options = dm_call_options {
        struct_size: size,
        flags: if session.rarely(16) { session.number() as u32 } else { 0 },
        reserved: if session.rarely(16) { session.number() as u32 } else { 0 },
        timeout_ms: if session.rarely(6) { session.number() as i64 } else { 0 },
        dim_options: dims.as_ref().map_or(std::ptr::null(), |dims| dims.as_ptr()),
        num_dim_options: number_of(session, dims.as_ref().map_or(0, |_| count)),
    };
    Some(CallOptions { place: sized(size, options), _dims: dims })
}

/// A dm_call_options with what it points to.
pub struct CallOptions {
    place: Room<dm_call_options>,
    _dims: Option<DimOptions>,
}

impl CallOptions {
    pub fn as_ptr(&self) -> *const dm_call_options {
        self.place.as_ptr()
    }
}

/// An ncclConfig_t in as many bytes as its size field says, or what looks like none.
fn config(session: &mut Session<'_>) -> Room<u64> {
    let size = session.struct_size(72);
    let place = Room::of_bytes(size.clamp(16, 16 + 4096));
    for at in (16..size.min(4096)).step_by(4) {
        place.put(at, i32::MIN);
    }
    for at in [32, 48] {
        place.put(at, 0u64);
    }
    place.put(0, size);
    place.put(8, if session.rarely(8) { session.number() as u32 } else { 0xcafe_beef });
    place.put(12, 22_703u32);
    place
}

fn over_communicators(session: &mut Session<'_>) {
    let Some(real) = session.meshes.iter().find(|mesh| mesh.alive && mesh.real).map(|mesh| mesh.token) else { return };
    let over = Handle { token: real, alive: true, real: true };
    let name = super::name_of(over, 0);
    let comm = Room::<ncclComm_t>::new(1);
    // SAFETY: writable; a string.
    if unsafe { dm_get_comm(over.mesh(), name.as_ptr(), comm.as_ptr()) } != DM_STATUS_OK {
        return;
    }
    let count = session.below(3);
    let null = session.rarely(8);
    let comms = vec![if null { std::ptr::null_mut() } else { comm.get(0) }; count];
    let shape: Vec<i32> = (0..count).map(|_| 1 + i32::from(session.rarely(8))).collect();
    let world = if session.rarely(2) { session.world() } else { Handle { token: 0, alive: true, real: true } };
    let world = if world.token == 0 { Handle { alive: true, ..world } } else { world };
    let ranks = ranks(session, world, &shape);
    // Not DM_INIT_OWN_COMMS: they are another mesh's.
    let options =
        dm_init_options { world: world.world(), ranks: ranks.as_ptr(), flags: session.below(2) as u32, ..none() };
    let options = sized(size_of::<dm_init_options>(), options);
    let out = session.out::<*mut dm_mesh>();
    let lazy = options.get(0).flags & DM_INIT_LAZY != 0;
    let given = Given { dead: !world.alive, wrong: out.is_null() || count == 0 || null || lazy, ..Given::default() };
    // SAFETY: as much memory as said; the communicators live.
    let status = unsafe {
        dm_from_comms(
            c"cpu".as_ptr(),
            Room::with(&shape).as_ptr(),
            count,
            std::ptr::null(),
            Room::with(&comms).as_ptr(),
            options.as_ptr(),
            out.as_ptr(),
        )
    };
    if session.ended("dm_from_comms", status, given, &[out.untouched()]) {
        root_made(session, out.get(0), true);
    }
}

fn clone(session: &mut Session<'_>) {
    let (mesh, out) = (session.mesh(), session.out::<*mut dm_mesh>());
    // SAFETY: writable or NULL.
    let status = unsafe { dm_clone(mesh.mesh(), out.as_ptr()) };
    if session.ended(
        "dm_clone",
        status,
        Given { dead: !mesh.alive, wrong: out.is_null(), ..Given::default() },
        &[out.untouched()],
    ) {
        session.made(out.get(0), mesh.real);
    }
}

fn free(session: &mut Session<'_>) {
    let mesh = session.mesh();
    if session.keepers.contains(&mesh.token) {
        return;
    }
    let before = last_error();
    dm_free(mesh.mesh());
    assert_eq!(last_error(), before, "freeing is no failing call");
    for known in session.meshes.iter_mut().filter(|known| known.token == mesh.token) {
        known.alive = false;
    }
}

fn registered(session: &mut Session<'_>) -> Text {
    match session.below(5) {
        at if at < REGISTERED.len() => Text::new(REGISTERED[at]),
        3 => Text::null(),
        _ => Text::new(if session.rarely(2) { b"\xff" } else { b"" }),
    }
}

fn register(session: &mut Session<'_>) {
    let name = registered(session);
    let mesh = session.mesh();
    // SAFETY: NULL or a string.
    let status = unsafe { dm_register(mesh.mesh(), name.as_ptr()) };
    let given = Given {
        dead: !mesh.alive,
        wrong: name.is_null() || !name.is_utf8() || name.bytes().is_empty(),
        ..Given::default()
    };
    session.ended("dm_register", status, given, &[]);
}

fn lookup(session: &mut Session<'_>) {
    let (name, out) = (registered(session), session.out::<*mut dm_mesh>());
    // SAFETY: NULL or a string; writable or NULL.
    let status = unsafe { dm_lookup(name.as_ptr(), out.as_ptr()) };
    let given = Given { dead: false, wrong: name.is_null() || !name.is_utf8() || out.is_null(), ..Given::default() };
    if session.ended("dm_lookup", status, given, &[out.untouched()]) {
        // Whether it has communicators is not known any more: it is treated as one that may.
        session.made(out.get(0), true);
    }
}

pub fn forget_names() {
    for name in REGISTERED {
        // SAFETY: a string.
        let forgotten = unsafe { dm_unregister(Text::new(name).as_ptr()) };
        assert!(matches!(forgotten, DM_STATUS_OK | DM_STATUS_NOT_FOUND));
    }
}

pub fn none() -> dm_init_options {
    dm_init_options {
        struct_size: size_of::<dm_init_options>(),
        flags: 0,
        reserved: 0,
        world: std::ptr::null_mut(),
        ranks: std::ptr::null(),
        num_ranks: 0,
        dim_options: std::ptr::null(),
        num_dim_options: 0,
        timeout_ms: 0,
    }
}
