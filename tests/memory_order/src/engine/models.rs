//! The models of the host engine's protocols.

mod decisions;
mod events;
mod failures;
mod joins;
mod messages;
mod offers;
mod steps;
mod turns;

use std::sync::Arc;

use loom::cell::UnsafeCell;
use memory_order::check::Model;

pub(crate) fn all() -> Vec<Model> {
    [
        events::MODELS,
        steps::MODELS,
        failures::MODELS,
        joins::MODELS,
        offers::MODELS,
        messages::MODELS,
        turns::MODELS,
        decisions::MODELS,
    ]
    .into_iter()
    .flatten()
    .map(|model| Model { ..*model })
    .collect()
}

/// Memory that a protocol hands over. loom checks that the protocol orders the accesses.
struct Plain<T>(UnsafeCell<T>);

impl<T: Copy> Plain<T> {
    fn new(value: T) -> Plain<T> {
        Plain(UnsafeCell::new(value))
    }

    fn get(&self) -> T {
        // SAFETY: loom reports a write at the same time.
        self.0.with(|place| unsafe { *place })
    }

    fn set(&self, value: T) {
        // SAFETY: loom reports another access at the same time.
        self.0.with_mut(|place| unsafe { *place = value });
    }
}

/// Starts a thread that shares `state`.
fn spawn<S: 'static>(state: &Arc<S>, run: impl FnOnce(&S) + 'static) -> loom::thread::JoinHandle<()> {
    let state = Arc::clone(state);
    loom::thread::spawn(move || run(&state))
}
