//! The nodes of a job, each with a `devicemesh run` of its own. They meet in the store that the
//! ranks use too. There they agree on the number of each node, on the one cause for which the job
//! ends, and on when all are done.
//!
//! Keys in the store:
//!
//! | key | value |
//! |---|---|
//! | `devicemesh/run/nodes` | how many nodes have arrived |
//! | `devicemesh/run/node/<n>` | the n-th node to arrive, in its own words ([`entry::Entry`]) |
//! | `devicemesh/run/served` | set where a `devicemesh run` for several nodes serves the store |
//! | `devicemesh/run/finished/<n>` | set when the ranks of that node have ended well |
//! | `devicemesh/run/gone/<k>` | the arrival number of the k-th tool whose connections ended. The server writes it |
//! | `devicemesh/run/strangers` | how many nodes of other jobs were refused |
//! | `devicemesh/run/stranger/<n>` | what the n-th of them said, for the nodes that wait |
//! | `devicemesh/refused` | how many connections the server refused because of their secrets, and the last one's address. The server writes it |
//! | `devicemesh/run/over` | the cause for which the job ends. It is written once |
//! | `devicemesh/run/heir/<n>` | the arrival number of the node that has taken the post of the n-th node, which is lost ([`posts`]) |
//! | `devicemesh/run/success` | set with `--restart rank` when a rank has ended well |
//! | `devicemesh/run/question/<n>` | what `devicemesh why` asks the n-th node, which takes the key away ([`questions`]) |
//! | `devicemesh/run/answer/<asker>/<n>` | the answer, which the asker takes away |
//! | `devicemesh/run/at_once` | set when a second signal asked a tool to end the job at once |
//!
//! In the store of a service (`--store`, see [`service`]), which has one job after the other,
//! `run/` is followed by the number of the job ([`board`]). There is no `served`, and two keys
//! more:
//!
//! | key | value |
//! |---|---|
//! | `devicemesh/run/jobs` | the number of the newest job, or of one before it |
//! | `devicemesh/run/<job>/first` | the node that has begun the job. It is written once |
//!
//! Every wait also waits for the cause.

mod answering;
mod attempt;
mod board;
mod card;
mod entry;
mod heir;
mod join;
mod keys;
mod name;
mod peer;
mod place;
mod port;
mod posts;
mod progress;
mod questions;
mod reach;
mod roster;
mod service;
mod shared;
mod watch;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

pub use self::board::Board;
pub use self::card::{Card, cards};
use self::join::join;
pub use self::peer::from_a_peer;
pub use self::port::listener;
pub use self::questions::{Peer, ask, end_questions, left, next_question};
pub use self::roster::{Roster, roster};
pub use self::shared::News;
use self::shared::Shared;
pub use self::shared::TELL;
use self::watch::watch;
use super::cause::Cause;
use super::rendezvous::Rendezvous;
use crate::failure::Failure;

/// The other nodes of the job, for the tool's main thread. A thread of its own waits for them in
/// the store.
pub struct Nodes {
    /// The state that both threads use.
    shared: Arc<Shared>,
    /// Brings what the thread has found out.
    news: Receiver<News>,
    /// `None` while this is dropped.
    thread: Option<JoinHandle<()>>,
}

impl Nodes {
    /// Begins to meet the other nodes. The outcome comes as news.
    pub fn meet(rendezvous: Rendezvous) -> Result<Nodes, Failure> {
        let cannot = |what: &str, error: io::Error| Failure::new(1, format!("cannot {what}: {error}"));
        let (sender, news) = channel();
        let shared =
            Shared::new(rendezvous.nodes, rendezvous.heals, sender).map_err(|error| cannot("make an event", error))?;
        let shared = Arc::new(shared);
        let theirs = Arc::clone(&shared);
        let work = move || {
            let joined = join(&theirs, &rendezvous);
            let over = joined.is_err();
            if let Ok(assignment) = &joined {
                theirs.show_card(assignment);
            }
            theirs.tell(joined.map_or_else(News::Over, News::Joined));
            watch(&theirs, over);
        };
        let thread = std::thread::Builder::new().name("dm-nodes".to_owned()).spawn(work);
        let thread = thread.map_err(|error| cannot("start a thread", error))?;
        Ok(Nodes { shared, news, thread: Some(thread) })
    }

    /// The news since the last time.
    pub fn news(&self) -> Vec<News> {
        self.shared.clear_bell();
        self.news.try_iter().collect()
    }

    /// Ends the job of all nodes for this cause, or for the one that another node reported earlier.
    /// Returns the cause that stands.
    pub fn end(&self, cause: Cause) -> Cause {
        self.shared.end(cause)
    }

    /// Makes the other nodes kill their ranks. The end of the job has already begun.
    pub fn end_at_once(&self) {
        self.shared.end_at_once();
    }

    /// Tells the other nodes that the ranks of this node have ended well. Each question to the
    /// store takes `limit` at most. Returns whether the store has heard it.
    pub fn finished(&self, limit: Duration) -> bool {
        self.shared.finished(limit)
    }

    /// Tells the other nodes that a rank of this node has ended well.
    pub fn tell_success(&self) {
        self.shared.tell_success();
    }

    /// Whether a node has told that one of its ranks has ended well.
    pub fn has_success(&self) -> bool {
        self.shared.has_success()
    }

    /// Whether this node is one of the job's, so that the other nodes know the cause that it knows.
    pub fn is_admitted(&self) -> bool {
        self.shared.admitted().is_some()
    }

    /// The number under which this node came to the job's store; `None` where it is not one of the
    /// job's nodes.
    pub fn arrival(&self) -> Option<u32> {
        self.shared.arrival.get().copied()
    }

    /// Whether this node serves the store, which the other nodes need to the end.
    pub fn serves(&self) -> bool {
        self.shared.serves()
    }
}

impl AsFd for Nodes {
    /// A descriptor that is readable when there is news.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.bell()
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        self.shared.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
