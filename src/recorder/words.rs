//! Calls of recordings in words.

use recording::{Operation, RecordedCall, Snapshot};

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

/// What a call does: "all-reduce of 8 float32 (sum)", or the text of an agreement.
pub(super) fn content(snapshot: &Snapshot, call: &RecordedCall) -> String {
    if let Some(text) = snapshot.text(call) {
        return printable(text).into_owned();
    }
    let recorded = &call.call;
    let dtype = TYPES.get(usize::from(recorded.dtype)).unwrap_or(&"elements");
    let reduces = matches!(
        recorded.operation,
        Operation::AllReduce | Operation::Reduce | Operation::ReduceScatter | Operation::ReduceScatterV
    );
    let reduction = REDUCTIONS.get(usize::from(recorded.reduction)).filter(|_| reduces);
    let reduction = reduction.map_or_else(String::new, |name| format!(" ({name})"));
    let root = if recorded.peer >= 0 { format!(", root {}", recorded.peer) } else { String::new() };
    format!("{} of {} {dtype}{reduction}{root}", recorded.operation.name(), recorded.count)
}
