//! Turns: one call of this rank at a time is inside a place.

use std::sync::Arc;
use std::time::Duration;

use loom::sync::atomic::{AtomicBool, Ordering};
use memory_order::check::Model;

use super::Plain;
use crate::call_name::{NAME_BYTES, Name};
use crate::comm::Comm;
use crate::event::{Watch, sleep};
use crate::places::{Place, Places};
use crate::poll::Poll;
use crate::segment::Segment;
use crate::turn::Pass;

pub(super) const MODELS: &[Model] = &[
    Model { name: "turn: two calls", preemptions: Some(3), waitv: true, run: two_calls },
    Model { name: "turn: one call after another", preemptions: Some(3), waitv: true, run: one_after_another },
    Model { name: "turn: nobody is inside", preemptions: Some(3), waitv: true, run: nobody_is_inside },
    Model { name: "turn: no collective is inside", preemptions: Some(3), waitv: true, run: no_collective_is_inside },
];

/// A place that only one call at a time may use.
fn call(comm: &Comm, inside: &Plain<u64>, tag: u64) {
    call_and(comm, inside, tag, || ());
}

/// Makes a call that does `more` while it is inside.
fn call_and(comm: &Comm, inside: &Plain<u64>, tag: u64, more: impl FnOnce()) {
    let mut pass = Pass::new(Place::Collectives, Name { tag, text: [0; NAME_BYTES] });
    while let Some(blocked) = pass.enter(comm, || "a call".to_owned()).unwrap() {
        let Poll::Blocked { seen, .. } = blocked else { unreachable!("a turn has a word to wait on") };
        sleep(&[Watch { event: &comm.places.changed, seen }], None, Duration::MAX);
    }
    more();
    inside.set(tag);
    assert_eq!(inside.get(), tag);
    pass.leave(comm).unwrap();
}

fn start() -> (Arc<Comm>, Arc<Plain<u64>>) {
    (Comm::new(&Segment::new(), 0), Arc::new(Plain::new(0)))
}

/// Two threads call under two names.
fn two_calls() {
    let (comm, inside) = start();
    let (other, there) = (comm.clone(), inside.clone());
    let thread = loom::thread::spawn(move || call(&other, &there, 6));
    call(&comm, &inside, 5);
    thread.join().unwrap();
}

/// Two threads call under two names, one of them twice.
fn one_after_another() {
    let (comm, inside) = start();
    let (other, there) = (comm.clone(), inside.clone());
    let thread = loom::thread::spawn(move || [6, 7].map(|tag| call(&other, &there, tag)));
    call(&comm, &inside, 5);
    thread.join().unwrap();
}

/// A thread that knows of a call, and finds that no call is under way, sees what the call has
/// written.
fn nobody_is_inside() {
    finds_no_call(Places::is_busy);
}

/// Does what `nobody_is_inside` does, with the question that is for collectives alone.
fn no_collective_is_inside() {
    finds_no_call(Places::has_collective);
}

fn finds_no_call(is_under_way: fn(&Places) -> bool) {
    let (comm, inside) = start();
    let has_begun = Arc::new(AtomicBool::new(false));
    let (other, there, begins) = (comm.clone(), inside.clone(), has_begun.clone());
    let thread = loom::thread::spawn(move || {
        call_and(&other, &there, 6, || begins.store(true, Ordering::Release));
    });
    if has_begun.load(Ordering::Acquire) && !is_under_way(&comm.places) {
        assert_eq!(inside.get(), 6);
    }
    thread.join().unwrap();
}
