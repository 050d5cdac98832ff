//! Tests of the wire over UCX. They run where UCX's library is found: Debian's libucx0, or the one
//! that `DM_UCX_LIBRARY` names. Elsewhere they say that they are skipped.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::wire::contract;
use crate::wire::contract::TOKEN;

/// How long a test waits for what must happen.
const LONG: Duration = Duration::from_secs(60);

/// Runs a test where UCX is there.
fn with_ucx(test: impl Fn(contract::Make<'_>)) {
    let make = || open(Duration::from_secs(5), || ());
    match make() {
        Ok(_) => test(&|| -> Arc<dyn Wire> { make().unwrap() }),
        Err(error) => println!("skipped: {}", error.message()),
    }
}

#[test]
fn messages_of_all_sizes_arrive_whichever_side_is_early() {
    with_ucx(contract::all_sizes);
}

#[test]
fn messages_of_one_tag_keep_their_order() {
    with_ucx(contract::order);
    with_ucx(contract::soon);
}

#[test]
fn a_process_reaches_itself() {
    with_ucx(contract::itself);
}

#[test]
fn a_message_that_is_too_long_fails_its_receive_alone() {
    with_ucx(contract::too_long);
}

#[test]
fn a_wire_that_goes_is_lost() {
    with_ucx(contract::loss);
}

#[test]
fn a_process_with_another_token_does_not_get_in() {
    with_ucx(contract::stranger);
}

#[test]
fn a_process_may_send_before_the_other_has_met_it() {
    with_ucx(contract::early);
}

#[test]
fn both_sides_may_connect_at_once() {
    with_ucx(|make| contract::at_once(make, 10));
}

#[test]
fn peers_may_be_closed_and_met_again() {
    with_ucx(contract::again);
}

#[test]
fn a_cancelled_message_harms_no_other() {
    with_ucx(contract::cancelled);
}

#[test]
fn a_cancelled_send_leaves_no_gap() {
    with_ucx(contract::withdrawn);
}

#[test]
#[ignore = "it measures"]
fn how_fast() {
    with_ucx(|make| contract::speed("UCX", make));
}

#[test]
fn a_peer_that_says_nothing_is_lost_in_time() {
    with_ucx(|_| {
        // On a busy machine, the first notice may take a second.
        let wires = [Ucx::new(Duration::from_millis(1500), || ()).unwrap(), Ucx::new(LONG, || ()).unwrap()];
        let peers = [wires[0].meet(&wires[1].contact(), &[7; 16]), wires[1].meet(&wires[0].contact(), &[7; 16])];
        wires[1].notify(peers[1], 1, b"hello");
        let end = Instant::now() + LONG;
        while wires[0].news().0.is_empty() {
            assert!(Instant::now() < end, "no notice comes");
            std::thread::sleep(Duration::from_millis(1));
        }
        // The second wire sends a sign of life only every 12 s, and nothing else.
        while wires[0].lost(peers[0]).is_none() {
            assert!(Instant::now() < end, "the silence is not noticed");
            std::thread::sleep(Duration::from_millis(1));
        }
        let lost = wires[0].lost(peers[0]).unwrap();
        assert!(!lost.ended && lost.why.contains("has been silent for 1500 ms"), "{}", lost.why);
    });
}

#[test]
fn a_forked_child_leaves_the_worker_alone() {
    with_ucx(|make| {
        let (wires, peers) = contract::pair(make);
        let (mut got, tag) = ([0; 5], contract::tag(1));
        let request = contract::send(&wires[0], peers[0], tag, b"hello");
        assert!(contract::wait(&wires[0], &request).is_ok());
        // SAFETY: the child calls functions that refuse their work, and ends at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let moved = wires.iter().any(|wire| wire.progress());
            wires[0].notify(peers[0], 1, b"from the child");
            wires[0].close(peers[0], &[7; 16]);
            drop(wires);
            // SAFETY: the call does not return.
            unsafe { libc::_exit(i32::from(moved)) };
        }
        let mut status = 0;
        // SAFETY: the call writes the status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        let request = contract::receive(&wires[1], peers[1], tag, &mut got);
        assert_eq!((contract::wait(&wires[1], &request), &got), (Ok(5), b"hello"));
        assert!(wires[1].news().0.is_empty());
    });
}

#[test]
fn an_address_of_another_wire_is_refused_with_the_reason() {
    with_ucx(|make| {
        let wire = make();
        let peer = wire.meet(&Contact { id: [3; 16], address: b"no address of UCX".to_vec() }, &[7; 16]);
        let mut got = [0; 5];
        let request = contract::receive(&wire, peer, contract::tag(1), &mut got);
        let failed = contract::wait(&wire, &request).unwrap_err();
        assert!(matches!(&failed, Broken::Lost(lost) if lost.why.contains("DM_WIRE")), "{failed:?}");
    });
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect()
}

