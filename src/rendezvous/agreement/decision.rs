//! The decisions of a job that recovers from lost ranks (docs/recovery.md): which processes go on
//! together, or why nobody does.
//!
//! Decisions are numbered 1, 2, 3 and so on, and each is written once. The store holds decision `n`
//! under `<prefix>/decision/<n>`, and nobody removes or changes it while the world lives. A rank
//! acts only on a decision that it has read back from the store. So all ranks act on the same one,
//! whatever each of them has proposed.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::verdict::Verdict;
use crate::error::{Error, Result};
use crate::rendezvous::incarnation::Incarnation;
use crate::rendezvous::store::Store;
use crate::wait::Wait;

mod text;

/// A decision of the ranks under one number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// The next epoch. The number of the epoch is the number of the decision.
    Epoch(Epoch),
    /// The recovery has failed on all ranks, and the epoch stays.
    Failure(Failure),
    /// The job has ended.
    End,
}

/// The members of a job and their seats, between two recoveries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Epoch {
    /// The number of ranks of the world. The number grows when the rank of a newcomer is not below
    /// it.
    pub size: usize,
    /// How the seats are cut into replicas.
    pub replicas: Replicas,
    /// The process that holds each seat of the full shape; `None` where a seat is empty.
    pub seats: Vec<Option<Incarnation>>,
    /// The replicas, in ascending order, that are not in the mesh because the holder of a seat is
    /// missing. The holders of the other seats of these replicas are benched.
    pub without: Vec<usize>,
    /// The members without a seat, in ascending order.
    pub spares: Vec<Incarnation>,
    /// The processes of the mesh that need the state of the training, in ascending order.
    pub stateless: Vec<Incarnation>,
    /// The newcomers whose rank another process has in the mesh, in ascending order. They are
    /// refused if this epoch is made, because the other process has then lived after they knocked.
    pub taken: Vec<Incarnation>,
    /// The newcomers that no later decision lets in, in ascending order: those that were refused,
    /// and those that were members and were left out. A process is in the list until it is known to
    /// be lost.
    pub refused: Vec<Incarnation>,
    /// How many notes of the door were read for this decision. A newcomer of one of these notes
    /// that is in no list of the epoch got no place, so it is no reason for another recovery.
    pub door: usize,
}

/// The sizes of a mesh in its full shape, and the dimension along which it can shrink. A replica is
/// an index of that dimension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replicas {
    /// The sizes of the dimensions. Seats are in row-major order.
    pub sizes: Vec<usize>,
    /// The number of the dimension of replicas.
    pub dim: usize,
}

/// Why a recovery has failed. All ranks get the same error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The kind of the failure. A rank that waits for the next decision acts on it.
    pub why: Why,
    /// The error that every rank of the mesh returns.
    error: Verdict,
}

/// The kinds of failure of a recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// Ranks did not come in time.
    Timeout,
    /// Ranks came with different options.
    Mismatch,
    /// A rank has refused its own call.
    Refused,
    /// Too few replicas are left.
    TooFew,
    /// No rank that is left has the state of some part of a replica. The job is over.
    NoState,
}

impl Replicas {
    /// Returns the number of seats.
    pub fn num_seats(&self) -> usize {
        self.sizes.iter().product()
    }

    /// Returns the number of replicas.
    pub fn count(&self) -> usize {
        self.sizes[self.dim]
    }

    /// Returns the replica to which this seat belongs. With the sizes (2, 4) and replicas along
    /// dimension 0, seat 6 belongs to replica 1.
    pub fn replica_of(&self, seat: usize) -> usize {
        seat / self.stride() % self.count()
    }

    /// Returns the position of this seat inside its replica. With the sizes (2, 4) and replicas
    /// along dimension 0, seat 6 has the position 2.
    pub fn position_of(&self, seat: usize) -> usize {
        seat / (self.stride() * self.count()) * self.stride() + seat % self.stride()
    }

    fn stride(&self) -> usize {
        self.sizes[self.dim + 1..].iter().product()
    }
}

impl Epoch {
    /// Returns the epoch in which a job of `size` ranks starts. `ranks` hold the seats, and the
    /// other ranks are spares.
    pub fn first(size: usize, replicas: Replicas, ranks: &[i32]) -> Epoch {
        let holders: BTreeSet<i32> = ranks.iter().copied().collect();
        let others = (0..size as i32).filter(|rank| !holders.contains(rank));
        Epoch {
            size,
            replicas,
            seats: ranks.iter().map(|rank| Some(Incarnation::first(*rank))).collect(),
            without: Vec::new(),
            spares: others.map(Incarnation::first).collect(),
            stateless: Vec::new(),
            taken: Vec::new(),
            refused: Vec::new(),
            door: 0,
        }
    }

