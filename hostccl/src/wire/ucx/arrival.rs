//! The messages that arrive: UCX calls these functions while a thread of this process makes
//! progress.

use std::ffi::c_void;
use std::time::Instant;

use super::api::{self, MessageParams, Status};
use super::frame::{Greeting, Header, Kind};
use super::remote::{Arrived, COST, Remote, Stage, WINDOW};
use super::state::{Core, Op};
use crate::wire::{EAGER_BYTES, Lost, NOTICE_BYTES};

/// How many ordered messages may come before one that was sent earlier.
const EARLY: usize = 1 << 14;
/// How many greetings of processes that this one has not met are kept.
const STRANGERS: usize = 1024;
/// How many greetings are looked at in one turn.
const GREETINGS: usize = 1024;

/// Takes a message from a wire. A message is dropped unless its sender has proven that it knows the
/// token.
///
/// # Safety
/// UCX calls it. `argument` is the wire's [`Core`], whose lock the thread that makes progress
/// holds, and to which that thread has no reference.
pub(super) unsafe extern "C" fn on_message(
    argument: *mut c_void,
    header: *const c_void,
    header_bytes: usize,
    data: *mut c_void,
    bytes: usize,
    params: *const MessageParams,
) -> Status {
    // SAFETY: the caller's contract. UCX says that the header and the parameters are there.
    let (core, raw, late) = unsafe {
        let raw = match header_bytes {
            0 => &[],
            _ => std::slice::from_raw_parts(header.cast::<u8>(), header_bytes),
        };
        (&mut *argument.cast::<Core>(), raw, (*params).attributes & api::IS_RNDV != 0)
    };
    let Some(header) = Header::parse(raw) else { return api::OK };
    let Some(&peer) = core.by_cookie.get(&header.cookie) else { return api::OK };
    let Some(remote) = core.peers.get_mut(&peer) else { return api::OK };
    remote.heard = Instant::now();
    remote.used = remote.used.saturating_sub(header.credit as usize);
    if header.kind == Kind::Piece {
        return core.piece(peer, header, data, bytes, late);
    }
    if late || bytes > EAGER_BYTES {
        core.garbage(peer, &format!("{bytes} bytes in a message of kind {}", header.kind as u8));
        return api::OK;
    }
    // SAFETY: UCX says that the data are there. With 0 bytes the pointer may be anything.
    let data = if bytes == 0 { &[] } else { unsafe { std::slice::from_raw_parts(data.cast::<u8>(), bytes) } };
    if !header.kind.is_ordered() {
        core.take(peer, header, data);
    } else if header.index != remote.next_in {
        keep_early(core, peer, header, data);
    } else {
        core.take_ordered(peer, header, data);
    }
    api::OK
}

/// Keeps an ordered message that came before its time. UCX may hand over a message too early where
/// it sends long messages in parts and over several devices.
fn keep_early(core: &mut Core, peer: u32, header: Header, data: &[u8]) {
    let Some(remote) = core.peers.get_mut(&peer) else { return };
    let bytes: usize = remote.early.values().map(|(_, data)| data.len()).sum();
    let is_garbage = header.index < remote.next_in || remote.early.len() >= EARLY || bytes + data.len() > 2 * WINDOW;
    if is_garbage || remote.early.insert(header.index, (header, data.to_vec())).is_some() {
        core.garbage(peer, &format!("message {} out of its order", header.index));
    }
}

impl Core {
    /// Loses a peer that has sent something wrong.
    fn garbage(&mut self, peer: u32, what: &str) {
        if let Some(remote) = self.peers.get(&peer) {
            let why = format!("{} sent garbage: {what}", remote.place);
            self.losing.push((peer, Lost { ended: false, why }));
        }
    }

    /// Takes an ordered message whose turn it is, and those after it that have come already.
    fn take_ordered(&mut self, peer: u32, header: Header, data: &[u8]) {
        let next = |remote: &mut Remote| {
            remote.next_in += 1;
            remote.early.remove(&remote.next_in)
        };
        let mut waiting = self.peers.get_mut(&peer).and_then(next);
        self.take(peer, header, data);
        while let Some((header, data)) = waiting {
            waiting = self.peers.get_mut(&peer).and_then(next);
            self.take(peer, header, &data);
        }
    }

    fn take(&mut self, peer: u32, header: Header, data: &[u8]) {
        let Some(remote) = self.peers.get_mut(&peer) else { return };
        match header.kind {
            Kind::Eager => {
                remote.held += data.len() + COST;
                if remote.held > WINDOW {
                    return self.garbage(peer, "more short messages than it may send");
                }
                match self.next_wanted(peer, header.tag) {
                    Some(request) => self.deliver(request, data),
                    None => self.keep(peer, header.tag, Arrived::Eager(data.to_vec())),
                }
            }
            Kind::Announce if header.extra > isize::MAX as u64 => self.garbage(peer, "a message of impossible length"),
            Kind::Announce => self.announced(peer, header.tag, header.number, header.extra as usize),
            Kind::Withdraw => self.withdrawn(peer, header.tag, header.number),
            Kind::Notice if data.len() > NOTICE_BYTES => self.garbage(peer, "a notice that is too long"),
            Kind::Notice => self.noticed(peer, header.tag.comm, data),
            Kind::Want => self.answered(peer, header.number, Some(header.extra)),
            Kind::Refuse => self.answered(peer, header.number, None),
            Kind::Alive => self.agreed(peer, header.number),
            Kind::Piece => {}
        }
    }

