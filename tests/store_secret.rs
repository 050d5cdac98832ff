//! A store with a secret: who is let in, and what others see of its connections. These tests also
//! speak to the server byte by byte.

mod wire;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use devicemesh::rendezvous::store::records::Records;
use devicemesh::rendezvous::store::{Secret, Server, Store, TcpStore};
use devicemesh::rendezvous::{JoinOptions, World};
use wire::{connect, soon, string};

/// VALIDATE.
const HELLO: [u8; 5] = [0, 0xce, 0xf7, 0x85, 0x3c];

fn request(op: u8, strings: &[&[u8]]) -> Vec<u8> {
    std::iter::once(op).chain(strings.iter().flat_map(string)).collect()
}

fn ask(stream: &mut TcpStream, request: &[u8], answer: &[u8]) {
    stream.write_all(request).unwrap();
    let mut bytes = vec![0; answer.len()];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes, answer);
}

/// Whether the server closes the connection and sends nothing more.
fn is_dropped(mut stream: TcpStream) -> bool {
    match stream.read(&mut [0]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

#[test]
fn a_secret_is_asked_for_before_anything_else() {
    let server = Server::guarded("127.0.0.1:0", Secret::new(b"secret")).unwrap();
    // PyTorch's client greets with a ping. It is told the reason, and then dropped.
    let mut stranger = connect(&server);
    ask(&mut stranger, &[&HELLO[..], &[13, 1, 2, 3, 4]].concat(), b"DENY");
    assert!(is_dropped(stranger));
    // Version 0.1 asked for a proof in the operations 102 and 103.
    for operation in [request(1, &[b"/a", b"1"]), request(102, &[b"nonce"]), request(103, &[b"guess"]), vec![7]] {
        let mut stranger = connect(&server);
        stranger.write_all(&[&HELLO[..], &operation].concat()).unwrap();
        assert!(is_dropped(stranger), "operation {}", operation[0]);
    }
    // Messages that were made without the secret.
    for guess in ["", "guess", &"guess".repeat(10)[..48]] {
        let mut stranger = connect(&server);
        ask(&mut stranger, &[&HELLO[..], &request(104, &[guess.as_bytes()])].concat(), &string([0]));
        assert!(is_dropped(stranger));
    }
}

/// Returns a connection on which the handshake is done, its records, and the bytes that began it.
fn encrypted(server: &Server, secret: &Secret) -> (TcpStream, Records, Vec<u8>) {
    let (mut records, first) = Records::initiator(secret).unwrap();
    let greeting = [&HELLO[..], &request(104, &[&first])].concat();
    let mut stream = connect(server);
    stream.write_all(&greeting).unwrap();
    let mut answer = [0; 56];
    stream.read_exact(&mut answer).unwrap();
    records.finish(&answer[8..]).unwrap();
    (stream, records, greeting)
}

fn sealed(records: &mut Records, text: &[u8]) -> Vec<u8> {
    let mut record = Vec::new();
    records.seal(text, &mut record).unwrap();
    record
}

fn opened(stream: &mut TcpStream, records: &mut Records, count: usize) -> Vec<u8> {
    let (mut text, mut piece) = (Vec::new(), [0; 64]);
    while text.len() < count {
        let count = stream.read(&mut piece).unwrap();
        assert!(count > 0, "the server closed the connection");
        records.open(&piece[..count], &mut text).unwrap();
    }
    text
}

#[test]
fn records_may_end_anywhere_in_a_request() {
    let secret = Secret::new(b"secret").unwrap();
    let server = Server::guarded("127.0.0.1:0", Some(secret.clone())).unwrap();
    let (mut client, mut records, _) = encrypted(&server, &secret);
    let requests = [request(1, &[b"/a", b"one"]), request(3, &[b"/a"]), vec![13, 1, 2, 3, 4]].concat();
    let answers = [&string("one")[..], &[1, 2, 3, 4]].concat();
    for cut in 1..requests.len() {
        // Two records, which also come in pieces that end elsewhere.
        let [first, second] = [&requests[..cut], &requests[cut..]].map(|text| sealed(&mut records, text));
        let bytes = [first, second].concat();
        let (first, second) = bytes.split_at(cut + 3);
        client.write_all(first).unwrap();
        client.flush().unwrap();
        client.write_all(second).unwrap();
        assert_eq!(opened(&mut client, &mut records, answers.len()), answers, "a cut after {cut} bytes");
    }
}

#[test]
fn what_is_not_encrypted_for_this_connection_is_not_carried_out() {
    let secret = Secret::new(b"secret").unwrap();
    let server = Server::guarded("127.0.0.1:0", Some(secret.clone())).unwrap();
    let port = server.local_addr().port();
    let honest = TcpStore::connect_with_secret("127.0.0.1", port, Some(secret.clone()), &soon()).unwrap();
    let set = request(1, &[b"/taken", b"1"]);
    // What was recorded of one connection, and is sent again.
    let (mut first, mut records, greeting) = encrypted(&server, &secret);
    let add = sealed(&mut records, &[request(4, &[b"/count"]), 1i64.to_le_bytes().to_vec()].concat());
    first.write_all(&add).unwrap();
    assert_eq!(opened(&mut first, &mut records, 8), 1i64.to_le_bytes());
    let mut copy = connect(&server);
    copy.write_all(&greeting).unwrap();
    copy.read_exact(&mut [0; 56]).unwrap();
    copy.write_all(&add).unwrap();
    assert!(is_dropped(copy), "a record of another connection");
    // The same record twice.
    first.write_all(&add).unwrap();
    assert!(is_dropped(first), "a record that came before");
    // An open request after the handshake, and one together with it.
    let (mut open, _, _) = encrypted(&server, &secret);
    open.write_all(&set).unwrap();
    let mut early = connect(&server);
    early.write_all(&[&greeting[..], &set].concat()).unwrap();
    assert!(is_dropped(early), "an open request with the handshake");
    // A record that was changed on its way, and one whose length is too small.
    let (mut changed, mut records, _) = encrypted(&server, &secret);
    let mut record = sealed(&mut records, &set);
    *record.last_mut().unwrap() ^= 1;
    changed.write_all(&record).unwrap();
    assert!(is_dropped(changed), "a record that was changed");
    let (mut short, _, _) = encrypted(&server, &secret);
    short.write_all(&[16, 0]).unwrap();
    assert!(is_dropped(short), "a record without text");
    assert_eq!(honest.add("count", 1, &soon()).unwrap(), 2, "each request was carried out once");
    assert_eq!(honest.try_get("taken", &soon()).unwrap(), None);
    drop(open);
}

/// Passes everything on between clients and the server, and keeps a copy.
fn recording_proxy(server: &Server) -> (u16, Arc<Mutex<Vec<u8>>>) {
    let (listener, heard) = (TcpListener::bind("127.0.0.1:0").unwrap(), Arc::new(Mutex::new(Vec::new())));
    let (port, kept, to) = (listener.local_addr().unwrap().port(), Arc::clone(&heard), server.local_addr());
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(to).unwrap());
            for (mut from, mut into) in [(&client, &server), (&server, &client)]
                .map(|(from, into)| (from.try_clone().unwrap(), into.try_clone().unwrap()))
            {
                let kept = Arc::clone(&kept);
                std::thread::spawn(move || {
                    let mut piece = [0; 4096];
                    while let Ok(count @ 1..) = from.read(&mut piece) {
                        kept.lock().unwrap().extend_from_slice(&piece[..count]);
                        if into.write_all(&piece[..count]).is_err() {
                            break;
                        }
                    }
                    let _ = into.shutdown(std::net::Shutdown::Both);
                });
            }
        }
    });
    (port, heard)
}

