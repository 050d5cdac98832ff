//! Decisions: where ranks begin calls in different orders, rank 0 decides which goes first, and all
//! ranks follow.

use std::sync::Arc;

use memory_order::check::Model;

use super::Plain;
use crate::admission::Admission;
use crate::call_name::{NAME_BYTES, Name};
use crate::comm::Comm;
use crate::segment::Segment;

pub(super) const MODELS: &[Model] =
    &[Model { name: "decision: which name goes first", preemptions: Some(2), waitv: true, run: which_goes_first }];

/// One rank begins calls under these two tags, in this order. The ranks have found different names
/// in the first step. Returns when the ranks have compared which call each has begun.
fn rank(comm: &Arc<Comm>, tags: [u64; 2], first: &[Plain<u64>; 2]) {
    let mut calls = tags.map(|tag| Admission::new(Name { tag, text: [tag as u8; NAME_BYTES] }));
    assert!(calls[0].poll(comm, String::new).unwrap().is_none());
    end_step(comm);
    calls[0].withdraw(comm);
    let begun = loop {
        let [one, two] = &mut calls;
        match [one, two].map(|call| call.poll(comm, String::new).unwrap()) {
            [Some(one), Some(two)] => comm.sleep([one, two]),
            [None, Some(_)] => break tags[0],
            [Some(_), None] => break tags[1],
            [None, None] => panic!("both calls go first"),
        }
    };
    first[comm.rank].set(begun);
    end_step(comm);
    assert_eq!(first[0].get(), first[1].get(), "the ranks go on with different calls");
    calls.into_iter().for_each(|mut call| call.pass.leave(comm).unwrap());
}

fn end_step(comm: &Comm) {
    comm.end_step();
    while let Some(blocked) = comm.step_blocked() {
        comm.sleep([blocked]);
    }
}

fn which_goes_first() {
    let segment = Segment::new();
    let first = Arc::new([Plain::new(0), Plain::new(0)]);
    let [zero, one] = [0, 1].map(|rank| Comm::new(&segment, rank));
    let there = first.clone();
    let thread = loom::thread::spawn(move || rank(&one, [6, 5], &there));
    rank(&zero, [5, 6], &first);
    thread.join().unwrap();
}
