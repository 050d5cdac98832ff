//! Copies of a recording for other hosts: without the slots that were being written, without old
//! calls, and without the words that are zero.

use std::collections::BTreeSet;
use std::io;

use crate::layout::{self, call, channel, header, world};
use crate::snapshot::{EntryState, RecordedCall, Snapshot};

/// The number of bytes of a recording.
const BYTES: usize = layout::WORDS * 8;

/// Clears slots in the memory from which the snapshot was read: those that the snapshot does not
/// have because their process was writing them, and those of old calls. The last `most` calls of
/// each group stay, and so do the calls that have not ended.
pub fn thin(memory: &mut [u8], snapshot: &Snapshot, most: usize) {
    let worlds: BTreeSet<usize> = snapshot.worlds.iter().map(|world| usize::from(world.place)).collect();
    let channels: BTreeSet<usize> = snapshot.channels.iter().map(|channel| usize::from(channel.place)).collect();
    let texts: BTreeSet<usize> =
        snapshot.texts.iter().map(|(number, _)| (*number % layout::TEXT_COUNT as u64) as usize).collect();
    let mut calls = BTreeSet::new();
    let is_open = |call: &&RecordedCall| !matches!(call.state, EntryState::Done | EntryState::Failed);
    for channel in &snapshot.channels {
        let kept = snapshot.calls_of(channel).rev().take(most).chain(snapshot.calls_of(channel).filter(is_open));
        calls.extend(kept.map(|call| (call.number % layout::CALL_COUNT as u64) as usize));
    }
    let mut clear = |base: usize, words: usize, count: usize, kept: &BTreeSet<usize>| {
        for place in (0..count).filter(|place| !kept.contains(place)) {
            memory[(base + place * words) * 8..(base + (place + 1) * words) * 8].fill(0);
        }
    };
    clear(header::WORLDS, header::WORLD_WORDS, header::WORLD_COUNT, &worlds);
    clear(layout::CHANNELS, layout::CHANNEL_WORDS, layout::CHANNEL_COUNT, &channels);
    clear(layout::RING, layout::CALL_WORDS, layout::CALL_COUNT, &calls);
    clear(layout::TEXTS, layout::TEXT_WORDS, layout::TEXT_COUNT, &texts);
}

/// Packs the memory of a recording into fewer bytes. These bytes are a list of runs. Each run has
/// the number of words that are zero (16 bits), the number of words that follow (16 bits), and
/// these words. Numbers are little-endian.
pub fn pack(memory: &[u8]) -> Vec<u8> {
    let words: Vec<&[u8]> = memory.chunks_exact(8).collect();
    let (mut packed, mut at) = (Vec::new(), 0);
    while at < words.len() {
        let most = usize::from(u16::MAX);
        let zeros = words[at..].iter().take(most).take_while(|word| is_zero(word)).count();
        let rest = &words[at + zeros..];
        let others = rest.iter().take(most).take_while(|word| !is_zero(word)).count();
        packed.extend((zeros as u16).to_le_bytes());
        packed.extend((others as u16).to_le_bytes());
        packed.extend(rest[..others].concat());
        at += zeros + others;
    }
    packed
}

/// Returns the memory that [`pack`] has packed. Fails where the bytes are not those of one whole
/// recording.
pub fn unpack(mut packed: &[u8]) -> io::Result<Vec<u8>> {
    let wrong = || io::Error::new(io::ErrorKind::InvalidData, "the bytes are no packed recording");
    let mut memory = vec![0; BYTES];
    let mut at = 0;
    while !packed.is_empty() {
        let (run, rest) = packed.split_at_checked(4).ok_or_else(wrong)?;
        let number = |at: usize| usize::from(u16::from_le_bytes([run[at], run[at + 1]])) * 8;
        let (begin, bytes) = (at + number(0), number(2));
        let (words, rest) = rest.split_at_checked(bytes).ok_or_else(wrong)?;
        memory.get_mut(begin..begin + bytes).ok_or_else(wrong)?.copy_from_slice(words);
        (at, packed) = (begin + bytes, rest);
    }
    if at == BYTES { Ok(memory) } else { Err(wrong()) }
}

fn is_zero(word: &[u8]) -> bool {
    word.iter().all(|byte| *byte == 0)
}

/// Notes in a copy when it was made, and in which state its process was then. `state` is the
/// reader's own number, from 0.
pub fn note_copy(memory: &mut [u8], moment: &crate::clock::Moment, state: u8) {
    let mut set = |word: usize, value: u64| memory[word * 8..word * 8 + 8].copy_from_slice(&value.to_ne_bytes());
    set(header::LATER, moment.ticks);
    set(header::LATER + 1, moment.monotonic);
    set(header::LATER + 2, moment.real);
    set(header::LATER_STAMP, 2);
    set(header::COPIED, u64::from(state) + 1);
}

const _: () = assert!(world::STAMP == 0 && channel::STAMP == 0 && call::STAMP == 0);

#[cfg(test)]
mod tests {
    use super::{BYTES, pack, unpack};

    #[test]
    fn a_recording_comes_out_as_it_went_in() {
        let mut memory = vec![0; BYTES];
        assert_eq!(pack(&memory).len(), 4);
        assert_eq!(unpack(&pack(&memory)).unwrap(), memory);
        for at in [0, 9, 4096, BYTES - 1] {
            memory[at] = 7;
        }
        assert_eq!(unpack(&pack(&memory)).unwrap(), memory);
        memory.fill(1);
        assert_eq!(unpack(&pack(&memory)).unwrap(), memory);
    }

    #[test]
    fn what_is_no_packed_recording_is_an_error() {
        let memory = vec![1; BYTES];
        let packed = pack(&memory);
        for wrong in
            [&packed[..packed.len() - 1], &packed[..4], b"", b"abc", &[packed.clone(), vec![0, 0, 1, 0]].concat()]
        {
            assert!(unpack(wrong).is_err(), "{} bytes", wrong.len());
        }
        // Runs that go beyond the end of a recording.
        assert!(unpack(&[0xff, 0xff, 0, 0, 0xff, 0xff, 0, 0]).is_err());
        assert!(unpack(&[&[0xff, 0x77, 2, 0][..], &[1; 16]].concat()).is_err());
    }
}
