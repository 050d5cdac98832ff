//! Ranks that fail, are aborted or are lost during a call.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use super::{membership, ranks, soon};
use crate::error::{Error, Status};
use crate::rendezvous::agreement::verdict::Verdict;
use crate::rendezvous::agreement::waiting::NEWS_OF_A_LOSS;
use crate::rendezvous::agreement::{Members, Membership, Scope};
use crate::rendezvous::incarnation::Incarnation;
use crate::rendezvous::losses::Losses;
use crate::rendezvous::store::{FileStore, Hooked, MemoryStore, Server, Store, TcpStore};
use crate::starved::timed;
use crate::wait::Wait;

#[test]
fn a_rank_that_has_gone_is_not_waited_for() {
    // A store that knows of losses writes them like this. The first loss was noted for a call that
    // it did not harm.
    let errors = ranks(5, |me, scope| {
        let store = Arc::clone(&scope.membership.store);
        scope.agree("first()", &soon()).unwrap().finish(&soon()).unwrap();
        if me == 2 {
            store.add("test/lost", 1, &soon()).unwrap();
            store.set("test/lost/1", b"2", &soon()).unwrap();
            return None;
        }
        if me == 4 {
            // This rank calls when the others know already.
            std::thread::sleep(Duration::from_millis(100));
        }
        let began = Instant::now();
        let error = scope.agree("second()", &soon()).map(drop).unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
        Some((error, scope.agree("third()", &soon()).map(drop).unwrap_err()))
    });
    for (second, third) in errors.into_iter().flatten() {
        assert_eq!((second.status(), third.status()), (Status::PeerLost, Status::PeerLost));
        assert_eq!((second.ranks(), third.ranks()), (&[2][..], &[2][..]));
        let words = "rank 2 was lost before it called second() as call 1: its process ended, it freed or aborted its world, or its host fell silent";
        assert_eq!(second.message(), words);
        assert!(third.message().starts_with("rank 2 was lost before it called third()"), "{third}");
    }
}

/// The list has another process of rank 2 than the one that is in the scope.
#[test]
fn a_loss_of_another_process_of_a_rank_ends_no_call() {
    ranks(3, |me, scope| {
        if me == 0 {
            scope.membership.losses.announce(Incarnation { rank: 2, ticket: 1 });
        }
        scope.agree("first()", &soon()).unwrap().finish(&soon()).unwrap();
        assert!(scope.membership.lost_others().is_empty());
        if me == 2 {
            scope.membership.losses.announce(Incarnation::first(2));
            return;
        }
        let error = scope.agree("second()", &soon()).map(drop).unwrap_err();
        assert_eq!((error.status(), error.lost()), (Status::PeerLost, &[2][..]), "{error}");
        // The other rank's verdict may come before this rank has read the note of the loss.
        scope.membership.losses.refresh(&soon()).unwrap();
        assert_eq!(scope.membership.lost_others(), [2]);
    });
}

/// The library of rank 1 fails because rank 2 has died, and the store knows of the death a moment
/// later, when rank 1 waits for such news.
#[test]
fn a_failure_that_a_lost_rank_may_explain_is_told_as_the_loss() {
    let own = Error::new(Status::Ccl, "a connection was closed").with_ccl_result(2);
    let memory = MemoryStore::new();
    let losing = memory.clone();
    let before = move |operation: &str, _: usize, wait: &Wait| {
        let waits_for_news = operation == "wait" && wait.deadline.timeout() == NEWS_OF_A_LOSS;
        if waits_for_news { losing.set("test/lost/1", b"2", &soon()) } else { Ok(()) }
    };
    let store: Arc<dyn Store> = Arc::new(Hooked { store: memory, before });
    let call = |me: usize| {
        let losses = Arc::new(Losses::none(Arc::clone(&store), "test"));
        let membership = membership(Arc::clone(&store), losses, Members::All(3), me);
        let round = Scope::new(membership, "test/world".to_owned()).agree("dm_init()", &soon()).unwrap();
        match me {
            0 => Some(round.fetch("id", 2, &soon()).map(drop).unwrap_err()),
            1 => {
                assert!(round.fail(&own, &soon()));
                Some(round.finish(&soon()).unwrap_err())
            }
            _ => None,
        }
    };
    let errors = std::thread::scope(|threads| {
        let call = &call;
        let calls = [0, 1, 2].map(|me| threads.spawn(move || call(me)));
        calls.map(|call| call.join().unwrap())
    });
    for error in errors.into_iter().flatten() {
        assert_eq!((error.status(), error.lost()), (Status::PeerLost, &[2][..]));
        assert!(error.message().starts_with("rank 2 was lost in dm_init() as call 0"), "{error}");
    }
}

