//! Calls about worlds, versions and errors.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use devicemesh::ffi::*;

use super::memory::{Room, Text};
use super::{Call, Given, Known, Session, last_error};

pub const CALLS: &[Call] =
    &[offline_world, real_world, any_world, default_world, world_of_mesh, ask, info, barrier, abort, free, errors, log];

/// Makes a good offline world of any size.
pub fn offline_world(session: &mut Session<'_>) {
    const SIZES: [i32; 8] = [8, 1, 4, 6, 12, 24, 1 << 20, i32::MAX];
    let size = SIZES[session.below(SIZES.len())];
    let options = dm_world_options {
        flags: DM_WORLD_OFFLINE,
        world_size: size,
        rank: (session.number() % size as u64) as i32,
        ..none()
    };
    let device = if session.rarely(4) { Text::new(b"cuda") } else { Text::new(b"cpu") };
    join(session, "an offline world", &device, &Room::with(&[options]), Given::default());
}

/// Makes a world of this process alone, with communicators. Now and then the world has a store of
/// the caller.
fn real_world(session: &mut Session<'_>) {
    if session.worlds.iter().filter(|world| world.real).count() >= 2 {
        return;
    }
    // A receive without a send ends after this time.
    let mut options = dm_world_options { world_size: 1, timeout_ms: 40, ..none() };
    let store = Room::with(&[store()]);
    if session.rarely(3) {
        options.store = store.as_ptr();
        session.stores.push(store.get(0).user_data.cast());
    } else {
        // SAFETY: nobody else has it.
        drop(unsafe { Box::from_raw(store.get(0).user_data.cast::<Counted>()) });
    }
    join(session, "a world of one", &Text::new(b"cpu"), &Room::with(&[options]), Given::default());
}

/// Takes any options, except those with which the call would wait for other ranks.
fn any_world(session: &mut Session<'_>) {
    const METHODS: [&[u8]; 6] = [b"env://", b"", b"tcp://", b"tcp://host:x", b"file://relative", b"zk://h"];
    let device = session.text();
    let method = Text::new(METHODS[session.below(METHODS.len())]);
    let library = session.text();
    let options = dm_world_options {
        flags: DM_WORLD_OFFLINE | if session.rarely(8) { session.number() as u32 } else { 0 },
        world_size: session.number() as i32,
        rank: session.number() as i32,
        local_rank: session.number() as i32,
        device: if session.rarely(8) { session.number() as i32 } else { 0 },
        join: if session.rarely(16) { session.number() as u32 } else { 0 },
        timeout_ms: if session.rarely(4) { session.number() as i64 } else { 0 },
        init_method: if session.rarely(3) { method.as_ptr() } else { std::ptr::null() },
        ccl_library: if session.rarely(3) { library.as_ptr() } else { std::ptr::null() },
        ..none()
    };
    let size = session.struct_size(size_of::<dm_world_options>());
    let place = sized(size, options);
    let wrong = !device.is_utf8() || !(72..=4096).contains(&size);
    join(session, "any world", &device, &place, Given { dead: false, wrong, ..Given::default() });
}

fn join(session: &mut Session<'_>, what: &str, device: &Text, options: &Room<dm_world_options>, given: Given) {
    let out = session.out::<*mut dm_world>();
    let given = Given { wrong: given.wrong || out.is_null(), ..given };
    // SAFETY: strings end with NUL, the options have as many bytes as they say.
    let status = unsafe { dm_world_init(device.as_ptr(), options.as_ptr(), out.as_ptr()) };
    if session.ended(what, status, given, &[out.untouched()]) {
        let token = out.get(0) as usize;
        // Without the flag it was made by `real_world`.
        let real = options.get(0).flags & DM_WORLD_OFFLINE == 0;
        session.worlds.push(Known { token, alive: true, real });
    }
}

