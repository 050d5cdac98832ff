//! Ranks that come late, or refuse their own calls, meet the others again.

use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use proptest::prelude::RngCore;
use proptest::test_runner::{RngAlgorithm, TestRng};

use super::{SHORT, ranks, scope, short_once_here, soon};
use crate::error::{Error, Result, Status};
use crate::rendezvous::agreement::Scope;
use crate::rendezvous::store::{MemoryStore, Store};
use crate::wait::Wait;

/// Makes a call that not all ranks make, and gives it up after 200 ms.
fn give_up(scope: &Scope, call: &str) -> Error {
    scope.agree(call, &Wait::after(SHORT)).map(drop).unwrap_err()
}

/// Two ranks make "call()" as call `number`, which the missing rank does not make. The second one
/// gives it up for both, once the first one waits in it.
fn give_up_together(number: u64, [first, second]: [&Scope; 2], missing: i32) {
    std::thread::scope(|threads| {
        let is_given_up = move |scope: &Scope, wait: &Wait| {
            assert_eq!(scope.agree("call()", wait).map(drop).unwrap_err().ranks(), [missing]);
        };
        threads.spawn(move || is_given_up(first, &soon()));
        is_given_up(second, &short_once_here(second, number, first.membership.me));
    });
}

/// Agrees on the first call of all ranks that succeeds, each on a thread of its own. Returns the
/// number of the call for each rank.
fn meet(scopes: &[Scope], call: &str) -> Vec<u64> {
    std::thread::scope(|threads| {
        let all: Vec<_> = scopes
            .iter()
            .map(|scope| threads.spawn(|| scope.agree(call, &soon()).map(|round| round.number())))
            .collect();
        all.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
    })
}

#[test]
fn a_late_rank_meets_the_others_in_its_next_call_whichever_rank_it_is() {
    for late in 0..3 {
        let store = MemoryStore::new();
        let scopes: Vec<Scope> = (0..3).map(|me| scope(&store, me, 3)).collect();
        // The others give up four calls. Between the third and the fourth the late rank is told.
        let others = [(late + 1) % 3, (late + 2) % 3].map(|me| &scopes[me]);
        let others_give_up = |number| give_up_together(number, others, late as i32);
        (0..3).for_each(others_give_up);
        let told = scopes[late].agree("other()", &soon()).map(drop).unwrap_err();
        assert_eq!(told.status(), Status::Timeout);
        let message = told.message();
        let start = format!("rank {late}, which is this process, came too late with other(): rank ");
        assert!(message.starts_with(&start), "{message}");
        assert!(message.contains(" had waited 200 ms in call 0, and gave it up; "), "{message}");
        let end = format!("who were told: rank {late} never called call() as call 0 within 200 ms");
        assert!(message.ends_with(&end), "{message}");
        others_give_up(3);
        assert_eq!(meet(&scopes, "call()"), [4; 3], "late rank {late}");
        assert_eq!(meet(&scopes, "next()"), [5; 3], "late rank {late}");
    }
}

#[test]
fn two_ranks_that_are_late_by_different_numbers_of_calls_meet_the_others() {
    let store = MemoryStore::new();
    let scopes: Vec<Scope> = (0..3).map(|me| scope(&store, me, 3)).collect();
    (0..2).for_each(|_| drop(give_up(&scopes[2], "call()")));
    // Rank 0 is told, and gives the third call up together with rank 2.
    give_up(&scopes[0], "call()");
    give_up_together(2, [&scopes[2], &scopes[0]], 1);
    assert!(give_up(&scopes[1], "call()").message().contains("came too late"));
    assert_eq!(meet(&scopes, "call()"), [3; 3]);
}

#[test]
fn a_rank_that_goes_on_where_the_others_are_is_compared_with_them() {
    let store = MemoryStore::new();
    let scopes: Vec<Scope> = (0..2).map(|me| scope(&store, me, 2)).collect();
    (0..2).for_each(|_| drop(give_up(&scopes[0], "call()")));
    assert!(give_up(&scopes[1], "call()").message().contains("came too late"));
    std::thread::scope(|threads| {
        for (scope, call) in scopes.iter().zip(["call()", "other()"]) {
            threads.spawn(move || {
                let error = scope.agree(call, &soon()).map(drop).unwrap_err();
                assert_eq!(error.status(), Status::Mismatch);
                assert_eq!(error.message(), "rank 1 called other() as call 2, rank 0 called call()");
            });
        }
    });
    assert_eq!(meet(&scopes, "call()"), [3; 2]);
}

