//! The world that `dm_init` joins by itself, one for each device type.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::world::World;
use super::world_options::WorldOptions;
use crate::error::{Error, Result};
use crate::logging;
use crate::rendezvous::{DEFAULT_TIMEOUT, JoinOptions};
use crate::wait::{Cancel, Deadline};

static CPU_WORLD: DefaultWorld = DefaultWorld::new("cpu");
static CUDA_WORLD: DefaultWorld = DefaultWorld::new("cuda");

/// Returns the default world of a device type. If this process is not in that world, joins it
/// first. The call is then **collective over the world**, and `deadline` bounds the join. With
/// `None` the default timeout bounds the join.
pub(crate) fn default_world(device_type: &str, deadline: Option<Deadline>) -> Result<Arc<World>> {
    logging::init_from_environment();
    of_type(device_type).get_or_join(deadline)
}

/// Returns the default world of a device type if this process is in it.
fn joined_default_world(device_type: &str) -> Option<Arc<World>> {
    match &*of_type(device_type).lock() {
        State::Joined(world) => Some(Arc::clone(world)),
        State::Absent | State::Joining(_) => None,
    }
}

/// Returns the default world in which the other ranks wait for a call of this rank that was
/// refused, if this process is in it. `device_type` is `None` where the call named no valid device
/// type. Then the result is the only default world that this process is in; where it is in two,
/// nobody is told.
pub(crate) fn default_world_to_tell(device_type: Option<&str>) -> Option<Arc<World>> {
    match (device_type, joined_default_world("cpu"), joined_default_world("cuda")) {
        (Some(device_type), ..) => joined_default_world(device_type),
        (None, cpu, None) => cpu,
        (None, None, cuda) => cuda,
        (None, Some(_), Some(_)) => None,
    }
}

fn of_type(device_type: &str) -> &'static DefaultWorld {
    if device_type == CPU_WORLD.device_type { &CPU_WORLD } else { &CUDA_WORLD }
}

/// Ends the default worlds on this rank, joined or being joined. The next [`default_world`] joins
/// anew.
pub(crate) fn abort_default_worlds() -> Result<()> {
    CPU_WORLD.abort().and(CUDA_WORLD.abort())
}

/// Finalizes the default worlds that this process is in. The next [`default_world`] joins anew.
/// `timeout` bounds the whole call; `None` stands for the longest timeout of these worlds. If
/// `timeout` is an error, this rank has refused the call. The other ranks end these worlds one
/// after the other, so the refusal is told in each of the worlds.
pub(crate) fn finalize_default_worlds(timeout: Result<Option<Duration>>) -> Result<()> {
    let all = [&CPU_WORLD, &CUDA_WORLD];
    let joined = || all.iter().filter_map(|world| joined_default_world(world.device_type));
    let timeout = timeout.inspect_err(|refusal| tell_finalize_refused(joined(), refusal))?;
    let Some(timeout) = timeout.or_else(|| joined().map(|world| world.rendezvous().timeout()).max()) else {
        return Ok(());
    };
    each_within(timeout, all, |world, left| world.finalize(Some(left)))
}

/// Tells the other ranks of each of these worlds that this rank has refused to finalize them.
fn tell_finalize_refused(worlds: impl Iterator<Item = Arc<World>>, refusal: &Error) {
    for world in worlds {
        let _ = world.tell_if_refused("dm_world_finalize", || Err::<(), _>(refusal.clone()));
    }
}

/// Runs `call` for each of `all` with the time that is left of `timeout`. Returns the first error.
fn each_within<T>(
    timeout: Duration,
    all: impl IntoIterator<Item = T>,
    call: impl Fn(T, Duration) -> Result<()>,
) -> Result<()> {
    let deadline = Deadline::after(timeout);
    all.into_iter().map(|one| call(one, deadline.left())).fold(Ok(()), Result::and)
}

/// A world that is joined from the environment when it is first needed. A join that fails, is late
/// or is aborted leaves nothing behind, so the next join begins anew.
struct DefaultWorld {
    device_type: &'static str,
    /// How far the join is.
    state: Mutex<State>,
    /// Wakes the threads that wait for the join of another thread.
    changed: Condvar,
}

enum State {
    /// No thread has joined the world, or the last join left nothing behind.
    Absent,
    /// A thread joins the world; raising the flag ends that join.
    Joining(Cancel),
    /// This process is in the world.
    Joined(Arc<World>),
}

/// A join in progress. The threads that wait for the join are woken however it ends.
struct Joining<'a> {
    world: &'a DefaultWorld,
    /// Whether the join succeeded; otherwise the world is absent again.
    joined: bool,
}

