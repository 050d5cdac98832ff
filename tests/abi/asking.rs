//! Questions to a mesh, and planning.

use devicemesh::ffi::*;

use super::making::number_of;
use super::memory::{Room, Texts};
use super::worlds::sized;
use super::{Call, Given, Handle, Session, name_of};

pub const CALLS: &[Call] = &[
    names,
    shape,
    size,
    member,
    rank,
    local_rank,
    coordinate,
    coordinate_of,
    ranks,
    group_ranks,
    replica_groups,
    compare,
    describe,
    neighbors,
    shard,
    plan,
];

fn names(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let count = dm_ndim(mesh.mesh());
    assert!(mesh.alive || count == 0);
    let index = if session.rarely(3) { session.number() as usize } else { session.below(4) };
    assert_eq!(name_of(mesh, index).is_null(), index >= count);
}

/// A buffer of any capacity, with its length. The capacity is small, large, or as large as the
/// answer usually is; the buffer may be NULL.
struct Buffer<T> {
    room: Room<T>,
    capacity: usize,
    len: Room<usize>,
}

impl<T: Copy> Buffer<T> {
    fn pick(session: &mut Session<'_>) -> Buffer<T> {
        const CAPACITIES: [usize; 8] = [0, 1, 2, 4, 8, 24, 64, 4096];
        let capacity = CAPACITIES[session.below(CAPACITIES.len())];
        let null = session.rarely(16);
        // A capacity may be said for NULL, too.
        let capacity = if null && session.rarely(2) { usize::MAX } else { capacity };
        let room = if null { Room::null() } else { Room::new(capacity) };
        Buffer { room, capacity, len: session.out() }
    }

    /// Checks the rules of queries. Every answer writes the length, also an answer that does not
    /// fit. The answer itself is written only where it fits.
    fn check(&self, session: &Session<'_>, call: &str, status: dm_status, given: Given) -> Option<usize> {
        let given = Given { wrong: given.wrong || self.len.is_null(), ..given };
        if status == DM_STATUS_BUFFER_TOO_SMALL {
            assert!(!self.len.untouched() && self.len.get(0) > self.capacity, "{call}: {} fit", self.capacity);
        } else if !matches!(status, DM_STATUS_OK | DM_STATUS_INVALID_ARGUMENT | DM_STATUS_NOT_MEMBER) {
            assert!(self.len.untouched(), "{call} gives {status} and a length");
        }
        if !session.ended(call, status, given, &[self.room.untouched()]) {
            return None;
        }
        let len = self.len.get(0);
        assert!(
            len <= self.capacity && (len == 0 || !self.room.is_null()) && self.room.untouched_from(len),
            "{call}: {len}"
        );
        Some(len)
    }
}

fn ok(mesh: Handle) -> Given {
    Given { dead: !mesh.alive, wrong: false, ..Given::default() }
}

fn shape(session: &mut Session<'_>) {
    let (mesh, buffer) = (session.mesh(), Buffer::<i32>::pick(session));
    // SAFETY: as much room as said.
    let status = unsafe { dm_shape(mesh.mesh(), buffer.room.as_ptr(), buffer.capacity, buffer.len.as_ptr()) };
    let Some(len) = buffer.check(session, "dm_shape", status, ok(mesh)) else { return };
    let whole = Room::<i32>::new(1);
    // SAFETY: writable.
    assert_eq!(unsafe { dm_size(mesh.mesh(), std::ptr::null(), whole.as_ptr()) }, DM_STATUS_OK);
    assert_eq!((0..len).map(|at| buffer.room.get(at)).product::<i32>(), whole.get(0));
    assert_eq!(len, dm_ndim(mesh.mesh()));
}

fn size(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let (dim, out) = (session.dim_of(mesh), session.out::<i32>());
    // SAFETY: a string or NULL; writable or NULL.
    let status = unsafe { dm_size(mesh.mesh(), dim.as_ptr(), out.as_ptr()) };
    let given = Given { dead: !mesh.alive, wrong: out.is_null() || !dim.may_name_a_dimension(), ..Given::default() };
    if session.ended("dm_size", status, given, &[out.untouched()]) {
        assert!(out.get(0) >= 1);
    }
}

