//! Finds the calls of this process that wait for long, in the process's own recording and among the
//! waits that are noted in waits.rs.
//!
//! So a slow call is found while its thread is blocked in the host engine, in an agreement of the
//! ranks or in NCCL, and that thread does nothing for the search. dm_stream_wait and dm_recover
//! note their waits themselves.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use recording::RunningCall;

use super::event::{Event, Kind};
use super::subscriber::Subscriber;
use super::waits::{Known, waits};
use crate::recorder::{WaitingCall, describe, running};

/// The slow calls that were reported.
#[derive(Default)]
pub(super) struct SlowCalls {
    /// The time after which a call is reported again, by the number of the subscriber and the call.
    next: HashMap<(u64, Waits), Duration>,
}

/// A call that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Waits {
    /// The call with that number in the recording.
    Recorded(u64),
    /// The wait with that number in waits.rs.
    Noted(u64),
}

impl SlowCalls {
    /// Gives each subscriber an event for each group whose oldest call has waited for the
    /// subscriber's time, and another one whenever that time has doubled.
    pub(super) fn look(&mut self, subscribers: &[Arc<Subscriber>]) {
        let (running, noted) = (running(), waits());
        let is_known = |subscriber: u64| subscribers.iter().any(|known| known.id() == subscriber);
        let lasts = |call: &Waits| match *call {
            Waits::Recorded(number) => running.iter().any(|call| call.number == number),
            Waits::Noted(number) => noted.iter().any(|wait| wait.number == number),
        };
        self.next.retain(|(subscriber, call), _| is_known(*subscriber) && lasts(call));
        for RunningCall { number, time, .. } in running {
            let described = || describe(number, time).map(|waiting| event(waiting, time));
            self.tell_of(Waits::Recorded(number), time, described, subscribers);
        }
        for Known { number, since, describe } in noted {
            let time = since.elapsed();
            self.tell_of(Waits::Noted(number), time, || describe(time), subscribers);
        }
    }

    fn tell_of(
        &mut self,
        call: Waits,
        time: Duration,
        described: impl FnOnce() -> Option<Event>,
        subscribers: &[Arc<Subscriber>],
    ) {
        let next = |known: &&Arc<Subscriber>| {
            let next = self.next.get(&(known.id(), call));
            time >= next.copied().unwrap_or(known.slow())
        };
        let due: Vec<&Arc<Subscriber>> = subscribers.iter().filter(next).collect();
        if due.is_empty() {
            return;
        }
        // The next time is set first. So a call that has no description, or whose description
        // panics, is not looked at again at once.
        self.next.extend(due.iter().map(|known| ((known.id(), call), time.saturating_mul(2))));
        described().iter().for_each(|event| due.iter().for_each(|known| known.queue().push(event.clone())));
    }
}

fn event(call: WaitingCall, waited: Duration) -> Event {
    Event {
        kind: Kind::Slow,
        time: SystemTime::now(),
        rank: call.rank,
        world_size: call.world_size,
        epoch: call.epoch,
        ranks: call.missing,
        group: Some(call.group),
        dimension: call.dimension,
        operation: Some(call.operation),
        call: Some(call.number),
        waited: Some(waited),
        dropped: 0,
        message: call.message,
    }
}
