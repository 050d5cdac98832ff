//! The report of a check. Its fields are the JSON report, whose schema is in docs/check.md. Fields
//! are only added to it.

use std::collections::BTreeMap;

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
    /// When the report was made, in UTC.
    pub date: String,
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
    /// The factor by which a slow group or rank takes longer than its peers.
    pub slow_factor: f64,
    /// The number of ranks for each core, on the host where it is largest. It is 0 on devices.
    pub ranks_per_core: f64,
    pub hosts: Vec<Host>,
    pub ranks: Vec<Rank>,
    pub dimensions: Vec<Dimension>,
    /// The pairs of ranks within hosts, then those between hosts, each by size.
    pub pairs: Vec<Pairs>,
    pub wrong: Vec<Wrong>,
    pub slow_dimensions: Vec<SlowDimension>,
    pub slow_groups: Vec<SlowGroup>,
    pub slow_ranks: Vec<SlowRank>,
    pub slow_pairs: Vec<SlowPair>,
    pub slow_hosts: Vec<SlowHost>,
    /// The findings of the comparison, with `--compare`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comparison: Option<Comparison>,
    /// The seconds that the check took.
    pub seconds: f64,
}

/// A host with its world ranks.
#[derive(Serialize)]
pub struct Host {
    pub name: String,
    pub ranks: Vec<usize>,
    /// The boot id of the kernel on which its ranks run, or the host's name where /proc does not
    /// show the boot id. Null where its first rank could not read /proc. It is equal for all hosts
    /// of one machine, for example containers.
    pub machine: Option<String>,
    /// The median bandwidth between this host and the others with the largest size. Null where it
    /// was not measured.
    pub pair_gbps: Option<f64>,
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

/// The times of a collective at one size, in seconds per call. The time of a group is the time of
/// its slowest rank in the median batch.
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
    /// The time of the median group in each batch. Rows that were measured again have more batches.
    pub batch_seconds: Vec<f64>,
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
    /// Its time, divided by the time of its peers, where this factor is largest.
    pub times: f64,
    /// The collectives and sizes at which it is slow.
    pub evidence: Vec<Evidence>,
}

/// A collective and a size at which a group is slow.
#[derive(Serialize)]
pub struct Evidence {
    pub collective: &'static str,
    pub bytes: usize,
    /// The time of the group, divided by the time of its peers.
    pub times: f64,
}

/// The exchange of data between pairs of ranks at one size. Both ranks send at the same time, and
/// bandwidths are those of one direction.
#[derive(Serialize)]
pub struct Pairs {
    /// "within hosts" or "between hosts".
    pub kind: &'static str,
    /// The bytes that each rank sends.
    pub bytes: usize,
    /// The number of pairs that were measured, and the number of pairs that were not.
    pub pairs: usize,
    pub left_out: usize,
    /// The calls of a batch of the slowest pair. Faster pairs make more.
    pub iterations: u32,
    /// The time and the bandwidth of the median pair.
    pub seconds: f64,
    pub gbps: f64,
    /// The time of the median pair in each batch.
    pub batch_seconds: Vec<f64>,
    pub slowest: Pair,
}

/// A pair of ranks.
#[derive(Serialize)]
pub struct Pair {
    /// The world ranks, and the host of each.
    pub ranks: [usize; 2],
    pub hosts: [String; 2],
    pub seconds: f64,
    pub gbps: f64,
}

/// A pair that takes longer than the other pairs of its kind.
#[derive(Serialize)]
pub struct SlowPair {
    /// "within hosts" or "between hosts".
    pub kind: &'static str,
    pub ranks: [usize; 2],
    pub hosts: [String; 2],
    /// Its time, divided by the time of its peers, where this factor is largest.
    pub times: f64,
    /// The sizes at which it is slow.
    pub evidence: Vec<PairEvidence>,
}

/// A host most of whose pairs with other hosts are slow.
#[derive(Serialize)]
pub struct SlowHost {
    pub host: String,
    /// The time of its slow pairs, divided by the time of their peers. It is the median of its
    /// slow pairs, at the size where this median is largest.
    pub times: f64,
    /// The number of its slow pairs, and the number of all its pairs.
    pub slow_pairs: usize,
    pub pairs: usize,
    /// The medians of its slow pairs, by size.
    pub evidence: Vec<PairEvidence>,
}

