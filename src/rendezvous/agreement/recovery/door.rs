//! The door as the members of the job see it: who has knocked, and why they refuse a newcomer.

use super::Recovery;
use super::knock::{Note, count_waiting, door, door_note, why};
use super::wanted::Wanted;
use crate::error::Result;
use crate::rendezvous::agreement::decision::Decision;
use crate::rendezvous::agreement::notes::{add_note, fill_gaps};
use crate::rendezvous::agreement::proposal::{Knock, Passed, Seen, Terms};
use crate::wait::Wait;

impl Recovery {
    /// Says for which mesh newcomers must ask: the mesh with which the job has started. `mesh` is
    /// the text that newcomers pass in [`Request::mesh`], and must be equal on all ranks of the
    /// mesh. This function is called once, before the first recovery. Where it is not called,
    /// nobody compares the mesh for which a newcomer asks.
    ///
    /// [`Request::mesh`]: super::Request
    pub fn expect_mesh(&mut self, mesh: &str) {
        self.mesh = Some(mesh.to_owned());
    }

    /// Whether somebody waits at the door who is a reason to recover ([`count_waiting`]).
    pub fn somebody_waits(&mut self, wait: &Wait) -> Result<bool> {
        self.read_door(wait)?;
        let in_mesh = self.epoch.in_mesh();
        let is_out = |process| in_mesh.contains(&process) || self.membership.losses.any(|lost| lost == process);
        Ok(count_waiting(&self.door, (self.epoch.door, self.epoch.seats.len()), is_out) > 0)
    }

    /// Reads the notes of the door that are in the store by now.
    pub(super) fn read_door(&mut self, wait: &Wait) -> Result<()> {
        while let Some(value) = self.membership.store.try_get(&self.next_at_door(), wait)? {
            self.note_at_door(&value);
        }
        Ok(())
    }

    /// Returns the key of the next note of the door.
    pub(super) fn next_at_door(&self) -> String {
        door_note(self.membership.losses.prefix(), self.read_at_door + 1)
    }

    /// Notes `value`, which the store had under the key of the next note of the door.
    pub(super) fn note_at_door(&mut self, value: &[u8]) {
        self.read_at_door += 1;
        self.door.extend(Note::read(self.read_at_door, &String::from_utf8_lossy(value)));
    }

    /// Returns the newcomers that have knocked, in the order in which they came.
    pub(super) fn knocks(&self) -> Vec<Knock> {
        let job = self.mesh.as_deref().map(Wanted::read);
        let now = self.epoch.replicas.sizes[0];
        let fits = |note: &Note| job.is_none_or(|job| Wanted::read(&note.mesh).fits(&job, note.seat, now));
        self.door.iter().map(|note| Knock { process: note.process, seat: note.seat, fits: fits(note) }).collect()
    }

    /// Knocks as a member that is not in the mesh and has come to that turn, where the ranks that
    /// are here now would make more replicas whole than the mesh has. The mesh was decided before
    /// they came, and nobody else has a reason to recover. Such a member knocks once in an epoch.
    pub(super) fn knock_again(&mut self, number: u64, wait: &Wait) -> Result<()> {
        let is_done = self.epoch.without.is_empty() || self.knocked_in == self.epoch_number;
        if is_done || !self.was_made(wait)? {
            return Ok(());
        }
        let in_mesh = self.epoch.in_mesh();
        let mut here = self.members_here(number, wait)?;
        here.extend(&in_mesh);
        let terms = Terms { dim: self.epoch.replicas.dim, any_state: true, ..Terms::default() };
        let seen = Seen {
            epoch: &self.epoch,
            is_made: true,
            here: &here,
            stateful: &in_mesh,
            lost: &self.membership.losses.all(|_| true),
            door: &[],
            notes: 0,
            terms: &terms,
            passed: Passed::default(),
        };
        let is_better =
            matches!(seen.proposal(), Decision::Epoch(next) if next.without.len() < self.epoch.without.len());
        if is_better {
            let seat = self.epoch.seats.iter().position(|holder| *holder == Some(self.me)).unwrap_or(0);
            let note = Note { number: 0, process: self.me, seat, mesh: self.mesh.clone().unwrap_or_default() };
            let (store, list) = (&self.membership.store, door(self.membership.losses.prefix()));
            let number = add_note(&**store, &list, note.to_string().as_bytes(), wait, &|_| {})?;
            fill_gaps(&**store, &list, number, wait, &|_| {})?;
            self.knocked_in = self.epoch_number;
        }
        Ok(())
    }

    /// Leaves the reason for each newcomer that this proposal is the first to refuse because of
    /// the mesh for which the newcomer asks.
    pub(super) fn explain_refusals(&self, proposal: &Decision, wait: &Wait) -> Result<()> {
        let (Decision::Epoch(epoch), Some(mesh)) = (proposal, &self.mesh) else { return Ok(()) };
        let is_refused =
            |note: &&Note| epoch.refused.contains(&note.process) && !self.epoch.refused.contains(&note.process);
        let (mesh, now) = (Wanted::read(mesh), self.epoch.replicas.sizes[0]);
        let is_misfit = |note: &&Note| !Wanted::read(&note.mesh).fits(&mesh, note.seat, now);
        for note in self.door.iter().filter(is_misfit).filter(is_refused) {
            let message = format!(
                "the mesh of the job is {}, and rank {} asks for {}: start it with the program and the options of the job",
                mesh.call,
                note.process.rank,
                Wanted::read(&note.mesh).call
            );
            let key = why(&door_note(self.membership.losses.prefix(), note.number));
            self.membership.store.set(&key, message.as_bytes(), wait)?;
            self.membership.left.note_of_others([key]);
        }
        Ok(())
    }
}
