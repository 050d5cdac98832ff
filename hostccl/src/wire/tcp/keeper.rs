//! The wire's thread. It makes connections and accepts them. Ten times a second it moves messages
//! that came while no thread waited for them.

mod attempts;
mod door;

use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use socket2::{SockAddr, Socket};

use self::attempts::{Attempts, PAUSE};
use self::door::Door;
use super::cipher::Cipher;
use super::connection::Connection;
use super::epoll::{self, Epoll};
use super::options::Options;
use super::state::{Inner, State};
use super::stranger::{self, NAMED_A_TOKEN, Step, Stranger};
use crate::fork::{self, Private};
use crate::thread;
use crate::wire::{Lost, address};

/// The time from one look at the connections to the next.
const TICK: Duration = Duration::from_millis(100);
/// The longest time between two looks that counts in full for the tries to connect. If more time
/// has passed, this process or its whole machine did not run.
const LONGEST_TICK: Duration = Duration::from_secs(1);
/// The number of `Alive` frames in the time after which a silent host is lost.
const BEATS: u32 = 8;
/// How long the wire keeps sending its bytes after its last owner has gone.
const LINGER: Duration = Duration::from_secs(2);

/// The most connections that other processes have made and that have not proved themselves.
const MOST_STRANGERS: usize = 128;
/// The most connections that the thread accepts before it looks again at those that it has. So a
/// connection is looked at several times before newer ones take its place.
const MOST_AT_ONCE: usize = MOST_STRANGERS / 4;
/// How long a connection may hold the spare descriptor of a process that can open no more files.
/// The process that connects says at once who it is, and gets its answer at once.
const FULL_PATIENCE: Duration = Duration::from_secs(1);

/// The number of the listener in the thread's epoll set.
const LISTENER: u64 = u64::MAX;
/// The number of the bell in the thread's epoll set.
const BELL: u64 = u64::MAX - 1;

/// The state that the thread owns.
struct Keeper {
    /// The wire.
    inner: Arc<Inner>,
    /// The listener.
    door: Door,
    /// The listener, the bell, and the strangers by their numbers.
    set: Epoll,
    /// The connections that have not proved themselves.
    strangers: HashMap<u64, Stranger>,
    /// The number of the last stranger.
    last: u64,
    /// The peers to connect to.
    attempts: Attempts,
    /// The function that is called at each tick.
    tick: fn(),
}

/// Starts the thread.
pub(super) fn start(inner: Arc<Inner>, listener: Private<Socket>, tick: fn()) -> io::Result<()> {
    let set = Epoll::new()?;
    let door = Door::new(listener, &set, LISTENER)?;
    set.add(inner.keeper.as_raw_fd(), BELL, false)?;
    let (strangers, attempts) = (HashMap::new(), Attempts::default());
    let keeper = Keeper { inner, door, set, strangers, last: 0, attempts, tick };
    thread::spawn("dm-wire", move || keeper.run()).map(drop)
}

impl Keeper {
    fn run(mut self) {
        let (mut next_tick, mut listened) = (Instant::now() + TICK, Instant::now());
        let beat = (self.inner.options.silence / BEATS).max(TICK);
        let mut next_beat = Instant::now() + beat;
        while !self.inner.is_over.load(Ordering::SeqCst) {
            let is_relied_on = self.is_relied_on();
            let wake = self.attempts.next().chain(self.door.shut_until).fold(next_tick, Instant::min);
            let timeout = wake.saturating_duration_since(Instant::now());
            let all = [self.set.as_raw_fd(), self.inner.connections.as_raw_fd()];
            epoll::wait_for(if is_relied_on { &all } else { &all[..1] }, timeout);
            let ready: Vec<u64> = self.set.wait(Duration::ZERO).map(|ready| ready.number).collect();
            for number in ready.iter().copied().filter(|number| *number != LISTENER) {
                match number {
                    BELL => self.inner.keeper.still(),
                    number => self.step(number),
                }
            }
            // New connections come last, because they may take the place of older ones.
            if ready.contains(&LISTENER) {
                self.accept();
                self.inner.lock().shut = self.door.trouble.clone().map(|why| (why, Instant::now()));
            }
            self.look();
            self.door.open_again(&self.set);
            let is_tick = Instant::now() >= next_tick;
            if is_relied_on && !self.inner.asleep.is() {
                // The bell in `connections` rang for a sleeping thread that is awake by now. The
                // thread that rang it had read the flag before it wrote the descriptor, which this
                // thread has read, so no fence is needed here.
                self.inner.sleeper.still();
                // A thread that began to sleep after the check above may have lost its wake-up.
                if self.inner.asleep.is() {
                    self.inner.sleeper.ring();
                }
            }
            if is_relied_on || is_tick {
                self.inner.lock().pass(&self.inner);
            }
            if is_tick {
                let now = Instant::now();
                next_tick = now + TICK;
                let since = now.duration_since(std::mem::replace(&mut listened, now));
                self.inner.lock().look_for_silence(since, self.inner.options.silence);
                self.excuse(since.saturating_sub(LONGEST_TICK), now);
                self.expire(now);
                if now >= next_beat {
                    next_beat = Instant::now() + beat;
                    self.inner.lock().beat(&self.inner);
                }
                (self.tick)();
            }
        }
        self.end();
    }

