//! The client of this library on the servers of PyTorch, with everything that the library asks of
//! a store. `make interop` starts the servers; DM_TORCH_STORES holds their ports.

use std::sync::Arc;
use std::time::{Duration, Instant};

use devicemesh::error::Status;
use devicemesh::rendezvous::store::{Store, TcpStore};
use devicemesh::wait::Wait;

fn soon() -> Wait {
    Wait::after(Duration::from_secs(20))
}

#[test]
#[ignore = "needs PyTorch's servers: make interop"]
fn every_operation_on_each_server() {
    let ports = std::env::var("DM_TORCH_STORES").expect("DM_TORCH_STORES holds ports");
    for port in ports.split_whitespace() {
        let store = Arc::new(TcpStore::connect("127.0.0.1", port.parse().unwrap(), &soon()).unwrap());
        values(&store);
        together(&store);
        waits(&store);
    }
}

fn values(store: &TcpStore) {
    let large = vec![7u8; 1 << 20];
    for (key, value) in [("a", &b"one"[..]), ("empty", b""), ("x/y z%.#\u{e9}", b"\0\n\xff"), ("large", &large)] {
        assert_eq!(store.try_get(key, &soon()).unwrap(), None, "{}: {key}", store.name());
        store.set(key, value, &soon()).unwrap();
        assert_eq!(store.get(key, &soon()).unwrap(), value, "{}: {key}", store.name());
        assert_eq!(store.try_get(key, &soon()).unwrap().as_deref(), Some(value), "{}: {key}", store.name());
    }
    let keys = ["a", "none", "large", "neither", "empty"].map(str::to_owned);
    assert_eq!(store.present(&keys, &soon()).unwrap(), [true, false, true, false, true], "{}", store.name());
    store.delete("a", &soon()).unwrap();
    store.delete("a", &soon()).unwrap();
    assert_eq!(store.try_get("a", &soon()).unwrap(), None, "{}", store.name());
}

/// Eight threads count and choose a value.
fn together(store: &Arc<TcpStore>) {
    let chosen: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8u8)
            .map(|number| {
                scope.spawn(move || {
                    (0..25).for_each(|_| assert!(store.add("count", 2, &soon()).is_ok()));
                    store.set_once("verdict", &[b'a' + number], &soon()).unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(store.add("count", -1, &soon()).unwrap(), 399, "{}", store.name());
    assert!(chosen.iter().all(|value| *value == chosen[0] && value.len() == 1), "{}: {chosen:?}", store.name());
}

/// Waits for a key that comes, for one that does not, and calls a wait off. The connection is
/// still in step afterwards.
fn waits(store: &Arc<TcpStore>) {
    let waiting = std::thread::spawn({
        let store = Arc::clone(store);
        move || store.get("later", &soon()).unwrap()
    });
    std::thread::sleep(Duration::from_millis(60));
    store.set("later", b"here", &soon()).unwrap();
    assert_eq!(waiting.join().unwrap(), b"here", "{}", store.name());

    // An open question, as dm_waiting leaves one.
    let mut question = store.watch_key("door", &soon()).unwrap().expect("every server can leave a question open");
    assert!(!question.has_come().unwrap(), "{}", store.name());
    store.set("door", b"5:1 12", &soon()).unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while !question.has_come().unwrap() {
        assert!(Instant::now() < end, "{}", store.name());
    }

    let began = Instant::now();
    let error = store.get("never", &Wait::after(Duration::from_millis(300))).unwrap_err();
    assert_eq!(error.status(), Status::Timeout, "{error}");
    assert!(began.elapsed() < Duration::from_secs(2), "{}: {:?}", store.name(), began.elapsed());
    assert_eq!(store.get("later", &soon()).unwrap(), b"here", "{}", store.name());

    let wait = soon();
    let cancel = wait.cancel.clone();
    let waiting = std::thread::spawn({
        let store = Arc::clone(store);
        move || store.get("never", &wait).unwrap_err()
    });
    std::thread::sleep(Duration::from_millis(50));
    cancel.raise();
    assert_eq!(waiting.join().unwrap().status(), Status::Aborted, "{}", store.name());
    assert_eq!(store.get("later", &soon()).unwrap(), b"here", "{}", store.name());
}
