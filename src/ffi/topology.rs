//! Rank plans.

use std::ffi::c_char;

use super::arguments::{check_flags, give_text, list, optional_text, read_struct, short_list, sizes};
use super::guard::ask;
use super::pointers::{null, out};
use super::release;
use super::structs::dm_plan_options;
use super::types::dm_status;
use crate::error::{Error, Result};
use crate::layout::row_major;
use crate::topology::plan;

/// Computes a rank array for dm_init_options.ranks in which the dimensions that talk most stay
/// inside the closest domains of the machine.
///
/// Local, no communication. Ranks that pass equal options get equal plans. locations has world_size
/// paths, one for each world rank, from far to near: "rack1/host3/nvl0" (dm_world_locations gathers
/// them). Level 0 of this path is the rack, and level 2 the NVLink domain; there are at most 32
/// levels. A name counts within the domain around it: host3 of rack1 is not host3 of rack2. Ranks
/// may have equal paths. A path that ends early, or is empty, puts its rank into a domain without a
/// name at the levels below, together with the other ranks whose paths lack these levels. shape has
/// ndim sizes whose product n is at most world_size: where the mesh has fewer ranks than the world,
/// the plan also chooses the ranks. ranks_out has n elements, row-major.
///
/// traffic has a weight for each dimension: how much a rank exchanges along it, evenly with the
/// ranks of its group (0: nothing). NULL: later dimensions talk more; the weight of each is the
/// product of the sizes up to its own, its own included. The plan makes this cost small:
///
/// ```c
/// cost = sum over dimensions d and levels l of  traffic[d] * pairs[d][l] * n / shape[d]
/// ```
///
/// where `pairs[d][l]` counts the ordered pairs of ranks that share a group along d and no domain
/// of level l. The candidates are the order 0 .. n-1, boxes of the mesh that nest as the domains
/// do, and row-major orders of the dimensions. In worlds of up to 1024 ranks, swaps improve them.
/// The candidate with the lowest cost is the plan, so it never costs more than the order 0 .. n-1.
/// A better order may exist, because finding the best one takes exponential time. On the machines
/// of up to 12 ranks that the tests search exhaustively, the plan is the best order.
///
/// The report is one line of JSON, and *len_out its length with the NUL. report NULL: the call
/// writes no report, and len_out may be NULL too.
///
/// ```c
/// {"ranks":8,"world_size":8,"domains":[2],"cost":64,"identity_cost":256,"even":true,"dimensions":[
///  {"size":2,"traffic":2,"groups":4,"crossing_groups":[4],"most_domains":[2],"pairs":[8],"cost":64},
///  {"size":4,"traffic":8,"groups":2,"crossing_groups":[0],"most_domains":[1],"pairs":[0],"cost":0}]}
/// ```
///
/// The lists have one number for each level: domains counts the domains of the world,
/// crossing_groups the dimension's groups whose ranks are in different domains, most_domains the
/// domains of the group that has the most, and pairs is as in the cost above. identity_cost is the
/// cost of the order 0 .. n-1. even is false when the mesh does not fall into equal boxes, one for
/// each domain: the shape or the machine does not divide, and some groups of a dimension cross more
/// domains than others. Costs are integers and can have more than 64 bits.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT (NULL, also as a path; an empty component as in
/// "rack1//nvl0"; a size of 0; n larger than world_size), DM_STATUS_BUFFER_TOO_SMALL (capacity is
/// too small for the report: *len_out has its length, and ranks_out is not written),
/// DM_STATUS_UNSUPPORTED (see dm_version).
///
/// # Safety
/// Pointers are NULL or point to as many elements as said; paths are NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_plan_ranks(
    options: *const dm_plan_options,
    ranks_out: *mut i32,
    report: *mut c_char,
    capacity: usize,
    len_out: *mut usize,
) -> dm_status {
    ask(|| {
        release::check()?;
        let ranks_out = out("ranks_out", ranks_out)?;
        if options.is_null() {
            return Err(null("options"));
        }
        if len_out.is_null() && !report.is_null() {
            return Err(null("len_out"));
        }
        // SAFETY: not NULL, and the caller's contract.
        let options = unsafe { read_struct("options", options)? };
        check_flags("options", options.flags, 0)?;
        let ndim = options.ndim;
        // SAFETY: the caller's contract.
        let (shape, traffic) = unsafe {
            (
                sizes("options.shape", options.shape, ndim)?,
                if options.traffic.is_null() {
                    None
                } else {
                    Some(short_list("options.traffic", options.traffic, ndim)?)
                },
            )
        };
        let world_size = check_size(&shape, options.world_size)?;
        // SAFETY: the caller's contract.
        let paths = unsafe { paths(list("options.locations", options.locations, world_size)?)? };
        let plan = plan(&paths, &shape, traffic)?;
        let text = plan.report();
        if !report.is_null() {
            // SAFETY: the caller's contract.
            unsafe { give_text("report", &text, report, capacity, len_out)? };
        } else if !len_out.is_null() {
            // SAFETY: not NULL, and writable by the caller's word.
            unsafe { len_out.write(text.len() + 1) };
        }
        // SAFETY: not NULL, and n elements are writable by the caller's word.
        unsafe { std::ptr::copy_nonoverlapping(plan.ranks.as_ptr(), ranks_out.as_ptr(), plan.ranks.len()) };
        Ok(())
    })
}

/// Checks the sizes before a list of that length is read.
fn check_size(shape: &[usize], world_size: i32) -> Result<usize> {
    row_major(shape)?;
    match world_size {
        1.. => Ok(world_size as usize),
        _ => Err(Error::invalid(format!("options.world_size is {world_size}; a world has at least 1 rank"))),
    }
}

/// # Safety
/// Each is NULL or NUL-terminated and lives as long as the result is used.
unsafe fn paths<'a>(locations: &[*const c_char]) -> Result<Vec<&'a str>> {
    let path = |(rank, path): (usize, &*const c_char)| {
        // SAFETY: the caller's contract.
        match unsafe { optional_text("path", *path) } {
            Ok(Some(path)) => Ok(path),
            Ok(None) => Err(null(format_args!("locations[{rank}]"))),
            Err(error) => Err(error.within(&format!("locations[{rank}]"))),
        }
    };
    locations.iter().enumerate().map(path).collect()
}
