//! The description of a call that each rank posts for its peers, and the comparison of these
//! descriptions.

use std::fmt::{self, Display, Formatter};

use super::call::{Call, Kind, Reduction};
use crate::blame::Blame;
use crate::call_name::Name;
use crate::comm::Comm;
use crate::cut::{MESSAGE_BYTES, cut};
use crate::error::{Error, Result};
use crate::event::BESIDE;
use crate::segment::{LINE, MAX_RANKS, SLOTS};
use crate::types::*;

/// The description of a call, which a rank posts for its peers. It fits one cache line.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Descriptor {
    /// The call's arguments that must be the same on all ranks.
    pub(super) signature: Signature,
    /// The name under which the call is issued.
    pub(crate) name: Name,
}

const _: () = assert!(size_of::<Descriptor>() <= LINE);

/// The arguments of a call that must be the same on all ranks, as plain numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Signature {
    /// A [`Kind`].
    kind: u8,
    /// A [`DataType`], or [`NONE`].
    dtype: i8,
    /// A [`ReduceOp`], [`PRE_MUL_SUM`], or [`NONE`].
    op: i16,
    /// The root, or [`NONE`].
    root: i32,
    /// The count as the caller gave it.
    count: u64,
}

/// In a communicator of two ranks: the bytes that a rank hands to the other rank when it ends the
/// step in which it posts its call. They lie in the cache line that the other rank polls. In a step
/// that hands over nothing, `tag` is 0. No name has the tag 0.
#[repr(C)]
struct HandedOver {
    /// The tag of the call's name.
    tag: u64,
    /// The call's arguments.
    signature: Signature,
    /// The rank's data, where it is so small that it does not go through the rank's slot.
    data: Small,
}

/// The most bytes of data that a rank hands over with the end of a step.
pub(super) const SMALL: usize = 16;
/// Room for that data.
pub(super) type Small = [u64; SMALL / 8];

const _: () = assert!(size_of::<HandedOver>() <= BESIDE && align_of::<HandedOver>() == 8);

/// The value of an argument that the call does not have.
const NONE: i8 = -1;
/// The operator of a reduction that `ncclRedOpCreatePreMulSum` made.
const PRE_MUL_SUM: i16 = 5;

impl Descriptor {
    /// Returns the description of a collective.
    pub(crate) fn new(call: &Call, name: Name) -> Descriptor {
        let op = match call.reduction {
            None => NONE.into(),
            Some(Reduction::Plain(op)) => op as i16,
            Some(Reduction::PreMulSum(_)) => PRE_MUL_SUM,
        };
        let signature = Signature {
            kind: call.kind as u8,
            dtype: call.dtype as i8,
            op,
            root: call.root.map_or(NONE.into(), |root| root as i32),
            count: call.count as u64,
        };
        Descriptor { signature, name }
    }

    /// Whether `other` is a call with the same arguments under the same name.
    pub(crate) fn is_same(&self, other: &Descriptor) -> bool {
        self.signature == other.signature && self.has_name_of(other)
    }

    /// Whether `other` is a call under the same name.
    pub(crate) fn has_name_of(&self, other: &Descriptor) -> bool {
        self.name.tag == other.name.tag
    }

    /// Describes the call without its name.
    pub(crate) fn call(&self) -> String {
        self.signature.to_string()
    }

    /// Returns the description of a call that makes communicators: a split or a growth.
    pub(crate) fn making(kind: Kind, name: Name) -> Descriptor {
        let signature = Signature { kind: kind as u8, dtype: NONE, op: NONE.into(), root: NONE.into(), count: 0 };
        Descriptor { signature, name }
    }

    /// Posts the description in this rank's current step.
    pub(crate) fn post(&self, comm: &Comm) {
        let line = comm.segment.descriptor(comm.rank, (comm.step() % SLOTS as u64) as usize);
        // SAFETY: the line is large enough, and in this step only this rank touches it.
        unsafe { line.cast::<Descriptor>().write(*self) };
    }

