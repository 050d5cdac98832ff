//! Collectives: steps that all ranks take together.
//!
//! A rank numbers its steps through the life of the communicator. In a step it works on slots; to end it, it counts itself
//! in, and whoever comes last opens the next step for all: one wait and at most one wake-up call for each step. A collective of `n`
//! chunks is a pipeline: chunk `i` has the slots of the step `i` steps after the collective's first. The last stage of a collective and
//! the first of the next share a step.
//!
//! A stage has two halves. In front of the count a rank does what the others wait for; behind it, before it waits itself, what they do
//! not: it copies out what is ready and copies the next chunk in. So ranks that share a processor, or are late for a moment, keep nobody
//! waiting while there is other work. The slots of step `s` are written by their owners after all have ended step `s - 2` and before the
//! owner ends `s`, are read by the others after all have ended `s` (parts that a rank has reduced: `s + 1`), and by nobody who
//! has ended step `s + 3`: so five slots in turn suffice.
//!
//! | collective | what rank `r` does with chunk `i` |
//! |---|---|
//! | all-reduce, reduce | copies it in; reduces part `r`; copies the others' parts out (a reduce: root only) |
//! | all-reduce, small | copies it in; reduces everything, the same way on every rank |
//! | reduce-scatter | copies all parts in; reduces part `r` into the result |
//! | all-gather, all-to-all, gather | copies it in; copies the others' out |
//! | broadcast, scatter | the root copies it in; the others copy it out |
//!
//! Every rank puts down a description of its call in the first step, and every rank compares them all in the
//! second: calls that do not fit together fail on all ranks, with the values. Calls of different names are withdrawn, and one after
//! the other tried again (module `turn`).

mod stages;

use std::sync::Arc;

use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::meeting::Meeting;
use crate::operation::{Operation, Poll};
use crate::segment::{LINE, SLOTS};
use crate::turn::{Name, Pass, Place};
use crate::types::*;

/// Which collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Kind {
    AllReduce = 1,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    AllToAll,
    Gather,
    Scatter,
    Split,
}

impl Kind {
    const ALL: [(Kind, &'static str); 9] = [
        (Kind::AllReduce, "ncclAllReduce"),
        (Kind::Reduce, "ncclReduce"),
        (Kind::Broadcast, "ncclBroadcast"),
        (Kind::AllGather, "ncclAllGather"),
        (Kind::ReduceScatter, "ncclReduceScatter"),
        (Kind::AllToAll, "ncclAlltoAll"),
        (Kind::Gather, "ncclGather"),
        (Kind::Scatter, "ncclScatter"),
        (Kind::Split, "ncclCommSplit"),
    ];

    fn name(raw: u32) -> &'static str {
        Kind::ALL.iter().find(|(kind, _)| *kind as u32 == raw).map_or("an unknown call", |(_, name)| name)
    }
}

/// How elements are reduced.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Reduction {
    Plain(ReduceOp),
    /// Multiplied by this rank's scalar, then summed.
    PreMulSum([u8; 8]),
}

/// What a rank says about its call; compared between ranks.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Descriptor {
    what: What,
    name: Name,
}

const _: () = assert!(size_of::<Descriptor>() <= LINE);

/// The call without its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
struct What {
    kind: u32,
    dtype: i32,
    /// [`ReduceOp`], [`PRE_MUL_SUM`], or [`NONE`].
    op: i32,
    /// [`NONE`] where there is no root.
    root: i32,
    count: u64,
}

const NONE: i32 = -1;
const PRE_MUL_SUM: i32 = 5;

impl Descriptor {
    fn new(call: &Call, name: Name) -> Descriptor {
        let op = match call.reduction {
            None => NONE,
            Some(Reduction::Plain(op)) => op as i32,
            Some(Reduction::PreMulSum(_)) => PRE_MUL_SUM,
        };
        let what = What {
            kind: call.kind as u32,
            dtype: call.dtype as i32,
            op,
            root: call.root.map_or(NONE, |root| root as i32),
            count: call.count as u64,
        };
        Descriptor { what, name }
    }

    /// That of `ncclCommSplit`.
    pub(crate) fn split(name: Name) -> Descriptor {
        let what = What { kind: Kind::Split as u32, dtype: NONE, op: NONE, root: NONE, count: 0 };
        Descriptor { what, name }
    }

    /// Puts it down for the current step.
    pub(crate) fn post(&self, comm: &Comm) {
        let line = comm.segment.descriptor(comm.rank, (comm.step() % SLOTS as u64) as usize);
        // SAFETY: a line for it, which in this step only this rank touches.
        unsafe { line.cast::<Descriptor>().write(*self) };
    }

    /// What `rank` put down when it ended its step number `step`.
    pub(crate) fn of(comm: &Comm, rank: usize, step: u64) -> Descriptor {
        let line = comm.segment.descriptor(rank, (step % SLOTS as u64) as usize);
        // SAFETY: a line for it. Every bit pattern is a descriptor, and one that is no call is only told, not acted on.
        unsafe { line.cast::<Descriptor>().read_volatile() }
    }

    /// Compares the descriptors that all ranks put down in the step before this one. Whether they are one call; if not, they have different
    /// names, and every rank finds that.
    pub(crate) fn compare(&self, comm: &Comm) -> Result<bool> {
        let index = ((comm.step() - 1) % SLOTS as u64) as usize;
        // SAFETY: written in the step before, which all ranks have ended; not written in this one.
        let of = |rank: usize| unsafe { &*comm.segment.descriptor(rank, index).cast::<Descriptor>() };
        if (0..comm.nranks).all(|rank| of(rank).what == self.what && of(rank).name.tag == self.name.tag) {
            return Ok(true);
        }
        if (0..comm.nranks).any(|rank| of(rank).name.tag != self.name.tag) {
            return Ok(false);
        }
        let first = of(0).what;
        let other = (1..comm.nranks).find(|&rank| of(rank).what != first).unwrap_or(comm.rank);
        let (zero, another, other_call) = (comm.label(0), comm.label(other), of(other).what);
        let message = format!("the ranks make different calls: {zero} calls {first}, {another} calls {other_call}");
        Err(comm.fail(ncclInvalidUsage, None, &message))
    }
}

