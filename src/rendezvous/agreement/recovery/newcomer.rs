//! A newcomer: a process that has joined a job that runs already. The newcomer knocks at the door,
//! reads the decisions one after another, and is a member from the first decision that names it as
//! one.
//!
//! | the decision | the newcomer |
//! |---|---|
//! | an epoch with the newcomer as a member | is let in |
//! | an epoch with it in `taken` | is refused if the epoch is made: the process that has its rank has lived after the knock |
//! | an epoch with it in `refused` | is refused: it asks for another mesh |
//! | the end of the job, or a failure after which the job is over | is told that the job has ended |
//! | anything else | waits for the next decision |
//!
//! A refusal is final for everybody: no later decision lets the newcomer in.
//!
//! Once it is let in, it makes its part of the mesh as the others do. When the making of the mesh
//! breaks, the newcomer comes to the next turn, although its program has not called dm_recover.
//! The terms of the other ranks count then, because the newcomer has none of its own.

use std::sync::Arc;

use super::Recovery;
use super::come::{Arrival, Outcome};
use super::knock::{Note, decided_at, door, door_note, now, why};
use super::make::{MADE, Made};
use super::options::Options;
use super::wanted::Wanted;
use crate::error::{Error, Result, Status};
use crate::rendezvous::agreement::decision::{Decision, Epoch, Why};
use crate::rendezvous::agreement::notes::{add_note, fill_gaps};
use crate::rendezvous::agreement::proposal::Terms;
use crate::rendezvous::store::any_of;
use crate::wait::{Deadline, Wait};

/// The place in the mesh for which a newcomer asks.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The seat: the position of this rank in the root mesh, in row-major order of its full shape.
    /// A number beyond the seats lets the mesh grow.
    pub seat: usize,
    /// The mesh, as the ranks of the job have said it in [`Recovery::expect_mesh`]: a text of
    /// [`mesh_text`](super::mesh_text), or any other text. A newcomer that asks for another mesh is
    /// refused.
    pub mesh: &'a str,
}

/// A newcomer that is at the door, or was let in and has not come to a mesh yet.
pub(in crate::rendezvous) struct AtDoor {
    /// The newcomer's way through the decisions. Until the newcomer is let in, the epoch is the
    /// newest one that it has read.
    recovery: Recovery,
    /// When epoch 0 began, in seconds since 1970.
    began: u64,
    /// The number of the first decision that the newcomer reads.
    first: u64,
    /// The newcomer's note of the door, and the key of the note; `None` until the newcomer has
    /// knocked.
    knocked: Option<(Note, String)>,
    /// Whether the newest epoch has the newcomer in `taken`, so the verdict on that epoch is the
    /// next thing to read.
    doubts: bool,
    /// Whether a decision has let the newcomer in.
    is_in: bool,
    /// Whether the newcomer must come to the next turn before it makes its part of a mesh again.
    must_come: bool,
    /// Why the newcomer is refused. A refusal is final.
    refused: Option<Error>,
}

impl AtDoor {
    /// Returns a newcomer that has joined the world and has not knocked. `recovery` is in the
    /// epoch in which the job has started, and `began` says when that was, in seconds since 1970.
    pub(in crate::rendezvous) fn new(recovery: Recovery, began: u64) -> AtDoor {
        AtDoor {
            recovery,
            began,
            first: 1,
            knocked: None,
            doubts: false,
            is_in: false,
            must_come: false,
            refused: None,
        }
    }

    /// Returns this process's way through the decisions, on which it goes on as a member.
    pub(in crate::rendezvous) fn into_recovery(self) -> Recovery {
        let mut recovery = self.recovery;
        recovery.adopted = None;
        recovery.awaits_verdict = !recovery.is_in_mesh();
        recovery
    }

