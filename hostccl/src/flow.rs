//! Operations that are written as `async` functions.
//!
//! A collective over several hosts waits at many places. In a state machine that is written by
//! hand, each place would be a state. So the compiler makes the state machine: a [`Flow`] is a
//! future that is polled like any other operation. A future that has to wait notes what it waits
//! for, and the flow's `poll` returns that note.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{self, Context, Waker};

use crate::error::Result;
use crate::poll::Poll;

thread_local! {
    /// The reason why the future that this thread polls cannot continue.
    static BLOCKED: Cell<Option<Poll>> = const { Cell::new(None) };
}

/// A future with the result `T`, which is polled until it is done.
pub(crate) struct Flow<'a, T>(Pin<Box<dyn Future<Output = Result<T>> + 'a>>);

// SAFETY: the futures of this crate hold communicators, requests and memory, which may go to
// another thread, and buffers of the caller, who promises that these are valid on whatever thread.
unsafe impl<T> Send for Flow<'_, T> {}

impl<'a, T> Flow<'a, T> {
    pub(crate) fn new(future: impl Future<Output = Result<T>> + 'a) -> Flow<'a, T> {
        Flow(Box::pin(future))
    }

    /// Does as much as is possible without waiting. Returns the result, or what the flow waits for.
    /// A flow that is done is not polled again.
    pub(crate) fn poll(&mut self) -> Result<std::result::Result<T, Poll>> {
        match self.0.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            task::Poll::Ready(result) => result.map(Ok),
            task::Poll::Pending => Ok(Err(BLOCKED.take().expect("a future that waits says for what"))),
        }
    }
}

/// Waits until `test` answers `None`. Until then, the answer of `test` says what to wait for. Fails
/// when `test` fails.
pub(crate) async fn wait(mut test: impl FnMut() -> Result<Option<Poll>>) -> Result<()> {
    poll_fn(|_| match test() {
        Ok(None) => task::Poll::Ready(Ok(())),
        Ok(blocked) => {
            BLOCKED.set(blocked);
            task::Poll::Pending
        }
        Err(error) => task::Poll::Ready(Err(error)),
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::poll::Blocker;

    #[test]
    fn a_flow_says_what_it_waits_for() {
        let word = Cell::new(0);
        let blocked = |seen| Poll::Blocked { seen, blocker: Blocker::Arrivals };
        let mut flow = Flow::new(async {
            wait(|| Ok((word.get() < 1).then_some(blocked(0)))).await?;
            wait(|| Ok((word.get() < 2).then_some(blocked(1)))).await?;
            wait(|| if word.get() < 3 { Ok(Some(blocked(2))) } else { Err(Error::usage("three")) }).await?;
            Ok(7)
        });
        assert_eq!(flow.poll(), Ok(Err(blocked(0))));
        word.set(2);
        assert_eq!(flow.poll(), Ok(Err(blocked(2))));
        word.set(3);
        assert_eq!(flow.poll(), Err(Error::usage("three")));
    }
}
