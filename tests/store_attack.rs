//! Nobody holds up an honest client: floods of requests that are small to send and large to answer,
//! beside a client that asks one small thing after another. It takes about 20 s, because each flood
//! lasts long enough to show a slow answer.
//!
//! The server's work is what is certain: the server counts what it does between two looks at the
//! sockets. The clock is looked at too. An answer takes at most 100 ms, without the time in which
//! the server or this test waited for a processor that another program had. The machine gets
//! several chances, the server none.

#[path = "../src/starved.rs"]
mod starved;
mod wire;

use std::collections::VecDeque;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use devicemesh::rendezvous::store::records::Records;
use devicemesh::rendezvous::store::{Relay, Secret, Server, Store, TcpStore};
use devicemesh::rendezvous::{JoinOptions, World};
use starved::waited_in;
use wire::{LOOK, connect, greeted_at, honest, soon, string};

const LIMIT: Duration = Duration::from_millis(100);
const CHANCES: usize = 4;
/// Whatever is asked for, a turn ends when so much was done: the limits of server/serving.rs, and
/// the step that passes them. In a turn of a trunk, this step may be a small turn of one of its
/// clients.
const SMALL_TURN: usize = 256 << 10;
const ROUND: usize = 304 << 10;

/// Tells how long threads of this process have waited for a processor: those of the server and of
/// the ranks, and this one. The kernel's schedstat says so, where it exists.
struct Processors {
    paths: Vec<PathBuf>,
}

impl Processors {
    fn new() -> Processors {
        let tasks = fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
        let counts = |name: String| name == "dm-store\n" || name.starts_with("rank");
        let is_server = |task: &PathBuf| fs::read_to_string(task.join("comm")).is_ok_and(counts);
        let server = tasks.filter(is_server).map(|task| task.join("schedstat"));
        Processors { paths: server.chain([PathBuf::from("/proc/thread-self/schedstat")]).collect() }
    }

    fn waited_for(&self) -> Duration {
        self.paths.iter().map(|path| waited_in(path)).sum()
    }
}

/// The slowest of that many barriers of two ranks, as [`slowest`] has it.
fn slowest_barrier(worlds: &[World; 2], barriers: usize) -> (Duration, Duration) {
    std::thread::scope(|scope| {
        // The thread stays until the end, because the kernel forgets how long it has waited.
        let (over, is_over) = channel::<()>();
        let second = move || {
            (0..barriers).for_each(|_| worlds[1].barrier(None).unwrap());
            let _ = is_over.recv();
        };
        std::thread::Builder::new().name("rank 1".to_owned()).spawn_scoped(scope, second).unwrap();
        let processors = Processors::new();
        let (mut slowest, mut slowest_own) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..barriers {
            let (before, began) = (processors.waited_for(), Instant::now());
            worlds[0].barrier(None).unwrap();
            let took = began.elapsed();
            slowest = slowest.max(took);
            slowest_own = slowest_own.max(took.saturating_sub(processors.waited_for() - before));
        }
        drop(over);
        (slowest, slowest_own)
    })
}

/// A barrier needs about a dozen answers, one after another.
fn holds_up_no_barrier(what: &str, server: &Server, worlds: &[World; 2], flood: impl Fn(&AtomicBool) + Sync) {
    for chance in 1.. {
        let over = AtomicBool::new(false);
        let (flooded, own) = std::thread::scope(|scope| {
            let _ending = RaiseOnDrop(&over);
            scope.spawn(|| flood(&over));
            std::thread::sleep(Duration::from_millis(200));
            server.most_work();
            slowest_barrier(worlds, 30)
        });
        let (small, round, look) = server.most_work();
        println!(
            "{what}: slowest barrier {flooded:?}, {own:?} without waiting for a processor; most work of a small turn {small}, of a round {round}, between looks {look}"
        );
        assert!(small < SMALL_TURN && round < ROUND && look < LOOK, "{what}: {small}, {round} and {look}");
        if own <= LIMIT {
            return;
        }
        assert!(chance < CHANCES, "{what}: {own:?} for one barrier, of {flooded:?} by the clock");
    }
}

/// The slowest of the answers in that time: as the clock has it, and without the time in which
/// other programs had the processors.
fn slowest(store: &TcpStore, time: Duration) -> (Duration, Duration) {
    let processors = Processors::new();
    let (began, mut slowest, mut slowest_own) = (Instant::now(), Duration::ZERO, Duration::ZERO);
    while began.elapsed() < time {
        let before = processors.waited_for();
        let asked = Instant::now();
        store.add("count", 1, &soon()).unwrap();
        let took = asked.elapsed();
        slowest = slowest.max(took);
        slowest_own = slowest_own.max(took.saturating_sub(processors.waited_for() - before));
        std::thread::sleep(Duration::from_millis(2));
    }
    (slowest, slowest_own)
}

