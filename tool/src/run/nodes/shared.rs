//! The state that the tool's main thread shares with the thread that waits in the store.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use devicemesh::error::{Error, Status};
use devicemesh::rendezvous::store::Server;
use devicemesh::wait::{Cancel, Wait};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::board::Board;
use super::card::Card;
use super::keys::{self, AT_ONCE, OVER, SUCCESS};
use super::peer::read_cause;
use super::place::Place;
use super::posts::{Post, posts};
use crate::run::assignment::Assignment;
use crate::run::cause::Cause;

/// How long one question to the store may take when the job ends.
pub const TELL: Duration = Duration::from_secs(3);

/// The errors by which the kernel of the store's host says that the server has ended. `None` is the
/// end of the connection.
const CLOSED: [Option<Errno>; 4] = [None, Some(Errno::CONNRESET), Some(Errno::PIPE), Some(Errno::CONNREFUSED)];

/// News that the waiting thread finds out while the main thread watches the ranks.
pub enum News {
    /// A line for the user.
    Note(String),
    /// A node is lost, as the text says, and the job goes on. The number is not known where the
    /// store does not say which node it was.
    Missed { node: Option<u32>, arrival: u32, text: String },
    /// All nodes have arrived.
    Joined(Assignment),
    /// The job is over on every node for this cause.
    Over(Cause),
    /// A node wants all ranks to be killed.
    AtOnce,
    /// This node serves the store, and no other node needs it any more.
    StoreUnused,
}

/// The state of this node among the others.
pub struct Shared {
    /// The number of nodes in the job.
    pub nodes: u32,
    /// Whether a node that joins takes the place of one that is lost, so that a loss does not end
    /// the job.
    pub heals: bool,
    /// Raised to end the waiting thread.
    cancel: Cancel,
    /// An eventfd that is readable when there is news.
    bell: OwnedFd,
    /// Takes the news to the main thread.
    sender: Sender<News>,
    /// The store, once it is reached.
    pub reached: OnceLock<Reached>,
    /// This node's arrival number, once it is one of the job's nodes: 1 for the node that came
    /// first. A node that the job refuses has reached the store, too. It must not end that job.
    pub arrival: OnceLock<u32>,
    /// The cause for which this node has ended its job before it was one of the job's nodes.
    early: Mutex<Option<Cause>>,
    /// The arrival number of the node whose place this node has taken, where it has.
    pub post: OnceLock<u32>,
    /// The card that this node shows to other processes of its user, once it is one of the job's
    /// nodes, and the memory in which the card stands.
    pub card: OnceLock<(Card, Option<OwnedFd>)>,
    /// The name and the number of the node that serves the store, once they are known. Never set
    /// where a service has the store.
    pub serving: OnceLock<(String, u32)>,
}

/// The job's store.
pub struct Reached {
    pub store: Board,
    /// Where the store is, for messages.
    pub place: Place,
    /// Its server, where this node serves it.
    pub server: Option<Server>,
    /// Whether this node has begun the job: it serves the store, or it was the first one in the
    /// store of a service.
    pub begins: bool,
}

