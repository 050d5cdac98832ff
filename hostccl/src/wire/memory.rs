//! A wire between threads of one process, for tests of the code that uses a wire.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Broken, Contact, Lost, Notice, Peer, Request, Tag, Token, Wire};
use crate::event::{self, Event, Watch};

/// The state that all wires of one test share.
#[derive(Debug, Default)]
pub(crate) struct Net {
    /// The wires, by the number in the first eight bytes of their contacts.
    state: Mutex<State>,
    /// The word of each wire.
    moved: Vec<Event>,
    /// The number that the last request got.
    last: AtomicU64,
}

/// Who sent a message, who receives it, and its tag.
type Route = (usize, usize, Tag);

#[derive(Debug, Default)]
struct State {
    /// Messages that no receive has taken.
    sent: HashMap<Route, VecDeque<Vec<u8>>>,
    /// Receives that no message has met: number, address and room of the buffer.
    wanted: HashMap<Route, VecDeque<(u64, usize, usize)>>,
    /// The outcome of each request that has ended.
    ended: HashMap<u64, Result<usize, Broken>>,
    /// The wire and the peer of each receive that has not ended.
    open: HashMap<u64, (usize, usize)>,
    /// The notices for each wire.
    notices: HashMap<usize, Vec<Notice>>,
    /// Why a wire has lost a peer, by the pair (wire, peer).
    lost: HashMap<(usize, usize), Lost>,
    /// The pairs (wire, peer) between which no notice travels, though no loss is noticed.
    cut: HashSet<(usize, usize)>,
    /// The wires from which not everything has arrived.
    unconfirmed: HashSet<usize>,
    /// The losses that each wire has not told yet.
    news: HashMap<usize, Vec<usize>>,
}

/// The wire of one thread.
#[derive(Debug)]
pub(crate) struct Memory {
    /// The state that the wires share.
    net: Arc<Net>,
    /// This wire's number.
    me: usize,
}

/// Returns `count` wires that reach each other. Their peers' numbers are the wires' numbers.
pub(crate) fn wires(count: usize) -> Vec<Arc<Memory>> {
    let moved = (0..count).map(|_| Event::default()).collect();
    let net = Arc::new(Net { moved, ..Net::default() });
    (0..count).map(|me| Arc::new(Memory { net: net.clone(), me })).collect()
}

impl Memory {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.net.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn number(&self) -> u64 {
        self.net.last.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Makes every wire lose this one, as if its process had ended.
    pub(crate) fn die(&self) {
        let why = format!("wire {} closed the connection", self.me);
        self.be_lost((0..self.net.moved.len()).collect(), &Lost { ended: true, why });
    }

    /// Makes the wires `others` lose this one, as if its host had fallen silent.
    pub(crate) fn fall_silent(&self, others: &[usize]) {
        self.be_lost(others.into(), &Lost { ended: false, why: format!("no answer from wire {}", self.me) });
    }

    /// Lets no notice travel between this wire and `other` any more.
    pub(crate) fn cut(&self, other: usize) {
        self.lock().cut.extend([(self.me, other), (other, self.me)]);
    }

    /// Undoes [`cut`](Memory::cut).
    pub(crate) fn heal(&self, other: usize) {
        self.lock().cut.retain(|pair| *pair != (self.me, other) && *pair != (other, self.me));
    }

    /// Sets whether everything that this wire has sent has arrived.
    pub(crate) fn confirm(&self, has_arrived: bool) {
        let mut state = self.lock();
        let _ = if has_arrived { state.unconfirmed.remove(&self.me) } else { state.unconfirmed.insert(self.me) };
    }

    fn be_lost(&self, others: Vec<usize>, lost: &Lost) {
        let mut state = self.lock();
        state.wanted.retain(|(from, to, _), _| *from != self.me || !others.contains(to));
        for other in others.into_iter().filter(|other| *other != self.me) {
            state.lost.insert((other, self.me), lost.clone());
            state.news.entry(other).or_default().push(self.me);
            let open: Vec<u64> =
                state.open.iter().filter(|(_, route)| **route == (other, self.me)).map(|(number, _)| *number).collect();
            for number in open {
                state.open.remove(&number);
                state.ended.insert(number, Err(Broken::Lost(lost.clone())));
            }
        }
        drop(state);
        for moved in &self.net.moved {
            moved.change();
        }
    }
}

impl Wire for Memory {
    fn contact(&self) -> Contact {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&(self.me as u64).to_ne_bytes());
        Contact { id, address: Vec::new() }
    }

    fn meet(&self, contact: &Contact, _: &Token) -> Peer {
        Peer(u64::from_ne_bytes(contact.id[..8].try_into().unwrap()) as u32)
    }

    fn close(&self, _: Peer, _: &Token) {}

