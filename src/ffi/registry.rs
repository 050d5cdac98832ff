//! A mesh by name, for FFI handlers that can carry only attributes.

use std::collections::HashMap;
use std::ffi::c_char;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use once_cell::sync::Lazy;

use super::arguments::text;
use super::guard::guard;
use super::make::{find, handle};
use super::pointers::out;
use super::types::{dm_mesh, dm_status};
use crate::comm::View;
use crate::error::Error;

static NAMED: Lazy<Mutex<HashMap<String, Arc<View>>>> = Lazy::new(Mutex::default);

/// Keeps a view under a name, for dm_lookup anywhere in this process. It replaces an earlier view
/// of that name. dm_unregister removes the view.
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
        let _earlier = named().insert(name.to_owned(), view);
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
        let view = named().get(name).cloned();
        let token = handle(view.ok_or_else(|| unknown(name))?)?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { mesh_out.write(token as *mut dm_mesh) };
        Ok(())
    })
}

/// Lets the names of views of the root mesh of `before` lead to the same views of `next`, the mesh
/// that dm_recover gave in its place. A view that `next` cannot have, for example one of a range,
/// keeps its name, and calls on it say that it has ended.
pub(super) fn follow(before: &View, next: &View) {
    // The earlier views are dropped after the lock is given back: they may be the last of their
    // root mesh.
    let mut earlier = Vec::new();
    for view in named().values_mut() {
        let follower = if view.is_of_same_root(before) { view.followed_in(next) } else { None };
        if let Some(follower) = follower {
            earlier.push(std::mem::replace(view, Arc::new(follower)));
        }
    }
}

fn named() -> MutexGuard<'static, HashMap<String, Arc<View>>> {
    NAMED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unknown(name: &str) -> Error {
    let mut known: Vec<String> = named().keys().cloned().collect();
    known.sort();
    Error::not_found(format!("no mesh is registered as {name:?}; registered are ({})", known.join(", ")))
}