fn member(session: &mut Session<'_>) {
    let (mesh, out) = (session.mesh(), session.out::<bool>());
    let device = dm_device_type(mesh.mesh());
    assert_eq!(device.is_null(), !mesh.alive);
    // SAFETY: writable or NULL.
    let status = unsafe { dm_is_member(mesh.mesh(), out.as_ptr()) };
    let given = Given { dead: !mesh.alive, wrong: out.is_null(), ..Given::default() };
    if !session.ended("dm_is_member", status, given, &[out.untouched()]) {
        return;
    }
    let (ndim, len) = (dm_ndim(mesh.mesh()), Room::<usize>::new(1));
    let place = Room::<i32>::new(ndim);
    // SAFETY: as much room as said.
    let status = unsafe { dm_get_coordinate(mesh.mesh(), place.as_ptr(), ndim, len.as_ptr()) };
    assert_eq!(status == DM_STATUS_OK, out.get(0), "a rank has a place where it is a member");
}

fn rank(session: &mut Session<'_>) {
    let (mesh, out) = (session.mesh(), session.out::<i32>());
    // SAFETY: writable or NULL.
    let status = unsafe { dm_rank(mesh.mesh(), out.as_ptr()) };
    session.ended(
        "dm_rank",
        status,
        Given { dead: !mesh.alive, wrong: out.is_null(), ..Given::default() },
        &[out.untouched()],
    );
}

fn local_rank(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let (dim, out) = (session.dim_of(mesh), session.out::<i32>());
    // SAFETY: a string or NULL; writable or NULL.
    let status = unsafe { dm_get_local_rank(mesh.mesh(), dim.as_ptr(), out.as_ptr()) };
    let given = Given { dead: !mesh.alive, wrong: out.is_null() || !dim.may_name_a_dimension(), ..Given::default() };
    if !session.ended("dm_get_local_rank", status, given, &[out.untouched()]) {
        return;
    }
    // The rank at my place in my group is me.
    let (there, me, back) = (Room::<i32>::new(1), Room::<i32>::new(1), Room::<i32>::new(1));
    // SAFETY: as above.
    unsafe {
        assert_eq!(dm_translate_rank(mesh.mesh(), dim.as_ptr(), out.get(0), there.as_ptr()), DM_STATUS_OK);
        assert_eq!(dm_rank(mesh.mesh(), me.as_ptr()), DM_STATUS_OK);
        assert_eq!(dm_translate_world_rank(mesh.mesh(), dim.as_ptr(), me.get(0), back.as_ptr()), DM_STATUS_OK);
    }
    assert_eq!((there.get(0), back.get(0)), (me.get(0), out.get(0)));
}

fn coordinate(session: &mut Session<'_>) {
    let (mesh, buffer) = (session.mesh(), Buffer::<i32>::pick(session));
    // SAFETY: as much room as said.
    let status = unsafe { dm_get_coordinate(mesh.mesh(), buffer.room.as_ptr(), buffer.capacity, buffer.len.as_ptr()) };
    buffer.check(session, "dm_get_coordinate", status, ok(mesh));
}

fn coordinate_of(session: &mut Session<'_>) {
    let (mesh, buffer) = (session.mesh(), Buffer::<i32>::pick(session));
    let rank = session.number() as i32;
    // SAFETY: as much room as said.
    let status =
        unsafe { dm_coordinate_of(mesh.mesh(), rank, buffer.room.as_ptr(), buffer.capacity, buffer.len.as_ptr()) };
    buffer.check(session, "dm_coordinate_of", status, ok(mesh));
}

fn ranks(session: &mut Session<'_>) {
    let (mesh, buffer) = (session.mesh(), Buffer::<i32>::pick(session));
    // SAFETY: as much room as said.
    let status = unsafe { dm_ranks(mesh.mesh(), buffer.room.as_ptr(), buffer.capacity, buffer.len.as_ptr()) };
    let Some(len) = buffer.check(session, "dm_ranks", status, ok(mesh)) else { return };
    let mut all: Vec<i32> = (0..len).map(|at| buffer.room.get(at)).collect();
    all.sort_unstable();
    assert!(all.windows(2).all(|two| two[0] < two[1]), "each rank once: {all:?}");
}

fn group_ranks(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let (dim, buffer) = (session.dim_of(mesh), Buffer::<i32>::pick(session));
    // SAFETY: a string or NULL; as much room as said.
    let status = unsafe {
        dm_group_ranks(mesh.mesh(), dim.as_ptr(), buffer.room.as_ptr(), buffer.capacity, buffer.len.as_ptr())
    };
    buffer.check(session, "dm_group_ranks", status, Given { wrong: !dim.may_name_a_dimension(), ..ok(mesh) });
}

