//! The decisions of a job that recovers (docs/recovery.md): their text, and that one decision
//! stands under a number, over every kind of store.

mod corpus;
mod decision_texts;
mod every_store;

use std::sync::Arc;

use devicemesh::error::{Error, Status};
use devicemesh::rendezvous::store::{MemoryStore, Store};
use devicemesh::rendezvous::{Decision, Decisions, Epoch, Failure, Incarnation, Replicas, Why};
use every_store::{soon, subjects};
use proptest::prelude::*;

fn process(rank: i32, ticket: u32) -> Incarnation {
    Incarnation { rank, ticket }
}

/// The mesh (2, 4), in which another process has taken the place of rank 5, and rank 8 is a spare.
fn example() -> Epoch {
    let replicas = Replicas { sizes: vec![2, 4], dim: 0 };
    let mut epoch = Epoch::first(9, replicas, &[0, 1, 2, 3, 4, 5, 6, 7]);
    epoch.seats[5] = Some(process(5, 1));
    Epoch { stateless: vec![process(5, 1)], refused: vec![process(3, 1)], door: 2, ..epoch }
}

const EXAMPLE: &str =
    "epoch size=9 shape=2x4 dim=0 without= seats=0-4,5:1,6-7 spares=8 stateless=5:1 taken= refused=3:1 door=2";

#[test]
fn the_text_is_the_one_in_the_documentation() {
    assert_eq!(Decision::Epoch(example()).to_string(), EXAMPLE);
    assert_eq!(EXAMPLE.parse(), Ok(Decision::Epoch(example())));
    let mut smaller = example();
    (smaller.seats[1], smaller.seats[2], smaller.without, smaller.stateless) = (None, None, vec![0], vec![]);
    let text =
        "epoch size=9 shape=2x4 dim=0 without=0 seats=0,-*2,3-4,5:1,6-7 spares=8 stateless= taken= refused=3:1 door=2";
    assert_eq!(Decision::Epoch(smaller).to_string(), text);
    let error = Error::timeout("rank 3 did not come").with_ranks(&[3]);
    let failure = Decision::Failure(Failure::new(Why::Timeout, &error));
    let text = format!("failure timeout\n{} 0 0 0 0 3\nrank 3 did not come", Status::Timeout as i32);
    assert_eq!((failure.to_string(), text.parse()), (text.clone(), Ok(failure)));
    assert_eq!("end".parse(), Ok(Decision::End));
    let told = text.parse::<Decision>().unwrap();
    assert!(matches!(told, Decision::Failure(failure) if failure.error() == error));
}

/// 10,000 ranks, of which a host with 8 ranks is lost and one rank has come back.
#[test]
fn a_decision_of_a_large_job_is_short() {
    let ranks: Vec<i32> = (0..10_000).collect();
    let mut epoch = Epoch::first(10_008, Replicas { sizes: vec![1250, 8], dim: 0 }, &ranks);
    epoch.seats[4096..4104].fill(None);
    epoch.seats[17] = Some(process(17, 1));
    (epoch.without, epoch.stateless) = (vec![512], vec![process(17, 1)]);
    let text = Decision::Epoch(epoch.clone()).to_string();
    assert!(text.len() < 200, "{text}");
    assert_eq!(text.parse(), Ok(Decision::Epoch(epoch)));
}

#[test]
fn a_text_whose_parts_do_not_fit_together_is_not_read() {
    let refused = |from: &str, to: &str| {
        assert_eq!(EXAMPLE.matches(from).count(), 1, "{from}");
        let text = EXAMPLE.replace(from, to);
        assert_eq!(text.parse::<Decision>(), Err(()), "{text}");
    };
    refused("size=9", "size=8"); // rank 8 is beyond the world
    refused("shape=2x4", "shape=2x5");
    refused("shape=2x4", "shape=7");
    refused("shape=2x4", "shape=4294967296x4294967296x2x4");
    refused("dim=0", "dim=2");
    refused("without=", "without=2");
    refused("without=", "without=0-1");
    refused("0-4", "0,1-4"); // not in runs
    refused("0-4", "0-3,-"); // an empty seat in a replica of the mesh
    refused("5:1,6", "4:1,6"); // two processes of one rank
    refused("5:1,6", "4,6"); // one process in two seats
    refused("spares=8", "spares=7");
    refused("stateless=5:1", "stateless=8"); // a spare is not in the mesh
    refused("taken=", "taken=3:1"); // taken and refused
    refused("refused=3:1", "refused=3"); // a member
    refused("door=2", "door=2 more=");
    refused("door=2", "door=02");
    refused(" door=2", "");
    refused("0-4,5:1,6-7", "0-2147483647");
    refused("0-4,5:1,6-7", "-*18446744073709551615");
    for text in [
        "",
        "end ",
        "End",
        "epoch",
        "failure",
        "failure timeout",
        "failure timeout\n0 0 0 0 0\n",
        "failure x\n7 0 0 0 0\nx",
    ] {
        assert_eq!(text.parse::<Decision>(), Err(()), "{text:?}");
    }
}

#[test]
fn what_a_fuzzer_has_found_is_read_without_harm() {
    for (_, input) in corpus::inputs("decision") {
        decision_texts::check_any_text(&String::from_utf8_lossy(&input));
    }
}

proptest! {
    /// Texts that look like decisions, with a few characters changed.
    #[test]
    fn texts_that_nobody_wrote_do_no_harm(at in 0..EXAMPLE.len(), cut in 0..4_usize, with in "[-0-9,:*x= a]{0,4}") {
        let mut text = EXAMPLE.to_owned();
        text.replace_range(at..(at + cut).min(text.len()), &with);
        decision_texts::check_any_text(&text);
    }
}

#[test]
fn of_many_proposals_one_decision_stands_in_every_store() {
    for subject in subjects() {
        let decisions = Decisions::new(Arc::clone(&subject.store), "devicemesh/0/0/test");
        let name = subject.store.name();
        let proposal = |rank: i32| Decision::Epoch(Epoch::first(9, Replicas { sizes: vec![1], dim: 0 }, &[rank]));
        assert_eq!(decisions.read(1, &soon()).unwrap(), None, "{name}");
        let told: Vec<Decision> = std::thread::scope(|scope| {
            let decide = |rank| decisions.decide(1, &proposal(rank), &soon()).unwrap();
            let threads: Vec<_> = (0..8).map(|rank| scope.spawn(move || decide(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(told.iter().all(|decision| *decision == told[0]), "{name}: {told:?}");
        assert_eq!(decisions.read(1, &soon()).unwrap(), Some(told[0].clone()), "{name}");
        // A rank that comes an hour later finds the decision, and changes nothing.
        assert_eq!(decisions.decide(1, &Decision::End, &soon()).unwrap(), told[0], "{name}");
        assert_eq!(decisions.read(2, &soon()).unwrap(), None, "{name}");
    }
}

#[test]
fn a_store_that_changes_a_decision_is_named() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    store.set("test/decision/1", b"epoch of nobody", &soon()).unwrap();
    let error = Decisions::new(store, "test").read(1, &soon()).unwrap_err();
    assert_eq!(error.status(), Status::Store);
    assert!(error.message().contains("\"epoch of nobody\") under the key test/decision/1"), "{error}");
}
