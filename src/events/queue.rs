//! A queue of events with a limit, and with a descriptor where somebody polls it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hostccl::fork::Private;
use rustix::event::{EventfdFlags, eventfd};

use super::event::{Event, Kind};
use crate::error::{Error, Result};
use crate::wait::Deadline;

/// The most events that a queue holds.
const MOST: usize = 256;

/// Events that wait for their reader.
pub(super) struct Queue {
    pending: Mutex<Pending>,
    /// Wakes the threads that wait for an event.
    arrived: Condvar,
    /// The eventfd that is readable while there are events; `None` where nobody polls.
    descriptor: Option<Private<OwnedFd>>,
}

#[derive(Default)]
struct Pending {
    events: VecDeque<Event>,
    /// How many events were left out since the last one that found a place.
    dropped: u64,
}

impl Queue {
    /// A queue without a descriptor.
    pub(super) fn new() -> Queue {
        Queue { pending: Mutex::default(), arrived: Condvar::new(), descriptor: None }
    }

    /// A queue with a descriptor.
    pub(super) fn with_descriptor() -> Result<Queue> {
        let made = Private::open(|| Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
        let made = made.map_err(|cause| Error::store_io("no descriptor for a queue of events", &cause))?;
        Ok(Queue { descriptor: Some(made), ..Queue::new() })
    }

    /// The descriptor of [`with_descriptor`](Queue::with_descriptor).
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_ref().expect("a queue that is polled has a descriptor").as_fd()
    }

    /// Adds an event, or counts the event as left out where the queue is full. A slow call gives
    /// further events while it lasts, so in a full queue an event of another kind takes the place
    /// of the last slow call.
    pub(super) fn push(&self, event: Event) {
        let mut pending = self.lock();
        if pending.events.len() == MOST {
            pending.dropped += 1;
            let slow = pending.events.iter().rposition(|known| known.kind == Kind::Slow);
            let Some(slow) = slow.filter(|_| event.kind != Kind::Slow) else { return };
            let left_out = pending.events.remove(slow).map_or(0, |slow| slow.dropped);
            pending.dropped += left_out;
        }
        let dropped = std::mem::take(&mut pending.dropped);
        pending.events.push_back(Event { dropped, ..event });
        if let Some(descriptor) = self.descriptor.as_ref().filter(|_| pending.events.len() == 1) {
            // The counter is 0 now, so this does not block.
            let _ = rustix::io::write(&**descriptor, &1u64.to_ne_bytes());
        }
        self.arrived.notify_one();
    }

    /// Takes the first event, and calls `note` before another thread can use the queue.
    pub(super) fn pop_noting(&self, note: impl FnOnce()) -> Option<Event> {
        let mut pending = self.lock();
        let event = self.take(&mut pending);
        event.inspect(|_| note())
    }

    /// Takes all events, and the number of those that were left out after them.
    pub(super) fn take_all(&self) -> (Vec<Event>, u64) {
        let mut pending = self.lock();
        (std::iter::from_fn(|| self.take(&mut pending)).collect(), std::mem::take(&mut pending.dropped))
    }

    /// Counts events that were left out.
    pub(super) fn leave_out(&self, count: u64) {
        self.lock().dropped += count;
    }

    /// Takes the first event. Waits for one, but no longer than `timeout`.
    pub(super) fn pop_within(&self, timeout: Duration) -> Option<Event> {
        let deadline = Deadline::after(timeout);
        let mut pending = self.lock();
        while pending.events.is_empty() && !deadline.passed() {
            pending = self.arrived.wait_timeout(pending, deadline.left()).unwrap_or_else(PoisonError::into_inner).0;
        }
        self.take(&mut pending)
    }

    /// Whether there is no event.
    pub(super) fn is_empty(&self) -> bool {
        self.lock().events.is_empty()
    }

    fn take(&self, pending: &mut Pending) -> Option<Event> {
        let event = pending.events.pop_front()?;
        if let Some(descriptor) = self.descriptor.as_ref().filter(|_| pending.events.is_empty()) {
            let _ = rustix::io::read(&**descriptor, &mut [0; 8]);
        }
        Some(event)
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn event(number: u64) -> Event {
        Event::new(Kind::Joined, (0, 1), number, String::new())
    }

    fn pop(queue: &Queue) -> Option<Event> {
        queue.pop_noting(|| ())
    }

    fn is_readable(queue: &Queue) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&queue.descriptor(), PollFlags::IN)], Some(&now)).unwrap() > 0
    }

    #[test]
    fn the_descriptor_is_readable_while_there_are_events() {
        let queue = Queue::with_descriptor().unwrap();
        assert!(!is_readable(&queue) && pop(&queue).is_none());
        queue.push(event(1));
        queue.push(event(2));
        assert!(is_readable(&queue) && is_readable(&queue));
        assert_eq!(queue.pop_within(Duration::ZERO).unwrap().epoch, 1);
        assert!(is_readable(&queue));
        assert_eq!(pop(&queue).unwrap().epoch, 2);
        assert!(!is_readable(&queue) && queue.pop_within(Duration::from_millis(1)).is_none());
    }

    #[test]
    fn a_full_queue_keeps_the_first_events_and_counts_the_others() {
        let queue = Queue::new();
        (0..MOST as u64 + 3).for_each(|number| queue.push(event(number)));
        assert_eq!(pop(&queue).map(|event| (event.epoch, event.dropped)), Some((0, 0)));
        queue.push(event(1000));
        queue.push(event(1001));
        let rest: Vec<(u64, u64)> = std::iter::from_fn(|| pop(&queue)).map(|it| (it.epoch, it.dropped)).collect();
        assert_eq!(rest.len(), MOST);
        assert_eq!(rest[MOST - 2..], [(MOST as u64 - 1, 0), (1000, 3)]);
    }

    #[test]
    fn in_a_full_queue_a_slow_call_makes_room_for_another_event() {
        let queue = Queue::new();
        let slow = |number| Event { kind: Kind::Slow, ..event(number) };
        queue.push(event(0));
        (1..MOST as u64 + 3).for_each(|number| queue.push(slow(number)));
        queue.push(Event { kind: Kind::Lost, ..event(1000) });
        queue.push(Event { kind: Kind::Aborted, ..event(1001) });
        let all: Vec<Event> = std::iter::from_fn(|| pop(&queue)).collect();
        assert_eq!(all.len(), MOST);
        let last: Vec<(Kind, u64, u64)> = all[MOST - 3..].iter().map(|it| (it.kind, it.epoch, it.dropped)).collect();
        // Three slow calls found no place, and each of the two later events has taken one's place.
        let expected = [(Kind::Slow, MOST as u64 - 3, 0), (Kind::Lost, 1000, 4), (Kind::Aborted, 1001, 1)];
        assert_eq!(last, expected);
    }

    #[test]
    fn a_reader_that_waits_is_woken() {
        let queue = Queue::new();
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| queue.pop_within(Duration::from_secs(60)));
            queue.push(event(7));
            assert_eq!(reader.join().unwrap().unwrap().epoch, 7);
        });
    }
}
