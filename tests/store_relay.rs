//! A relay carries the connections of many clients in one connection, a trunk. No client of a relay
//! notices that, and none holds up another one. tests/store_contract.rs tries each promise of a
//! store by a relay, too.

mod wire;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use devicemesh::error::Status;
use devicemesh::rendezvous::store::{Relay, Secret, Server, Store, TcpStore};
use devicemesh::wait::Wait;
use wire::{
    GREETING, LOOK, connect, connect_at, deaf_clients, greeted, greeted_at, honest, late_reader_gets_everything,
    memory_mib, soon, string, wait_until,
};

/// The word that begins a channel. With a number in its other bits, it says how many bytes were
/// taken (src/rendezvous/store/channels.rs).
const BEGINS: u32 = 1 << 31;
/// The most bytes in a frame, and the most bytes of a channel on their way.
const MOST: usize = 8 << 10;
const WINDOW: usize = 16 << 10;

fn relay_of(server: &Server) -> Relay {
    Relay::start("127.0.0.1", server.local_addr().port(), None, &soon()).unwrap().unwrap()
}

fn client_of(relay: &Relay) -> TcpStore {
    TcpStore::connect("127.0.0.1", relay.local_addr().port(), &soon()).unwrap()
}

/// A connection that the server takes for a trunk.
fn trunk_of(server: &Server) -> TcpStream {
    let mut stream = greeted(server);
    stream.write_all(&[106]).unwrap();
    let mut begun = [9];
    stream.read_exact(&mut begun).unwrap();
    assert_eq!(begun, [0]);
    stream
}

fn frame(channel: u32, word: u32, bytes: &[u8]) -> Vec<u8> {
    [&channel.to_le_bytes(), &word.to_le_bytes(), bytes].concat()
}

fn bytes_of(channel: u32, bytes: &[u8]) -> Vec<u8> {
    frame(channel, bytes.len() as u32, bytes)
}

/// The frames that begin a channel and send its first bytes.
fn begun(channel: u32, bytes: &[u8]) -> Vec<u8> {
    [frame(channel, BEGINS, &[]), bytes_of(channel, bytes)].concat()
}

/// A request that leaves a last word.
fn last_word(word: &str) -> Vec<u8> {
    [&[101][..], &string("/lost"), &string(word)].concat()
}

/// Reads the next frame: its channel, its word, and its bytes.
fn next_frame(stream: &mut TcpStream) -> (u32, u32, Vec<u8>) {
    let mut header = [0; 8];
    stream.read_exact(&mut header).unwrap();
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
    let mut bytes = vec![0; if word(4) & BEGINS == 0 { word(4) as usize } else { 0 }];
    stream.read_exact(&mut bytes).unwrap();
    (word(0), word(4), bytes)
}

/// Whether the server ends the connection, within the time of its reads.
fn is_dropped(stream: &mut TcpStream) -> bool {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

/// How many connections this host has at that port of its own.
fn sockets_at(port: u16) -> usize {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let here = format!("{:08X}:{port:04X}", u32::from_ne_bytes([127, 0, 0, 1]));
    let is_there = |line: &&str| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, _, state) = (fields.next(), fields.next(), fields.next());
        // At another address of this machine, another program may use the same port.
        local == Some(&*here) && state == Some("01")
    };
    table.lines().filter(is_there).count()
}

#[test]
fn the_clients_of_a_relay_share_one_socket_of_the_server() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let relay = relay_of(&server);
    let stores: Vec<TcpStore> = (0..50).map(|_| client_of(&relay)).collect();
    wait_until("all clients are there", || server.clients() == 51);
    assert_eq!(sockets_at(server.local_addr().port()), 1);
    std::thread::scope(|scope| {
        for (number, store) in stores.iter().enumerate() {
            scope.spawn(move || {
                // Each value is longer than a window, in both directions.
                let (key, value) = (format!("value{number}"), vec![number as u8; 200_000 + number]);
                store.set(&key, &value, &soon()).unwrap();
                let next = format!("value{}", (number + 1) % 50);
                assert_eq!(
                    store.get(&next, &soon()).unwrap(),
                    vec![((number + 1) % 50) as u8; 200_000 + (number + 1) % 50]
                );
                store.add("count", 1, &soon()).unwrap();
            });
        }
    });
    assert_eq!(stores[0].add("count", 0, &soon()).unwrap(), 50);
    let large = vec![3; 8 << 20];
    stores[1].set("large", &large, &soon()).unwrap();
    assert_eq!(stores[2].get("large", &soon()).unwrap(), large);
    drop(stores);
    wait_until("the clients go", || server.clients() == 1);
    drop(relay);
    wait_until("the relay goes", || server.clients() == 0);
}

