//! How a collective is cut into chunks, and how many stages it takes.

use super::call::{Call, Kind};
use super::descriptor::SMALL;
use crate::cache;
use crate::segment::{LINE, Layout};

/// The chunks and stages of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pipeline {
    /// How many stages the collective has. Each stage but the last ends a step.
    pub(super) stages: usize,
    /// How many elements of [`Call::count`] each chunk but the last has.
    pub(super) chunk_len: usize,
    /// How many chunks there are.
    pub(super) chunks: usize,
    /// Whether every rank reduces everything itself, in one exchange.
    pub(super) direct: bool,
    /// Whether the results are written with stores that bypass the caches.
    pub(super) stream: bool,
    /// Whether the data is so small that two ranks hand it over with the end of the step, and use
    /// no slots.
    pub(super) small: bool,
}

/// The most bytes that one rank reads to reduce everything itself. Beyond this it is faster to
/// share the work and to wait once more for the results.
const DIRECT_BYTES: usize = 64 << 10;

/// The most ranks among which a broadcast is cut into short chunks, so that the others copy a chunk
/// out while the root copies the next one in. With 8 ranks on two processors, the additional steps
/// cost more time than the overlap saves.
const FEW: usize = 4;
/// The fewest chunks of such a broadcast, unless they would be shorter than [`SHORTEST`].
const FEWEST_CHUNKS: usize = 4;
/// The bytes of the shortest chunk of such a broadcast.
const SHORTEST: usize = 32 << 10;
/// The bytes of the longest chunk of such a broadcast, as long as it has at most [`MOST_CHUNKS`].
/// With so few bytes in each chunk, the slots in use stay in the second-level caches.
const IN_CACHE: usize = 64 << 10;
/// The most chunks of such a broadcast, as long as a chunk fits its slot. Where a broadcast would
/// have more, it has longer chunks on two ranks, and fills whole slots on three or four.
const MOST_CHUNKS: usize = 16;

impl Pipeline {
    /// Returns the pipeline of a call. All ranks of the call get the same one, except for `stream`.
    /// `is_of_two` says whether the communicator has two ranks, both on this host.
    // Inlined, so that the pipeline is made where it stays and is not copied.
    #[inline(always)]
    pub(super) fn new(call: &Call, layout: &Layout, is_of_two: bool) -> Pipeline {
        let size = call.dtype.size();
        let n = layout.nranks;
        if n == 1 {
            return Pipeline { stages: 1, chunk_len: call.count, chunks: 1, direct: true, stream: false, small: false };
        }
        if call.kind.is_ragged() {
            // The ranks agree on the number of chunks in the second stage.
            return Pipeline { stages: 2, chunk_len: 0, chunks: 1, direct: false, stream: false, small: false };
        }
        let line = LINE / size;
        let whole = layout.slot_bytes / size;
        // Each rank's part has cache lines of its own, so this is the most elements that one part
        // may have.
        let part = layout.slot_bytes / n / LINE * line;
        let direct = matches!(call.kind, Kind::AllReduce | Kind::Reduce)
            && call.count.saturating_mul(size * n) <= DIRECT_BYTES.min(layout.slot_bytes);
        let parts = if matches!(call.kind, Kind::ReduceScatter | Kind::AllToAll) { n } else { 1 };
        let small = is_of_two && call.kind != Kind::Scatter && call.count.saturating_mul(size * parts) <= SMALL;
        if small {
            return Pipeline { stages: 2, chunk_len: call.count, chunks: 1, direct, stream: false, small };
        }
        let (most, depth) = match call.kind {
            Kind::AllReduce | Kind::Reduce if direct => (whole, 2),
            Kind::AllReduce | Kind::Reduce => (part * n, 3),
            Kind::ReduceScatter | Kind::AllToAll => (part, 2),
            Kind::Broadcast if n <= FEW => (whole.min(overlapping(call.count * size, n) / size), 2),
            _ => (whole, 2),
        };
        let chunks = call.count.div_ceil(most).max(1);
        // Chunks of equal length are better than full chunks and a short last one.
        let chunk_len = call.count.div_ceil(chunks).next_multiple_of(line).min(most);
        let results = match call.kind {
            // Each rank gets something from every rank.
            Kind::AllGather | Kind::AllToAll => call.count.saturating_mul(size * n * n),
            _ => call.count.saturating_mul(size * n),
        };
        let inputs = match call.kind {
            // In place, the inputs are where the results are.
            Kind::AllReduce | Kind::AllToAll if std::ptr::eq(call.send, call.recv) => 0,
            Kind::AllToAll | Kind::ReduceScatter => call.count.saturating_mul(size * n * n),
            Kind::Broadcast => call.count * size,
            _ => call.count.saturating_mul(size * n),
        };
        let stream = cache::is_too_small_for(results, inputs);
        Pipeline { stages: chunks + depth - 1, chunk_len, chunks, direct, stream, small }
    }

