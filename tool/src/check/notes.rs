//! The notes in which each rank tells rank 0 what it found.

use devicemesh::error::{Error, Result, Status};
use serde::{Deserialize, Serialize};

use super::measure::Timed;
use super::pairs::Met;
use super::verify::Wrong;

/// The findings of one rank. Lists by dimension have the order of the mesh's dimensions, then of
/// the flattened ones.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Notes {
    /// The name of its device, where it has one.
    pub device: Option<String>,
    /// The boot id of the kernel on which it runs, or the host's name where /proc does not show the
    /// boot id. `None` where /proc could not be read.
    pub machine: Option<String>,
    /// The number of ranks for each core of its host. It is 0 on devices, which ranks do not share.
    pub ranks_per_core: f64,
    /// The number of calls that were verified, by dimension.
    pub calls: Vec<usize>,
    /// The first wrong results of each collective.
    pub wrong: Vec<Wrong>,
    /// The first world rank of this rank's group and this rank's position in the group, by
    /// dimension.
    pub groups: Vec<(i32, usize)>,
    /// The times of the calls, by dimension, collective and size.
    pub times: Vec<Vec<Vec<Timed>>>,
    /// Seconds per copy in its own memory, for each batch. Empty where it was not measured.
    pub copies: Vec<f64>,
    /// The times of the pairs of this rank and one with a higher number.
    pub met: Vec<Met>,
}

impl Notes {
    /// The notes as they pass through the store.
    pub fn encode(&self) -> Vec<u8> {
        // The notes consist of types that can always become JSON.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Reads what [`encode`](Notes::encode) has written.
    pub fn decode(text: &[u8]) -> Result<Notes> {
        serde_json::from_slice(text).map_err(|error| Error::new(Status::Store, format!("a rank's notes: {error}")))
    }
}