#[test]
fn a_client_that_never_reads_holds_up_no_other_client_of_its_relay() {
    alone!("a_client_that_never_reads_holds_up_no_other_client_of_its_relay");
    let server = Server::bind("127.0.0.1:0").unwrap();
    let relay = relay_of(&server);
    let store = client_of(&relay);
    store.set("large", &vec![1; 4 << 20], &soon()).unwrap();
    let before = memory_mib("VmRSS:");
    let _deaf = deaf_clients(relay.local_addr(), 8, 100_000);
    let began = Instant::now();
    (1..=100).for_each(|sum| assert_eq!(store.add("count", 1, &soon()).unwrap(), sum));
    assert!(began.elapsed() < Duration::from_secs(5), "{:?} for 100 small questions", began.elapsed());
    let grown = memory_mib("VmRSS:").saturating_sub(before);
    assert!(grown < 8 * 8 + 32, "{grown} MiB for 8 clients that do not read");

    late_reader_gets_everything(relay.local_addr());
}

#[test]
fn each_client_of_a_relay_has_its_own_last_word() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let staying = honest(&server);
    let relay = relay_of(&server);
    let clients: Vec<TcpStore> = (0..3).map(|_| client_of(&relay)).collect();
    for (number, client) in clients.iter().enumerate() {
        assert!(client.leave_last_word("lost", number.to_string().as_bytes(), &soon()).unwrap());
    }
    assert!(staying.leave_last_word("lost", b"staying", &soon()).unwrap());
    let mut clients = clients.into_iter();
    drop(clients.next());
    assert_eq!(staying.get("lost/1", &soon()).unwrap(), b"0");
    assert_eq!(staying.try_get("lost/2", &soon()).unwrap(), None);
    // With the relay its other clients are gone, and nobody else.
    drop(relay);
    let mut words = ["lost/2", "lost/3"].map(|key| staying.get(key, &soon()).unwrap());
    words.sort();
    assert_eq!(words, [b"1", b"2"]);
    assert_eq!(staying.try_get("lost/4", &soon()).unwrap(), None);
    let error = clients.next().unwrap().add("count", 1, &soon()).unwrap_err();
    assert_eq!(error.status(), Status::Store, "{error}");
}

#[test]
fn the_end_of_the_server_is_an_error_at_once_by_a_relay_too() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let relay = relay_of(&server);
    let store = client_of(&relay);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| store.get("never", &soon()).unwrap_err());
        wait_until("both connections are there", || server.clients() == 2);
        std::thread::sleep(Duration::from_millis(50));
        let ended = Instant::now();
        drop(server);
        let error = waiting.join().unwrap();
        assert_eq!(error.status(), Status::Store, "{error}");
        assert!(ended.elapsed() < Duration::from_secs(2), "{:?}", ended.elapsed());
    });
    assert_eq!(store.add("count", 1, &soon()).unwrap_err().status(), Status::Store);
}

#[test]
fn a_server_with_a_secret_takes_trunks_and_clients_that_have_it() {
    let secret = |text: &str| Secret::new(text.as_bytes());
    let server = Server::guarded("127.0.0.1:0", secret("open sesame")).unwrap();
    let port = server.local_addr().port();
    let without = Relay::start("127.0.0.1", port, None, &soon()).err().unwrap();
    assert!(without.message().contains("takes only clients that have its secret"), "{without}");
    let relay = Relay::start("127.0.0.1", port, secret("open sesame"), &soon()).unwrap().unwrap();
    let by_relay = |secret| TcpStore::connect_with_secret("127.0.0.1", relay.local_addr().port(), secret, &soon());
    let store = by_relay(secret("open sesame")).unwrap();
    let value = vec![5; 3 << 20];
    store.set("value", &value, &soon()).unwrap();
    assert_eq!(store.get("value", &soon()).unwrap(), value);
    // The relay has the secret, and its clients must have it, too.
    assert!(by_relay(None).err().unwrap().message().contains("takes only clients that have its secret"));
    assert!(by_relay(secret("open barley")).err().unwrap().message().contains("has another secret"));
    assert_eq!(store.add("count", 1, &soon()).unwrap(), 1);
}

