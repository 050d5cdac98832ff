//! Every state of jobs with three ranks, and what these jobs can come to. The jobs have 1.4 million
//! states, so the tests take 3 s of processor time.

mod right;

use recovery_model::{Goal, Job, NO_SEAT, Property, Silent, check};
use right::is_right;

/// Checks that the job can come to that, and prints a shortest way.
fn can_reach(goal: Goal, job: Job) {
    match check(&job, &[Property::Never(goal)]) {
        Ok(checked) => panic!("no way leads to {goal:?} in {} states", checked.states),
        Err(violation) => println!("{goal:?}:\n{}", violation.way.join("\n")),
    }
}

fn three() -> Job {
    Job::of(3)
}

#[test]
fn losses_before_and_during_recovery() {
    is_right(Job { losses: 3, ..three() });
    is_right(Job { losses: 3, deadlines: 1, calls: 1, ..three() });
}

#[test]
fn slow_and_hung_ranks() {
    is_right(Job { losses: 1, deadlines: 2, calls: 2, ..three() });
}

#[test]
fn a_newcomer_for_a_lost_rank_or_for_one_that_lives() {
    is_right(Job { losses: 2, deadlines: 1, newcomers: &[1], ..three() });
    is_right(Job { losses: 1, calls: 1, newcomers: &[1], ..three() });
}

#[test]
fn two_newcomers_for_one_rank() {
    is_right(Job { losses: 1, deadlines: 1, newcomers: &[1, 1], ..three() });
}

#[test]
fn two_newcomers_for_two_ranks() {
    is_right(Job { losses: 2, newcomers: &[0, 1], ..three() });
}

#[test]
fn a_newcomer_that_asks_for_another_mesh() {
    is_right(Job { losses: 2, newcomers: &[1], misfit: Some(3), ..three() });
    is_right(Job { losses: 1, calls: 1, newcomers: &[1, 1], misfit: Some(3), ..three() });
}

#[test]
fn spares() {
    is_right(Job { losses: 2, deadlines: 1, spares: 1, ..three() });
    is_right(Job { losses: 2, spares: 1, newcomers: &[1], ..three() });
}

#[test]
fn growth() {
    is_right(Job { losses: 2, calls: 1, newcomers: &[3], ..three() });
}

#[test]
fn ranks_that_are_taken_for_lost() {
    is_right(Job { losses: 1, false_losses: 1, calls: 1, ..three() });
    is_right(Job { losses: 1, false_losses: 1, newcomers: &[1], ..three() });
}

#[test]
fn options_that_differ() {
    is_right(Job { losses: 1, deadlines: 1, calls: 2, odd: Some(1), ..three() });
}

#[test]
fn a_least_size() {
    is_right(Job { losses: 2, deadlines: 1, calls: 1, least: 2, ..three() });
}

#[test]
fn the_end_of_the_job() {
    is_right(Job { losses: 1, deadlines: 1, calls: 1, ends: 2, ..three() });
    is_right(Job { losses: 1, ends: 2, spares: 1, newcomers: &[1], ..three() });
}

#[test]
fn jobs_end() {
    can_reach(Goal::Ended, Job { ends: 3, spares: 1, ..three() });
}

#[test]
fn newcomers_are_let_in_and_refused() {
    let job = Job { losses: 1, newcomers: &[1], ..three() };
    can_reach(Goal::NewcomerTrains, job.clone());
    can_reach(Goal::Whole, job.clone());
    can_reach(Goal::NewcomerRefused, job);
    // Without the losses of ranks, this newcomer is refused for its mesh alone.
    can_reach(Goal::NewcomerRefused, Job { calls: 1, newcomers: &[3], misfit: Some(3), ..three() });
}

#[test]
fn spares_take_seats() {
    can_reach(Goal::SpareTrains, Job { losses: 1, spares: 1, ..three() });
}

#[test]
fn newcomers_whose_place_a_spare_has_are_spares() {
    let job = Job { losses: 1, calls: 1, spares: 1, newcomers: &[1], ..three() };
    is_right(job.clone());
    can_reach(Goal::NewcomerIsSpare, job);
    can_reach(Goal::NewcomerTrainsElsewhere, Job { losses: 2, spares: 1, newcomers: &[1], ..three() });
    // In the place of a spare that was lost.
    let job = Job { losses: 1, calls: 1, spares: 1, newcomers: &[NO_SEAT], ..three() };
    is_right(job.clone());
    can_reach(Goal::NewcomerIsSpare, job);
    can_reach(Goal::NewcomerTrainsElsewhere, Job { losses: 2, spares: 1, newcomers: &[NO_SEAT], ..three() });
}

#[test]
fn meshes_grow() {
    can_reach(Goal::Grown, Job { calls: 1, newcomers: &[3], ..three() });
}

#[test]
fn slow_ranks_are_fenced() {
    can_reach(Goal::Fenced, Job { silent: Silent::LeftOut, deadlines: 1, calls: 1, ..three() });
}

#[test]
fn recoveries_begin_anew_and_fail() {
    can_reach(Goal::Broken, Job { losses: 2, ..three() });
    can_reach(Goal::Timeout, Job { deadlines: 1, calls: 1, ..three() });
    can_reach(Goal::Mismatch, Job { losses: 1, odd: Some(1), ..three() });
    can_reach(Goal::TooFew, Job { losses: 2, least: 2, ..three() });
    can_reach(Goal::NoState, Job { losses: 2, newcomers: &[1], ..Job::of(2) });
}
