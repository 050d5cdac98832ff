//! The nodes of a job, each with a `devicemesh run` of its own: they meet in the store that the ranks use too, and agree on who is which node, on
//! the one cause for which the job ends, and on when all are done.
//!
//! Keys: `run/nodes` counts those that came, `run/node/<n>` is what the n-th says of itself, `run/finished/<n>` that its ranks ended well,
//! `run/gone/<k>` which tool was the k-th to go (the server writes it when the tool's connections end), and `run/over`, written once, the
//! cause. Whoever waits, waits for the cause too.

mod join;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use devicemesh::error::{Error, Status};
use devicemesh::printable::printable;
use devicemesh::rendezvous::store::{Server, Store, TcpStore};
use devicemesh::wait::{Cancel, Wait};
use serde::de::DeserializeOwned;

use crate::cause::Cause;
use crate::ranks::{Failure, Plan};

const OVER: &str = "run/over";
const NODES: &str = "run/nodes";
/// How long telling the others may take.
const TELL: Duration = Duration::from_secs(3);
/// As long as the job lasts.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86_400);

/// What a node brings to the meeting.
pub struct Meeting {
    pub host: String,
    pub port: u16,
    pub nodes: u32,
    /// By arrival where it is not said.
    pub node: Option<u32>,
    /// Ranks on this node.
    pub ranks: u32,
    pub id: Option<String>,
    pub timeout: Duration,
}

impl Meeting {
    fn store(&self) -> String {
        match self.host.contains(':') {
            true => format!("tcp://[{}]:{}", self.host, self.port),
            false => format!("tcp://{}:{}", self.host, self.port),
        }
    }
}

/// What a thread of its own finds out while the tool watches its ranks.
pub enum News {
    /// All nodes are there.
    Joined(Plan),
    /// The job is over, for every node for this cause.
    Over(Cause),
    /// Nobody needs the store any more that this node serves.
    Alone,
}

/// This node's part in the job.
pub struct Nodes {
    shared: Arc<Shared>,
    news: Receiver<News>,
    thread: Option<JoinHandle<()>>,
}

/// What the tool's main thread and the one that waits in the store both use.
struct Shared {
    nodes: u32,
    cancel: Cancel,
    /// Readable when there is news.
    bell: OwnedFd,
    reached: OnceLock<Reached>,
    /// The how-manieth this node was to come.
    number: OnceLock<u32>,
    /// What the node is called that serves the store, once that is known.
    serving: OnceLock<String>,
}

struct Reached {
    store: TcpStore,
    server: Option<Server>,
}

impl Nodes {
    /// Begins to meet the others; what comes of it is news.
    pub fn meet(meeting: Meeting) -> Result<Nodes, Failure> {
        let broken = |what: &str| Failure::new(1, format!("cannot {what}: {}", std::io::Error::last_os_error()));
        // SAFETY: no pointers.
        let bell = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if bell < 0 {
            return Err(broken("make an event"));
        }
        // SAFETY: a fresh descriptor is owned by nobody else.
        let bell = unsafe { OwnedFd::from_raw_fd(bell) };
        let (reached, number, serving) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        let shared = Arc::new(Shared { nodes: meeting.nodes, cancel: Cancel::new(), bell, reached, number, serving });
        let (sender, news) = channel();
        let theirs = Arc::clone(&shared);
        let work = move || {
            let joined = join::join(&theirs, &meeting);
            let over = joined.is_err();
            theirs.tell(&sender, joined.map_or_else(News::Over, News::Joined));
            theirs.watch(&sender, over);
        };
        let thread = std::thread::Builder::new().name("dm-nodes".to_owned()).spawn(work);
        let thread = thread.map_err(|error| Failure::new(1, format!("cannot start a thread: {error}")))?;
        Ok(Nodes { shared, news, thread: Some(thread) })
    }

    /// Readable when there is news.
    pub fn bell(&self) -> RawFd {
        self.shared.bell.as_raw_fd()
    }

    pub fn news(&self) -> Vec<News> {
        let mut count = [0; 8];
        // SAFETY: an eventfd gives eight bytes, and there is room for them.
        unsafe { libc::read(self.bell(), count.as_mut_ptr().cast(), count.len()) };
        self.news.try_iter().collect()
    }

    /// Ends the job of all nodes for this cause, or for the one that another node was first with, which is returned.
    pub fn end(&self, cause: Cause) -> Cause {
        self.shared.end(cause)
    }

    /// The ranks of this node have ended well.
    pub fn finished(&self) {
        self.shared.finished();
    }

