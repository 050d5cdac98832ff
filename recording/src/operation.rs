//! What a recorded call does.

/// The value of [`Call::peer`] for a call without root or peer.
pub const NO_PEER: i32 = -1;

macro_rules! operations {
    ($($(#[$doc:meta])* $variant:ident = $number:literal, $name:literal;)*) => {
        /// What a recorded call does. The numbers are part of the layout, and never change.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Operation { $($(#[$doc])* $variant = $number,)* }

        impl Operation {
            /// All operations.
            pub const ALL: &[Operation] = &[$(Operation::$variant,)*];

            /// The name in messages.
            pub fn name(self) -> &'static str {
                match self { $(Operation::$variant => $name,)* }
            }

            /// The operation with that number in a recording.
            pub fn from_number(number: u8) -> Option<Operation> {
                match number { $($number => Some(Operation::$variant),)* _ => None }
            }
        }
    };
}

operations! {
    /// Every rank gets the reduction of all ranks' data.
    AllReduce = 1, "all-reduce";
    /// The root gets the reduction of all ranks' data.
    Reduce = 2, "reduce";
    /// Every rank gets the root's data.
    Broadcast = 3, "broadcast";
    /// Every rank gets every rank's data.
    AllGather = 4, "all-gather";
    /// Every rank gets its block of the reduction of all ranks' data.
    ReduceScatter = 5, "reduce-scatter";
    /// Every rank sends a block to every rank.
    AllToAll = 6, "all-to-all";
    /// The root gets every rank's data.
    Gather = 7, "gather";
    /// Every rank gets its block of the root's data.
    Scatter = 8, "scatter";
    /// A message to a peer.
    Send = 9, "send";
    /// A message from a peer.
    Recv = 10, "recv";
    /// An exchange between neighbours: `dm_shift`, `dm_swap` and what else is made of messages.
    Exchange = 11, "exchange";
    /// An all-to-all in which each rank has counts of its own. The recorded count is what this rank
    /// sends.
    AllToAllV = 12, "all-to-allv";
    /// An all-gather in which each rank has a count of its own. The recorded count is what this
    /// rank receives.
    AllGatherV = 13, "all-gatherv";
    /// A reduce-scatter in which each rank has a count of its own. The recorded count is what this
    /// rank sends.
    ReduceScatterV = 14, "reduce-scatterv";
    /// An operation that the program itself issues on the communicator of a dimension.
    Custom = 15, "own operation";
    /// A collective call of the library itself, such as `dm_init` or `dm_flatten`: the ranks agree
    /// on it in the store. Its text says which call it is.
    Agreement = 32, "agreement";
    /// A barrier through the store.
    Barrier = 33, "barrier";
    /// Bytes that travel through the store.
    StoreBytes = 34, "store exchange";
    /// The making of communicators.
    MakeComms = 35, "making of communicators";
}

impl Operation {
    /// Whether the call concerns one peer.
    pub fn is_message(self) -> bool {
        matches!(self, Operation::Send | Operation::Recv)
    }

    /// Whether all ranks of a group make this call in one order, so that it has a number among the
    /// group's collective calls and belongs to the group's digest. A message does not, and nobody
    /// knows whether the other ranks make an operation of the program's own. Both are counted apart
    /// from the collective calls.
    #[inline]
    pub fn is_compared(self) -> bool {
        !matches!(self, Operation::Send | Operation::Recv | Operation::Custom)
    }

    /// Whether the ranks agree on the call in the store. Its count is the number of a text.
    pub fn is_agreement(self) -> bool {
        matches!(self, Operation::Agreement | Operation::Barrier | Operation::StoreBytes | Operation::MakeComms)
    }

    /// Whether the count may differ between the ranks of one call.
    pub fn has_own_counts(self) -> bool {
        matches!(self, Operation::AllToAllV | Operation::AllGatherV | Operation::ReduceScatterV)
    }
}

/// One call, as its caller gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// What the call does.
    pub operation: Operation,
    /// The type of the elements, as an `ncclDataType_t`.
    pub dtype: u8,
    /// The reduction, as an `ncclRedOp_t`; 0 where the call reduces nothing.
    pub reduction: u8,
    /// The number of elements, as the call counts them.
    pub count: u64,
    /// The root or the peer, as its rank in the group; [`NO_PEER`] for none.
    pub peer: i32,
    /// The low 32 bits of the stream's address; 0 for none.
    pub stream: u32,
}

