//! A state: what the store holds, and where each process stands.

use crate::job::Job;

/// A set of processes, a bit for each.
pub(crate) type Set = u8;

/// The most seats of a mesh.
pub(crate) const SEATS: usize = 4;
/// The most processes of a job.
pub(crate) const PROCESSES: usize = 6;
/// The most decisions. Decision 0 is the start of the job.
pub(crate) const DECISIONS: usize = 8;
/// Stands in place of a process where a seat is empty.
pub(crate) const NOBODY: u8 = 15;

/// The set of one process.
pub(crate) fn one(process: u8) -> Set {
    1 << process
}

/// An epoch, as the store's record of a decision has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    /// The processes of the epoch: those that hold a seat, and the spares.
    pub(crate) members: Set,
    /// The members that are in the mesh: the holders of the seats of whole replicas. Other holders
    /// are benched.
    pub(crate) used: Set,
    /// The newcomers that found the seat that they ask for taken. They are refused if this epoch
    /// is made, because its holder has lived after they knocked. Otherwise the holder may be dead,
    /// and not noticed yet.
    pub(crate) taken: Set,
    /// The newcomers that no later decision lets in: those that earlier decisions have refused, and
    /// those that were members and were left out. They may not have read so yet.
    pub(crate) refused: Set,
    /// The process that holds each seat of the mesh.
    pub(crate) mesh: [u8; SEATS],
}

impl Plan {
    /// Returns the plan with which a job starts.
    pub(crate) fn at_start(job: &Job) -> Plan {
        let mut mesh = [NOBODY; SEATS];
        (0..job.seats).for_each(|seat| mesh[usize::from(seat)] = seat);
        Plan { members: one(job.seats + job.spares) - 1, used: one(job.seats) - 1, taken: 0, refused: 0, mesh }
    }

    /// Returns the seat of that process, if it has one.
    pub(crate) fn seat(&self, process: u8) -> Option<usize> {
        self.mesh.iter().position(|holder| *holder == process)
    }

    /// Returns the processes that hold a seat.
    pub(crate) fn holders(&self) -> Set {
        self.mesh.iter().filter(|holder| **holder != NOBODY).fold(0, |set, holder| set | one(*holder))
    }

    /// Whether each position inside a replica has a process in the mesh that is in `stateful`.
    pub(crate) fn keeps_state(&self, job: &Job, stateful: Set) -> bool {
        let found = self.used & stateful;
        let has_state = |seat: usize| self.mesh[seat] != NOBODY && found & one(self.mesh[seat]) != 0;
        let replica = usize::from(job.replica);
        (0..replica).all(|place| (place..SEATS).step_by(replica).any(has_state))
    }
}

/// A decision, which stands in the store under its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Decision {
    /// The next epoch. Its number is that of the decision.
    Epoch(Plan),
    /// The recovery has failed, on all ranks. The epoch stays.
    Failure(Why),
    /// The job has ended.
    End,
}

/// Why a recovery has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Why {
    /// A rank did not come in time.
    Timeout,
    /// Two ranks have different options.
    Mismatch,
    /// Too few ranks are left.
    TooFew,
    /// No rank that is left has the state of the training. The job is over.
    NoState,
    /// A rank was too slow while the new mesh was made.
    Late,
}

/// The verdict on the mesh of an epoch. It is written once, as a decision is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Verdict {
    /// All members have made it.
    Made,
    /// A member is lost, so the next decision is due.
    Broken,
    /// A member was too slow.
    Late,
}

/// The contents of the store. Each array has an element for each decision.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Store {
    /// The decisions.
    pub(crate) decisions: [Option<Decision>; DECISIONS],
    /// The verdicts on the meshes.
    pub(crate) verdicts: [Option<Verdict>; DECISIONS],
    /// The processes that have come to a decision.
    pub(crate) here: [Set; DECISIONS],
    /// Those of them that have the state of the training.
    pub(crate) stateful: [Set; DECISIONS],
    /// The options of the first rank that came, and whether it asks for the end of the job.
    pub(crate) options: [Option<(bool, bool)>; DECISIONS],
    /// Whether the list of losses has the note that a rank of the mesh has come to that decision.
    /// Every rank reads the list, whatever it waits for.
    pub(crate) told: [bool; DECISIONS],
    /// The members that have made their part of the mesh.
    pub(crate) met: [Set; DECISIONS],
    /// The process that has taken the right to decide; only two mistaken protocols use it.
    pub(crate) owner: [u8; DECISIONS],
    /// The processes that are known to be lost. The set only grows.
    pub(crate) lost: Set,
    /// The newcomers that have knocked. The set only grows.
    pub(crate) door: Set,
}