    /// Accepts connections that wait at the listener, and reads what they have said.
    fn accept(&mut self) {
        for _ in 0..MOST_AT_ONCE {
            let Some((socket, from, is_full)) = self.door.accept(&self.set) else { return };
            if socket.set_nonblocking(true).is_err() || self.inner.options.prepare(&socket).is_err() {
                continue;
            }
            if !self.make_room() {
                continue;
            }
            let address = from.as_socket().map_or_else(|| "a stranger".to_owned(), |address| address.to_string());
            match self.enter(Stranger::accepted(socket, address.clone(), is_full)) {
                Ok(number) => self.step(number),
                Err(reason) => log::debug!("the wire drops a connection from {address}: {reason}"),
            }
            // The next connection would get the descriptor of this one before the spare is there
            // again.
            if is_full {
                return;
            }
        }
    }

    /// Closes the oldest accepted connection among those that have said the least, where there are
    /// too many connections. Returns false where there is no room, because all accepted
    /// connections have named a token that this process knows, and are about to prove it.
    fn make_room(&mut self) -> bool {
        let accepted = || self.strangers.iter().filter(|(_, stranger)| !stranger.is_mine());
        if accepted().count() < MOST_STRANGERS {
            return true;
        }
        let unknown = accepted().filter(|(_, stranger)| stranger.said() < NAMED_A_TOKEN);
        let oldest = unknown.min_by_key(|(_, stranger)| (stranger.said(), stranger.since)).map(|(number, _)| *number);
        oldest.is_some_and(|number| self.remove(number).is_some())
    }

    /// Whether threads that sleep rely on this one to move their messages.
    fn is_relied_on(&self) -> bool {
        // A thread that is about to sleep first counts itself in `others`, and then reads
        // `keeper_looks`. If `keeper_looks` is false, the thread rings this thread's bell.
        self.inner.keeper_looks.store(false, Ordering::SeqCst);
        let is = self.inner.others.load(Ordering::SeqCst) > 0;
        if is {
            self.inner.keeper_looks.store(true, Ordering::SeqCst);
        }
        is
    }

    /// Adds a connection that has not proved itself, and returns its number. Fails where the kernel
    /// cannot watch the connection.
    fn enter(&mut self, stranger: Stranger) -> io::Result<u64> {
        self.last += 1;
        self.set.add(stranger.socket.as_raw_fd(), self.last, stranger.is_mine())?;
        self.strangers.insert(self.last, stranger);
        Ok(self.last)
    }

    fn remove(&mut self, number: u64) -> Option<Stranger> {
        let stranger = self.strangers.remove(&number)?;
        self.set.remove(stranger.socket.as_raw_fd());
        Some(stranger)
    }

    /// Begins the connections that the wire has asked for, and checks again the processes that were
    /// not known.
    fn look(&mut self) {
        let wanted = std::mem::take(&mut self.inner.lock().to_connect);
        let now = Instant::now();
        wanted.into_iter().for_each(|peer| self.attempts.begin(peer, now));
        for peer in self.attempts.due(now) {
            self.connect(peer);
        }
        let unknown: Vec<u64> =
            self.strangers.iter().filter(|(_, stranger)| stranger.is_unknown()).map(|(number, _)| *number).collect();
        for number in unknown {
            let Some(mut stranger) = self.strangers.remove(&number) else { continue };
            let step = stranger.answer(&self.inner, |peer| self.is_taken(peer));
            self.strangers.insert(number, stranger);
            self.act_on(number, step);
        }
    }