    /// Returns the first element and the length of a chunk, for a call of `count` elements.
    pub(super) fn range(&self, chunk: usize, count: usize) -> (usize, usize) {
        let start = (chunk * self.chunk_len).min(count);
        (start, self.chunk_len.min(count - start))
    }
}

/// Returns how many bytes a chunk has, in a broadcast of `bytes` bytes among few ranks: a whole
/// number of cache lines.
fn overlapping(bytes: usize, nranks: usize) -> usize {
    let chunk = match bytes <= MOST_CHUNKS * IN_CACHE {
        true => (bytes / FEWEST_CHUNKS).clamp(SHORTEST, IN_CACHE),
        false if nranks == 2 => bytes.div_ceil(MOST_CHUNKS),
        false => bytes,
    };
    chunk.next_multiple_of(LINE)
}

/// Returns the first element and the length of the part of `rank` in a chunk of `length` elements
/// of `size` bytes. Parts start on cache lines, so that no two ranks write to one line.
pub(crate) fn part(length: usize, rank: usize, nranks: usize, size: usize) -> (usize, usize) {
    let each = length.div_ceil(nranks).next_multiple_of(LINE / size);
    let start = (rank * each).min(length);
    (start, each.min(length - start))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::DataType;

    /// A call of which only the pipeline is made.
    fn call(kind: Kind, dtype: DataType, count: usize) -> Call {
        let (send, recv) = (std::ptr::null(), std::ptr::null_mut());
        Call { kind, send, recv, count, dtype, reduction: None, root: None }
    }

    #[test]
    fn parts_cover_a_chunk_without_sharing_a_line() {
        for size in [1, 2, 4, 8] {
            for nranks in 1..=9 {
                for length in [0, 1, 15, 16, 17, 63, 64, 65, 1000, 4096] {
                    let mut next = 0;
                    for rank in 0..nranks {
                        let (start, elements) = part(length, rank, nranks, size);
                        assert_eq!(start, next);
                        assert!(elements == 0 || start * size % LINE == 0);
                        next = start + elements;
                    }
                    assert_eq!(next, length);
                }
            }
        }
    }

    #[test]
    fn a_broadcast_among_few_ranks_has_short_chunks() {
        let chunks = |nranks: u32, count: usize| {
            let call = call(Kind::Broadcast, DataType::Int8, count);
            let pipeline = Pipeline::new(&call, &Layout::new(nranks), nranks == 2);
            assert!(pipeline.chunks == 1 || pipeline.chunk_len % LINE == 0, "{nranks} ranks, {count} bytes");
            pipeline.chunks
        };
        let counts = [16 << 10, 64 << 10, 128 << 10, 200_000, 1 << 20, 1_048_676, 16 << 20, 64 << 20];
        assert_eq!(counts.map(|count| chunks(2, count)), [1, 2, 4, 4, 16, 16, 16, 64]);
        assert_eq!(counts.map(|count| chunks(4, count)), [1, 2, 4, 4, 16, 2, 27, 108]);
        assert_eq!(counts.map(|count| chunks(8, count)), [1, 1, 1, 1, 4, 4, 54, 216]);
    }

    #[test]
    fn chunks_cover_any_count_and_fit_their_slots() {
        for (nranks, among) in
            [(2, 0), (3, 0), (8, 0), (64, 0), (1024, 0), (2, 64), (8, 1024), (1000, 1024), (1024, 1025)]
        {
            let layout = Layout::split(nranks, among);
            let n = nranks as usize;
            for kind in [Kind::AllReduce, Kind::Broadcast, Kind::AllGather, Kind::ReduceScatter, Kind::AllToAll] {
                for dtype in DataType::ALL {
                    for count in [0, 1, 1000, 65_537, 10_000_001] {
                        let call = call(kind, dtype, count);
                        let pipeline = Pipeline::new(&call, &layout, n == 2);
                        let covered: usize = (0..pipeline.chunks).map(|chunk| pipeline.range(chunk, count).1).sum();
                        assert_eq!(covered, count, "{kind:?} {nranks} ranks");
                        let parts = if matches!(kind, Kind::ReduceScatter | Kind::AllToAll) { n } else { 1 };
                        assert!(pipeline.chunk_len * parts * dtype.size() <= layout.slot_bytes);
                        assert!(!pipeline.small || pipeline.chunk_len * parts * dtype.size() <= SMALL);
                        if kind == Kind::AllReduce && !pipeline.direct {
                            let (start, elements) = part(pipeline.chunk_len, n - 1, n, dtype.size());
                            assert!((start + elements) * dtype.size() <= layout.slot_bytes);
                        }
                        assert!(pipeline.stages >= 2, "every call meets its peers at least once");
                    }
                }
            }
        }
    }
}
