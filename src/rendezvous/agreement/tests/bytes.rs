//! Bytes that the ranks of a call give each other.

use std::sync::Arc;

use super::{ranks, scope, soon};
use crate::error::{Result, Status};
use crate::rendezvous::agreement::Scope;
use crate::rendezvous::store::{MemoryStore, Store};

/// Returns the bytes that a rank gives. Their lengths are around the length of one value in the
/// store.
fn given(me: usize) -> Vec<u8> {
    let lengths = [0, 1, (1 << 20) - 9, (1 << 20) - 8, (1 << 20) - 7, (3 << 20) + 5];
    (0..lengths[me]).map(|at| (at * 31 + me) as u8).collect()
}

/// Makes one call, in which the ranks gather the bytes of all.
fn gather(scope: &Scope, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
    let round = scope.agree("gather()", &soon())?;
    let all = round.all_gather(mine, &soon());
    round.end(all, &soon())
}

#[test]
fn each_rank_has_the_bytes_of_all_ranks_in_order() {
    for size in [1, 2, 6] {
        let gathered = ranks(size, |me, scope| gather(&scope, &given(me)).unwrap());
        let expected: Vec<_> = (0..size).map(given).collect();
        assert!(gathered.iter().all(|all| *all == expected), "{size} ranks");
    }
}

#[test]
fn each_rank_has_the_bytes_of_the_root() {
    for root in 0..6 {
        let of_root = ranks(6, |me, scope| {
            let round = scope.agree("broadcast()", &soon()).unwrap();
            let bytes = round.broadcast(&given(me), root, &soon()).unwrap();
            round.finish(&soon()).unwrap();
            bytes
        });
        assert!(of_root.iter().all(|bytes| *bytes == given(root)), "root {root}");
    }
}

#[test]
fn more_than_all_ranks_may_give_together_is_refused_on_all_ranks() {
    let errors = ranks(9, |_, scope| {
        let error = gather(&scope, &vec![0; 8 << 20]).unwrap_err();
        // The next call meets.
        assert_eq!(gather(&scope, b"x").unwrap().len(), 9);
        error
    });
    for error in errors {
        assert_eq!(error.status(), Status::InvalidArgument, "{error}");
        assert!(
            error.message().contains("the first 9 ranks give 75497472 bytes; all 9 ranks together may give 67108864"),
            "{error}"
        );
    }
}

/// Another rank leaves the call only when the aborted rank has told why it left.
#[test]
fn a_rank_that_is_aborted_while_bytes_travel_is_lost_for_the_others() {
    let statuses = ranks(3, |me, scope| {
        let (store, wait) = (Arc::clone(&scope.membership.store), soon());
        let round = scope.agree("gather()", &wait).unwrap();
        match me {
            1 => drop(store.get("left", &soon()).unwrap()),
            2 => wait.cancel.raise(),
            _ => {}
        }
        let all = round.all_gather(b"x", &wait);
        let status = round.end(all, &wait).unwrap_err().status();
        if me == 2 {
            store.set("left", b"1", &soon()).unwrap();
        }
        status
    });
    assert_eq!(statuses, [Status::PeerLost, Status::PeerLost, Status::Aborted]);
}

#[test]
fn a_store_with_other_values_is_an_error() {
    let cases: [(&[u8], &str); 4] = [
        (b"short", "no length"),
        (&[0, 0, 0, 0, 0, 0, 0, 1, 7], "a length of 72057594037927936 bytes"),
        (&[1, 0, 0, 0, 0, 0, 0, 0, 7, 7], "2 bytes in place of 1"),
        (&[0, 0, 0, 0, 0, 0, 0, 0], "no whole list of 2 values"),
    ];
    for (value, words) in cases {
        let store = MemoryStore::new();
        // The value stands where rank 0 would publish what it has gathered.
        store.set("test/world/0/data/all/0", value, &soon()).unwrap();
        let error = std::thread::scope(|threads| {
            let first = scope(&store, 0, 2);
            let first = threads.spawn(move || first.agree("gather()", &soon()).map(drop));
            let round = scope(&store, 1, 2).agree("gather()", &soon()).unwrap();
            first.join().unwrap().unwrap();
            round.all_gather(b"x", &soon()).unwrap_err()
        });
        assert!(error.status() == Status::Store && error.message().contains(words), "{error}");
    }
}

#[test]
fn what_was_published_goes_when_the_call_has_ended() {
    let store = MemoryStore::new();
    std::thread::scope(|threads| {
        for me in 0..3 {
            let scope = scope(&store, me, 3);
            threads.spawn(move || gather(&scope, &given(me)).unwrap());
        }
    });
    let keys = store.keys();
    assert!(!keys.is_empty() && keys.iter().all(|key| !key.contains("/data/")), "{keys:?}");
}