    /// Whether this process has proved itself to that peer.
    fn is_taken(&self, peer: u32) -> bool {
        let mine = self.attempts.get(peer).and_then(|attempt| attempt.stranger);
        mine.and_then(|number| self.strangers.get(&number)).is_some_and(Stranger::is_proved)
    }

    /// Whether a peer has connected and been answered, so that this process makes no connection of
    /// its own. Two processes may connect to each other at once, and then the connection of the one
    /// with the smaller id stays. If both went on, each process could take a different one of the
    /// two connections and close the other.
    fn leaves_to(&self, peer: u32) -> bool {
        self.answered(peer).any(|id| id < self.inner.contact.id)
    }

    /// Returns the id of the peer for each of its connections that this process has answered, and
    /// on which the proof is still to come.
    fn answered(&self, peer: u32) -> impl Iterator<Item = [u8; 16]> {
        let of_peer = self.strangers.values().filter(move |stranger| stranger.peer == Some(peer));
        of_peer.filter_map(Stranger::answered)
    }

    /// Ends the tries to reach a peer, and closes the connection of the present one.
    fn give_up(&mut self, peer: u32) {
        if let Some(mine) = self.attempts.remove(peer).and_then(|attempt| attempt.stranger) {
            self.remove(mine);
        }
    }

    /// Ends the tries to reach a peer. The peer is lost, unless it has a connection meanwhile.
    fn fail(&mut self, peer: u32, ended: bool, why: String) {
        self.give_up(peer);
        let mut state = self.inner.lock();
        if state.links.get(&peer).is_some_and(|link| link.connection.is_none()) {
            state.lose(peer, Lost { ended, why });
        }
    }

    /// Begins a try to connect to a peer.
    fn connect(&mut self, peer: u32) {
        let tried = self.attempts.get(peer).map_or(0, |attempt| attempt.tokens);
        let known = {
            let state = self.inner.lock();
            let link = state.links.get(&peer).filter(|link| link.connection.is_none() && link.remote.lost.is_none());
            link.map(|link| (link.remote.contact.clone(), link.remote.token(tried)))
        };
        let Some((contact, token)) = known else {
            self.attempts.remove(peer);
            return;
        };
        if self.leaves_to(peer) {
            if let Some(attempt) = self.attempts.get_mut(peer) {
                attempt.next = Instant::now() + PAUSE;
            }
            return;
        }
        let Some(address) = self.inner.options.address(&contact.address) else {
            let why =
                "the other process does not use the wire over TCP: set DM_WIRE to one value on all hosts".to_owned();
            return self.fail(peer, false, why);
        };
        let begin = || {
            let socket = Private::open(|| Options::socket(&address))?;
            self.inner.options.prepare(&socket)?;
            match socket.connect(&SockAddr::from(address)) {
                Err(reason) if reason.raw_os_error() != Some(libc::EINPROGRESS) => Err(reason),
                _ => Ok(socket),
            }
        };
        let address = address::in_words(&contact.address, &address.to_string());
        let begun = begin().map_err(|reason| stranger::refused(&address, &reason)).and_then(|socket| {
            Stranger::connecting(&self.inner, socket, address.clone(), (peer, contact.id, token))
                .map_err(|why| Step::Fail(false, why))
        });
        let entered = begun.and_then(|stranger| {
            let unwatched = |reason| Step::Short(format!("watching the connection to {address}: {reason}"));
            self.enter(stranger).map_err(unwatched)
        });
        match entered {
            Ok(number) => {
                if let Some(attempt) = self.attempts.get_mut(peer) {
                    (attempt.stranger, attempt.next) = (Some(number), Instant::now() + PAUSE);
                }
            }
            Err(step) => self.end_try(peer, step),
        }
    }

