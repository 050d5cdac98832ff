//! NCCL's C API over host memory, on one host or on several.
//!
//! Programs that are written against `nccl.h` run on this engine unchanged. They pass host buffers
//! where NCCL wants device buffers. Their ranks are processes, or threads of one process. The
//! functions here have NCCL's names, types and meanings, but mangled symbols, so a library that
//! embeds this crate exports none of them; [`symbol`] takes the place of `dlsym`. The crate
//! `hostccl-capi` exports the functions.
//!
//! Two ranks of one thread:
//!
//! ```
//! use hostccl::types::{DataType, ReduceOp, ncclSuccess};
//! use hostccl::{ncclAllReduce, ncclCommDestroy, ncclCommInitAll, ncclGroupEnd, ncclGroupStart};
//! use std::ptr::{null, null_mut};
//!
//! let mut comms = [null_mut(); 2];
//! let inputs = [[1.0f32, 2.0], [10.0, 20.0]];
//! let mut outputs = [[0.0f32; 2]; 2];
//! // SAFETY: there are places for two communicators, and the buffers have two elements until the
//! // group has ended.
//! unsafe {
//!     assert_eq!(ncclCommInitAll(comms.as_mut_ptr(), 2, null()), ncclSuccess);
//!     ncclGroupStart();
//!     for (rank, comm) in comms.into_iter().enumerate() {
//!         let (input, output) = (inputs[rank].as_ptr().cast(), outputs[rank].as_mut_ptr().cast());
//!         ncclAllReduce(input, output, 2, DataType::Float32 as i32, ReduceOp::Sum as i32, comm, null_mut());
//!     }
//!     assert_eq!(ncclGroupEnd(), ncclSuccess);
//!     for comm in comms {
//!         ncclCommDestroy(comm);
//!     }
//! }
//! assert_eq!(outputs, [[11.0, 22.0]; 2]);
//! ```
//!
//! # Differences from NCCL
//! - Streams are ignored. A call returns when its result is in place, and `ncclGroupEnd` when the
//!   results of the whole group are.
//! - Every rank gets the same bits from an all-reduce, and the same in every run, because
//!   reductions add in one order that depends only on the sizes and on where the ranks are.
//! - When ranks make different calls, or send and receive different sizes, all of them get
//!   `ncclInvalidUsage` and a message that names the ranks and their calls. From then on, as after
//!   any failure of a peer, the communicator only reports its failure.
//! - When a process ends while other ranks use the communicator, the communicator fails for all of
//!   them within a second, in whatever call they wait (`ncclRemoteError`; [`hostcclCommLostRank`]
//!   has the rank's number). `ncclCommGetAsyncError` notices the end as well. A rank that has
//!   destroyed its communicator fails only the ranks that still need something from it.
//! - `ncclCommAbort` ends blocked calls of its own process with `ncclInternalError`, and those of
//!   peers with `ncclRemoteError`. `ncclCommDestroy` and `ncclCommFinalize` wait for no call of a
//!   peer. On one host they are local.
//! - On several hosts `ncclCommDestroy` waits until this host's kernel has taken what the rank has
//!   sent. For the last communicator of the process it waits until the other hosts' kernels have
//!   confirmed what all of its communicators have sent, because the process may end then. That
//!   takes tens of microseconds. Where another host does not answer, or a peer that is stopped
//!   reads nothing, `ncclCommDestroy` gives up after two seconds; it gives up after 50 ms where the
//!   communicator has failed.
//! - A send ends when the receiver has taken all of it. To a rank of another host, a send ends when
//!   the receiver has made its call, and this host's kernel has taken all of the message. Over TCP
//!   there is an exception where the kernel has no room: a send of at most 4 KiB, and with a secret
//!   the last record of any send, may end while its bytes are still in this process. The bytes go
//!   when a call of the process next waits, or within 100 ms after the kernel has room.
//!   `ncclCommDestroy` waits for these bytes. A process that ends without `ncclCommDestroy` may
//!   lose them.
//! - An id starts one communicator of at most 1024 ranks. Ranks that can open each other's memory
//!   are one host: they are on one machine, in one process-id namespace, and belong to one user.
//!   All other ranks are on other hosts, and reach each other over the wire.
//! - When a host falls silent, its ranks are lost after `DM_HOST_TIMEOUT_MS` (five seconds). A
//!   failure on one host reaches the ranks of all hosts.
//! - `ncclCommRevoke` ends the calls that are under way on all ranks, and not on its own rank only.
//!   The other ranks get `ncclRemoteError`, and may revoke the communicator, too. A rank may split
//!   and shrink a communicator that it has revoked itself.
//! - When `ncclGroupEnd` fails because a call of the group could not be made, no call of the group
//!   is performed, and the message ends with "nothing of this group was performed". When it fails
//!   on one communicator, the calls on the other communicators of the group are still performed,
//!   because their peers expect them, and the message says so.
//! - While a split with `blocking = 0` is in progress, collectives on its parent are refused with
//!   `ncclInvalidArgument`, unless the two have different names (`hostcclNextCallName`).
//! - `blocking = 0` in a configuration concerns init, split, shrink and grow. A split writes the
//!   new handle when it is done, as NCCL does. So the caller must keep the place for the handle
//!   valid until the parent answers `ncclSuccess`.
//! - `HOSTCCL_TIMEOUT_MS` bounds how long any wait may last without progress of the call itself.
//!   The time in which a call waits for its turn behind calls under other names does not count, up
//!   to one further timeout. When the variable is unset or 0, collectives and messages wait as long
//!   as their peers live, and init, split, shrink and grow wait for ten minutes. A value that is no
//!   whole number of milliseconds is refused with `ncclInvalidArgument` when a communicator is
//!   made.
//!
//! # How it works
//! - Each communicator has a segment of anonymous shared memory (`memfd`) on each host. The ranks
//!   of the host find it through a descriptor of its creator. The segment has no name in any file
//!   system, so no file can be left behind, and it is freed with its last mapping.
//! - A collective is a sequence of steps with one wait each. It is pipelined in chunks through five
//!   staging slots for each rank. The module `collective` says who copies and reduces what, and why
//!   five slots are enough. The parts of a split have smaller slots than other communicators of
//!   their sizes, so that all parts together take about as much memory for slots as their parent.
//! - Messages flow through a ring buffer for each ordered pair of ranks.
//! - Up to 16 bytes of a message, or of a collective of two ranks, lie in the cache line of the
//!   word for which the other rank waits.
//! - Between hosts there is the wire (module `wire`): messages with tags over TCP or UCX, one
//!   connection for each pair of processes that need one. A collective over several hosts combines
//!   inside each host, exchanges between the hosts on the connections of all ranks, and spreads
//!   inside each host. A communicator on one host opens no socket and keeps no thread. But a call
//!   with `blocking = 0` starts a thread that ends when the communicator is made, and a process
//!   that has made an id by `ncclGetUniqueId` listens, in a thread, until the id has started a
//!   communicator, because ranks of other hosts may come.
//! - Every operation is a state machine that is polled. A group polls all of its operations, so one
//!   thread can drive several ranks.
//! - A thread that waits first polls for a moment, then lets other threads run. Where there is a
//!   processor for each rank and no other thread wants it, the thread polls for 50 us. The
//!   processors of all ranks count together, because a launcher may bind each rank to a processor
//!   of its own. Then the thread sleeps on the words in shared memory for which it waits (`futex`,
//!   `futex_waitv`), or on its rank's doorbell where the kernel cannot watch all of the words. Ten
//!   times a second the thread checks the process descriptors of its peers. A process keeps at most
//!   64 descriptors, and checks once a second each peer process for which it keeps none.
//!
//! # Layers
//! The crate `hostccl_reduce` below these layers has the arithmetic of the reductions. A file
//! imports from the layers below its own, and from its own layer without a circle. From the bottom
//! up:
//!
//! | layer | files |
//! |---|---|
//! | the machine | `types`, `fork`, `cut` (texts that are too long), `machine`, `thread`, `process`, `sync` (atomics), `plain` (accesses that are not atomic), `futex` and `event` (words to sleep on), `outside` (waiting for connections), `cache` (whether results fit the last-level cache), `crowd` (processors and ranks), `blame`, `error`, `noise` (encrypted records), `memory_file` (anonymous files), `recorder` (the recording of this process) |
//! | other hosts | `wire` (messages between processes), `span` (who is where), `notice` (what processes tell each other), `desk` (who gets a notice), `remote` (what a rank knows of other hosts) |
//! | values | `host` (which processes share memory), `token`, `config`, `timeout`, `interrupt` (reasons from outside that end a wait), `call_name`, `labels`, `poll` (what an operation waits for), `blocks` (parts of a buffer) |
//! | shared memory | `segment`, `bootstrap` (the join over several hosts), `id` |
//! | the communicator | `scratch` and `rails` (what calls over several hosts keep, and who serves whom), `places` (calls that take turns), `comm`, `peers` (who lives, who is missing), `raw_record` (calls without a name in the recording), `waiting` (who waits for others), `news` (which ranks of other hosts have left or are lost) |
//! | taking turns | `turn` on one rank, `flow` (operations as `async` functions), `transfers` (messages of an operation), `gathering` and `common_name` (the hosts agree), `admission` among the ranks, `operation` (the trait of all operations) |
//! | operations | `collective`, `hosts` (collectives over several hosts), `message`, `remote_message` (to other hosts), `join` |
//! | driving them | `diagnosis` (why nothing moves), `spin`, `wait`, `progress` |
//! | handles | `operators`, `handle`, `setup` (init, and the making of children), `split`, `shrink`, `grow`, `revoked_split`, `task` (a call of any kind), `group` |
//! | the C API | `body` (checks of arguments), `functions` (the list), `api` |