/// Reads lines until one is a contact.
fn read_contact(lines: impl BufRead) -> Contact {
    let lines = lines.lines().map_while(std::result::Result::ok);
    let line = lines.filter_map(|line| line.split_once("contact ").map(|(_, rest)| rest.to_owned())).next().unwrap();
    let (id, address) = line.split_once(' ').unwrap();
    Contact { id: unhex(id).try_into().unwrap(), address: unhex(address) }
}

/// The other process of the tests below, which stop or kill it. The other process sends a long
/// message and receives a long message.
#[test]
#[ignore = "the tests after it start it"]
fn the_other_process() {
    let wire = open(LONG, || ()).unwrap();
    let me = wire.contact();
    println!("contact {} {}", hex(&me.id), hex(&me.address));
    let peer = wire.meet(&read_contact(std::io::stdin().lock()), &[7; 16]);
    wire.notify(peer, 1, b"ready");
    let (long, mut got) = (vec![1; LENGTH], vec![0; LENGTH]);
    contract::send(&wire, peer, contract::tag(1), &long);
    contract::receive(&wire, peer, contract::tag(2), &mut got);
    std::thread::sleep(LONG);
}

/// The length in bytes of the long messages of [`the_other_process`].
const LENGTH: usize = 256 << 20;

/// Another process, which ends with the test.
struct Other(std::process::Child);

impl Other {
    /// Starts the other process, and introduces it to `wire`.
    fn meet(wire: &dyn Wire) -> (Other, Peer) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["wire::ucx::tests::the_other_process", "--exact", "--ignored", "--nocapture"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (me, mut input) = (wire.contact(), child.stdin.take().unwrap());
        writeln!(input, "contact {} {}", hex(&me.id), hex(&me.address)).unwrap();
        let peer = wire.meet(&read_contact(BufReader::new(child.stdout.take().unwrap())), &[7; 16]);
        let other = Other(child);
        until("no notice comes", || !wire.news().0.is_empty());
        (other, peer)
    }