#[test]
fn a_rank_that_had_come_is_not_told_that_it_came_too_late() {
    let store = MemoryStore::new();
    let scopes: Vec<Scope> = (0..3).map(|me| scope(&store, me, 3)).collect();
    let error = std::thread::scope(|threads| {
        let patient = threads.spawn(|| scopes[1].agree("call()", &soon()).map(drop).unwrap_err());
        store.get("test/world/0/here/1", &soon()).unwrap();
        give_up(&scopes[2], "call()");
        patient.join().unwrap()
    });
    assert_eq!(error.message(), "rank 0 never called call() as call 0 within 200 ms");
}

#[test]
fn every_late_rank_is_told_so_however_many_they_are() {
    const SIZE: usize = 9000;
    let store = MemoryStore::new();
    // Every second rank is missing, and positions in all parts of the list are asked.
    for me in (0..SIZE).step_by(2) {
        store.set(&format!("test/world/0/here/{me}"), b"call()\n", &soon()).unwrap();
    }
    // In a call, a rank has half of a short grace for this search. A busy machine may take that
    // long for a part of so many keys, and the verdict then says how far the search came. Here the
    // search has seconds.
    let first = scope(&store, 0, SIZE);
    let (round, why) = (first.join_next("call()"), Error::timeout("no verdict came"));
    let missing = round.name_missing("", Duration::from_millis(500), &why, &soon()).unwrap();
    let error = round.decide("", &missing, &soon()).unwrap().into_result().unwrap_err();
    assert!(error.message().contains("4492 more never called call() as call 0"), "{error}");
    for me in [1, 127, 129, 4095, 4097, 8191, 8193, 8999] {
        let late = scope(&store, me, SIZE).agree("call()", &soon()).map(drop).unwrap_err();
        assert!(late.message().starts_with(&format!("rank {me}, which is this process, came too late")), "{late}");
    }
    for me in [2, 4096, 8998] {
        let came = scope(&store, me, SIZE).agree("call()", &soon()).map(drop).unwrap_err();
        assert_eq!(came.message(), error.message());
    }
}

fn refusal() -> Error {
    Error::invalid("dimension tp exists already")
}

#[test]
fn a_refusal_is_told_at_once_to_ranks_before_and_after_it_and_the_next_call_meets() {
    for refusing in 0..3 {
        let store = MemoryStore::new();
        let scopes: Vec<Scope> = (0..3).map(|me| scope(&store, me, 3)).collect();
        let scopes = &scopes;
        let others = [(refusing + 1) % 3, (refusing + 2) % 3];
        let call = move |me: usize| scopes[me].agree("dm_flatten(name=f)", &soon()).map(drop).unwrap_err();
        std::thread::scope(|threads| {
            let before = threads.spawn(move || call(others[0]));
            store.get(&format!("test/world/0/here/{}", others[0]), &soon()).unwrap();
            scopes[refusing].tell_refusal("dm_flatten", &refusal(), &soon());
            for error in [before.join().unwrap(), call(others[1])] {
                let told = format!("rank {refusing} refused its own dm_flatten as call 0: dimension tp exists already");
                assert_eq!((error.status(), error.message()), (Status::InvalidArgument, told.as_str()));
                assert_eq!(error.ranks(), [refusing as i32]);
            }
        });
        assert_eq!(meet(scopes, "dm_flatten(name=f)"), [1; 3]);
    }
}

#[test]
fn a_refusal_of_all_ranks_is_one_call() {
    let scopes = ranks(3, |_, scope| {
        scope.tell_refusal("dm_flatten", &refusal(), &soon());
        scope.agree("dm_flatten(name=f)", &soon()).unwrap().number()
    });
    assert_eq!(scopes, [1; 3]);
}

#[test]
fn a_refusal_does_not_harm_a_call_of_another_function() {
    let store = MemoryStore::new();
    let scopes: Vec<Scope> = (0..3).map(|me| scope(&store, me, 3)).collect();
    let scopes = &scopes;
    std::thread::scope(|threads| {
        let waiting = threads.spawn(move || scopes[0].agree("dm_world_barrier()", &soon()).unwrap().number());
        store.get("test/world/0/here/0", &soon()).unwrap();
        scopes[1].tell_refusal("dm_flatten", &refusal(), &soon());
        scopes[2].tell_refusal("dm_reshape", &refusal(), &soon());
        for me in [1, 2] {
            threads.spawn(move || assert_eq!(scopes[me].agree("dm_world_barrier()", &soon()).unwrap().number(), 2));
        }
        assert_eq!(waiting.join().unwrap(), 2);
    });
}

