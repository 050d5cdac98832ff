//! The jobs that are checked: how many ranks they have, and what can go wrong in them.

/// A job, with bounds on what can happen to it. Its processes are numbered: first those that hold
/// the seats of the mesh at the start, then the spares, then the newcomers.
#[derive(Debug, Clone)]
pub struct Job {
    /// How many seats the mesh has at the start. Seat `k` is the mesh's position `k`, which rank
    /// `k` holds at the start.
    pub seats: u8,
    /// How many seats in a row make a replica, 1 or more. The mesh has two dimensions, and a
    /// replica is an index of the outer one. A replica with an empty seat is left out of the mesh.
    pub replica: u8,
    /// How many ranks wait as spares.
    pub spares: u8,
    /// For each newcomer, the seat that it asks for. A newcomer may start at any time. A number of
    /// at least `seats` lets the mesh grow. [`NO_SEAT`] is a newcomer in the place of the first
    /// spare.
    pub newcomers: &'static [u8],
    /// How many processes die at most.
    pub losses: u8,
    /// How many living processes the store takes for lost at most, because their connections end.
    pub false_losses: u8,
    /// How many deadlines pass at most while a rank waits.
    pub deadlines: u8,
    /// How many times a rank calls dm_recover for a reason that the model does not have, such as a
    /// failed communicator or a newcomer, and how many times a rank calls again after an error.
    pub calls: u8,
    /// The meaning of a deadline for ranks that are not known to be lost and do not come.
    pub silent: Silent,
    /// How many times a rank asks at most for the end of the job.
    pub ends: u8,
    /// The least number of replicas with which the job goes on.
    pub least: u8,
    /// A process whose options differ from those of all others.
    pub odd: Option<u8>,
    /// A newcomer that asks for another mesh than that of the job.
    pub misfit: Option<u8>,
    /// A mistake in the protocol, which the checker must find.
    pub mistake: Option<Mistake>,
}

/// The meaning of a deadline for ranks that are not known to be lost, and do not come before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Silent {
    /// The recovery fails on all ranks, and names them.
    Fails,
    /// The others go on without them.
    LeftOut,
}

/// What a newcomer asks for that takes the place of a spare.
pub const NO_SEAT: u8 = u8::MAX;

impl Job {
    /// Returns a job of that many ranks to which nothing happens.
    pub fn of(seats: u8) -> Job {
        Job {
            seats,
            replica: 1,
            spares: 0,
            newcomers: &[],
            losses: 0,
            false_losses: 0,
            deadlines: 0,
            calls: 0,
            ends: 0,
            silent: Silent::Fails,
            least: 1,
            odd: None,
            misfit: None,
            mistake: None,
        }
    }

    /// Returns the number of processes.
    pub(crate) fn processes(&self) -> u8 {
        self.seats + self.spares + self.newcomers.len() as u8
    }

    /// Returns the seat that this newcomer asks for, or `None` for a process that is no newcomer.
    pub(crate) fn claim(&self, process: u8) -> Option<u8> {
        let first = self.seats + self.spares;
        process.checked_sub(first).map(|number| self.newcomers[usize::from(number)])
    }

    /// Returns the rank of a process. A newcomer for a seat of the start has the rank that held the
    /// seat then. Two processes of one rank are never members at the same time.
    pub(crate) fn rank(&self, process: u8) -> u8 {
        match self.claim(process) {
            Some(NO_SEAT) => self.seats,
            Some(seat) if seat < self.seats => seat,
            _ => process,
        }
    }

    pub(crate) fn has(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    /// Whether nobody is ever taken for lost who lives.
    pub(crate) fn is_strict(&self) -> bool {
        self.silent == Silent::Fails && self.false_losses == 0
    }
}

/// A mistake in the protocol. tests/mistakes.rs checks that the checker finds each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mistake {
    /// The proposer writes its decision without compare-and-set, and acts on what it has written.
    PlainWrite,
    /// The proposer first takes the right to decide, and writes the decision afterwards. (A store
    /// of callbacks without `compare_set` does so.)
    DecidesInTwoSteps,
    /// Only the rank that came first may propose.
    OneProposer,
    /// A rank proposes as soon as it has come, without waiting for the others.
    AwaitsNobody,
    /// A decision waits for spares and benched ranks, too.
    SparesAwaited,
    /// A rank looks whether all are here when it comes, and not when a loss is noticed later.
    LossWakesNobody,
    /// A rank that calls dm_recover does not end what the others do with the mesh.
    EndTellsNobody,
    /// Only the rank that came first tells the others that it has come.
    FirstAloneTells,
    /// The notes of ranks that are here have no number of the decision in their keys.
    NoNumberInKeys,
    /// The store's record of decisions is removed when the next epoch is made.
    DecisionsForgotten,
    /// A rank that the decision does not list goes on all the same.
    NoFence,
    /// Losses and decisions name ranks and not processes.
    NoTickets,
    /// A newcomer takes its seat although the rank that holds the seat is here.
    DoorForAll,
    /// A newcomer that was refused is let in by a later decision, if it has not read so yet.
    RefusalForgotten,
    /// A newcomer that was a member and was left out counts as one that waits at the door.
    LeftOutReturns,
    /// A spare takes a seat of a replica that stays incomplete.
    SparesWasted,
    /// A rank that holds a seat counts as a rank that has the state of the training.
    StateAssumed,
    /// Options are not compared.
    OptionsIgnored,
    /// The mesh for which a newcomer asks is not compared.
    ShapeIgnored,
    /// A newcomer at the door looks at decisions only, and not at the list of losses.
    DoorWithoutLosses,
    /// Each rank judges by itself whether the new mesh was made.
    OwnVerdict,
}
