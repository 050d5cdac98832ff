//! Tests of what every wire promises. The tests of each wire call them with a function that makes a
//! wire. The wires of a test belong to one process, and are as separate as those of two processes.

use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) use plain::pattern;

use super::{Broken, EAGER_BYTES, Lost, Notice, Peer, Request, Tag, Wire};

/// Makes a wire.
pub(super) type Make<'a> = &'a dyn Fn() -> Arc<dyn Wire>;

/// The token that the wires of all tests know.
pub(super) const TOKEN: [u8; 16] = [7; 16];
/// How long a test waits for what must happen.
pub(super) const LONG: Duration = Duration::from_secs(60);

/// Introduces two wires to each other. Returns the number that each has for the other.
pub(super) fn introduce<W: Wire + ?Sized>(wires: [&Arc<W>; 2]) -> [Peer; 2] {
    [wires[0].meet(&wires[1].contact(), &TOKEN), wires[1].meet(&wires[0].contact(), &TOKEN)]
}

/// Two wires that know each other, and the number that each has for the other.
pub(super) fn pair(make: Make<'_>) -> ([Arc<dyn Wire>; 2], [Peer; 2]) {
    let wires = [make(), make()];
    let peers = introduce([&wires[0], &wires[1]]);
    (wires, peers)
}

pub(super) fn tag(stream: u64) -> Tag {
    Tag { comm: 5, stream, from: 0, to: 1 }
}

/// Waits for a request, and returns its outcome.
pub(super) fn wait<W: Wire + ?Sized>(wire: &Arc<W>, request: &Request) -> Result<usize, Broken> {
    let until = Instant::now() + LONG;
    loop {
        let seen = wire.moved().value();
        if let Some(bytes) = wire.test(request)? {
            return Ok(bytes);
        }
        assert!(Instant::now() < until, "a request does not end: {request:?} of {wire:#?}");
        if !wire.progress() {
            wire.sleep_on_wire(seen, &[], Duration::from_millis(100));
        }
    }
}

/// Waits until a condition holds.
pub(super) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn notices(wire: &Arc<dyn Wire>, count: usize) -> Vec<Notice> {
    let mut all = Vec::new();
    until("a notice does not come", || {
        wire.progress();
        all.extend(wire.news().0);
        all.len() >= count
    });
    all
}

pub(super) fn send<W: Wire + ?Sized>(wire: &Arc<W>, peer: Peer, tag: Tag, data: &[u8]) -> Request {
    // SAFETY: the tests keep their buffers until the request is over.
    unsafe { wire.isend(peer, tag, data.as_ptr(), data.len()) }
}

pub(super) fn receive<W: Wire + ?Sized>(wire: &Arc<W>, peer: Peer, tag: Tag, data: &mut [u8]) -> Request {
    // SAFETY: the tests keep their buffers until the request is over.
    unsafe { wire.irecv(peer, tag, data.as_mut_ptr(), data.len()) }
}

/// Messages of all sizes arrive, whichever side is early.
pub(super) fn all_sizes(make: Make<'_>) {
    let (wires, peers) = pair(make);
    let sizes = [0, 1, 4, 47, 48, 49, EAGER_BYTES - 1, EAGER_BYTES, EAGER_BYTES + 1, 1 << 20, (5 << 20) + 3];
    for (stream, bytes) in sizes.into_iter().enumerate() {
        for early in [true, false] {
            let (tag, sent) = (tag(stream as u64), pattern(stream as u64, bytes));
            let mut got = vec![0; bytes];
            let sender = || {
                let request = send(&wires[0], peers[0], tag, &sent);
                assert_eq!(wait(&wires[0], &request), Ok(bytes));
            };
            std::thread::scope(|scope| {
                if early {
                    scope.spawn(sender);
                    // A long message is announced, and a short one comes.
                    until("nothing comes", || {
                        wires[1].progress();
                        wires[1].waiting(peers[1], 5) == [tag]
                    });
                    let request = receive(&wires[1], peers[1], tag, &mut got);
                    assert_eq!(wait(&wires[1], &request), Ok(bytes));
                } else {
                    let request = receive(&wires[1], peers[1], tag, &mut got);
                    wires[1].progress();
                    scope.spawn(sender);
                    assert_eq!(wait(&wires[1], &request), Ok(bytes));
                }
            });
            assert!(got == sent, "{bytes} bytes");
        }
    }
    assert_eq!(wires[1].waiting(peers[1], 5), []);
}

