//! NCCL's C API over host memory on one machine.
//!
//! Programs written against `nccl.h` run on it unchanged, with host buffers where NCCL wants device buffers, as processes
//! or as threads of one process. The functions here have NCCL's names, types and meanings but mangled symbols, so that a
//! library that embeds this crate exports none of them; [`symbol`] is its `dlsym`. The crate `hostccl-capi` exports them.
//!
//! # What differs from NCCL
//! - Streams are ignored: a call returns with its result in place. `ncclGroupEnd` does so for a whole group.
//! - Every rank gets the same bits from an all-reduce; reductions take the ranks in order.
//! - Ranks that make different calls, or send and receive different sizes, all get `ncclInvalidUsage` and a message that says
//!   which rank asked for what. After that, as after any failure of a peer, the communicator only reports its failure.
//! - A rank whose process ends while others use the communicator fails it for all of them within a second
//!   (`ncclRemoteError`, and [`hostcclCommLostRank`] has its number), in whatever call they wait; `ncclCommGetAsyncError`
//!   notices it too. A rank that has destroyed its communicator harms only those that still need something from it.
//! - `ncclCommAbort` ends blocked calls of its own process with `ncclInternalError` and those of peers with
//!   `ncclRemoteError`. `ncclCommDestroy` and `ncclCommFinalize` are local: they never wait for peers.
//! - A send ends when the receiver has taken everything.
//! - An id is good for one communicator, within one machine and process-id namespace, for processes of one user; at most 1024
//!   ranks. An id from elsewhere is refused with the reason.
//! - `blocking = 0` in a configuration concerns init and split. A split writes the new handle when it is done, as NCCL does:
//!   the place given for it stays valid until the parent says `ncclSuccess`.
//! - `HOSTCCL_TIMEOUT_MS` bounds how long any wait may go without progress; unset or 0, collectives and messages wait for as
//!   long as their peers live, init and split for ten minutes. What is no whole number of milliseconds is refused with
//!   `ncclInvalidArgument` where the first communicator is made.
//!
//! # How it works
//! - Each communicator has a segment of anonymous shared memory (`memfd`), which the ranks find through its creator's
//!   descriptor: there is no name in any file system, so nothing can be left behind. The last mapping to go frees it.
//! - Collectives are steps with one wait each, pipelined in chunks through five staging slots a rank; the table in the
//!   module `collective` says who copies and reduces what, and why five slots are enough.
//! - Messages flow through a ring for each ordered pair of ranks.
//! - Every operation is a state machine that is polled; a group polls all of its own, so one thread can drive several ranks.
//! - A waiting thread spins for a moment, lets other threads run (where there is a processor for each rank and nobody else wants it, it
//!   looks on for 50 us), then sleeps on the words in shared memory that it waits for (`futex`, `futex_waitv`); ten times a second it
//!   looks at its peers' process descriptors.

mod api;
mod body;
mod collective;
mod comm;
mod config;
mod copy;
mod error;
mod event;
pub mod fork;
mod functions;
mod group;
mod handle;
mod id;
mod join;
pub mod machine;
mod meeting;
mod message;
mod operation;
pub mod process;
pub mod reduce;
mod segment;
mod setup;
mod shrink;
mod split;
pub mod thread;
mod turn;
pub mod types;
mod wait;

pub use api::*;
pub use error::FAILED_EARLIER;
