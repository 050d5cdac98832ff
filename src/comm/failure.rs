//! Keeps how a communicator failed, and finds the rank that is to blame.

use std::sync::OnceLock;

use hostccl::FAILED_EARLIER;

use crate::ccl::{Library, RawComm};
use crate::error::{Error, Status};
use crate::mesh::Mesh;

/// The first failure of a communicator, once this rank knows of one. Later failures follow from the
/// first, so only the first is kept.
#[derive(Debug, Default)]
pub(super) struct FirstFailure(OnceLock<Failure>);

#[derive(Debug)]
struct Failure {
    status: Status,
    /// The `ncclResult_t` of the call that failed.
    ccl_result: i32,
    /// The ranks of the world that the failure is about ([`Error::ranks`]).
    ranks: Vec<i32>,
    /// Which call failed and why. This text continues a message after "failed earlier".
    how: String,
}

impl FirstFailure {
    /// Whether a failure is known.
    pub(super) fn is_known(&self) -> bool {
        self.0.get().is_some()
    }

    /// Keeps `error`, unless an earlier failure is known.
    pub(super) fn note(&self, error: &Error) {
        let how = match error.message().split_once(FAILED_EARLIER) {
            // The engine's own message says already that the failure came before.
            Some((_, how)) => how.to_owned(),
            None => format!(": {}", error.message()),
        };
        let ranks = error.ranks().to_vec();
        let _ = self.0.set(Failure { status: error.status(), ccl_result: error.ccl_result(), ranks, how });
    }

    /// The error of a call that comes after the failure. It says which call failed, and what to do.
    /// `label` names the communicator.
    pub(super) fn later_error(&self, label: impl FnOnce() -> String) -> Option<Error> {
        let Failure { status, ccl_result, ranks, how } = self.0.get()?;
        let message = format!(
            "the communicator of {} {FAILED_EARLIER}{how}; it is of no further use, make the mesh anew (dm_init)",
            label()
        );
        Some(Error::new(*status, message).with_ccl_result(*ccl_result).with_ranks(ranks))
    }
}

/// Whether the error says that the communicator had failed before the call began.
pub(super) fn is_repeated(library: &Library, error: &Error) -> bool {
    library.is_host_engine() && error.message().contains(FAILED_EARLIER)
}

/// Makes the host engine call the ranks of a new communicator of `group` by their world ranks.
pub(super) fn name_ranks(library: &Library, raw: RawComm, group: &Mesh) {
    // Without names, messages count within the communicator and say so.
    let _ = library.set_names(raw, group.ranks().as_slice());
}

/// The error of a call on a communicator of `group`. Where the library knows which rank is lost,
/// late, or without a resource that it needs, the error names that rank by its world rank.
pub(super) fn blame(library: &Library, raw: RawComm, group: &Mesh, error: Error) -> Error {
    let said = match error.status() {
        Status::PeerLost => "was lost",
        Status::Timeout => "did not come",
        Status::Ccl => "",
        _ => return error,
    };
    let lost = library.lost_rank(raw).and_then(|lost| Some((lost, *group.ranks().get(lost)?)));
    let Some((lost, world_rank)) = lost else { return error };
    if said.is_empty() {
        // The operating system has refused that rank something. The message says so already.
        return error.with_ranks(&[world_rank]);
    }
    error.within(&format!("rank {world_rank} {said} (rank {lost} of {})", group.describe())).with_ranks(&[world_rank])
}
