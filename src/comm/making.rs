//! Making raw communicators inside an agreed call: by unique id, by split, always against the deadline.

use std::time::{Duration, Instant};

use super::communicator::{Communicator, blame};
use crate::ccl::{CommConfig, Library, RawComm, UniqueId};
use crate::error::{Error, Result, Status};
use crate::mesh::Mesh;
use crate::rendezvous::Round;
use crate::wait::{Deadline, Wait};

/// How often, while a library works in the background, the other ranks' failures are looked for in the store.
const LOOK_AROUND: Duration = Duration::from_millis(100);

/// For how long they are listened to then.
const LISTEN: Duration = Duration::from_millis(10);

/// The host engine ends its waits at the deadline by itself and says who is missing; this much later we do.
const ENGINE_FIRST: Duration = Duration::from_millis(100);

/// Makes communicators of one library within one round of agreement.
pub(super) struct Maker<'a> {
    pub(super) library: &'a Library,
    /// The agreed call that this happens in; `None` where no other rank takes part.
    pub(super) round: Option<&'a Round>,
    pub(super) wait: &'a Wait,
}

impl Maker<'_> {
    /// A communicator over the ranks of `group`, of which this is number `rank`. They meet by a fresh id: number 0 publishes it under `key`.
    pub(super) fn meet(&self, key: &str, group: &Mesh, rank: usize, mut config: CommConfig) -> Result<RawComm> {
        let size = group.size();
        let maker = group.ranks().first().copied();
        let id = match self.round {
            Some(round) if rank > 0 => {
                let bytes = round.fetch(key, self.wait).map_err(|error| match maker {
                    Some(maker) if error.status() == Status::Timeout && self.wait.deadline.passed() => {
                        Error::timeout(format!("{} (by rank {maker})", error.message()))
                    }
                    _ => error,
                })?;
                UniqueId::from_bytes(&bytes).ok_or_else(|| {
                    Error::store(format!("the unique id under {key} has {} bytes instead of 128", bytes.len()))
                })?
            }
            round => {
                let id = self.library.unique_id()?;
                if let Some(round) = round.filter(|_| size > 1) {
                    round.publish(key, &id.bytes, self.wait)?;
                }
                id
            }
        };
        let comm = self.library.init_rank(size, &id, rank, &mut config)?;
        self.library.set_timeout(comm, self.wait.deadline.left().max(Duration::from_millis(1)))?;
        self.settle(comm, group, maker, &format!("making the communicator {key} of {size} ranks"))?;
        Ok(comm)
    }

    /// A child of `parent` that joins the ranks which say the same colour, ordered by key. A split that does not end ends the parent.
    pub(super) fn split(
        &self,
        parent: &Communicator,
        group: &Mesh,
        color: i32,
        key: i32,
        mut config: CommConfig,
    ) -> Result<RawComm> {
        let raw = parent.ready()?;
        // The library may write the handle from its own thread until the parent has settled: if that never happens, the place
        // it writes to must stay.
        let child = Box::leak(Box::new(RawComm::NULL));
        self.library.split(raw, color, key, child, &mut config)?;
        if let Err(error) =
            self.poll(raw, parent.group(), None, &format!("splitting the root communicator by colour {color}"))
        {
            let _ = parent.abort();
            return Err(error);
        }
        let place: *mut RawComm = child;
        // SAFETY: `place` came from Box::leak above, and the settled library does not write to it any more.
        let child = *unsafe { Box::from_raw(place) };
        if child.is_null() {
            return Err(Error::new(
                Status::Ccl,
                format!("ncclCommSplit of {} left no communicator for colour {color}, key {key}", self.library.name()),
            ));
        }
        // A child that goes on in the background by itself is waited for as well.
        self.settle(child, group, None, &format!("initialising the communicator of colour {color}"))?;
        Ok(child)
    }

    /// Polls a communicator that nobody else has yet, and aborts it when that fails.
    fn settle(&self, comm: RawComm, group: &Mesh, maker: Option<i32>, what: &str) -> Result<()> {
        self.poll(comm, group, maker, what).inspect_err(|_| {
            let _ = self.library.abort(comm);
        })
    }

    /// The failure of another rank, or that one has gone: one that died before it came is one that the library has never heard of.
    fn news(&self, round: &Round) -> Result<()> {
        if let Some(failure) = round.failed(self.wait)? {
            return Err(failure);
        }
        // Nobody publishes that, but who waits for it is told.
        match round.fetch("comm/nothing", &self.wait.with_deadline(Deadline::after(LISTEN))) {
            Err(error) if error.status() != Status::Timeout => Err(error),
            _ => Ok(()),
        }
    }

    /// Waits until the background work on `comm` is done: to the deadline, unless cancelled or another rank reports that it failed.
    /// `maker` made the id that the ranks of `comm` meet by.
    fn poll(&self, comm: RawComm, group: &Mesh, maker: Option<i32>, what: &str) -> Result<()> {
        let mut looked = Instant::now();
        let mut told = false;
        let wait = match self.library.is_host_engine() {
            true => self.wait.with_deadline(Deadline::after(self.wait.deadline.left() + ENGINE_FIRST)),
            false => self.wait.clone(),
        };
        let settled = self.library.settle_while(comm, &wait, what, || {
            let Some(round) = self.round.filter(|_| looked.elapsed() > LOOK_AROUND) else { return Ok(()) };
            looked = Instant::now();
            let news = self.wait.look_around().and_then(|()| self.news(round));
            told = news.is_err();
            news
        });
        settled.map_err(|error| match maker {
            _ if told => error,
            // Nobody has a number in a communicator that was never there, and the one that can have spoilt it is the one that made its id.
            Some(maker) if error.status() == Status::PeerLost && self.library.lost_rank(comm).is_none() => {
                let message = format!("rank {maker} was lost (it made the id): {}", error.message());
                Error::new(Status::PeerLost, message).with_ccl_result(error.ccl_result())
            }
            _ => blame(self.library, comm, group, error),
        })
    }
}