impl Shared {
    pub fn new(nodes: u32, heals: bool, sender: Sender<News>) -> io::Result<Shared> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Shared {
            nodes,
            heals,
            cancel: Cancel::new(),
            bell,
            sender,
            reached: OnceLock::new(),
            arrival: OnceLock::new(),
            early: Mutex::new(None),
            post: OnceLock::new(),
            card: OnceLock::new(),
            serving: OnceLock::new(),
        })
    }

    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Makes the bell silent until there is more news.
    pub fn clear_bell(&self) {
        // The read fails if the bell has not rung. That is no error.
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
    }

    /// Gives news to the main thread and rings the bell.
    pub fn tell(&self, news: News) {
        let _ = self.sender.send(news);
        // The write fails where the counter is full, and then the bell is readable already.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// Ends the waits of the waiting thread.
    pub fn cancel(&self) {
        self.cancel.raise();
    }

    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_raised()
    }

    /// A wait that ends by that time, or when the tool has no more use for it.
    pub fn wait(&self, timeout: Duration) -> Wait {
        Wait { cancel: self.cancel.clone(), ..Wait::after(timeout) }
    }

    pub fn serves(&self) -> bool {
        self.reached.get().is_some_and(|reached| reached.server.is_some())
    }

    /// The job's store, where this node is one of the job's.
    pub fn admitted(&self) -> Option<&Reached> {
        self.arrival.get().and(self.reached.get())
    }

    /// Writes the cause for which the job ends, unless another node has written one. Returns the
    /// cause in the store. Where this node is not one of the job's yet, the cause is kept for the
    /// moment at which it becomes one ([`Shared::admit`]).
    pub fn end(&self, cause: Cause) -> Cause {
        self.try_end(&cause, TELL).unwrap_or(cause)
    }

    /// Does what [`end`](Shared::end) does. Returns `None` where the store does not answer within
    /// `limit`.
    fn try_end(&self, cause: &Cause, limit: Duration) -> Option<Cause> {
        let mut early = self.early.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(reached) = self.admitted() else {
            *early = Some(cause.clone());
            return Some(cause.clone());
        };
        drop(early);
        let text = serde_json::to_vec(cause).ok()?;
        reached.store.set_once(OVER, &text, &Wait::after(limit)).ok().map(|text| read_cause(&text))
    }

    /// Makes this node one of the job's. Fails with the cause for which the job has ended before.
    pub fn admit(&self, arrival: u32) -> Result<(), Cause> {
        let mut early = self.early.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.arrival.set(arrival);
        let cause = early.take();
        drop(early);
        cause.map_or(Ok(()), |cause| Err(self.end(cause)))
    }

    /// Shows `devicemesh why` on this host where the job's store is.
    pub fn show_card(&self, assignment: &Assignment) {
        let Some(arrival) = self.arrival.get() else { return };
        let Assignment { host, port, job, nodes, id, .. } = assignment;
        let (host, name) = (host.clone(), id.clone());
        let card = Card { host, port: *port, job: *job, nodes: *nodes, arrival: *arrival, name };
        // Without the memory, `devicemesh why` on this host asks no other host.
        let memory = card.show().ok();
        let _ = self.card.set((card, memory));
    }

    /// Tells the other nodes to kill their ranks.
    pub fn end_at_once(&self) {
        let Some(reached) = self.admitted() else { return };
        // If this write fails, the other nodes end their ranks at the end of their grace periods.
        let _ = reached.store.set(AT_ONCE, b"1", &Wait::after(TELL));
    }

    /// Notes that a rank of this node has ended well.
    pub fn tell_success(&self) {
        let Some(reached) = self.admitted() else { return };
        // If this write fails, ranks of other nodes are started again in vain.
        let _ = reached.store.set(SUCCESS, b"1", &Wait::after(TELL));
    }

    /// Whether a rank of the job has ended well.
    pub fn has_success(&self) -> bool {
        let found = self.admitted().map(|reached| reached.store.try_get(SUCCESS, &Wait::after(TELL)));
        matches!(found, Some(Ok(Some(_))))
    }

    /// Notes that the ranks of this node have ended well. Each question to the store takes `limit`
    /// at most. Returns whether the store has answered. Where it has not, the caller calls this
    /// again, because perhaps no other node notices that all have finished.
    pub fn finished(&self, limit: Duration) -> bool {
        let post = self.post.get().or(self.arrival.get());
        let (Some(reached), Some(post)) = (self.reached.get(), post) else { return true };
        let told = reached.store.set(&keys::finished(*post), b"1", &Wait::after(limit));
        told.is_ok() && self.end_if_all_have_finished(limit)
    }

    /// Ends the job with success when every node has finished. The last node to finish does this.
    /// If that node exits too early, a node that notices its exit does. Each question to the store
    /// takes `limit` at most. Returns whether the store has answered.
    pub fn end_if_all_have_finished(&self, limit: Duration) -> bool {
        let Some(Reached { store, .. }) = self.reached.get() else { return true };
        let keys: Vec<String> = (1..=self.nodes).map(keys::finished).collect();
        let Ok(finished) = store.present(&keys, &Wait::after(limit)) else { return false };
        let mut is_over = finished.iter().all(|finished| *finished);
        // A node that is lost and does not come back does not keep the others.
        if !is_over && self.heals && finished.contains(&true) {
            let Ok((posts, _)) = posts(store, self.nodes, limit) else { return false };
            is_over = posts.iter().all(|post: &Post| post.is_finished || post.is_gone);
        }
        !is_over || self.try_end(&Cause::Done, limit).is_some()
    }

    /// The cause for a store that does not answer any more.
    pub fn store_lost(&self, error: &Error) -> Cause {
        let serving = self.serving.get();
        let who = serving.map_or("the node that serves the store", |(name, _)| name.as_str());
        let at = self.reached.get().map_or("", |reached| reached.place.at.as_str());
        let timed_out = error.status() == Status::Timeout || error.os_error() == Errno::TIMEDOUT.raw_os_error();
        let what = if timed_out { "is out of reach" } else { "has gone" };
        let is_closed = CLOSED.iter().any(|closed| error.os_error() == closed.map_or(0, Errno::raw_os_error));
        let is_service = self.reached.get().is_some_and(|reached| reached.store.job().is_some());
        let (program, end) = if is_service { ("store", "has ended") } else { ("run", "was killed") };
        let why = match timed_out {
            true => "its host or the network is down".to_owned(),
            false if is_closed => format!("its devicemesh {program} {end}"),
            false => format!("its devicemesh {program} {end}, or its host or the network is down"),
        };
        if is_service {
            return Cause::Lost { message: format!("the store at {at} {what}: {why}"), number: None };
        }
        let message = format!("{who} {what}, and with it the store at {at}: {why}");
        Cause::Lost { message, number: serving.map(|(_, number)| *number) }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use devicemesh::rendezvous::store::TcpStore;

    use super::*;

    /// A node of two whose store is at this port. It serves the store where it has the server.
    fn node(port: u16, server: Option<Server>) -> Shared {
        let store = Board::new(TcpStore::connect("127.0.0.1", port, &Wait::after(TELL)).unwrap(), None);
        let place = Place { at: String::new(), remark: String::new() };
        let node = Shared::new(2, false, channel().0).unwrap();
        let _ = node.reached.set(Reached { store, place, server, begins: true });
        node
    }

    #[test]
    fn a_node_that_is_not_one_of_the_jobs_does_not_end_the_job() {
        let server = Server::at("127.0.0.1", 0, None).unwrap();
        let shared = node(server.local_addr().port(), Some(server));
        let in_store =
            || [OVER, AT_ONCE].map(|key| shared.reached.get().unwrap().store.try_get(key, &Wait::after(TELL)));
        assert!(matches!(shared.end(Cause::Ordered), Cause::Ordered));
        shared.end_at_once();
        assert_eq!(in_store(), [Ok(None), Ok(None)]);
        // A job that was ended before is over for all from now on.
        assert!(matches!(shared.admit(1), Err(Cause::Ordered)));
        shared.end_at_once();
        assert_eq!(in_store(), [Ok(Some(b"\"ordered\"".to_vec())), Ok(Some(b"1".to_vec()))]);
    }

    #[test]
    fn a_node_knows_whether_the_store_has_heard_that_it_has_finished() {
        let mut server = Some(Server::at("127.0.0.1", 0, None).unwrap());
        let port = server.as_ref().unwrap().local_addr().port();
        let over = |shared: &Shared| shared.reached.get().unwrap().store.try_get(OVER, &Wait::after(TELL));
        let (one, two) = (node(port, None), node(port, None));
        assert!(one.admit(1).is_ok() && two.admit(2).is_ok());
        assert!(one.finished(TELL));
        assert_eq!(over(&one), Ok(None));
        assert!(two.finished(TELL) && two.finished(TELL), "it may be told twice");
        assert_eq!(over(&one), Ok(Some(b"\"done\"".to_vec())));
        drop(server.take());
        assert!(!one.finished(TELL));
    }

    /// While the main thread waits, it handles no signal.
    #[test]
    fn a_store_that_is_silent_keeps_the_caller_no_longer_than_asked() {
        let server = Server::at("127.0.0.1", 0, None).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let is_silent = AtomicBool::new(false);
        // This passes on everything, and only the answers once the store is to be silent.
        let pass_on = || {
            let (mut client, _) = listener.accept().unwrap();
            let mut to_server = TcpStream::connect(server.local_addr()).unwrap();
            let (mut from_server, mut to_client) = (to_server.try_clone().unwrap(), client.try_clone().unwrap());
            let answers = std::thread::spawn(move || io::copy(&mut from_server, &mut to_client));
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = client.read(&mut buffer) {
                if !is_silent.load(Ordering::SeqCst) {
                    to_server.write_all(&buffer[..count]).unwrap();
                }
            }
            to_server.shutdown(Shutdown::Both).unwrap();
            let _ = answers.join();
        };
        std::thread::scope(|scope| {
            scope.spawn(pass_on);
            // The connection ends with this value, and then the thread ends.
            let node = node(port, None);
            assert!(node.admit(1).is_ok() && node.finished(TELL));
            is_silent.store(true, Ordering::SeqCst);
            let began = Instant::now();
            assert!(!node.finished(Duration::from_millis(50)));
            assert!(began.elapsed() < TELL / 2, "{:?}", began.elapsed());
        });
    }
}
