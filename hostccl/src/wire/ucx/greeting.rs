//! Lets two wires prove to each other that they know the token, and lets each wire notice that the
//! other one is gone.
//!
//! Each wire makes a random number, its nonce, for each connection. The wire that needs the
//! connection sends a first greeting with its nonce. The other one answers with its own nonce and
//! the proof that it knows the token: an HMAC-SHA-256 over both wires' numbers and both nonces,
//! keyed with the token. Then the first wire sends its own proof in the same form.
//!
//! A wire that has checked the other one's proof computes the cookie that the other one's messages
//! must carry from then on, and confirms the cookie with a message of the kind `Alive`. Messages
//! go to a peer once it has confirmed the cookie. The cookie comes from the token as well. Somebody
//! who does not know the token can forge no proof. Such a person can forge messages only after
//! reading the cookie on the network, where it is not encrypted.
//!
//! A process may greet before the other one has met it. The other one keeps that greeting, and
//! answers that it lives. The greeting is repeated until the connection is ready.

use std::time::{Duration, Instant};

use super::frame::{self, Direction, Greeting, Header, Kind};
use super::remote::{Remote, Stage};
use super::state::Core;
use super::worker::Flight;
use crate::wire::{Lost, Peer, Token};

impl Remote {
    /// The direction from the peer to this wire, with the nonce that the peer says it has made.
    fn inward<'a>(&'a self, me: &'a [u8; 16], theirs: &'a [u8; 16]) -> Direction<'a> {
        Direction { from: (&self.contact.id, theirs), to: (me, &self.nonce) }
    }

    /// The direction from this wire to the peer.
    fn outward<'a>(&'a self, me: &'a [u8; 16], theirs: &'a [u8; 16]) -> Direction<'a> {
        Direction { from: (me, &self.nonce), to: (&self.contact.id, theirs) }
    }
}

/// Returns the loss of the peers that are lost because this process has ended UCX's worker.
pub(super) fn worker_ended() -> Lost {
    let why = "UCX did not give a buffer back, so this process has ended its UCX worker: end all communicators of this process; the next communicator starts a new worker";
    Lost { ended: false, why: why.to_owned() }
}

impl Core {
    /// Makes the connections that are needed.
    pub(super) fn connect_all(&mut self) {
        while let Some(peer) = self.connecting.pop() {
            self.connect(peer);
        }
    }

    /// Makes the connection to a peer, if there is none.
    pub(super) fn connect(&mut self, peer: u32) {
        let Some(remote) = self.peers.get_mut(&peer).filter(|remote| remote.stage == Stage::Idle) else { return };
        if self.worker.has_ended() {
            return self.losing.push((peer, worker_ended()));
        }
        let Some((_, worker)) = frame::parse_address(&remote.contact.address) else {
            let why = format!("{} has no address of UCX: set DM_WIRE alike on all hosts", remote.place);
            return self.losing.push((peer, Lost { ended: false, why }));
        };
        let connected = self.worker.connect(worker);
        match connected {
            Ok(endpoint) => {
                (remote.endpoint, remote.stage, remote.heard) = (endpoint, Stage::Greeting, Instant::now());
                self.greet(peer);
            }
            Err(status) => self.failed(peer, status),
        }
    }

    /// Sends the first greeting.
    pub(super) fn greet(&mut self, peer: u32) {
        let Some(remote) = self.peers.get_mut(&peer) else { return };
        remote.greeted = Instant::now();
        let greeting = Greeting {
            from: self.contact.id,
            to: remote.contact.id,
            nonce: remote.nonce,
            answers: [0; 16],
            proof: [0; 32],
        };
        self.send_greeting(peer, greeting);
    }

    fn send_greeting(&mut self, peer: u32, greeting: Greeting) {
        let Some(remote) = self.peers.get_mut(&peer).filter(|remote| !remote.endpoint.is_null()) else { return };
        remote.spoke = Instant::now();
        if let Err(status) = self.worker.greet(remote.endpoint, greeting) {
            self.failed(peer, status);
        }
    }

