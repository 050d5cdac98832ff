//! A rank that refuses its own collective call, for example because of a wrong argument.
//!
//! Such a rank takes no part in the agreement, so the other ranks would wait for it until their
//! deadline. Therefore it tells them. The ranks that make a call of this function then fail at once,
//! with an error that names the rank and quotes the refusal. The refusal counts as a call of the
//! scope on all ranks, so the next call of all ranks meets.
//!
//! Two kinds of refusals are not told, because nobody can know which call of the other ranks they
//! concern: a handle that names no mesh, and an unknown dimension where a communicator is made at
//! its first use. In the second case the rank notes that it may be behind the others.

use std::sync::Arc;
use std::time::Duration;

use super::communicator::State;
use super::root::RootComms;
use super::view::View;
use super::world::World;
use crate::error::{Result, Status};
use crate::rendezvous::Scope;
use crate::wait::{Cancel, Wait};

/// How long the store may take to hear of a refusal. The caller waits for that, and for no other
/// rank.
const TELL: Duration = Duration::from_secs(1);

impl World {
    /// Runs `call`, which is a call of `function` that is collective over this world. If this rank
    /// refuses the call, the other ranks are told.
    pub(crate) fn tell_if_refused<T>(&self, function: &str, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let scope = self.rendezvous().scope().ok().filter(|_| self.alive().is_ok());
        run(scope, self.cancel(), function, call)
    }
}

impl RootComms {
    /// Runs `call`, which is a call of `function` that is collective over this root. If this rank
    /// refuses the call, the other ranks are told.
    pub(super) fn tell_if_refused<T>(&self, function: &str, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let takes_part = self.world().is_some() && self.mesh().is_member() && self.alive().is_ok();
        run(self.scope().filter(|_| takes_part), self.cancel().clone(), function, call)
    }

    /// Notes that this rank has refused a call that may have been the first use of a communicator.
    /// The other ranks may wait for that use until their deadline.
    pub(super) fn note_refused_first_use(&self) {
        for communicator in self.dim_communicators().iter().filter(|_| self.is_lazy()) {
            if communicator.state() == State::Unmade && communicator.group().size() > 1 {
                // Without a scope this rank cannot make the communicator, and learns of that when it
                // tries.
                let _ = self.scope_of_first_use(communicator).map(Scope::may_be_behind);
            }
        }
    }
}

impl View {
    /// Runs `call`, which is a call of `function` that is collective over the root mesh. If this
    /// rank refuses the call, the other ranks are told.
    pub(crate) fn tell_if_refused<T>(&self, function: &str, call: impl FnOnce() -> Result<T>) -> Result<T> {
        self.space().tell_if_refused(function, call)
    }
}

fn run<T>(scope: Option<&Arc<Scope>>, cancel: Cancel, function: &str, call: impl FnOnce() -> Result<T>) -> Result<T> {
    let Some(scope) = scope else { return call() };
    let begun = scope.calls_begun();
    let outcome = call();
    if let Err(error) = &outcome {
        let is_refusal = matches!(error.status(), Status::InvalidArgument | Status::NotFound | Status::Unsupported);
        // A call that has begun its agreement has told the other ranks of its failure itself.
        if is_refusal && scope.calls_begun() == begun {
            scope.tell_refusal(function, error, &Wait { cancel, ..Wait::after(TELL) });
        }
    }
    outcome
}