/// A size at which a pair is slow.
#[derive(Serialize, Clone)]
pub struct PairEvidence {
    pub bytes: usize,
    /// The time of the pair, divided by the time of its peers.
    pub times: f64,
    /// The time of the pair, and the median of the other pairs.
    pub seconds: f64,
    pub median_seconds: f64,
}

/// A rank that is slow, or that is likely to be the reason for slow groups.
#[derive(Serialize)]
pub struct SlowRank {
    pub rank: i32,
    pub host: String,
    /// "copy": its own memory is slow. "pairs": most of its pairs are slow. "crossing": it is in a
    /// slow group along every dimension that has slow groups.
    pub evidence: &'static str,
    /// The time of its copies or its pairs, divided by the time of the other ranks'. It is null for
    /// "crossing".
    pub times: Option<f64>,
}

/// The findings of a comparison. They are a field of the JSON report.
#[derive(Serialize)]
pub struct Comparison {
    /// The file of the record, and when the record was made.
    pub file: String,
    pub date: Option<String>,
    /// The share by which a row may take longer.
    pub tolerance: f64,
    /// The differences between the two checks, in words.
    pub differences: Vec<String>,
    /// The number of rows that both checks have.
    pub compared: usize,
    /// The number of rows that looked slower, and therefore got further batches.
    pub measured_again: usize,
    pub slower: Vec<Change>,
    pub faster: Vec<Change>,
    /// The rows that only this check has, and those that only the record has.
    pub only_now: Vec<String>,
    pub only_then: Vec<String>,
    /// The ratio of each row that both checks have. The table shows it.
    #[serde(skip)]
    pub ratios: Vec<Ratio>,
}

/// The time of a row, compared with its time in the record.
pub struct Ratio {
    pub row: String,
    /// The time as a multiple of the time in the record.
    pub times: f64,
    /// Why the row is neither slower nor faster although `times` is outside the tolerance. `None`
    /// for all other rows.
    pub uncounted: Option<Uncounted>,
}

/// Why a ratio outside the tolerance is no change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Uncounted {
    /// The difference is some microseconds, which is common between two checks.
    Microseconds,
    /// The difference is no longer than the time for which ranks wait for a shared core.
    SharedCores,
    /// The machine was busy, so the tolerance was larger.
    Busy,
    /// The check with the longer time had one batch that was about as quick as the other check.
    QuickBatch,
}

/// A row that takes another time than in the record.
#[derive(Serialize)]
pub struct Change {
    pub row: String,
    /// Its third quickest batch, now and in the record.
    pub seconds: f64,
    pub then_seconds: f64,
    /// The time as a multiple of the time in the record.
    pub times: f64,
}

impl Comparison {
    /// The ratio of that row, where the record has it too.
    pub fn ratio(&self, row: &str) -> Option<&Ratio> {
        self.ratios.iter().find(|ratio| ratio.row == row)
    }
}

/// Returns, for each machine with several hosts, the names of these hosts. The times between such
/// hosts do not measure a network of the cluster.
pub fn shared_machines(hosts: &[Host]) -> Vec<Vec<&str>> {
    let mut machines: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for host in hosts {
        if let Some(machine) = &host.machine {
            machines.entry(machine).or_default().push(&host.name);
        }
    }
    machines.into_values().filter(|hosts| hosts.len() > 1).collect()
}

impl Report {
    /// Adds what a comparison has found.
    pub fn compare(&mut self, comparison: Comparison) {
        if self.verdict == "good" && !comparison.slower.is_empty() {
            self.verdict = "slow";
        }
        self.comparison = Some(comparison);
    }

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

#[cfg(test)]
mod tests {
    use super::{Host, shared_machines};

    #[test]
    fn hosts_of_one_machine_are_found() {
        let host = |name: &str, machine: Option<&str>| Host {
            name: name.to_owned(),
            ranks: vec![],
            machine: machine.map(str::to_owned),
            pair_gbps: None,
        };
        let hosts =
            [host("a", Some("1")), host("b", Some("2")), host("c", Some("1")), host("d", None), host("e", None)];
        assert_eq!(shared_machines(&hosts), [["a", "c"]]);
    }
}
