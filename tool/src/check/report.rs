//! What rank 0 makes of all ranks' notes: one object, whose fields are the JSON report. Its schema is docs/check.md's; fields are only added to it.

use std::collections::BTreeMap;

use devicemesh::ccl::Library;
use devicemesh::error::{Error, Result, Status};
use serde::{Deserialize, Serialize};

use super::measure::{Plan, Timed, copies};
use super::operation::Collective;
use super::options::Options;
use super::slow::{Rule, crossing, median};
use super::verify::Wrong;
use super::{SLOW, WRONG_DATA};

const SCHEMA: &str = "devicemesh.check/1";

/// What one rank found.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Notes {
    pub device: Option<String>,
    /// Ranks for each core of its host.
    pub crowding: f64,
    /// By dimension: calls that were verified.
    pub calls: Vec<usize>,
    pub wrong: Vec<Wrong>,
    /// By dimension: the first world rank of its group, and its position there.
    pub groups: Vec<(i32, usize)>,
    /// By dimension, collective and size.
    pub times: Vec<Vec<Vec<Timed>>>,
    /// Seconds per copy in its own memory, of each batch.
    pub copies: Vec<f64>,
}

impl Notes {
    pub fn encode(&self) -> Vec<u8> {
        // Nothing in it can fail to become JSON.
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub fn decode(text: &[u8]) -> Result<Notes> {
        serde_json::from_slice(text).map_err(|error| Error::new(Status::Store, format!("a rank's notes: {error}")))
    }
}

/// What was checked.
pub struct Subject<'a> {
    pub mesh: String,
    pub library: &'a Library,
    pub device_type: &'a str,
    pub launcher: &'a str,
    /// By rank.
    pub hosts: &'a [String],
    pub dimensions: &'a [Measured<'a>],
    pub collectives: &'a [Collective],
    pub plan: &'a Plan,
    pub options: &'a Options,
    pub seconds: f64,
}

pub struct Measured<'a> {
    pub name: &'a str,
    pub size: usize,
}

#[derive(Serialize)]
pub struct Report {
    schema: &'static str,
    version: &'static str,
    pub verdict: &'static str,
    pub mesh: String,
    pub device_type: String,
    pub library: String,
    pub library_version: String,
    pub launcher: String,
    pub world_size: usize,
    pub dtype: &'static str,
    pub iterations: u32,
    pub warmup: u32,
    pub repeats: u32,
    pub slow_factor: f64,
    /// Ranks for each core, on the host where that is most; 0 on devices.
    pub ranks_per_core: f64,
    pub hosts: Vec<Host>,
    pub ranks: Vec<Rank>,
    pub dimensions: Vec<Dimension>,
    pub wrong: Vec<Wrong>,
    pub slow_dimensions: Vec<SlowDimension>,
    pub slow_groups: Vec<SlowGroup>,
    pub slow_ranks: Vec<SlowRank>,
    pub seconds: f64,
}

#[derive(Serialize)]
pub struct Host {
    pub name: String,
    pub ranks: Vec<usize>,
}

#[derive(Serialize)]
pub struct Rank {
    rank: usize,
    host: String,
    device: Option<String>,
    /// Of copies in its own memory; null where not measured.
    pub copy_gbps: Option<f64>,
}

#[derive(Serialize)]
pub struct Dimension {
    pub name: String,
    pub size: usize,
    pub groups: usize,
    /// Over all ranks.
    pub verified_calls: usize,
    pub measurements: Vec<Measurement>,
}

/// Times are seconds per call: a group's is that of its slowest rank, in the median batch.
#[derive(Serialize)]
pub struct Measurement {
    pub collective: &'static str,
    pub bytes: usize,
    pub iterations: u32,
    /// Of the median group.
    pub seconds: f64,
    pub algbw_gbps: f64,
    pub busbw_gbps: f64,
    pub slowest_seconds: f64,
    /// Its world ranks.
    pub slowest_group: Vec<i32>,
}

/// One that does not reach what `--expect` says.
#[derive(Serialize)]
pub struct SlowDimension {
    pub dimension: String,
    pub collective: &'static str,
    pub bytes: usize,
    pub busbw_gbps: f64,
    pub expected_gbps: f64,
}

#[derive(Serialize)]
pub struct SlowGroup {
    pub dimension: String,
    pub ranks: Vec<i32>,
    pub hosts: Vec<String>,
    /// How many times as long as its peers take, at the most.
    pub times: f64,
    pub evidence: Vec<Evidence>,
}

#[derive(Serialize)]
pub struct Evidence {
    pub collective: &'static str,
    pub bytes: usize,
    pub times: f64,
}

