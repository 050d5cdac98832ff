//! Rank 0 draws the conclusions from the notes of all ranks: bandwidths, and what is slow.

use std::collections::BTreeMap;

use devicemesh::ccl::Library;

use super::copies;
use super::links;
use super::measure::{Schedule, Timed, gbps};
use super::meetings;
use super::notes::Notes;
use super::operation::Collective;
use super::options::Options;
use super::record;
use super::report::{Dimension, Evidence, Host, Measurement, Rank, Report, SCHEMA, SlowDimension, SlowGroup, SlowRank};
use super::slow::{Rule, batch_medians, crossing, median};
use super::verify::Wrong;

/// The mesh that was checked, and how.
pub struct Subject<'a> {
    /// The mesh in the words of `dm_describe`.
    pub mesh: String,
    /// The communicator library.
    pub library: &'a Library,
    pub device_type: &'a str,
    /// The launcher that started the ranks.
    pub launcher: &'a str,
    /// The host of each rank.
    pub hosts: &'a [String],
    /// The dimensions of the mesh, then the flattened ones.
    pub dimensions: &'a [Measured<'a>],
    pub collectives: &'a [Collective],
    /// The sizes that were measured, and how often.
    pub schedule: &'a Schedule,
    pub options: &'a Options,
    /// The seconds that the check has taken.
    pub seconds: f64,
}

/// A dimension that was checked.
pub struct Measured<'a> {
    pub name: &'a str,
    pub size: usize,
}

/// The groups of a dimension by their first world rank, each with its world ranks by position.
type Groups = BTreeMap<i32, Vec<i32>>;

/// Draws the conclusions from the notes of all ranks.
pub fn assess(subject: &Subject<'_>, notes: &[Notes]) -> Report {
    let Subject { hosts, options, schedule, .. } = subject;
    let ranks_per_core = notes.iter().map(|notes| notes.ranks_per_core).fold(0.0, f64::max);
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
            ranks_per_core,
        );
        // Only dimensions of the mesh count here. The groups of a flattened dimension contain
        // groups of other dimensions, so they would cross everywhere.
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
    let mut slow_ranks = slow_copies(notes, options.slow_factor, ranks_per_core, &host);
    let links = links::assess(notes, hosts, options.slow_factor, ranks_per_core);
    for slow in links.slow_ranks {
        if !slow_ranks.iter().any(|known| known.rank == slow.rank) {
            slow_ranks.push(slow);
        }
    }
    for rank in crossing(&lines) {
        if !slow_ranks.iter().any(|slow| slow.rank == rank) {
            slow_ranks.push(SlowRank { rank, host: host(rank), evidence: "crossing", times: None });
        }
    }
    let slow_dimensions = below(&dimensions, &options.expect);
    let are_groups_well = slow_dimensions.is_empty() && slow_groups.is_empty() && slow_ranks.is_empty();
    let are_links_well = links.slow_pairs.is_empty() && links.slow_hosts.is_empty();
    let verdict = match (wrong.is_empty(), are_groups_well && are_links_well) {
        (false, _) => "wrong",
        (true, false) => "slow",
        (true, true) => "good",
    };
    let version = subject.library.version();
    let (copied, _) = copies::batch(subject.device_type == "cuda");
    let copy_gbps = |notes: &Notes| (!notes.copies.is_empty()).then(|| gbps(copied, median(notes.copies.clone())));
    let ranks = notes.iter().enumerate();
    Report {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION"),
        date: record::now(),
        verdict,
        mesh: subject.mesh.clone(),
        device_type: subject.device_type.to_owned(),
        library: subject.library.name().to_owned(),
        library_version: format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100),
        launcher: subject.launcher.to_owned(),
        world_size: notes.len(),
        dtype: options.dtype.name(),
        iterations: schedule.iterations,
        warmup: schedule.warmup,
        repeats: schedule.repeats,
        slow_factor: options.slow_factor,
        ranks_per_core,
        hosts: by_host(hosts, notes, &links.host_gbps),
        ranks: ranks
            .map(|(rank, notes)| Rank {
                rank,
                host: host(rank as i32),
                device: notes.device.clone(),
                copy_gbps: copy_gbps(notes),
            })
            .collect(),
        dimensions,
        pairs: links.pairs,
        wrong,
        slow_dimensions,
        slow_groups,
        slow_ranks,
        slow_pairs: links.slow_pairs,
        slow_hosts: links.slow_hosts,
        comparison: None,
        seconds: subject.seconds,
    }
}