fn replica_groups(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let (dim, buffer) = (session.dim_of(mesh), Buffer::<i32>::pick(session));
    // SAFETY: a string or NULL; as much room as said.
    let status = unsafe {
        dm_replica_groups(mesh.mesh(), dim.as_ptr(), buffer.room.as_ptr(), buffer.capacity, buffer.len.as_ptr())
    };
    buffer.check(session, "dm_replica_groups", status, Given { wrong: !dim.may_name_a_dimension(), ..ok(mesh) });
}

fn compare(session: &mut Session<'_>) {
    let (a, b) = (session.mesh(), session.mesh());
    // A bool is one byte. A byte that was not written is neither true nor false.
    let (equal, first, second) = (session.out::<u8>(), session.out::<u64>(), Room::<u64>::new(1));
    // SAFETY: writable or NULL.
    let status = unsafe { dm_equal(a.mesh(), b.mesh(), equal.as_ptr().cast()) };
    let given = Given { dead: !a.alive || !b.alive, wrong: equal.is_null(), ..Given::default() };
    let compared = session.ended("dm_equal", status, given, &[equal.untouched()]);
    // SAFETY: as above.
    let status = unsafe { dm_hash(a.mesh(), first.as_ptr()) };
    let given = Given { dead: !a.alive, wrong: first.is_null(), ..Given::default() };
    let hashed = session.ended("dm_hash", status, given, &[first.untouched()]);
    // SAFETY: as above.
    if compared && hashed && unsafe { dm_hash(b.mesh(), second.as_ptr()) } == DM_STATUS_OK {
        assert!(equal.get(0) <= 1);
        assert_eq!(equal.get(0) == 1, first.get(0) == second.get(0), "equal meshes and only they hash alike");
    }
}

fn describe(session: &mut Session<'_>) {
    let (mesh, buffer) = (session.mesh(), Buffer::<i8>::pick(session));
    // SAFETY: as much room as said.
    let status = unsafe { dm_describe(mesh.mesh(), buffer.room.as_ptr().cast(), buffer.capacity, buffer.len.as_ptr()) };
    if let Some(len) = buffer.check(session, "dm_describe", status, ok(mesh)) {
        assert!((0..len).all(|at| (buffer.room.get(at) == 0) == (at + 1 == len)), "the length counts the only NUL");
    }
}

fn neighbors(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let (dim, out) = (session.dim_of(mesh), session.out::<i32>());
    let number = session.number();
    let given = Given { dead: !mesh.alive, wrong: out.is_null() || !dim.may_name_a_dimension(), ..Given::default() };
    if session.rarely(2) {
        // SAFETY: a string or NULL; writable or NULL.
        let status = unsafe { dm_translate_rank(mesh.mesh(), dim.as_ptr(), number as i32, out.as_ptr()) };
        let given = Given { wrong: given.wrong || (number as i32) < 0, ..given };
        session.ended("dm_translate_rank", status, given, &[out.untouched()]);
    } else {
        let wrap = session.rarely(2);
        // SAFETY: as above.
        let status = unsafe { dm_neighbor(mesh.mesh(), dim.as_ptr(), number as i32, wrap, out.as_ptr()) };
        if session.ended("dm_neighbor", status, given, &[out.untouched()]) {
            assert!(out.get(0) >= 0 || !wrap && out.get(0) == -1);
        }
    }
}

