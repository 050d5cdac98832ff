//! The order certificate: before a mesh ends, the ranks of each dimension compare the digests of
//! all collectives that they have made along it.
//!
//! Each process keeps the digest in its recording (recording/src/operation.rs). The comparison
//! belongs to dm_finalize, in which the ranks meet anyway: each rank adds its digest to a counter
//! of its group in the store, and waits for nobody. The rank that adds its digest last sees
//! whether the digests are equal. This rank compares before the second verdict of the call, for
//! which all ranks wait, so a difference becomes that verdict.
//!
//! A group is not compared where a rank does not know its digest, or cannot rely on it, because a
//! call has failed or is still running (`Group::digest`). Such a rank adds nothing, so no rank is
//! the last one. The records of this library and those of NCCL's profiler plugin differ for equal
//! calls. So each of the two has a counter of its own, and a group in which only some ranks have
//! the plugin completes neither.

use super::call::Peers;
use super::communicator::Communicator;
use super::root::RootComms;
use crate::error::{Error, Result, Status};
use crate::rank_list::ranges;
use crate::recorder::Group;

impl RootComms {
    /// Fails if this rank is the last of a group along a dimension to compare, and ranks of that
    /// group have made different collectives or have made them in different orders. Every rank of
    /// the call calls this function once. This function waits for no other rank.
    pub(super) fn compare_certificates(&self, peers: Peers<'_>) -> Result<()> {
        let Some(round) = peers.round() else { return Ok(()) };
        let mut different = None;
        for (group, communicator) in self.recorded_dims() {
            let size = communicator.group().size();
            let digest = group.digest().filter(|_| size > 1 && communicator.earlier_failure().is_none());
            let Some((recorded_by, digest)) = digest else { continue };
            // A store that does not answer is no difference. The call finds out by itself that the
            // store does not answer.
            let counter = format!("order/{recorded_by}/{:016x}", group.key());
            let compared = round.compare(&counter, digest, peers.wait());
            if compared.is_ok_and(|(count, is_equal)| count == size && !is_equal) {
                different.get_or_insert((group, communicator));
            }
        }
        different.map_or(Ok(()), |(group, communicator)| Err(self.difference(&group, &communicator)))
    }

    /// Returns the error of a dimension whose ranks have made different collectives.
    fn difference(&self, group: &Group, communicator: &Communicator) -> Error {
        let ranks = communicator.group().ranks();
        let message = format!(
            "{} have not made the same collectives along {}: results may be wrong",
            ranges(&ranks),
            group.name()
        );
        let error = Error::new(Status::Mismatch, message).with_ranks(&ranks).along(communicator.group().dim_name(0));
        self.explained(error, group)
    }
}