#[test]
fn nobody_between_client_and_server_sees_a_key_or_a_value() {
    let long: Vec<u8> = b"a value that is longer than a record. ".repeat(2000);
    for (secret, is_seen) in [(Secret::new(b"secret"), false), (None, true)] {
        let server = Server::guarded("127.0.0.1:0", secret.clone()).unwrap();
        let (port, heard) = recording_proxy(&server);
        let store = TcpStore::connect_with_secret("127.0.0.1", port, secret, &soon()).unwrap();
        store.set("the key of it", b"the value of it", &soon()).unwrap();
        assert_eq!(store.get("the key of it", &soon()).unwrap(), b"the value of it");
        store.set("long", &long, &soon()).unwrap();
        assert_eq!(store.get("long", &soon()).unwrap(), long);
        assert!(store.leave_last_word("gone", b"the last word", &soon()).unwrap());
        store.forget(vec!["forgotten key".to_owned()], &soon());
        assert_eq!(store.add("sum", 3, &soon()).unwrap(), 3);
        assert_eq!(store.present(&["the key of it".to_owned(), "no key".to_owned()], &soon()).unwrap(), [true, false]);
        let heard = heard.lock().unwrap();
        for words in ["the key of it", "the value", "longer than", "last word", "forgotten", "no key", "secret"] {
            let seen = heard.windows(words.len()).any(|window| window == words.as_bytes());
            assert_eq!(seen, is_seen && words != "secret", "{words:?}");
        }
    }
}