/// Joins the default world of cpu, which is this process alone because there is no launcher.
fn default_world(session: &mut Session<'_>) {
    let device = if session.rarely(4) { session.text() } else { Text::new(b"cpu") };
    if device.is_null() || device.is_utf8() && device.bytes() == b"cuda" {
        return; // What this means depends on the machine.
    }
    let timeout = if session.rarely(4) { session.number() as i64 } else { 0 };
    let out = session.out::<*mut dm_world>();
    let given = Given { wrong: timeout < 0 || out.is_null() || !device.is_utf8(), ..Given::default() };
    // SAFETY: the string ends with NUL, `out` is writable or NULL.
    let status = unsafe { dm_default_world(device.as_ptr(), timeout, out.as_ptr()) };
    if session.ended("dm_default_world", status, given, &[out.untouched()]) {
        session.worlds.push(Known { token: out.get(0) as usize, alive: true, real: true });
    }
}

fn world_of_mesh(session: &mut Session<'_>) {
    let (mesh, out) = (session.mesh(), session.out::<*mut dm_world>());
    // A mesh over communicators of the caller may have no world.
    let given = Given { dead: !mesh.alive, wrong: out.is_null(), unsure: false };
    // SAFETY: `out` is writable or NULL.
    let status = unsafe { dm_get_world(mesh.mesh(), out.as_ptr()) };
    if session.ended("dm_get_world", status, given, &[out.untouched()]) {
        session.worlds.push(Known { token: out.get(0) as usize, alive: true, real: mesh.real });
    }
}

fn info(session: &mut Session<'_>) {
    let world = session.world();
    let size = session.struct_size(size_of::<dm_world_info>());
    let place = Room::<dm_world_info>::of_bytes(size.clamp(8, 8 + 4096));
    place.put(0, size);
    let given = Given { dead: !world.alive, wrong: !(56..=4096).contains(&size), ..Given::default() };
    // SAFETY: as many bytes as it says, or a size that is refused.
    let status = unsafe { dm_world_get_info(world.world(), place.as_ptr()) };
    if session.ended("dm_world_get_info", status, given, &[]) {
        let info = place.get(0);
        assert!((0..info.size).contains(&info.rank) && (0..info.num_hosts).contains(&info.host));
        assert!(info.local_rank >= 0 && info.local_size >= 1 && info.device >= -1);
        // SAFETY: the world's own strings, and the world lives.
        let texts = unsafe { (CStr::from_ptr(info.device_type), CStr::from_ptr(info.library)) };
        assert!([c"cpu", c"cuda"].contains(&texts.0) && (texts.1.is_empty() == (info.ccl_version == 0)));
    }
}

fn ask(session: &mut Session<'_>) {
    let (world, out) = (session.world(), session.out::<i32>());
    let given = Given { dead: !world.alive, wrong: out.is_null(), ..Given::default() };
    let (name, status) = match session.rarely(2) {
        // SAFETY: `out` is writable or NULL.
        true => ("dm_world_rank", unsafe { dm_world_rank(world.world(), out.as_ptr()) }),
        // SAFETY: as above.
        false => ("dm_world_size", unsafe { dm_world_size(world.world(), out.as_ptr()) }),
    };
    if world.alive && world.real && !out.is_null() {
        // Nobody waits to join a world of one process. (An offline world has no door.)
        let waiting = session.out::<i32>();
        let given = Given { wrong: waiting.is_null(), ..Given::default() };
        // SAFETY: `waiting` is writable or NULL.
        let status = unsafe { dm_waiting(world.world(), waiting.as_ptr()) };
        if session.ended("dm_waiting", status, given, &[waiting.untouched()]) {
            assert_eq!(waiting.get(0), 0);
        }
    }
    if session.ended(name, status, given, &[out.untouched()]) {
        assert!(out.get(0) >= 0);
    }
}

fn barrier(session: &mut Session<'_>) {
    let world = session.world();
    let timeout = if session.rarely(2) { session.number() as i64 } else { 0 };
    let status = dm_world_barrier(world.world(), timeout);
    session.ended(
        "dm_world_barrier",
        status,
        Given { dead: !world.alive, wrong: timeout < 0, ..Given::default() },
        &[],
    );
}