/// Messages of one tag keep their order, whatever their sizes are, even if there are more messages
/// than a wire keeps.
pub(super) fn order(make: Make<'_>) {
    let (wires, peers) = pair(make);
    let sizes = [10, 100_000, 0, EAGER_BYTES, 4, 3 << 20, EAGER_BYTES, 7];
    let sent: Vec<Vec<u8>> = (0..160).map(|at| pattern(at, sizes[at as usize % sizes.len()])).collect();
    let requests: Vec<Request> = sent.iter().map(|data| send(&wires[0], peers[0], tag(1), data)).collect();
    // A message of another tag does not wait for those that nobody has asked for.
    let mut got = [0; 5];
    let request = send(&wires[0], peers[0], tag(2), b"other");
    let answer = receive(&wires[1], peers[1], tag(2), &mut got);
    assert_eq!((wait(&wires[1], &answer), wait(&wires[0], &request)), (Ok(5), Ok(5)));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            requests.iter().zip(&sent).for_each(|(one, data)| assert_eq!(wait(&wires[0], one), Ok(data.len())))
        });
        for data in &sent {
            let mut got = vec![0; data.len() + 1];
            let request = receive(&wires[1], peers[1], tag(1), &mut got);
            assert_eq!(wait(&wires[1], &request), Ok(data.len()));
            assert!(got[..data.len()] == data[..]);
        }
    });
}

/// A message that may wait goes together with the next message, or when its thread polls or
/// sleeps.
pub(super) fn soon(make: Make<'_>) {
    let (wires, peers) = pair(make);
    let first = pattern(1, 3000);
    for next in [Some(EAGER_BYTES + 1), Some(4), None] {
        let second = pattern(2, next.unwrap_or(0));
        let (mut got, mut then) = (vec![0; first.len()], vec![0; second.len()]);
        // SAFETY: the message outlives the request.
        let one = unsafe { wires[0].isend_soon(peers[0], tag(1), first.as_ptr(), first.len()) };
        let two = next.map(|_| send(&wires[0], peers[0], tag(1), &second));
        let receive_one = receive(&wires[1], peers[1], tag(1), &mut got);
        let last = next.map(|_| receive(&wires[1], peers[1], tag(1), &mut then));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(wait(&wires[0], &one), Ok(first.len()));
                two.iter().for_each(|two| assert_eq!(wait(&wires[0], two), Ok(second.len())));
            });
            assert_eq!(wait(&wires[1], &receive_one), Ok(first.len()));
            last.iter().for_each(|last| assert_eq!(wait(&wires[1], last), Ok(second.len())));
        });
        assert!(got == first && then == second, "{next:?}");
    }
}

/// A process reaches itself.
pub(super) fn itself(make: Make<'_>) {
    let wire = make();
    let me = wire.meet(&wire.contact(), &TOKEN);
    for bytes in [0, 5, EAGER_BYTES, EAGER_BYTES + 1, 5 << 20] {
        for early in [true, false] {
            let (sent, mut got) = (pattern(3, bytes), vec![0; bytes]);
            let one = early.then(|| send(&wire, me, tag(1), &sent));
            let two = receive(&wire, me, tag(1), &mut got);
            let one = one.unwrap_or_else(|| send(&wire, me, tag(1), &sent));
            assert_eq!((wait(&wire, &two), wait(&wire, &one)), (Ok(bytes), Ok(bytes)));
            assert!(got == sent);
        }
    }
    wire.notify(me, 5, b"hello");
    assert_eq!(notices(&wire, 1)[0].text, b"hello");
}