    /// Comes into the job: knocks, waits until a decision lets this process in, and makes its part
    /// of the mesh, until a mesh is made that has this process. `enter` goes on to the epoch of the
    /// recovery, and `make` makes this process's part of its mesh. Returns what `make` has returned
    /// for that mesh; `None` where the process is a member without a seat in the mesh. After an
    /// error that is no refusal, the next call goes on where this one has ended.
    pub(in crate::rendezvous) fn come_in<T>(
        &mut self,
        request: &Request<'_>,
        enter: impl Fn(&Recovery) -> Result<()>,
        mut make: impl FnMut(&Recovery) -> Result<T>,
        wait: &Wait,
    ) -> Result<Option<T>> {
        if let Some(refused) = &self.refused {
            return Err(refused.clone());
        }
        if !self.is_in {
            let own = self.recovery.watching_until(wait.deadline, wait);
            let let_in = self.knock(request, wait).and_then(|()| self.await_decision(&own));
            let_in.map_err(|error| self.recovery.membership.explain(error))?;
            (self.is_in, self.must_come) = (true, false);
            // The time of this process for the mesh begins with its seat, because it may have
            // waited at the door for any time before.
            self.recovery.seated = Some(Deadline::after(wait.deadline.timeout()));
        }
        loop {
            if std::mem::replace(&mut self.must_come, true) {
                self.come_again(wait)?;
            }
            enter(&self.recovery)?;
            if !self.recovery.is_in_mesh() {
                return Ok(None);
            }
            let made = make(&self.recovery);
            if self.recovery.make(made.as_ref().map(drop), wait)? == Made::Whole {
                return made.map(Some);
            }
        }
    }

    /// Comes to the next turn as a member that has not left its dm_init.
    fn come_again(&mut self, wait: &Wait) -> Result<()> {
        let terms = self.recovery.adopted.clone().unwrap_or_default();
        let arrival = Arrival { call: "dm_init", terms: &terms, has_state: false, lost: &[], suspects: &[] };
        if self.recovery.come(&arrival, wait)? == Outcome::Ended {
            return Err(self.refuse(ended()));
        }
        Ok(())
    }

    /// Adds the newcomer to the list at the door, once.
    fn knock(&mut self, request: &Request<'_>, wait: &Wait) -> Result<()> {
        let (Recovery { membership, .. }, me) = (&self.recovery, self.recovery.me);
        if let Some((Note { seat, mesh, .. }, _)) = &self.knocked {
            if (*seat, mesh.as_str()) == (request.seat, request.mesh) {
                return Ok(());
            }
            return Err(Error::invalid_state(format!(
                "rank {} waits to be let into the running job with {}, and cannot ask for {} any more: start another process for that",
                me.rank,
                Wanted::read(mesh).call,
                Wanted::read(request.mesh).call
            )));
        }
        let (store, prefix) = (Arc::clone(&membership.store), membership.losses.prefix().to_owned());
        // A decision from before the knock does not name this newcomer, but it says which epoch is
        // the newest one.
        self.first = decided_at(&*store, &prefix, wait)?.map_or(1, |(number, _)| number).max(1);
        self.recovery.number = self.first - 1;
        let mut note = Note { number: 0, process: me, seat: request.seat, mesh: request.mesh.to_owned() };
        let (list, text) = (door(&prefix), note.to_string());
        // The notes stay for as long as the world lives, so this process never removes them.
        let number = add_note(&*store, &list, text.as_bytes(), wait, &|_| {})?;
        note.number = usize::try_from(number).unwrap_or(0);
        log::info!("rank {}: waits as {me} to be let into the running job, as number {number} at its door", me.rank);
        self.knocked = Some((note, door_note(&prefix, usize::try_from(number).unwrap_or(0))));
        // A newcomer that has died after it took its number and before it wrote its note would
        // hide this note.
        fill_gaps(&*store, &list, number, wait, &|_| {})
    }