    /// Ends the step in which this rank has posted the description. In a communicator of two ranks
    /// on one host, it also hands the description and `data` to the other rank.
    #[inline]
    pub(super) fn end_step(&self, comm: &Comm, data: Small) {
        let handed_over = HandedOver { tag: self.name.tag, signature: self.signature, data };
        // SAFETY: there are enough bytes, as asserted above. The other rank does not read them
        // before this step has ended.
        comm.end_step_handing_over(|to| unsafe { to.cast::<HandedOver>().write(handed_over) });
    }

    /// Returns the address of the small data of `rank`, which is the other rank of the two. `ended`
    /// is the number of steps that `rank` had ended when it handed the data over.
    #[inline]
    pub(super) fn small_data(comm: &Comm, rank: usize, ended: u64) -> *mut u8 {
        // SAFETY: the address is within the bytes that are handed over.
        unsafe { comm.handed_over(rank, ended).add(std::mem::offset_of!(HandedOver, data)) }
    }

    /// Reads what `rank` posted in its step of that number.
    pub(crate) fn read(comm: &Comm, rank: usize, step: u64) -> Descriptor {
        let line = comm.segment.descriptor(rank, (step % SLOTS as u64) as usize);
        // SAFETY: the line is large enough. Every bit pattern is a valid descriptor. A pattern that
        // stands for no call only shows in an error message.
        unsafe { line.cast::<Descriptor>().read_volatile() }
    }

    /// Compares what all ranks posted in the step before this one. Returns true when all ranks made
    /// the same call, and false when their calls have different names. Every rank gets the same
    /// answer. Ends the communicator when calls of one name differ.
    pub(crate) fn compare(&self, comm: &Comm) -> Result<bool> {
        if let Some(other) = comm.other_of_two() {
            // SAFETY: the other rank wrote the bytes before it ended the last step. It writes there
            // again only after this rank has ended the current step.
            let theirs = unsafe { &*comm.handed_over(other, comm.step()).cast::<HandedOver>() };
            if theirs.tag == self.name.tag && theirs.signature == self.signature {
                return Ok(true);
            }
        }
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
        let calls: Vec<Descriptor> = (0..comm.nranks).map(|rank| *of(rank)).collect();
        Err(fail_different_calls(comm, &calls))
    }
}

/// Ends the communicator because its ranks make different calls under one name. `calls` has the
/// call of each rank of the whole communicator.
pub(crate) fn fail_different_calls(comm: &Comm, calls: &[Descriptor]) -> Error {
    let first = calls[0].signature;
    let other = calls.iter().position(|call| call.signature != first).unwrap_or(0);
    let (zero, another) = (comm.labels.rank(0, None), comm.labels.rank(other, None));
    let other_call = calls[other].signature;
    let message = format!("the ranks make different calls: {zero} calls {first}, {another} calls {other_call}");
    let signatures: Vec<Signature> = calls.iter().map(|call| call.signature).collect();
    comm.fail_whole(ncclInvalidUsage, Blame::of_minority(&signatures), &message, "")
}

/// Describes two calls of different names: "rank 0 is in ncclAllReduce(...) along tp, rank 1 in
/// ncclAllReduce(...) along etp". `calls` has the call of each rank of the whole communicator.
pub(crate) fn describe_different_names(comm: &Comm, calls: &[Descriptor]) -> (String, Blame) {
    let first = calls[0];
    let other = calls.iter().position(|call| call.name.tag != first.name.tag).unwrap_or(0);
    let (zero, another) = (comm.labels.rank(0, None), comm.labels.rank(other, None));
    let message = format!("{zero} is in {first}, {another} in {}", calls[other]);
    let tags: Vec<u64> = calls.iter().map(|call| call.name.tag).collect();
    (message, Blame::of_minority(&tags))
}