/// The flood goes on until the flag is raised.
fn holds_up_nobody(what: &str, server: &Server, flood: impl Fn(&AtomicBool) + Sync) {
    holds_up(what, server, &honest(server), flood);
}

/// Does what [`holds_up_nobody`] does, with an honest client that is there already.
fn holds_up(what: &str, server: &Server, store: &TcpStore, flood: impl Fn(&AtomicBool) + Sync) {
    server.most_work();
    for chance in 1.. {
        let (calm, _) = slowest(store, Duration::from_millis(300));
        let over = AtomicBool::new(false);
        let (flooded, own) = std::thread::scope(|scope| {
            let _ending = RaiseOnDrop(&over);
            scope.spawn(|| flood(&over));
            std::thread::sleep(Duration::from_millis(200));
            slowest(store, Duration::from_millis(1000))
        });
        let (small, round, look) = server.most_work();
        println!(
            "{what}: slowest answer {flooded:?}, {own:?} without waiting for a processor, before it {calm:?}; most work of a small turn {small}, of a round {round}, between looks {look}"
        );
        assert!(small < SMALL_TURN && round < ROUND && look < LOOK, "{what}: {small}, {round} and {look}");
        if own <= LIMIT {
            return;
        }
        assert!(chance < CHANCES, "{what}: {own:?} for one round trip, of {flooded:?} by the clock");
    }
}

/// Raises the flag when it is dropped, so a flood ends also when what is measured beside it fails.
struct RaiseOnDrop<'a>(&'a AtomicBool);