mod admission;
#[cfg(any(test, fuzzing))]
pub mod any_bytes;
mod api;
mod blame;
pub mod blocks;
mod body;
mod bootstrap;
mod cache;
mod call_name;
mod collective;
mod comm;
mod common_name;
mod config;
mod crowd;
mod cut;
mod desk;
mod diagnosis;
mod error;
mod event;
mod flow;
pub mod fork;
mod functions;
mod futex;
mod gathering;
mod group;
mod grow;
mod handle;
mod host;
mod hosts;
#[cfg(test)]
mod hosts_of_threads;
mod id;
mod interrupt;
mod join;
mod labels;
pub mod machine;
mod memory_file;
mod message;
pub mod nccl_config;
mod news;
pub mod noise;
mod notice;
mod operation;
mod operators;
mod outside;
mod peers;
mod places;
mod plain;
mod poll;
pub mod process;
mod progress;
mod rails;
mod raw_record;
pub mod recorder;
mod remote;
mod remote_message;
mod revoked_split;
mod scratch;
mod segment;
mod setup;
mod shrink;
mod span;
mod spin;
mod split;
mod sync;
mod task;
pub mod thread;
mod timeout;
mod token;
mod transfers;
mod turn;
pub mod types;
mod wait;
mod waiting;
mod wire;

pub use api::*;
pub use body::interrupt::set_interrupt;
pub use error::FAILED_EARLIER;
pub use group::without_thread;
pub use interrupt::Question;
pub use wire::here::{describe_wire, set_address, set_secret};
