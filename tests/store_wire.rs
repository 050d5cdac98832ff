//! Tests the server byte by byte, as PyTorch's clients speak to it, and with clients that do not
//! keep to the protocol.

mod wire;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use devicemesh::rendezvous::store::{Server, Store, TcpStore};
use devicemesh::wait::Wait;
use wire::{connect, greeted, string};

fn expect(stream: &mut TcpStream, bytes: &[u8]) {
    let mut answer = vec![0; bytes.len()];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, bytes);
}

fn request(op: u8, strings: &[&str]) -> Vec<u8> {
    std::iter::once(op).chain(strings.iter().flat_map(string)).collect()
}

fn listed(op: u8, strings: &[&str]) -> Vec<u8> {
    let count = (strings.len() as u64).to_le_bytes();
    std::iter::once(op).chain(count).chain(strings.iter().flat_map(string)).collect()
}

fn ask(stream: &mut TcpStream, request: &[u8], answer: &[u8]) {
    stream.write_all(request).unwrap();
    expect(stream, answer);
}

/// Checks that nothing more comes, not even a late answer: the next answer is that to a PING.
fn in_step(stream: &mut TcpStream) {
    ask(stream, &[13, 9, 9, 9, 9], &[9, 9, 9, 9]);
}

fn number(value: i64) -> [u8; 8] {
    value.to_le_bytes()
}

#[test]
fn values() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let mut client = greeted(&server);
    client.write_all(&request(1, &["/a", "one"])).unwrap(); // SET has no reply
    ask(&mut client, &request(3, &["/a"]), &string("one"));
    ask(&mut client, &request(3, &["/missing"]), &string(""));
    ask(&mut client, &request(2, &["/b", "", "new"]), &string("new")); // COMPARE_SET: nothing expected, nothing there
    ask(&mut client, &request(2, &["/b", "other", "newer"]), &string("new"));
    ask(&mut client, &request(2, &["/b", "new", "newer"]), &string("newer"));
    ask(&mut client, &request(2, &["/c", "expected", "x"]), &string("expected")); // missing, and stays so
    ask(&mut client, &listed(5, &["/a", "/b"]), &[0]);
    ask(&mut client, &listed(5, &["/a", "/c"]), &[1]);
    let add = [&request(4, &["/n"])[..], &number(5)].concat();
    ask(&mut client, &add, &number(5));
    ask(&mut client, &add, &number(10));
    ask(&mut client, &request(3, &["/n"]), &string("10")); // kept as decimal text
    client.write_all(&request(9, &["/a", "+two"])).unwrap(); // APPEND has no reply
    ask(&mut client, &listed(10, &["/a", "/b"]), &[string("one+two"), string("newer")].concat());
    client
        .write_all(&[&[11][..], &2u64.to_le_bytes(), &string("/d"), &string("4"), &string("/e"), &string("5")].concat())
        .unwrap();
    ask(&mut client, &listed(10, &["/e", "/d"]), &[string("5"), string("4")].concat());
    ask(&mut client, &[7], &number(5)); // a, b, n, d, e
    ask(&mut client, &request(8, &["/d"]), &number(1));
    ask(&mut client, &request(8, &["/d"]), &number(0));
    client.write_all(&[17]).unwrap();
    expect(&mut client, &number(4));
    let mut keys: Vec<String> = (0..4)
        .map(|_| {
            let mut length = [0; 8];
            client.read_exact(&mut length).unwrap();
            let mut key = vec![0; u64::from_le_bytes(length) as usize];
            client.read_exact(&mut key).unwrap();
            String::from_utf8(key).unwrap()
        })
        .collect();
    keys.sort();
    assert_eq!(keys, ["/a", "/b", "/e", "/n"]);
    in_step(&mut client);
}