/// The dimensions below their expected bus bandwidth. The first collective that was measured counts
/// (all_reduce, unless others were asked for), at its largest size.
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

/// The hosts with their ranks, in the order of their first ranks.
fn by_host(hosts: &[String], notes: &[Notes], pair_gbps: &BTreeMap<String, f64>) -> Vec<Host> {
    let host = |(name, ranks): (&str, Vec<usize>)| Host {
        name: name.to_owned(),
        machine: notes.get(ranks[0]).and_then(|notes| notes.machine.clone()),
        ranks,
        pair_gbps: pair_gbps.get(name).copied(),
    };
    let mut found: Vec<Host> = meetings::by_host(hosts).into_iter().map(host).collect();
    found.sort_by_key(|host| host.ranks[0]);
    found
}

/// The groups of a dimension, as the ranks describe them.
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

/// The measurements of a dimension: all collectives at all sizes. `slow` is called for each slow
/// group, with the first rank of the group.
fn measurements(
    subject: &Subject<'_>,
    notes: &[Notes],
    dimension: usize,
    groups: &Groups,
    slow: &mut dyn FnMut(i32, Evidence),
    ranks_per_core: f64,
) -> Vec<Measurement> {
    let mut all = Vec::new();
    for (at, collective) in subject.collectives.iter().enumerate() {
        for size in 0..subject.schedule.sizes.len() {
            let timed = |rank: i32| notes[rank as usize].times.get(dimension)?.get(at)?.get(size);
            let Some(first) = groups.keys().next().and_then(|first| timed(*first)) else { continue };
            let batches: Vec<Vec<f64>> =
                groups.values().map(|ranks| slowest(ranks.iter().filter_map(|rank| timed(*rank)))).collect();
            let peers: Vec<&[f64]> = batches.iter().map(Vec::as_slice).collect();
            let rule = Rule::new(subject.options.slow_factor, ranks_per_core, first.iterations);
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
            let medians: Vec<f64> = batches.iter().cloned().map(median).collect();
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
                batch_seconds: batch_medians(&peers),
                slowest_seconds: medians[worst],
                slowest_group: groups.values().nth(worst).cloned().unwrap_or_default(),
            });
        }
    }
    all
}

/// The seconds per call of a group in each batch, which are those of its slowest rank.
fn slowest<'a>(ranks: impl Iterator<Item = &'a Timed>) -> Vec<f64> {
    let mut slowest: Vec<f64> = Vec::new();
    for timed in ranks {
        slowest.resize(timed.seconds.len(), 0.0);
        slowest.iter_mut().zip(&timed.seconds).for_each(|(slowest, seconds)| *slowest = slowest.max(*seconds));
    }
    slowest
}

/// The ranks that copy slowly in their own memory.
fn slow_copies(notes: &[Notes], factor: f64, ranks_per_core: f64, host: &dyn Fn(i32) -> String) -> Vec<SlowRank> {
    let peers: Vec<&[f64]> = notes.iter().map(|notes| notes.copies.as_slice()).collect();
    let found = copies::slow(&peers, factor, ranks_per_core).into_iter();
    found
        .map(|slow| {
            let rank = slow.place as i32;
            SlowRank { rank, host: host(rank), evidence: "copy", times: Some(slow.times) }
        })
        .collect()
}
