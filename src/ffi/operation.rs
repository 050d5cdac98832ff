//! The view, the dimension and the thread's group, which all operations along a dimension look up.

use std::ffi::c_void;
use std::sync::Arc;

use super::guard::guard;
use super::make::find;
use super::types::{dm_mesh, dm_status};
use crate::ccl::{Library, NcclResult, RawComm};
use crate::comm::{Along, Operands, refuse_in_group};
use crate::error::Result;

/// An operation that a program calls.
pub(super) struct Operation<'v> {
    /// The name of the C function, for messages.
    pub(super) name: &'static str,
    /// The view in which the operation's dimension is.
    pub(super) view: Along<'v>,
}

/// Runs `body` with the operation `name` along a dimension of `mesh`, and the index of that
/// dimension. When the operation is refused inside a group of this thread, the group fails.
pub(super) fn operation<'a>(
    name: &'static str,
    mesh: *const dm_mesh,
    dim: impl FnOnce() -> Result<Option<&'a str>>,
    body: impl FnOnce(&Operation<'_>, usize) -> Result<()>,
) -> dm_status {
    guard(|| {
        let view = find(mesh).inspect_err(|error| refuse_in_group(None, error))?;
        let run = || {
            let (view, index) = view.along(dim()?)?;
            let operation = Operation { name, view };
            body(&operation, index).map_err(|error| operation.view.with_dim(error, index))
        };
        run().inspect_err(|error| refuse_in_group(view.library().ok().map(Arc::as_ref), error))
    })
}

impl Operation<'_> {
    /// Checks the buffers and has the library issue the operation.
    pub(super) fn run(
        &self,
        index: usize,
        operands: Operands,
        buffers: &[(&str, *const c_void)],
        issue: impl FnOnce(&Library, RawComm) -> NcclResult,
    ) -> Result<()> {
        self.view.operate(self.name, index, operands, buffers, issue)
    }
}
