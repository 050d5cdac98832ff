//! The ranks of the check as a team: the steps that all ranks make together, the values that rank 0
//! gathers in them, and the time limit.

use std::cell::Cell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use devicemesh::comm::World;
use devicemesh::error::{Error, Result, Status};
use devicemesh::printable::printable;
use devicemesh::rendezvous::Round;
use devicemesh::wait::Wait;

use super::progress::Progress;

/// The time that a wait in the store may take longer than a collective. So the collective fails
/// first, and its error names the missing rank.
const LATER: Duration = Duration::from_secs(5);
/// The time before `--timeout` at which the waits end, so that there is time to report. It is a
/// tenth of the timeout where that is shorter.
const BEFORE: Duration = Duration::from_secs(1);
/// The time after which a rank that measures asks again whether another rank has failed.
const ASK: Duration = Duration::from_secs(1);

/// The first step, in which a rank waits for all others.
pub const JOINING: &str = "joining the world";

/// The time for the whole check. When it has passed, a thread ends the process, because the process
/// may wait for something that never comes. Clones are the same clock.
#[derive(Clone)]
pub struct Clock {
    /// The time from the beginning.
    limit: Duration,
    shared: Arc<Shared>,
}

/// The state that the thread of a clock shares with the check.
struct Shared {
    state: Mutex<State>,
    /// Is notified when the beginning has changed.
    changed: Condvar,
}

struct State {
    began: Instant,
    /// The current step, for the message of the thread.
    doing: String,
}