/// A message that is too long fails its receive alone.
pub(super) fn too_long(make: Make<'_>) {
    let (wires, peers) = pair(make);
    for bytes in [8, EAGER_BYTES, 1 << 20] {
        for early in [true, false] {
            let (sent, mut got) = (pattern(3, bytes), vec![0; 4]);
            let (mut one, mut two) = (None, None);
            for turn in [early, !early] {
                match turn {
                    true => one = Some(send(&wires[0], peers[0], tag(1), &sent)),
                    false => two = Some(receive(&wires[1], peers[1], tag(1), &mut got)),
                }
            }
            std::thread::scope(|scope| {
                scope.spawn(|| assert_eq!(wait(&wires[0], &one.unwrap()), Ok(bytes)));
                assert_eq!(wait(&wires[1], &two.unwrap()), Err(Broken::TooLong(bytes)));
            });
            let one = send(&wires[0], peers[0], tag(1), &sent[..4]);
            let two = receive(&wires[1], peers[1], tag(1), &mut got);
            assert_eq!((wait(&wires[0], &one), wait(&wires[1], &two)), (Ok(4), Ok(4)));
            assert_eq!(got, sent[..4]);
        }
    }
}

/// Notices arrive. A wire that ends is lost for its peers, with all requests that wait for it. A
/// message that had arrived before can still be received.
pub(super) fn loss(make: Make<'_>) {
    let ([first, second], peers) = pair(make);
    first.notify(peers[0], 9, b"left");
    let notice = notices(&second, 1).remove(0);
    assert_eq!((notice.from, notice.comm, &notice.text[..]), (peers[1], 9, &b"left"[..]));
    let (mut got, mut kept, long) = ([0; 8], [0; 8], pattern(1, 1 << 20));
    let before = send(&first, peers[0], tag(7), b"before");
    assert_eq!(wait(&first, &before), Ok(6));
    until("a message does not come", || {
        second.progress();
        second.waiting(peers[1], 5) == [tag(7)]
    });
    let request = receive(&second, peers[1], tag(0), &mut got);
    let sending = send(&second, peers[1], tag(1), &long);
    drop(first);
    for request in [request, sending] {
        let failed = wait(&second, &request).unwrap_err();
        assert!(matches!(&failed, Broken::Lost(Lost { ended: true, .. })), "{failed:?}");
    }
    assert_eq!(second.news().1[0].0, peers[1]);
    assert!(second.lost(peers[1]).unwrap().ended);
    let request = receive(&second, peers[1], tag(7), &mut kept);
    assert_eq!((wait(&second, &request), &kept[..6]), (Ok(6), &b"before"[..]));
    let request = receive(&second, peers[1], tag(7), &mut kept);
    assert!(matches!(wait(&second, &request), Err(Broken::Lost(_))));
}

/// A process with another token does not get in, until the other process knows that token.
pub(super) fn stranger(make: Make<'_>) {
    let wires = [make(), make()];
    let there = wires[0].meet(&wires[1].contact(), &[1; 16]);
    let back = wires[1].meet(&wires[0].contact(), &[2; 16]);
    wires[0].notify(there, 5, b"let me in");
    std::thread::sleep(Duration::from_millis(150));
    wires[1].progress();
    assert!(wires[1].news().0.is_empty());
    wires[1].meet(&wires[0].contact(), &[1; 16]);
    assert_eq!(notices(&wires[1], 1)[0].from, back);
}

/// A process may send before the other one has met it.
pub(super) fn early(make: Make<'_>) {
    let wires = [make(), make()];
    let there = wires[0].meet(&wires[1].contact(), &TOKEN);
    let long = pattern(1, 200_000);
    let requests = [send(&wires[0], there, tag(1), b"early"), send(&wires[0], there, tag(2), &long)];
    std::thread::sleep(Duration::from_millis(50));
    let back = wires[1].meet(&wires[0].contact(), &TOKEN);
    let (mut got, mut more) = ([0; 5], vec![0; 200_000]);
    let answers = [receive(&wires[1], back, tag(1), &mut got), receive(&wires[1], back, tag(2), &mut more)];
    std::thread::scope(|scope| {
        scope.spawn(|| requests.iter().for_each(|request| assert!(wait(&wires[0], request).is_ok())));
        assert_eq!(answers.each_ref().map(|request| wait(&wires[1], request)), [Ok(5), Ok(200_000)]);
    });
    assert!(&got == b"early" && more == long);
}

