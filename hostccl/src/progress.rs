//! Drives operations to their end: polls them, and waits while all of them are blocked.

use std::collections::VecDeque;

use crate::error::Result;
use crate::operation::Operation;
use crate::outside;
use crate::poll::Poll;
use crate::wait::{BlockedCall, Wait};

/// Drives one operation to its end.
pub(crate) fn run(operation: &mut dyn Operation) -> Result<()> {
    let mut wait = Wait::default();
    loop {
        let step = operation.poll().and_then(|poll| match poll {
            Poll::Done => {
                operation.comm().into_iter().for_each(|comm| wait.leave(comm));
                operation.end().map(|()| true)
            }
            Poll::Outside => {
                outside::sleep(operation.connection().into_iter(), outside::SLICE);
                Ok(false)
            }
            Poll::Blocked { seen, blocker } => {
                let comm = operation.comm().expect("a blocked operation has a communicator");
                let (timeout, default_timeout) = (operation.timeout(), operation.default_timeout());
                let call = &|| operation.describe();
                wait.until_any_may_continue(&[BlockedCall { comm, seen, blocker, timeout, default_timeout, call }])
                    .map(|()| false)
            }
        });
        match step {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) => return Err(wait.time(error).within(&operation.describe())),
        }
    }
}

/// Operations that take place one after another.
pub(crate) type Lane<'a> = VecDeque<Box<dyn Operation + 'a>>;

/// Drives all lanes to their ends. When an operation fails, its lane ends, and the other lanes
/// continue, because their peers expect it. Returns the first failure.
pub(crate) fn run_all(lanes: &mut Vec<Lane<'_>>) -> Result<()> {
    let mut wait = Wait::default();
    let mut first = Ok(());
    loop {
        let mut blocked = Vec::with_capacity(lanes.len());
        lanes.retain_mut(|lane| {
            while let Some(operation) = lane.front_mut() {
                let mut polled = operation.poll();
                if polled == Ok(Poll::Done) {
                    let mut first_two = lane.iter_mut();
                    let passes =
                        first_two.next().and_then(|it| it.pass()).zip(first_two.next().and_then(|it| it.pass()));
                    match passes {
                        // The next operation has not begun, so its pass holds nothing.
                        Some((pass, next)) => std::mem::swap(pass, next),
                        None => polled = lane[0].end().map(|()| Poll::Done),
                    }
                }
                let operation = &lane[0];
                match polled {
                    Ok(Poll::Done) => {
                        operation.comm().into_iter().for_each(|comm| wait.leave(comm));
                        lane.pop_front();
                    }
                    Ok(Poll::Blocked { seen, blocker }) => {
                        blocked.push(Some((seen, blocker)));
                        return true;
                    }
                    Ok(Poll::Outside) => {
                        blocked.push(None);
                        return true;
                    }
                    Err(error) => {
                        let error = wait.time(error).within(&operation.describe());
                        if first.is_ok() {
                            first = Err(error);
                        }
                        return false;
                    }
                }
            }
            false
        });
        if lanes.is_empty() {
            return first;
        }
        let calls: Vec<_> =
            lanes.iter().map(|lane| || lane.front().map_or_else(String::new, |it| it.describe())).collect();
        let waiting: Vec<_> = lanes
            .iter()
            .zip(&blocked)
            .zip(&calls)
            .filter_map(|((lane, &blocked), call)| {
                let (operation, (seen, blocker)) = (lane.front()?, blocked?);
                let (timeout, default_timeout) = (operation.timeout(), operation.default_timeout());
                Some(BlockedCall { comm: operation.comm()?, seen, blocker, timeout, default_timeout, call })
            })
            .collect();
        if blocked.contains(&None) {
            let outside = lanes.iter().zip(&blocked).filter(|(_, blocked)| blocked.is_none());
            let connections = outside.filter_map(|(lane, _)| lane.front()?.connection());
            let longest = if waiting.is_empty() { outside::SLICE } else { outside::MIXED_SLICE };
            outside::sleep(connections, longest);
            if waiting.is_empty() {
                continue;
            }
            wait.look_soon();
        }
        // A failure that is found while waiting belongs to a communicator, so the lanes of this
        // communicator end here.
        if let Err(error) = wait.until_any_may_continue(&waiting) {
            let failed = lanes.iter().find_map(|lane| {
                let operation = lane.front()?;
                operation.comm()?.check().is_err().then(|| operation.describe())
            });
            let error = failed.iter().fold(wait.time(error), |error, call| error.within(call));
            if first.is_ok() {
                first = Err(error);
            }
            lanes.retain(|lane| {
                lane.front().and_then(|operation| operation.comm()).is_some_and(|comm| comm.check().is_ok())
            });
        }
    }
}
