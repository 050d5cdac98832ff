//! The notices that wait to be read or to be sent. They take a bounded amount of memory, however
//! many peers there are.

/// The most bytes that the notices of one list take. A notice beyond that is dropped, because later
/// notices about a failure only repeat the first ones.
const MOST_BYTES: usize = 4 << 20;
/// The number of bytes that a notice takes beyond its text.
const COST: usize = 128;

/// A notice that waits.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Waiting {
    /// The sender of a notice that has come, or the receiver of a notice that waits to be sent.
    pub(super) peer: u32,
    /// The communicator that the notice is about.
    pub(super) comm: u64,
    /// The text of the notice.
    pub(super) text: Vec<u8>,
}

/// A list of notices, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Notices {
    /// The notices.
    list: Vec<Waiting>,
    /// The number of bytes that the notices take.
    bytes: usize,
}

impl Notices {
    /// Adds a notice. If the list would take too many bytes, drops the notice and returns false.
    pub(super) fn push(&mut self, peer: u32, comm: u64, text: &[u8]) -> bool {
        let bytes = self.bytes + text.len() + COST;
        let fits = bytes <= MOST_BYTES;
        if fits {
            self.list.push(Waiting { peer, comm, text: text.to_vec() });
            self.bytes = bytes;
        }
        fits
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Takes all notices.
    pub(super) fn take(&mut self) -> Vec<Waiting> {
        self.bytes = 0;
        std::mem::take(&mut self.list)
    }

    /// Takes the notices of one peer.
    pub(super) fn take_of(&mut self, peer: u32) -> Vec<Waiting> {
        let (taken, kept): (Vec<Waiting>, Vec<Waiting>) = self.take().into_iter().partition(|one| one.peer == peer);
        self.bytes = kept.iter().map(|one| one.text.len() + COST).sum();
        self.list = kept;
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_notices_take_a_bounded_amount_of_memory_and_the_first_ones_stay() {
        let mut notices = Notices::default();
        let text = [7; 1024];
        let kept = (0..1 << 16).filter(|at| notices.push(at % 64, u64::from(*at), &text)).count();
        assert!(kept > 1000 && kept * text.len() <= MOST_BYTES, "{kept}");
        let first = notices.take_of(0);
        assert_eq!((first.len(), first[0].comm), (kept.div_ceil(64), 0));
        assert!(notices.push(0, 1, &text), "what is taken makes room");
        assert_eq!(notices.take().len(), kept - first.len() + 1);
        assert!(notices.take().is_empty() && notices.push(0, 1, &text));
    }
}
