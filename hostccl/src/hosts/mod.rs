//! Collectives over several hosts.
//!
//! # The meeting
//! Each call begins with a meeting of all ranks (file `meeting`), in which they find out whether
//! their calls fit together. Within a host it takes one step in shared memory: the ranks post
//! their calls, and seat 0 ends the step after all others, once it has written the outcome.
//! Meanwhile the seats 0 of the hosts gather ([`gathering`](crate::gathering)): at most eight
//! hosts exchange their records directly, and `H` hosts in a ring take `ceil(log2 H)` rounds. With
//! one rank on each host, only the gathering is left.
//!
//! The data of a small call travels in the records of the meeting, so the meeting is the whole call
//! (`plan` says what is small, `small` packs and unpacks). In a direct exchange each host gets only
//! its part of the data. No rank uses data before it has compared the calls of all hosts. So a rank
//! that ends a call knows that all ranks have made this call.
//!
//! Calls of different names are withdrawn, and the hosts agree on a name that every rank has
//! ([`admission`](crate::admission)).
//!
//! # Larger data
//! Data goes in two levels, so that each byte crosses the wire once for each host that needs it.
//! The parts among the seats of a host are collectives of the module
//! [`collective`](crate::collective), without their agreement (`Part`).
//!
//! | collective | files | between the hosts |
//! |---|---|---|
//! | all-reduce, reduce | `reduction` | each host reduces a piece of each rail, and gives the others the result |
//! | reduce-scatter, -v | `scatter` | each host reduces every rank's block over its own ranks, and sends the rank the result |
//! | all-gather, -v | `work` | each rank sends its block once to each other host |
//! | broadcast | `broadcast` | a binomial tree of hosts, or a chain for much data, on each rail |
//! | all-to-all, -v, gather, scatter | `work` | each pair of ranks exchanges its blocks |
//!
//! # Order
//! A reduction takes the seats of a host in order, and then the hosts in order. One rank computes
//! each element, and all others get its bits. So the result is the same on all ranks and in every
//! run. Where a reduction in two levels would lose accuracy, the elements of all ranks are reduced
//! at once, in the order of the ranks (`plan::is_flat`).
//!
//! # Waiting
//! A call is an `async` function (`operation`). The compiler makes a state machine of it, which the
//! module [`flow`](crate::flow) polls. The messages of a call are cancelled when the call is
//! dropped, before its buffers go.

mod broadcast;
mod meeting;
mod operation;
mod plan;
mod reduction;
mod scatter;
mod small;
mod small_gather;
#[cfg(test)]
mod tests;
mod work;

pub(crate) use self::operation::Spanning;
pub(crate) use self::small_gather::SmallGather;
