//! Checks what every store promises, on all kinds of store.

mod every_store;
mod ports;
#[path = "../src/starved.rs"]
mod starved;

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use devicemesh::error::{Error, Result, Status};
use devicemesh::rendezvous::store::{
    Arrival, CallbackStore, Callbacks, Count, Last, MemoryStore, Secret, Server, Store, TcpStore,
};
use devicemesh::wait::{Wait, Watch};
use every_store::{Table, callbacks, soon, subjects};
use ports::free_port;
use starved::timed;

/// Checks that the call waits until its deadline, which is 300 ms away, and not much longer. A busy
/// machine may need two seconds more.
fn is_late(call: impl FnOnce(&Wait) -> Result<()>) -> Error {
    let timeout = Duration::from_millis(300);
    let began = Instant::now();
    let error = call(&Wait::after(timeout)).unwrap_err();
    let waited = began.elapsed();
    assert_eq!(error.status(), Status::Timeout, "{error}");
    assert!(waited >= timeout && waited < timeout + Duration::from_secs(3), "{waited:?}: {error}");
    error
}

#[test]
fn values_come_back_as_they_were_set() {
    for subject in subjects() {
        let store = &subject.store;
        let large = vec![7u8; 1 << 20];
        for (key, value) in [("a", &b"one"[..]), ("empty", b""), ("x/y z%.#\u{e9}", b"\0\n\xff"), ("large", &large)] {
            assert_eq!(store.try_get(key, &soon()).unwrap(), None, "{}: {key}", store.name());
            store.set(key, value, &soon()).unwrap();
            assert_eq!(store.get(key, &soon()).unwrap(), value, "{}: {key}", store.name());
            assert_eq!(store.try_get(key, &soon()).unwrap().as_deref(), Some(value));
        }
        store.set("a", b"two", &soon()).unwrap();
        assert_eq!(store.get("a", &soon()).unwrap(), b"two");
        let keys: Vec<String> = ["a", "none", "large", "neither", "empty"].map(str::to_owned).to_vec();
        assert_eq!(store.present(&keys, &soon()).unwrap(), [true, false, true, false, true], "{}", store.name());
        assert_eq!(store.present(&[], &soon()).unwrap(), [false; 0]);
        let each = store.try_get_each(&keys, &soon()).unwrap();
        assert_eq!(each, [Some(b"two".to_vec()), None, Some(large), None, Some(vec![])], "{}", store.name());
        assert_eq!(store.try_get_each(&[], &soon()).unwrap(), [None; 0]);
        // More keys than are asked for at once, every third of which is there.
        let many: Vec<String> = (0..200).map(|number| format!("many/{number}")).collect();
        many.iter().step_by(3).for_each(|key| store.set(key, key.as_bytes(), &soon()).unwrap());
        let each = store.try_get_each(&many, &soon()).unwrap();
        let expected = |(number, key): (usize, &String)| (number % 3 == 0).then(|| key.clone().into_bytes());
        assert_eq!(each, many.iter().enumerate().map(expected).collect::<Vec<_>>(), "{}", store.name());
    }
}

/// A store that can leave a question open answers it once the key is there, and only a server can.
#[test]
fn an_open_question_is_answered_once_the_key_is_there() {
    let secret = Secret::new(b"an open question").unwrap();
    let guarded = Server::guarded("127.0.0.1:0", Some(secret.clone())).unwrap();
    let port = guarded.local_addr().port();
    let encrypted = TcpStore::connect_with_secret("127.0.0.1", port, Some(secret), &soon()).unwrap();
    let subjects = subjects();
    let encrypted: Arc<dyn Store> = Arc::new(encrypted);
    let mut answered = Vec::new();
    for store in subjects.iter().map(|subject| &subject.store).chain([&encrypted]) {
        let Some(mut question) = store.watch_key("door/1", &soon()).unwrap() else {
            assert!(!store.name().starts_with("tcp:"), "{}", store.name());
            continue;
        };
        assert!(!question.has_come().unwrap() && !question.has_come().unwrap(), "{}", store.name());
        store.set("door/2", b"other", &soon()).unwrap();
        assert!(!question.has_come().unwrap(), "{}", store.name());
        store.set("door/1", b"5:1 12", &soon()).unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        while !question.has_come().unwrap() {
            assert!(Instant::now() < end, "{}", store.name());
        }
        // The question is over, and its connection is used for other calls.
        assert_eq!(question.has_come().unwrap_err().status(), Status::Store, "{}", store.name());
        assert_eq!(store.get("door/1", &soon()).unwrap(), b"5:1 12");
        let mut late = store.watch_key("door/1", &soon()).unwrap().unwrap();
        while !late.has_come().unwrap() {
            assert!(Instant::now() < end, "{}", store.name());
        }
        answered.push(store.name());
    }
    assert!(answered.len() > 1, "{answered:?}");
}

