//! Random traffic, and times.

use super::*;

/// A sequence of numbers that only depends on the seed.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    fn bytes(&mut self) -> usize {
        let most = [1, 100, 5000, EAGER_BYTES as u64, EAGER_BYTES as u64 + 2, 300_000, 3 << 20];
        let kind = self.below(most.len() as u64) as usize;
        self.below(most[kind] + 1) as usize
    }
}

/// A receive of the random traffic: its request and buffer, and the tag, the number and the length
/// of its message.
type Expected = (Request, Box<[u8]>, u64, usize, usize);

/// Sends and receives random messages on one side. Both sides draw the same sizes.
fn random_traffic(wire: &Arc<Tcp>, peer: Peer, side: u64, seed: u64) {
    const TAGS: u64 = 6;
    const EACH: usize = 25;
    let sizes = |from: u64, stream: u64| {
        let mut numbers = Numbers(seed ^ (from * 1000 + stream));
        (0..EACH).map(|_| numbers.bytes()).collect::<Vec<usize>>()
    };
    let of = |from: u64, stream: u64| Tag { comm: 5, stream, from: from as u32, to: 1 - from as u32 };
    let content =
        |from: u64, stream: u64, at: usize, bytes: usize| pattern(seed ^ (from * 77 + stream * 13 + at as u64), bytes);
    let mut numbers = Numbers(seed ^ (side + 99));
    let mut next = vec![[0_usize; 2]; TAGS as usize];
    let mut sends: Vec<(Request, Vec<u8>)> = Vec::new();
    let mut receives: Vec<Expected> = Vec::new();
    let end = Instant::now() + LONG;
    while next.iter().any(|next| *next != [EACH; 2]) || !sends.is_empty() || !receives.is_empty() {
        assert!(Instant::now() < end, "the traffic stands still");
        let seen = wire.moved().value();
        let stream = numbers.below(TAGS);
        let mine = &mut next[stream as usize];
        if numbers.below(2) == 0 && mine[0] < EACH {
            let data = content(side, stream, mine[0], sizes(side, stream)[mine[0]]);
            sends.push((send(wire, peer, of(side, stream), &data), data));
            mine[0] += 1;
        } else if mine[1] < EACH {
            let bytes = sizes(1 - side, stream)[mine[1]];
            let mut room = vec![0; bytes + numbers.below(3) as usize].into_boxed_slice();
            receives.push((receive(wire, peer, of(1 - side, stream), &mut room), room, stream, mine[1], bytes));
            mine[1] += 1;
        }
        let before = sends.len() + receives.len();
        sends.retain(|(request, data)| {
            wire.test(request).unwrap().inspect(|sent| assert_eq!(*sent, data.len())).is_none()
        });
        receives.retain(|(request, data, stream, at, bytes)| {
            let Some(got) = wire.test(request).unwrap() else { return true };
            assert_eq!(got, *bytes);
            assert!(data[..got] == content(1 - side, *stream, *at, *bytes), "tag {stream}, message {at}");
            false
        });
        let all_begun = next.iter().all(|next| *next == [EACH; 2]);
        if !wire.progress() && all_begun && before == sends.len() + receives.len() {
            match numbers.below(2) {
                0 => wire.sleep_on_wire(seen, &[], Duration::from_millis(100)),
                _ => wire.sleep(&[crate::event::Watch { event: wire.moved(), seen }], Duration::from_millis(100)),
            }
        }
    }
}

#[test]
fn random_messages_arrive_in_order() {
    for (seed, secret) in [(1, ""), (2, ""), (3, ""), (4, ""), (5, "a secret")] {
        let wires = [secret_wire(secret), secret_wire(secret)];
        let peers = introduce([&wires[0], &wires[1]]);
        std::thread::scope(|scope| {
            for side in 0..2 {
                let wire = &wires[side];
                let peer = peers[side];
                scope.spawn(move || random_traffic(wire, peer, side as u64, seed));
            }
        });
    }
}

/// Waits as a call does: polls for a moment, then sleeps.
fn wait_as_a_call(wire: &Arc<Tcp>, request: &Request) -> usize {
    loop {
        let seen = wire.moved().value();
        if let Some(bytes) = wire.test(request).unwrap() {
            return bytes;
        }
        let changed = || {
            wire.progress();
            wire.moved().value() != seen
        };
        if !crate::spin::poll_wire(crate::spin::Purpose::Other, changed) {
            wire.sleep_on_wire(seen, &[], Duration::from_millis(100));
        }
    }
}

/// Returns the time that the processors have spent on this process, in microseconds.
fn cpu_time() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes the time.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

/// Prints times. Run it with `cargo test -p hostccl --lib measure -- --ignored --nocapture`.
#[test]
#[ignore = "prints times, and checks nothing"]
fn measure() {
    for secret in ["", "a secret"] {
        let wires = [secret_wire(secret), secret_wire(secret)];
        let peers = introduce([&wires[0], &wires[1]]);
        for (bytes, turns) in [(4, 5000), (64 << 10, 1000), (1 << 20, 200), (64 << 20, 10)] {
            // A long message is answered by 4 bytes.
            let answer = if bytes > 64 << 10 { 4 } else { bytes };
            let mut times: Vec<f64> = Vec::new();
            let cpu = cpu_time();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let (wire, peer) = (&wires[1], peers[1]);
                    let (mut got, sent) = (vec![0; bytes], vec![1; answer]);
                    for _ in 0..turns {
                        wait_as_a_call(wire, &receive(wire, peer, tag(1), &mut got));
                        wait_as_a_call(wire, &send(wire, peer, tag(2), &sent));
                    }
                });
                let (wire, peer) = (&wires[0], peers[0]);
                let (mut got, sent) = (vec![0; answer], vec![1; bytes]);
                for _ in 0..turns {
                    let since = Instant::now();
                    let answer = receive(wire, peer, tag(2), &mut got);
                    wait_as_a_call(wire, &send(wire, peer, tag(1), &sent));
                    wait_as_a_call(wire, &answer);
                    times.push(since.elapsed().as_secs_f64() * 1e6);
                }
            });
            times.sort_by(f64::total_cmp);
            let ways = if bytes > 64 << 10 { 1.0 } else { 2.0 };
            let (median, fastest) = (times[turns / 2] / ways, times[0] / ways);
            let cpu = (cpu_time() - cpu) / turns as f64 / ways;
            println!("secret {secret:?}: {bytes} B: {median:.1} us (fastest {fastest:.1}), {cpu:.1} us of processors");
        }
    }
}
