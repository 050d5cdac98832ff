//! The timeline in the trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing
//! open: "Trace Event Format", Google, 2016, with complete events (`"ph": "X"`) and metadata
//! (`"ph": "M"`). Times are in microseconds.
//!
//! Each host is a process of the trace, and each rank a lane (a thread). Calls of one rank that
//! overlap, as those of a group do, are put into further lanes of the rank, because calls in
//! one lane must not overlap. The name of a call begins with its dimension, because Perfetto
//! chooses the colour by the name.

use recording::EntryState;
use serde::Serialize;
use serde_json::{Value, json};

use super::timeline::{TimedCall, Timeline};
use super::words::size;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Trace {
    trace_events: Vec<Value>,
    display_time_unit: &'static str,
}

/// Process `n` has the lanes from `n` times this number on. If some process needs more lanes, each
/// process has as many.
const LANES: usize = 64;

/// The whole trace as one line of JSON.
pub fn chrome(timeline: &Timeline) -> serde_json::Result<String> {
    let mut hosts: Vec<&str> = Vec::new();
    let mut events = Vec::new();
    let mut host_of = |name| {
        hosts.iter().position(|known| *known == name).unwrap_or_else(|| {
            hosts.push(name);
            hosts.len() - 1
        })
    };
    let places: Vec<usize> = timeline.ranks.iter().map(|rank| host_of(rank.host.as_str())).collect();
    for (place, host) in hosts.iter().enumerate() {
        events.push(json!({"ph": "M", "name": "process_name", "pid": place, "args": {"name": format!("host {host}")}}));
    }
    // The end of the last call in each lane of each process.
    let mut lanes: Vec<Vec<f64>> = vec![Vec::new(); timeline.ranks.len()];
    let lane_of = |call: &TimedCall| {
        let ends = &mut lanes[call.process];
        let lane = ends.iter().position(|end| *end <= call.begun).unwrap_or(ends.len());
        if lane == ends.len() {
            ends.push(0.0);
        }
        ends[lane] = call.ended;
        lane
    };
    let lane_of_call: Vec<usize> = timeline.calls.iter().map(lane_of).collect();
    let most = lanes.iter().map(Vec::len).fold(LANES, usize::max);
    let lane_number = |process: usize, lane: usize| process * most + lane;
    for (call, lane) in timeline.calls.iter().zip(lane_of_call) {
        events.push(event(timeline, call, places[call.process], lane_number(call.process, lane)));
    }
    for (process, ends) in lanes.iter().enumerate() {
        let rank = &timeline.ranks[process];
        for lane in 0..ends.len() {
            let again = timeline.ranks[..process].iter().filter(|earlier| earlier.rank == rank.rank).count();
            let name = match (again, lane) {
                (0, 0) => format!("rank {}", rank.rank),
                (0, lane) => format!("rank {} ({})", rank.rank, lane + 1),
                (_, 0) => format!("rank {}, pid {}", rank.rank, rank.pid),
                (_, lane) => format!("rank {}, pid {} ({})", rank.rank, rank.pid, lane + 1),
            };
            let (place, number) = (places[process], lane_number(process, lane));
            events.push(json!({"ph": "M", "name": "thread_name", "pid": place, "tid": number, "args": {"name": name}}));
            events.push(
                json!({"ph": "M", "name": "thread_sort_index", "pid": place, "tid": number, "args": {"sort_index": number}}),
            );
        }
    }
    serde_json::to_string(&Trace { trace_events: events, display_time_unit: "ms" }).map(|text| text + "\n")
}

fn event(timeline: &Timeline, call: &TimedCall, place: usize, lane: usize) -> Value {
    let group = &timeline.groups[&call.group];
    let what = match (&call.text, call.bytes) {
        (Some(text), _) => text.clone(),
        (None, 0) => call.operation.name().to_owned(),
        (None, bytes) => format!("{} {}", call.operation.name(), size(bytes)),
    };
    let mut arguments = json!({"group": group.name, "number": call.number, "bytes": call.bytes});
    if call.state != EntryState::Done {
        arguments["state"] = state(call.state).into();
    }
    json!({
        "ph": "X",
        "name": format!("{}: {what}", group.name),
        "cat": group.name,
        "pid": place,
        "tid": lane,
        "ts": micros(call.begun),
        "dur": micros(call.ended - call.begun),
        "args": arguments,
    })
}

/// Microseconds with three digits behind the point, which are nanoseconds.
fn micros(nanoseconds: f64) -> f64 {
    nanoseconds.round() / 1e3
}

fn state(state: EntryState) -> &'static str {
    match state {
        EntryState::Queued => "queued in a group that has not ended",
        EntryState::Running => "not ended",
        EntryState::Issued => "handed to a stream",
        EntryState::Done => "done",
        EntryState::Failed => "failed",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::trace::timeline::tests::{call, timeline};

    #[test]
    fn calls_that_overlap_are_in_different_lanes() {
        let calls = [call(0, 1, 4096, 0.0, 50.0), call(0, 2, 4096, 20.0, 60.0), call(0, 3, 0, 70.0, 2070.0)];
        let trace: Value = serde_json::from_str(&chrome(&timeline(calls)).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let of = |phase: &str| events.iter().filter(|event| event["ph"] == phase).collect::<Vec<_>>();
        let calls = of("X");
        let lanes: Vec<_> = calls.iter().map(|event| event["tid"].as_u64().unwrap()).collect();
        assert_eq!(lanes, [0, 1, 0]);
        assert_eq!((&calls[2]["ts"], &calls[2]["dur"]), (&json!(0.07), &json!(2.0)));
        assert_eq!(
            (&calls[0]["name"], &calls[2]["name"]),
            (&json!("mesh/dp: all-reduce 4 KiB"), &json!("mesh/dp: all-reduce"))
        );
        let names: Vec<_> = of("M").iter().filter_map(|event| event["args"]["name"].as_str()).collect();
        assert_eq!(names, ["host alpha", "rank 0", "rank 0 (2)"]);
    }

    #[test]
    fn a_hundred_calls_that_overlap_have_a_hundred_lanes() {
        let calls = (0..2).flat_map(|process| (0..100).map(move |at| call(process, at, 0, at as f64, 200.0)));
        let trace: Value = serde_json::from_str(&chrome(&timeline(calls)).unwrap()).unwrap();
        let calls = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X");
        let lanes: BTreeSet<u64> = calls.map(|event| event["tid"].as_u64().unwrap()).collect();
        assert_eq!(lanes.len(), 200);
    }
}
