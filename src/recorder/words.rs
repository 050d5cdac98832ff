//! Calls of recordings in words.

use recording::{Call, Operation, RecordedCall, Snapshot};

use crate::printable::printable;

/// The names of the element types, by their `ncclDataType_t`.
const TYPES: [&str; 12] = [
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "float8e4m3",
    "float8e5m2",
];
/// The names of the reductions, by their `ncclRedOp_t`.
const REDUCTIONS: [&str; 6] = ["sum", "prod", "max", "min", "avg", "an operator of the program"];

/// A call by its name and its number: "all-reduce 641", or the text of an agreement.
pub(super) fn short(snapshot: &Snapshot, call: &RecordedCall) -> String {
    match snapshot.text(call) {
        Some(text) => printable(text).into_owned(),
        None => format!("{} {}", call.call.operation.name(), call.in_channel),
    }
}

/// The work of a recorded call: "all-reduce of 8 float32 (sum)", or the text of an agreement.
pub(super) fn content(snapshot: &Snapshot, call: &RecordedCall) -> String {
    match snapshot.text(call) {
        Some(text) => printable(text).into_owned(),
        None => with_count(&call.call, Some(call.call.count)),
    }
}

/// The work of a call, as far as it is equal on all ranks: "all-reduce of 8 float32 (sum)". Where
/// each rank has a count of its own, no count is named.
pub(super) fn described(call: &Call) -> String {
    with_count(call, Some(call.count).filter(|_| !call.operation.has_own_counts()))
}

fn with_count(call: &Call, count: Option<u64>) -> String {
    let dtype = TYPES.get(usize::from(call.dtype)).unwrap_or(&"elements");
    let reduces = matches!(
        call.operation,
        Operation::AllReduce | Operation::Reduce | Operation::ReduceScatter | Operation::ReduceScatterV
    );
    let reduction = REDUCTIONS.get(usize::from(call.reduction)).filter(|_| reduces);
    let reduction = reduction.map_or_else(String::new, |name| format!(" ({name})"));
    let root = if call.peer >= 0 { format!(", root {}", call.peer) } else { String::new() };
    let count = count.map_or_else(String::new, |count| format!("{count} "));
    format!("{} of {count}{dtype}{reduction}{root}", call.operation.name())
}