impl Clock {
    /// Starts the clock. When the time has passed, `late` gets the current step, reports it, and
    /// gives the exit code.
    pub fn start(limit: Duration, late: impl FnOnce(&str) -> u8 + Send + 'static) -> std::io::Result<Clock> {
        let state = State { began: Instant::now(), doing: JOINING.to_owned() };
        let clock = Clock { limit, shared: Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() }) };
        let watched = clock.clone();
        std::thread::Builder::new().name("dm-check-clock".to_owned()).spawn(move || {
            let mut state = watched.state();
            while state.began.elapsed() < limit {
                let left = limit.saturating_sub(state.began.elapsed());
                state = watched.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            }
            let doing = state.doing.clone();
            drop(state);
            let code = late(&doing);
            // Destructors and exit handlers do not run here, because they could wait for what is
            // stuck.
            signal_hook::low_level::exit(i32::from(code))
        })?;
        Ok(clock)
    }

    pub fn elapsed(&self) -> Duration {
        self.state().began.elapsed()
    }

    /// Takes over the beginning of the rank that began first, so that all ranks end at one time.
    /// `elapsed` is how long ago that was.
    fn adopt(&self, elapsed: Duration) {
        let mut state = self.state();
        state.began = Instant::now().checked_sub(elapsed).map_or(state.began, |began| began.min(state.began));
        self.shared.changed.notify_all();
    }

    /// The longest time of one wait. It is long enough for slow networks, and short enough to name
    /// the ranks that are missed before the time is over.
    pub fn patience(&self) -> Duration {
        (self.limit / 4).min(Duration::from_secs(60))
    }

    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// The time that is left for waits.
    pub fn left(&self) -> Duration {
        let waits = self.limit - self.before();
        waits.saturating_sub(self.elapsed())
    }

    /// Whether an error now comes from the end of the time. A rank that began a little earlier may
    /// give up before this rank does, and then this rank finds it lost.
    pub fn is_over(&self) -> bool {
        self.left() <= self.before()
    }

    fn before(&self) -> Duration {
        BEFORE.min(self.limit / 10)
    }

    /// The current step.
    pub fn doing(&self) -> String {
        self.state().doing.clone()
    }

    fn note(&self, doing: &str) {
        doing.clone_into(&mut self.state().doing);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The ranks of the check.
pub struct Team {
    world: Arc<World>,
    /// The host of each rank.
    pub hosts: Vec<String>,
    pub clock: Clock,
    pub progress: Progress,
}

impl Team {
    /// Learns the hosts of all ranks, and when the first rank began. **Collective over the world.**
    pub fn new(world: Arc<World>, clock: Clock, progress: Progress) -> Result<Team> {
        let hosts = world.locations(None, Some(clock.left()))?;
        let hosts = hosts.iter().map(|host| printable(host).into_owned()).collect();
        let team = Team { world, hosts, clock, progress };
        let elapsed = [team.clock.elapsed().as_secs_f64()];
        let first = team.step("comparing the clocks", |exchange| exchange.largest(&elapsed))?[0];
        team.clock.adopt(Duration::try_from_secs_f64(first).unwrap_or_default());
        Ok(team)
    }

    pub fn world(&self) -> &Arc<World> {
        &self.world
    }

    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    pub fn size(&self) -> usize {
        self.world.size()
    }

    pub fn host(&self) -> &str {
        self.hosts.get(self.rank()).map_or("", String::as_str)
    }

    /// Makes a step together with all other ranks. When a rank fails in it, every rank gets the
    /// first failure, with the failed rank and its host. **Collective over the world.**
    pub fn step<T>(&self, what: &str, work: impl FnOnce(&Exchange<'_>) -> Result<T>) -> Result<T> {
        self.clock.note(what);
        self.progress.step(what);
        let wait = self.wait();
        let round = self.world.rendezvous().scope()?.agree(what, &wait)?;
        let exchange = Exchange { team: self, round: &round, wait: &wait, asked: Cell::new(Instant::now()) };
        // The verdict of the step names the rank that failed.
        let outcome = work(&exchange).map_err(|error| error.within(&format!("on {}", self.host())));
        let wait = self.wait();
        if let Err(error) = &outcome {
            round.fail(error, &wait);
        }
        let finished = round.finish(&wait);
        let outcome = finished.and(outcome);
        outcome.map_err(|error| if error.message().contains(what) { error } else { error.within(what) })
    }

    /// A wait in the store.
    fn wait(&self) -> Wait {
        Wait::after((self.clock.patience() + LATER).min(self.clock.left()))
    }
}

/// The values that the ranks give each other in a step. They pass through the store, because the
/// communicators are what is checked.
pub struct Exchange<'a> {
    team: &'a Team,
    round: &'a Round,
    wait: &'a Wait,
    /// When this rank last asked whether another one has failed.
    asked: Cell<Instant>,
}

impl Exchange<'_> {
    /// Gives rank 0 the values of all ranks, by rank. The others get `None`.
    pub fn gather(&self, key: &str, mine: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>> {
        let Exchange { team, round, wait, .. } = self;
        if team.rank() > 0 {
            return round.publish(&format!("{key}/{}", team.rank()), &mine, wait).map(|()| None);
        }
        let others = (1..team.size()).map(|rank| round.fetch(&format!("{key}/{rank}"), rank as i32, wait));
        std::iter::once(Ok(mine)).chain(others).collect::<Result<_>>().map(Some)
    }

    /// Gives every rank the value of rank 0.
    pub fn share(&self, key: &str, of_rank_0: Option<Vec<u8>>) -> Result<Vec<u8>> {
        let Exchange { team, round, wait, .. } = self;
        match of_rank_0 {
            Some(value) => {
                if team.size() > 1 {
                    round.publish(key, &value, wait)?;
                }
                Ok(value)
            }
            None => round.fetch(key, 0, wait),
        }
    }

    /// The time that is left for waits.
    pub fn left(&self) -> Duration {
        self.team.clock.left()
    }

    /// Fails if another rank has failed by now. This is for work that would not notice the
    /// failure. It asks the store once a second at most.
    pub fn alive(&self) -> Result<()> {
        if self.asked.get().elapsed() < ASK {
            return Ok(());
        }
        self.asked.set(Instant::now());
        self.round.failed(self.wait)?.map_or(Ok(()), Err)
    }

    /// Gives for each place the largest of all ranks' numbers.
    pub fn largest(&self, mine: &[f64]) -> Result<Vec<f64>> {
        let all = self.gather("numbers", encode(mine))?;
        let largest = all.map(|all| {
            let mut largest = mine.to_vec();
            for other in &all {
                largest.iter_mut().zip(decode(other)).for_each(|(largest, value)| *largest = largest.max(value));
            }
            encode(&largest)
        });
        let largest = decode(&self.share("largest", largest)?);
        match largest.len() == mine.len() {
            true => Ok(largest),
            false => {
                Err(Error::new(Status::Store, format!("rank 0 published {} numbers for {}", largest.len(), mine.len())))
            }
        }
    }
}

/// Numbers as they pass through the store.
pub fn encode(numbers: &[f64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Reads what [`encode`] has written.
pub fn decode(bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(8).map(|bytes| f64::from_le_bytes(bytes.try_into().unwrap_or_default())).collect()
}
