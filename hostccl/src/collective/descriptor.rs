//! The description of a call that each rank posts for its peers, and the comparison of these
//! descriptions.

use std::fmt::{self, Display, Formatter};

use super::call::{Call, Kind, Reduction};
use crate::blame::Blame;
use crate::call_name::Name;
use crate::comm::Comm;
use crate::error::Result;
use crate::segment::{LINE, SLOTS};
use crate::types::*;

/// The description of a call, which a rank posts for its peers. It fits one cache line.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Descriptor {
    /// The call's arguments that must be the same on all ranks.
    pub(super) signature: Signature,
    /// The name under which the call is issued.
    pub(super) name: Name,
}

const _: () = assert!(size_of::<Descriptor>() <= LINE);

/// The arguments of a call that must be the same on all ranks, as plain numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Signature {
    /// A [`Kind`].
    kind: u32,
    /// A [`DataType`], or [`NONE`].
    dtype: i32,
    /// A [`ReduceOp`], [`PRE_MUL_SUM`], or [`NONE`].
    op: i32,
    /// The root, or [`NONE`].
    root: i32,
    /// The count as the caller gave it.
    count: u64,
}

/// The value of an argument that the call does not have.
const NONE: i32 = -1;
/// The operator of a reduction that `ncclRedOpCreatePreMulSum` made.
const PRE_MUL_SUM: i32 = 5;

impl Descriptor {
    /// Returns the description of a collective.
    pub(super) fn new(call: &Call, name: Name) -> Descriptor {
        let op = match call.reduction {
            None => NONE,
            Some(Reduction::Plain(op)) => op as i32,
            Some(Reduction::PreMulSum(_)) => PRE_MUL_SUM,
        };
        let signature = Signature {
            kind: call.kind as u32,
            dtype: call.dtype as i32,
            op,
            root: call.root.map_or(NONE, |root| root as i32),
            count: call.count as u64,
        };
        Descriptor { signature, name }
    }

    /// Returns the description of a call of `ncclCommSplit`.
    pub(crate) fn split(name: Name) -> Descriptor {
        let signature = Signature { kind: Kind::Split as u32, dtype: NONE, op: NONE, root: NONE, count: 0 };
        Descriptor { signature, name }
    }

    /// Posts the description in this rank's current step.
    pub(crate) fn post(&self, comm: &Comm) {
        let line = comm.segment.descriptor(comm.rank, (comm.step() % SLOTS as u64) as usize);
        // SAFETY: the line is large enough, and in this step only this rank touches it.
        unsafe { line.cast::<Descriptor>().write(*self) };
    }

    /// Reads what `rank` posted in its step of that number.
    pub(crate) fn read(comm: &Comm, rank: usize, step: u64) -> Descriptor {
        let line = comm.segment.descriptor(rank, (step % SLOTS as u64) as usize);
        // SAFETY: the line is large enough. Every bit pattern is a descriptor; one that is no call
        // only appears in a message.
        unsafe { line.cast::<Descriptor>().read_volatile() }
    }

    /// Compares what all ranks posted in the step before this one. Returns true when all made one
    /// call, and false when their calls have different names; every rank finds the same. Ends the
    /// communicator when calls of one name differ.
    pub(crate) fn compare(&self, comm: &Comm) -> Result<bool> {
        let index = ((comm.step() - 1) % SLOTS as u64) as usize;
        // SAFETY: the peers wrote the lines in the step before, which all have ended, and do not
        // write them in this one.
        let of = |rank: usize| unsafe { &*comm.segment.descriptor(rank, index).cast::<Descriptor>() };
        let is_same = |rank: usize| of(rank).signature == self.signature && of(rank).name.tag == self.name.tag;
        if (0..comm.nranks).all(is_same) {
            return Ok(true);
        }
        if (0..comm.nranks).any(|rank| of(rank).name.tag != self.name.tag) {
            return Ok(false);
        }
        let first = of(0).signature;
        let other = (1..comm.nranks).find(|&rank| of(rank).signature != first).unwrap_or(comm.rank);
        let (zero, another, other_call) = (comm.label(0), comm.label(other), of(other).signature);
        let message = format!("the ranks make different calls: {zero} calls {first}, {another} calls {other_call}");
        let signatures: Vec<Signature> = (0..comm.nranks).map(|rank| of(rank).signature).collect();
        Err(comm.fail(ncclInvalidUsage, Blame::of_minority(&signatures), &message))
    }
}

/// Describes two calls of different names that the ranks posted in an earlier step: "rank 0 is in
/// ncclAllReduce(...) along tp, rank 1 in ncclAllReduce(...) along etp".
pub(crate) fn different_names(comm: &Comm, step: u64) -> (String, Blame) {
    let index = (step % SLOTS as u64) as usize;
    // SAFETY: the ranks wrote the lines in that step, which all have ended. They write them again
    // only after they have agreed on a name.
    let of = |rank: usize| unsafe { comm.segment.descriptor(rank, index).cast::<Descriptor>().read() };
    let first = of(0);
    let other = (1..comm.nranks).find(|&rank| of(rank).name.tag != first.name.tag).unwrap_or(comm.rank);
    let message = format!("{} is in {first}, {} in {}", comm.label(0), comm.label(other), of(other));
    let tags: Vec<u64> = (0..comm.nranks).map(|rank| of(rank).name.tag).collect();
    (message, Blame::of_minority(&tags))
}

impl Display for Descriptor {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.signature, self.name.along())
    }
}

impl Display for Signature {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(Kind::name(self.kind))?;
        let Some(dtype) = DataType::from_raw(self.dtype) else { return Ok(()) };
        // A call in which each rank has a count of its own has no count to show.
        match Kind::has_one_count(self.kind) {
            true => write!(f, "({} x {}", self.count, dtype.name())?,
            false => write!(f, "({}", dtype.name())?,
        }
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