/// The most elements of a call whose work is over in less than a microsecond.
const BRIEF: u64 = 512;

impl Call {
    /// Whether reading the clock would take a considerable part of the call's time, if the call
    /// waits for nobody. The clock is then not read twice, so the beginning and the end are less
    /// exact.
    #[inline]
    pub fn is_brief(&self) -> bool {
        self.count <= BRIEF && !self.operation.has_own_counts() && !self.operation.is_agreement()
    }

    /// Whether the call belongs to the digest. NCCL does nothing in a collective without elements,
    /// so ranks may leave it out.
    #[inline]
    fn is_compared(&self) -> bool {
        self.operation.is_compared()
            && (self.count > 0 || self.operation.has_own_counts() || self.operation.is_agreement())
    }

    /// The digest of a channel after this call, from the digest before it. Two ranks have equal
    /// digests if they have begun the same calls in the same order. The digest includes neither the
    /// stream nor the count of a call whose count may differ between the ranks.
    #[inline]
    pub(crate) fn digest(&self, before: u64) -> u64 {
        if !self.is_compared() {
            return before;
        }
        mix(before ^ self.digested())
    }

    /// The digest of a channel before this call, from the digest after it.
    pub fn digest_before(&self, after: u64) -> u64 {
        if !self.is_compared() {
            return after;
        }
        unmix(after) ^ self.digested()
    }

    /// The facts that belong to the digest, in one word. The factor of the count is odd, so two
    /// counts never give one word, and large, so the count reaches the bits of the other facts only
    /// by chance.
    #[inline]
    fn digested(&self) -> u64 {
        let what = u64::from(self.operation as u8)
            | u64::from(self.dtype) << 8
            | u64::from(self.reduction) << 16
            | u64::from(self.peer as u32) << 32;
        let count = if self.operation.has_own_counts() { 0 } else { self.count };
        what ^ count.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// The inverse of [`mix`]. Its factors are the inverses of those of `mix` modulo 2^64.
fn unmix(mut word: u64) -> u64 {
    word ^= word >> 33;
    word = word.wrapping_mul(0x9cb4_b2f8_1293_37db);
    word ^= word >> 33;
    word = word.wrapping_mul(0x4f74_430c_22a5_4005);
    word ^ (word >> 33)
}

/// Mixes the bits of a word: the finalizer of MurmurHash3 (Austin Appleby), a bijection.
#[inline]
fn mix(mut word: u64) -> u64 {
    word ^= word >> 33;
    word = word.wrapping_mul(0xff51_afd7_ed55_8ccd);
    word ^= word >> 33;
    word = word.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    word ^ (word >> 33)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::{Call, NO_PEER, Operation};

    #[test]
    fn the_digest_before_a_call_follows_from_the_digest_after_it() {
        let mut digest = 0x0123_4567_89ab_cdef;
        for (operation, count, peer) in [
            (Operation::AllReduce, 8, NO_PEER),
            (Operation::Broadcast, u64::MAX, 3),
            (Operation::AllToAllV, 5, NO_PEER),
            (Operation::Barrier, 0, NO_PEER),
            (Operation::AllReduce, 0, NO_PEER),
            (Operation::Send, 4, 1),
        ] {
            let call = Call { operation, dtype: 7, reduction: 2, count, peer, stream: 9 };
            let after = call.digest(digest);
            assert_eq!(call.digest_before(after), digest, "{call:?}");
            digest = after;
        }
    }

    #[test]
    fn calls_that_differ_in_one_fact_have_different_digests() {
        let first = Call { operation: Operation::Broadcast, dtype: 7, reduction: 0, count: 1, peer: 0, stream: 0 };
        let mut calls: Vec<Call> = (1..=4096).map(|count| Call { count, ..first }).collect();
        calls.extend((0..u64::BITS).map(|bit| Call { count: 1 << bit, ..first }).filter(|call| call.count > 4096));
        calls.extend((1..1024).chain([NO_PEER]).map(|peer| Call { peer, ..first }));
        calls.extend((0..12).map(|dtype| Call { dtype, ..first }).filter(|call| call.dtype != first.dtype));
        calls.extend((1..6).map(|reduction| Call { reduction, ..first }));
        let digests: HashSet<u64> = calls.iter().map(|call| call.digest(0)).collect();
        assert_eq!(digests.len(), calls.len());
    }
}
