//! Calls of the communicator library along one dimension of a view.

use std::cell::Cell;
use std::ffi::c_void;
use std::thread::sleep;

use super::communicator::Communicator;
use super::making::{millis, settle};
use super::view::View;
use crate::ccl::{DATA_TYPES, Library, NcclResult, RawComm, element_size, result};
use crate::error::{Error, Result, Status};

/// What one operation works on, as the C caller gave it.
#[derive(Debug, Clone, Copy)]
pub struct Operands {
    /// Elements, in the sense of the operation (per rank for gathers and scatters).
    pub count: usize,
    /// `ncclDataType_t`, 0 to 9.
    pub dtype: i32,
    /// A `cudaStream_t`, or NULL on host memory.
    pub stream: *mut c_void,
}

/// The names of the five operators by `ncclRedOp_t` number.
const OPERATORS: [&str; 5] = ["sum", "prod", "max", "min", "avg"];

impl View {
    /// Checks what all operations have in common and runs `issue` on the communicator along dimension `index`. `blocks` is how many
    /// times `count` elements the largest buffer holds, `buffers` which of the pointers may not be NULL.
    pub fn operate(
        &self,
        name: &str,
        index: usize,
        operands: Operands,
        buffers: &[(&str, *const c_void)],
        issue: impl FnOnce(&Library, RawComm) -> NcclResult,
    ) -> Result<()> {
        let Operands { count, dtype, stream } = operands;
        let Some(element) = element_size(dtype) else {
            let known: Vec<&str> = DATA_TYPES.iter().map(|(name, _)| *name).collect();
            return Err(Error::invalid(format!("{name}: dtype is {dtype}, not one of 0 to 9 ({})", known.join(", "))));
        };
        let size = self.mesh().dim_size(index);
        let bytes = count.checked_mul(element).and_then(|bytes| bytes.checked_mul(size));
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(Error::invalid(format!(
                "{name}: {count} elements of {element} bytes for {size} ranks are more than memory can hold"
            )));
        }
        if let Some((buffer, _)) = buffers.iter().find(|(_, pointer)| count > 0 && pointer.is_null()) {
            return Err(Error::invalid(format!("{name}: {buffer} is NULL, but count is {count}")));
        }
        let raw = self.comm(index)?;
        let communicator = self.communicator(index)?;
        let library = communicator.library();
        if library.is_host_engine() && !stream.is_null() {
            return Err(Error::invalid(format!(
                "{name}: stream is {stream:p}, but device type cpu has no streams: pass NULL (the call returns when its result is there)"
            )));
        }
        // In a group the library fails the whole of it.
        if let Some(error) = communicator.earlier().filter(|_| !in_group()) {
            return Err(error.within(name));
        }
        communicator.limit(millis(self.root_comms().timeout))?;
        self.outcome(name, communicator, raw, issue(library, raw))
    }

    /// Checks `op` as [`operate`](View::operate) checks the rest.
    pub fn check_operator(&self, name: &str, op: i32) -> Result<()> {
        match usize::try_from(op).ok().and_then(|op| OPERATORS.get(op)) {
            Some(_) => Ok(()),
            None => Err(Error::invalid(format!("{name}: op is {op}, not one of 0 to 4 ({})", OPERATORS.join(", ")))),
        }
    }

    /// Checks a rank of dimension `index`, called `what` in the message.
    pub fn check_peer(&self, name: &str, index: usize, what: &str, rank: i32) -> Result<()> {
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

    /// Begins a group of operations of the calling thread.
    pub fn group_start(&self) -> Result<()> {
        self.root_comms().alive()?;
        self.library()?.group_start()?;
        GROUPS.set(GROUPS.get() + 1);
        Ok(())
    }

    /// Ends it: the operations run together, and the first error of any of them comes out here.
    pub fn group_end(&self) -> Result<()> {
        let library = self.library()?;
        let ended = library.group_end();
        GROUPS.set(GROUPS.get().saturating_sub(1));
        self.root_comms().alive()?;
        match ended {
            Ok(()) => self.root_comms().settle_all(),
            Err(error) => Err(self.root_comms().explain(error)),
        }
    }

    /// The asynchronous error of the communicator along dimension `index`. Local.
    pub fn check(&self, index: usize) -> Result<()> {
        self.communicator(index)?.poll().map(drop)
    }

    fn outcome(&self, name: &str, communicator: &Communicator, raw: RawComm, code: NcclResult) -> Result<()> {
        if code == result::SUCCESS {
            return Ok(());
        }
        if code == result::IN_PROGRESS {
            let settled = settle(&self.root_comms().wait(None), || name.to_owned(), sleep, || communicator.poll());
            return settled.inspect_err(|error| {
                // It goes on without anybody who waits for it.
                if error.status() == Status::Timeout {
                    communicator.note_failure(error);
                }
            });
        }
        communicator.library().check(name, raw, code).map_err(|error| match communicator.came_later(&error) {
            true => communicator.explain(raw, error).within(name),
            false => communicator.explain(raw, error),
        })
    }
}

thread_local! {
    /// How deep this thread is in groups that it began here.
    static GROUPS: Cell<u32> = const { Cell::new(0) };
}

/// Whether this thread is inside a group.
pub(super) fn in_group() -> bool {
    GROUPS.get() > 0
}

/// Makes communicators outside the calling thread's groups: inside one a library would put that off until the group's end. Groups belong to threads, so
/// it is done on another one where there is need.
pub(super) fn outside_groups<T: Send>(library: &Library, make: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    if !in_group() {
        return make();
    }
    let device = library.current_device()?;
    std::thread::scope(|scope| {
        let make = || device.select().and_then(|()| make());
        let making = std::thread::Builder::new().spawn_scoped(scope, make);
        let making = making.map_err(|error| Error::internal(format!("starting a thread: {error}")))?;
        making.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