fn shard(session: &mut Session<'_>) {
    let mesh = session.mesh();
    let placements: Vec<dm_placement> = (0..dm_ndim(mesh.mesh()))
        .map(|_| dm_placement {
            kind: if session.rarely(16) { session.number() as i32 } else { session.below(3) as i32 },
            tensor_dim: if session.rarely(16) { session.number() as i32 } else { session.below(2) as i32 },
            order: session.number() as i32,
            reserved: if session.rarely(32) { [0, 0, 0, 0, session.number() as u32] } else { [0; 5] },
        })
        .collect();
    let num_placements = number_of(session, placements.len());
    let tensor: Vec<usize> = (0..session.below(4)).map(|_| session.number() as usize).collect();
    let count = if session.rarely(32) { usize::MAX } else { tensor.len() };
    let rank = if session.rarely(2) { session.number() as i32 } else { -1 };
    let null = session.rarely(24);
    let sizes = if null { Room::null() } else { Room::<usize>::new(tensor.len()) };
    let offsets = Room::<usize>::new(tensor.len());
    // SAFETY: a placement for each dimension; as many elements as said, or a count that is refused.
    let status = unsafe {
        dm_local_shard(
            mesh.mesh(),
            Room::with(&placements).as_ptr(),
            num_placements,
            Room::with(&tensor).as_ptr(),
            count,
            rank,
            sizes.as_ptr(),
            offsets.as_ptr(),
        )
    };
    let wrong = count != tensor.len()
        || num_placements != placements.len()
        || rank < -1
        || null && !tensor.is_empty()
        || placements.iter().any(|given| !(DM_REPLICATE..=DM_PARTIAL).contains(&given.kind) || given.reserved[4] != 0)
        || placements.iter().any(|given| {
            given.kind == DM_SHARD && usize::try_from(given.tensor_dim).map_or(true, |dim| dim >= tensor.len())
        });
    let given = Given { dead: !mesh.alive, wrong, ..Given::default() };
    if session.ended("dm_local_shard", status, given, &[sizes.untouched(), offsets.untouched()]) {
        for (dim, whole) in tensor.iter().enumerate() {
            assert!(offsets.get(dim).checked_add(sizes.get(dim)).is_some_and(|end| end <= *whole), "dimension {dim}");
        }
    }
}

fn plan(session: &mut Session<'_>) {
    const PATHS: [&[u8]; 8] = [b"r0/h0", b"r0/h1", b"r1/h0", b"r1", b"", b"r0//h0", b"a/b/c/d", b"\xff"];
    let count = session.below(13);
    let bad = session.rarely(4);
    let paths: Vec<super::Text> = (0..count)
        .map(|_| {
            let path = session.below(if bad { PATHS.len() } else { 5 });
            super::Text::new(PATHS[path])
        })
        .collect();
    let wrong_path = paths.iter().any(|path| !path.is_utf8() || path.bytes() == b"r0//h0");
    let paths = Texts::new(paths);
    let mut shape: Vec<i32> = (0..session.below(4)).map(|_| 1 + session.below(4) as i32).collect();
    if session.rarely(4) {
        shape.push(session.number() as i32);
    }
    let traffic: Vec<u32> = shape.iter().map(|_| session.number() as u32).collect();
    let size = shape.iter().try_fold(1usize, |product, size| product.checked_mul(usize::try_from(*size).ok()?));
    let fits = size.filter(|size| *size <= count && *size > 0);
    let out = if session.rarely(24) { Room::null() } else { Room::<i32>::new(fits.unwrap_or(0)) };
    let report = if session.rarely(2) {
        Buffer::<i8>::pick(session)
    } else {
        Buffer { room: Room::null(), capacity: 0, len: Room::null() }
    };
    let weights = if session.rarely(2) { Room::with(&traffic) } else { Room::null() };
    let sizes = Room::with(&shape);
    let size = session.struct_size(size_of::<dm_plan_options>());
    let options = dm_plan_options {
        struct_size: size,
        flags: if session.rarely(32) { session.number() as u32 } else { 0 },
        world_size: count as i32,
        locations: paths.pointers.as_ptr(),
        shape: sizes.as_ptr(),
        ndim: shape.len(),
        traffic: weights.as_ptr(),
    };
    let place = if session.rarely(32) { Room::null() } else { sized(size, options) };
    // SAFETY: as many of each as said; the ranks have room for the shape where it fits.
    let status = unsafe {
        dm_plan_ranks(place.as_ptr(), out.as_ptr(), report.room.as_ptr().cast(), report.capacity, report.len.as_ptr())
    };
    let refused = place.is_null() || !(48..=4096).contains(&size) || options.flags != 0;
    let wrong =
        refused || out.is_null() || fits.is_none() || wrong_path || !report.room.is_null() && report.len.is_null();
    if status == DM_STATUS_BUFFER_TOO_SMALL {
        assert!(report.len.get(0) > report.capacity);
    }
    let outs = [fits == Some(0) || out.untouched(), report.room.untouched()];
    if session.ended("dm_plan_ranks", status, Given { dead: false, wrong, ..Given::default() }, &outs) {
        let mut planned: Vec<i32> = (0..fits.unwrap_or(0)).map(|at| out.get(at)).collect();
        planned.sort_unstable();
        assert!(
            planned.windows(2).all(|two| two[0] < two[1])
                && planned.iter().all(|rank| (0..count as i32).contains(rank))
        );
    }
}