fn abort(session: &mut Session<'_>) {
    let world = session.world();
    if session.rarely(12) {
        // The next mesh joins the default world anew.
        session.ended("dm_default_world_abort", dm_default_world_abort(), Given::default(), &[]);
    }
    // The call ends a world for good, so it comes rarely.
    if session.rarely(4) {
        let status = dm_world_abort(world.world());
        session.ended("dm_world_abort", status, Given { dead: !world.alive, wrong: false, ..Given::default() }, &[]);
    }
}

fn free(session: &mut Session<'_>) {
    let world = session.world();
    let before = last_error();
    dm_world_free(world.world());
    assert_eq!(last_error(), before, "freeing is no failing call");
    for known in session.worlds.iter_mut().filter(|known| known.token == world.token) {
        known.alive = false;
    }
}

/// Sets a level, which often is none, and a callback that asks the library.
fn log(session: &mut Session<'_>) {
    unsafe extern "C-unwind" fn on_record(_user_data: *mut c_void, level: dm_log_level, message: *const c_char) {
        assert!((DM_LOG_ERROR..=DM_LOG_DEBUG).contains(&level));
        // SAFETY: the library's line lives through the call.
        let message = unsafe { CStr::from_ptr(message) }.to_str().unwrap();
        assert!(!message.is_empty() && !message.contains('\n'), "{message:?}");
        assert!(dm_version() >= 100, "a callback may ask the library");
    }
    let level = if session.rarely(4) { session.number() as i32 } else { session.below(5) as i32 };
    // SAFETY: the callback may be called from any thread.
    let status = unsafe { dm_set_log(level, Some(on_record), std::ptr::null_mut()) };
    let wrong = !(DM_LOG_OFF..=DM_LOG_DEBUG).contains(&level);
    session.ended("dm_set_log", status, Given { wrong, ..Given::default() }, &[]);
}

fn errors(session: &mut Session<'_>) {
    let status = session.number() as i32;
    // SAFETY: a static string.
    let name = unsafe { CStr::from_ptr(dm_status_name(status)) }.to_str().unwrap();
    assert_eq!(name == "DM_STATUS_UNKNOWN", !(DM_STATUS_OK..=DM_STATUS_EXHAUSTED).contains(&status), "{status}");
    assert!(dm_version() >= 100);
    let size = session.struct_size(size_of::<dm_error_info>());
    let place = Room::<dm_error_info>::of_bytes(size.clamp(8, 8 + 4096));
    place.put(0, size);
    let wrong = !(32..=4096).contains(&size);
    // SAFETY: as many bytes as it says, or a size that is refused.
    let status = unsafe { dm_last_error_info(place.as_ptr()) };
    if !session.ended("dm_last_error_info", status, Given { dead: false, wrong, ..Given::default() }, &[]) {
        let head = place.as_ptr().cast::<usize>();
        // SAFETY: the piece has at least these bytes.
        assert_eq!(unsafe { head.read() }, size, "the caller's size stays");
    }
}

impl Session<'_> {
    /// Returns a struct_size: mostly the true one, and otherwise a smaller or a larger one.
    pub fn struct_size(&mut self, truth: usize) -> usize {
        match self.below(8) {
            0..=4 => truth,
            5 => truth - 1 - self.below(truth),
            6 => truth + self.below(64),
            _ => self.number() as usize,
        }
    }
}

/// An options struct in exactly as many bytes as its size says. Bytes behind the struct are 0. A
/// size that is far too large is refused unread.
pub fn sized<T: Copy>(size: usize, options: T) -> Room<T> {
    let place = Room::<T>::of_bytes(size.clamp(8, 8 + 4096));
    place.put(0, [0u8; 8 + 4096]);
    place.put(0, options);
    place.put(0, size);
    place
}