    /// Ends a try to connect to a peer. The peer is tried again until the time is up, unless the
    /// reason says that no later try can succeed.
    fn end_try(&mut self, peer: u32, step: Step) {
        match step {
            Step::Again(why) => self.try_again(peer, why, false),
            Step::Short(why) => self.try_again(peer, why, true),
            Step::NoWay(why) => {
                let silence = self.inner.options.silence;
                match self.attempts.get(peer).is_some_and(|attempt| attempt.since.elapsed() >= silence) {
                    true => self.fail(peer, false, format!("{why}: no connection within {} ms", silence.as_millis())),
                    false => self.try_again(peer, why, true),
                }
            }
            Step::Fail(ended, why) => self.fail(peer, ended, why),
            Step::Wait | Step::Sent | Step::Answered | Step::Proved(_) | Step::Drop(_) => {}
        }
    }

    /// Ends a try after which the next one follows. With `is_trouble`, errors name the reason when
    /// the time of a call is up.
    fn try_again(&mut self, peer: u32, why: String, is_trouble: bool) {
        let mut known = 0;
        if let Some(link) = self.inner.lock().links.get_mut(&peer) {
            link.trouble = is_trouble.then(|| why.clone());
            known = link.remote.tokens.len();
        }
        if let Some(attempt) = self.attempts.get_mut(peer) {
            attempt.fail(known, why);
        }
    }

    /// Takes the next step of a stranger.
    fn step(&mut self, number: u64) {
        let Some(mut stranger) = self.strangers.remove(&number) else { return };
        let step = stranger.step(&self.inner, |peer| self.is_taken(peer));
        self.strangers.insert(number, stranger);
        self.act_on(number, step);
    }

    /// Acts on the outcome of a step.
    fn act_on(&mut self, number: u64, step: Step) {
        let Some(stranger) = self.strangers.get(&number) else { return };
        match step {
            Step::Wait => {}
            Step::Sent => self.set.change(stranger.socket.as_raw_fd(), number, false),
            Step::Answered => {
                let Some(peer) = stranger.peer.filter(|peer| self.leaves_to(*peer)) else { return };
                if let Some(mine) = self.attempts.get_mut(peer).and_then(|attempt| attempt.stranger.take()) {
                    self.remove(mine);
                }
            }
            Step::Proved(cipher) => self.make_connection(number, cipher),
            Step::Drop(why) => {
                let Some(stranger) = self.remove(number) else { return };
                log::debug!("the wire refuses {}: {why}", stranger.address);
            }
            Step::Again(_) | Step::Short(_) | Step::NoWay(_) | Step::Fail(..) => {
                if let Some(peer) = self.remove(number).and_then(|stranger| stranger.peer) {
                    self.end_try(peer, step);
                }
            }
        }
    }

    /// Makes a stranger the connection of its peer.
    fn make_connection(&mut self, number: u64, cipher: Option<Box<Cipher>>) {
        let Some(stranger) = self.remove(number) else { return };
        let is_mine = stranger.is_mine();
        let Stranger { socket, mut address, peer: Some(peer), .. } = stranger else { return };
        self.give_up(peer);
        let inner = self.inner.clone();
        let mut guard = inner.lock();
        let state: &mut State = &mut guard;
        let Some(link) = state.links.get_mut(&peer) else { return };
        if link.connection.is_some() || link.remote.lost.is_some() {
            return;
        }
        if !is_mine {
            address = address::in_words(&link.remote.contact.address, &address);
        }
        if let Err(reason) = inner.connections.add(socket.as_raw_fd(), u64::from(peer), false) {
            let why = format!("using the connection to {address}: {reason}");
            return state.lose(peer, Lost { ended: false, why });
        }
        inner.options.adapt_to_distance(&socket);
        link.connection = Some(Box::new(Connection::new(socket, address, cipher)));
        link.is_connecting = false;
        // If this connection ends too, the reason why earlier tries failed does not explain that
        // end.
        link.trouble = None;
        if link.remote.uses == 0 && !link.remote.is_idle_here {
            link.remote.say_idle();
        }
        state.connected.push(peer);
        state.push(&inner, peer);
    }