/// `cargo test --release --test store_secret -- --ignored --nocapture cost` prints what a secret
/// costs, on this machine.
#[test]
#[ignore = "a measurement, for docs/protocol.md"]
fn cost() {
    let median = |rounds: usize, mut call: Box<dyn FnMut() + '_>| {
        let mut took: Vec<f64> = (0..rounds)
            .map(|_| {
                let began = Instant::now();
                call();
                began.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        took.sort_by(f64::total_cmp);
        took[rounds / 2]
    };
    // The two stores take turns, so the load of the machine is alike for both.
    for _ in 0..3 {
        for secret in [None, Some("secret")] {
            // SAFETY: this test runs alone.
            unsafe {
                match secret {
                    Some(secret) => std::env::set_var("DM_STORE_SECRET", secret),
                    None => std::env::remove_var("DM_STORE_SECRET"),
                }
            }
            let secret = secret.and_then(|secret| Secret::new(secret.as_bytes()));
            let server = Server::guarded("127.0.0.1:0", secret.clone()).unwrap();
            let port = server.local_addr().port();
            let connect = || TcpStore::connect_with_secret("127.0.0.1", port, secret.clone(), &soon()).unwrap();
            let store = connect();
            let value = vec![7; 1 << 20];
            let add = median(2000, Box::new(|| assert!(store.add("count", 1, &soon()).is_ok())));
            let set = median(100, Box::new(|| store.set("large", &value, &soon()).unwrap()));
            let get = median(100, Box::new(|| drop(store.get("large", &soon()).unwrap())));
            let connected = median(200, Box::new(|| drop(connect())));
            drop((store, server));
            let join = |rank, port: u16| {
                let options = JoinOptions::ranked(rank, 2).init_method(format!("tcp://127.0.0.1:{port}"));
                World::join("cpu", &options).unwrap()
            };
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let barrier = std::thread::scope(|threads| {
                threads.spawn(|| {
                    let world = join(1, port);
                    (0..500).for_each(|_| world.barrier(None).unwrap());
                });
                let world = join(0, port);
                median(500, Box::new(|| world.barrier(None).unwrap()))
            });
            let secret = if secret.is_some() { "with a secret" } else { "without" };
            println!(
                "{secret}: connect {connected:.0} us, ADD {add:.1}, SET of 1 MiB {set:.0}, GET of 1 MiB {get:.0}, barrier of two ranks {barrier:.0}"
            );
        }
    }
}