#[test]
fn a_slow_store_does_not_make_a_timeout_of_a_mismatch() {
    let before = |operation: &str, _: usize, wait: &Wait| {
        if operation == "set_once" {
            std::thread::sleep(Duration::from_millis(400));
        }
        if wait.deadline.passed() { Err(Error::timeout("the store is slow")) } else { Ok(()) }
    };
    let store: Arc<dyn Store> = Arc::new(Hooked { store: MemoryStore::new(), before });
    let call = |me: usize| {
        let losses = Arc::new(Losses::none(Arc::clone(&store), "test"));
        let membership = membership(Arc::clone(&store), losses, Members::All(2), me);
        let scope = Scope::new(membership, "test/world".to_owned());
        scope.agree(&format!("call of {me}"), &soon()).map(drop).unwrap_err()
    };
    let errors = std::thread::scope(|threads| {
        let call = &call;
        let calls = [0, 1].map(|me| threads.spawn(move || call(me)));
        calls.map(|call| call.join().unwrap())
    });
    for error in errors {
        assert_eq!(error.message(), "rank 1 called call of 1 as call 0, rank 0 called call of 0");
    }
}

#[test]
fn a_failure_in_the_middle_reaches_every_rank() {
    let errors = ranks(3, |me, scope| {
        let round = scope.agree("dm_init()", &soon()).unwrap();
        if me == 1 {
            let own = Error::new(Status::Ccl, "out of memory").with_ccl_result(1);
            round.fail(&own, &soon());
            round.finish(&soon()).unwrap_err()
        } else {
            // Rank 1 never publishes this id.
            round.fetch("id", 2, &soon()).map(drop).unwrap_err()
        }
    });
    for error in errors {
        assert_eq!((error.status(), error.ccl_result()), (Status::Ccl, 1));
        assert_eq!(error.message(), "rank 1 failed in dm_init(): out of memory");
    }
}

#[test]
fn an_aborted_rank_frees_the_others() {
    let errors = ranks(3, |me, scope| {
        let wait = soon();
        if me == 2 {
            // Rank 1 never calls, so the others wait; then rank 2 is aborted.
            let cancel = wait.cancel.clone();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(50));
                cancel.raise();
            });
        }
        if me == 1 {
            return None;
        }
        Some(scope.agree("dm_init()", &wait).map(drop).unwrap_err())
    });
    assert_eq!(errors[0].as_ref().unwrap().status(), Status::PeerLost);
    assert_eq!(errors[2].as_ref().unwrap().status(), Status::Aborted);
}

#[test]
fn a_rank_that_ends_its_wait_for_any_reason_says_so() {
    let began = Instant::now();
    let errors = ranks(3, |me, scope| {
        let watch: crate::wait::Watch = Arc::new(|| Err(Error::new(Status::Ccl, "its communicator failed")));
        match me {
            0 => Some(scope.agree("dm_flatten()", &soon()).map(drop).unwrap_err()),
            1 => Some(scope.agree("dm_flatten()", &Wait { watch: Some(watch), ..soon() }).map(drop).unwrap_err()),
            _ => None,
        }
    });
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    for error in errors.into_iter().flatten() {
        assert_eq!(error.status(), Status::Ccl, "{error}");
        assert!(error.message().contains("its communicator failed"), "{error}");
    }
}

/// The store does not answer set_once before the rank has returned, like a host that is far away or
/// busy.
#[test]
fn a_slow_store_does_not_keep_a_rank_that_is_aborted_and_the_others_learn_all_the_same() {
    let memory = MemoryStore::new();
    let answering = memory.clone();
    let before = move |operation: &str, _: usize, wait: &Wait| {
        if operation != "set_once" {
            return Ok(());
        }
        // A rank that waits for the answer waits for 5 s.
        let _ = answering.get("returned", &Wait::after(Duration::from_secs(5)));
        match wait.deadline.passed() {
            true => Err(Error::timeout("a slow store")),
            false => Ok(()),
        }
    };
    let store: Arc<dyn Store> = Arc::new(Hooked { store: memory.clone(), before });
    let losses = Arc::new(Losses::none(Arc::clone(&store), "test"));
    let scope = Scope::new(membership(store, losses, Members::All(2), 0), "test/world".to_owned());
    let wait = soon();
    let (aborted, took) = std::thread::scope(|threads| {
        let waiting = threads.spawn(|| {
            let (error, took) = timed(|| scope.agree("dm_init()", &wait).map(drop).unwrap_err());
            (error, Instant::now(), took.starved)
        });
        memory.get("test/world/0/here/0", &soon()).unwrap();
        let raised = Instant::now();
        wait.cancel.raise();
        let (error, returned, starved) = waiting.join().unwrap();
        memory.set("returned", b"1", &soon()).unwrap();
        (error, (returned - raised).saturating_sub(starved))
    });
    assert_eq!(aborted.status(), Status::Aborted);
    assert!(took < Duration::from_millis(250), "{took:?}: 70 ms on a machine that does nothing else");
    let told =
        Verdict::read(&String::from_utf8(memory.get("test/world/0/verdict", &soon()).unwrap()).unwrap()).unwrap();
    assert_eq!(told.status, Status::PeerLost);
}