/// Where a process stands. A number is that of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum At {
    /// It has not started. It is a newcomer.
    Out,
    /// It has knocked, and waits for that decision.
    Door(u8),
    /// It has found its seat taken, and waits for the verdict on that epoch.
    Doubting(u8),
    /// It uses the mesh of its epoch.
    Training,
    /// It compares its options with those of the first rank.
    Comparing(u8),
    /// It is the first rank of the mesh that comes, and is about to tell the others.
    Telling(u8),
    /// It is about to note that it is here.
    Coming(u8),
    /// It looks whether all are here, and waits.
    Looking(u8),
    /// It is about to write its proposal.
    Proposing(u8, Decision),
    /// It has the right to decide, and is about to write; only a mistaken protocol does this.
    Writing(u8, Decision),
    /// It waits for the decision alone; only mistaken protocols do this.
    Reading(u8),
    /// It has made its part of the mesh of its epoch, and is about to say so.
    Meeting,
    /// It waits for the verdict on the mesh of its epoch.
    Awaiting,
    /// It is about to write that verdict.
    Settling(Verdict),
    /// Its call has failed with the failure of that decision.
    Failed(u8, Why),
    /// It was told that the others go on without it.
    Fenced,
    /// It was told that it is not let in.
    Refused,
    /// It was told that the job has ended.
    Ended,
    /// Its process has ended.
    Dead,
}

/// A process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Process {
    /// Where it stands.
    pub(crate) at: At,
    /// The number of its epoch.
    pub(crate) epoch: u8,
    /// Its epoch, as it has read it.
    pub(crate) plan: Plan,
    /// The last decision to which it has come. The protocol does not use it: it is there to be
    /// checked.
    pub(crate) came: u8,
    /// Whether it has the state of the training.
    pub(crate) has_state: bool,
    /// Whether it asks for the end of the job, and not for a recovery.
    pub(crate) asks_end: bool,
    /// Whether it is a newcomer that has not left its dm_init, so it has no options.
    pub(crate) is_new: bool,
}

/// The faults that may still happen.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Left {
    /// Deaths.
    pub(crate) losses: u8,
    /// Living processes that are taken for lost.
    pub(crate) false_losses: u8,
    /// Deadlines that pass.
    pub(crate) deadlines: u8,
    /// Calls without a reason.
    pub(crate) calls: u8,
    /// Calls for the end of the job.
    pub(crate) ends: u8,
}

/// A state.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct State {
    /// The contents of the store.
    pub(crate) store: Store,
    /// The processes. Those that the job does not have are out.
    pub(crate) processes: [Process; PROCESSES],
    /// The faults that may still happen.
    pub(crate) left: Left,
}

impl State {
    /// Returns the state of a job that trains. The spares have called dm_recover.
    pub(crate) fn at_start(job: &Job) -> State {
        let plan = Plan::at_start(job);
        let process = |number: u8| {
            let at = match number {
                _ if number < job.seats => At::Training,
                _ if number < job.seats + job.spares => At::Coming(1),
                _ => At::Out,
            };
            let has_state = number < job.seats;
            Process { at, epoch: 0, plan, came: 0, has_state, asks_end: false, is_new: at == At::Out }
        };
        let store = Store {
            decisions: [None; DECISIONS],
            verdicts: [None; DECISIONS],
            here: [0; DECISIONS],
            stateful: [0; DECISIONS],
            options: [None; DECISIONS],
            told: [false; DECISIONS],
            met: [0; DECISIONS],
            owner: [NOBODY; DECISIONS],
            lost: 0,
            door: 0,
        };
        let left = Left {
            losses: job.losses,
            false_losses: job.false_losses,
            deadlines: job.deadlines,
            calls: job.calls,
            ends: job.ends,
        };
        State { store, processes: std::array::from_fn(|number| process(number as u8)), left }
    }

    pub(crate) fn process(&self, number: u8) -> &Process {
        &self.processes[usize::from(number)]
    }

    pub(crate) fn process_mut(&mut self, number: u8) -> &mut Process {
        &mut self.processes[usize::from(number)]
    }
}