#[test]
fn a_trunk_that_breaks_the_rules_ends_with_its_clients() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = honest(&server);
    // The server takes nothing more of a client that has so much to read.
    store.set("large", &vec![1; 4 << 20], &soon()).unwrap();
    let get = bytes_of(7, &[&[3][..], &string("/large")].concat());
    let more: Vec<u8> = (0..=WINDOW / MOST).flat_map(|_| bytes_of(7, &[3; MOST])).collect();
    let wrong = [
        ("a frame that is too long", frame(7, MOST as u32 + 1, &[0; 64])),
        ("more was taken than a window has", frame(7, BEGINS | (WINDOW as u32 + 1), &[])),
        ("bytes were taken that were not sent", frame(7, BEGINS | 100, &[])),
        ("more bytes than the window", [get, more].concat()),
    ];
    for (count, (what, frames)) in (1..).zip(&wrong) {
        let mut trunk = trunk_of(&server);
        trunk.write_all(&begun(7, &[&GREETING[..], &last_word(&count.to_string())].concat())).unwrap();
        assert_eq!(next_frame(&mut trunk), (7, 5, vec![1, 2, 3, 4, 0]), "{what}");
        // The server may end the connection before all is written.
        let _ = trunk.write_all(frames);
        assert!(is_dropped(&mut trunk), "{what}");
        assert_eq!(store.get(&format!("lost/{count}"), &soon()).unwrap(), count.to_string().as_bytes(), "{what}");
    }
    // A client that breaks the store's rules ends alone.
    let mut trunk = trunk_of(&server);
    let requests = [(1, &[106][..], "a trunk in a trunk"), (2, &[99], "an unknown request"), (3, b"", "no greeting")];
    for (channel, request, what) in requests {
        let first = if request.is_empty() { vec![1; 9] } else { [&GREETING, request].concat() };
        trunk.write_all(&begun(channel, &first)).unwrap();
        let mut next = next_frame(&mut trunk);
        if next.1 != 0 {
            assert_eq!(next, (channel, 4, vec![1, 2, 3, 4]), "{what}");
            next = next_frame(&mut trunk);
        }
        assert_eq!(next, (channel, 0, vec![]), "{what}");
        // A frame that comes late for a channel that has ended opens no channel.
        let late = [begun(channel, &GREETING), frame(channel, BEGINS | 4, &[])].concat();
        trunk.write_all(&late).unwrap();
    }
    trunk.write_all(&begun(4, &GREETING)).unwrap();
    assert_eq!(next_frame(&mut trunk), (4, 4, vec![1, 2, 3, 4]));
    wait_until("one client of the trunk is left", || server.clients() == 3);
}

#[test]
fn channels_count_as_connections() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = honest(&server);
    // There may be 16 connections for the rank, and 1,024 others.
    server.expect_ranks(1);
    let mut trunk = trunk_of(&server);
    let last = 1100;
    let opens: Vec<u8> = (0..=last).flat_map(|channel| begun(channel, &GREETING)).collect();
    let mut writing = trunk.try_clone().unwrap();
    let mut refused = 0;
    std::thread::scope(|scope| {
        scope.spawn(move || writing.write_all(&opens).unwrap());
        loop {
            let (channel, word, _) = next_frame(&mut trunk);
            refused += u32::from(word == 0);
            if channel == last {
                break;
            }
        }
    });
    // On a slow machine, channels that have asked for nothing make room for others.
    wait_until("the server is full", || server.clients() == 1040);
    assert!(refused >= 1101 - 1038, "{refused}");
    assert_eq!(store.add("count", 1, &soon()).unwrap(), 1);
    // A new connection takes the place of such a channel, and so does a new channel.
    std::thread::sleep(Duration::from_millis(1100));
    let mut late = connect(&server);
    late.write_all(&GREETING).unwrap();
    let mut echo = [0; 4];
    late.read_exact(&mut echo).unwrap();
    assert_eq!(next_frame(&mut trunk).1, 0);
    trunk.write_all(&begun(last + 1, &GREETING)).unwrap();
    let mut two = [next_frame(&mut trunk), next_frame(&mut trunk)];
    two.sort_by_key(|(_, word, _)| *word);
    assert_eq!((two[0].1, &two[1]), (0, &(last + 1, 4, vec![1, 2, 3, 4])));
    assert_eq!(store.add("count", 1, &soon()).unwrap(), 2);
}

