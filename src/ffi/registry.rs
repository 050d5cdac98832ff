//! A mesh by name, for FFI handlers that can carry only attributes.

use std::collections::HashMap;
use std::ffi::c_char;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use once_cell::sync::Lazy;

use super::arguments::text;
use super::guard::guard;
use super::make::{find, handle};
use super::pointers::out;
use super::types::{dm_mesh, dm_status};
use crate::comm::{RootComms, View};
use crate::error::Error;

static NAMED: Lazy<Mutex<HashMap<String, Named>>> = Lazy::new(Mutex::default);

/// The view that a name leads to.
struct Named {
    view: Arc<View>,
    /// The mesh that the last recovery gave, where that mesh has no such view on this rank, for
    /// example because this rank has no place in the mesh. The next recovery tries again. `None`
    /// where the view belongs to the mesh of the last recovery, or to no recovered mesh.
    missed: Option<Weak<RootComms>>,
}

/// Keeps a view under a name, for dm_lookup anywhere in this process. The view replaces an earlier
/// one of that name. dm_unregister removes the view.
///
/// Local. The handle may be freed: the registry keeps the view, and with it the view's world, until
/// dm_unregister. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (name is NULL or
/// empty).
///
/// # Safety
/// name is NULL or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_register(mesh: *const dm_mesh, name: *const c_char) -> dm_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let name = unsafe { text("name", name)? };
        if name.is_empty() {
            return Err(Error::invalid("name is empty"));
        }
        // The earlier view is dropped after the lock is given back: it may be the last of its
        // world.
        let view = find(mesh)?;
        let _earlier = named().insert(name.to_owned(), Named { view, missed: None });
        Ok(())
    })
}

/// Forgets the view that was registered under that name.
///
/// Local. Errors: DM_STATUS_NOT_FOUND (lists the names there are), DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// name is NULL or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_unregister(name: *const c_char) -> dm_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let name = unsafe { text("name", name)? };
        // The view is dropped after the lock is given back: it may be the last of its world.
        let removed = named().remove(name);
        removed.map(drop).ok_or_else(|| unknown(name))
    })
}

/// Gives a new handle of the view that was registered under that name. The caller frees it with
/// dm_free.
///
/// Local. Errors: DM_STATUS_NOT_FOUND (lists the names there are), DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// name is NULL or NUL-terminated; mesh_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_lookup(name: *const c_char, mesh_out: *mut *mut dm_mesh) -> dm_status {
    guard(|| {
        let mesh_out = out("mesh_out", mesh_out)?;
        // SAFETY: the caller's contract.
        let name = unsafe { text("name", name)? };
        let view = named().get(name).map(|named| Arc::clone(&named.view));
        let token = handle(view.ok_or_else(|| unknown(name))?)?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { mesh_out.write(token as *mut dm_mesh) };
        Ok(())
    })
}

/// Makes each name that leads to a view of the root mesh of `before` lead to the same view of
/// `next`, the mesh that dm_recover gave in its place. A view that `next` cannot have keeps its
/// name, and calls on it say that it has ended. If a later recovery gives a mesh with the view, the
/// name then leads to that view. This happens on a rank whose replica was left out and came back.
pub(super) fn follow(before: &View, next: &View) {
    // The earlier views are dropped after the lock is given back: they may be the last of their
    // root mesh.
    let mut earlier = Vec::new();
    for named in named().values_mut() {
        let Named { view, missed } = named;
        let is_of_before = match missed {
            Some(root) => std::ptr::eq(root.as_ptr(), Arc::as_ptr(before.root_comms())),
            None => view.is_of_same_root(before),
        };
        if !is_of_before {
            continue;
        }
        *missed = match view.followed_in(next) {
            Some(follower) => {
                earlier.push(std::mem::replace(view, Arc::new(follower)));
                None
            }
            None => Some(Arc::downgrade(next.root_comms())),
        };
    }
}

fn named() -> MutexGuard<'static, HashMap<String, Named>> {
    NAMED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unknown(name: &str) -> Error {
    let mut known: Vec<String> = named().keys().cloned().collect();
    known.sort();
    Error::not_found(format!("no mesh is registered as {name:?}; registered are ({})", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::two_ranks::two_ranks;
    use crate::mesh::{Mesh, MeshSpec};

    #[test]
    fn a_name_that_one_recovered_mesh_lacks_follows_to_the_next_one() {
        two_ranks(|world| {
            let made = |shape: &[usize], ranks: &[i32]| {
                let spec = MeshSpec::new("cpu", shape, 2, world.rank()).names(&["dp", "tp"]);
                let mesh = Mesh::new(&MeshSpec { ranks: Some(ranks), ..spec }).unwrap();
                View::of_root(RootComms::create(world, mesh, &Default::default()).unwrap())
            };
            let (first, smaller, last) = (made(&[2, 1], &[0, 1]), made(&[1, 1], &[1]), made(&[2, 1], &[0, 1]));
            // The ranks are threads of one process, which has one registry.
            let name = format!("registry test, rank {}", world.rank());
            let view = Arc::new(first.submesh(&["tp"], 1).unwrap());
            named().insert(name.clone(), Named { view: Arc::clone(&view), missed: None });
            let found = || Arc::clone(&named()[&name].view);
            // The smaller mesh has only one copy of tp, so the name stays.
            follow(&first, &smaller);
            assert!(found().is_of_same_root(&first));
            follow(&smaller, &last);
            assert!(found().is_of_same_root(&last) && found().mesh().ranks() == [1]);
            named().remove(&name);
        });
    }
}
