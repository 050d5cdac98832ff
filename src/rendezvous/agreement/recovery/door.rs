//! The door: the list of the newcomers that have knocked, as the members of the job read it.
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

use super::Recovery;
use crate::error::Result;
use crate::rendezvous::agreement::decision::Decision;
use crate::rendezvous::agreement::notes::note_key;
use crate::rendezvous::agreement::proposal::Knock;
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
    fn read(number: usize, text: &str) -> Option<Note> {
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
fn decided(prefix: &str) -> String {
    format!("{prefix}/decided")
}

/// Returns the number of a decision, and when it was made, in seconds since 1970. There may be later
/// decisions. Returns `None` where there is none.
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

impl Recovery {
    /// Says for which mesh newcomers must ask: the text that they pass in [`Request::mesh`]. It must
    /// be equal on all ranks of the mesh, and is said once, before the first recovery. Without it
    /// newcomers are not asked for which mesh they come.
    ///
    /// [`Request::mesh`]: super::Request
    pub fn expect_mesh(&mut self, mesh: &str) {
        self.mesh = Some(mesh.to_owned());
    }

    /// Returns the key of the next note of the door.
    pub(super) fn next_at_door(&self) -> String {
        door_note(self.membership.losses.prefix(), self.read_at_door + 1)
    }

    /// Notes what the key of the next note of the door held.
    pub(super) fn note_at_door(&mut self, value: &[u8]) {
        self.read_at_door += 1;
        self.door.extend(Note::read(self.read_at_door, &String::from_utf8_lossy(value)));
    }

    /// Returns the newcomers that have knocked, in the order in which they came.
    pub(super) fn knocks(&self) -> Vec<Knock> {
        let fits = |note: &Note| self.mesh.as_ref().is_none_or(|mesh| note.mesh == *mesh);
        self.door.iter().map(|note| Knock { process: note.process, seat: note.seat, fits: fits(note) }).collect()
    }

    /// Leaves the reason for each newcomer that this proposal is the first one to refuse for its
    /// mesh.
    pub(super) fn explain_refusals(&self, proposal: &Decision, wait: &Wait) -> Result<()> {
        let (Decision::Epoch(epoch), Some(mesh)) = (proposal, &self.mesh) else { return Ok(()) };
        let is_refused =
            |note: &&Note| epoch.refused.contains(&note.process) && !self.epoch.refused.contains(&note.process);
        for note in self.door.iter().filter(|note| note.mesh != *mesh).filter(is_refused) {
            let message = format!(
                "the mesh of the job is {mesh}, and rank {} asks for {}: start it with the program and the options of the job",
                note.process.rank, note.mesh
            );
            let key = why(&door_note(self.membership.losses.prefix(), note.number));
            self.membership.store.set(&key, message.as_bytes(), wait)?;
            self.membership.left.note_of_others([key]);
        }
        Ok(())
    }

    /// Says that this decision stands, so a newcomer need not read all earlier ones. Failures are
    /// not said, because a newcomer begins with an epoch. It does not matter if the store fails.
    pub(super) fn say_decided(&self, number: u64, decision: &Decision, wait: &Wait) {
        if matches!(decision, Decision::Failure(_)) {
            return;
        }
        let key = decided(self.membership.losses.prefix());
        let _ = self.membership.store.set(&key, format!("{number} {}", now()).as_bytes(), wait);
        self.membership.left.note_of_others([key]);
    }
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
