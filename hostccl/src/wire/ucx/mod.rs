//! The wire over UCX, for clusters with RoCE or InfiniBand (`DM_WIRE=ucx`).
//!
//! Each process has one UCP worker. All messages are Active Messages with a header of the wire's
//! own, and the wire matches them itself, because UCX's tags are too short for a [`Tag`].
//!
//! - A short message goes at once. It is copied first, so its send is over when `isend` returns.
//!   At most [`remote::WINDOW`] bytes of short messages are at a receiver that has not asked for
//!   them.
//! - A long message is announced. When a receive meets it, the receiver asks, and the message goes
//!   in pieces from the sender's buffer into the receiver's. UCX knows the caller's buffers only
//!   while pieces are under way, so a request can be cancelled without the peer at any other time.
//! - UCX does not promise that messages arrive in the order in which they were sent, because it may
//!   use several devices. So the headers are numbered.
//! - UCX cannot encrypt. With a secret the wire is refused.
//!
//! # What differs from the wire over TCP
//! - UCX's sockets are not closed in forked children. While a child of a dead process holds them,
//!   the peers notice the death only by the silence of the dead process.
//! - A process that is stopped (SIGSTOP) is as silent as one without a network.
//! - `close` and `cancel` may wait for a moment, and other threads use the wire meanwhile. `close`
//!   waits until all messages have arrived, because the device drops unsent data when the process
//!   exits. `cancel` waits until UCX has given the buffer back. If that takes too long, `cancel`
//!   closes the connection by force. UCX then ends all operations with the peer, and the peer is
//!   lost. If UCX keeps the buffer even then, `cancel` ends UCX's worker, and all peers are lost.
//!
//! # Files, from the bottom up
//! `api` (UCX's C interface), `library` (the search for UCX's library), `frame` (the data that go
//! over the network), `mailbox` (the reports of UCX), `worker` (UCX's side), `notices` (notices
//! that wait), `remote` (a peer), `state` (peers and requests), `incoming` (receives), `outgoing`
//! (sends), `greeting` (trust, signs of life), `arrival` (messages as UCX hands them over),
//! `driver` and `shared` (the choice of the thread that moves messages), `threads` (the sleep of
//! threads), and this file.

#[cfg(any(test, fuzzing))]
pub(crate) mod any_bytes;
mod api;
mod arrival;
mod driver;
mod frame;
mod greeting;
mod incoming;
mod library;
mod mailbox;
mod notices;
mod outgoing;
mod remote;
mod shared;
mod state;
mod threads;
mod worker;

use std::ops::Deref;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use self::library::Library;
use self::notices::Waiting;
use self::remote::{Remote, Stage};
use self::shared::Shared;
use self::state::{Core, Op};
use super::{Broken, Contact, Lost, Notice, Peer, Request, Tag, Token, Wire};
use crate::error::{Error, Result};
use crate::event::{Event, Watch};
use crate::fork;
use crate::thread;
use crate::token::random_token;
use crate::types::ncclSystemError;

/// How long `close` and the end of the wire wait until all messages have arrived.
const FLUSH: Duration = Duration::from_millis(500);
/// The longest time for which `cancel` waits for UCX before it gives the peer up.
const PATIENCE: Duration = Duration::from_secs(1);

/// A library, or the reason why there is none.
type OpenResult = std::result::Result<&'static Library, String>;

/// The wire. Its last owner ends the wire's thread.
#[derive(Debug)]
struct Ucx {
    /// The state that the wire's thread uses as well.
    shared: Arc<Shared>,
    /// The wire's thread.
    thread: Option<JoinHandle<()>>,
}

impl Deref for Ucx {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

/// Opens UCX's library and returns a wire over it. A peer is lost after `silence` without a sign of
/// life. The wire's thread calls `tick` about ten times a second.
pub(crate) fn open(silence: Duration, tick: fn()) -> Result<Arc<dyn Wire>> {
    Ok(Arc::new(Ucx::new(silence, tick)?))
}

/// Returns in words the release of UCX that this process would use, or the reason why UCX would be
/// refused. Opens UCX's library.
pub(crate) fn describe() -> std::result::Result<String, String> {
    library::open().map(ToString::to_string)
}

/// Refuses to make the wire where traffic is to be encrypted.
pub(crate) fn refuse_secret() -> Error {
    Error::argument(
        "DM_WIRE is \"ucx\" and a secret is set (DM_STORE_SECRET): UCX cannot encrypt what it sends, so traffic between hosts would be readable. Unset DM_WIRE to use TCP, which encrypts, or unset the secret on all ranks where the network is trusted",
    )
}

impl Ucx {
    fn new(silence: Duration, tick: fn()) -> Result<Ucx> {
        Ucx::over(library::open, silence, tick)
    }

