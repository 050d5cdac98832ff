//! Drives operations to their end: polls them, and waits while all of them are blocked.

use std::cell::Cell;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::operation::Operation;
use crate::outside;
use crate::poll::{Blocker, Poll};
use crate::wait::{BlockedCall, Failed, OwnTime, Wait};

/// Drives one operation to its end.
// Inlined, because most operations are done after their first step.
#[inline(always)]
pub(crate) fn run(operation: &mut dyn Operation) -> Result<()> {
    let mut drive = Drive::default();
    while !drive.step(operation)? {}
    Ok(())
}

/// Returns the facts that the wait needs of a blocked operation. `seen` and `blocker` are the
/// answer of its poll. Returns `None` where the operation has no communicator.
fn blocked_call<'a>(
    operation: &'a dyn Operation,
    (seen, blocker): (u32, Blocker),
    (comm_timeout, own_time): (&'a Cell<Option<Option<Duration>>>, &'a OwnTime),
    call: &'a dyn Fn() -> String,
) -> Option<BlockedCall<'a>> {
    Some(BlockedCall {
        comm: operation.comm()?,
        seen,
        blocker,
        call_timeout: operation.call_timeout(),
        timeout: operation.timeout(),
        default_timeout: operation.default_timeout(),
        comm_timeout,
        is_matched: operation.is_matched(),
        own_time,
        call,
    })
}

/// The waits of one operation, from its beginning to its end.
#[derive(Default)]
pub(crate) struct Drive {
    wait: Wait,
    /// The timeout of the operation's communicator, for [`BlockedCall::comm_timeout`].
    comm_timeout: Cell<Option<Option<Duration>>>,
    /// The time of the operation that counts for its deadline.
    own_time: OwnTime,
}

impl Drive {
    /// Polls the operation once. Waits a while where the operation is blocked. Returns whether the
    /// operation is done.
    #[inline]
    fn step(&mut self, operation: &mut dyn Operation) -> Result<bool> {
        let wait = &mut self.wait;
        let step = operation.poll().and_then(|poll| match poll {
            Poll::Done => {
                operation.comm().into_iter().for_each(|comm| wait.leave(comm));
                operation.end().map(|()| true)
            }
            Poll::Outside => {
                outside::sleep(operation.connection().into_iter(), wait.shortened(outside::SLICE));
                Ok(false)
            }
            Poll::Blocked { seen, blocker } => {
                let (waiting, times) = (&*operation, (&self.comm_timeout, &self.own_time));
                let call = || waiting.describe();
                let blocked = blocked_call(waiting, (seen, blocker), times, &call);
                let blocked = blocked.expect("a blocked operation has a communicator");
                let waited = wait.until_any_may_continue(&[blocked]);
                waited.map(|()| false).map_err(|failed| operation.wait_failed(failed.error))
            }
        });
        step.map_err(|error| self.wait.time(error).within(&operation.describe()))
    }

    /// Drives the operation until it is done, but only until `end`. Returns whether it is done. All
    /// calls for one operation use the same `Drive`, which knows since when the operation waits.
    pub(crate) fn until(&mut self, end: Instant, operation: &mut dyn Operation) -> Result<bool> {
        self.wait.end_at(end);
        loop {
            if self.step(operation)? {
                return Ok(true);
            }
            if Instant::now() >= end {
                return Ok(false);
            }
        }
    }
}

/// A value that is one of several kinds of operations.
pub(crate) trait Holder {
    /// Returns the operation.
    fn operation(&self) -> &dyn Operation;

    /// Returns the operation, for polling it.
    fn operation_mut(&mut self) -> &mut dyn Operation;
}

impl<T: Operation> Holder for T {
    fn operation(&self) -> &dyn Operation {
        self
    }

    fn operation_mut(&mut self) -> &mut dyn Operation {
        self
    }
}

/// Operations that take place one after another. An operation stays where its owner keeps it, and
/// is dropped there as soon as it has ended.
pub(crate) struct Lane<'a, T> {
    /// The operation that takes place now.
    first: &'a mut Option<T>,
    /// The operations that take place later, in their order.
    rest: VecDeque<&'a mut Option<T>>,
    /// The timeout of the communicator of the first operation, for [`BlockedCall::comm_timeout`].
    comm_timeout: Cell<Option<Option<Duration>>>,
    /// The time of the first operation that counts for its deadline.
    own_time: OwnTime,
    /// Whether the operations after one that has failed take place all the same.
    goes_on_after_failure: bool,
}

impl<'a, T: Holder> Lane<'a, T> {
    /// Returns a lane of one operation.
    pub(crate) fn new(first: &'a mut Option<T>) -> Lane<'a, T> {
        Lane {
            first,
            rest: VecDeque::new(),
            comm_timeout: Cell::default(),
            own_time: OwnTime::default(),
            goes_on_after_failure: false,
        }
    }

    /// Makes the operations after one that has failed take place all the same.
    pub(crate) fn going_on_after_failure(mut self) -> Lane<'a, T> {
        self.goes_on_after_failure = true;
        self
    }

    /// Adds an operation at the end.
    pub(crate) fn push(&mut self, operation: &'a mut Option<T>) {
        self.rest.push_back(operation);
    }

    fn first(&self) -> Option<&dyn Operation> {
        self.first.as_ref().map(Holder::operation)
    }

    fn first_mut(&mut self) -> Option<&mut dyn Operation> {
        self.first.as_mut().map(Holder::operation_mut)
    }

