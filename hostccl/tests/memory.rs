//! How much shared memory communicators keep once they are used.

mod common;

use std::ffi::c_int;
use std::fs;
use std::ptr::null_mut;

use common::{Comm, ok, ranks, sum};
use hostccl::types::*;
use hostccl::*;
use plain::numbers::{are_all, floats};

/// Returns how many bytes of shared memory the communicators of this process keep.
///
/// All ranks are threads of this process, and each maps the memory for itself. The kernel divides a
/// page among its mappings (Pss), so the sum over all mappings counts each page once.
fn kept() -> usize {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut is_ours, mut kilobytes) = (false, 0);
    for line in smaps.lines() {
        match line.strip_prefix("Pss:") {
            Some(size) if is_ours => {
                kilobytes += size.trim().trim_end_matches(" kB").parse::<usize>().unwrap();
            }
            None if line.split(' ').next().is_some_and(|range| range.contains('-')) => {
                is_ours = line.contains("/memfd:hostccl");
            }
            _ => {}
        }
    }
    kilobytes << 10
}

/// Adds up `data` over the ranks, in place.
fn all_reduce(comm: &Comm, data: &mut [f32]) {
    let (at, dtype, op) = (data.as_mut_ptr().cast::<std::ffi::c_void>(), DataType::Float32, ReduceOp::Sum);
    // SAFETY: the buffer has that many elements.
    ok(unsafe { ncclAllReduce(at, at, data.len(), dtype as c_int, op as c_int, **comm, null_mut()) });
}

/// The dimensions of a mesh are used one after the other, and each keeps the staging memory of its
/// communicators. Together they may not take more for a larger host.
#[test]
fn a_mesh_of_64_ranks_keeps_at_most_64_megabytes() {
    let kept_by_rank = ranks(64, |world, rank| {
        let strides = [16, 4, 1];
        let along = strides.map(|stride| {
            let coordinate = rank / stride % 4;
            world.split((rank - coordinate * stride) as c_int, coordinate as c_int).unwrap()
        });
        // More than five chunks, so each staging slot is used whole.
        let mut data = floats(1.0, 1 << 20);
        for comm in &along {
            assert_eq!(comm.size(), 4);
            all_reduce(comm, &mut data);
        }
        assert!(are_all(&data, 64.0));
        sum(world, 1);
        let kept = if rank == 0 { kept() } else { 0 };
        sum(world, 1);
        kept
    });
    let kept = kept_by_rank[0];
    println!("{kept} bytes of shared memory");
    assert!(kept > 20 << 20, "{kept} bytes is less than the staging memory of one dimension");
    assert!(kept <= 64_000_000, "the communicators keep {kept} bytes of shared memory");
}
