//! The door as the members of the job see it: who has knocked, and why they refuse a newcomer.

use super::Recovery;
use super::knock::{Note, door_note, why};
use crate::error::Result;
use crate::rendezvous::agreement::decision::Decision;
use crate::rendezvous::agreement::proposal::Knock;
use crate::wait::Wait;

impl Recovery {
    /// Says for which mesh newcomers must ask: the text that they pass in [`Request::mesh`]. It
    /// must be equal on all ranks of the mesh, and is said once, before the first recovery. Without
    /// it newcomers are not asked for which mesh they come.
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
}
