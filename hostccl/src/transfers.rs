//! The messages of one operation that are under way on the wire.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::blame::Blame;
use crate::collective::Descriptor;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::poll::Poll;
use crate::span::Span;
use crate::types::ncclInternalError;
use crate::wire::Broken;
use crate::wire::request::{Failed, Transfer, poll_all};

/// A set of messages under way, which are tested together. When the set is dropped, it cancels the
/// messages that have not ended. So the set is dropped before the buffers.
pub(crate) struct Transfers {
    /// The communicator.
    comm: Arc<Comm>,
    /// The call that exchanges the messages, for errors.
    call: Descriptor,
    /// The messages.
    list: Vec<Transfer>,
    /// The length that each message must have; `None` where any length fits.
    expected: Vec<Option<usize>>,
}

impl Transfers {
    /// Returns an empty set for `call`, which is on a communicator over several hosts.
    pub(crate) fn new(comm: &Arc<Comm>, call: Descriptor) -> Transfers {
        Transfers { comm: comm.clone(), call, list: Vec::new(), expected: Vec::new() }
    }

    fn span(&self) -> &Span {
        self.comm.span.as_ref().expect("transfers are between hosts")
    }

    /// Begins to send a message to a rank of another host. An empty message is not sent.
    ///
    /// # Safety
    /// The buffer stays valid and unchanged until the message has gone or the set is dropped.
    pub(crate) unsafe fn send(&mut self, to: usize, stream: u64, from: *const u8, bytes: usize) {
        let span = self.span();
        let Some(peer) = span.peers[to].filter(|_| bytes > 0) else { return };
        // SAFETY: the caller's contract.
        let transfer = unsafe { Transfer::send(&span.wire, peer, span.to(to, stream), from, bytes) };
        self.push(transfer);
    }

    /// Begins to receive a message of exactly `bytes` bytes from a rank of another host. There is
    /// no message where `bytes` is 0.
    ///
    /// # Safety
    /// The buffer stays valid, and nobody else touches it, until the message has come or the set is
    /// dropped.
    pub(crate) unsafe fn recv(&mut self, from: usize, stream: u64, to: *mut u8, bytes: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.recv_at_most(from, stream, to, bytes) };
        if let Some(expected) = self.expected.last_mut().filter(|_| bytes > 0) {
            *expected = Some(bytes);
        }
    }

    /// Does what [`recv`](Transfers::recv) does for a message that may be shorter.
    ///
    /// # Safety
    /// The contract of [`recv`](Transfers::recv).
    pub(crate) unsafe fn recv_at_most(&mut self, from: usize, stream: u64, to: *mut u8, bytes: usize) {
        let span = self.span();
        let Some(peer) = span.peers[from].filter(|_| bytes > 0) else { return };
        // SAFETY: the caller's contract.
        let transfer = unsafe { Transfer::recv(&span.wire, peer, span.from(from, stream), to, bytes) };
        self.push(transfer);
    }

    fn push(&mut self, transfer: Transfer) {
        self.list.push(transfer);
        self.expected.push(None);
        if let Some(rails) = &self.comm.rails {
            rails.transfers.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns `None` once all messages have gone or come, and otherwise what to wait for. Ends the
    /// communicator when a peer is lost or a message has a wrong length.
    pub(crate) fn poll(&mut self) -> Result<Option<Poll>> {
        if self.list.is_empty() {
            return Ok(None);
        }
        let Some(span) = &self.comm.span else { return Ok(None) };
        match poll_all(&*span.wire, &mut self.list) {
            Ok(None) => self.check_lengths().map(|()| None),
            Ok(Some(blocked)) => self.comm.check_waiting(blocked).map(Some),
            Err(Failed { rank, why: Broken::Lost(lost) }) => {
                let call = format!("{} on {}", self.call.call(), self.comm.own_label());
                Err(self.comm.fail_lost(rank, &lost, &call))
            }
            Err(Failed { rank, why: Broken::TooLong(bytes) }) => Err(self.wrong_length(rank, bytes)),
        }
    }

    fn check_lengths(&mut self) -> Result<()> {
        let mut wrong = None;
        for (transfer, expected) in self.list.iter_mut().zip(&self.expected) {
            if let (Some(expected), Ok(Some(bytes))) = (*expected, transfer.test()) {
                if bytes != expected {
                    wrong = Some((transfer.rank(), bytes));
                }
            }
        }
        wrong.map_or(Ok(()), |(rank, bytes)| Err(self.wrong_length(rank, bytes)))
    }

    fn wrong_length(&self, rank: usize, bytes: usize) -> Error {
        let message = format!(
            "{} sent {bytes} bytes in {}, which is not the expected length: the ranks' libraries differ, or this is a bug in hostccl",
            self.comm.labels.rank(rank, None),
            self.call.call()
        );
        self.comm.fail_whole(ncclInternalError, Blame::of([rank]), &message, "")
    }

    /// The length of each message, in the order in which they were begun, once all have ended.
    pub(crate) fn lengths(&mut self) -> impl Iterator<Item = usize> {
        self.list.iter_mut().map(|transfer| transfer.test().ok().flatten().unwrap_or(0))
    }

    /// Forgets the messages, and cancels those that have not ended.
    pub(crate) fn clear(&mut self) {
        if let Some(rails) = &self.comm.rails {
            rails.transfers.fetch_sub(self.list.len(), Ordering::Relaxed);
        }
        self.list.clear();
        self.expected.clear();
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        self.clear();
    }
}
