//! Tells the watchers of slow calls for whom a rank waits in a turn.
//!
//! While there is a handler or a queue of events, a rank reads in the store which ranks have come:
//! first when it has waited for a quarter of a second, and again whenever its waiting time has
//! doubled. The thread `dm-events` makes the event.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::Recovery;
use crate::events::{Event, Kind, Waiting, is_watched};
use crate::rank_list::ranges;
use crate::rendezvous::agreement::proposal::absent;
use crate::wait::Wait;

/// How long a rank waits before it first reads who has come.
const FIRST: Duration = Duration::from_millis(250);

/// The wait of this rank in one turn.
pub(super) struct SlowTurn {
    since: Instant,
    /// How long the rank has waited when it reads next who has come.
    next: Duration,
    /// The ranks that had not come at the last look; `None` before the first look.
    absent: Arc<Mutex<Option<Vec<i32>>>>,
    noted: Option<Waiting>,
}

impl SlowTurn {
    pub(super) fn begin() -> SlowTurn {
        SlowTurn { since: Instant::now(), next: FIRST, absent: Arc::default(), noted: None }
    }

    /// Returns how long the rank may sleep until the next look.
    pub(super) fn nap(&self, recovery: &Recovery) -> Duration {
        match is_due(recovery) {
            true => self.next.saturating_sub(self.since.elapsed()),
            false => Duration::MAX,
        }
    }

    /// Reads which ranks of the mesh have not come to turn `number`, where that is due. Where the
    /// store does not answer, the ranks that were known to be absent stay so.
    pub(super) fn look(&mut self, recovery: &Recovery, number: u64, call: &str, wait: &Wait) {
        if self.since.elapsed() < self.next || !is_due(recovery) {
            return;
        }
        self.next = self.since.elapsed() * 2;
        let Ok(here) = recovery.members_here(number, &Recovery::soon(wait)) else { return };
        let missing = absent(&recovery.epoch, &here, &recovery.membership.losses.all(|_| true));
        *self.absent.lock().unwrap_or_else(PoisonError::into_inner) = Some(Recovery::ranks(&missing));
        if self.noted.is_none() {
            self.noted = Some(Waiting::since(self.since, self.described(recovery, call)));
        }
    }

    fn described(&self, recovery: &Recovery, call: &str) -> impl Fn(Duration) -> Option<Event> + Send + Sync + use<> {
        let (known, me, call) = (Arc::clone(&self.absent), recovery.me.rank, call.to_owned());
        let place = (me as usize, recovery.epoch.size);
        let event = Event::new(Kind::Slow, place, recovery.epoch_number, String::new());
        move |waited| {
            let absent = known.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
            let whom = match absent.is_empty() {
                true => "all ranks of the mesh have come, and this rank waits for replacements or for the decision"
                    .to_owned(),
                false => format!("{} did not come", ranges(&absent)),
            };
            let message = format!("rank {me} has waited in {call} for {:.1} s: {whom}", waited.as_secs_f64());
            let operation = Some(call.clone());
            let event = Event { time: SystemTime::now(), operation, waited: Some(waited), message, ..event.clone() };
            Some(event.about(absent))
        }
    }
}

/// Whether anybody wants to know for whom this rank waits. A rank that is not in the mesh waits for
/// its place, and for no rank.
fn is_due(recovery: &Recovery) -> bool {
    is_watched() && recovery.is_in_mesh()
}
