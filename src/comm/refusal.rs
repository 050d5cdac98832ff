//! A rank that refuses its own collective call, for example because of a wrong argument.
//!
//! Such a rank takes no part in the agreement, so the other ranks would wait for it until their
//! deadline. Therefore it tells them. The ranks that make a call of this function then fail at
//! once, with an error that names the rank and quotes the refusal. The refusal counts as a call of
//! the scope on all ranks, so the next call of all ranks meets.
//!
//! Some refusals are not told, because nobody can know which call of the other ranks they concern:
//!
//! - A handle names no mesh.
//! - A dimension is unknown, in a call of the control plane (control.rs) or where a communicator is
//!   made at its first use (lazy.rs). The rank then notes that it may be behind the others.
//! - The list of lost ranks of dm_shrink is wrong in itself (shrink.rs).

use std::time::Duration;

use crate::error::{Error, Result, Status};
use crate::rendezvous::{Scope, begun_by_this_thread};
use crate::wait::{Cancel, Wait};

/// How long the store may take to hear of a refusal. The caller waits for that, and for no other
/// rank.
const TELL: Duration = Duration::from_secs(1);

/// Runs `call`, which is a call of `function` that is collective over `scope`. If this rank refuses
/// the call, the other ranks of the scope are told. `None` is a call in which no other rank can be
/// told. Raising `cancel` ends the telling.
pub(super) fn tell_if_refused<T>(
    scope: Option<&Scope>,
    cancel: Cancel,
    function: &str,
    call: impl FnOnce() -> Result<T>,
) -> Result<T> {
    // A forked child must not speak for its parent.
    let Some(scope) = scope.filter(|_| Error::check_fork().is_ok()) else { return call() };
    on_refusal(call, |error| tell(scope, cancel, function, error))
}

/// Runs `call`, and then `tell` with its error if this rank has refused the call. If the calling
/// thread has begun an agreement in the call or has told of a refusal, the other ranks learn of a
/// failure in this way, and the error is no refusal. Agreements that other threads begin meanwhile
/// do not count.
pub(super) fn on_refusal<T>(call: impl FnOnce() -> Result<T>, tell: impl FnOnce(&Error)) -> Result<T> {
    let before = begun_by_this_thread();
    let outcome = call();
    let has_begun = begun_by_this_thread() != before;
    outcome.inspect_err(|error| {
        if !has_begun && is_refusal(error) {
            tell(error);
        }
    })
}

/// Whether a rank that fails in this way, before it takes part in a call, has refused the call.
fn is_refusal(error: &Error) -> bool {
    matches!(error.status(), Status::InvalidArgument | Status::NotFound | Status::Unsupported | Status::InvalidState)
}

/// Tells the other ranks of `scope` that this rank has refused its call of `function`. Raising
/// `cancel` ends the telling.
pub(super) fn tell(scope: &Scope, cancel: Cancel, function: &str, error: &Error) {
    scope.tell_refusal(function, error, &Wait { cancel, ..Wait::after(TELL) });
}

#[cfg(test)]
mod tests {
    use std::thread::scope;

    use super::*;
    use crate::comm::two_ranks::two_ranks;

    #[test]
    fn a_refusal_is_told_though_another_thread_makes_a_call_meanwhile() {
        two_ranks(|world| match world.rank() {
            0 => {
                let refused = world.tell_if_refused("dm_world_locations", || {
                    // The other thread takes a number of the scope, and ends its call.
                    scope(|threads| threads.spawn(|| world.barrier(None)).join().unwrap())?;
                    Err::<(), _>(Error::invalid("a wrong argument"))
                });
                assert_eq!(refused.unwrap_err().message(), "a wrong argument");
            }
            _ => {
                world.barrier(None).unwrap();
                let error = world.locations(None, None).unwrap_err();
                assert!(error.message().contains("a wrong argument"), "{error}");
            }
        });
    }
}