    /// This process did not run for `pause`. So this function moves the start of every try and of
    /// every unproved connection later by that time. The bytes that came meanwhile are not read
    /// yet.
    fn excuse(&mut self, pause: Duration, now: Instant) {
        self.attempts.excuse(pause, now);
        self.strangers.values_mut().for_each(|stranger| stranger.since = (stranger.since + pause).min(now));
    }

    /// Closes the connections that have not proved themselves in time, and gives up the peers that
    /// were not reached in time. `now` is the time of the tick. If this process has paused since
    /// then, the next tick excuses that pause.
    fn expire(&mut self, now: Instant) {
        let longest = self.inner.options.patience;
        let patience = |stranger: &Stranger| if stranger.is_full() { FULL_PATIENCE } else { longest };
        let old = |stranger: &Stranger| !stranger.is_mine() && now.duration_since(stranger.since) > patience(stranger);
        let numbers: Vec<u64> =
            self.strangers.iter().filter(|(_, stranger)| old(stranger)).map(|(number, _)| *number).collect();
        for number in numbers {
            self.remove(number);
        }
        let silence = self.inner.options.silence;
        let silent = |stranger: &Stranger| stranger.is_connecting() && now.duration_since(stranger.since) > silence;
        let numbers: Vec<u64> =
            self.strangers.iter().filter(|(_, stranger)| silent(stranger)).map(|(number, _)| *number).collect();
        for number in numbers {
            let Some(stranger) = self.remove(number) else { continue };
            let why = format!("{} does not answer: no connection within {} ms", stranger.address, silence.as_millis());
            stranger.peer.into_iter().for_each(|peer| self.fail(peer, false, why.clone()));
        }
        let tries = self.inner.options.tries;
        let patience = tries / 2;
        self.excuse_stopped(now, patience);
        for peer in self.attempts.late(now, tries) {
            // The peer may be stopped. `excuse_stopped` may still restart the time of a try that
            // has waited for its answer for less than `patience`.
            let stranger = self.attempts.get(peer).and_then(|attempt| self.strangers.get(&attempt.stranger?));
            if stranger.is_some_and(|it| it.waits_for_answer() && now.duration_since(it.since) <= patience) {
                continue;
            }
            // The peer is about to prove itself on a connection that it has made.
            if self.answered(peer).next().is_some() {
                continue;
            }
            let Some(attempt) = self.attempts.remove(peer) else { continue };
            let stranger = attempt.stranger.and_then(|number| self.remove(number));
            let why = stranger.map_or(attempt.why, |stranger| format!("{} does not answer", stranger.address));
            self.fail(peer, false, format!("{why}: no connection within {} s", tries.as_secs()));
        }
    }

    /// Restarts the time of the tries to reach a stopped process. The host of such a process has
    /// taken a connection, and the process has not answered on it for `patience`. Peers without
    /// uses do not count. A running process answers, or closes the connection, sooner. The
    /// deadlines of the calls decide how long to wait for a stopped process. If its host falls
    /// silent, this kernel ends the connection. If the process ends, the other host's kernel ends
    /// the connection.
    fn excuse_stopped(&mut self, now: Instant, patience: Duration) {
        let is_unanswered =
            |stranger: &&Stranger| stranger.waits_for_answer() && now.duration_since(stranger.since) > patience;
        for peer in self.strangers.values().filter(is_unanswered).filter_map(|stranger| stranger.peer) {
            let is_used = self.inner.lock().links.get(&peer).is_some_and(|link| link.remote.uses > 0);
            if let Some(attempt) = self.attempts.get_mut(peer).filter(|_| is_used) {
                attempt.since = now;
            }
        }
    }

    /// Ends the wire: what was written is sent, and the connections are closed.
    fn end(self) {
        let Keeper { inner, door, strangers, set, .. } = self;
        drop((door, strangers, set));
        let until = Instant::now() + LINGER;
        while !fork::is_child() {
            let mut guard = inner.lock();
            let state: &mut State = &mut guard;
            for number in state.connected.clone() {
                state.serve(&inner, u64::from(number));
                let link = state.links.get(&number);
                if link.is_none_or(|link| link.is_flushed(true).unwrap_or(true)) {
                    state.forget(number);
                }
            }
            if state.connected.is_empty() || Instant::now() >= until {
                state.connected.clear();
                state.links.clear();
                return;
            }
            drop(guard);
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