    /// Makes a wire over the library that `open` returns.
    fn over(open: fn() -> OpenResult, silence: Duration, tick: fn()) -> Result<Ucx> {
        // UCX starts a thread of its own. UCX's thread inherits the mask of the thread that makes
        // the worker, and that mask blocks the program's signals.
        let made = thread::spawn("dm-ucx-open", move || Shared::new(open, silence, tick));
        let made = made.map_err(|error| Error::system("starting a thread", error))?.join();
        let shared = made.map_err(|_| Error::new(ncclSystemError, "DM_WIRE=ucx: making the wire has panicked"))??;
        let shared = Arc::new(shared);
        let theirs = shared.clone();
        let thread = thread::spawn("dm-wire", move || theirs.run());
        let thread = thread.map_err(|error| Error::system("starting a thread", error))?;
        Ok(Ucx { shared, thread: Some(thread) })
    }
}

impl Wire for Ucx {
    fn contact(&self) -> Contact {
        self.contact.clone()
    }

    fn meet(&self, contact: &Contact, token: &Token) -> Peer {
        let nonce = random_token();
        let met = self.edit(|core| {
            // A lost peer stays lost for its old uses. The network may work again, so a new use
            // gets a peer of its own.
            let is_lost =
                |peer: &u32| core.peers.get(peer).is_some_and(|remote| matches!(remote.stage, Stage::Lost(_)));
            let known = core.by_id.get(&contact.id).copied().filter(|peer| !is_lost(peer));
            let peer = known.unwrap_or_else(|| {
                core.last_peer += 1;
                let place = frame::parse_address(&contact.address).map_or("a process".to_owned(), |(place, _)| place);
                let mut remote = Remote::new(contact.clone(), place, *nonce.as_ref().unwrap_or(&[0; 16]));
                if let Err(error) = &nonce {
                    // Without random bytes there is no proof, so the peer cannot be used.
                    remote.stage = Stage::Lost(Lost { ended: false, why: error.message().to_owned() });
                }
                core.by_id.insert(contact.id, core.last_peer);
                core.peers.insert(core.last_peer, remote);
                core.last_peer
            });
            if let Some(remote) = core.peers.get_mut(&peer) {
                remote.begin_use(token);
                if remote.stage == Stage::Greeting {
                    // The other process may have used the new token before this one knew it.
                    core.greet(peer);
                }
            }
            // The other process may have greeted before.
            if let Some(at) = core.strangers.iter().position(|stranger| stranger.from == contact.id) {
                core.greetings.extend(core.strangers.remove(at));
                core.handle_reports();
            }
            peer
        });
        Peer(met.unwrap_or(0))
    }

    fn close(&self, peer: Peer, token: &Token) {
        self.close_all(&[peer], token);
    }

    fn close_all(&self, peers: &[Peer], token: &Token) {
        let leave = |core: &mut Core| peers.iter().filter_map(|peer| core.leave(peer.0, token)).collect();
        let flushes: Vec<u64> = self.edit(leave).unwrap_or_default();
        let is_under_way = |core: &Core| flushes.iter().any(|flush| core.worker.flights.contains_key(flush));
        if !flushes.is_empty() && !self.wait_until(FLUSH, |core| !is_under_way(core)) {
            log::warn!("messages to peers that are being closed have not arrived after {} ms", FLUSH.as_millis());
        }
    }

    unsafe fn isend(&self, peer: Peer, tag: Tag, from: *const u8, bytes: usize) -> Request {
        // SAFETY: the caller's contract.
        Request(self.edit(|core| unsafe { core.send(peer.0, tag, from, bytes) }).unwrap_or(0))
    }

    unsafe fn irecv(&self, peer: Peer, tag: Tag, to: *mut u8, bytes: usize) -> Request {
        // SAFETY: the caller's contract.
        Request(self.edit(|core| unsafe { core.receive(peer.0, tag, to, bytes) }).unwrap_or(0))
    }

    fn test(&self, request: &Request) -> std::result::Result<Option<usize>, Broken> {
        let tested = self.with(|core| {
            // SAFETY: this thread holds the lock, so it has the only reference.
            let requests = unsafe { &mut (*core).requests };
            match requests.get(&request.0) {
                Some(Op::Over(_)) => match requests.remove(&request.0) {
                    Some(Op::Over(outcome)) => outcome.map(Some),
                    _ => Ok(None),
                },
                Some(_) => Ok(None),
                None => Err(Broken::Lost(Lost { ended: false, why: "the request is over already".to_owned() })),
            }
        });
        tested.unwrap_or_else(|| Err(Broken::Lost(Lost { ended: false, why: fork::refusal() })))
    }

    fn cancel(&self, request: Request) {
        let remove = |core: &mut Core| core.remove(request.0).then(|| core.patience(request.0, self.limit));
        let Some(patience) = self.edit(remove).flatten() else { return };
        let is_over = |core: &Core| matches!(core.requests.get(&request.0), Some(Op::Over(_)) | None);
        if !self.wait_until(patience, is_over) {
            self.edit(|core| core.give_up(request.0));
            if !self.wait_until(PATIENCE, is_over) {
                log::error!("UCX keeps a buffer although its connection was closed, so UCX's worker is ended");
                self.end_worker();
            }
        }
        self.edit(|core| core.requests.remove(&request.0));
    }

    fn retire(&self, peer: Peer, comm: u64, rank: u32) {
        self.edit(|core| core.retire(peer.0, comm, rank));
    }

