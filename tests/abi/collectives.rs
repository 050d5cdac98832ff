//! Communicators, what runs on them, and their end.

use std::ffi::c_void;

use devicemesh::ffi::*;

use super::making::call_options;
use super::memory::{Room, Text};
use super::{Call, Given, Handle, Session, last_error};

pub const CALLS: &[Call] =
    &[comm, proc, reducing, copying, ragged, exchange, one_sided, group_start, group_end, check, stream_wait, end];

fn comm(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let (dim, out) = (session.dim_of(mesh), session.out::<ncclComm_t>());
    // SAFETY: a string or NULL; writable or NULL.
    let status = unsafe { dm_get_comm(mesh.mesh(), dim.as_ptr(), out.as_ptr()) };
    let given = Given { dead: !mesh.alive, wrong: out.is_null() || !dim.may_name_a_dimension(), ..Given::default() };
    if session.ended("dm_get_comm", status, given, &[out.untouched()]) {
        assert!(!out.get(0).is_null());
    }
}

fn proc(session: &mut Session<'_>) {
    let (mesh, out) = (session.mesh(), session.out::<*mut c_void>());
    let symbol = if session.rarely(2) { Text::new(b"ncclAllReduce") } else { session.text() };
    // SAFETY: a string or NULL; writable or NULL.
    let status = unsafe { dm_get_proc(mesh.mesh(), symbol.as_ptr(), out.as_ptr()) };
    let given =
        Given { dead: !mesh.alive, wrong: out.is_null() || symbol.is_null() || !symbol.is_utf8(), ..Given::default() };
    if session.ended("dm_get_proc", status, given, &[out.untouched()]) {
        assert!(!out.get(0).is_null() && symbol.bytes() == b"ncclAllReduce");
    }
}

/// The memory of an operation: two buffers of exactly the bytes that it is told. Now and then they
/// are one buffer.
struct Operands {
    count: usize,
    dtype: dm_dtype,
    send: *mut c_void,
    recv: *mut c_void,
    stream: *mut c_void,
    given: Given,
}

const ELEMENT: [usize; 12] = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1];

impl Operands {
    fn pick(session: &mut Session<'_>, mesh: Handle, dim: &Text) -> Operands {
        let dtype = if session.rarely(8) { session.number() as i32 } else { session.below(ELEMENT.len()) as i32 };
        let element = usize::try_from(dtype).ok().and_then(|at| ELEMENT.get(at).copied());
        let small = session.below(40);
        let count = if session.rarely(16) { usize::MAX } else { small };
        // Every dimension of a world of one rank has size 1, so a buffer is as large as the count
        // says. A call on an offline mesh, or one that is refused, touches no buffer.
        let send = Room::<u8>::new(small * element.unwrap_or(1));
        let recv = Room::<u8>::new(small * element.unwrap_or(1));
        let (null, in_place) = (session.rarely(16), session.rarely(6));
        let stream = if session.rarely(24) { send.as_ptr().cast() } else { std::ptr::null_mut() };
        let operands = Operands {
            count,
            dtype,
            send: if null { std::ptr::null_mut() } else { send.as_ptr().cast() },
            recv: if in_place { send.as_ptr().cast() } else { recv.as_ptr().cast() },
            stream,
            given: Given {
                dead: !mesh.alive,
                wrong: !dim.may_name_a_dimension()
                    || element.is_none()
                    || count == usize::MAX
                    || null && count > 0
                    || !stream.is_null(),
                ..Given::default()
            },
        };
        // A group works on the buffers until it ends.
        session.kept.extend([send, recv]);
        operands
    }
}

fn reducing(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let dim = session.dim_of(mesh);
    let of = Operands::pick(session, mesh, &dim);
    let op = if session.rarely(8) { session.number() as i32 } else { session.below(5) as i32 };
    let root = if session.rarely(8) { session.number() as i32 } else { 0 };
    let (mesh, dim, which) = (mesh.mesh(), dim.as_ptr(), session.below(3));
    let Operands { count, dtype, send, recv, stream, given } = of;
    let bad_op = !(DM_SUM..=DM_AVG).contains(&op);
    // SAFETY: buffers of as many bytes, or a call that is refused.
    let (name, status, bad) = unsafe {
        match which {
            0 => ("dm_all_reduce", dm_all_reduce(mesh, dim, send, recv, count, dtype, op, stream), bad_op),
            1 => ("dm_reduce", dm_reduce(mesh, dim, send, recv, count, dtype, op, root, stream), bad_op || root < 0),
            _ => ("dm_reduce_scatter", dm_reduce_scatter(mesh, dim, send, recv, count, dtype, op, stream), bad_op),
        }
    };
    session.ended(name, status, Given { wrong: given.wrong || bad, ..given }, &[]);
}

