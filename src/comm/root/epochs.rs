//! The parts of a root mesh that belong to its epoch (docs/recovery.md): the result of the recovery
//! that made it, and the options and dimensions that the mesh of the next epoch gets from it.

use std::sync::PoisonError;

use super::super::options::DimOptions;
use super::super::path::MadeDims;
use super::super::recovered::Recovered;
use super::RootComms;

impl RootComms {
    /// The number of the epoch in which the root was made.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The options with which the root's own dimensions were made, also on a rank that is not in
    /// the mesh; empty for the defaults.
    pub(in crate::comm) fn options_of_dims(&self) -> &[DimOptions] {
        &self.options
    }

    /// Notes dimensions that a call has made.
    pub(in crate::comm) fn note_made(&self, made: MadeDims) {
        let mut known = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if known.iter().all(|known| known.path != made.path) {
            known.push(made);
        }
    }

    /// The dimensions that calls have made, in their order.
    pub(in crate::comm) fn made(&self) -> Vec<MadeDims> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces what is known of the dimensions that calls have made.
    pub(in crate::comm) fn set_made(&self, made: Vec<MadeDims>) {
        *self.made.lock().unwrap_or_else(PoisonError::into_inner) = made;
    }

    /// The result of the recovery that made this root. For a root that no recovery made, the result
    /// says that nobody was lost and nobody has joined.
    pub fn recovered(&self) -> &Recovered {
        self.recovered.get_or_init(|| Recovered::none(&self.mesh, self.epoch))
    }

    /// Notes the result of the recovery that made this root.
    pub(in crate::comm) fn set_recovered(&self, recovered: Recovered) {
        let _ = self.recovered.set(recovered);
    }
}