/// Both sides may connect at once.
pub(super) fn at_once(make: Make<'_>, times: usize) {
    for _ in 0..times {
        let (wires, peers) = pair(make);
        let barrier = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for side in 0..2 {
                let (wires, barrier) = (&wires, &barrier);
                scope.spawn(move || {
                    let (wire, peer) = (&wires[side], peers[side]);
                    let (to, from) = (tag(side as u64), tag(1 - side as u64));
                    barrier.wait();
                    let sent = [side as u8; 100];
                    let request = send(wire, peer, to, &sent);
                    let mut got = [9; 100];
                    let answer = receive(wire, peer, from, &mut got);
                    assert_eq!((wait(wire, &request), wait(wire, &answer)), (Ok(100), Ok(100)));
                    assert_eq!(got, [1 - side as u8; 100]);
                });
            }
        });
        assert!(wires[0].lost(peers[0]).is_none() && wires[1].lost(peers[1]).is_none());
    }
}

/// Peers may be closed and met again. Messages that were sent before the end still arrive.
pub(super) fn again(make: Make<'_>) {
    let wires = [make(), make()];
    for round in 0..20_u8 {
        let peers = introduce([&wires[0], &wires[1]]);
        let (sent, mut got) = ([round; 10], [0; 10]);
        let request = send(&wires[0], peers[0], tag(u64::from(round)), &sent);
        let answer = receive(&wires[1], peers[1], tag(u64::from(round)), &mut got);
        assert_eq!((wait(&wires[0], &request), wait(&wires[1], &answer)), (Ok(10), Ok(10)));
        assert_eq!(got, sent);
        let first = usize::from(round) % 2;
        wires[first].close(peers[first], &TOKEN);
        if round % 3 == 0 {
            std::thread::sleep(Duration::from_millis(3));
        }
        wires[1 - first].close(peers[1 - first], &TOKEN);
    }
}

/// A receive that was cancelled at any moment leaves its buffer alone, and a send that was
/// cancelled does not read its buffer. Neither harms other messages.
pub(super) fn cancelled(make: Make<'_>) {
    let (wires, peers) = pair(make);
    const BYTES: usize = 16 << 20;
    let (mut long, mut dropped) = (pattern(1, BYTES), vec![0; BYTES]);
    let after = |stream: u64| {
        let mut got = [0; 5];
        let next = receive(&wires[1], peers[1], tag(stream), &mut got);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let request = send(&wires[0], peers[0], tag(stream), b"after");
                assert_eq!(wait(&wires[0], &request), Ok(5));
            });
            assert_eq!((wait(&wires[1], &next), &got), (Ok(5), b"after"));
        });
    };
    for (at, steps) in (0..10_u64).zip([0, 1, 2, 4, 8, 16, 32, 64, 128, 256]) {
        let move_on = || {
            for _ in 0..steps {
                wires[0].progress();
                wires[1].progress();
            }
        };
        let sending = send(&wires[0], peers[0], tag(4 * at), &long);
        let receiving = receive(&wires[1], peers[1], tag(4 * at), &mut dropped);
        move_on();
        wires[1].cancel(receiving);
        dropped.fill(77);
        // Where the receiver has not asked for the message yet, the message waits.
        wires[1].progress();
        let (mut rest, mut second) = (vec![0; BYTES], None);
        until("the send does not end", || {
            wires[1].progress();
            wires[0].progress();
            if second.is_none() && wires[1].waiting(peers[1], 5).contains(&tag(4 * at)) {
                second = Some(receive(&wires[1], peers[1], tag(4 * at), &mut rest));
            }
            wires[0].test(&sending) != Ok(None)
        });
        if let Some(second) = second {
            assert_eq!(wait(&wires[1], &second), Ok(BYTES));
            assert!(rest == long);
        }
        assert!(dropped.iter().all(|byte| *byte == 77), "the buffer has changed after the end of its receive");
        let sending = send(&wires[0], peers[0], tag(4 * at + 1), &long);
        let receiving = receive(&wires[1], peers[1], tag(4 * at + 1), &mut dropped);
        move_on();
        let whole = long.clone();
        wires[0].cancel(sending);
        long.fill(at as u8);
        after(4 * at + 2);
        match wires[1].test(&receiving) {
            Ok(None) => wires[1].cancel(receiving),
            // The message had arrived before the sender cancelled it.
            over => assert!(over == Ok(Some(BYTES)) && dropped == whole, "{over:?}"),
        }
    }
    assert!(wires[0].lost(peers[0]).is_none() && wires[1].lost(peers[1]).is_none());
}