    /// Reads decisions until one lets this process in.
    fn await_decision(&mut self, wait: &Wait) -> Result<()> {
        loop {
            let soon = Recovery::soon(wait);
            let (store, losses) =
                (Arc::clone(&self.recovery.membership.store), Arc::clone(&self.recovery.membership.losses));
            let _ = losses.refresh(&soon);
            let number = self.recovery.number + 1;
            let key = match self.doubts {
                true => self.recovery.verdict_key(),
                false => self.recovery.decisions.key(number),
            };
            if let Some(value) = store.try_get(&key, &soon)? {
                if self.read(number, &value, &soon)? {
                    return Ok(());
                }
                continue;
            }
            if losses.any(|lost| lost == self.recovery.me) {
                let rank = self.recovery.me.rank;
                let message = format!(
                    "the job takes this process, which came back as rank {rank}, for lost: its connections had ended; start it again"
                );
                return Err(self.refuse(Error::not_member(message).with_ranks(&[rank])));
            }
            if self.recovery.epoch.members().iter().all(|member| losses.any(|lost| lost == *member)) {
                return Err(self.refuse(ended()));
            }
            if wait.deadline.passed() {
                return Err(self.late(wait, &soon));
            }
            let (next, lost) = losses.next();
            match any_of(&*store, &[&key, &lost], wait) {
                Ok((0, _)) => {}
                Ok((_, value)) => losses.note(next, &value),
                Err(error) if error.status() == Status::Timeout => {}
                Err(error) => return Err(error),
            }
            wait.cancel.check()?;
        }
    }

    /// Reads the decision of that number, or the verdict on the newest epoch where this newcomer
    /// doubts whether it is refused. Returns whether the newcomer is let in.
    fn read(&mut self, number: u64, value: &[u8], wait: &Wait) -> Result<bool> {
        if std::mem::take(&mut self.doubts) {
            return match value == MADE.as_bytes() {
                true => Err(self.refuse(self.taken())),
                // The holder of the rank may be lost.
                false => Ok(false),
            };
        }
        let me = self.recovery.me;
        let decision = self.recovery.decisions.decode(number, value)?;
        log::debug!("rank {}: at the door, decision {number} is: {decision}", me.rank);
        match decision {
            Decision::Epoch(epoch) if epoch.members().contains(&me) => {
                self.enter(number, epoch, wait)?;
                return Ok(true);
            }
            Decision::Epoch(epoch) => {
                (self.doubts, self.recovery.epoch_number) = (epoch.taken.contains(&me), number);
                let is_refused = epoch.refused.contains(&me);
                self.recovery.epoch = epoch;
                if is_refused {
                    let error = self.misfit(wait);
                    return Err(self.refuse(error));
                }
            }
            Decision::End => return Err(self.refuse(ended())),
            Decision::Failure(failure) if failure.why == Why::NoState => {
                let message = format!("the job has ended: {}", failure.error().message());
                return Err(self.refuse(Error::invalid_state(message)));
            }
            Decision::Failure(_) => {}
        }
        self.recovery.pass(number);
        Ok(false)
    }

    /// Becomes a member of the epoch of that number, on the terms on which the turn has let this
    /// process in.
    fn enter(&mut self, number: u64, epoch: Epoch, wait: &Wait) -> Result<()> {
        let recovery = &mut self.recovery;
        let key = recovery.options_key(number);
        let asked = self.knocked.as_ref().map(|(note, _)| note.mesh.clone());
        let (terms, mesh) = match recovery.membership.store.try_get(&key, wait)? {
            Some(value) => {
                let Options { terms, mesh, .. } = recovery.adopt_options(&epoch, &key, &value)?;
                (terms, Some(mesh).filter(|mesh| !mesh.is_empty()).or(asked))
            }
            // The epoch was made already, so this process is not in its mesh.
            None => (Terms { dim: epoch.replicas.dim, ..Terms::default() }, asked),
        };
        // The keys of the turns since the decision with which this process began to read may have
        // to be removed.
        recovery.last_made = (self.first - 1, recovery.epoch.members());
        (recovery.epoch_number, recovery.epoch) = (number, epoch);
        recovery.adopted = Some(terms);
        recovery.mesh = mesh;
        recovery.pass(number);
        log::info!("rank {}: is let into the running job by decision {number}, as {}", recovery.me.rank, recovery.me);
        Ok(())
    }

