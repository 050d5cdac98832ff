//! A part of a recording in few bytes, which can be sent to another host.
//!
//! An extract has the header, one world with its groups, and some calls. Read back, it is a
//! recording in which everything else is missing. The extract is a list of ranges of words. Each
//! range has the number of words that are left out before it, its length, and its words. Every
//! number is in LEB128, seven bits a byte, because most words are small.

use crate::layout::{self, channel, header};
use crate::snapshot::{RecordedCall, RecordedWorld, Snapshot};

/// Returns the extract of a recording. It has the groups of `world`, the groups of no world, and
/// those of their calls for which `is_wanted` holds. `snapshot` was read from `memory`.
pub fn extract(
    snapshot: &Snapshot,
    memory: &[u8],
    world: &RecordedWorld,
    is_wanted: impl Fn(&RecordedCall) -> bool,
) -> Vec<u8> {
    let mut ranges = vec![
        (0, header::WORLDS),
        (header::WORLDS + usize::from(world.place) * header::WORLD_WORDS, header::WORLD_WORDS),
    ];
    let word = |at: usize| {
        memory.get(at * 8..at * 8 + 8).map_or(0, |word| u64::from_ne_bytes(word.try_into().unwrap_or_default()))
    };
    // The host engine's groups belong to no world.
    let own = || snapshot.channels.iter().filter(|channel| channel.world.is_none_or(|number| number == world.number));
    for group in own() {
        let base = layout::CHANNELS + usize::from(group.place) * layout::CHANNEL_WORDS;
        ranges.push((base, layout::CHANNEL_WORDS));
        if !group.members.is_empty() {
            let start = word(base + channel::MEMBERS) as usize;
            ranges.push((layout::MEMBERS + start / 2, (start % 2 + group.members.len()).div_ceil(2)));
        }
    }
    let is_own =
        |call: &RecordedCall| own().any(|group| group.place == call.channel && call.number >= group.first_call);
    for call in snapshot.calls.iter().filter(|call| is_own(call) && is_wanted(call)) {
        ranges
            .push((layout::RING + call.number as usize % layout::CALL_COUNT * layout::CALL_WORDS, layout::CALL_WORDS));
        if call.call.operation.is_agreement() {
            let text = layout::TEXTS + call.call.count as usize % layout::TEXT_COUNT * layout::TEXT_WORDS;
            ranges.push((text, layout::TEXT_WORDS));
        }
    }
    ranges.sort_unstable();
    let (mut bytes, mut at) = (Vec::new(), 0);
    for (start, len) in ranges {
        // Groups with the same members share the list of members.
        let (start, end) = (start.max(at), (start + len).min(layout::WORDS));
        if start < end {
            put(&mut bytes, (start - at) as u64);
            put(&mut bytes, (end - start) as u64);
            (start..end).for_each(|place| put(&mut bytes, word(place)));
            at = end;
        }
    }
    bytes
}

/// Reads an extract. Returns `None` where the bytes are no extract.
pub fn of_extract(mut bytes: &[u8]) -> Option<Snapshot> {
    let mut memory = vec![0; layout::WORDS * 8];
    let mut at = 0_usize;
    while !bytes.is_empty() {
        let [skipped, len] = [take(&mut bytes)?, take(&mut bytes)?].map(usize::try_from);
        at = at.checked_add(skipped.ok()?)?;
        let end = at.checked_add(len.ok()?).filter(|end| *end <= layout::WORDS)?;
        for place in at..end {
            memory[place * 8..place * 8 + 8].copy_from_slice(&take(&mut bytes)?.to_ne_bytes());
        }
        at = end;
    }
    Snapshot::of_bytes(&memory, &memory, &memory).ok()
}

fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}
