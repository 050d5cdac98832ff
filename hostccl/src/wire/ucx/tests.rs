//! Tests of the wire over UCX. They run where UCX's library is found: Debian's libucx0, or the one
//! that `DM_UCX_LIBRARY` names. Elsewhere they say that they are skipped.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::wire::contract;

/// Runs a test where UCX is there.
fn with_ucx(test: impl Fn(contract::Make<'_>)) {
    let make = || open(Duration::from_secs(5), || ());
    match make() {
        Ok(_) => test(&|| -> Arc<dyn Wire> { make().unwrap() }),
        Err(error) => println!("skipped: {}", error.message()),
    }
}

#[test]
fn messages_of_all_sizes_arrive_whichever_side_is_early() {
    with_ucx(contract::all_sizes);
}

#[test]
fn messages_of_one_tag_keep_their_order() {
    with_ucx(contract::order);
}

#[test]
fn a_process_reaches_itself() {
    with_ucx(contract::itself);
}

#[test]
fn a_message_that_is_too_long_fails_its_receive_alone() {
    with_ucx(contract::too_long);
}

#[test]
fn a_wire_that_goes_is_lost() {
    with_ucx(contract::loss);
}

#[test]
fn a_process_with_another_token_does_not_get_in() {
    with_ucx(contract::stranger);
}

#[test]
fn a_process_may_send_before_the_other_has_met_it() {
    with_ucx(contract::early);
}

#[test]
fn both_sides_may_connect_at_once() {
    with_ucx(|make| contract::at_once(make, 10));
}

#[test]
fn peers_may_be_closed_and_met_again() {
    with_ucx(contract::again);
}

#[test]
fn a_cancelled_message_harms_no_other() {
    with_ucx(contract::cancelled);
}