/// Describes two calls of different names that the ranks posted in an earlier step, `step`. Also
/// returns whom to blame.
pub(crate) fn different_names(comm: &Comm, step: u64) -> (String, Blame) {
    if comm.span.is_some() {
        // SAFETY: seat 0 has written the difference in the step after that one. The seats write to
        // the slots again only after they have agreed on a name.
        return unsafe { Difference::read(difference(comm, step)) };
    }
    let index = (step % SLOTS as u64) as usize;
    // SAFETY: the ranks wrote the lines in that step, which all have ended. They write them again
    // only after they have agreed on a name.
    let of = |rank: usize| unsafe { comm.segment.descriptor(rank, index).cast::<Descriptor>().read() };
    describe_different_names(comm, &(0..comm.nranks).map(of).collect::<Vec<_>>())
}

/// The place where seat 0 of a host keeps the difference between the names that the hosts found.
/// `step` is the step in which this host's seats posted their calls.
fn difference(comm: &Comm, step: u64) -> *mut Difference {
    let slot = comm.segment.data(0, ((step + 1) % SLOTS as u64) as usize);
    // SAFETY: a slot has at least 48 KiB.
    unsafe { slot.add(LINE).cast() }
}

/// Keeps a difference between names for the case that the ranks never find a common name. Seat 0
/// calls this in the step after `step`.
pub(crate) fn keep_difference(comm: &Comm, step: u64, calls: &[Descriptor]) {
    let (text, blame) = describe_different_names(comm, calls);
    // SAFETY: in this step only seat 0 touches the slot, which has room for it.
    unsafe { Difference::write(difference(comm, step), &text, &blame) };
}

/// A difference between names, as one seat tells it to the other seats of its host.
#[repr(C)]
struct Difference {
    /// The length of the text in bytes.
    length: u32,
    /// How many ranks are to blame.
    blamed: u32,
    /// The text.
    text: [u8; MESSAGE_BYTES],
    /// The ranks to blame.
    ranks: [u32; MAX_RANKS as usize],
}

impl Difference {
    /// # Safety
    /// The place is writable, and nobody else touches it.
    unsafe fn write(at: *mut Difference, text: &str, blame: &Blame) {
        let text = cut(text, MESSAGE_BYTES);
        // SAFETY: this function's contract; the place is in shared memory, and all fields are plain
        // numbers.
        let this = unsafe { &mut *at };
        this.text[..text.len()].copy_from_slice(text.as_bytes());
        let ranks = this.ranks.iter_mut().zip(&blame.ranks);
        ranks.for_each(|(to, rank)| *to = *rank as u32);
        (this.length, this.blamed) = (text.len() as u32, blame.ranks.len().min(MAX_RANKS as usize) as u32);
    }

    /// # Safety
    /// The place is readable, and nobody writes to it.
    unsafe fn read(at: *const Difference) -> (String, Blame) {
        // SAFETY: this function's contract; all fields are plain numbers.
        let this = unsafe { &*at };
        let text = String::from_utf8_lossy(&this.text[..(this.length as usize).min(512)]).into_owned();
        let ranks = this.ranks.iter().take(this.blamed as usize).map(|rank| *rank as usize);
        (text, Blame::of(ranks))
    }
}

impl Display for Descriptor {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.signature, self.name.along())
    }
}

impl Display for Signature {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(Kind::name(self.kind))?;
        let Some(dtype) = DataType::from_raw(self.dtype.into()) else { return Ok(()) };
        // A call in which each rank has a count of its own has no count to show.
        match Kind::has_one_count(self.kind) {
            true => write!(f, "({} x {}", self.count, dtype.name())?,
            false => write!(f, "({}", dtype.name())?,
        }
        match ReduceOp::from_raw(self.op.into()) {
            Some(op) => write!(f, ", {}", op.name())?,
            None if self.op == PRE_MUL_SUM => f.write_str(", premulsum")?,
            None => {}
        }
        if self.root != NONE.into() {
            write!(f, ", root {}", self.root)?;
        }
        f.write_str(")")
    }
}