impl DefaultWorld {
    /// Makes the default world of that device type. Nobody has joined it yet.
    const fn new(device_type: &'static str) -> DefaultWorld {
        DefaultWorld { device_type, state: Mutex::new(State::Absent), changed: Condvar::new() }
    }

    /// Returns the world. Joins it first if this process is not in it; the call is then
    /// **collective over the world**. `deadline` bounds the join, also where another thread does
    /// the join. With `None` the default timeout bounds it.
    fn get_or_join(&self, deadline: Option<Deadline>) -> Result<Arc<World>> {
        let deadline = deadline.unwrap_or_else(|| Deadline::after(DEFAULT_TIMEOUT));
        let mut state = self.lock();
        // A thread that waits for a join is aborted with the join. A thread that finds the join
        // aborted already waits until the join has ended, and then joins anew.
        let mut waits_for_join = false;
        loop {
            match &*state {
                State::Joined(world) if world.alive().is_ok() => return Ok(Arc::clone(world)),
                State::Joined(_) | State::Absent => break,
                State::Joining(cancel) => match cancel.check() {
                    Ok(()) => waits_for_join = true,
                    Err(aborted) if waits_for_join => return Err(aborted),
                    Err(_) => {}
                },
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
        let earlier = std::mem::replace(&mut *state, State::Joining(cancel.clone()));
        drop(state);
        drop(earlier);
        let mut joining = Joining { world: self, joined: false };
        let join = JoinOptions { deadline: Some(deadline), cancel: cancel.clone(), ..JoinOptions::default() };
        let world = Arc::new(World::join(self.device_type, &WorldOptions::new(join))?);
        // Because of the lock, an abort either finds the world joined or has raised the flag
        // before.
        let mut state = self.lock();
        if cancel.is_raised() {
            drop(state);
            world.abort()?;
            cancel.check()?;
        } else {
            *state = State::Joined(Arc::clone(&world));
            drop(state);
            joining.joined = true;
        }
        Ok(world)
    }

    /// Ends the world on this rank, as [`World::abort`] does, or ends the join that is in progress.
    /// The next [`get_or_join`](DefaultWorld::get_or_join) joins anew.
    fn abort(&self) -> Result<()> {
        let mut state = self.lock();
        let world = match &*state {
            State::Absent => return Ok(()),
            State::Joining(cancel) => {
                cancel.raise();
                return Ok(());
            }
            State::Joined(world) => Arc::clone(world),
        };
        *state = State::Absent;
        drop(state);
        world.abort()
    }

    /// Ends the world in order, as [`World::finalize`] does, if this process is in it.
    fn finalize(&self, timeout: Option<Duration>) -> Result<()> {
        let world = match &*self.lock() {
            State::Joined(world) if world.alive().is_ok() => Arc::clone(world),
            _ => return Ok(()),
        };
        let outcome = world.finalize(timeout);
        let mut state = self.lock();
        let is_same = matches!(&*state, State::Joined(known) if Arc::ptr_eq(known, &world));
        if is_same && world.alive().is_err() {
            *state = State::Absent;
        }
        outcome
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::two_ranks::two_ranks;
    use std::sync::Mutex;

    #[test]
    fn a_refusal_to_finalize_is_told_in_both_worlds() {
        // The first world of a rank waits here for the second one.
        let first: [Mutex<Option<Arc<World>>>; 2] = Default::default();
        two_ranks(|world| *first[world.rank()].lock().unwrap() = Some(Arc::clone(world)));
        two_ranks(|second| {
            let first = first[second.rank()].lock().unwrap().take().unwrap();
            let both = [first, Arc::clone(second)];
            if second.rank() == 0 {
                tell_finalize_refused(both.into_iter(), &Error::invalid("a wrong timeout"));
                return;
            }
            for world in both {
                let error = world.finalize(Some(Duration::from_secs(20))).unwrap_err();
                assert!(error.message().contains("a wrong timeout"), "{error}");
            }
        });
    }

    #[test]
    fn two_worlds_share_one_deadline() {
        let given = Mutex::new(Vec::new());
        let outcome = each_within(Duration::from_secs(60), ["cpu", "cuda"], |world, left| {
            given.lock().unwrap().push(left);
            std::thread::sleep(Duration::from_millis(20));
            Err(Error::timeout(world))
        });
        let given = given.into_inner().unwrap();
        assert!(given.len() == 2 && given[1] + Duration::from_millis(20) <= given[0], "{given:?}");
        assert_eq!(outcome.unwrap_err().message(), "cpu");
    }
}