/// "rank 0 is in ncclAllReduce(...) along tp, rank 1 in ncclAllReduce(...) along etp": calls of different names in a step of the past.
pub(crate) fn posted(comm: &Comm, step: u64) -> String {
    let index = (step % SLOTS as u64) as usize;
    // SAFETY: written in that step, which all ranks have ended, and not again while they cannot go on.
    let of = |rank: usize| unsafe { comm.segment.descriptor(rank, index).cast::<Descriptor>().read() };
    let first = of(0);
    let other = (1..comm.nranks).find(|&rank| of(rank).name.tag != first.name.tag).unwrap_or(comm.rank);
    format!("{} is in {first}, {} in {}", comm.label(0), comm.label(other), of(other))
}

impl std::fmt::Display for Descriptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.what, self.name.along())
    }
}

impl std::fmt::Display for What {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(Kind::name(self.kind))?;
        let Some(dtype) = DataType::from_raw(self.dtype) else { return Ok(()) };
        write!(f, "({} x {}", self.count, dtype.name())?;
        match ReduceOp::from_raw(self.op) {
            Some(op) => write!(f, ", {}", op.name())?,
            None if self.op == PRE_MUL_SUM => f.write_str(", premulsum")?,
            None => {}
        }
        if self.root != NONE {
            write!(f, ", root {}", self.root)?;
        }
        f.write_str(")")
    }
}

/// The arguments of a collective, checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    pub(crate) send: *const u8,
    pub(crate) recv: *mut u8,
    /// As the caller gave it: elements of each rank's part, or of the whole.
    pub(crate) count: usize,
    pub(crate) dtype: DataType,
    pub(crate) reduction: Option<Reduction>,
    pub(crate) root: Option<usize>,
}

/// A collective under way.
pub(crate) struct Collective {
    comm: Arc<Comm>,
    call: Call,
    descriptor: Descriptor,
    meeting: Meeting,
    plan: stages::Plan,
    stage: usize,
    /// The step of its first stage.
    first: u64,
    /// Whether the step before the next stage has yet to end on all ranks.
    waiting: bool,
    inputs: Vec<*const u8>,
}

// SAFETY: the buffers are the caller's, who promises them for as long as the call is under way, on whatever thread.
unsafe impl Send for Collective {}

impl Collective {
    /// # Safety
    /// The buffers hold what the call says and stay there until the operation is dropped.
    pub(crate) unsafe fn new(comm: Arc<Comm>, call: Call, name: Name) -> Result<Collective> {
        comm.check_open()?;
        let plan = stages::Plan::new(&call, comm.segment.layout());
        let inputs = Vec::with_capacity(comm.nranks);
        Ok(Collective {
            comm,
            descriptor: Descriptor::new(&call, name),
            meeting: Meeting::new(name),
            call,
            plan,
            stage: 0,
            first: 0,
            waiting: false,
            inputs,
        })
    }

    pub(crate) fn name(&self) -> &Name {
        &self.descriptor.name
    }
}

impl Operation for Collective {
    fn poll(&mut self) -> Result<Poll> {
        loop {
            if self.waiting {
                if let Some(blocked) = self.comm.step_blocked() {
                    self.comm.check()?;
                    return Ok(blocked);
                }
                self.waiting = false;
                if self.stage == 1 && !self.descriptor.compare(&self.comm)? {
                    // Nothing of it has reached another rank but slots that nobody reads.
                    self.stage = 0;
                    self.meeting.withdraw(&self.comm);
                }
            }
            if self.stage == 0 {
                self.comm.check_before()?;
                let (comm, what) = (&self.comm, &self.descriptor.what);
                if let Some(blocked) = self.meeting.poll(comm, || what.to_string())? {
                    return Ok(blocked);
                }
                self.first = self.comm.step();
                self.descriptor.post(&self.comm);
            }
            // SAFETY: `new` demands valid buffers; the stages follow the step protocol above.
            unsafe { self.front() };
            if self.stage + 1 == self.plan.stages {
                return Ok(Poll::Done);
            }
            self.comm.end_step();
            // SAFETY: as above.
            unsafe { self.behind() };
            self.stage += 1;
            self.waiting = true;
        }
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        Some(&self.comm)
    }

    fn describe(&self) -> String {
        format!("{} on {}", self.descriptor.what, self.comm.place())
    }

    fn take_pass(&mut self) -> Option<Pass> {
        let fresh = Pass::new(Place::Collectives, self.descriptor.name);
        Some(std::mem::replace(&mut self.meeting.pass, fresh))
    }

    fn give_pass(&mut self, pass: Pass) {
        self.meeting.pass = pass;
    }

    fn end(&mut self) -> Result<()> {
        self.meeting.pass.leave(&self.comm)
    }
}

impl Drop for Collective {
    fn drop(&mut self) {
        // What failed here has its error already.
        let _ = self.meeting.pass.leave(&self.comm);
    }
}

/// Checks a root.
pub(crate) fn check_root(root: i32, nranks: usize) -> Result<usize> {
    usize::try_from(root)
        .ok()
        .filter(|&root| root < nranks)
        .ok_or_else(|| Error::argument(format!("root {root} is not a rank of {nranks}")))
}