#[test]
fn the_second_client_of_a_relay_may_be_the_first_to_speak() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let relay = relay_of(&server);
    let first = connect_at(relay.local_addr());
    let second = greeted_at(relay.local_addr());
    for mut stream in [first, second] {
        stream.write_all(&GREETING).unwrap();
        let mut echo = [0; 4];
        stream.read_exact(&mut echo).unwrap();
        assert_eq!(echo, [1, 2, 3, 4]);
    }
}

/// A client may end while the server still works for it, or while the server waits until it reads.
#[test]
fn the_end_of_a_channel_is_seen_whatever_its_client_has_asked_for() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = honest(&server);
    (0..3).for_each(|number| store.set(&format!("big{number}"), &vec![1; 4 << 20], &soon()).unwrap());
    let list = |op: u8, keys: &[String]| {
        let count = (keys.len() as u64).to_le_bytes();
        [&[op][..], &count, &keys.iter().flat_map(string).collect::<Vec<u8>>()].concat()
    };
    let checks: Vec<u8> = (0..400).flat_map(|number| list(5, &[format!("/{number}")])).collect();
    let gets = list(10, &[0, 1, 2].map(|number| format!("/big{number}")));
    let (check, get) = (list(5, &["/big0".to_owned()]), [&[3][..], &string("/big0")].concat());
    let many_gets = get.repeat(60);
    let cases = [
        ("nothing", vec![]),
        ("many questions, and one more", vec![&checks[..], &check]),
        ("a long answer", vec![&gets[..]]),
        ("a long answer, and a question behind it", vec![&gets[..], &check]),
        ("many long answers", vec![&many_gets[..], &check, &get]),
    ];
    for (count, (what, requests)) in (1..).zip(cases) {
        let mut trunk = trunk_of(&server);
        let first = [&GREETING[..], &last_word(what)].concat();
        let asked = requests.into_iter().flat_map(|request| request.chunks(MOST).flat_map(|part| bytes_of(7, part)));
        trunk.write_all(&[begun(7, &first), asked.collect(), frame(7, 0, &[])].concat()).unwrap();
        assert_eq!(store.get(&format!("lost/{count}"), &soon()).unwrap(), what.as_bytes());
    }
    wait_until("nobody else is left", || server.clients() == 1);
}

/// A trunk ends that has many clients, each with many last words. The words are passed on little by
/// little, and others are served meanwhile.
#[test]
fn the_end_of_a_large_trunk_holds_up_nobody() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = honest(&server);
    let mut trunk = trunk_of(&server);
    let (channels, words) = (500, 16);
    for channel in 0..channels {
        let lasts: Vec<u8> = (0..words).flat_map(|number| last_word(&format!("{channel}.{number}"))).collect();
        trunk.write_all(&begun(channel, &[&GREETING[..], &lasts].concat())).unwrap();
        let mut answered = 0;
        while answered < 4 + words {
            answered += next_frame(&mut trunk).1;
        }
    }
    drop(trunk);
    let all = channels * words;
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let said = store.try_get("lost", &soon()).unwrap().unwrap_or_default();
        if said == all.to_string().as_bytes() {
            break;
        }
        assert!(Instant::now() < end, "{} of {all} words", String::from_utf8_lossy(&said));
    }
    let (_, _, look) = server.most_work();
    assert_eq!(server.clients(), 1);
    assert!(look < LOOK, "{look}");
}

#[test]
fn a_server_that_knows_no_trunks_has_no_relay() {
    // A server that answers a greeting, and has no key.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut greeting = [0; 10];
        stream.read_exact(&mut greeting).unwrap();
        stream.write_all(&greeting[6..]).unwrap();
        // The questions CHECK come for two keys, and then for one.
        let mut byte = [0];
        while stream.read(&mut byte).is_ok_and(|count| count > 0) {
            if byte == [5] {
                let mut rest = [0; 16];
                stream.read_exact(&mut rest).unwrap();
                let mut key = vec![0; u64::from_le_bytes(rest[8..].try_into().unwrap()) as usize];
                stream.read_exact(&mut key).unwrap();
                stream.write_all(&[1]).unwrap();
            }
        }
    });
    assert!(Relay::start("127.0.0.1", port, None, &Wait::after(Duration::from_secs(20))).unwrap().is_none());
}
