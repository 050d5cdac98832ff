//! The wire over TCP keeps the promises of every wire, also where it encrypts.

use super::*;
use crate::wire::contract;

fn make() -> Arc<dyn Wire> {
    wire()
}

fn make_secret() -> Arc<dyn Wire> {
    secret_wire("a secret")
}

#[test]
fn messages_arrive_in_their_order() {
    contract::all_sizes(&make);
    contract::all_sizes(&make_secret);
    contract::order(&make);
    contract::soon(&make);
    contract::soon(&make_secret);
    contract::itself(&make);
    contract::early(&make);
}

#[test]
fn what_fails_fails_alone() {
    contract::too_long(&make);
    contract::loss(&make);
    contract::cancelled(&make);
    contract::withdrawn(&make);
    contract::withdrawn(&make_secret);
}

#[test]
fn connections_are_made_and_ended() {
    contract::stranger(&make);
    contract::at_once(&make, 300);
    contract::again(&make);
}

#[test]
#[ignore = "it measures"]
fn how_fast() {
    contract::speed("TCP", &make);
}
