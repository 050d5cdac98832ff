//! The notes of newcomers at the door of a job, and the other keys that newcomers read.
//!
//! ```text
//! 5:1 12
//! dm_init(shape=(2, 4), names=(dp, tp))
//! ```
//!
//! This is a note: the newcomer and the seat that it asks for, and then the text of the mesh for
//! which it asks. The key `<prefix>/door` counts the notes, and `<prefix>/door/<k>` holds the k-th
//! one (notes.rs). Nobody removes a note while the world lives, because members read the notes in
//! order: whoever has not read a note that is gone would never find the later ones.
//!
//! A newcomer that asks for another mesh than that of the job is refused by the next epoch. Before
//! a rank proposes such an epoch, it leaves the reason under `<prefix>/door/<k>/why`.

use std::fmt::{self, Display, Formatter};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::Result;
use crate::rendezvous::agreement::notes::note_key;
use crate::rendezvous::incarnation::Incarnation;
use crate::rendezvous::store::Store;
use crate::wait::Wait;

/// A newcomer at the door.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Note {
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
    pub(super) fn read(number: usize, text: &str) -> Option<Note> {
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

/// Returns the newcomer that has left this note; `None` for a gap.
pub(in crate::rendezvous) fn who_knocks(note: &[u8]) -> Option<Incarnation> {
    Note::read(0, &String::from_utf8_lossy(note)).map(|note| note.process)
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
    use super::*;

    #[test]
    fn a_note_is_read_as_it_is_written_and_others_are_passed_over() {
        for text in ["", "-", "5:1", "5:1 x", "5:0 3", "5:1 -3"] {
            assert_eq!(Note::read(1, text), None, "{text:?}");
        }
        let process = Incarnation { rank: 5, ticket: 1 };
        let note = Note { number: 7, process, seat: 12, mesh: "dm_init(shape=(2, 8))\nmore".to_owned() };
        assert_eq!(Note::read(7, &note.to_string()), Some(note));
        assert_eq!(who_knocks(b"5:1 12"), Some(process));
    }
}