/// A question whose server ends is an error, and not an answer.
#[test]
fn an_open_question_ends_with_its_server() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = TcpStore::connect("127.0.0.1", server.local_addr().port(), &soon()).unwrap();
    let mut question = store.watch_key("door/1", &soon()).unwrap().unwrap();
    drop(server);
    let end = Instant::now() + Duration::from_secs(20);
    while let Ok(has_come) = question.has_come() {
        assert!(!has_come && Instant::now() < end);
    }
}

#[test]
fn adds_of_many_threads_sum_up() {
    for subject in subjects() {
        let store = &subject.store;
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| (0..25).for_each(|_| assert!(store.add("count", 2, &soon()).is_ok())));
            }
        });
        assert_eq!(store.add("count", -1, &soon()).unwrap(), 399, "{}", store.name());
    }
}

#[test]
fn set_once_has_one_winner_that_everybody_sees() {
    for subject in subjects() {
        let store = &subject.store;
        let seen: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|number: u8| scope.spawn(move || store.set_once("verdict", &[b'a' + number], &soon()).unwrap()))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(seen.iter().all(|value| *value == seen[0] && value.len() == 1), "{}: {seen:?}", store.name());
        assert_eq!(store.get("verdict", &soon()).unwrap(), seen[0]);
    }
}

/// Starts a thread that sets the key to "here" a little later.
fn set_later(store: &Arc<dyn Store>, key: &'static str) -> JoinHandle<()> {
    let store = Arc::clone(store);
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(60));
        store.set(key, b"here", &soon()).unwrap();
    })
}

#[test]
fn get_waits_for_the_key_until_its_deadline() {
    for subject in subjects() {
        let store = Arc::clone(&subject.store);
        let setter = set_later(&store, "later");
        assert_eq!(store.get("later", &soon()).unwrap(), b"here", "{}", store.name());
        setter.join().unwrap();

        let error = is_late(|wait| store.get("never", wait).map(drop));
        assert!(error.message().contains("never") && error.message().contains("300 ms"), "{error}");
        // It is as good as before.
        assert_eq!(store.get("later", &soon()).unwrap(), b"here");
    }
}

#[test]
fn get_any_waits_for_whichever_comes_first() {
    for subject in subjects() {
        let store = Arc::clone(&subject.store);
        let setter = set_later(&store, "third");
        let found = store.get_any(&["first", "second", "third"], &soon()).unwrap();
        assert_eq!(found, (2, b"here".to_vec()), "{}", store.name());
        setter.join().unwrap();
        store.set("second", b"too", &soon()).unwrap();
        assert_eq!(store.get_any(&["first", "second", "third"], &soon()).unwrap(), (1, b"too".to_vec()));

        is_late(|wait| store.get_any(&["no", "neither"], wait).map(drop));
        // It is as good as before.
        assert_eq!(store.get("third", &soon()).unwrap(), b"here");
    }
}

