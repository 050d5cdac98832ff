//! Messages from rank 0 to rank 1: the bytes in the ring and beside the counter, and the sends that
//! go first because the receiver waits for their names.

use std::sync::Arc;

use memory_order::check::Model;

use super::{Plain, spawn};
use crate::call_name::{NAME_BYTES, Name};
use crate::comm::Comm;
use crate::message::{Message, Side};
use crate::segment::{Expected, Segment};
use crate::types::DataType;

pub(super) const MODELS: &[Model] = &[
    Model { name: "message: one", preemptions: Some(2), waitv: true, run: one::<LONG> },
    Model { name: "message: two fill the ring", preemptions: Some(2), waitv: true, run: two::<LONG> },
    Model { name: "message: two short ones", preemptions: Some(2), waitv: true, run: two::<1> },
    Model { name: "message: another name first", preemptions: Some(1), waitv: true, run: another_name_first::<LONG> },
    Model { name: "message: another short one first", preemptions: Some(1), waitv: true, run: another_name_first::<1> },
    Model { name: "message: looked at twice", preemptions: Some(3), waitv: true, run: looked_at_twice },
    Model { name: "message: the name in errors", preemptions: Some(3), waitv: true, run: name_in_errors },
];

/// The number of elements of a message whose bytes are in the ring. The message fills the ring.
const LONG: usize = 8;

fn name(tag: u64) -> Name {
    Name { tag, text: [tag as u8; NAME_BYTES] }
}

/// Sends messages of `N` elements under these names in one group. The engine polls the operations
/// of a group in turn.
fn send<const N: usize>(comm: &Arc<Comm>, tags: &[u64]) {
    let values: Vec<[u32; N]> = tags.iter().map(|tag| [*tag as u32; N]).collect();
    let mut messages: Vec<Message> = tags
        .iter()
        .zip(&values)
        .map(|(tag, value)| {
            let side = Side::Send(std::ptr::from_ref(value).cast());
            // SAFETY: the buffer has `N` elements, and outlives the message.
            unsafe { Message::new(comm.clone(), side, 1, N, DataType::Uint32, name(*tag)) }
        })
        .collect();
    comm.drive_all(messages.iter_mut().collect()).unwrap();
}

fn receive<const N: usize>(comm: &Arc<Comm>, tag: u64) {
    let mut value = [0_u32; N];
    let side = Side::Recv((&raw mut value).cast());
    // SAFETY: as above.
    let mut message = unsafe { Message::new(comm.clone(), side, 0, N, DataType::Uint32, name(tag)) };
    comm.drive_all(vec![&mut message]).unwrap();
    assert_eq!(value, [tag as u32; N]);
}

/// The ends of both ranks.
fn ends() -> [Arc<Comm>; 2] {
    let segment = Segment::new();
    [0, 1].map(|rank| Comm::new(&segment, rank))
}

fn one<const N: usize>() {
    let [sender, receiver] = ends();
    let thread = loom::thread::spawn(move || send::<N>(&sender, &[5]));
    receive::<N>(&receiver, 5);
    thread.join().unwrap();
}

/// Two messages, one after the other. There is room for one, so the second one overwrites the first
/// one.
fn two<const N: usize>() {
    let [sender, receiver] = ends();
    let thread = loom::thread::spawn(move || [5, 6].into_iter().for_each(|tag| send::<N>(&sender, &[tag])));
    [5, 6].into_iter().for_each(|tag| receive::<N>(&receiver, tag));
    thread.join().unwrap();
}

/// Rank 0 sends under two names in one group, and rank 1 receives them in the other order. So the
/// sender has to take its message back.
fn another_name_first<const N: usize>() {
    let [sender, receiver] = ends();
    let thread = loom::thread::spawn(move || send::<N>(&sender, &[5, 6]));
    [6, 5].into_iter().for_each(|tag| receive::<N>(&receiver, tag));
    thread.join().unwrap();
}

/// The receiver looks at a message twice, and tells both times that it waits for another one. The
/// sender takes the message back, and writes another one to its place.
fn looked_at_twice() {
    let state = Arc::new((Expected::default(), Plain::new(5)));
    let sender = spawn(&state, |(expected, message)| {
        if expected.take_back(|tag| tag == 6).is_some() {
            message.set(6);
            expected.took_back();
        }
    });
    let (expected, message) = &*state;
    for _ in 0..2 {
        if expected.withdraw() {
            message.get();
            expected.publish(&name(6), std::iter::empty());
        }
    }
    sender.join().unwrap();
}

/// The sender reads the name for which the receiver waits.
fn name_in_errors() {
    let expected = Arc::<Expected>::default();
    let receiver = spawn(&expected, |expected| expected.publish(&name(6), std::iter::empty()));
    let found = expected.name();
    assert!(found.is_none() || found == Some(name(6)), "the text is that of another name");
    receiver.join().unwrap();
}