    /// Ends the turn of the first operation, which is done, or hands the turn to the next
    /// operation.
    fn end_first(&mut self) -> Result<()> {
        let Some(done) = self.first.as_mut().map(Holder::operation_mut) else { return Ok(()) };
        let next = self.rest.front_mut().and_then(|next| next.as_mut()).map(Holder::operation_mut);
        match (done.pass(), next.and_then(|next| next.pass())) {
            // The next operation has not begun, so its pass holds nothing.
            (Some(pass), Some(next)) => {
                std::mem::swap(pass, next);
                Ok(())
            }
            _ => done.end(),
        }
    }

    /// Whether the lane goes on after another lane has failed while both lanes waited. `blocked` is
    /// the answer of the first operation.
    fn goes_on(&self, blocked: Poll) -> bool {
        match (blocked, self.first().and_then(|operation| operation.comm())) {
            // No communicator can end the operation yet, or the operation itself checks what can
            // end it.
            (Poll::Outside | Poll::Blocked { blocker: Blocker::NewSegment(_), .. }, _) => true,
            (_, comm) => comm.is_some_and(|comm| comm.check_waiting(blocked).is_ok()),
        }
    }

    /// Drops the first operation. The next one becomes the first.
    fn drop_first(&mut self) {
        *self.first = None;
        self.comm_timeout.set(None);
        self.own_time.clear();
        if let Some(next) = self.rest.pop_front() {
            self.first = next;
        }
    }

    /// Drops the first operation, which has failed, and in most lanes those after it. Returns
    /// whether an operation is left.
    fn fail_first(&mut self) -> bool {
        self.drop_first();
        while self.first.is_some() && !self.goes_on_after_failure {
            self.drop_first();
        }
        self.first.is_some()
    }
}

/// Drives all lanes to their ends. When an operation fails, its lane ends, except a lane that goes
/// on after a failure. The lanes whose communicators have failed with it end, too. The other lanes
/// continue, because their peers expect it. Returns the first failure.
pub(crate) fn run_all<T: Holder>(lanes: &mut Vec<Lane<'_, T>>) -> Result<()> {
    let mut wait = Wait::default();
    let mut first = Ok(());
    // Whether an operation has ended since the last wait. The operation after it in its lane has
    // its whole time.
    let mut has_ended = false;
    loop {
        let mut blocked = Vec::with_capacity(lanes.len());
        lanes.retain_mut(|lane| {
            while let Some(operation) = lane.first_mut() {
                let mut polled = operation.poll();
                if polled == Ok(Poll::Done) {
                    polled = lane.end_first().map(|()| Poll::Done);
                }
                let Some(operation) = lane.first() else { break };
                match polled {
                    Ok(Poll::Done) => {
                        operation.comm().into_iter().for_each(|comm| wait.leave(comm));
                        lane.drop_first();
                        has_ended = true;
                    }
                    Ok(waiting) => {
                        blocked.push(waiting);
                        return true;
                    }
                    Err(error) => {
                        let error = wait.time(error).within(&operation.describe());
                        if first.is_ok() {
                            first = Err(error);
                        }
                        if !lane.fail_first() {
                            return false;
                        }
                        has_ended = true;
                    }
                }
            }
            false
        });
        if lanes.is_empty() {
            return first;
        }
        let calls: Vec<_> =
            lanes.iter().map(|lane| || lane.first().map_or_else(String::new, |it| it.describe())).collect();
        let waiting: Vec<_> = lanes
            .iter()
            .zip(&blocked)
            .zip(&calls)
            .filter_map(|((lane, &blocked), call)| {
                let (operation, Poll::Blocked { seen, blocker }) = (lane.first()?, blocked) else { return None };
                blocked_call(operation, (seen, blocker), (&lane.comm_timeout, &lane.own_time), call)
            })
            .collect();
        if std::mem::take(&mut has_ended) {
            wait.end(&waiting);
        }
        if blocked.contains(&Poll::Outside) {
            let outside = lanes.iter().zip(&blocked).filter(|(_, blocked)| **blocked == Poll::Outside);
            let connections = outside.filter_map(|(lane, _)| lane.first()?.connection());
            let longest = if waiting.is_empty() { outside::SLICE } else { outside::MIXED_SLICE };
            outside::sleep(connections, longest);
            if waiting.is_empty() {
                continue;
            }
            wait.look_soon();
        }
        // A failure that is found while waiting belongs to a communicator, so the lanes of this
        // communicator end here.
        if let Err(Failed { call, error }) = wait.until_any_may_continue(&waiting) {
            let mut error = Some(error);
            let described = (waiting[call].call)();
            let mut waiting = 0..;
            let mut blocked = blocked.into_iter();
            lanes.retain_mut(|lane| {
                let blocked = blocked.next().unwrap_or(Poll::Outside);
                let has_failed = blocked != Poll::Outside && waiting.next() == Some(call);
                if has_failed {
                    error = error.take().map(|error| match lane.first_mut() {
                        Some(operation) => operation.wait_failed(error),
                        None => error,
                    });
                }
                if !has_failed && lane.goes_on(blocked) {
                    return true;
                }
                let is_left = lane.fail_first();
                has_ended |= is_left;
                is_left
            });
            if let Some(error) = error.filter(|_| first.is_ok()) {
                first = Err(wait.time(error).within(&described));
            }
        }
    }
}

#[cfg(test)]
mod tests;