fn copying(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let dim = session.dim_of(mesh);
    let of = Operands::pick(session, mesh, &dim);
    let root = if session.rarely(8) { session.number() as i32 } else { 0 };
    let (mesh, dim, which) = (mesh.mesh(), dim.as_ptr(), session.below(3));
    let Operands { count, dtype, send, recv, stream, given } = of;
    // SAFETY: buffers of as many bytes, or a call that is refused.
    let (name, status, bad) = unsafe {
        match which {
            0 => ("dm_broadcast", dm_broadcast(mesh, dim, send, recv, count, dtype, root, stream), root < 0),
            1 => ("dm_all_gather", dm_all_gather(mesh, dim, send, recv, count, dtype, stream), false),
            _ => ("dm_all_to_all", dm_all_to_all(mesh, dim, send, recv, count, dtype, stream), false),
        }
    };
    session.ended(name, status, Given { wrong: given.wrong || bad, ..given }, &[]);
}

/// An exchange with a count for each rank. There is one rank.
fn ragged(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let dim = session.dim_of(mesh);
    let of = Operands::pick(session, mesh, &dim);
    let (missing, far, which) = (session.rarely(12), session.rarely(12), session.below(3));
    let displs = [if far { usize::MAX } else { 0 }];
    let counts = [of.count];
    let list = if missing { std::ptr::null() } else { counts.as_ptr() };
    let at = if session.rarely(2) || far { displs.as_ptr() } else { std::ptr::null() };
    let (mesh, dim) = (mesh.mesh(), dim.as_ptr());
    let Operands { count, dtype, send, recv, stream, given } = of;
    // SAFETY: lists of one number, and buffers of as many bytes, or a call that is refused.
    let (name, status) = unsafe {
        match which {
            0 => ("dm_all_to_allv", dm_all_to_allv(mesh, dim, send, list, at, recv, list, at, dtype, stream)),
            1 => ("dm_all_gatherv", dm_all_gatherv(mesh, dim, send, recv, list, at, dtype, stream)),
            _ => ("dm_reduce_scatterv", dm_reduce_scatterv(mesh, dim, send, list, at, recv, dtype, DM_SUM, stream)),
        }
    };
    let wrong = given.wrong || missing || far && count > 0;
    session.ended(name, status, Given { wrong, ..given }, &[]);
}

/// A send from this rank to itself and its receive, in a group.
fn exchange(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let dim = session.dim_of(mesh);
    let of = Operands::pick(session, mesh, &dim);
    let begun = dm_group_start(mesh.mesh());
    if !session.ended("dm_group_start", begun, Given { dead: !mesh.alive, wrong: false, ..Given::default() }, &[]) {
        return;
    }
    // SAFETY: buffers of as many bytes, or calls that are refused.
    unsafe {
        let sent = dm_send(mesh.mesh(), dim.as_ptr(), of.send, of.count, of.dtype, 0, of.stream);
        session.ended("dm_send", sent, of.given, &[]);
        let got = dm_recv(mesh.mesh(), dim.as_ptr(), of.recv, of.count, of.dtype, 0, of.stream);
        session.ended("dm_recv", got, Given { wrong: false, ..of.given }, &[]);
    }
    let ended = dm_group_end(mesh.mesh());
    session.ended("dm_group_end", ended, Given::default(), &[]);
}