#[test]
fn waits_queues_and_barriers() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let (mut waiter, mut other) = (greeted(&server), greeted(&server));
    waiter.write_all(&listed(6, &["/x", "/y"])).unwrap();
    other.write_all(&request(1, &["/y", "1"])).unwrap();
    in_step(&mut other);
    other.write_all(&request(1, &["/x", "1"])).unwrap();
    expect(&mut waiter, &[0]);
    ask(&mut waiter, &listed(6, &["/x"]), &[0]);

    waiter.write_all(&listed(6, &["/never"])).unwrap();
    ask(&mut waiter, &[12], &[1]); // CANCEL_WAIT
    other.write_all(&request(1, &["/never", "1"])).unwrap();
    in_step(&mut other);
    in_step(&mut waiter); // no late answer

    other.write_all(&request(14, &["/q", "first"])).unwrap();
    other.write_all(&request(14, &["/q", "second"])).unwrap();
    ask(&mut other, &request(16, &["/q"]), &number(2));
    ask(&mut waiter, &request(15, &["/q"]), &[&number(2)[..], &string("first")].concat());
    ask(&mut waiter, &request(15, &["/q"]), &[&number(1)[..], &string("second")].concat());
    ask(&mut waiter, &request(15, &["/q"]), &number(0)); // empty: a client waits with WAIT
    let mut second = greeted(&server);
    for client in [&mut waiter, &mut second] {
        client.write_all(&listed(6, &["/q"])).unwrap();
    }
    expect_one(&mut other, &mut [&mut waiter, &mut second]);

    let barrier = [&request(18, &["/b"])[..], &number(2)].concat();
    waiter.write_all(&barrier).unwrap();
    other.write_all(&barrier).unwrap();
    expect(&mut waiter, &[0]);
    expect(&mut other, &[0]);
    in_step(&mut waiter);
}

#[test]
fn a_barrier_counts_under_its_key_and_can_be_cancelled() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let (mut waiter, mut other) = (greeted(&server), greeted(&server));
    let barrier = |world| [&request(18, &["/b"])[..], &number(world)].concat();
    waiter.write_all(&barrier(2)).unwrap();
    ask(&mut waiter, &[12], &[1]); // CANCEL_WAIT: a client whose time is over
    ask(&mut other, &barrier(2), &[0]); // it had arrived
    in_step(&mut waiter); // no late answer
    ask(&mut waiter, &barrier(2), &[0]); // all were there before
    ask(&mut waiter, &request(3, &["/b"]), &string("3"));
}

#[test]
fn a_wait_for_a_queue_and_a_key_ends_whichever_comes_last() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let (mut both, mut queue, mut other) = (greeted(&server), greeted(&server), greeted(&server));
    both.write_all(&listed(6, &["/q", "/k"])).unwrap();
    in_step_after_wait(&mut other);
    queue.write_all(&listed(6, &["/q"])).unwrap();
    in_step_after_wait(&mut other);
    // The first to wait lacks another key, so the value is for the second.
    other.write_all(&request(14, &["/q", "value"])).unwrap();
    expect(&mut queue, &[0]);
    other.write_all(&request(1, &["/k", "1"])).unwrap();
    expect(&mut both, &[0]);
    in_step(&mut both);
}

/// Waits until the requests that other connections have sent before have come. The server reads
/// requests in the order in which they came.
fn in_step_after_wait(other: &mut TcpStream) {
    std::thread::sleep(Duration::from_millis(50));
    in_step(other);
}

#[test]
fn ours_beyond_pytorch() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let (mut waiter, mut other) = (greeted(&server), greeted(&server));
    // The key that says that this server knows these; it is not counted.
    ask(&mut waiter, &listed(5, &["/devicemesh/server"]), &[0]);
    ask(&mut waiter, &[7], &number(0));
    // WAIT_ANY
    let found = |index: i64, value: &str| [&[0][..], &number(index), &string(value)].concat();
    waiter.write_all(&listed(100, &["/a", "/b", "/c"])).unwrap();
    in_step_after_wait(&mut other);
    other.write_all(&request(1, &["/c", "see"])).unwrap();
    expect(&mut waiter, &found(2, "see"));
    ask(&mut waiter, &listed(100, &["/a", "/c"]), &found(1, "see"));
    waiter.write_all(&listed(100, &["/a", "/b"])).unwrap();
    ask(&mut waiter, &[12], &[1]); // CANCEL_WAIT
    other.write_all(&request(1, &["/a", "1"])).unwrap();
    in_step(&mut other);
    in_step(&mut waiter); // no late answer
    // COUNT: the sum is the answer. A wait that follows in the same packet is answered after it.
    ask(&mut waiter, &listed(5, &["/devicemesh/server/count"]), &[0]);
    let count = |amount: i64, last: i64, value: &str| {
        [request(105, &["/count"]), [number(amount), number(last)].concat(), string("/all"), string(value)].concat()
    };
    ask(&mut waiter, &count(1, 2, "first"), &number(1));
    ask(&mut waiter, &listed(5, &["/all"]), &[1]);
    let both = [count(1, 2, "second"), listed(100, &["/none", "/all"])].concat();
    ask(&mut waiter, &both, &[&number(2)[..], &found(1, "second")].concat());
    ask(&mut waiter, &count(0, 2, "third"), &number(2));
    ask(&mut waiter, &listed(10, &["/count", "/all"]), &[string("2"), string("second")].concat());
    for key in ["/count", "/all"] {
        ask(&mut waiter, &request(8, &[key]), &number(1));
    }
    // LAST_WORD: one is kept as long as any connection that left it.
    let mut second = greeted(&server);
    for client in [&mut other, &mut second] {
        ask(client, &request(101, &["/gone", "other"]), &[0]);
    }
    drop(other);
    in_step_after_wait(&mut waiter);
    ask(&mut waiter, &listed(5, &["/gone"]), &[1]);
    waiter.write_all(&listed(6, &["/gone"])).unwrap();
    drop(second);
    expect(&mut waiter, &[0]);
    ask(&mut waiter, &listed(10, &["/gone", "/gone/1"]), &[string("1"), string("other")].concat());
    // A handshake, where there is no secret.
    ask(&mut waiter, &request(104, &["message"]), &string(""));
}