fn none() -> dm_world_options {
    dm_world_options {
        struct_size: size_of::<dm_world_options>(),
        flags: 0,
        world_size: 0,
        rank: 0,
        local_rank: 0,
        device: 0,
        join: 0,
        timeout_ms: 0,
        init_method: std::ptr::null(),
        ccl_library: std::ptr::null(),
        store: std::ptr::null(),
        joining_out: std::ptr::null_mut(),
    }
}

/// A store of the caller, which counts how often it is dropped.
pub struct Counted {
    values: Mutex<HashMap<Vec<u8>, Vec<u8>>>,
    drops: Mutex<u32>,
}

/// Checks that each store was dropped once or was never taken. The last handles of all worlds are
/// free by then, but a thread of the library may still end the last world of a store.
pub fn check_stores(stores: &[*mut Counted]) {
    for store in stores {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            // SAFETY: made by `store`, and freed below only.
            let counted = unsafe { &**store };
            let (drops, used) = (*counted.drops.lock().unwrap(), !counted.values.lock().unwrap().is_empty());
            if drops == 1 || drops == 0 && !used {
                break;
            }
            assert!(drops == 0 && Instant::now() < until, "a store was dropped {drops} times");
            std::thread::sleep(Duration::from_millis(1));
        }
        // SAFETY: made by `store`, and the library does not use it any more.
        drop(unsafe { Box::from_raw(*store) });
    }
}

fn store() -> dm_store_callbacks {
    let counted = Box::new(Counted { values: Mutex::default(), drops: Mutex::new(0) });
    dm_store_callbacks {
        struct_size: size_of::<dm_store_callbacks>(),
        user_data: Box::into_raw(counted).cast(),
        set: Some(set),
        get: Some(get),
        add: Some(add),
        drop: Some(dropped),
        remove: None,
        compare_set: None,
    }
}

/// # Safety
/// `data` is a `Counted`, `key` ends with NUL.
unsafe fn parts<'a>(data: *mut c_void, key: *const c_char) -> (&'a Counted, Vec<u8>) {
    // SAFETY: the caller's word.
    unsafe { (&*data.cast::<Counted>(), CStr::from_ptr(key).to_bytes().to_vec()) }
}

unsafe extern "C" fn set(data: *mut c_void, key: *const c_char, value: *const c_void, len: usize) -> i32 {
    // SAFETY: what the library gives.
    let ((store, key), value) = unsafe { (parts(data, key), std::slice::from_raw_parts(value.cast::<u8>(), len)) };
    store.values.lock().unwrap().insert(key, value.to_vec());
    0
}

unsafe extern "C" fn get(
    data: *mut c_void,
    key: *const c_char,
    value: *mut c_void,
    capacity: usize,
    len_out: *mut usize,
    _timeout_ms: i64,
) -> i32 {
    // SAFETY: what the library gives.
    let (store, key) = unsafe { parts(data, key) };
    let values = store.values.lock().unwrap();
    let Some(bytes) = values.get(&key) else { return DM_STORE_NOT_YET };
    // SAFETY: as much room as the library says.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast::<u8>(), bytes.len().min(capacity));
        len_out.write(bytes.len());
    }
    0
}

unsafe extern "C" fn add(data: *mut c_void, key: *const c_char, amount: i64, value_out: *mut i64) -> i32 {
    // SAFETY: what the library gives.
    let (store, key) = unsafe { parts(data, key) };
    let mut values = store.values.lock().unwrap();
    let text = values.get(&key).and_then(|bytes| std::str::from_utf8(bytes).ok()?.parse().ok()).unwrap_or(0i64);
    let sum = text.wrapping_add(amount);
    values.insert(key, sum.to_string().into_bytes());
    // SAFETY: writable, as the library says.
    unsafe { value_out.write(sum) };
    0
}

unsafe extern "C" fn dropped(data: *mut c_void) {
    // SAFETY: a `Counted`.
    let store = unsafe { &*data.cast::<Counted>() };
    *store.drops.lock().unwrap() += 1;
}