    /// Sends the proof that this wire knows the token by which the peer has proven itself. If the
    /// peer has not proven itself yet, and the processes met through several tokens, each proof
    /// takes the next token, because the peer need not know all tokens yet.
    fn prove(&mut self, peer: u32, theirs: [u8; 16]) {
        let me = self.contact.id;
        let Some(remote) = self.peers.get_mut(&peer) else { return };
        let proofs = if remote.proved.0 == theirs { remote.proved.1 } else { 0 };
        let tokens = remote.newest_tokens().len();
        let next = remote.newest_tokens().nth(proofs % tokens.max(1));
        let Some(token) = remote.token.or(next.copied()) else { return };
        (remote.proved, remote.proved_by) = ((theirs, proofs + 1), token);
        let outward = remote.outward(&me, &theirs);
        let (proof, cookie) = (outward.proof(&token), outward.cookie(&token));
        if !remote.is_ready() {
            remote.cookie_out = cookie;
        }
        let greeting = Greeting { from: me, to: remote.contact.id, nonce: remote.nonce, answers: theirs, proof };
        self.send_greeting(peer, greeting);
    }

    /// Looks at a greeting of a peer.
    pub(super) fn greeted(&mut self, greeting: &Greeting) {
        let me = self.contact.id;
        let Some(&peer) = self.by_id.get(&greeting.from) else { return };
        let Some(remote) = self.peers.get_mut(&peer) else { return };
        if let Stage::Lost(_) = remote.stage {
            return;
        }
        if !remote.is_ready() {
            // Nobody has proven anything yet, so this only says that somebody lives there.
            remote.heard = Instant::now();
        }
        let theirs = greeting.nonce;
        if greeting.answers == [0; 16] {
            self.connect(peer);
            self.prove(peer, theirs);
            return self.confirm(peer);
        }
        if greeting.answers != remote.nonce || greeting.proof == [0; 32] || remote.their_nonce.is_some() {
            return;
        }
        let inward = remote.inward(&me, &theirs);
        let proves = |token: &&Token| inward.proves(token, &greeting.proof);
        let Some(token) = remote.newest_tokens().find(proves).copied() else { return };
        let cookie = inward.cookie(&token);
        let proved = remote.proved.0 == theirs && remote.proved_by == token;
        (remote.their_nonce, remote.cookie_in, remote.token) = (Some(theirs), cookie, Some(token));
        self.by_cookie.insert(cookie, peer);
        if !proved {
            self.prove(peer, theirs);
        }
        self.confirm(peer);
    }

    /// Tells a peer that has proven itself which cookie the peer's messages must carry.
    fn confirm(&mut self, peer: u32) {
        let Some(remote) = self.peers.get_mut(&peer).filter(|remote| remote.their_nonce.is_some()) else { return };
        let mut header = Header::new(Kind::Alive, frame::NO_TAG, remote.cookie_in, 0);
        header.cookie = remote.cookie_out;
        remote.spoke = Instant::now();
        let block: Box<[u8]> = Box::new(header.to_bytes());
        if let Err(status) = self.worker.send_block(remote.endpoint, block) {
            self.failed(peer, status);
        }
    }

    /// Takes the message of a proven peer that says which cookie this wire's messages must carry.
    /// From then on messages may go to the peer.
    pub(super) fn agreed(&mut self, peer: u32, cookie: u64) {
        let me = self.contact.id;
        let Some(remote) = self.peers.get_mut(&peer).filter(|remote| remote.stage == Stage::Greeting) else { return };
        let Some(theirs) = remote.their_nonce else { return };
        let outward = remote.outward(&me, &theirs);
        if !remote.newest_tokens().any(|token| outward.cookie(token) == cookie) {
            return;
        }
        remote.make_ready(cookie);
        self.start_backlog(peer);
    }

