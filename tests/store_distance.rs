//! A store that is far away, or slow to answer. Nothing is late before its deadline, and order is
//! kept. A relay stands between the ranks and the store, and holds messages back as it is told.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use devicemesh::error::Status;
use devicemesh::rendezvous::store::{Server, Store, TcpStore};
use devicemesh::wait::Wait;

fn soon() -> Wait {
    Wait::after(Duration::from_secs(20))
}

/// Returns the port of a relay to `server`. Before the relay passes on what a client sends, it
/// sleeps for the time that `hold` gives for the connection's number and these bytes. A `foreign`
/// server does not say that it is a server of this library.
fn relay(server: &Server, foreign: bool, hold: impl Fn(usize, &[u8]) -> Duration + Send + Sync + 'static) -> u16 {
    let (listener, to) = (TcpListener::bind("127.0.0.1:0").unwrap(), server.local_addr());
    let (port, hold) = (listener.local_addr().unwrap().port(), Arc::new(hold));
    std::thread::spawn(move || {
        for (number, client) in listener.incoming().enumerate() {
            let (mut client, mut server) = (client.unwrap(), TcpStream::connect(to).unwrap());
            let (mut back, mut from) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            let hold = Arc::clone(&hold);
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(count @ 1..) = client.read(&mut buffer) {
                    std::thread::sleep(hold(number, &buffer[..count]));
                    let mut bytes = buffer[..count].to_vec();
                    if let Some(at) =
                        bytes.windows(18).position(|bytes| bytes == b"/devicemesh/server").filter(|_| foreign)
                    {
                        bytes[at + 1] = b'D';
                    }
                    if server.write_all(&bytes).is_err() {
                        break;
                    }
                }
                let _ = server.shutdown(std::net::Shutdown::Both);
            });
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut back);
                let _ = back.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    port
}

#[test]
fn a_wait_for_several_keys_at_a_server_far_away_takes_its_whole_time() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let port = relay(&server, true, |_, _| Duration::from_millis(200));
    let store = TcpStore::connect("127.0.0.1", port, &soon()).unwrap();
    let (began, timeout) = (Instant::now(), Duration::from_secs(2));
    let error = store.get_any(&["no", "neither"], &Wait::after(timeout)).unwrap_err();
    assert_eq!(error.status(), Status::Timeout, "{error}");
    assert!(error.message().contains("2000 ms"), "{error}");
    assert!(began.elapsed() >= timeout, "{error} after {:?}", began.elapsed());
    // The only connection is taken, so another one is made in the same way.
    let near = TcpStore::connect("127.0.0.1", server.local_addr().port(), &soon()).unwrap();
    std::thread::scope(|scope| {
        let waiting = [("a", "b"), ("c", "d"), ("e", "f")].map(|(first, second)| {
            scope.spawn(|| store.get_any(&[first, second], &soon()).map_err(|error| error.to_string()).unwrap())
        });
        std::thread::sleep(Duration::from_millis(1500));
        for key in ["a", "d", "f"] {
            near.set(key, b"1", &soon()).unwrap();
        }
        assert_eq!(waiting.map(|thread| thread.join().unwrap().0), [0, 1, 1]);
    });
}

#[test]
fn what_one_thread_does_is_in_order_over_several_connections() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    // The first connection's SET is on its way for long.
    let port = relay(&server, false, |number, bytes| {
        Duration::from_millis(if number == 0 && bytes[0] == 1 { 600 } else { 0 })
    });
    let store = TcpStore::connect("127.0.0.1", port, &soon()).unwrap();
    store.set("key", b"value", &soon()).unwrap();
    let wait = soon();
    std::thread::scope(|scope| {
        scope.spawn(|| store.get("never", &wait).unwrap_err());
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(store.try_get("key", &soon()).unwrap().as_deref(), Some(&b"value"[..]));
        wait.cancel.raise();
    });
}

#[test]
fn another_connection_may_take_long() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    // The second connection's greeting is lost.
    let port = relay(&server, false, |number, _| Duration::from_secs(if number == 1 { 60 } else { 0 }));
    let store = TcpStore::connect("127.0.0.1", port, &soon()).unwrap();
    let wait = soon();
    std::thread::scope(|scope| {
        scope.spawn(|| store.get("never", &wait).unwrap_err());
        std::thread::sleep(Duration::from_millis(50));
        let added = store.add("count", 1, &soon()).map_err(|error| error.to_string());
        wait.cancel.raise();
        assert_eq!(added.unwrap(), 1);
    });
}
