//! The notes of newcomers at the door of a job, and the other keys that newcomers read.
//!
//! ```text
//! 5:1 12
//! 2 4
//! dm_init(shape=(*, 4), names=(dp, tp))
//! dm_init(shape=(2, 4), names=(dp, tp))
//! ```
//!
//! This is a note: the newcomer and the seat that it asks for, and then the text of the mesh for
//! which it asks (wanted.rs). The key `<prefix>/door` counts the notes, and `<prefix>/door/<k>`
//! holds the k-th one (notes.rs). Nobody removes a note while the world lives, because members
//! read the notes in order: a member that has not read a note before it is removed would never
//! find the later notes.
//!
//! A newcomer that asks for another mesh than that of the job is refused by the next epoch. Before
//! a rank proposes such an epoch, it leaves the reason under `<prefix>/door/<k>/why`.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::time::{SystemTime, UNIX_EPOCH};

use super::wanted::Wanted;
use crate::error::Result;
use crate::rendezvous::agreement::notes::note_key;
use crate::rendezvous::incarnation::Incarnation;
use crate::rendezvous::store::Store;
use crate::wait::Wait;

/// A newcomer at the door.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::rendezvous) struct Note {
    /// The place of the note in the list.
    pub(super) number: usize,
    /// The newcomer.
    pub(super) process: Incarnation,
    /// The seat that it asks for.
    pub(super) seat: usize,
    /// The mesh that it asks for, as a text that is equal on all ranks of that mesh.
    pub(super) mesh: String,
}

impl Note {
    /// Reads what stands under that number; `None` for a gap and for a note that cannot be read.
    pub(in crate::rendezvous) fn read(number: usize, text: &str) -> Option<Note> {
        let (head, mesh) = text.split_once('\n').unwrap_or((text, ""));
        let (process, seat) = head.split_once(' ')?;
        Some(Note { number, process: process.parse().ok()?, seat: seat.parse().ok()?, mesh: mesh.to_owned() })
    }
}

impl Display for Note {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        write!(out, "{} {}\n{}", self.process, self.seat, self.mesh)
    }
}

/// Returns the key of the list of newcomers, in the world whose keys begin with `prefix`.
pub(super) fn door(prefix: &str) -> String {
    format!("{prefix}/door")
}

/// Returns the key of a note of the door.
pub(in crate::rendezvous) fn door_note(prefix: &str, number: usize) -> String {
    note_key(&door(prefix), number)
}

/// Returns how many of those that have left these notes are a reason to recover, in an epoch whose
/// decision has seen the first `seen` notes and whose mesh has `seats` seats.
///
/// A newcomer for one of these seats counts if that decision has not seen its note. A decision
/// that has seen the note gave the newcomer no place. A newcomer beyond the seats counts only
/// together with all other newcomers of its index of the outermost dimension, because the mesh
/// grows by whole indices. So the ranks of a host that come one after the other are a reason for
/// one recovery. A process for which `is_out` says so does not count. Such a process is lost, or is
/// in the mesh: it may have knocked just before it was let in, when the rank that decided had read
/// the notes already.
pub(in crate::rendezvous) fn count_waiting(
    notes: &[Note],
    (seen, seats): (usize, usize),
    is_out: impl Fn(Incarnation) -> bool,
) -> usize {
    // Most calls find no new note, so the number of the last note is checked first.
    if notes.last().is_none_or(|note| note.number <= seen) {
        return 0;
    }
    let live = || notes.iter().filter(|note| !is_out(note.process));
    // The notes are in ascending order, so the last one for each seat stays.
    let asked: BTreeMap<usize, usize> = live().map(|note| (note.seat, note.number)).collect();
    let counts = |note: &&Note| {
        if note.seat < seats {
            return note.number > seen;
        }
        let row = Wanted::read(&note.mesh).row;
        let first = note.seat / row * row;
        let Some(end) = first.checked_add(row) else { return false };
        (first..end).all(|seat| asked.contains_key(&seat)) && asked.range(first..end).any(|(_, number)| *number > seen)
    };
    live().filter(counts).count()
}

/// Returns the key under which a newcomer finds why it is refused.
pub(super) fn why(note: &str) -> String {
    format!("{note}/why")
}

/// Returns the key that says which decision was made last.
pub(super) fn decided(prefix: &str) -> String {
    format!("{prefix}/decided")
}

/// Returns the number of a decision, and when it was made, in seconds since 1970. There may be
/// later decisions. Returns `None` where there is none.
pub(in crate::rendezvous) fn decided_at(store: &dyn Store, prefix: &str, wait: &Wait) -> Result<Option<(u64, u64)>> {
    let said = store.try_get(&decided(prefix), wait)?.unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    let read = said.split_once(' ').and_then(|(number, time)| Some((number.parse().ok()?, time.parse().ok()?)));
    Ok(read)
}

/// Returns the seconds since 1970.
pub(in crate::rendezvous) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::super::wanted::mesh_text;
    use super::*;

    #[test]
    fn a_note_is_read_as_it_is_written_and_others_are_passed_over() {
        for text in ["", "-", "5:1", "5:1 x", "5:0 3", "5:1 -3"] {
            assert_eq!(Note::read(1, text), None, "{text:?}");
        }
        let process = Incarnation { rank: 5, ticket: 1 };
        let note = Note { number: 7, process, seat: 12, mesh: "dm_init(shape=(2, 8))\nmore".to_owned() };
        assert_eq!(Note::read(7, &note.to_string()), Some(note));
    }

    #[test]
    fn newcomers_beyond_the_mesh_count_when_they_fill_an_index() {
        let mesh = mesh_text(3, 2, "", "");
        let note = |number: usize, seat: usize| Note {
            number,
            process: Incarnation::first(10 * seat as i32),
            seat,
            mesh: mesh.clone(),
        };
        let count = |seats: &[usize], seen: usize, lost: &[i32]| {
            let notes: Vec<Note> = seats.iter().enumerate().map(|(index, seat)| note(index + 1, *seat)).collect();
            count_waiting(&notes, (seen, 4), |process| lost.contains(&process.rank))
        };
        assert_eq!((count(&[], 0, &[]), count(&[1], 0, &[]), count(&[1], 1, &[])), (0, 1, 0));
        // Seats 4 and 5 are one index of the outermost dimension.
        assert_eq!((count(&[4], 0, &[]), count(&[4, 5], 0, &[]), count(&[5, 6], 0, &[])), (0, 2, 0));
        // One of the two newcomers came before the last decision, or both did.
        assert_eq!((count(&[4, 5], 1, &[]), count(&[4, 5], 2, &[])), (2, 0));
        // One of the two newcomers is lost, and then another process has come in its place.
        assert_eq!((count(&[4, 5], 0, &[50]), count(&[4, 4, 5], 0, &[])), (0, 3));
        assert_eq!(count(&[usize::MAX, 4, 0], 0, &[]), 1);
    }
}
