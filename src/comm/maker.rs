//! Makes raw communicators inside an agreed call: by unique id, by split and by shrink, always
//! against the deadline.
//!
//! The communicators that a program gets are blocking. On a non-blocking communicator NCCL's
//! operations return ncclInProgress before they are on the stream, and such operations may not be
//! in one group with those of a blocking communicator. But only the making of non-blocking
//! communicators can be ended early. So where there are streams, ranks meet in a non-blocking
//! communicator that nobody sees, and what is handed out is split from it (docs/nccl-sources.md).
//!
//! With `NCCL_COMM_BLOCKING=1` in the environment NCCL makes every communicator block, whatever its
//! configuration says. So on a library with streams every call that makes a communicator runs on a
//! thread of the library, and the wait for the thread ends by the deadline. A call that does not
//! return leaves its thread behind (handle.rs).

mod children;
mod meeting;

use std::cell::Cell;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::background::MakingWorker;
use super::call::Peers;
use super::ending::{discard, question_wait};
use super::names::world_ranks;
use super::polling::{millis, poll_until_done};
use crate::ccl::{Library, RawComm};
use crate::error::{Error, Result};
use crate::logging::Me;
use crate::mesh::Mesh;
use crate::rendezvous::Round;
use crate::wait::Nearing;

/// How often, while a library works in the background, this rank looks in the store for failures of
/// the other ranks.
const LOOK_AROUND: Duration = Duration::from_millis(100);

/// How much longer than the deadline this rank waits for the host engine, which has the same
/// deadline and then says which ranks did not come.
const LAST_WORD: Duration = Duration::from_millis(100);
/// How much longer than the deadline this rank waits over several hosts. The engine then asks other
/// ranks first, which takes up to 1.2 s.
const LAST_WORD_OF_HOSTS: Duration = Duration::from_millis(1300);

/// Makes communicators of one library inside one call.
pub(super) struct Maker<'a> {
    pub(super) library: &'a Arc<Library>,
    /// The other ranks of the call.
    pub(super) peers: Peers<'a>,
    /// The timeout of the mesh for which the communicators are made.
    timeout: Duration,
    /// On a library with streams, the thread that makes the communicators.
    worker: MakingWorker,
}

impl<'a> Maker<'a> {
    /// Makes communicators of `library` inside a call with those peers, for a mesh with that
    /// timeout.
    pub(super) fn new(library: &'a Arc<Library>, peers: Peers<'a>, timeout: Duration) -> Maker<'a> {
        peers.round().into_iter().for_each(Round::note_making);
        Maker { library, peers, timeout, worker: MakingWorker::take(library) }
    }
}

impl Maker<'_> {
    /// Runs a call of the library that makes something. On a library with streams it runs on the
    /// thread of this maker, and `discard` gets what it makes after the deadline. Once the library
    /// has begun, nothing ends a blocking call early.
    fn on_worker<T: Send + 'static>(
        &self,
        what: impl Fn() -> String,
        work: impl FnOnce(&Library) -> Result<T> + Send + 'static,
        discard: impl FnOnce(T) + Send + 'static,
    ) -> Result<T> {
        if !self.library.has_streams() {
            return work(self.library);
        }
        let library = Arc::clone(self.library);
        self.worker.run(move || work(&library), discard, |is_done| self.poll(what, sleep, is_done))?
    }

    /// Polls a communicator that nobody else has yet, and aborts it when that fails. `explain` adds
    /// the reason to an error that the communicator itself reports.
    fn poll_new(&self, comm: RawComm, what: impl Fn() -> String, explain: impl Fn(Error) -> Error) -> Result<()> {
        let rest = |pause| self.library.rest(comm, pause);
        let is_stuck = Cell::new(false);
        let is_done = || {
            let polled = self.ask(comm).inspect_err(|_| is_stuck.set(true))?;
            polled.map_err(&explain)
        };
        let result = self.poll(what, rest, is_done);
        if let Err(error) = &result {
            self.peers.tell_before_abort(error);
            // While a thread is inside the communicator, nothing else may be done with it.
            if !is_stuck.get() {
                discard(self.library, &[comm], Some(&self.worker));
            }
        }
        result
    }

    /// Asks a communicator that nobody else has yet whether it is ready. The outer error says that
    /// the library has not answered in time.
    fn ask(&self, comm: RawComm) -> Result<Result<bool>> {
        if !self.library.has_streams() {
            return Ok(self.library.poll_making(comm));
        }
        let (library, ending) = (Arc::clone(self.library), Arc::clone(self.library));
        let wait = question_wait(self.peers.wait());
        let what = || "ncclCommGetAsyncError".to_owned();
        let late = move |_| drop(ending.abort(comm));
        let asked = self.worker.run(
            move || Ok(library.poll(comm)),
            late,
            |is_done| poll_until_done(&wait, what, sleep, is_done),
        );
        asked.map(|asked| asked.and_then(|answer| answer))
    }

    /// Waits until the background work is done. Fails at the deadline, when the call is cancelled,
    /// and when another rank reports a failure.
    fn poll(
        &self,
        what: impl Fn() -> String,
        rest: impl Fn(Duration),
        is_done: impl Fn() -> Result<bool>,
    ) -> Result<()> {
        let mut looked = Instant::now();
        let extra = match (self.library.is_host_engine(), self.peers.share_memory()) {
            (false, _) => Duration::ZERO,
            (true, Some(false)) => LAST_WORD_OF_HOSTS,
            (true, _) => LAST_WORD,
        };
        let own = self.peers.wait();
        let wait = own.with_deadline(own.deadline.extended(extra));
        let nearing = Nearing::default();
        poll_until_done(&wait, &what, rest, || {
            if is_done()? {
                return Ok(true);
            }
            // The host engine warns by itself, and knows which ranks are missing.
            let percent = if self.library.has_streams() { nearing.due(&own.deadline) } else { None };
            if let Some(percent) = percent {
                let millis = own.deadline.timeout().as_millis();
                log::warn!("{Me}: {} goes on: {percent} % of its {millis} ms have passed", what());
            }
            let is_due = looked.elapsed() > LOOK_AROUND && !own.deadline.passed();
            if is_due && self.peers.round().is_some() {
                looked = Instant::now();
                own.look_around()?;
                self.peers.check()?;
            }
            Ok(false)
        })
    }

    fn millis_left(&self) -> u64 {
        millis(self.peers.wait().deadline.left())
    }
}

/// Tells the log that a communicator over the ranks of `group` was made, and how.
fn log_made(how: &str, group: &Mesh, began: Instant) {
    log::info!(
        "rank {}: the communicator of {} ({} ranks: {}) was {how} in {:.1} ms",
        group.rank(),
        group.describe(),
        group.size(),
        world_ranks(group),
        began.elapsed().as_secs_f64() * 1e3
    );
}