#[derive(Serialize)]
pub struct SlowRank {
    pub rank: i32,
    pub host: String,
    /// "copy": slow by itself. "crossing": in slow groups along every dimension that has any.
    pub evidence: &'static str,
    pub times: Option<f64>,
}

/// The groups of a dimension: first world rank, and the ranks by position.
type Groups = BTreeMap<i32, Vec<i32>>;

impl Report {
    pub fn new(subject: &Subject<'_>, notes: &[Notes]) -> Report {
        let Subject { hosts, options, plan, .. } = subject;
        let crowding = notes.iter().map(|notes| notes.crowding).fold(0.0, f64::max);
        let wrong: Vec<Wrong> = notes.iter().flat_map(|notes| notes.wrong.iter().cloned()).collect();
        let (mut dimensions, mut slow_groups, mut lines) = (Vec::new(), Vec::new(), Vec::new());
        for (index, dimension) in subject.dimensions.iter().enumerate() {
            let groups = groups(notes, index, dimension.size);
            let mut slow: BTreeMap<i32, SlowGroup> = BTreeMap::new();
            let measurements = measurements(
                subject,
                notes,
                index,
                &groups,
                &mut |first, evidence| {
                    let found = slow.entry(first).or_insert_with(|| {
                        let mut names: Vec<String> = Vec::new();
                        for rank in &groups[&first] {
                            let host = &hosts[*rank as usize];
                            if !names.contains(host) {
                                names.push(host.clone());
                            }
                        }
                        let ranks = groups[&first].clone();
                        SlowGroup {
                            dimension: dimension.name.to_owned(),
                            ranks,
                            hosts: names,
                            times: 0.0,
                            evidence: Vec::new(),
                        }
                    });
                    found.times = found.times.max(evidence.times);
                    found.evidence.push(evidence);
                },
                crowding,
            );
            // A flattened dimension runs along others: it crosses nothing of its own.
            if index + options.flatten.len() < subject.dimensions.len() {
                lines.push(slow.values().map(|slow| slow.ranks.clone()).collect::<Vec<_>>());
            }
            slow_groups.extend(slow.into_values());
            dimensions.push(Dimension {
                name: dimension.name.to_owned(),
                size: dimension.size,
                groups: groups.len(),
                verified_calls: notes.iter().filter_map(|notes| notes.calls.get(index)).sum(),
                measurements,
            });
        }
        let host = |rank: i32| hosts.get(rank as usize).cloned().unwrap_or_default();
        let mut slow_ranks = slow_copies(notes, options.slow_factor, crowding, &host);
        for rank in crossing(&lines) {
            if !slow_ranks.iter().any(|slow| slow.rank == rank) {
                slow_ranks.push(SlowRank { rank, host: host(rank), evidence: "crossing", times: None });
            }
        }
        let slow_dimensions = below(&dimensions, &options.expect);
        let slow = !(slow_dimensions.is_empty() && slow_groups.is_empty() && slow_ranks.is_empty());
        let verdict = match (wrong.is_empty(), !slow) {
            (false, _) => "wrong",
            (true, false) => "slow",
            (true, true) => "good",
        };
        let version = subject.library.version();
        let (copied, _) = copies(subject.device_type == "cuda");
        let copy_gbps = |notes: &Notes| (!notes.copies.is_empty()).then(|| gbps(copied, median(notes.copies.clone())));
        let ranks = notes.iter().enumerate();
        Report {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION"),
            verdict,
            mesh: subject.mesh.clone(),
            device_type: subject.device_type.to_owned(),
            library: subject.library.name().to_owned(),
            library_version: format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100),
            launcher: subject.launcher.to_owned(),
            world_size: notes.len(),
            dtype: options.dtype.name(),
            iterations: plan.iterations,
            warmup: plan.warmup,
            repeats: plan.repeats,
            slow_factor: options.slow_factor,
            ranks_per_core: crowding,
            hosts: by_host(hosts),
            ranks: ranks
                .map(|(rank, notes)| Rank {
                    rank,
                    host: host(rank as i32),
                    device: notes.device.clone(),
                    copy_gbps: copy_gbps(notes),
                })
                .collect(),
            dimensions,
            wrong,
            slow_dimensions,
            slow_groups,
            slow_ranks,
            seconds: subject.seconds,
        }
    }

    pub fn exit_code(&self, fail_slow: bool) -> u8 {
        match self.verdict {
            "wrong" => WRONG_DATA,
            "slow" if fail_slow => SLOW,
            _ => 0,
        }
    }

    /// One line.
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

pub fn gbps(bytes: usize, seconds: f64) -> f64 {
    if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 }
}

