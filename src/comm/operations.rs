//! Calls of the communicator library along one dimension of a view.

use std::ffi::c_void;

use super::communicator::{Communicator, State};
use super::view::View;
use crate::ccl::{DATA_TYPES, Library, NcclResult, RawComm, element_size, result};
use crate::error::{Error, Result};

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
        self.library()?.group_start()
    }

    /// Ends it: the operations run together, and the first error of any of them comes out here.
    pub fn group_end(&self) -> Result<()> {
        let library = self.library()?;
        let ended = library.group_end();
        self.root_comms().alive()?;
        let Err(error) = ended else {
            return self.root_comms().settle_all();
        };
        // The group does not say which communicator failed: the one that knows of a lost rank explains it.
        let ready: Vec<_> = self.root_comms().ready();
        let knowing = ready.iter().find(|(communicator, raw)| communicator.library().lost_rank(*raw).is_some());
        Err(match knowing {
            Some((communicator, raw)) => communicator.explain(*raw, error),
            None => error,
        })
    }

    /// The asynchronous error of the communicator along dimension `index`. Local.
    pub fn check(&self, index: usize) -> Result<()> {
        let raw = self.comm(index)?;
        let communicator = self.communicator(index)?;
        communicator.library().poll(raw).map(drop).map_err(|error| communicator.explain(raw, error))
    }

    fn outcome(&self, name: &str, communicator: &Communicator, raw: RawComm, code: NcclResult) -> Result<()> {
        if code == result::SUCCESS {
            return Ok(());
        }
        if communicator.state() != State::Ready {
            return communicator.ready().map(drop);
        }
        let library = communicator.library();
        let ended = if code == result::IN_PROGRESS {
            library.settle(raw, &self.root_comms().wait(None), name)
        } else {
            library.check(name, raw, code)
        };
        ended.map_err(|error| communicator.explain(raw, error))
    }
}
