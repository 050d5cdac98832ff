//! Offers: a reader takes a whole offer or none, and no offer is missed.

use std::sync::Arc;
use std::time::Duration;

use memory_order::check::Model;

use super::spawn;
use crate::event::{Watch, sleep};
use crate::segment::Offer;

pub(super) const MODELS: &[Model] = &[
    Model { name: "offer: read whole", preemptions: Some(3), waitv: true, run: read_whole },
    Model { name: "offer: none is missed", preemptions: Some(3), waitv: true, run: none_is_missed },
];

/// The set of ranks for which the segments are.
const DIGEST: u64 = 9;

fn write(offer: &Offer, number: u8) {
    offer.write(DIGEST, number.into(), [number; 16]);
}

/// Reads an offer, and returns its number among the offers.
fn read(offer: &Offer, taken: u32) -> Option<u32> {
    let (number, fd, token) = offer.read(taken, DIGEST)?;
    assert_eq!((fd as u32, token), (number / 2, [(number / 2) as u8; 16]), "parts of two offers");
    Some(number / 2)
}

/// A rank makes two segments for one set of ranks, one after the other, while another rank looks.
fn read_whole() {
    let offer = Arc::<Offer>::default();
    let maker = spawn(&offer, |offer| (1..=2).for_each(|number| write(offer, number)));
    let first = read(&offer, 0);
    let second = read(&offer, 0);
    assert!(second.is_none() || second >= first, "an earlier offer came back");
    maker.join().unwrap();
}

/// A rank sleeps until there is an offer.
fn none_is_missed() {
    let offer = Arc::<Offer>::default();
    let maker = spawn(&offer, |offer| write(offer, 1));
    loop {
        let seen = offer.number.value();
        match read(&offer, 0) {
            Some(number) => break assert_eq!(number, 1),
            None if seen == 2 => panic!("the number is there before the offer"),
            None => sleep(&[Watch { event: &offer.number, seen }], None, Duration::MAX),
        }
    }
    maker.join().unwrap();
}