/// Dimensions below their expected bus bandwidth: of the first collective that was measured (all_reduce, unless others were asked for), at its largest size.
fn below(dimensions: &[Dimension], expected: &[(String, f64)]) -> Vec<SlowDimension> {
    let mut found = Vec::new();
    for (name, expected) in expected {
        let dimension = dimensions.iter().find(|dimension| dimension.name == *name);
        let measurements = dimension.map_or(&[][..], |dimension| &dimension.measurements);
        let of_first = measurements.iter().take_while(|other| other.collective == measurements[0].collective);
        if let Some(largest) = of_first.last().filter(|largest| largest.busbw_gbps < *expected) {
            found.push(SlowDimension {
                dimension: name.clone(),
                collective: largest.collective,
                bytes: largest.bytes,
                busbw_gbps: largest.busbw_gbps,
                expected_gbps: *expected,
            });
        }
    }
    found
}

fn by_host(hosts: &[String]) -> Vec<Host> {
    let mut found: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (rank, host) in hosts.iter().enumerate() {
        found.entry(host).or_default().push(rank);
    }
    let mut found: Vec<Host> = found.into_iter().map(|(name, ranks)| Host { name: name.to_owned(), ranks }).collect();
    found.sort_by_key(|host| host.ranks[0]);
    found
}

fn groups(notes: &[Notes], dimension: usize, size: usize) -> Groups {
    let mut groups = Groups::new();
    for (rank, notes) in notes.iter().enumerate() {
        if let Some((first, position)) = notes.groups.get(dimension) {
            let group = groups.entry(*first).or_insert_with(|| vec![0; size]);
            group[*position] = rank as i32;
        }
    }
    groups
}

/// All collectives at all sizes; what is slow is given to `slow` with the first rank of its group.
fn measurements(
    subject: &Subject<'_>,
    notes: &[Notes],
    dimension: usize,
    groups: &Groups,
    slow: &mut dyn FnMut(i32, Evidence),
    crowding: f64,
) -> Vec<Measurement> {
    let mut all = Vec::new();
    for (at, collective) in subject.collectives.iter().enumerate() {
        for size in 0..subject.plan.sizes.len() {
            let timed = |rank: i32| notes[rank as usize].times.get(dimension)?.get(at)?.get(size);
            let Some(first) = groups.keys().next().and_then(|first| timed(*first)) else { continue };
            let batches: Vec<Vec<f64>> =
                groups.values().map(|ranks| slowest(ranks.iter().filter_map(|rank| timed(*rank)))).collect();
            let peers: Vec<&[f64]> = batches.iter().map(Vec::as_slice).collect();
            let rule = Rule::new(subject.options.slow_factor, crowding, first.iterations);
            for found in rule.slow(&peers) {
                if let Some(first) = groups.keys().nth(found.place) {
                    slow(
                        *first,
                        Evidence {
                            collective: collective.name(),
                            bytes: timed(*first).map_or(0, |timed| timed.bytes),
                            times: found.times,
                        },
                    );
                }
            }
            let medians: Vec<f64> = batches.into_iter().map(median).collect();
            let worst = medians.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(place, _)| place);
            let seconds = median(medians.clone());
            let algbw = gbps(first.bytes, seconds);
            all.push(Measurement {
                collective: collective.name(),
                bytes: first.bytes,
                iterations: first.iterations,
                seconds,
                algbw_gbps: algbw,
                busbw_gbps: algbw * collective.bus_factor(subject.dimensions[dimension].size),
                slowest_seconds: medians[worst],
                slowest_group: groups.values().nth(worst).cloned().unwrap_or_default(),
            });
        }
    }
    all
}

/// A group's batches: each as long as on its slowest rank.
fn slowest<'a>(ranks: impl Iterator<Item = &'a Timed>) -> Vec<f64> {
    let mut slowest: Vec<f64> = Vec::new();
    for timed in ranks {
        slowest.resize(timed.seconds.len(), 0.0);
        slowest.iter_mut().zip(&timed.seconds).for_each(|(slowest, seconds)| *slowest = slowest.max(*seconds));
    }
    slowest
}

fn slow_copies(notes: &[Notes], factor: f64, crowding: f64, host: &dyn Fn(i32) -> String) -> Vec<SlowRank> {
    let peers: Vec<&[f64]> = notes.iter().map(|notes| notes.copies.as_slice()).collect();
    // A turn of the scheduler is spread over the copies of a batch; they take long enough for several.
    let rule = Rule::new(factor, crowding, 30);
    let found = rule.slow(&peers).into_iter();
    found
        .map(|slow| {
            let rank = slow.place as i32;
            SlowRank { rank, host: host(rank), evidence: "copy", times: Some(slow.times) }
        })
        .collect()
}