    /// Keeps the refusal of this newcomer, which is final.
    fn refuse(&mut self, error: Error) -> Error {
        self.refused = Some(error.clone());
        error
    }

    /// Returns the error of a newcomer whose rank is in the mesh of the newest epoch as another
    /// process. That mesh was made.
    fn taken(&self) -> Error {
        let Recovery { me, epoch, epoch_number, .. } = &self.recovery;
        let rank = me.rank;
        let in_mesh = epoch.in_mesh();
        let holder = in_mesh.iter().find(|member| member.rank == rank);
        let message = match holder.map_or(0, |holder| holder.ticket) {
            0 => format!(
                "rank {rank} lives, and has taken part in epoch {epoch_number} after this process came: end that process first, or start this one under another rank"
            ),
            ticket => format!(
                "another process came back as rank {rank} before this one: it is process {ticket} of that rank, and in the mesh of epoch {epoch_number}; end this process, or start it under another rank"
            ),
        };
        Error::new(Status::Mismatch, message).with_ranks(&[rank])
    }

    /// Returns the error of a newcomer that asks for another mesh than that of the job.
    fn misfit(&self, wait: &Wait) -> Error {
        let rank = self.recovery.me.rank;
        let store = &self.recovery.membership.store;
        let key = self.knocked.as_ref().map_or(String::new(), |(_, key)| why(key));
        let said = store.try_get(&key, wait).ok().flatten();
        let message = said.map_or_else(
            || format!("the job has refused rank {rank}: start it with the program and the options of the job"),
            |said| String::from_utf8_lossy(&said).into_owned(),
        );
        Error::new(Status::Mismatch, message).with_ranks(&[rank])
    }

    /// Returns the error of a newcomer that no decision has let in until its deadline.
    fn late(&self, wait: &Wait, soon: &Wait) -> Error {
        let Recovery { membership, me, epoch_number, epoch, .. } = &self.recovery;
        let decided = decided_at(&*membership.store, membership.losses.prefix(), soon).ok().flatten();
        let since = match (*epoch_number, decided) {
            (0, None) => Some(self.began),
            (epoch, Some((number, time))) if number == epoch => Some(time),
            _ => None,
        };
        let stands = since.map_or_else(
            || format!("epoch {epoch_number} is the newest one"),
            |since| format!("epoch {epoch_number} has stood for {} s", now().saturating_sub(since)),
        );
        let how = match &self.knocked {
            Some((note, _)) if note.seat == usize::MAX => format!(
                " (rank {} asks for no place in the mesh, so it becomes a spare in the next recovery, and dm_waiting does not count it)",
                me.rank
            ),
            // Beyond the ranks of the job, a newcomer waits for others, too.
            Some((note, _)) if note.seat >= epoch.seats.len() => {
                let row = Wanted::read(&note.mesh).row;
                let first = note.seat / row * row;
                let last = first.saturating_add(row - 1);
                let who = if row == 1 { format!("place {first}") } else { format!("places {first} to {last}") };
                format!(
                    " (rank {} is beyond the ranks of the job, so it comes in by a recovery with DM_RECOVER_GROW, whose max_size leaves room, when processes for {who} of the mesh wait together)",
                    me.rank
                )
            }
            _ => String::new(),
        };
        Error::timeout(format!(
            "the running job in {} did not let rank {} in within {} ms: {stands}. The job lets newcomers in only in a recovery: its ranks call dm_recover when dm_waiting counts a process, or when a rank is lost{how}. Call again to wait further",
            membership.store.name(),
            me.rank,
            wait.deadline.timeout().as_millis()
        ))
    }
}

/// Returns the error of a newcomer whose job is over.
pub(in crate::rendezvous) fn ended() -> Error {
    Error::invalid_state(
        "the job that ran here has ended: its ranks have left, or all of them are lost; start a new job, with all of its ranks and without DM_JOIN=running",
    )
}