/// A send without a receive or a receive without a send, also with ranks that do not exist.
fn one_sided(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let dim = session.dim_of(mesh);
    let of = Operands::pick(session, mesh, &dim);
    // A good send waits for its receive, so it comes rarely.
    let peer = if session.rarely(64) { 0 } else { -1 - session.below(2) as i32 };
    let Operands { count, dtype, send, recv, stream, given } = of;
    // SAFETY: buffers of as many bytes, or a call that is refused.
    let (name, status) = unsafe {
        match session.rarely(2) {
            true => ("dm_send", dm_send(mesh.mesh(), dim.as_ptr(), send, count, dtype, peer, stream)),
            false => ("dm_recv", dm_recv(mesh.mesh(), dim.as_ptr(), recv, count, dtype, peer, stream)),
        }
    };
    // A receive does not look at the send buffer.
    let given = Given { wrong: peer < 0 || given.wrong && name == "dm_send", ..given };
    session.ended(name, status, given, &[]);
}

fn group_start(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let status = dm_group_start(mesh.mesh());
    if session.ended("dm_group_start", status, Given { dead: !mesh.alive, wrong: false, ..Given::default() }, &[]) {
        session.groups += 1;
    }
}

fn group_end(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let status = dm_group_end(mesh.mesh());
    session.ended(
        "dm_group_end",
        status,
        Given { dead: !mesh.alive, wrong: session.groups == 0, ..Given::default() },
        &[],
    );
    // An end that fails ends the group, too, where the mesh has a library.
    if mesh.alive && status != DM_STATUS_UNSUPPORTED {
        session.groups = session.groups.saturating_sub(1);
    }
}

/// Ends the groups that the calls left open. They belong to the thread, so they would reach into
/// the next input.
pub fn end_groups(session: &mut Session<'_>) {
    if session.groups > 0 {
        let mesh = Room::<*mut dm_mesh>::new(1);
        // SAFETY: a shape of one; writable.
        let made =
            unsafe { dm_init(c"cpu".as_ptr(), [1i32].as_ptr(), 1, std::ptr::null(), std::ptr::null(), mesh.as_ptr()) };
        assert_eq!(made, DM_STATUS_OK, "the default world is there: {}", last_error());
        for _ in 0..session.groups {
            let ended = dm_group_end(mesh.get(0));
            assert_ne!(ended, DM_STATUS_INTERNAL, "{}", last_error());
        }
        session.groups = 0;
        assert_eq!(dm_group_end(mesh.get(0)), DM_STATUS_INVALID_STATE, "no group is left");
        // SAFETY: no options.
        assert_eq!(unsafe { dm_finalize(mesh.get(0), std::ptr::null()) }, DM_STATUS_OK, "{}", last_error());
        dm_free(mesh.get(0));
    }
    session.kept.clear();
}

fn check(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let dim = session.dim_of(mesh);
    // SAFETY: a string or NULL.
    let status = unsafe { dm_check(mesh.mesh(), dim.as_ptr()) };
    session.ended(
        "dm_check",
        status,
        Given { dead: !mesh.alive, wrong: !dim.may_name_a_dimension(), ..Given::default() },
        &[],
    );
}

/// Waits for the stream NULL. Any other stream would be followed on a mesh of a device.
fn stream_wait(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let dim = session.dim_of(mesh);
    let timeout = -i64::from(session.rarely(4));
    // SAFETY: a string or NULL, and no stream.
    let status = unsafe { dm_stream_wait(mesh.mesh(), dim.as_ptr(), std::ptr::null_mut(), timeout) };
    let given = Given { dead: !mesh.alive, wrong: !dim.may_name_a_dimension() || timeout < 0, ..Given::default() };
    session.ended("dm_stream_wait", status, given, &[]);
}

fn end(session: &mut Session<'_>) {
    let mesh = session.mesh();
    // The call ends the whole root, so it comes rarely.
    if !session.rarely(3) {
        return;
    }
    let given = Given { dead: !mesh.alive, wrong: false, ..Given::default() };
    match session.rarely(2) {
        true => session.ended("dm_abort", dm_abort(mesh.mesh()), given, &[]),
        false => {
            let options = call_options(session, 0);
            let place = options.as_ref().map_or(std::ptr::null(), |options| options.as_ptr());
            // SAFETY: options as large as they say.
            let status = unsafe { dm_finalize(mesh.mesh(), place) };
            session.ended("dm_finalize", status, Given { unsure: options.is_some(), ..given }, &[])
        }
    };
}
