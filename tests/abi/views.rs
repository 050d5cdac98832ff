//! Calls that make views of meshes.

use devicemesh::ffi::*;

use super::making::call_options;
use super::memory::{Room, Texts};
use super::{Call, Given, Handle, Session};

pub const CALLS: &[Call] = &[slice, slice_range, flatten, unflatten, reshape, concatenate, root, submesh];

fn slice(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let (names, out) = (session.dims_of(mesh, 4), session.out::<*mut dm_mesh>());
    let count = names_count(session, &names);
    // SAFETY: as many strings as said, or a count that is refused; writable or NULL.
    let status = unsafe { dm_slice(mesh.mesh(), names.pointers.as_ptr(), count, out.as_ptr()) };
    let given = Given { dead: !mesh.alive, wrong: out.is_null() || bad_names(&names, count), ..Given::default() };
    if session.ended("dm_slice", status, given, &[out.untouched()]) {
        session.made(out.get(0), mesh.real);
        assert_eq!(dm_ndim(out.get(0)), count);
    }
}

fn flatten(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let (name, out) = (session.text(), session.out::<*mut dm_mesh>());
    let options = call_options(session, 1);
    let place = options.as_ref().map_or(std::ptr::null(), |options| options.as_ptr());
    // SAFETY: a string or NULL; options as large as they say; writable or NULL.
    let status = unsafe { dm_flatten(mesh.mesh(), name.as_ptr(), place, out.as_ptr()) };
    let wrong = out.is_null() || !name.is_utf8() || !name.is_null() && name.bytes().is_empty();
    let given = Given { dead: !mesh.alive, wrong, unsure: options.is_some() };
    if session.ended("dm_flatten", status, given, &[out.untouched()]) {
        flattened(session, mesh, &out);
    }
}

fn flattened(session: &mut Session<'_>, mesh: Handle, out: &Room<*mut dm_mesh>) {
    session.made(out.get(0), mesh.real);
    let (flat, size, whole) = (out.get(0), Room::<i32>::new(1), Room::<i32>::new(1));
    assert_eq!(dm_ndim(flat), 1);
    // SAFETY: writable.
    unsafe {
        assert_eq!(dm_size(flat, dm_dim_name(flat, 0), size.as_ptr()), DM_STATUS_OK);
        assert_eq!(dm_size(mesh.mesh(), std::ptr::null(), whole.as_ptr()), DM_STATUS_OK);
    }
    assert_eq!(size.get(0), whole.get(0), "a flattened mesh has the ranks that it had");
}

fn unflatten(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let (dim, out) = (session.dim_of(mesh), session.out::<*mut dm_mesh>());
    let count = session.below(4);
    let mut sizes: Vec<i32> = (0..count).map(|_| session.number() as i32).collect();
    // The sizes fit the dimension, where there is one.
    let size = Room::<i32>::new(1);
    // SAFETY: a string or NULL; writable.
    let known = !dim.is_null() && unsafe { dm_size(mesh.mesh(), dim.as_ptr(), size.as_ptr()) } == DM_STATUS_OK;
    fit(session, &mut sizes, if known { size.get(0) } else { 0 });
    let names = Texts::new((0..count).map(|_| session.text()).collect());
    let options = call_options(session, count);
    let place = options.as_ref().map_or(std::ptr::null(), |options| options.as_ptr());
    let given_sizes = if session.rarely(24) { Room::null() } else { Room::with(&sizes) };
    // SAFETY: as many of each as said; strings; writable or NULL.
    let status = unsafe {
        dm_unflatten(
            mesh.mesh(),
            dim.as_ptr(),
            given_sizes.as_ptr(),
            count,
            names.pointers.as_ptr(),
            place,
            out.as_ptr(),
        )
    };
    let wrong = out.is_null()
        || dim.is_null()
        || !dim.may_name_a_dimension()
        || given_sizes.is_null() && count > 0
        || sizes.iter().any(|size| *size < 1)
        || !names.are_names();
    let given = Given { dead: !mesh.alive, wrong, unsure: options.is_some() };
    if session.ended("dm_unflatten", status, given, &[out.untouched()]) {
        session.made(out.get(0), mesh.real);
        assert_eq!(dm_ndim(out.get(0)), dm_ndim(mesh.mesh()) - 1 + count);
    }
}

fn reshape(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let out = session.out::<*mut dm_mesh>();
    let count = session.below(4);
    let mut sizes: Vec<i32> = (0..count).map(|_| session.number() as i32).collect();
    let whole = Room::<i32>::new(1);
    // SAFETY: writable.
    let known = unsafe { dm_size(mesh.mesh(), std::ptr::null(), whole.as_ptr()) } == DM_STATUS_OK;
    fit(session, &mut sizes, if known { whole.get(0) } else { 0 });
    let names = Texts::new((0..count).map(|_| session.text()).collect());
    let options = call_options(session, count);
    let place = options.as_ref().map_or(std::ptr::null(), |options| options.as_ptr());
    let given_sizes = Room::with(&sizes);
    // SAFETY: as many of each as said; strings; writable or NULL.
    let status =
        unsafe { dm_reshape(mesh.mesh(), given_sizes.as_ptr(), count, names.pointers.as_ptr(), place, out.as_ptr()) };
    let wrong = out.is_null() || sizes.iter().any(|size| *size < 1) || !names.are_names();
    let given = Given { dead: !mesh.alive, wrong, unsure: options.is_some() };
    if session.ended("dm_reshape", status, given, &[out.untouched()]) {
        session.made(out.get(0), mesh.real);
        assert_eq!(dm_ndim(out.get(0)), count);
        assert_eq!(sizes.iter().product::<i32>(), whole.get(0));
    }
}

