//! The world that `dm_init` joins by itself, one for each device type.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::domain::{Domain, DomainOptions};
use crate::error::{Error, Result};
use crate::rendezvous::{DEFAULT_TIMEOUT, JoinOptions};
use crate::wait::{Cancel, Deadline};

/// A world that is joined from the environment when it is first needed. A join that fails, is late or is aborted leaves nothing behind: the next one begins anew.
pub(crate) struct DefaultWorld {
    device_type: &'static str,
    state: Mutex<State>,
    changed: Condvar,
}

enum State {
    Absent,
    /// A thread joins it; the flag ends that.
    Joining(Cancel),
    Joined(Arc<Domain>),
}

/// A join under way. However it ends, the threads that wait for it are woken.
struct Joining<'a> {
    world: &'a DefaultWorld,
    joined: bool,
}

impl DefaultWorld {
    /// Of that device type; nobody has joined it.
    pub(crate) const fn new(device_type: &'static str) -> DefaultWorld {
        DefaultWorld { device_type, state: Mutex::new(State::Absent), changed: Condvar::new() }
    }

    /// The world, joined first if this process is not in it. **Collective over the world** then. `deadline` bounds the join, also where another thread does it;
    /// `None`: the default timeout does.
    pub(crate) fn get_or_join(&self, deadline: Option<Deadline>) -> Result<Arc<Domain>> {
        let deadline = deadline.unwrap_or_else(|| Deadline::after(DEFAULT_TIMEOUT));
        let mut state = self.lock();
        loop {
            match &*state {
                State::Joined(domain) => return Ok(Arc::clone(domain)),
                State::Absent => break,
                State::Joining(cancel) => cancel.check()?,
            }
            if deadline.passed() {
                return Err(Error::timeout(format!(
                    "another thread of this process was joining the default world of device type {} for {} ms",
                    self.device_type,
                    deadline.timeout().as_millis()
                )));
            }
            state = self.changed.wait_timeout(state, deadline.slice()).unwrap_or_else(PoisonError::into_inner).0;
        }
        let cancel = Cancel::new();
        *state = State::Joining(cancel.clone());
        drop(state);
        let mut joining = Joining { world: self, joined: false };
        let join = JoinOptions { deadline: Some(deadline), cancel: cancel.clone(), ..JoinOptions::default() };
        let domain = Arc::new(Domain::join(self.device_type, &DomainOptions { join, library: None })?);
        // Under the lock an abort either finds the world joined or has raised the flag before.
        let mut state = self.lock();
        if cancel.is_raised() {
            drop(state);
            domain.abort()?;
            cancel.check()?;
        } else {
            *state = State::Joined(Arc::clone(&domain));
            drop(state);
            joining.joined = true;
        }
        Ok(domain)
    }

    /// Ends the world on this rank, as [`Domain::abort`], or the join that is under way. The next [`get_or_join`](DefaultWorld::get_or_join) joins anew.
    pub(crate) fn abort(&self) -> Result<()> {
        let mut state = self.lock();
        let domain = match &*state {
            State::Absent => return Ok(()),
            State::Joining(cancel) => {
                cancel.raise();
                return Ok(());
            }
            State::Joined(domain) => Arc::clone(domain),
        };
        *state = State::Absent;
        drop(state);
        domain.abort()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Joining<'_> {
    fn drop(&mut self) {
        if !self.joined {
            *self.world.lock() = State::Absent;
        }
        self.world.changed.notify_all();
    }
}
