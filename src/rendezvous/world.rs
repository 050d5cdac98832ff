//! This process's place in the job.

use std::sync::Arc;
use std::time::Duration;

use hostccl::fork::Own;

use super::agreement::{Members, Party, Scope, ScopeKeys, WorldKeys};
use super::launcher::Place;
use super::losses::Losses;
use super::store::{Server, Store};
use crate::error::{Error, Result};
use crate::wait::Wait;

/// A job as one of its ranks sees it.
pub struct World {
    pub(super) device_type: String,
    pub(super) place: Place,
    pub(super) timeout: Duration,
    pub(super) offline: bool,
    pub(super) session: Option<Own<Session>>,
}

/// What joined ranks share; a forked child never drops it. Fields drop in order: the store's connections before the server that they may lead to.
pub(super) struct Session {
    pub(super) scope: Arc<Scope>,
    pub(super) losses: Arc<Losses>,
    pub(super) leftovers: Arc<WorldKeys>,
    pub(super) store: Arc<dyn Store>,
    pub(super) prefix: String,
    /// How many ranks rank 0 takes the world to have, where it said so.
    pub(super) size_there: Option<usize>,
    pub(super) served: bool,
    pub(super) server: Option<Arc<Server>>,
}

impl World {
    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.place.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.place.size
    }

    /// Rank in this host.
    pub fn local_rank(&self) -> usize {
        self.place.local_rank
    }

    /// How long each wait lasts.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Whether there is no rendezvous by choice.
    pub fn is_offline(&self) -> bool {
        self.offline
    }

    /// "cuda" or "cpu".
    pub fn device_type(&self) -> &str {
        &self.device_type
    }

    /// Who started this process, for messages.
    pub fn launcher(&self) -> &'static str {
        self.place.launcher
    }

    /// All ranks as a set that makes collective calls.
    pub fn scope(&self) -> Result<&Arc<Scope>> {
        Ok(&self.session()?.scope)
    }

    /// Some of the ranks, in an order of their own, as such a set; `id` is the same on all of them and used once.
    pub fn subscope(&self, id: &str, ranks: Arc<[i32]>, position: usize) -> Result<Scope> {
        let session = self.session()?;
        let serving = session.served && self.place.rank == 0;
        let prefix = format!("{}/{id}", session.prefix);
        let (store, losses) = (Arc::clone(&session.store), Arc::clone(&session.losses));
        let members = Members::Listed(ranks);
        let left = ScopeKeys::new(&members, &session.leftovers);
        let party = Party { store, losses, members, me: position, served: session.served, serving, left };
        Ok(Scope::new(party, prefix))
    }

    /// Tells the other ranks that this one takes no further part: to them it has gone.
    pub fn leave(&self) {
        if let Some(session) = self.session().ok().filter(|_| self.place.size > 1) {
            session.losses.announce(self.place.rank as i32);
        }
    }

    /// Returns when every rank has called it. **Collective over the world**.
    pub fn barrier(&self, timeout: Option<Duration>) -> Result<()> {
        self.barrier_by(&Wait::after(timeout.unwrap_or(self.timeout)))
    }

    /// The same, where part of the wait may be over.
    pub fn barrier_by(&self, wait: &Wait) -> Result<()> {
        self.scope()?.agree("dm_world_barrier()", wait)?.finish(wait)
    }

    pub(super) fn session(&self) -> Result<&Session> {
        Error::check_fork()?;
        self.session
            .as_deref()
            .ok_or_else(|| Error::unsupported("this world was joined with DM_WORLD_OFFLINE: it talks to no other rank"))
    }
}