/// Makes the first size what the others leave of `whole`, mostly, where they divide `whole`.
fn fit(session: &mut Session<'_>, sizes: &mut [i32], whole: i32) {
    if whole > 0 && !sizes.is_empty() && !session.rarely(4) {
        let inner: i32 = sizes[1..].iter().fold(1, |product: i32, size| product.saturating_mul(*size));
        if inner > 0 && whole % inner == 0 {
            sizes[0] = whole / inner;
        }
    }
}

fn slice_range(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let (dim, out) = (session.dim_of(mesh), session.out::<*mut dm_mesh>());
    let mut pick = || if session.rarely(6) { session.number() as i32 } else { 1 + session.below(4) as i32 };
    let (start, len, step) = (pick().wrapping_sub(1), pick(), pick());
    let options = call_options(session, 1);
    let place = options.as_ref().map_or(std::ptr::null(), |options| options.as_ptr());
    // SAFETY: a string or NULL; options as large as they say; writable or NULL.
    let status = unsafe { dm_slice_range(mesh.mesh(), dim.as_ptr(), start, len, step, place, out.as_ptr()) };
    let wrong = out.is_null() || !dim.may_name_a_dimension() || start < 0 || len < 1 || step < 1;
    let wrong = wrong || !dim.is_null() && dim.bytes().is_empty();
    let given = Given { dead: !mesh.alive, wrong, unsure: options.is_some() };
    if session.ended("dm_slice_range", status, given, &[out.untouched()]) {
        session.made(out.get(0), mesh.real);
        let (first, second) = (Room::<i32>::new(1), Room::<i32>::new(1));
        // SAFETY: a string or NULL; writable.
        unsafe {
            assert_eq!(dm_size(out.get(0), dim.as_ptr(), first.as_ptr()), DM_STATUS_OK);
            assert_eq!(dm_size(mesh.mesh(), dim.as_ptr(), second.as_ptr()), DM_STATUS_OK);
        }
        assert!(first.get(0) == len || dim.is_null());
        assert!(second.get(0) >= first.get(0));
    }
}

fn concatenate(session: &mut Session<'_>) {
    let count = session.below(4);
    let meshes: Vec<Handle> = (0..count).map(|_| session.mesh()).collect();
    let array = Room::with(&meshes.iter().map(|mesh| mesh.mesh().cast_const()).collect::<Vec<_>>());
    let (array, out) = (if session.rarely(24) { Room::null() } else { array }, session.out::<*mut dm_mesh>());
    let claimed = if session.rarely(32) { usize::MAX - session.below(3) } else { count };
    // SAFETY: as many handles as said, or a count that is refused; writable or NULL.
    let status = unsafe { dm_concatenate(array.as_ptr(), claimed, out.as_ptr()) };
    let wrong = out.is_null() || claimed == 0 || array.is_null() || claimed != count;
    let dead = meshes.iter().any(|mesh| !mesh.alive);
    if session.ended("dm_concatenate", status, Given { dead, wrong, ..Given::default() }, &[out.untouched()]) {
        session.made(out.get(0), meshes.iter().any(|mesh| mesh.real));
        assert_eq!(dm_ndim(out.get(0)), meshes.iter().map(|mesh| dm_ndim(mesh.mesh())).sum::<usize>());
    }
}

fn root(session: &mut Session<'_>) {
    let (mesh, out) = (session.mesh(), session.out::<*mut dm_mesh>());
    // SAFETY: writable or NULL.
    let status = unsafe { dm_root(mesh.mesh(), out.as_ptr()) };
    if session.ended(
        "dm_root",
        status,
        Given { dead: !mesh.alive, wrong: out.is_null(), ..Given::default() },
        &[out.untouched()],
    ) {
        session.made(out.get(0), mesh.real);
    }
}

fn submesh(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let (names, count_out) = (session.dims_of(mesh, 3), session.out::<i32>());
    let count = names_count(session, &names);
    let wrong = bad_names(&names, count);
    // SAFETY: as many strings as said, or a count that is refused; writable or NULL.
    let status = unsafe { dm_submesh_count(mesh.mesh(), names.pointers.as_ptr(), count, count_out.as_ptr()) };
    let given = Given { dead: !mesh.alive, wrong: wrong || count_out.is_null(), ..Given::default() };
    let counted = session.ended("dm_submesh_count", status, given, &[count_out.untouched()]);
    let index = if session.rarely(3) { session.number() as i32 } else { session.below(8) as i32 };
    let out = session.out::<*mut dm_mesh>();
    // SAFETY: as above.
    let status = unsafe { dm_submesh(mesh.mesh(), names.pointers.as_ptr(), count, index, out.as_ptr()) };
    let given = Given {
        dead: !mesh.alive,
        wrong: wrong || out.is_null() || index < 0 || counted && index >= count_out.get(0),
        ..Given::default()
    };
    if session.ended("dm_submesh", status, given, &[out.untouched()]) {
        session.made(out.get(0), mesh.real);
    }
}

/// Returns how many names the call is told: as many as there are, or far too many.
fn names_count(session: &mut Session<'_>, names: &Texts) -> usize {
    match session.rarely(32) {
        true => (1 << 16) + 1 + session.below(2),
        false => names.texts.len(),
    }
}

fn bad_names(names: &Texts, count: usize) -> bool {
    count != names.texts.len() || names.pointers.is_null() && count > 0 || !names.are_names()
}