#[test]
fn a_late_rank_that_refuses_its_call_frees_those_that_wait_for_it() {
    let store = MemoryStore::new();
    let scopes: Vec<Scope> = (0..2).map(|me| scope(&store, me, 2)).collect();
    let scopes = &scopes;
    (0..2).for_each(|_| drop(give_up(&scopes[0], "dm_flatten(name=f)")));
    std::thread::scope(|threads| {
        let waiting = threads.spawn(move || scopes[0].agree("dm_flatten(name=f)", &soon()).map(drop).unwrap_err());
        store.get("test/world/2/here/0", &soon()).unwrap();
        scopes[1].tell_refusal("dm_flatten", &refusal(), &soon());
        assert!(waiting.join().unwrap().message().starts_with("rank 1 refused its own dm_flatten as call 2"));
    });
    assert_eq!(meet(scopes, "dm_flatten(name=f)"), [3; 2]);
}

#[test]
fn a_rank_that_refused_an_unknown_first_use_meets_the_others_in_its_next_call() {
    let store = MemoryStore::new();
    let scopes: Vec<Scope> = (0..2).map(|me| scope(&store, me, 2)).collect();
    scopes[0].may_be_behind();
    (0..2).for_each(|_| drop(give_up(&scopes[1], "dm_get_comm(dim=tp)")));
    assert_eq!(meet(&scopes, "dm_get_comm(dim=tp)"), [2; 2]);
}

#[test]
fn a_rank_that_goes_on_refusing_does_not_fill_the_store() {
    let store = MemoryStore::new();
    let scopes: Vec<Scope> = (0..2).map(|me| scope(&store, me, 2)).collect();
    (0..3000).for_each(|_| scopes[0].tell_refusal("dm_flatten", &refusal(), &soon()));
    assert_eq!(store.keys().len(), 1000);
    assert_eq!(meet(&scopes, "dm_world_barrier()"), [1000; 2]);
    assert_eq!(meet(&scopes, "dm_world_barrier()"), [1001; 2]);
    let keys = store.keys();
    assert!(keys.iter().all(|key| key.starts_with("test/world/1001/")), "{keys:?}");
}

/// Makes one call of a chaotic phase: it may come late, give up soon, be refused, or have another
/// text.
fn chaos(scope: &Scope, random: &mut TestRng, step: usize, differs: bool) -> Option<Result<u64>> {
    let dice = random.next_u32();
    std::thread::sleep(Duration::from_micros(u64::from(dice / 4096 % 64) * 200));
    let short = Wait::after(Duration::from_millis(u64::from(1 + dice / 256 % 8)));
    match dice % 8 {
        0 => scope.tell_refusal(&format!("call{step}"), &refusal(), &soon()),
        1 => scope.tell_refusal("probe", &refusal(), &soon()),
        2 => scope.may_be_behind(),
        3 if differs => drop(scope.agree("other()", &short)),
        _ => return Some(scope.agree(&format!("call{step}()"), &short).map(|round| round.number())),
    }
    None
}

/// Ranks retry each call until it succeeds. Before, each of them has made some calls that were
/// late, refused or different. Whatever happened, the ranks meet in the same call, no rank waits in
/// vain, and calls of different texts never meet.
#[test]
fn ranks_that_retry_meet_again_whatever_each_of_them_did_alone() {
    const SIZE: usize = 3;
    for seed in 0..8u8 {
        let (barrier, failed_late) = (Barrier::new(SIZE), Arc::new(Mutex::new(Vec::new())));
        let numbers = ranks(SIZE, |me, scope| {
            let mut random = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed * 8 + me as u8; 32]);
            let mut numbers = Vec::new();
            for step in 0..12 {
                let mut met = None;
                for _ in 0..random.next_u32() % 5 {
                    if let Some(Ok(number)) = chaos(&scope, &mut random, step, step % SIZE == me) {
                        met = Some(number);
                        break;
                    }
                }
                barrier.wait();
                let mut tries = 0;
                while met.is_none() {
                    let began = std::time::Instant::now();
                    match scope.agree(&format!("call{step}()"), &soon()) {
                        Ok(round) => met = Some(round.number()),
                        Err(error) if began.elapsed() > Duration::from_secs(15) => {
                            failed_late.lock().unwrap().push(format!("seed {seed}, rank {me}: {error}"));
                            return numbers;
                        }
                        Err(_) => tries += 1,
                    }
                    assert!(tries < 50, "seed {seed}, rank {me}, step {step}");
                }
                numbers.push(met);
            }
            numbers
        });
        assert!(failed_late.lock().unwrap().is_empty(), "{:?}", failed_late.lock().unwrap());
        assert!(numbers.iter().all(|of_rank| *of_rank == numbers[0]), "seed {seed}: {numbers:?}");
    }
}