/// A cancelled send leaves no gap: the receive that waits gets the tag's next message.
pub(super) fn withdrawn(make: Make<'_>) {
    let (wires, peers) = pair(make);
    let long = pattern(1, 3 << 20);
    let mut stream = 0;
    for bytes in [5, EAGER_BYTES + 1, 3 << 20] {
        for (posted, steps) in [(true, 0), (false, 0), (true, 1), (false, 1), (true, 3), (true, 8)] {
            stream += 1;
            let mut got = vec![0; 3 << 20];
            let mut next = posted.then(|| receive(&wires[1], peers[1], tag(stream), &mut got));
            let sending = send(&wires[0], peers[0], tag(stream), &long[..bytes]);
            for _ in 0..steps {
                wires[1].progress();
                wires[0].progress();
            }
            wires[0].cancel(sending);
            let after = send(&wires[0], peers[0], tag(stream), b"after");
            let what = format!("{bytes} bytes, posted: {posted}, {steps} steps");
            std::thread::scope(|scope| {
                scope.spawn(|| assert_eq!(wait(&wires[0], &after), Ok(5), "{what}"));
                let mut lengths = Vec::new();
                while lengths.last() != Some(&5) || (bytes == 5 && got[..5] != *b"after") {
                    let next = next.take().unwrap_or_else(|| receive(&wires[1], peers[1], tag(stream), &mut got));
                    lengths.push(wait(&wires[1], &next).expect(&what));
                }
                // The cancelled message may have arrived as a whole.
                assert!(lengths == [5] || lengths == [bytes, 5], "{what}: {lengths:?}");
                assert_eq!(got[..5], *b"after", "{what}");
            });
        }
    }
}

/// Prints half round trips of messages of several sizes: the median of many.
pub(super) fn speed(name: &str, make: Make<'_>) {
    let (wires, peers) = pair(make);
    for (bytes, times) in [(4, 3000), (64 << 10, 1000), (1 << 20, 100), (64 << 20, 10)] {
        let (sent, mut got) = (pattern(1, bytes), vec![0; bytes]);
        let mut took = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (sent, mut got) = (sent.clone(), vec![0; bytes]);
                for _ in 0..times {
                    assert_eq!(wait(&wires[1], &receive(&wires[1], peers[1], tag(1), &mut got)), Ok(bytes));
                    assert_eq!(wait(&wires[1], &send(&wires[1], peers[1], tag(2), &sent)), Ok(bytes));
                }
            });
            for _ in 0..times {
                let began = Instant::now();
                assert_eq!(wait(&wires[0], &send(&wires[0], peers[0], tag(1), &sent)), Ok(bytes));
                assert_eq!(wait(&wires[0], &receive(&wires[0], peers[0], tag(2), &mut got)), Ok(bytes));
                took.push(began.elapsed() / 2);
            }
        });
        took.sort();
        println!("{name}: {bytes} bytes, half a round trip: {:.1} us", took[times / 2].as_secs_f64() * 1e6);
    }
}
