//! Tests with ranks that come late to a collective, and with one that never comes.

use std::thread::sleep;
use std::time::Duration;

use super::{Ranks, sum};
use crate::call_name::Name;
use crate::types::*;

/// This test takes 4 s. A rank that waits for a waiting rank waits one second longer than its
/// timeout, and the late rank must come even later. It must come before the timeout of the others.
#[test]
fn a_rank_that_came_late_is_not_blamed_while_it_waits_for_the_missing_one() {
    super::only_the_missing_rank_is_blamed(2, Duration::from_millis(2_500), |timeout| {
        // Rank 2 never comes. Rank 4 waits for it, rank 0 waits for rank 4, and rank 3 waits for
        // rank 0 on the same host.
        let ranks = Ranks::new(&[&[0, 3], &[1], &[2], &[4]]);
        ranks.ends.iter().for_each(|end| end.set_timeout(timeout.as_millis() as u64));
        let errors = ranks.run(|me, comm| {
            match me {
                2 => return None,
                4 => sleep(timeout.mul_f64(0.52)),
                _ => {}
            }
            Some(sum(comm, 1, Name::NONE).expect_err("rank 2 is missing"))
        });
        errors.into_iter().flatten().collect()
    });
}

#[test]
fn a_rank_without_a_connection_to_the_missing_one_says_why() {
    let ranks = Ranks::new(&[&[0], &[1]]);
    ranks.wires[0].cut(1);
    ranks.ends[0].set_timeout(100);
    let error = sum(&ranks.ends[0], 1, Name::NONE).unwrap_err();
    let said = "rank 1 did not come within 100 ms (wire 1 takes no connection)";
    assert!(error.code() == ncclTimeout && error.message().contains(said), "{}", error.message());
}

#[test]
fn a_rank_says_that_it_waits_only_while_it_does() {
    let ranks = Ranks::new(&[&[0, 3], &[1], &[2]]);
    ranks.run(|me, comm| {
        if me == 2 {
            // The others have waited for a while before they get their results.
            while [0, 1, 3].iter().any(|other| !ranks.ends[*other].seat_waits(ranks.ends[*other].rank)) {
                sleep(Duration::from_millis(1));
            }
        }
        assert_eq!(sum(comm, 1, Name::NONE), Ok(4));
        assert!(!comm.seat_waits(comm.rank), "rank {me} waits for nobody");
    });
}