    /// Whether the other nodes need this one to the end.
    pub fn serves(&self) -> bool {
        self.shared.reached.get().is_some_and(|reached| reached.server.is_some())
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        self.shared.cancel.raise();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn tell(&self, sender: &Sender<News>, news: News) {
        let _ = sender.send(news);
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight bytes of ours. When the counter is full, it is readable all the same.
        unsafe { libc::write(self.bell.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    fn wait(&self, timeout: Duration) -> Wait {
        Wait { cancel: self.cancel.clone(), ..Wait::after(timeout) }
    }

    fn end(&self, cause: Cause) -> Cause {
        let Some(reached) = self.reached.get() else { return cause };
        let Ok(text) = serde_json::to_vec(&cause) else { return cause };
        reached.store.set_once(OVER, &text, &Wait::after(TELL)).map_or(cause, |text| read_cause(&text))
    }

    fn finished(&self) {
        let (Some(reached), Some(number)) = (self.reached.get(), self.number.get()) else { return };
        // Where this cannot be told, the watch finds the store out of reach.
        let told = reached.store.set(&finished(*number), b"1", &Wait::after(TELL));
        if told.is_ok() {
            self.end_if_all_have();
        }
    }

    /// The last to finish says that the job is done; where that one went at once, whoever sees it go.
    fn end_if_all_have(&self) {
        let Some(Reached { store, .. }) = self.reached.get() else { return };
        let keys: Vec<String> = (1..=self.nodes).map(finished).collect();
        if store.present(&keys, &Wait::after(TELL)).is_ok_and(|there| there.iter().all(|there| *there)) {
            self.end(Cause::Done);
        }
    }

    /// Waits for the job's end, and where this node serves the store, for the others' leaving.
    fn watch(&self, sender: &Sender<News>, mut over: bool) {
        let Some(Reached { store, server }) = self.reached.get() else { return };
        let (mut gone, wait) = (0, self.wait(FOREVER));
        loop {
            if over && server.is_none() {
                return;
            }
            if over && gone + 1 >= self.came(store) {
                return self.tell(sender, News::Alone);
            }
            let next = format!("run/gone/{}", gone + 1);
            let keys = [OVER, &next];
            match store.get_any(if over { &keys[1..] } else { &keys }, &wait) {
                Ok((0, text)) if !over => {
                    over = true;
                    self.tell(sender, News::Over(read_cause(&text)));
                }
                Ok((_, word)) => {
                    gone += 1;
                    if !over {
                        self.look_after(store, &word);
                    }
                }
                Err(_) if over || self.cancel.is_raised() => return,
                Err(error) => {
                    let message = self.server_gone(&error);
                    return self.tell(sender, News::Over(Cause::Lost { message }));
                }
            }
        }
    }

    /// A tool has gone: with its work done, or not.
    fn look_after(&self, store: &TcpStore, word: &[u8]) {
        let Ok(number) = String::from_utf8_lossy(word).parse::<u32>() else { return };
        // One too many was never part of the job.
        if number > self.nodes {
            return;
        }
        match store.try_get(&finished(number), &Wait::after(TELL)) {
            Ok(Some(_)) => self.end_if_all_have(),
            Ok(None) => drop(self.end(Cause::Gone { node: join::name(store, self.nodes, number) })),
            Err(_) => {} // the store has gone too
        }
    }

    /// Why there is no store any more.
    fn server_gone(&self, error: &Error) -> String {
        let who = self.serving.get().map_or("the node that serves the store", String::as_str);
        let name = self.reached.get().map_or("", |reached| reached.store.name());
        let out_of_reach = if error.status() == Status::Timeout || error.os_error() == libc::ETIMEDOUT {
            "is out of reach"
        } else {
            "has gone"
        };
        format!(
            "{who} {out_of_reach}, and with it the store at {name}: its devicemesh run was killed, or its host or the network is down"
        )
    }

    /// Nodes that came so far.
    fn came(&self, store: &TcpStore) -> usize {
        let count = store.try_get(NODES, &Wait::after(TELL)).ok().flatten();
        count.and_then(|text| String::from_utf8_lossy(&text).trim().parse().ok()).unwrap_or(1)
    }
}

fn finished(number: u32) -> String {
    format!("run/finished/{number}")
}

/// What another node says, with nothing in it that a terminal would act on. Only a rank's output keeps its lines and tabs.
fn from_a_peer<T: DeserializeOwned>(text: &[u8]) -> serde_json::Result<T> {
    fn clean(value: &mut serde_json::Value) {
        match value {
            serde_json::Value::String(text) => *text = printable(text).into_owned(),
            serde_json::Value::Array(values) => values.iter_mut().for_each(clean),
            serde_json::Value::Object(fields) => fields.iter_mut().for_each(|(name, value)| match value {
                serde_json::Value::String(text) if name == "output" => {
                    let parts = text.split_inclusive(['\n', '\t']).map(|part| {
                        let end = part.len() - usize::from(part.ends_with(['\n', '\t']));
                        format!("{}{}", printable(&part[..end]), &part[end..])
                    });
                    *text = parts.collect();
                }
                value => clean(value),
            }),
            _ => {}
        }
    }
    let mut value = serde_json::from_slice(text)?;
    clean(&mut value);
    serde_json::from_value(value)
}

fn read_cause(text: &[u8]) -> Cause {
    from_a_peer(text).unwrap_or_else(|error| Cause::Refused {
        message: format!("{OVER} in the store holds {:?}: {error}", String::from_utf8_lossy(text)),
    })
}