    fn signal(&self, number: i32) {
        // SAFETY: the process is this one's child, and nobody has waited for it.
        assert_eq!(unsafe { libc::kill(self.0.id() as i32, number) }, 0);
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until a condition holds.
fn until(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether UCX uses the buffer of a request.
fn is_in_flight(wire: &Ucx, request: &Request) -> bool {
    let in_flight = |core: &mut Core| match core.requests.get(&request.0) {
        Some(Op::Send(send)) => send.in_flight > 0,
        Some(Op::Receive(receive)) => receive.in_flight > 0,
        _ => false,
    };
    wire.edit(in_flight).unwrap()
}

#[test]
fn a_message_with_a_stopped_process_is_cancelled_in_time_and_its_buffer_is_left_alone() {
    with_ucx(|_| {
        for stream in [1, 2] {
            let wire = Ucx::new(LONG, || ()).unwrap();
            let (other, peer) = Other::meet(&wire);
            let mut buffer = vec![0; LENGTH];
            // SAFETY: the buffer outlives the request.
            let request = unsafe {
                match stream {
                    1 => wire.irecv(peer, contract::tag(stream), buffer.as_mut_ptr(), LENGTH),
                    _ => wire.isend(peer, contract::tag(stream), buffer.as_ptr(), LENGTH),
                }
            };
            until("the message does not begin", || is_in_flight(&wire, &request));
            other.signal(libc::SIGSTOP);
            // The data that the other process sent before it was stopped arrive first.
            let (mut seen, mut since) = (None, Instant::now());
            while since.elapsed() < Duration::from_millis(200) {
                let moved = wire.moved_bytes(peer, contract::tag(stream).comm);
                if seen.replace(moved) != Some(moved) {
                    since = Instant::now();
                }
                wire.progress();
            }
            assert!(is_in_flight(&wire, &request), "{wire:?}");
            let began = Instant::now();
            wire.cancel(request);
            println!("a request with a stopped process ends after {:?}", began.elapsed());
            assert!(wire.lost(peer).is_some_and(|lost| lost.why.contains("was cancelled")), "{:?}", wire.lost(peer));
            assert!(!wire.edit(|core| core.worker.has_ended()).unwrap(), "UCX has not given the buffer back");
            buffer.fill(77);
            other.signal(libc::SIGCONT);
            let end = Instant::now() + Duration::from_millis(300);
            while Instant::now() < end {
                wire.progress();
            }
            assert!(buffer.iter().all(|byte| *byte == 77), "the buffer has changed after the end of its request");
        }
    });
}

/// UCX's library with some functions replaced.
fn library(change: impl FnOnce(&mut api::Functions)) -> OpenResult {
    let real = library::open()?;
    let mut functions = real.functions;
    change(&mut functions);
    Ok(Box::leak(Box::new(Library { functions, version: real.version })))
}

/// Returns a request of UCX for an operation that never ends.
fn never() -> *mut std::ffi::c_void {
    std::ptr::without_provenance_mut(1 << 20)
}

#[test]
fn ucx_is_ended_where_it_keeps_a_buffer() {
    use std::ffi::c_void;
    use std::sync::atomic::{AtomicBool, Ordering};
    static ENDED: AtomicBool = AtomicBool::new(false);
    unsafe extern "C" fn receive(
        _: *mut c_void,
        _: *mut c_void,
        _: *mut c_void,
        _: usize,
        _: *const api::OpParams,
    ) -> *mut c_void {
        never()
    }
    unsafe extern "C" fn worker_destroy(worker: *mut c_void) {
        ENDED.store(true, Ordering::SeqCst);
        // SAFETY: the caller's contract.
        unsafe { (library::open().unwrap().functions.worker_destroy)(worker) };
    }
    let open = || library(|functions| (functions.receive, functions.worker_destroy) = (receive, worker_destroy));
    with_ucx(|make| {
        let (wire, other) = (Ucx::over(open, LONG, || ()).unwrap(), make());
        let there = wire.meet(&other.contact(), &[7; 16]);
        let back = other.meet(&wire.contact(), &[7; 16]);
        let (long, mut got) = (vec![1; 1 << 20], vec![0; 1 << 20]);
        let sending = contract::send(&other, back, contract::tag(1), &long);
        // SAFETY: the buffer outlives the request.
        let request = unsafe { wire.irecv(there, contract::tag(1), got.as_mut_ptr(), got.len()) };
        until("the message does not begin", || is_in_flight(&wire, &request));
        wire.cancel(request);
        assert!(ENDED.load(Ordering::SeqCst), "cancel returned while UCX had the buffer");
        assert!(wire.lost(there).is_some());
        assert!(matches!(contract::wait(&other, &sending), Err(Broken::Lost(_))), "the peer is told");
        // The wire stays usable as far as it can be: everything fails with the reason.
        let third = make();
        let peer = wire.meet(&third.contact(), &[7; 16]);
        wire.notify(peer, 1, b"hello");
        until("a new peer is not lost", || {
            wire.progress();
            wire.lost(peer).is_some_and(|lost| lost.why.contains("ended its UCX"))
        });
        // SAFETY: the buffer outlives the request.
        let request = unsafe { wire.isend(peer, contract::tag(1), got.as_ptr(), got.len()) };
        assert!(matches!(wire.test(&request), Err(Broken::Lost(_))));
        wire.sleep_on_wire(wire.moved().value(), &[], Duration::from_millis(1));
        wire.close_all(&[there, peer], &TOKEN);
    });
}

#[test]
fn peers_are_closed_at_once_and_the_wire_stays_usable_meanwhile() {
    use std::ffi::c_void;
    use std::sync::atomic::{AtomicBool, Ordering};
    unsafe extern "C" fn flush(_: *mut c_void, _: *const api::OpParams) -> *mut c_void {
        never()
    }
    with_ucx(|make| {
        let wire = Ucx::over(|| library(|functions| functions.flush = flush), LONG, || ()).unwrap();
        let others: Vec<_> = (0..8).map(|_| make()).collect();
        let peers: Vec<Peer> = others.iter().map(|other| wire.meet(&other.contact(), &[7; 16])).collect();
        for (other, peer) in others.iter().zip(&peers) {
            other.meet(&wire.contact(), &[7; 16]);
            wire.notify(*peer, 1, b"hello");
        }
        until("a connection is not made", || {
            let ready = |core: &mut Core| core.peers.values().all(Remote::is_ready);
            wire.progress();
            wire.edit(ready).unwrap()
        });
        let (began, over) = (Instant::now(), AtomicBool::new(false));
        let looks = std::thread::scope(|scope| {
            let looking = scope.spawn(|| {
                let mut looks = 0;
                while !over.load(Ordering::SeqCst) {
                    assert!(wire.lost(peers[0]).is_none());
                    looks += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
                looks
            });
            wire.close_all(&peers, &TOKEN);
            over.store(true, Ordering::SeqCst);
            looking.join().unwrap()
        });
        assert!(began.elapsed() < FLUSH * 4, "{:?}", began.elapsed());
        assert!(looks > 5, "other threads used the wire only {looks} times meanwhile");
    });
}

#[test]
fn a_notice_that_waits_for_its_connection_has_not_arrived() {
    with_ucx(|_| {
        let (wire, other) = (Ucx::new(LONG, || ()).unwrap(), Ucx::new(LONG, || ()).unwrap());
        let there = wire.meet(&other.contact(), &TOKEN);
        assert!(wire.has_all_arrived());
        wire.notify(there, 1, b"left");
        assert!(!wire.has_all_arrived(), "the other process does not know this one");
        let back = other.meet(&wire.contact(), &TOKEN);
        until("the notice does not arrive", || {
            wire.progress();
            wire.has_all_arrived()
        });
        wire.close(there, &TOKEN);
        drop(wire);
        let got = RefCell::new(Vec::new());
        until("the notice is lost", || {
            other.progress();
            got.borrow_mut().extend(other.news().0);
            !got.borrow().is_empty()
        });
        let got = got.into_inner();
        assert_eq!((got[0].from, &got[0].text[..]), (back, &b"left"[..]));
    });
}

#[test]
fn many_communicators_with_one_process_leave_no_tokens() {
    with_ucx(|_| {
        let (wire, other) = (Ucx::new(LONG, || ()).unwrap(), Ucx::new(LONG, || ()).unwrap());
        let there = wire.meet(&other.contact(), &TOKEN);
        let tokens = |wire: &Ucx, peer: Peer| wire.edit(|core| core.peers[&peer.0].newest_tokens().len()).unwrap();
        let meet_often = || {
            for number in 0..100 {
                let peer = wire.meet(&other.contact(), &[number; 16]);
                wire.close(peer, &[number; 16]);
            }
        };
        meet_often();
        assert_eq!(tokens(&wire, there), 1, "without a connection");
        other.meet(&wire.contact(), &TOKEN);
        wire.notify(there, 1, b"hello");
        until("there is no connection", || {
            wire.progress();
            other.progress();
            wire.edit(|core| core.peers[&there.0].is_ready()).unwrap()
        });
        meet_often();
        assert_eq!(tokens(&wire, there), 0, "with a connection");
    });
}

#[test]
fn a_killed_process_is_lost_at_once() {
    with_ucx(|make| {
        let wire = make();
        let (mut other, peer) = Other::meet(&*wire);
        let mut got = vec![0; 5];
        let request = contract::receive(&wire, peer, contract::tag(3), &mut got);
        let killed = Instant::now();
        other.0.kill().unwrap();
        other.0.wait().unwrap();
        let failed = contract::wait(&wire, &request).unwrap_err();
        let Broken::Lost(lost) = failed else { panic!("{failed:?}") };
        println!("lost after {:?}: {}", killed.elapsed(), lost.why);
        assert!(lost.ended && lost.why.contains(&format!("process {}", other.0.id())), "{lost:?}");
        // The silence would be noticed after 5 s.
        assert!(killed.elapsed() < Duration::from_secs(4), "{:?}", killed.elapsed());
    });
}

#[test]
fn a_peer_that_was_lost_is_met_again_although_old_uses_are_left() {
    const TOKENS: [[u8; 16]; 2] = [[1; 16], [2; 16]];
    with_ucx(|_| {
        let wires = [0, 1].map(|_| Arc::new(Ucx::new(Duration::from_secs(5), || ()).unwrap()));
        let exchange = |peers: [Peer; 2]| {
            let mut got = [0; 5];
            let answer = contract::receive(&wires[1], peers[1], contract::tag(1), &mut got);
            let request = contract::send(&wires[0], peers[0], contract::tag(1), b"hello");
            let done = [contract::wait(&wires[0], &request), contract::wait(&wires[1], &answer)];
            assert_eq!(done, [Ok(5), Ok(5)], "{:?}", peers);
        };
        let old = [0, 1].map(|at| wires[at].meet(&wires[1 - at].contact(), &TOKENS[0]));
        exchange(old);
        for (wire, peer) in wires.iter().zip(old) {
            let lost = Lost { ended: false, why: "it has fallen silent".to_owned() };
            wire.edit(|core| core.lose(peer.0, lost)).unwrap();
        }
        // The second process meets the first one after the first one has greeted.
        let there = wires[0].meet(&wires[1].contact(), &TOKENS[1]);
        wires[0].notify(there, 1, b"hello");
        std::thread::sleep(Duration::from_millis(100));
        let back = wires[1].meet(&wires[0].contact(), &TOKENS[1]);
        exchange([there, back]);
        for (wire, peer) in wires.iter().zip(old) {
            assert!(wire.lost(peer).is_some());
            wire.close(peer, &TOKENS[0]);
        }
        exchange([there, back]);
        for (wire, peer) in wires.iter().zip([there, back]) {
            assert_eq!(wire.lost(peer), None);
            wire.close(peer, &TOKENS[1]);
        }
    });
}
