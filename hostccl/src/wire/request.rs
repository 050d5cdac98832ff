//! Owners of requests. Dropping an owner cancels its request if the request is still under way,
//! because the request's buffer belongs to the caller of the operation.

use std::cell::Cell;
use std::sync::Arc;

use super::{Broken, Peer, Request, Tag, Wire};
use crate::poll::{Blocker, Poll};

thread_local! {
    /// How many transfers this thread has found done.
    static DONE: Cell<u64> = const { Cell::new(0) };
}

/// Returns how many transfers the calling thread has found done. The wait loop counts a change of
/// this number as progress of the thread's calls. The wire's word says less, because it changes
/// with everything that happens on the wire.
pub(crate) fn done_here() -> u64 {
    DONE.get()
}

/// A send or receive that this value owns. Dropping it cancels the request, unless it has ended.
#[derive(Debug)]
pub(crate) struct Transfer {
    /// The wire on which the request is.
    wire: Arc<dyn Wire>,
    /// The rank of the communicator with which the message is exchanged.
    rank: usize,
    /// The request; `None` once it is over.
    request: Option<Request>,
    /// The length of the message in bytes, once the request is done.
    bytes: usize,
}

impl Transfer {
    /// Begins to send a message.
    ///
    /// # Safety
    /// The buffer stays valid and unchanged until the transfer has ended or is dropped.
    pub(crate) unsafe fn send(wire: &Arc<dyn Wire>, peer: Peer, tag: Tag, from: *const u8, bytes: usize) -> Transfer {
        // SAFETY: the caller's contract; the drop cancels the request.
        let request = unsafe { wire.isend(peer, tag, from, bytes) };
        Transfer { wire: wire.clone(), rank: tag.to as usize, request: Some(request), bytes: 0 }
    }

    /// Begins to send a message that may wait for the next one to the peer, as
    /// [`isend_soon`](Wire::isend_soon) says.
    ///
    /// # Safety
    /// The contract of [`send`](Transfer::send).
    pub(crate) unsafe fn send_soon(
        wire: &Arc<dyn Wire>,
        peer: Peer,
        tag: Tag,
        from: *const u8,
        bytes: usize,
    ) -> Transfer {
        // SAFETY: the caller's contract; the drop cancels the request.
        let request = unsafe { wire.isend_soon(peer, tag, from, bytes) };
        Transfer { wire: wire.clone(), rank: tag.to as usize, request: Some(request), bytes: 0 }
    }

    /// Begins to receive a message of at most `bytes` bytes.
    ///
    /// # Safety
    /// The buffer stays valid, and nobody else touches it, until the transfer has ended or is
    /// dropped.
    pub(crate) unsafe fn recv(wire: &Arc<dyn Wire>, peer: Peer, tag: Tag, to: *mut u8, bytes: usize) -> Transfer {
        // SAFETY: the caller's contract; the drop cancels the request.
        let request = unsafe { wire.irecv(peer, tag, to, bytes) };
        Transfer { wire: wire.clone(), rank: tag.sender() as usize, request: Some(request), bytes: 0 }
    }

    /// The rank of the communicator with which the message is exchanged.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the length of the message once the request is done, and `None` while it is under
    /// way. A transfer that is done may be tested again. The error of a transfer that has failed
    /// is returned only once.
    pub(crate) fn test(&mut self) -> Result<Option<usize>, Broken> {
        let Some(request) = &self.request else { return Ok(Some(self.bytes)) };
        let tested = self.wire.test(request);
        match tested {
            Ok(None) => return Ok(None),
            Ok(Some(bytes)) => {
                self.bytes = bytes;
                DONE.set(DONE.get() + 1);
            }
            Err(_) => {}
        }
        self.request = None;
        tested
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if let Some(request) = self.request.take() {
            self.wire.cancel(request);
        }
    }
}

/// The reason why one of several transfers has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failed {
    /// The rank of the communicator with which the message was exchanged.
    pub(crate) rank: usize,
    /// The reason that the wire gives.
    pub(crate) why: Broken,
}