    unsafe fn isend(&self, peer: Peer, tag: Tag, from: *const u8, bytes: usize) -> Request {
        let (number, route, mut state) = (self.number(), (self.me, peer.0 as usize, tag), self.lock());
        if let Some(lost) = state.lost.get(&(self.me, route.1)).cloned() {
            state.ended.insert(number, Err(Broken::Lost(lost)));
            return Request(number);
        }
        // SAFETY: the caller's contract.
        let data = unsafe { std::slice::from_raw_parts(from, bytes) };
        match state.wanted.get_mut(&route).and_then(VecDeque::pop_front) {
            Some((receive, to, room)) => {
                let outcome = if bytes <= room { Ok(bytes) } else { Err(Broken::TooLong(bytes)) };
                if bytes <= room {
                    // SAFETY: the receiver's contract.
                    unsafe { std::ptr::copy_nonoverlapping(from, to as *mut u8, bytes) };
                }
                state.open.remove(&receive);
                state.ended.insert(receive, outcome);
            }
            None => state.sent.entry(route).or_default().push_back(data.to_vec()),
        }
        state.ended.insert(number, Ok(bytes));
        drop(state);
        self.net.moved[route.1].change();
        Request(number)
    }

    unsafe fn irecv(&self, peer: Peer, tag: Tag, to: *mut u8, bytes: usize) -> Request {
        let (number, route, mut state) = (self.number(), (peer.0 as usize, self.me, tag), self.lock());
        match state.sent.get_mut(&route).and_then(VecDeque::pop_front) {
            Some(data) if data.len() > bytes => drop(state.ended.insert(number, Err(Broken::TooLong(data.len())))),
            Some(data) => {
                // SAFETY: the caller's contract.
                unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
                state.ended.insert(number, Ok(data.len()));
            }
            None if state.lost.contains_key(&(self.me, route.0)) => {
                let lost = state.lost[&(self.me, route.0)].clone();
                state.ended.insert(number, Err(Broken::Lost(lost)));
            }
            None => {
                state.open.insert(number, (self.me, route.0));
                state.wanted.entry(route).or_default().push_back((number, to as usize, bytes));
            }
        }
        Request(number)
    }

    fn test(&self, request: &Request) -> Result<Option<usize>, Broken> {
        self.lock().ended.remove(&request.0).transpose()
    }

    fn cancel(&self, request: Request) {
        let mut state = self.lock();
        state.ended.remove(&request.0);
        state.open.remove(&request.0);
        state.wanted.values_mut().for_each(|list| list.retain(|(number, ..)| *number != request.0));
    }

    fn notify(&self, peer: Peer, comm: u64, text: &[u8]) {
        let notice = Notice { from: Peer(self.me as u32), comm, text: text.to_vec() };
        let mut state = self.lock();
        let pair = (self.me, peer.0 as usize);
        if state.cut.contains(&pair) || state.lost.contains_key(&pair) || state.lost.contains_key(&(pair.1, pair.0)) {
            return;
        }
        state.notices.entry(pair.1).or_default().push(notice);
        drop(state);
        self.net.moved[peer.0 as usize].change();
    }

    fn connected(&self, peer: Peer) -> bool {
        !self.lock().cut.contains(&(self.me, peer.0 as usize))
    }

    fn has_all_arrived(&self) -> bool {
        !self.lock().unconfirmed.contains(&self.me)
    }

    fn news(&self) -> (Vec<Notice>, Vec<(Peer, Lost)>) {
        let mut state = self.lock();
        let lost = state.news.remove(&self.me).unwrap_or_default();
        let notices = state.notices.remove(&self.me).unwrap_or_default();
        (notices, lost.into_iter().map(|peer| (Peer(peer as u32), state.lost[&(self.me, peer)].clone())).collect())
    }

    fn lost(&self, peer: Peer) -> Option<Lost> {
        self.lock().lost.get(&(self.me, peer.0 as usize)).cloned()
    }

    fn trouble(&self, peer: Peer) -> Option<String> {
        (!self.connected(peer)).then(|| format!("wire {} takes no connection", peer.0))
    }

    fn waiting(&self, peer: Peer, comm: u64) -> Vec<Tag> {
        let state = self.lock();
        let here = |(from, to, tag): &Route| (*from, *to, tag.comm) == (peer.0 as usize, self.me, comm);
        state.sent.iter().filter(|(route, list)| here(route) && !list.is_empty()).map(|(route, _)| route.2).collect()
    }

    fn progress(&self) -> bool {
        false
    }

    fn moved(&self) -> &Event {
        &self.net.moved[self.me]
    }

    fn sleep(&self, watches: &[Watch<'_>], timeout: Duration) {
        event::sleep(watches, None, timeout);
    }
}
