//! The end of worlds in order, lost ranks, and functions of a library before there is a mesh.

use std::ffi::c_void;

use devicemesh::ffi::*;

use super::memory::{Room, Text};
use super::{Call, Given, Handle, Session};

pub const CALLS: &[Call] = &[finalize, lost, proc];

fn finalize(session: &mut Session<'_>) {
    let timeout = if session.rarely(4) { session.number() as i64 } else { 0 };
    let given = Given { wrong: timeout < 0, ..Given::default() };
    if session.rarely(12) {
        // The next mesh joins the default world anew.
        session.ended("dm_default_world_finalize", dm_default_world_finalize(timeout), given, &[]);
    }
    let world = session.world();
    // It ends a world for good: not too often.
    if session.rarely(4) {
        let status = dm_world_finalize(world.world(), timeout);
        session.ended("dm_world_finalize", status, Given { dead: !world.alive, ..given }, &[]);
    }
}

fn lost(session: &mut Session<'_>) {
    let (mesh, capacity, len) = (session.mesh(), session.below(3), session.out::<usize>());
    let ranks = Room::<i32>::new(capacity);
    // SAFETY: as much room as said; writable or NULL.
    let status = unsafe { dm_lost_ranks(mesh.mesh(), ranks.as_ptr(), capacity, len.as_ptr()) };
    let given = Given { dead: !mesh.alive, wrong: len.is_null(), ..Given::default() };
    if session.ended("dm_lost_ranks", status, given, &[ranks.untouched()]) {
        // Nobody but this process is in a world here.
        assert!(len.get(0) == 0 && ranks.untouched());
    }
    recovery(session, mesh);
}

/// Asks what the recovery that made a mesh has come to. These calls have no arguments that chance
/// chooses, so they follow another call, and the corpus means what it meant before.
fn recovery(session: &mut Session<'_>, mesh: Handle) {
    let size = size_of::<dm_recovery>();
    let told = Room::<dm_recovery>::new(1);
    told.put(0, size);
    // SAFETY: as many bytes as it says.
    let status = unsafe { dm_get_recovery(mesh.mesh(), told.as_ptr()) };
    if session.ended("dm_get_recovery", status, Given { dead: !mesh.alive, ..Given::default() }, &[]) {
        let told = told.get(0);
        assert!(told.struct_size == size && told.epoch == 0 && told.num_lost == 0 && told.has_joined == 0);
        assert!(told.lost_ranks.is_null() && told.joined_ranks.is_null());
    }
    // Nobody is lost in a world of this process alone, and the call would wait a moment for news.
    if !mesh.real {
        let out = Room::<*mut dm_mesh>::new(1);
        // SAFETY: NULL, and writable.
        let status = unsafe { dm_recover(mesh.mesh(), std::ptr::null(), out.as_ptr(), std::ptr::null_mut()) };
        let given = Given { dead: !mesh.alive, wrong: mesh.alive, unsure: false };
        session.ended("dm_recover", status, given, &[out.untouched()]);
    }
}

fn proc(session: &mut Session<'_>) {
    let symbol = if session.rarely(2) { Text::new(b"ncclAllReduce") } else { session.text() };
    let (device, out) = (Text::new(b"cpu"), session.out::<*mut c_void>());
    // SAFETY: strings or NULL; writable or NULL.
    let status = unsafe { dm_get_device_proc(device.as_ptr(), symbol.as_ptr(), out.as_ptr()) };
    let given = Given { wrong: out.is_null() || symbol.is_null() || !symbol.is_utf8(), ..Given::default() };
    if session.ended("dm_get_device_proc", status, given, &[out.untouched()]) {
        assert!(!out.get(0).is_null() && symbol.bytes() == b"ncclAllReduce");
    }
    // SAFETY: no function.
    let status = unsafe { dm_set_ccl_resolver(None, std::ptr::null_mut()) };
    session.ended("dm_set_ccl_resolver", status, Given::default(), &[]);
}