    /// Handles what UCX has reported since the last call, and the greetings and losses that follow
    /// from it. Returns whether there was anything.
    pub(super) fn handle_reports(&mut self) -> bool {
        let mail = self.worker.mail();
        let mut any = !mail.over.is_empty() || !mail.broken.is_empty();
        for (flight, status) in mail.over {
            match self.worker.flights.remove(&flight) {
                Some(Flight::Piece(request, bytes, _)) => self.piece_gone(request, bytes, status),
                Some(Flight::Landing(request, bytes)) => self.piece_landed(request, bytes, status),
                // A thread may wait for the end of a flush.
                Some(Flight::Endpoint) => self.changed = true,
                Some(Flight::Block(_)) | None => {}
            }
        }
        for (endpoint, status) in mail.broken {
            let broken = self.peers.iter().find(|(_, remote)| remote.endpoint as usize == endpoint);
            if let Some((&peer, _)) = broken {
                self.failed(peer, status);
            }
        }
        self.connect_all();
        while let Some(greeting) = self.greetings.pop_front() {
            any = true;
            self.greeted(&greeting);
        }
        for (peer, lost) in std::mem::take(&mut self.losing) {
            any = true;
            self.lose(peer, lost);
        }
        any
    }

    /// Loses a peer. Its endpoint is closed, and its requests fail once UCX is done with their
    /// buffers.
    pub(super) fn lose(&mut self, peer: u32, lost: Lost) {
        let Some(remote) = self.peers.get_mut(&peer) else { return };
        if let Stage::Lost(_) = remote.stage {
            return;
        }
        log::debug!("the wire has lost a peer: {}", lost.why);
        remote.stage = Stage::Lost(lost.clone());
        let endpoint = std::mem::replace(&mut remote.endpoint, std::ptr::null_mut());
        let (uses, cookie) = (remote.uses, remote.cookie_in);
        self.by_cookie.remove(&cookie);
        self.fail_requests(peer, &lost);
        if !endpoint.is_null() {
            self.worker.close(endpoint);
        }
        if uses == 0 {
            self.drop_peer(peer);
        } else {
            self.losses.push((Peer(peer), lost));
            self.changed = true;
        }
    }

    /// Forgets a peer that is lost and that nobody has a use for.
    pub(super) fn drop_peer(&mut self, peer: u32) {
        if let Some(remote) = self.peers.remove(&peer) {
            if self.by_id.get(&remote.contact.id) == Some(&peer) {
                self.by_id.remove(&remote.contact.id);
            }
            self.unsent.take_of(peer);
        }
    }

    /// Loses all peers.
    pub(super) fn lose_all(&mut self, lost: &Lost) {
        let peers: Vec<u32> = self.peers.keys().copied().collect();
        peers.into_iter().for_each(|peer| self.lose(peer, lost.clone()));
    }

    /// Sends signs of life, and loses peers of which nothing was heard for `limit`.
    pub(super) fn beat(&mut self, limit: Duration, own_pause: bool) {
        let period = limit / 5;
        let (mut greet, mut speak) = (Vec::new(), Vec::new());
        for (&peer, remote) in &mut self.peers {
            let connected = match remote.stage {
                Stage::Greeting => false,
                Stage::Ready => true,
                Stage::Idle | Stage::Lost(_) => continue,
            };
            if own_pause {
                // This process did not run, so it could not hear anything.
                remote.heard = Instant::now();
            }
            if remote.heard.elapsed() > limit {
                let millis = limit.as_millis();
                let why = match connected {
                    true => format!("{} has been silent for {millis} ms", remote.place),
                    false => format!("{} has not answered for {millis} ms", remote.place),
                };
                self.losing.push((peer, Lost { ended: false, why }));
            } else if connected && remote.spoke.elapsed() >= period {
                speak.push(peer);
            } else if !connected && remote.greeted.elapsed() >= period {
                greet.push(peer);
            }
        }
        for peer in greet {
            self.greet(peer);
        }
        for peer in speak {
            self.say(peer, Header::new(Kind::Alive, frame::NO_TAG, 0, 0), &[]);
        }
    }
}
