//! Operations under way: each a state machine that never blocks, and the loop that drives several of them to their end.

use std::sync::Arc;
use std::time::Duration;

use crate::comm::{Blocker, Comm};
use crate::error::Result;
use crate::turn::Pass;
use crate::wait::{Idle, Waiting};

/// Where an operation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Poll {
    Done,
    /// Nothing to do before the blocker's word differs from `seen`.
    Blocked {
        seen: u32,
        blocker: Blocker,
    },
}

/// A resumable operation.
pub(crate) trait Operation {
    /// Goes on as far as possible without waiting.
    fn poll(&mut self) -> Result<Poll>;

    /// The communicator it waits on; there is one whenever `poll` has said it is blocked.
    fn comm(&self) -> Option<&Arc<Comm>>;

    /// How long it may wait without progress when `HOSTCCL_TIMEOUT_MS` does not say.
    fn patience(&self) -> Option<Duration> {
        None
    }

    /// The call with its values, for messages.
    fn describe(&self) -> String;

    /// Its turn, for the next operation of its lane: other threads' calls of the same name stay outside until the lane has ended.
    fn take_pass(&mut self) -> Option<Pass> {
        None
    }

    /// Takes over the turn of the operation before it.
    fn give_pass(&mut self, _pass: Pass) {}

    /// Ends its turn when it is done; fails when its result may belong to another call.
    fn end(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Drives one operation to its end.
pub(crate) fn run(operation: &mut dyn Operation) -> Result<()> {
    let mut idle = Idle::default();
    loop {
        let step = operation.poll().and_then(|poll| match poll {
            Poll::Done => operation.end().map(|()| true),
            Poll::Blocked { seen, blocker } => {
                let comm = operation.comm().expect("a blocked operation has a communicator");
                let patience = operation.patience();
                idle.wait(&[Waiting { comm, seen, blocker, patience, call: &|| operation.describe() }]).map(|()| false)
            }
        });
        match step {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) => return Err(error.within(&operation.describe())),
        }
    }
}

/// Operations that take place one after another.
pub(crate) type Lane<'a> = std::collections::VecDeque<Box<dyn Operation + 'a>>;

/// Drives all lanes to their ends. When an operation fails its lane ends, the others go on as their peers expect; the
/// first failure is returned.
pub(crate) fn run_all(lanes: &mut Vec<Lane<'_>>) -> Result<()> {
    let mut idle = Idle::default();
    let mut first = Ok(());
    loop {
        let mut blocked = Vec::with_capacity(lanes.len());
        lanes.retain_mut(|lane| {
            while let Some(operation) = lane.front_mut() {
                let mut polled = operation.poll();
                if polled == Ok(Poll::Done) {
                    let pass = if lane.len() > 1 { lane[0].take_pass() } else { None };
                    match (pass, lane.get_mut(1)) {
                        (Some(pass), Some(next)) => next.give_pass(pass),
                        _ => polled = lane[0].end().map(|()| Poll::Done),
                    }
                }
                let operation = &lane[0];
                match polled {
                    Ok(Poll::Done) => {
                        lane.pop_front();
                    }
                    Ok(Poll::Blocked { seen, blocker }) => {
                        blocked.push((seen, blocker));
                        return true;
                    }
                    Err(error) => {
                        let error = error.within(&operation.describe());
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
        let waits: Vec<_> = lanes
            .iter()
            .zip(&blocked)
            .zip(&calls)
            .filter_map(|((lane, &(seen, blocker)), call)| {
                let operation = lane.front()?;
                Some(Waiting { comm: operation.comm()?, seen, blocker, patience: operation.patience(), call })
            })
            .collect();
        // A failure found while waiting is the communicator's: its lanes meet it when polled next.
        if let Err(error) = idle.wait(&waits) {
            let blame = lanes.iter().find_map(|lane| {
                let operation = lane.front()?;
                operation.comm()?.check().is_err().then(|| operation.describe())
            });
            let error = blame.iter().fold(error, |error, call| error.within(call));
            if first.is_ok() {
                first = Err(error);
            }
            lanes.retain(|lane| {
                lane.front().and_then(|operation| operation.comm()).is_some_and(|comm| comm.check().is_ok())
            });
        }
    }
}