/// A push wakes one of those that wait for the queue, and the next push the other.
fn expect_one(pusher: &mut TcpStream, waiting: &mut [&mut TcpStream; 2]) {
    let mut woken = Vec::new();
    for value in ["third", "fourth"] {
        pusher.write_all(&request(14, &["/q", value])).unwrap();
        in_step(pusher);
        let mut answers = 0;
        for (index, client) in
            waiting.iter_mut().enumerate().filter(|(index, _)| !woken.contains(index)).collect::<Vec<_>>()
        {
            client.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            let mut answer = [7];
            if client.read(&mut answer).is_ok_and(|count| count == 1 && answer == [0]) {
                answers += 1;
                woken.push(index);
            }
            client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        }
        assert_eq!(answers, 1, "{value}");
    }
}

#[test]
fn requests_in_pieces_and_in_bulk() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let mut client = greeted(&server);
    for byte in request(1, &["/slow", "value"]) {
        client.write_all(&[byte]).unwrap();
        client.flush().unwrap();
    }
    let many: Vec<u8> = (0..500).flat_map(|_| request(3, &["/slow"])).collect();
    client.write_all(&many).unwrap();
    for _ in 0..500 {
        expect(&mut client, &string("value"));
    }
}

/// Whether the server closes the connection, without a word.
fn is_dropped(mut stream: TcpStream) -> bool {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(count) => count == 0,
        // Closed with some of our bytes unread. A time-out is another kind: then it is still open.
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

#[test]
fn hostile_clients_hold_up_nobody() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let wait = Wait::after(Duration::from_secs(30));
    let store = TcpStore::connect("127.0.0.1", server.local_addr().port(), &wait).unwrap();

    let mut no_greeting = connect(&server);
    no_greeting.write_all(&request(3, &["/a"])).unwrap();
    assert!(is_dropped(no_greeting), "a request without a greeting");
    let mut wrong_magic = connect(&server);
    wrong_magic.write_all(&[0, 1, 2, 3, 4]).unwrap();
    assert!(is_dropped(wrong_magic), "a wrong greeting");
    let mut garbage = connect(&server);
    garbage.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    assert!(is_dropped(garbage), "another protocol");
    for length in [u64::MAX, 1 << 40, 8193] {
        let mut huge = greeted(&server);
        huge.write_all(&[&[3][..], &length.to_le_bytes()].concat()).unwrap();
        assert!(is_dropped(huge), "a key of {length} bytes");
    }
    let mut unknown = greeted(&server);
    unknown.write_all(&[77]).unwrap();
    assert!(is_dropped(unknown), "an unknown operation");

    // A short request for more than fits in memory.
    store.set("mega", &vec![1; 1 << 20], &wait).unwrap();
    let mut greedy = greeted(&server);
    greedy.write_all(&listed(10, &["/mega"; 100_000])).unwrap();
    assert!(is_dropped(greedy), "a reply of 100 GB");

    // Some clients stay: silent ones, one with half a request, and one that asks for megabytes and
    // never reads.
    let silent: Vec<TcpStream> = (0..300).map(|_| connect(&server)).collect();
    let mut half = greeted(&server);
    half.write_all(&request(1, &["/half", "value"])[..12]).unwrap();
    store.set("large", &vec![1; 4 << 20], &wait).unwrap();
    let mut deaf = greeted(&server);
    deaf.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    for _ in 0..200 {
        if deaf.write_all(&request(3, &["/large"])).is_err() {
            break;
        }
    }
    let began = Instant::now();
    for round in 0..200 {
        assert_eq!(store.add("count", 1, &wait).unwrap(), round + 1);
    }
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    drop((silent, half, deaf));

    let ending = Instant::now();
    drop(server);
    assert!(ending.elapsed() < Duration::from_secs(2), "{:?}", ending.elapsed());
}