    /// Takes a piece of a long message. A piece that no receive wants any more is dropped, which
    /// ends it at the sender.
    fn piece(&mut self, peer: u32, header: Header, data: *mut c_void, bytes: usize, late: bool) -> Status {
        let request = header.number;
        let Some(Op::Receive(receive)) = self.requests.get_mut(&request) else { return api::OK };
        let Some((_, length)) = receive.met.filter(|met| receive.peer == peer && met.0 == header.tag.comm) else {
            return api::OK;
        };
        if receive.failing.is_some() {
            return api::OK;
        }
        let end = usize::try_from(header.extra).ok().and_then(|from| from.checked_add(bytes));
        if end.is_none_or(|end| end > length) || receive.got + bytes > length {
            self.garbage(peer, &format!("{bytes} bytes beyond the end of a message of {length}"));
            return api::OK;
        }
        // SAFETY: the contract of `irecv`: the buffer has at least `length` bytes.
        let to = unsafe { receive.to.add(header.extra as usize) };
        if !late {
            // SAFETY: as above, and UCX says that the data are there.
            unsafe { std::ptr::copy_nonoverlapping(data.cast::<u8>(), to, bytes) };
            self.piece_there(request, bytes);
            return api::OK;
        }
        receive.in_flight += 1;
        // SAFETY: the descriptor is that of the message that UCX hands over now. The buffer is
        // valid until the operation is over, because a request ends or is cancelled only then.
        let landing = unsafe { self.worker.land(request, data, to, bytes) };
        let status = match landing {
            Ok(true) => return IN_PROGRESS,
            Ok(false) => api::OK,
            Err(status) => status,
        };
        self.piece_landed(request, bytes, status);
        IN_PROGRESS
    }
}

/// `UCS_INPROGRESS`: the handler has taken the message's descriptor.
const IN_PROGRESS: Status = 1;

/// Takes a greeting. A greeting that needs a new endpoint is handled later, because no endpoint is
/// made while UCX runs the handler.
///
/// # Safety
/// The caller keeps the promises of [`on_message`].
pub(super) unsafe extern "C" fn on_greeting(
    argument: *mut c_void,
    header: *const c_void,
    header_bytes: usize,
    _: *mut c_void,
    _: usize,
    params: *const MessageParams,
) -> Status {
    if header_bytes == 0 {
        return api::OK;
    }
    // SAFETY: the caller's contract. UCX says that the header and the parameters are there.
    let (core, raw, params) = unsafe {
        let raw = std::slice::from_raw_parts(header.cast::<u8>(), header_bytes);
        (&mut *argument.cast::<Core>(), raw, &*params)
    };
    let Some(greeting) = Greeting::parse(raw).filter(|greeting| greeting.to == core.contact.id) else { return api::OK };
    let stage = core.by_id.get(&greeting.from).and_then(|peer| core.peers.get(peer)).map(|remote| &remote.stage);
    // A process that is lost here may greet for a new use, for which this process has not met it
    // again. The greeting is kept, and gets no answer: if this process does not meet the other one,
    // this process is lost there, too.
    let is_lost = matches!(stage, Some(Stage::Lost(_)));
    if let Some(stage) = stage.filter(|_| !is_lost) {
        let is_idle = *stage == Stage::Idle;
        if !is_idle {
            // Messages of the peer may follow before this function would run again, and are dropped
            // until the peer has proven itself. So the greeting is handled now.
            core.greeted(&greeting);
        } else if core.greetings.len() < GREETINGS {
            core.greetings.push_back(greeting);
        }
        return api::OK;
    }
    core.strangers.retain(|stranger| stranger.from != greeting.from);
    if core.strangers.len() >= STRANGERS {
        core.strangers.pop_front();
    }
    core.strangers.push_back(greeting);
    if !is_lost && params.attributes & api::HAS_REPLY != 0 && greeting.answers == [0; 16] {
        // This process has not met the other one yet. The answer says that it lives.
        let wait = Greeting { from: greeting.to, to: greeting.from, answers: greeting.nonce, ..NOTHING };
        let _ = core.worker.greet_back(params.reply, wait);
    }
    api::OK
}

/// A greeting without content.
const NOTHING: Greeting = Greeting { from: [0; 16], to: [0; 16], nonce: [0; 16], answers: [0; 16], proof: [0; 32] };
