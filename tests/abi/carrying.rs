//! Calls that carry a mesh elsewhere: as text, to fewer ranks, and to where its ranks are.

use std::ffi::c_char;

use devicemesh::ffi::*;

use super::making::{call_options, none, root_made};
use super::memory::{Room, Text};
use super::{Call, Given, Handle, Session};

pub const CALLS: &[Call] = &[text, shrink, locations];

/// Takes a mesh's text, as it is or changed, and makes the mesh that it says.
fn text(session: &mut Session<'_>) {
    let (mesh, room, len) = (session.mesh(), Room::<u8>::new(2048), session.out::<usize>());
    let capacity = if session.rarely(6) { session.below(64) } else { 2048 };
    let place: *mut c_char = room.as_ptr().cast();
    // SAFETY: as much room as said.
    let status = unsafe { dm_serialize(mesh.mesh(), place, capacity, len.as_ptr()) };
    let given = Given { dead: !mesh.alive, wrong: len.is_null(), ..Given::default() };
    let too_small = status == DM_STATUS_BUFFER_TOO_SMALL;
    assert!(!too_small || !len.untouched() && len.get(0) > capacity);
    if !session.ended("dm_serialize", status, given, &[room.untouched()]) {
        return;
    }
    let length = len.get(0) - 1;
    let mut written: Vec<u8> = (0..length).map(|at| room.get(at)).collect();
    assert!(room.get(length) == 0 && room.untouched_from(length + 1) && !written.contains(&0));
    for _ in 0..session.below(3) {
        let (at, byte) = (session.below(length), session.below(256) as u8);
        match session.below(3) {
            0 => written[at] = byte.max(1),
            1 => drop(written.remove(at.min(written.len() - 1))),
            _ => written.insert(at.min(written.len()), b"0192,]}[{\"-"[byte as usize % 11]),
        }
    }
    let whole = written.len() == length && (0..length).all(|at| written[at] == room.get(at));
    let world = session.world();
    // The default world is this process alone.
    let world = if world.token == 0 { Handle { alive: true, real: true, ..world } } else { world };
    let options = Room::with(&[dm_init_options { world: world.world(), ..none() }]);
    let (changed, out) = (Text::new(&written), session.out::<*mut dm_mesh>());
    // SAFETY: a string; options of their size; writable or NULL.
    let status = unsafe { dm_deserialize(changed.as_ptr(), options.as_ptr(), out.as_ptr()) };
    let given = Given { dead: !world.alive, wrong: out.is_null(), unsure: true };
    if session.ended("dm_deserialize", status, given, &[out.untouched()]) {
        root_made(session, out.get(0), world.real);
        let equal = Room::<bool>::new(1);
        // SAFETY: writable.
        assert_eq!(unsafe { dm_equal(mesh.mesh(), out.get(0), equal.as_ptr()) }, DM_STATUS_OK);
        assert!(!whole || equal.get(0), "a mesh that was carried is the same");
    }
}

fn shrink(session: &mut Session<'_>) {
    let (mesh, out) = (session.mesh(), session.out::<*mut dm_mesh>());
    // The call ends a mesh with communicators in any case, so it comes rarely. It lists the ranks
    // that are left, so these are not billions.
    let size = Room::<i32>::new(1);
    // SAFETY: writable.
    let known = unsafe { dm_size(mesh.mesh(), std::ptr::null(), size.as_ptr()) } == DM_STATUS_OK;
    if mesh.real && !session.rarely(4) || known && size.get(0) > 1 << 20 {
        return;
    }
    let dim = session.dim_of(mesh);
    let lost: Vec<i32> = (0..session.below(4)).map(|_| session.number() as i32).collect();
    let lost = Room::with(&lost);
    let count = if session.rarely(16) { usize::MAX } else { lost.count() };
    let options = call_options(session, dm_ndim(mesh.mesh()));
    let place = options.as_ref().map_or(std::ptr::null(), |options| options.as_ptr());
    // SAFETY: a string or NULL; as many ranks as said, or a count that is refused; options as large
    // as they say; writable or NULL.
    let status = unsafe { dm_shrink(mesh.mesh(), dim.as_ptr(), lost.as_ptr(), count, place, out.as_ptr()) };
    let wrong = out.is_null() || !dim.may_name_a_dimension() || count == 0 || count == usize::MAX;
    let given = Given { dead: !mesh.alive, wrong, unsure: options.is_some() };
    if session.ended("dm_shrink", status, given, &[out.untouched()]) {
        let (before, after) = (Room::<i32>::new(1), Room::<i32>::new(1));
        // SAFETY: writable.
        unsafe {
            assert_eq!(dm_size(mesh.mesh(), std::ptr::null(), before.as_ptr()), DM_STATUS_OK);
            assert_eq!(dm_size(out.get(0), std::ptr::null(), after.as_ptr()), DM_STATUS_OK);
        }
        assert!(0 < after.get(0) && after.get(0) < before.get(0));
        root_made(session, out.get(0), mesh.real);
    }
}

fn locations(session: &mut Session<'_>) {
    let (world, mine, out) = (session.world(), session.text(), session.out::<*const *const c_char>());
    let timeout = if session.rarely(6) { session.number() as i64 } else { 0 };
    // SAFETY: a string or NULL; writable or NULL.
    let status = unsafe { dm_world_locations(world.world(), mine.as_ptr(), timeout, out.as_ptr()) };
    let wrong = out.is_null() || !mine.is_utf8() || timeout < 0;
    let given = Given { dead: !world.alive, wrong, ..Given::default() };
    if session.ended("dm_world_locations", status, given, &[out.untouched()]) {
        // SAFETY: one string, since only a world of one rank gets this far here.
        let said = unsafe { std::ffi::CStr::from_ptr(*out.get(0)) };
        assert!(mine.is_null() || said.to_bytes() == mine.bytes());
    }
}
