//! How a caller names a dimension.

use std::ffi::{CStr, c_char};

use super::arguments::optional_text;
use super::make::{FastPart, find};
use super::types::dm_mesh;
use crate::error::{Error, Result};
use crate::mesh::Mesh;

impl FastPart {
    /// Returns the index of the dimension of that name. NULL names the only dimension. `None` where
    /// no dimension of this view has the name. The name may still belong to a flattened dimension,
    /// which `along` finds. This function only compares names, because it has to be fast.
    ///
    /// # Safety
    /// `dim` is NULL or NUL-terminated.
    #[inline]
    pub(super) unsafe fn index(&self, dim: *const c_char) -> Option<usize> {
        if dim.is_null() {
            return (self.names.len() == 1).then_some(0);
        }
        // SAFETY: the caller's contract.
        self.names.iter().position(|name| unsafe { is_name(name, dim) })
    }
}

/// Whether a C string is this name. Names are a few bytes long: a plain loop is faster than strlen
/// and memcmp.
///
/// # Safety
/// `text` is NUL-terminated.
#[inline]
unsafe fn is_name(name: &CStr, text: *const c_char) -> bool {
    // SAFETY: the first difference ends the comparison, at the latest where `text` ends, since the
    // name's bytes end with the only NUL.
    name.to_bytes_with_nul().iter().enumerate().all(|(at, byte)| unsafe { *text.add(at) as u8 == *byte })
}

/// Reads the name of a dimension; `None` for NULL, which names the only dimension.
///
/// # Safety
/// `dim` is NULL or NUL-terminated and stays so while the name is used.
pub(super) unsafe fn dim_text<'a>(dim: *const c_char) -> Result<Option<&'a str>> {
    // SAFETY: the caller's contract.
    match unsafe { optional_text("dim", dim)? } {
        Some("") => Err(Error::invalid("dim is empty")),
        dim => Ok(dim),
    }
}

/// Returns the mesh in which the dimension of that name is, and its index there: this mesh, or for
/// a flattened dimension the view of it. `dim` may be NULL on a 1-D mesh.
///
/// # Safety
/// `dim` is NULL or NUL-terminated.
pub(super) unsafe fn mesh_along(mesh: *const dm_mesh, dim: *const c_char) -> Result<(Mesh, usize)> {
    let view = find(mesh)?;
    // SAFETY: the caller's contract.
    view.mesh().along(unsafe { dim_text(dim)? })
}