    fn notify(&self, peer: Peer, comm: u64, text: &[u8]) {
        self.edit(|core| core.notify(peer.0, comm, &text[..text.len().min(super::NOTICE_BYTES)]));
    }

    fn connected(&self, peer: Peer) -> bool {
        let connected = self.edit(|core| {
            let stage = core.peers.get(&peer.0).map(|remote| &remote.stage);
            matches!(stage, Some(Stage::Greeting | Stage::Ready))
        });
        connected == Some(true)
    }

    fn has_all_arrived(&self) -> bool {
        // `close` waits for what has gone over a connection.
        self.edit(|core| core.unsent.is_empty() && core.peers.values().all(|remote| remote.backlog.is_empty()))
            .unwrap_or(true)
    }

    fn moved_bytes(&self, peer: Peer, comm: u64) -> u64 {
        let moved = self.edit(|core| core.peers.get(&peer.0).and_then(|remote| remote.moved.get(&comm)).copied());
        moved.flatten().unwrap_or(0)
    }

    fn news(&self) -> (Vec<Notice>, Vec<(Peer, Lost)>) {
        let taken = self.edit(|core| (core.notices.take(), std::mem::take(&mut core.losses)));
        let (notices, losses) = taken.unwrap_or_default();
        let notice = |one: Waiting| Notice { from: Peer(one.peer), comm: one.comm, text: one.text };
        (notices.into_iter().map(notice).collect(), losses)
    }

    fn lost(&self, peer: Peer) -> Option<Lost> {
        let lost = self.edit(|core| match core.peers.get(&peer.0).map(|remote| &remote.stage) {
            Some(Stage::Lost(lost)) => Some(lost.clone()),
            _ => None,
        });
        lost.flatten()
    }

    fn waiting(&self, peer: Peer, comm: u64) -> Vec<Tag> {
        let tags = self.edit(|core| {
            let arrived = core.peers.get(&peer.0).map(|remote| &remote.arrived);
            arrived.into_iter().flatten().map(|(tag, _)| *tag).filter(|tag| tag.comm == comm).collect()
        });
        tags.unwrap_or_default()
    }

    fn progress(&self) -> bool {
        self.driver.note_poll();
        self.turn()
    }

    fn moved(&self) -> &Event {
        &self.moved
    }

    fn sleep(&self, watches: &[Watch<'_>], timeout: Duration) {
        self.sleep_on_words(watches, timeout);
    }

    fn sleep_on_wire(&self, seen: u32, others: &[Watch<'_>], timeout: Duration) {
        self.drive(seen, others, timeout);
    }
}

impl Core {
    /// Ends one use of a peer. Returns the operation that ends when all that was sent has arrived,
    /// if the caller has to wait for that.
    fn leave(&mut self, peer: u32, token: &Token) -> Option<u64> {
        let remote = self.peers.get_mut(&peer)?;
        remote.end_use(token);
        if remote.uses > 0 {
            return None;
        }
        match remote.stage {
            Stage::Ready => {
                // The connection stays until one of the processes ends. The next use takes it.
                let endpoint = remote.endpoint;
                return self.worker.flush(endpoint);
            }
            // The peer may have proven itself and sent messages already, so the connection stays.
            Stage::Greeting => {}
            Stage::Idle | Stage::Lost(_) => self.drop_peer(peer),
        }
        None
    }

    /// The peer of a request that is not over.
    fn peer_of(&self, request: u64) -> Option<(u32, &Remote)> {
        let peer = match self.requests.get(&request)? {
            Op::Send(send) => send.peer,
            Op::Receive(receive) => receive.peer,
            Op::Over(_) => return None,
        };
        self.peers.get(&peer).map(|remote| (peer, remote))
    }

    /// Returns how long the end of a cancelled request waits for the peer. A peer that has been
    /// silent for a while gets less time, so that many requests with silent peers end soon.
    fn patience(&self, request: u64, limit: Duration) -> Duration {
        let silence = self.peer_of(request).map_or(Duration::ZERO, |(_, remote)| remote.heard.elapsed());
        (PATIENCE + limit / 5).saturating_sub(silence).clamp(PATIENCE / 100, PATIENCE)
    }

    /// Notes the peer of a request as lost, because UCX does not give the request's buffer back.
    /// The loss closes the endpoint by force: UCX ends all operations of the endpoint without the
    /// peer, and gives the buffers back.
    fn give_up(&mut self, request: u64) {
        let Some((peer, remote)) = self.peer_of(request) else { return };
        let why = format!("{} did not move a message that was cancelled", remote.place);
        self.lose(peer, Lost { ended: false, why });
    }
}

impl Drop for Ucx {
    fn drop(&mut self) {
        if fork::is_child() {
            // A forked child does not have the thread.
            return;
        }
        self.driver.end_thread();
        // The wire's thread may itself drop the last owner, in its tick. It cannot wait for its own
        // end, and ends soon.
        if let Some(thread) = self.thread.take_if(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
        self.edit(|core| core.lose_all(&Lost { ended: false, why: "the connection was closed here".to_owned() }));
        self.wait_until(FLUSH, |core| core.worker.flights.is_empty());
    }
}

#[cfg(test)]
mod tests;