/// Tests all of these transfers. Returns `None` once all are done, and otherwise what to wait for:
/// the rank of the first transfer that is not done.
pub(crate) fn poll_all(wire: &dyn Wire, transfers: &mut [Transfer]) -> Result<Option<Poll>, Failed> {
    // The word is read before the tests. A request that ends after its test changes the word.
    let seen = wire.moved().value();
    let mut first = None;
    for transfer in transfers {
        match transfer.test() {
            Ok(Some(_)) => {}
            Ok(None) => first = first.or(Some(transfer.rank)),
            Err(why) => return Err(Failed { rank: transfer.rank, why }),
        }
    }
    Ok(first.map(|from| Poll::Blocked { seen, blocker: Blocker::Wire { from } }))
}

#[cfg(test)]
mod tests {
    use super::super::memory;
    use super::*;

    const TAG: Tag = Tag { comm: 7, stream: 0, from: 0, to: 1 };

    fn pair() -> (Arc<memory::Memory>, [Arc<dyn Wire>; 2]) {
        let wires = memory::wires(2);
        (wires[0].clone(), [wires[0].clone() as Arc<dyn Wire>, wires[1].clone() as Arc<dyn Wire>])
    }

    #[test]
    fn a_receive_that_is_dropped_leaves_its_buffer_and_the_message_alone() {
        let (_, wires) = pair();
        let (mut dropped, mut kept) = ([0_u8; 4], [0_u8; 4]);
        // SAFETY: the buffers outlive the transfers.
        unsafe {
            drop(Transfer::recv(&wires[1], Peer(0), TAG, dropped.as_mut_ptr(), 4));
            let mut send = Transfer::send(&wires[0], Peer(1), TAG, [1, 2, 3].as_ptr(), 3);
            assert_eq!(send.test(), Ok(Some(3)));
            let mut list = [Transfer::recv(&wires[1], Peer(0), TAG, kept.as_mut_ptr(), 4)];
            assert_eq!(poll_all(&*wires[1], &mut list), Ok(None));
            assert_eq!((list[0].test(), list[0].rank()), (Ok(Some(3)), 0), "it may be asked again");
        }
        assert_eq!((dropped, kept), ([0; 4], [1, 2, 3, 0]));
    }

    #[test]
    fn the_rank_of_a_question_or_a_letter_is_the_senders() {
        let (_, wires) = pair();
        for mark in [Tag::QUESTION, Tag::LETTER] {
            let tag = Tag { from: 3 | mark, ..TAG };
            // SAFETY: the message is empty.
            let receive = unsafe { Transfer::recv(&wires[1], Peer(0), tag, std::ptr::dangling_mut(), 0) };
            assert_eq!(receive.rank(), 3);
        }
    }

    #[test]
    fn several_transfers_are_tested_together() {
        let (first, wires) = pair();
        let mut got = [[0_u8; 4]; 2];
        let [one, two] = &mut got;
        // SAFETY: the buffers outlive the transfers.
        unsafe {
            let recv = |to: &mut [u8; 4], stream| {
                Transfer::recv(&wires[1], Peer(0), Tag { stream, ..TAG }, to.as_mut_ptr(), 4)
            };
            let mut list = [recv(one, 0), recv(two, 1)];
            let seen = wires[1].moved().value();
            let blocked = Poll::Blocked { seen, blocker: Blocker::Wire { from: 0 } };
            assert_eq!(poll_all(&*wires[1], &mut list), Ok(Some(blocked)));
            drop(Transfer::send(&wires[0], Peer(1), TAG, [5; 4].as_ptr(), 4));
            assert!(matches!(poll_all(&*wires[1], &mut list), Ok(Some(_))), "the other one is missing");
            assert_ne!(wires[1].moved().value(), seen);
            first.die();
            assert!(matches!(poll_all(&*wires[1], &mut list), Err(Failed { rank: 0, why: Broken::Lost(_) })));
        }
        assert_eq!(got[0], [5; 4]);
    }
}