impl Drop for RaiseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Connections that send a request and never read; beyond `most` the oldest is closed for each new
/// one.
fn roll(server: &Server, over: &AtomicBool, most: usize, request: &[u8]) {
    let request = [&[0, 0xce, 0xf7, 0x85, 0x3c], request].concat();
    let mut rolling: VecDeque<TcpStream> = VecDeque::new();
    while !over.load(Ordering::SeqCst) {
        let mut stream = connect(server);
        stream.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        let _ = stream.write_all(&request);
        rolling.push_back(stream);
        if rolling.len() > most {
            rolling.pop_front();
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Clients that send the same request again and again, whatever is answered.
fn repeat(server: &Server, over: &AtomicBool, clients: usize, request: &[u8]) {
    repeat_at(server.local_addr(), over, clients, request);
}

/// Does what [`repeat`] does, at the address of a server or of a relay.
fn repeat_at(address: SocketAddr, over: &AtomicBool, clients: usize, request: &[u8]) {
    let mut streams: Vec<TcpStream> = (0..clients).map(|_| greeted_at(address)).collect();
    streams.iter().for_each(|stream| stream.set_nonblocking(true).unwrap());
    let mut sent = vec![0; clients];
    while !over.load(Ordering::SeqCst) {
        for (stream, sent) in streams.iter_mut().zip(&mut sent) {
            *sent = (*sent + stream.write(&request[*sent..]).unwrap_or(0)) % request.len();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns a handshake's request, which everybody on the way can copy.
fn handshake(secret: &Secret) -> (Records, Vec<u8>) {
    let (records, first) = Records::initiator(secret).unwrap();
    (records, [&[104][..], &string(first)].concat())
}

/// New connections, as fast as they come, that all send the same handshake.
fn handshakes(server: &Server, over: &AtomicBool, handshake: &[u8]) {
    let request = [&[0, 0xce, 0xf7, 0x85, 0x3c], handshake].concat();
    while !over.load(Ordering::SeqCst) {
        let mut streams: Vec<TcpStream> = (0..64).map(|_| connect(server)).collect();
        streams.iter_mut().for_each(|stream| stream.write_all(&request).unwrap());
    }
}

/// Clients with the secret that send the same request again and again, whatever is answered.
fn repeat_encrypted(server: &Server, over: &AtomicBool, secret: &Secret, clients: usize, request: &[u8]) {
    let client = |_| {
        let ((mut records, handshake), mut stream, mut answer) = (handshake(secret), connect(server), [0; 56]);
        stream.write_all(&[&[0, 0xce, 0xf7, 0x85, 0x3c], &handshake[..]].concat()).unwrap();
        stream.read_exact(&mut answer).unwrap();
        records.finish(&answer[8..]).unwrap();
        stream.set_nonblocking(true).unwrap();
        (stream, records, Vec::new(), 0)
    };
    let mut clients: Vec<_> = (0..clients).map(client).collect();
    while !over.load(Ordering::SeqCst) {
        for (stream, records, sealed, sent) in &mut clients {
            if *sent == sealed.len() {
                (*sealed, *sent) = (Vec::new(), 0);
                request.chunks(16 << 10).for_each(|text| records.seal(text, sealed).unwrap());
            }
            *sent += stream.write(&sealed[*sent..]).unwrap_or(0);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn keys(op: u8, keys: impl ExactSizeIterator<Item = String>) -> Vec<u8> {
    let count = (keys.len() as u64).to_le_bytes();
    std::iter::once(op).chain(count).chain(keys.flat_map(string)).collect()
}

#[test]
fn floods_hold_up_nobody() {
    let limit = libc::rlimit { rlim_cur: 4096, rlim_max: 4096 };
    // SAFETY: the structure is valid. Where the kernel refuses the limit, the one that it has is
    // good enough.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
    // A C program does not ignore SIGPIPE. A client that closes its end must not end the process.
    // SAFETY: this test is the only one of its process.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = honest(&server);
    for number in 0..3 {
        store.set(&format!("big{number}"), &vec![1; 8 << 20], &soon()).unwrap();
    }
    let multi_get = keys(10, (0..3).map(|number| format!("/big{number}")));
    holds_up_nobody("rolling MULTI_GET of 24 MiB", &server, |over| roll(&server, over, 300, &multi_get));
    let many = multi_get.repeat(20);
    holds_up_nobody("20 times MULTI_GET of 24 MiB", &server, |over| roll(&server, over, 100, &many));

    let method = format!("tcp://127.0.0.1:{}", server.local_addr().port());
    let join = |rank| World::join("cpu", &JoinOptions::ranked(rank, 2).init_method(method.clone())).unwrap();
    let worlds = std::thread::scope(|scope| {
        let second = scope.spawn(|| join(1));
        [join(0), second.join().unwrap()]
    });
    let wait = keys(6, (0..131_072).map(|number| format!("rolling{number}")));
    holds_up_nobody("rolling WAIT for 131,072 keys", &server, |over| roll(&server, over, 300, &wait));
    holds_up_no_barrier("rolling WAIT for 131,072 keys", &server, &worlds, |over| roll(&server, over, 300, &wait));
    let wait = keys(6, (0..110_000).map(|number| format!("{}", number % 9)));
    holds_up_nobody("WAIT for 110,000 keys", &server, |over| repeat(&server, over, 60, &wait));
    let wait_any = keys(100, (0..110_000).map(|number| format!("any{number}")));
    holds_up_nobody("WAIT_ANY of 110,000 keys", &server, |over| repeat(&server, over, 20, &wait_any));
    holds_up_no_barrier("WAIT_ANY of 110,000 keys", &server, &worlds, |over| repeat(&server, over, 20, &wait_any));
    let wait = keys(6, (0..7_000).map(|number| format!("{number:08192}")));
    holds_up_nobody("WAIT for 7,000 keys of 8 KiB", &server, |over| repeat(&server, over, 20, &wait));
    let check = keys(5, std::iter::repeat_n("/big0".to_owned(), 131_072));
    holds_up_nobody("CHECK of 131,072 keys", &server, |over| repeat(&server, over, 20, &check));
    let get = [&[3][..], &string("/big0")].concat();
    let set = [&[1][..], &string("/other"), &string(vec![7; 100_000])].concat();
    let both = [get, set].concat();
    holds_up_nobody("GET of 8 MiB and SET of 100 kB", &server, |over| repeat(&server, over, 60, &both));
    // The honest client and the flood have one relay, so they share a connection of the server.
    let relay = Relay::start("127.0.0.1", server.local_addr().port(), None, &soon()).unwrap().unwrap();
    let by_relay = TcpStore::connect("127.0.0.1", relay.local_addr().port(), &soon()).unwrap();
    holds_up("GET of 8 MiB and SET of 100 kB by a relay", &server, &by_relay, |over| {
        repeat_at(relay.local_addr(), over, 60, &both);
    });
    holds_up("WAIT_ANY of 110,000 keys by a relay", &server, &by_relay, |over| {
        repeat_at(relay.local_addr(), over, 20, &wait_any);
    });

    let secret = Secret::new(b"secret").unwrap();
    let guarded = Server::guarded("127.0.0.1:0", Some(secret.clone())).unwrap();
    let port = guarded.local_addr().port();
    let honest = TcpStore::connect_with_secret("127.0.0.1", port, Some(secret.clone()), &soon()).unwrap();
    let copied = handshake(&secret).1;
    holds_up("copied handshakes", &guarded, &honest, |over| handshakes(&guarded, over, &copied));
    honest.set("big0", &vec![1; 8 << 20], &soon()).unwrap();
    holds_up("encrypted GET of 8 MiB and SET of 100 kB", &guarded, &honest, |over| {
        repeat_encrypted(&guarded, over, &secret, 60, &both);
    });

    for number in 0..3000 {
        store.set(&format!("{number}{}", "x".repeat(8000)), b"", &soon()).unwrap();
    }
    holds_up_nobody("LIST_KEYS of 24 MB", &server, |over| roll(&server, over, 300, &[17; 1000]));
}
