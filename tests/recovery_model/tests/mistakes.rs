//! The checker finds every mistake that is planted in the protocol, and names the property that
//! the mistake breaks. The same jobs without the mistake are all right.

use recovery_model::{Job, Mistake, Property, Silent, check};

/// Checks the job with the mistake and without it. `property` is one that the mistake breaks.
fn finds(mistake: Mistake, property: Property, job: Job) {
    let right = check(&job, &Property::ALL);
    assert!(right.is_ok(), "without the mistake: {}", right.unwrap_err());
    match check(&Job { mistake: Some(mistake), ..job }, &[property]) {
        Ok(checked) => panic!("{mistake:?} breaks {property:?} in none of {} states", checked.states),
        Err(violation) => println!("{mistake:?} after {} transitions: {}", violation.way.len(), violation.what),
    }
}

/// Three ranks, of which one dies.
fn one_loss() -> Job {
    Job { losses: 1, ..Job::of(3) }
}

/// Three ranks, of which one dies, and one calls dm_recover without that reason.
fn one_loss_one_call() -> Job {
    Job { calls: 1, ..one_loss() }
}

/// Three ranks that go on without a slow one.
fn one_slow() -> Job {
    Job { silent: Silent::LeftOut, deadlines: 1, calls: 1, ..Job::of(3) }
}

#[test]
fn a_decision_without_compare_and_set() {
    finds(Mistake::PlainWrite, Property::OneOutcome, one_loss_one_call());
}

#[test]
fn a_decision_in_two_steps() {
    finds(Mistake::DecidesInTwoSteps, Property::Progress, Job { losses: 2, ..Job::of(3) });
}

#[test]
fn one_rank_alone_may_propose() {
    finds(Mistake::OneProposer, Property::Progress, Job { losses: 2, ..Job::of(3) });
}

#[test]
fn a_decision_without_the_others() {
    finds(Mistake::AwaitsNobody, Property::NobodyExpelled, one_loss());
}

#[test]
fn a_hung_spare_that_holds_up_the_others() {
    finds(Mistake::SparesAwaited, Property::Progress, Job { spares: 1, ..one_loss() });
}

#[test]
fn a_loss_that_wakes_nobody() {
    finds(Mistake::LossWakesNobody, Property::Progress, one_loss_one_call());
}

#[test]
fn a_call_that_ends_nothing() {
    finds(Mistake::EndTellsNobody, Property::OneEnd, one_loss_one_call());
}

#[test]
fn a_call_of_which_only_the_first_tells() {
    finds(Mistake::FirstAloneTells, Property::OneEnd, Job { calls: 2, ..Job::of(3) });
}

#[test]
fn notes_that_later_decisions_read() {
    finds(Mistake::NoNumberInKeys, Property::Asked, one_loss_one_call());
}

#[test]
fn a_record_of_decisions_that_is_removed() {
    finds(Mistake::DecisionsForgotten, Property::OneHalf, Job { deadlines: 2, ..one_slow() });
}

#[test]
fn a_slow_rank_that_is_not_fenced() {
    finds(Mistake::NoFence, Property::LetIn, one_slow());
}

#[test]
fn ranks_without_tickets() {
    finds(Mistake::NoTickets, Property::OneHolder, Job { newcomers: &[1], ..one_loss() });
}

#[test]
fn a_newcomer_for_a_rank_that_lives() {
    finds(Mistake::DoorForAll, Property::NobodyExpelled, Job { newcomers: &[1], ..one_loss() });
}

#[test]
fn a_refusal_that_is_forgotten() {
    finds(Mistake::RefusalForgotten, Property::Progress, Job { newcomers: &[1], ..one_loss_one_call() });
}

#[test]
fn a_newcomer_that_was_left_out_and_comes_back() {
    let job = Job { silent: Silent::LeftOut, losses: 1, deadlines: 1, calls: 2, newcomers: &[1], ..Job::of(2) };
    finds(Mistake::LeftOutReturns, Property::OutForGood, job);
}

#[test]
fn a_spare_that_makes_no_replica_whole() {
    finds(Mistake::SparesWasted, Property::SparesUsed, Job { replica: 2, losses: 2, spares: 1, ..Job::of(4) });
}

#[test]
fn newcomers_that_count_as_ranks_with_the_state() {
    finds(Mistake::StateAssumed, Property::StateKept, Job { losses: 2, newcomers: &[1], ..Job::of(2) });
}

#[test]
fn options_that_are_not_compared() {
    finds(Mistake::OptionsIgnored, Property::OptionsAgreed, Job { odd: Some(1), ..one_loss() });
}

#[test]
fn a_newcomer_of_another_mesh_that_is_let_in() {
    finds(Mistake::ShapeIgnored, Property::Fits, Job { newcomers: &[1], misfit: Some(3), ..one_loss() });
}

#[test]
fn a_newcomer_that_does_not_learn_of_losses() {
    finds(Mistake::DoorWithoutLosses, Property::Progress, Job { losses: 3, newcomers: &[1], ..Job::of(2) });
}

#[test]
fn a_verdict_of_each_rank_alone() {
    finds(Mistake::OwnVerdict, Property::OneOutcome, Job { deadlines: 1, ..one_loss() });
}
