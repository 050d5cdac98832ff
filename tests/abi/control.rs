//! The control plane: barriers, and bytes that travel through the store. Only worlds of one rank
//! talk here.

use std::ffi::c_void;

use devicemesh::ffi::*;

use super::memory::Room;
use super::{Call, Given, Session};

pub const CALLS: &[Call] = &[barrier, all_gather, broadcast, take_apart];

/// Returns how long a call may take, which mostly is the default.
fn timeout(session: &mut Session<'_>) -> i64 {
    if session.rarely(8) { session.number() as i64 } else { 0 }
}

/// Returns the bytes that a call is to carry, and how many the call is told. A NULL pointer and a
/// count that no memory holds are wrong.
fn data(session: &mut Session<'_>) -> (Room<u8>, usize, bool) {
    let len = session.below(40);
    let room = if session.rarely(12) { Room::null() } else { Room::new(len) };
    let told = if session.rarely(16) { usize::MAX - session.below(3) } else { len };
    let wrong = told > len || told > 0 && room.is_null();
    (room, told, wrong)
}

fn barrier(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let (dim, timeout) = (session.dim_of(mesh), timeout(session));
    // SAFETY: a string or NULL.
    let status = unsafe { dm_barrier(mesh.mesh(), dim.as_ptr(), timeout) };
    let given = Given { dead: !mesh.alive, wrong: timeout < 0 || !dim.may_name_a_dimension(), unsure: false };
    session.ended("dm_barrier", status, given, &[]);
}

fn all_gather(session: &mut Session<'_>) {
    let (of_world, timeout, out) = (session.rarely(2), timeout(session), session.out::<*mut dm_buffers>());
    let (bytes, len, is_wrong) = data(session);
    let place: *const c_void = bytes.as_ptr().cast_const().cast();
    let wrong = is_wrong || timeout < 0 || out.is_null();
    if of_world {
        let world = session.world();
        // SAFETY: as many bytes as said, or a count that is refused; writable or NULL.
        let status = unsafe { dm_world_all_gather_bytes(world.world(), place, len, timeout, out.as_ptr()) };
        let given = Given { dead: !world.alive, wrong, unsure: false };
        if session.ended("dm_world_all_gather_bytes", status, given, &[out.untouched()]) {
            given_out(session, out.get(0), len);
        }
        return;
    }
    let mesh = session.mesh();
    let dim = session.dim_of(mesh);
    // SAFETY: a string or NULL; as above.
    let status = unsafe { dm_all_gather_bytes(mesh.mesh(), dim.as_ptr(), place, len, timeout, out.as_ptr()) };
    let given = Given { dead: !mesh.alive, wrong: wrong || !dim.may_name_a_dimension(), unsure: false };
    if session.ended("dm_all_gather_bytes", status, given, &[out.untouched()]) {
        given_out(session, out.get(0), len);
    }
}

fn broadcast(session: &mut Session<'_>) {
    let (of_world, timeout, out) = (session.rarely(2), timeout(session), session.out::<*mut dm_buffers>());
    let root = if session.rarely(6) { session.number() as i32 } else { 0 };
    let (bytes, len, is_wrong) = data(session);
    let place: *const c_void = bytes.as_ptr().cast_const().cast();
    // Only a world of one rank gets far, and this rank is the root.
    let wrong = is_wrong || root != 0 || timeout < 0 || out.is_null();
    if of_world {
        let world = session.world();
        // SAFETY: as many bytes as said, or a count that is refused; writable or NULL.
        let status = unsafe { dm_world_broadcast_bytes(world.world(), place, len, root, timeout, out.as_ptr()) };
        let given = Given { dead: !world.alive, wrong, unsure: false };
        if session.ended("dm_world_broadcast_bytes", status, given, &[out.untouched()]) {
            given_out(session, out.get(0), len);
        }
        return;
    }
    let mesh = session.mesh();
    let dim = session.dim_of(mesh);
    // SAFETY: a string or NULL; as above.
    let status = unsafe { dm_broadcast_bytes(mesh.mesh(), dim.as_ptr(), place, len, root, timeout, out.as_ptr()) };
    let given = Given { dead: !mesh.alive, wrong: wrong || !dim.may_name_a_dimension(), unsure: false };
    if session.ended("dm_broadcast_bytes", status, given, &[out.untouched()]) {
        given_out(session, out.get(0), len);
    }
}

/// Checks a result of one element, which has as many bytes as were given.
fn given_out(session: &mut Session<'_>, buffers: *mut dm_buffers, len: usize) {
    assert_eq!(dm_buffers_count(buffers), 1);
    let (data, found) = (Room::<*const c_void>::new(1), Room::<usize>::new(1));
    // SAFETY: writable.
    assert_eq!(unsafe { dm_buffers_get(buffers, 0, data.as_ptr(), found.as_ptr()) }, DM_STATUS_OK);
    assert_eq!(found.get(0), len);
    // SAFETY: the NUL behind the bytes is the handle's.
    assert_eq!(unsafe { data.get(0).cast::<u8>().add(len).read() }, 0);
    session.results.push((buffers as usize, true));
}

/// Looks at a result, and may free it. The handle may also be that of a mesh, freed, or made up.
fn take_apart(session: &mut Session<'_>) {
    let known = session.results.len();
    let token = match session.below(4) {
        0 => session.mesh().token,
        1 => session.number() as usize,
        _ if known == 0 => 0,
        _ => {
            let at = session.below(known);
            session.results[at].0
        }
    };
    let alive = session.results.iter().any(|(known, alive)| *alive && *known == token);
    let buffers = token as *mut dm_buffers;
    assert_eq!(dm_buffers_count(buffers), usize::from(alive));
    let index = if session.rarely(3) { session.number() as usize } else { 0 };
    let (data, len) = (session.out::<*const c_void>(), session.out::<usize>());
    // SAFETY: writable or NULL.
    let status = unsafe { dm_buffers_get(buffers, index, data.as_ptr(), len.as_ptr()) };
    let given = Given { dead: !alive, wrong: index > 0 || data.is_null() || len.is_null(), unsure: index > 0 };
    session.ended("dm_buffers_get", status, given, &[data.untouched(), len.untouched()]);
    if session.rarely(2) {
        dm_buffers_free(buffers);
        session.results.iter_mut().filter(|(known, _)| *known == token).for_each(|(_, alive)| *alive = false);
        assert_eq!(dm_buffers_count(buffers), 0);
    }
}

/// Frees the results that are left.
pub fn free_results(session: &mut Session<'_>) {
    for (token, _) in std::mem::take(&mut session.results) {
        // Some handles are freed already, which does no harm.
        dm_buffers_free(token as *mut dm_buffers);
    }
}
