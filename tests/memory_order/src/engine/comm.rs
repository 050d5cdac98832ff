//! One rank's end of a communicator, as far as messages and turns use it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::blame::Blame;
use crate::error::{Error, Result};
use crate::event::{self, Event, Watch};
use crate::labels::Labels;
use crate::message::Message;
use crate::operation::Operation;
use crate::places::Places;
use crate::poll::{Blocker, Poll};
use crate::segment::Segment;
use crate::types::ncclResult_t;

pub(crate) struct Comm {
    pub(crate) segment: Segment,
    pub(crate) rank: usize,
    pub(crate) nranks: usize,
    pub(crate) places: Places,
    pub(crate) labels: Labels,
    /// The ranks on other hosts.
    pub(crate) span: Option<()>,
    /// How many steps this rank has ended.
    step: AtomicU64,
}

impl Comm {
    pub(crate) fn new(segment: &Segment, rank: usize) -> Arc<Comm> {
        let (segment, nranks) = (segment.clone(), 2);
        let places = Places::new(nranks);
        // loom gets to know the lock before there are threads.
        drop(places.lock());
        Arc::new(Comm { segment, rank, nranks, places, labels: Labels, span: None, step: AtomicU64::new(0) })
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.segment.header().failure.error().map_or(Ok(()), Err)
    }

    pub(crate) fn check_waiting(&self, blocked: Poll) -> Result<Poll> {
        self.check().map(|()| blocked).or_else(|error| match blocked {
            Poll::Blocked { seen, blocker } if self.event(blocker).value() != seen => Ok(blocked),
            _ => Err(error),
        })
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        self.check()
    }

    pub(crate) fn step(&self) -> u64 {
        self.step.load(Ordering::Relaxed)
    }

    pub(crate) fn end_step(&self) {
        let step = self.step() + 1;
        self.step.store(step, Ordering::Relaxed);
        let seat = self.segment.seat(self.rank);
        seat.step.store(step as u32);
        seat.end_of(step).set(step as u32);
    }

    pub(crate) fn step_blocked(&self) -> Option<Poll> {
        let step = self.step();
        let seen = self.event(Blocker::Step(step)).value();
        (seen != step as u32).then_some(Poll::Blocked { seen, blocker: Blocker::Step(step) })
    }

    pub(crate) fn is_crowded(&self) -> bool {
        true
    }

    pub(crate) fn whole(&self) -> (usize, usize) {
        (self.rank, self.nranks)
    }

    pub(crate) fn label(&self, rank: usize) -> String {
        format!("rank {rank}")
    }

    pub(crate) fn own_label(&self) -> String {
        self.label(self.rank)
    }

    pub(crate) fn fail(&self, code: ncclResult_t, blame: Blame, message: &str) -> Error {
        self.fail_whole(code, blame, message, "")
    }

    pub(crate) fn fail_whole(&self, code: ncclResult_t, blame: Blame, message: &str, call: &str) -> Error {
        self.segment.header().fail(code, &blame, message, call);
        Error::new(code, message)
    }

    fn event(&self, blocker: Blocker) -> &Event {
        match blocker {
            Blocker::From(peer) => &self.segment.channel(peer, self.rank).head,
            Blocker::To { peer, .. } => &self.segment.channel(self.rank, peer).tail,
            Blocker::Step(step) => self.segment.seat(1 - self.rank).end_of(step),
            Blocker::CommonName(_) => &self.segment.header().wants,
            Blocker::Decision(_) => &self.segment.header().verdict,
            Blocker::Turn => &self.places.changed,
            Blocker::OtherCall(peer) => &self.segment.channel(peer, self.rank).order,
            _ => unreachable!("no model waits for {blocker:?}"),
        }
    }

    /// Polls operations until all are done, and sleeps on the words on which the engine sleeps.
    pub(crate) fn drive_all(&self, mut operations: Vec<&mut Message>) -> Result<()> {
        while !operations.is_empty() {
            let mut watches = Vec::new();
            let before = operations.len();
            let mut next = Vec::new();
            for operation in operations {
                match operation.poll()? {
                    Poll::Done => operation.end()?,
                    Poll::Blocked { seen, blocker } => {
                        self.watch(&mut watches, blocker, seen);
                        next.push(operation);
                    }
                    Poll::Outside => unreachable!("no model waits for a connection"),
                }
            }
            operations = next;
            if operations.len() == before {
                watches.push(Watch { event: &self.segment.header().alarm, seen: 0 });
                event::sleep(&watches, Some(self.segment.bell(self.rank)), Duration::MAX);
            }
        }
        Ok(())
    }

    /// Sleeps until one of the words changes for which operations wait.
    pub(crate) fn sleep(&self, blocked: impl IntoIterator<Item = Poll>) {
        let mut watches = Vec::new();
        for poll in blocked {
            let Poll::Blocked { seen, blocker } = poll else { unreachable!("the operations wait for words") };
            self.watch(&mut watches, blocker, seen);
        }
        event::sleep(&watches, None, Duration::MAX);
    }

    /// Adds the words for which a blocked operation waits.
    fn watch<'a>(&'a self, watches: &mut Vec<Watch<'a>>, blocker: Blocker, seen: u32) {
        watches.push(Watch { event: self.event(blocker), seen });
        if let Blocker::To { peer, order } = blocker {
            watches.push(Watch { event: &self.segment.channel(self.rank, peer).order, seen: order });
        }
    }
}
