//! Keeps how a communicator failed, and finds the rank that is to blame.

use std::sync::OnceLock;

use hostccl::FAILED_EARLIER;

use crate::ccl::{Library, RawComm};
use crate::error::{Error, Status};
use crate::mesh::Mesh;
use crate::rank_list::ranges;

/// The first failure of a communicator, once this rank knows of one. Later failures follow from the
/// first, so only the first is kept.
#[derive(Debug, Default)]
pub(super) struct FirstFailure(OnceLock<Failure>);

#[derive(Debug)]
struct Failure {
    /// The error of the call that failed: its status, codes and ranks.
    error: Error,
    /// Which call failed and why. This text continues a message after "failed earlier".
    how: String,
}

impl FirstFailure {
    /// Whether a failure is known.
    pub(super) fn is_known(&self) -> bool {
        self.0.get().is_some()
    }

    /// Keeps `error`, unless an earlier failure is known. Returns whether `error` is the first one.
    pub(super) fn note(&self, error: &Error) -> bool {
        let how = match error.message().split_once(FAILED_EARLIER) {
            // The engine's own message says already that the failure came before.
            Some((_, how)) => how.to_owned(),
            None => format!(": {}", error.message()),
        };
        self.0.set(Failure { error: error.clone(), how }).is_ok()
    }

    /// The error of a call that comes after the failure. The error says which call failed, and
    /// what to do. `label` names the communicator.
    pub(super) fn later_error(&self, label: impl FnOnce() -> String) -> Option<Error> {
        let Failure { error, how } = self.0.get()?;
        let message = format!(
            "the communicator of {} {FAILED_EARLIER}{how}; it is of no further use, make the mesh anew (dm_init)",
            label()
        );
        let later = Error::new(error.status(), message).with_ccl_result(error.ccl_result());
        Some(later.with_ranks(error.ranks()).with_lost(error.lost()))
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

/// The error of a call on a communicator of `group`, with the ranks that the library blames as
/// ranks of the world. Where a rank is lost or late, the message begins with that rank.
pub(super) fn blame(group: &Mesh, error: Error) -> Error {
    let error = with_world_ranks(group, error);
    let said = match (error.status(), error.lost()) {
        (Status::PeerLost, []) => "left",
        // Only some of several ranks are known to be lost.
        (Status::PeerLost, lost) if lost.len() < error.ranks().len() => "left or were lost",
        (Status::PeerLost, [_]) => "was lost",
        (Status::PeerLost, _) => "were lost",
        (Status::Timeout, _) => "did not come",
        _ => return error,
    };
    let ranks = error.ranks().to_vec();
    let of_group = group.ranks();
    let own = ranks.iter().filter_map(|rank| of_group.iter().position(|known| known == rank));
    let own: Vec<i32> = own.map(|rank| rank as i32).collect();
    match ranks.is_empty() {
        true => error,
        false => error.within(&format!("{} {said} ({} of {})", ranges(&ranks), ranges(&own), group.describe())),
    }
}

/// Translates the ranks of a communicator of `group` that its library blames into ranks of the
/// world.
pub(super) fn with_world_ranks(group: &Mesh, error: Error) -> Error {
    let ranks = group.ranks();
    let of = |lost: Option<bool>| -> Vec<i32> {
        let chosen = error.blamed().iter().filter(|(_, is_lost)| lost.is_none_or(|lost| lost == *is_lost));
        chosen.filter_map(|(rank, _)| ranks.get(*rank).copied()).collect()
    };
    let (all, lost) = (of(None), of(Some(true)));
    error.with_ranks(&all).with_lost(&lost)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::MeshSpec;

    #[test]
    fn several_ranks_are_told_in_the_plural() {
        let group = Mesh::new(&MeshSpec::new("cpu", &[4], 4, 0).names(&["dp"])).unwrap();
        let said = |blamed: &[(usize, bool)]| {
            let error = Error::new(Status::PeerLost, "a peer is gone").blaming(blamed.to_vec());
            let message = blame(&group, error).message().to_owned();
            message.split(" (").next().unwrap().to_owned()
        };
        assert_eq!(said(&[(1, false)]), "rank 1 left");
        assert_eq!(said(&[(1, true)]), "rank 1 was lost");
        assert_eq!(said(&[(1, true), (2, false)]), "ranks 1, 2 left or were lost");
        assert_eq!(said(&[(1, true), (2, true)]), "ranks 1, 2 were lost");
    }
}