    /// Returns the processes that hold a seat.
    pub fn holders(&self) -> impl Iterator<Item = Incarnation> + '_ {
        self.seats.iter().flatten().copied()
    }

    /// Returns the processes of the epoch: those that hold a seat, and the spares.
    pub fn members(&self) -> BTreeSet<Incarnation> {
        self.holders().chain(self.spares.iter().copied()).collect()
    }

    /// Returns the processes of the mesh: the holders of the seats of its replicas.
    pub fn in_mesh(&self) -> BTreeSet<Incarnation> {
        let without: BTreeSet<usize> = self.without.iter().copied().collect();
        let seats = self.seats.iter().enumerate();
        let in_mesh = seats.filter(|(seat, _)| !without.contains(&self.replicas.replica_of(*seat)));
        in_mesh.filter_map(|(_, holder)| *holder).collect()
    }

    /// Whether the parts fit together, as they do in every epoch that a rank proposes.
    fn is_sound(&self) -> bool {
        let seats = self.replicas.sizes.iter().try_fold(1_usize, |all, size| all.checked_mul(*size));
        if self.replicas.dim >= self.replicas.sizes.len() || seats != Some(self.seats.len()) || self.seats.is_empty() {
            return false;
        }
        let rises = |list: &[Incarnation]| list.windows(2).all(|pair| pair[0] < pair[1]);
        let lists = [&self.spares, &self.stateless, &self.taken, &self.refused];
        if !lists.into_iter().all(|list| rises(list)) || !self.without.windows(2).all(|pair| pair[0] < pair[1]) {
            return false;
        }
        let (members, in_mesh) = (self.members(), self.in_mesh());
        let ranks: BTreeSet<i32> = members.iter().map(|member| member.rank).collect();
        let size = i32::try_from(self.size).unwrap_or(-1);
        let out: BTreeSet<_> = self.taken.iter().chain(&self.refused).collect();
        let seats_in_mesh =
            self.seats.len() / self.replicas.count() * self.replicas.count().saturating_sub(self.without.len());
        self.without.iter().all(|replica| *replica < self.replicas.count())
            && seats_in_mesh > 0
            && in_mesh.len() == seats_in_mesh
            && members.len() == self.holders().count() + self.spares.len()
            && ranks.len() == members.len()
            && ranks.last().is_none_or(|last| *last < size)
            && self.stateless.iter().all(|process| in_mesh.contains(process))
            && out.len() == self.taken.len() + self.refused.len()
            && out.iter().all(|process| !members.contains(process))
    }
}

impl Failure {
    /// Returns the failure of that kind with which every rank of the mesh returns `error`.
    pub fn new(why: Why, error: &Error) -> Failure {
        Failure { why, error: Verdict::of(error) }
    }

    /// Returns the error that every rank of the mesh returns.
    pub fn error(&self) -> Error {
        let told = self.error.clone().into_result();
        told.err().unwrap_or_else(|| Error::internal("a recovery has failed without an error"))
    }
}

/// The decisions of one world, as its store holds them.
#[derive(Clone)]
pub struct Decisions {
    /// The store.
    store: Arc<dyn Store>,
    /// The keys of the world begin with this prefix.
    prefix: String,
}

impl Decisions {
    /// Returns the decisions of the world whose keys begin with `prefix`.
    pub fn new(store: Arc<dyn Store>, prefix: &str) -> Decisions {
        Decisions { store, prefix: prefix.to_owned() }
    }

    /// Returns the key of decision `number`.
    pub fn key(&self, number: u64) -> String {
        format!("{}/decision/{number}", self.prefix)
    }

    /// Makes this decision `number` unless the store has that decision already, and returns the
    /// one that the store has then.
    pub fn decide(&self, number: u64, decision: &Decision, wait: &Wait) -> Result<Decision> {
        let stands = self.store.set_once(&self.key(number), decision.to_string().as_bytes(), wait)?;
        self.decode(number, &stands)
    }

    /// Returns decision `number`; `None` when it was not made yet.
    pub fn read(&self, number: u64, wait: &Wait) -> Result<Option<Decision>> {
        let stands = self.store.try_get(&self.key(number), wait)?;
        stands.map(|value| self.decode(number, &value)).transpose()
    }

    /// Decodes `value`, which the store has under the key of decision `number`. No rank writes a
    /// text that cannot be read, so such a text is a failure of the store.
    pub(super) fn decode(&self, number: u64, value: &[u8]) -> Result<Decision> {
        let text = String::from_utf8_lossy(value);
        text.parse().map_err(|()| {
            let start: String = text.chars().take(40).collect();
            Error::store(format!(
                "the store at {} gave an unreadable decision ({start:?}) under the key {}: it must give the values back as they were set",
                self.store.name(),
                self.key(number)
            ))
        })
    }
}
