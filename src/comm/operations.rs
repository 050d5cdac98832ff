//! Calls of the communicator library along one dimension of a view.

use std::ffi::c_void;
use std::sync::Arc;
use std::thread::sleep;

use super::communicator::Communicator;
use super::failure::is_repeated;
use super::groups;
use super::polling::{millis, poll_until_done};
use super::view::View;
use crate::ccl::{
    CallName, DATA_TYPES, Library, NcclResult, REDUCTIONS, RawComm, element_size, nvtx, records_its_calls, result,
};
use crate::error::{Error, Result, Status};
use crate::recorder::{Operation, Recorded, What};

/// The operands of one operation, as the C caller gave them.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Operands {
    /// The number of elements, as the operation counts them: for gathers and scatters, the elements
    /// of each rank.
    pub count: usize,
    /// The `ncclDataType_t` of the elements: 0 to 11, or on NCCL any number that it knows.
    pub dtype: i32,
    /// The `cudaStream_t` on which the operation runs; NULL on host memory.
    pub stream: *mut c_void,
    /// What the recording of this process says of the operation.
    pub(crate) what: What,
}

impl Operands {
    /// Operands of `count` elements of type `dtype` (an `ncclDataType_t`), on that stream.
    pub fn new(count: usize, dtype: i32, stream: *mut c_void) -> Operands {
        Operands { count, dtype, stream, what: What::of(Operation::Custom) }
    }

    /// These operands, for an operation that does `what`.
    #[must_use]
    pub(crate) fn of(self, what: What) -> Operands {
        Operands { what, ..self }
    }
}

/// How much the buffers of an operation hold, in blocks of `count` elements, and where it works in
/// place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BufferShape {
    /// Both buffers hold one block. In place, both are one buffer.
    Same,
    /// One block is sent, and a block of each rank is received. In place, the sent block lies at
    /// this rank's place in the receive buffer.
    Gather,
    /// A block for each rank is given, and one block is received. In place, the received block lies
    /// at this rank's place in the send buffer.
    Scatter,
    /// Both buffers hold a block for each rank. In place, both are one buffer, which is allowed on
    /// host memory only.
    AllToAll,
}

/// The largest number that is taken for an `ncclDataType_t` of a later NCCL.
const LARGEST_DTYPE: i32 = 255;

fn wrong_operator(op: i32) -> String {
    format!("op is {op}, not one of 0 to 4 ({}) nor made by ncclRedOpCreatePreMulSum", REDUCTIONS.join(", "))
}