/// Eight ranks arrive at one place. The last one to be counted stores the verdict, unless a verdict
/// stands there, and all ranks get the verdict that stands.
#[test]
fn ranks_that_arrive_get_what_the_last_one_stores() {
    for subject in subjects() {
        let store = &subject.store;
        store.set_once("second/verdict", b"refused", &soon()).unwrap();
        for (place, stands) in [("first", "agreed"), ("second", "refused")] {
            let (counter, verdict) = (format!("{place}/count"), format!("{place}/verdict"));
            let arrive = |rank: usize| {
                let note = (format!("{place}/here/{rank}"), rank.to_string());
                let count = Count {
                    counter: &counter,
                    amount: 1,
                    last: Some(Last { sum: 8, key: &verdict, value: b"agreed" }),
                };
                let arrival = Arrival { note: Some((&note.0, note.1.as_bytes())), count: Some(count) };
                let (mut sums, keys) = (Vec::new(), ["never", &verdict]);
                let mut counted = |sum| {
                    // The note is there before the rank is counted.
                    assert_eq!(store.try_get(&note.0, &soon())?.as_deref(), Some(note.1.as_bytes()));
                    sums.push(sum);
                    Ok(())
                };
                let found = store.arrive(&arrival, &keys, &mut counted, &soon()).unwrap();
                assert_eq!(found, Some((1, stands.into())), "{}: {place}", store.name());
                assert_eq!(sums.len(), 1);
                sums[0]
            };
            let mut sums: Vec<i64> = std::thread::scope(|scope| {
                let arrive = &arrive;
                let threads: Vec<_> = (0..8).map(|rank| scope.spawn(move || arrive(rank))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            sums.sort_unstable();
            assert_eq!(sums, [1, 2, 3, 4, 5, 6, 7, 8], "{}: {place}", store.name());
        }
    }
}

#[test]
fn an_arrival_may_end_early_or_wait_for_nothing() {
    for subject in subjects() {
        let store = &subject.store;
        let count = Count { counter: "count", amount: 2, last: Some(Last { sum: 4, key: "all", value: b"1" }) };
        let arrival = Arrival { note: Some(("here", b"me")), count: Some(count) };
        let refuse = &mut |_| Err(Error::new(Status::Mismatch, "no"));
        let error = store.arrive(&arrival, &["all"], refuse, &soon()).unwrap_err();
        assert_eq!((error.status(), error.message()), (Status::Mismatch, "no"), "{}", store.name());
        let only_note = Arrival { note: Some(("here", b"me")), count: None };
        let error = is_late(|wait| store.arrive(&only_note, &["all"], &mut |_| Ok(()), wait).map(drop));
        assert!(error.message().contains("all"), "{error}");
        assert_eq!(store.arrive(&arrival, &[], &mut |_| Ok(()), &soon()).unwrap(), None);
        assert_eq!(store.try_get("all", &soon()).unwrap().as_deref(), Some(&b"1"[..]), "{}", store.name());
        let only_note = Arrival { note: Some(("here", b"still")), count: None };
        assert_eq!(store.arrive(&only_note, &[], &mut |_| Ok(()), &soon()).unwrap(), None);
        assert_eq!(store.try_get("here", &soon()).unwrap().as_deref(), Some(&b"still"[..]));
    }
}

#[test]
fn a_long_wait_looks_at_what_its_caller_watches() {
    for subject in subjects() {
        let enough = Instant::now() + Duration::from_millis(400);
        let watch: Watch = Arc::new(move || match Instant::now() < enough {
            true => Ok(()),
            false => Err(Error::new(Status::PeerLost, "enough")),
        });
        let began = Instant::now();
        let error = subject.store.get_any(&["no", "neither"], &Wait { watch: Some(watch), ..soon() }).unwrap_err();
        assert_eq!(error.status(), Status::PeerLost, "{}: {error}", subject.store.name());
        assert!(began.elapsed() < Duration::from_secs(3), "{}: {:?}", subject.store.name(), began.elapsed());
        assert_eq!(subject.store.add("in step", 1, &soon()).unwrap(), 1);
    }
}

#[test]
fn keys_that_are_long_or_alike_stay_apart() {
    for subject in subjects() {
        let (long, longer) = ("k/".repeat(400), "k/".repeat(401));
        for (key, value) in [(&long, b"one"), (&longer, b"two")] {
            subject.store.set(key, value, &soon()).unwrap();
        }
        for (key, value) in [(&long, b"one"), (&longer, b"two")] {
            assert_eq!(subject.store.get(key, &soon()).unwrap(), value, "{}", subject.store.name());
        }
    }
}

#[test]
fn a_last_word_is_passed_on_when_the_last_connection_ends() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let connect = || TcpStore::connect("127.0.0.1", server.local_addr().port(), &soon()).unwrap();
    let (staying, leaving, other) = (connect(), connect(), connect());
    assert!(leaving.leave_last_word("lost", b"3", &soon()).unwrap());
    assert!(other.leave_last_word("lost", b"5", &soon()).unwrap());
    // More connections of the same handle, of which one is closed by its deadline.
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| leaving.get("never", &Wait::after(Duration::from_millis(50))).unwrap_err());
        }
    });
    // Waits that were ended from outside leave connections out of step; they are no end of the
    // process.
    for _ in 0..5 {
        let wait = soon();
        std::thread::scope(|scope| {
            scope.spawn(|| leaving.get("never", &wait).unwrap_err());
            std::thread::sleep(Duration::from_millis(20));
            wait.cancel.raise();
        });
    }
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(staying.try_get("lost", &soon()).unwrap(), None, "it is there still");
    drop(leaving);
    assert_eq!(staying.get("lost/1", &soon()).unwrap(), b"3");
    drop(other);
    assert_eq!(staying.get("lost/2", &soon()).unwrap(), b"5");
    assert_eq!(staying.get("lost", &soon()).unwrap(), b"2");
    // A store that cannot know who has gone does not promise to tell.
    assert!(!MemoryStore::new().leave_last_word("lost", b"1", &soon()).unwrap());
}

