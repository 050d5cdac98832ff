//! The report of a check. Its fields are the JSON report, whose schema is in docs/check.md. Fields
//! are only added to it.

use serde::Serialize;

use super::exit_code::{SLOW, WRONG_DATA};
use super::verify::Wrong;

/// The name and version of the schema.
pub const SCHEMA: &str = "devicemesh.check/1";

/// Everything that a check has found.
#[derive(Serialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// The version of the tool.
    pub version: &'static str,
    /// "good", "slow" or "wrong".
    pub verdict: &'static str,
    /// The mesh in the words of `dm_describe`.
    pub mesh: String,
    pub device_type: String,
    /// The name and the version of the communicator library.
    pub library: String,
    pub library_version: String,
    /// The launcher that started the ranks.
    pub launcher: String,
    pub world_size: usize,
    /// The type of the elements.
    pub dtype: &'static str,
    /// The most calls of a batch.
    pub iterations: u32,
    /// The calls before the first batch.
    pub warmup: u32,
    /// The number of batches.
    pub repeats: u32,
    /// How many times as long as its peers a slow group or rank takes.
    pub slow_factor: f64,
    /// How many ranks share a core, on the host where they are most. 0 on devices.
    pub ranks_per_core: f64,
    pub hosts: Vec<Host>,
    pub ranks: Vec<Rank>,
    pub dimensions: Vec<Dimension>,
    pub wrong: Vec<Wrong>,
    pub slow_dimensions: Vec<SlowDimension>,
    pub slow_groups: Vec<SlowGroup>,
    pub slow_ranks: Vec<SlowRank>,
    /// How long the check took.
    pub seconds: f64,
}

/// A host with its world ranks.
#[derive(Serialize)]
pub struct Host {
    pub name: String,
    pub ranks: Vec<usize>,
}

/// A rank by itself.
#[derive(Serialize)]
pub struct Rank {
    pub rank: usize,
    pub host: String,
    /// The name of its device. Null on the host.
    pub device: Option<String>,
    /// The bandwidth of copies in its own memory. Null where it was not measured.
    pub copy_gbps: Option<f64>,
}

/// A dimension of the mesh, or a flattened one.
#[derive(Serialize)]
pub struct Dimension {
    pub name: String,
    pub size: usize,
    /// The number of its groups.
    pub groups: usize,
    /// The verified calls of all ranks together.
    pub verified_calls: usize,
    pub measurements: Vec<Measurement>,
}

/// How long a collective takes at one size. Times are seconds per call. The time of a group is that
/// of its slowest rank in the median batch.
#[derive(Serialize)]
pub struct Measurement {
    pub collective: &'static str,
    /// The size of the larger buffer.
    pub bytes: usize,
    /// The calls of a batch.
    pub iterations: u32,
    /// The time of the median group.
    pub seconds: f64,
    /// The algorithm bandwidth and the bus bandwidth of the median group, as nccl-tests defines
    /// them.
    pub algbw_gbps: f64,
    pub busbw_gbps: f64,
    /// The time of the slowest group.
    pub slowest_seconds: f64,
    /// The world ranks of the slowest group.
    pub slowest_group: Vec<i32>,
}

/// A dimension that does not reach the bandwidth of `--expect`.
#[derive(Serialize)]
pub struct SlowDimension {
    pub dimension: String,
    pub collective: &'static str,
    /// The size at which the bandwidth was measured.
    pub bytes: usize,
    pub busbw_gbps: f64,
    /// The value of `--expect`.
    pub expected_gbps: f64,
}

/// A group that takes longer than the other groups of its dimension.
#[derive(Serialize)]
pub struct SlowGroup {
    pub dimension: String,
    /// Its world ranks.
    pub ranks: Vec<i32>,
    /// The hosts of its ranks.
    pub hosts: Vec<String>,
    /// How many times as long as its peers it takes, at the most.
    pub times: f64,
    /// The collectives and sizes at which it is slow.
    pub evidence: Vec<Evidence>,
}

/// A collective and a size at which a group is slow.
#[derive(Serialize)]
pub struct Evidence {
    pub collective: &'static str,
    pub bytes: usize,
    /// How many times as long as its peers the group takes.
    pub times: f64,
}

/// A rank that is slow, or that is likely to be the reason for slow groups.
#[derive(Serialize)]
pub struct SlowRank {
    pub rank: i32,
    pub host: String,
    /// "copy" where its own memory is slow. "crossing" where it is in a slow group along every
    /// dimension that has any.
    pub evidence: &'static str,
    /// How many times as long as the other ranks it takes for a copy.
    pub times: Option<f64>,
}

impl Report {
    /// The exit code of a check with this report.
    pub fn exit_code(&self, fail_slow: bool) -> u8 {
        match self.verdict {
            "wrong" => WRONG_DATA,
            "slow" if fail_slow => SLOW,
            _ => 0,
        }
    }

    /// The report as one line of JSON.
    pub fn json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default() + "\n"
    }
}

/// The report of a check that could not be made.
pub fn failure(status: &str, message: &str) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let error = serde_json::json!({ "status": status, "message": message });
    serde_json::json!({ "schema": SCHEMA, "version": version, "verdict": "error", "error": error }).to_string()
}