impl View {
    /// Checks what all operations have in common, and runs `issue` on the communicator along
    /// dimension `index`. `buffers` are the pointers that may not be NULL, with their names.
    pub fn operate(
        &self,
        name: &str,
        index: usize,
        operands: Operands,
        buffers: &[(&str, *const c_void)],
        issue: impl FnOnce(&Library, RawComm) -> NcclResult,
    ) -> Result<()> {
        self.check_index(index)?;
        let Operands { count, dtype, .. } = operands;
        let element = self.element_size(name, dtype)?;
        let size = self.mesh().dim_size(index);
        // An element whose size only the library knows has at least one byte.
        let element = element.unwrap_or(1);
        let bytes = count.checked_mul(element).and_then(|bytes| bytes.checked_mul(size));
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(Error::invalid(format!(
                "{name}: {count} elements of {element} bytes for {size} ranks are more than memory can hold"
            )));
        }
        if let Some((buffer, _)) = buffers.iter().find(|(_, pointer)| count > 0 && pointer.is_null()) {
            return Err(Error::invalid(format!("{name}: {buffer} is NULL, but count is {count}")));
        }
        let checked = if count > 0 { buffers } else { &[] };
        self.issue(name, index, operands, checked, issue).map_err(|error| self.with_losses(self.with_dim(error, index)))
    }

    /// Runs `issue` on the communicator along dimension `index`. The caller has checked the
    /// arguments. This function checks only whether `buffers` are memory of the communicator's
    /// device.
    fn issue(
        &self,
        name: &str,
        index: usize,
        operands: Operands,
        buffers: &[(&str, *const c_void)],
        issue: impl FnOnce(&Library, RawComm) -> NcclResult,
    ) -> Result<()> {
        let stream = operands.stream;
        let _range = nvtx::range(|| self.range_name(index, operands), operands.count as u64);
        let raw = match self.dim_comms().ready(index) {
            Some(raw) => raw,
            None => self.comm_for_stream(name, index, stream)?,
        };
        let communicator = self.communicator(index)?;
        let library = communicator.library();
        if library.is_host_engine() && !stream.is_null() {
            return Err(Error::invalid(format!(
                "{name}: stream is {stream:p}, but device type cpu has no streams: pass NULL (the call returns when its result is there)"
            )));
        }
        let in_group = groups::in_group(library);
        // Inside a group the call goes on to the library, which then fails the whole group.
        if let Some(error) = communicator.earlier_failure().filter(|_| !in_group) {
            return Err(error.within(name));
        }
        if in_group {
            groups::check_usable(library)?;
        }
        if self.root_comms().checks_collectives() {
            self.check_order(name, index, operands)?;
        }
        let timeout = millis(self.root_comms().timeout());
        communicator.note_timeout(timeout);
        let (call, mut recorded) = (self.call_name(index), Recorded::none());
        let record = || self.record(library, index, operands, in_group);
        let outcome = match library.is_host_engine() {
            true => {
                library.name_next_call(call);
                communicator.limit_next_call(raw, timeout);
                recorded = record();
                self.finish(name, communicator, raw, issue(library, raw))
            }
            false => self.through_gate(name, index, communicator, call, |raw| {
                let checked = library.check_pointers(raw, buffers);
                checked.map_err(|error| Unexplained::Known(error.within(name)))?;
                // The calls of one group begin in the order in which they get here. Where NCCL
                // tells of its calls itself, they are recorded once, with the ends of their
                // kernels.
                match records_its_calls() {
                    true => self.recorded_group(index).into_iter().for_each(|group| group.note_unrecorded()),
                    // NCCL does nothing in a collective without elements, so ranks may leave it
                    // out. Such a collective has no number.
                    false if operands.what.is_compared() && operands.what.is_empty(operands.count) => {}
                    false => recorded = record(),
                }
                self.finish(name, communicator, raw, issue(library, raw))
            }),
        };
        // Explaining an error writes to the log, and the program's log callback may end the mesh.
        // So the communicator is left before.
        outcome.map_err(|unexplained| {
            let error = self.explain(name, communicator, unexplained);
            let Some(group) = self.recorded_group(index) else { return error };
            if communicator.earlier_failure().is_some() {
                group.fail();
            }
            self.root_comms().explained(error, group)
        })?;
        match in_group {
            true => groups::note(communicator, recorded, self.recorded_group(index), || {
                format!("{name} along {}", self.mesh().dim_name(index))
            }),
            false => groups::record_end(library, recorded),
        }
        Ok(())
    }

    /// The name of an operation along dimension `index` for a tool: "mesh/tp: all-reduce".
    #[cold]
    fn range_name(&self, index: usize, operands: Operands) -> String {
        let group = self.recorded_group(index).map_or("", |group| group.name());
        format!("{group}: {}", operands.what.name())
    }

    /// Records that an operation along dimension `index` begins, or waits for the end of the
    /// thread's group.
    #[inline]
    fn record(&self, library: &Library, index: usize, operands: Operands, in_group: bool) -> Recorded {
        let Some(group) = self.recorded_group(index) else { return Recorded::none() };
        let call = operands.what.call(operands.count, operands.dtype, operands.stream);
        match in_group {
            true => group.queue(&call),
            false if library.is_embedded() => group.begin_embedded(&call),
            false => group.begin(&call),
        }
    }

    /// The raw communicator along dimension `index`, for an operation on that stream. The operation
    /// may be the communicator's first use, which makes it.
    #[cold]
    fn comm_for_stream(&self, name: &str, index: usize, stream: *mut c_void) -> Result<RawComm> {
        if let Some(planned) = self.planned(index) {
            self.root_comms().check_first_use(planned, name, Some(stream))?;
        }
        self.comm(index)
    }

    /// The bytes of one element of that type. `None` for a type that this library does not know,
    /// but NCCL may. The host engine has no such types.
    pub(crate) fn element_size(&self, name: &str, dtype: i32) -> Result<Option<usize>> {
        let known = element_size(dtype);
        if known.is_some() || (0..=LARGEST_DTYPE).contains(&dtype) && self.library().is_ok_and(|it| it.has_streams()) {
            return Ok(known);
        }
        let names: Vec<&str> = DATA_TYPES.iter().map(|(name, _)| *name).collect();
        Err(Error::invalid(format!(
            "{name}: dtype is {dtype}, not one of 0 to {} ({})",
            names.len() - 1,
            names.join(", ")
        )))
    }

    /// Runs `issue` while no other thread issues anything on the communicator, and nobody ends it.
    /// Inside a group, no other thread issues anything until the end of the group.
    fn through_gate(
        &self,
        name: &str,
        index: usize,
        communicator: &Arc<Communicator>,
        call: &CallName,
        issue: impl FnOnce(RawComm) -> Outcome,
    ) -> Outcome {
        if groups::holds_gate(communicator) {
            let outcome = issue(communicator.enter_again().map_err(Unexplained::Known)?);
            communicator.pause();
            return outcome;
        }
        let described = || format!("{name} along {}", self.mesh().dim_name(index));
        // Sends, receives and collectives of one dimension have different tags. So they wait for
        // each other, and are not refused.
        let lane = if name.ends_with("send") { 1 } else { u64::from(name.ends_with("recv")) * 2 };
        let raw = communicator.enter(call.tag().wrapping_add(lane), || self.root_comms().wait(None), &described);
        let raw = raw.map_err(Unexplained::Known)?;
        let outcome = issue(raw);
        match groups::hold_gate(communicator) {
            true => communicator.pause(),
            false => communicator.leave(),
        }
        outcome
    }

    /// Fails when the buffers of a call overlap, unless they overlap exactly as the call works in
    /// place.
    pub(crate) fn check_overlap(
        &self,
        name: &str,
        index: usize,
        operands: Operands,
        send: *const c_void,
        recv: *const c_void,
        shape: BufferShape,
    ) -> Result<()> {
        let size = self.mesh().dim_size(index);
        // Sizes that no memory can hold are refused with the other arguments.
        let each = element_size(operands.dtype).and_then(|element| operands.count.checked_mul(element));
        let Some(each) = each.filter(|each| *each > 0 && each.checked_mul(size).is_some()) else { return Ok(()) };
        let (send, recv, block) =
            (send.addr(), recv.addr(), || Ok::<usize, Error>(self.mesh().local_rank(index)? * each));
        let whole = each * size;
        let (send_bytes, recv_bytes) = match shape {
            BufferShape::Same => (each, each),
            BufferShape::Gather => (each, whole),
            BufferShape::Scatter => (whole, each),
            BufferShape::AllToAll => (whole, whole),
        };
        let (send_end, recv_end) = (send.saturating_add(send_bytes), recv.saturating_add(recv_bytes));
        if send_end <= recv || recv_end <= send || size == 1 && send == recv {
            return Ok(());
        }
        let (in_place, instead) = match shape {
            BufferShape::Same => (send == recv, "send == recv"),
            BufferShape::Gather => (send == recv + block()?, "send == recv + (my rank) * count elements"),
            BufferShape::Scatter => (recv == send + block()?, "recv == send + (my rank) * count elements"),
            BufferShape::AllToAll if self.library()?.is_host_engine() => (send == recv, "send == recv"),
            BufferShape::AllToAll => (false, "never on this library"),
        };
        match in_place {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "{name}: send [{send:#x}, {send_end:#x}) and recv [{recv:#x}, {recv_end:#x}) overlap, but not as an in-place call needs ({instead}): pass buffers that do not overlap, or the in-place addresses"
            ))),
        }
    }

    /// Checks the peer of a message. `lacks_buffer` says that the call is refused for its missing
    /// buffer anyway.
    pub(crate) fn check_message(&self, name: &str, index: usize, peer: i32, lacks_buffer: bool) -> Result<()> {
        self.check_peer(name, index, "peer", peer)?;
        if !lacks_buffer
            && self.mesh().is_member()
            && self.mesh().local_rank(index)? == peer as usize
            && !groups::in_group(self.library()?)
        {
            self.root_comms().alive()?;
            return Err(Error::invalid(format!(
                "{name}: peer {peer} is this rank itself: put the send and its receive into one group (dm_group_start)"
            )));
        }
        Ok(())
    }

    /// Fails when `op` cannot be an operator. The library judges the numbers beyond the five
    /// operators, which `ncclRedOpCreatePreMulSum` gives.
    pub(crate) fn check_operator(&self, name: &str, op: i32) -> Result<()> {
        match op < 0 {
            false => Ok(()),
            true => Err(Error::invalid(format!("{name}: {}", wrong_operator(op)))),
        }
    }

    /// The error of a reduction with that operator: an invalid argument where the library has
    /// refused an operator that is none of the five.
    pub(crate) fn judge_operator(&self, name: &str, op: i32, error: Error) -> Error {
        let is_its_own = usize::try_from(op).is_ok_and(|op| op >= REDUCTIONS.len());
        if !is_its_own || error.ccl_result() != result::INVALID_ARGUMENT {
            return error;
        }
        let said = format!("{name}: {}: {}", wrong_operator(op), error.message());
        Error::invalid(said).with_ccl_result(error.ccl_result())
    }

    /// Fails for an all-to-all of elements whose size is not known, on a library without a call of
    /// its own for it.
    pub(crate) fn check_all_to_all(&self, name: &str, dtype: i32) -> Result<()> {
        match self.element_size(name, dtype)? {
            None if self.library()?.lacks_all_to_all() => Err(Error::unsupported(format!(
                "{name}: dtype is {dtype}, whose size is not known here, and {} has no ncclAlltoAll, which NCCL has from 2.28 on: send the bytes (uint8)",
                self.library()?.label()
            ))),
            _ => Ok(()),
        }
    }

    /// Fails when `rank` is not a rank of dimension `index`. The message calls it `what`.
    pub(crate) fn check_peer(&self, name: &str, index: usize, what: &str, rank: i32) -> Result<()> {
        let size = self.mesh().dim_size(index);
        match usize::try_from(rank) {
            Ok(rank) if rank < size => Ok(()),
            _ => Err(Error::invalid(format!(
                "{name}: {what} is {rank}, but dimension {} has ranks 0 to {}",
                self.mesh().dim_name(index),
                size - 1
            ))),
        }
    }

    /// Waits for the operation where it is in progress, and asks the library for its words on a
    /// failure. Runs inside the communicator, so it writes nothing to the log.
    fn finish(&self, name: &str, communicator: &Arc<Communicator>, raw: RawComm, code: NcclResult) -> Outcome {
        if code == result::SUCCESS {
            return Ok(());
        }
        if code == result::IN_PROGRESS {
            let wait = self.root_comms().wait(None);
            let mut failed = false;
            let done = poll_until_done(
                &wait,
                || name.to_owned(),
                sleep,
                || {
                    let polled = communicator.poll_here()?;
                    polled.inspect_err(|_| failed = true)
                },
            );
            return done.map_err(|error| match failed {
                true => Unexplained::OfCommunicator(error),
                false => Unexplained::OfWait(error),
            });
        }
        communicator.library().check(name, raw, code).map_err(|error| Unexplained::OfCall(raw, error))
    }

    /// The error of an operation, with what is known about the reason. When the whole communicator
    /// has failed, keeps the failure.
    fn explain(&self, name: &str, communicator: &Arc<Communicator>, unexplained: Unexplained) -> Error {
        match unexplained {
            Unexplained::Known(error) => error,
            Unexplained::OfCall(raw, error) => match is_repeated(communicator.library(), &error) {
                true => communicator.explain(raw, error).within(name),
                false => communicator.explain(raw, error),
            },
            Unexplained::OfCommunicator(error) => {
                let aborted = self.root_comms().cancel().check().err();
                aborted.unwrap_or_else(|| communicator.explain_as(error, true))
            }
            Unexplained::OfWait(error) => {
                // The operation goes on in the library, and no thread waits for the operation any
                // more.
                if error.status() == Status::Timeout {
                    communicator.note_failure(&error);
                }
                error
            }
        }
    }
}

/// How an operation ended, inside its communicator.
type Outcome = std::result::Result<(), Unexplained>;

/// An error that was met inside a communicator, and is explained when the communicator is left.
enum Unexplained {
    /// The error explains itself: the operation was not handed to the library.
    Known(Error),
    /// The library refused or failed the call on that raw communicator.
    OfCall(RawComm, Error),
    /// The communicator failed while the operation was in progress.
    OfCommunicator(Error),
    /// The wait for the operation ended before the operation did.
    OfWait(Error),
}