#[test]
fn a_store_with_a_secret_is_for_those_who_have_it() {
    let secret = |text: &str| Secret::new(text.as_bytes());
    let guarded = Server::guarded("127.0.0.1:0", secret("open sesame")).unwrap();
    let open = Server::bind("127.0.0.1:0").unwrap();
    let connect = |server: &Server, secret: Option<Secret>| {
        TcpStore::connect_with_secret("127.0.0.1", server.local_addr().port(), secret, &soon())
    };
    let store = connect(&guarded, secret("open sesame")).unwrap();
    assert_eq!(store.add("count", 1, &soon()).unwrap(), 1);
    let began = Instant::now();
    for (server, theirs, words) in [
        (&guarded, None, "takes only clients that have its secret: set DM_STORE_SECRET"),
        (&guarded, secret("open barley"), "has another secret"),
        (&open, secret("open sesame"), "is served without a secret"),
    ] {
        let error = connect(server, theirs).err().unwrap();
        assert_eq!(error.status(), Status::Store);
        assert!(error.message().contains(words), "{error}");
    }
    assert!(began.elapsed() < Duration::from_secs(5), "said at once, not at the deadline");
    // The ranks that wait for the refused one can learn of it.
    for (store, words) in [
        (&store, "refused 2 connections, the last one from 127.0.0.1, because its DM_STORE_SECRET is another one"),
        (
            &connect(&open, None).unwrap(),
            "refused 1 connection, the last one from 127.0.0.1, because it has a DM_STORE_SECRET",
        ),
    ] {
        let said = store.try_get("devicemesh/refused", &soon()).unwrap().unwrap_or_default();
        assert!(String::from_utf8_lossy(&said).contains(words), "{}", said.escape_ascii());
    }

    // PyTorch's server closes at an operation that it does not know.
    let closing = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = closing.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in closing.incoming() {
            let _ = stream.unwrap().read(&mut [0; 64]);
        }
    });
    let error = TcpStore::connect_with_secret("127.0.0.1", port, secret("open sesame"), &soon()).err().unwrap();
    assert!(error.message().contains("unset DM_STORE_SECRET"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
}

/// Raises the flag of a call once the call has waited for that time. Returns what the call returns,
/// and how long after that it returned, without the time for which it waited for a processor.
fn raised_after<T>(pause: Duration, call: impl FnOnce(&Wait) -> T) -> (T, Duration) {
    let wait = soon();
    let cancel = wait.cancel.clone();
    let raising = std::thread::spawn(move || {
        std::thread::sleep(pause);
        cancel.raise();
        // This thread may wait for a processor before it raises the flag.
        Instant::now()
    });
    let (returned, took) = timed(|| call(&wait));
    let at = Instant::now();
    let took_after = at.saturating_duration_since(raising.join().unwrap());
    (returned, took_after.saturating_sub(took.starved))
}

#[test]
fn a_raised_flag_ends_a_wait() {
    for subject in subjects() {
        let store = &subject.store;
        let (error, took) = raised_after(Duration::from_millis(50), |wait| store.get("never", wait).unwrap_err());
        assert_eq!(error.status(), Status::Aborted, "{}", store.name());
        assert!(took < Duration::from_millis(350), "{}: {took:?}", store.name());
    }
}

#[test]
fn the_callers_drop_comes_once_and_only_for_a_world_that_was_made() {
    let table = Table::leaked();
    for (kept, expected) in [(false, 0), (true, 1)] {
        // SAFETY: as above.
        let store = unsafe { CallbackStore::new(callbacks(table)) }.unwrap();
        if kept {
            store.keep();
        }
        drop(store);
        assert_eq!(table.dropped.load(Ordering::SeqCst), expected);
    }
    // SAFETY: never called, as it is refused.
    let refused = unsafe { CallbackStore::new(Callbacks { get: None, ..callbacks(table) }) };
    assert!(refused.err().unwrap().message().contains("get is NULL"));
}

#[test]
fn a_server_that_ends_is_an_error_at_once() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = Arc::new(TcpStore::connect("127.0.0.1", server.local_addr().port(), &soon()).unwrap());
    let waiting = std::thread::spawn({
        let store = Arc::clone(&store);
        move || store.get("never", &soon()).unwrap_err()
    });
    while server.clients() == 0 {
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(50));
    let ended = Instant::now();
    drop(server);
    let error = waiting.join().unwrap();
    assert_eq!(error.status(), Status::Store);
    assert!(error.message().contains("may have ended"), "{error}");
    assert!(ended.elapsed() < Duration::from_secs(2));
    // Later calls find it out as fast: they do not wait for a server that has gone.
    for _ in 0..3 {
        assert_eq!(store.add("count", 1, &soon()).unwrap_err().status(), Status::Store);
    }
    assert!(ended.elapsed() < Duration::from_secs(4));
}