#[test]
fn a_watch_that_tells_of_a_deadline_is_not_taken_for_the_own_one() {
    let errors = ranks(2, |me, scope| {
        let watch: crate::wait::Watch = Arc::new(|| Err(Error::timeout("its communicator failed earlier")));
        let wait = if me == 0 { Wait { watch: Some(watch), ..soon() } } else { soon() };
        (me == 0).then(|| scope.agree("dm_finalize()", &wait).map(drop).unwrap_err())
    });
    let error = errors[0].as_ref().unwrap();
    assert_eq!((error.status(), error.message()), (Status::Timeout, "its communicator failed earlier"));
}

/// Rank 0 is in another call, and was stopped while it had the lock of the folder.
#[test]
fn a_rank_that_keeps_the_lock_of_a_folder_is_named_by_calls_without_it() {
    let path = std::env::temp_dir().join(format!("devicemesh-lock-{}", std::process::id()));
    let store = |rank| FileStore::open_as(&path, rank).unwrap();
    let stopped = store(0);
    let lock = stopped.lock(&soon()).unwrap();
    let are_open = Barrier::new(2);
    let call = |me: usize| {
        let store: Arc<dyn Store> = Arc::new(store([1, 3][me]));
        are_open.wait();
        let losses = Arc::new(Losses::none(Arc::clone(&store), "test"));
        let members = Members::Listed(Arc::from([1, 3]));
        let scope = Scope::new(membership(store, losses, members, me), "test/part".to_owned());
        scope.agree("dm_get_comm(dim=a)", &Wait::after(Duration::from_secs(1))).map(drop).unwrap_err()
    };
    let errors = std::thread::scope(|threads| {
        let call = &call;
        let calls = [0, 1].map(|me| threads.spawn(move || call(me)));
        calls.map(|call| call.join().unwrap())
    });
    drop(lock);
    stopped.remove();
    for error in errors {
        assert_eq!((error.status(), error.ranks()), (Status::Timeout, &[0][..]), "{error}");
        let process = format!("rank 0 (pid {} on ", std::process::id());
        assert!(error.message().contains(&process), "{error}");
        assert!(error.message().contains("has not given back the lock of file://"), "{error}");
    }
}

#[test]
fn a_wait_for_a_key_of_the_world_ends_when_the_rank_that_would_write_it_is_lost() {
    let errors = ranks(2, |me, scope| {
        let round = scope.agree("dm_world_init()", &soon()).unwrap();
        if me == 0 {
            scope.membership.losses.announce(Incarnation::first(0));
            return None;
        }
        Some(round.fetch_of_world("test/device/rank", &soon()).unwrap_err())
    });
    let error = errors[1].as_ref().unwrap();
    assert_eq!((error.status(), error.lost()), (Status::PeerLost, &[0][..]), "{error}");
}

/// The name of a dimension may be a part of the keys of a call.
#[test]
fn a_key_that_the_store_does_not_take_is_no_loss_of_the_rank_that_serves() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = TcpStore::connect("127.0.0.1", server.local_addr().port(), &soon()).unwrap();
    let store: Arc<dyn Store> = Arc::new(store);
    let losses = Arc::new(Losses::none(Arc::clone(&store), "test"));
    let membership = Membership { served: true, ..membership(store, losses, Members::All(2), 1) };
    let scope = Scope::new(membership, format!("test/{}", "d".repeat(9000)));
    let error = scope.agree("dm_get_comm()", &soon()).map(drop).unwrap_err();
    assert_eq!((error.status(), error.lost()), (Status::InvalidArgument, &[][..]), "{error}");
    assert!(error.message().ends_with("at most 8192 are taken: use shorter dimension names"), "{error}");
    assert!(scope.membership.lost_others().is_empty());
}
