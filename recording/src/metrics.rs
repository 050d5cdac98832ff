//! The counters of recordings as text for Prometheus, in version 0.0.4 of its text format
//! (prometheus.io, "Exposition formats").
//!
//! Processes of several hosts may have one number, so all labels have the host.
//!
//! A group that is closed keeps its counters until another group takes its place. Groups of one
//! process with equal labels are added up. So a counter may fall where a group's place was taken.
//! For Prometheus this is a counter that began anew. When a later world takes the place of an ended
//! world, the job and rank of the ended world's groups are unknown. These groups are then left out.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::clock::Moment;
use crate::snapshot::{ChannelState, EntryState, RecordedChannel, Snapshot};

/// A process whose counters are wanted.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// The recording of the process.
    pub snapshot: &'a Snapshot,
    /// The number of the process, as the reader sees it.
    pub pid: u32,
    /// The present moment on the recording's clock. `None` where the process has ended or runs on
    /// another host: nobody knows then for how long its calls have run.
    pub now: Option<Moment>,
}

/// A metric: its name without the prefix, its type, and its meaning.
struct Metric(&'static str, &'static str, &'static str);

const INFO: Metric = Metric("process_info", "gauge", "A process with a recording; always 1.");
const RECORDED: Metric = Metric("recorded_calls_total", "counter", "Calls and messages that the process has recorded.");
const LEFT_OUT: Metric =
    Metric("unrecorded_groups_total", "counter", "Groups that are not recorded because all places were taken.");
const SIZE: Metric = Metric("world_size", "gauge", "The number of ranks of a world with which the process has joined.");
const EPOCH: Metric = Metric("world_epoch", "gauge", "The epoch of a world: how many recoveries the job has had.");
const BEGUN: Metric = Metric("calls_begun_total", "counter", "Collective calls that the rank has begun in a group.");
const ENDED: Metric = Metric(
    "calls_ended_total",
    "counter",
    "The number of the rank's last collective call in a group that has ended well, or that was handed to its stream.",
);
const MESSAGES: Metric = Metric(
    "messages_begun_total",
    "counter",
    "Sends, receives and operations of the program's own that the rank has begun in a group.",
);
const RUNNING: Metric = Metric(
    "running_call_seconds",
    "gauge",
    "For how long the rank's oldest call in a group has run that has not ended; 0 where none runs.",
);

/// The samples of one metric: the labels, and the value.
type Samples = BTreeMap<String, f64>;

/// Returns the counters of these processes as text.
pub fn text(sources: &[Source<'_>]) -> String {
    let mut all: [(Metric, Samples); 9] =
        [INFO, RECORDED, LEFT_OUT, SIZE, EPOCH, BEGUN, ENDED, MESSAGES, RUNNING].map(|metric| (metric, Samples::new()));
    for source in sources {
        let [info, recorded, left_out, size, epoch, begun, ended, messages, running] = &mut all;
        let process = &source.snapshot.process;
        let pid = source.pid.to_string();
        let own = [("pid", pid.as_str()), ("host", process.host.as_str())];
        let of_process = labels(&own);
        add(info, &labels(&[&own[..], &[("version", &process.version)]].concat()), 1.0);
        add(recorded, &of_process, process.calls_begun as f64);
        add(left_out, &of_process, process.channels_left_out as f64);
        for world in source.snapshot.worlds.iter().filter(|world| !world.has_ended) {
            let rank = world.rank.to_string();
            let of_world = labels(&[&own[..], &[("job_id", &world.job), ("rank", &rank)]].concat());
            // Two worlds of one process may have equal labels. One of them is shown.
            size.1.insert(of_world.clone(), world.size.into());
            epoch.1.insert(of_world, world.epoch.into());
        }
        let is_known =
            |channel: &&RecordedChannel| channel.world.is_none() || source.snapshot.world_of(channel).is_some();
        for channel in source.snapshot.channels.iter().filter(is_known) {
            let of_group = labels_of_group(source, channel, &own);
            add(begun, &of_group, channel.calls_begun as f64);
            add(ended, &of_group, channel.calls_ended as f64);
            add(messages, &of_group, channel.messages_begun as f64);
            if let Some(seconds) = running_seconds(source, channel) {
                let longest = running.1.entry(of_group).or_default();
                *longest = longest.max(seconds);
            }
        }
    }
    let mut text = String::new();
    for (Metric(name, kind, help), samples) in &all {
        // Writing to a String does not fail.
        let _ = write!(text, "# HELP devicemesh_{name} {help}\n# TYPE devicemesh_{name} {kind}\n");
        for (labels, value) in samples {
            let _ = writeln!(text, "devicemesh_{name}{{{labels}}} {value}");
        }
    }
    text
}

fn add((_, samples): &mut (Metric, Samples), labels: &str, value: f64) {
    *samples.entry(labels.to_owned()).or_default() += value;
}

/// The labels of a group. `own` are those of its process.
fn labels_of_group(source: &Source<'_>, channel: &RecordedChannel, own: &[(&str, &str)]) -> String {
    let world = source.snapshot.world_of(channel);
    // A communicator without a world counts ranks of its own.
    let rank = world.map_or(channel.rank, |world| world.rank).to_string();
    let job = world.map_or("", |world| world.job.as_str());
    let kind = match channel.kind {
        0 => "dimension",
        1 => "agreement",
        _ => "communicator",
    };
    let of_group = [("job_id", job), ("rank", &rank), ("group", &channel.name), ("kind", kind)];
    labels(&[own, &of_group].concat())
}

/// For how long the oldest call of an open group has run, in seconds. `None` where nobody knows.
fn running_seconds(source: &Source<'_>, channel: &RecordedChannel) -> Option<f64> {
    let now = source.now.filter(|_| channel.state != ChannelState::Closed)?;
    let length = source.snapshot.nanoseconds_per_tick(Some(now))?;
    let running = source.snapshot.calls_of(channel).filter(|call| call.state == EntryState::Running);
    let oldest = running.map(|call| call.begun).min();
    Some(oldest.map_or(0.0, |begun| now.ticks.saturating_sub(begun) as f64 * length / 1e9))
}

/// The labels of a sample, in which a backslash, a quotation mark and a newline are escaped.
fn labels(pairs: &[(&str, &str)]) -> String {
    let escaped = |value: &str| value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let pairs: Vec<String> = pairs.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
    pairs.join(",")
}