#[test]
fn connecting_takes_its_whole_time_and_ends_when_cancelled() {
    let port = free_port();
    let timeout = Duration::from_secs(1);
    let (error, took) = timed(|| TcpStore::connect("127.0.0.1", port, &Wait::after(timeout)).err().unwrap());
    assert_eq!(error.status(), Status::Store, "{error}");
    assert!(took.whole >= timeout && took.keeps_to(timeout), "{took:?}");

    // The pauses between attempts are half a second long by then.
    let connect = |wait: &Wait| TcpStore::connect("127.0.0.1", port, wait).err().unwrap();
    let (error, took) = raised_after(Duration::from_millis(1300), connect);
    assert_eq!(error.status(), Status::Aborted);
    assert!(took < Duration::from_millis(200), "{took:?}");
}

#[test]
fn looking_for_a_key_again_and_again_does_not_connect_again_and_again() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = TcpStore::connect("127.0.0.1", server.local_addr().port(), &soon()).unwrap();
    for round in 0..5 {
        assert_eq!(store.get("never", &Wait::after(Duration::from_millis(30))).unwrap_err().status(), Status::Timeout);
        // The connection is in step: this answer is the one to this question.
        assert_eq!(store.add("count", 1, &soon()).unwrap(), round + 1);
    }
    assert_eq!(server.clients(), 1);
    store.set("never", b"after all", &soon()).unwrap();
    assert_eq!(store.get("never", &soon()).unwrap(), b"after all");
}
