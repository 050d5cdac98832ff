//! Every state of jobs with four ranks. The jobs of the ignored tests have 13 million states
//! together and take less than 23 s of processor time, so only `make test-release` runs them
//! (tests/parts/rust.py).
//!
//!     cargo test -p recovery-model --test four -- --ignored

mod right;

use recovery_model::{Goal, Job, Property, check};
use right::is_right;

fn four() -> Job {
    Job::of(4)
}

#[test]
fn losses() {
    is_right(Job { losses: 3, ..four() });
}

#[test]
#[ignore = "long"]
fn losses_before_and_during_recovery() {
    is_right(Job { losses: 4, deadlines: 1, ..four() });
    is_right(Job { losses: 3, deadlines: 1, calls: 1, ..four() });
}

#[test]
#[ignore = "long"]
fn slow_and_hung_ranks() {
    is_right(Job { deadlines: 2, calls: 2, ..four() });
}

#[test]
#[ignore = "long"]
fn newcomers() {
    is_right(Job { losses: 3, newcomers: &[1], ..four() });
    is_right(Job { losses: 1, calls: 1, newcomers: &[1], ..four() });
    is_right(Job { losses: 2, newcomers: &[0, 1], ..four() });
    is_right(Job { losses: 2, newcomers: &[1, 1], ..four() });
}

#[test]
#[ignore = "long"]
fn the_end_of_the_job() {
    is_right(Job { losses: 2, ends: 4, ..four() });
    is_right(Job { losses: 1, deadlines: 1, ends: 2, ..four() });
}

/// Two replicas of two ranks.
fn two_replicas() -> Job {
    Job { replica: 2, ..four() }
}

#[test]
fn a_rank_whose_replica_is_hit_waits() {
    let violation = check(&Job { losses: 1, ..two_replicas() }, &[Property::Never(Goal::Benched)]).unwrap_err();
    println!("{}", violation.way.join("\n"));
    is_right(Job { losses: 2, ..two_replicas() });
}

#[test]
#[ignore = "long"]
fn replicas() {
    is_right(Job { losses: 2, deadlines: 1, calls: 1, ..two_replicas() });
    is_right(Job { losses: 2, newcomers: &[1], ..two_replicas() });
    is_right(Job { losses: 1, calls: 1, newcomers: &[1], ..two_replicas() });
    is_right(Job { losses: 2, spares: 1, deadlines: 1, ..two_replicas() });
    is_right(Job { losses: 2, newcomers: &[0, 3], ..two_replicas() });
}

#[test]
#[ignore = "long"]
fn spares() {
    is_right(Job { losses: 2, deadlines: 1, spares: 1, ..four() });
    is_right(Job { losses: 2, spares: 1, newcomers: &[1], ..four() });
}

#[test]
#[ignore = "long"]
fn ranks_that_are_taken_for_lost() {
    is_right(Job { losses: 2, false_losses: 1, ..four() });
    is_right(Job { losses: 1, false_losses: 1, newcomers: &[1], ..four() });
}
