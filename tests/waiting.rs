//! Asking who waits at the door of a job (dm_waiting), and whether a recovery has begun: what it
//! finds, and what it costs.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use devicemesh::rendezvous::store::{FileStore, Server, Store, TcpStore};
use devicemesh::rendezvous::{Join, JoinOptions, World};
use devicemesh::wait::Wait;

fn soon() -> Wait {
    Wait::after(Duration::from_secs(20))
}

/// A connection to a server through which everything that a client sends is counted.
struct Counted {
    port: u16,
    sent: Arc<AtomicU64>,
}

impl Counted {
    fn before(server: &Server) -> Counted {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, to, sent) =
            (listener.local_addr().unwrap().port(), server.local_addr(), Arc::new(AtomicU64::new(0)));
        let count = Arc::clone(&sent);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(std::io::Result::ok) {
                let server = TcpStream::connect(to).unwrap();
                let (mut answers, mut asked) = (server.try_clone().unwrap(), client.try_clone().unwrap());
                std::thread::spawn(move || std::io::copy(&mut answers, &mut asked));
                let count = Arc::clone(&count);
                let (mut client, mut server) = (client, server);
                std::thread::spawn(move || {
                    let mut bytes = [0; 4096];
                    while let Ok(some @ 1..) = client.read(&mut bytes) {
                        count.fetch_add(some as u64, Ordering::SeqCst);
                        if server.write_all(&bytes[..some]).is_err() {
                            break;
                        }
                    }
                    let _ = server.shutdown(std::net::Shutdown::Both);
                });
            }
        });
        Counted { port, sent }
    }

    fn store(&self) -> Arc<dyn Store> {
        Arc::new(TcpStore::connect("127.0.0.1", self.port, &soon()).unwrap())
    }

    /// Returns how many bytes were sent, once nothing is on the way any more.
    fn sent(&self) -> u64 {
        loop {
            let sent = self.sent.load(Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(1200));
            if self.sent.load(Ordering::SeqCst) == sent {
                return sent;
            }
        }
    }
}

/// Two ranks of a world over that store, of which the test uses rank 0.
fn worlds(stores: [Arc<dyn Store>; 2]) -> [World; 2] {
    let join = |(rank, store): (usize, Arc<dyn Store>)| {
        let options = JoinOptions::ranked(rank, 2).timeout(Duration::from_secs(20)).store(store).join(Join::New);
        std::thread::spawn(move || World::join("cpu", &options).unwrap())
    };
    let [zero, one] = stores;
    [join((0, zero)), join((1, one))].map(|rank| rank.join().unwrap())
}

/// Asks for at least half a second, which is many looks at the socket.
fn ask_often(world: &World) {
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(500) {
        assert_eq!((0..1000).map(|_| world.num_waiting().unwrap()).max(), Some(0));
    }
}

/// Asking who waits at the door sends nothing to the server while nobody comes.
#[test]
fn asking_who_waits_costs_no_store_operation() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let counted = Counted::before(&server);
    let direct = TcpStore::connect("127.0.0.1", server.local_addr().port(), &soon()).unwrap();
    let other = Arc::new(TcpStore::connect("127.0.0.1", server.local_addr().port(), &soon()).unwrap());
    let [world, other] = worlds([counted.store(), other]);
    let before = counted.sent();
    assert_eq!(world.num_waiting().unwrap(), 0);
    let asked = counted.sent();
    assert!(asked > before, "the first question asks for the notes, and leaves a WAIT");
    ask_often(&world);
    assert_eq!(counted.sent(), asked);
    // Somebody knocks, and the WAIT is answered. A gap in the list hides nobody.
    let prefix = format!(
        "devicemesh/0/0/{}",
        String::from_utf8(direct.get("devicemesh/0/0/running", &soon()).unwrap()).unwrap().split(' ').next().unwrap()
    );
    let await_count = |count: i32| {
        let end = Instant::now() + Duration::from_secs(20);
        while world.num_waiting().unwrap() != count {
            assert!(Instant::now() < end, "{} wait, not {count}", world.num_waiting().unwrap());
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    for (number, note) in [(1, "-"), (2, "1:1 1\nmesh"), (3, "7 7\nmesh")] {
        direct.add(&format!("{prefix}/door"), 1, &soon()).unwrap();
        direct.set(&format!("{prefix}/door/{number}"), note.as_bytes(), &soon()).unwrap();
        await_count(number - 1);
    }
    // Newcomers that have died do not wait.
    direct.set(&format!("{prefix}/lost/1"), b"1:1", &soon()).unwrap();
    await_count(1);
    direct.set(&format!("{prefix}/lost/2"), b"7", &soon()).unwrap();
    await_count(0);
    let asked = counted.sent();
    ask_often(&world);
    assert_eq!(counted.sent(), asked);
    drop((world, other));
}

/// Prints how long a question takes.
///
///     cargo test --release --test waiting cost -- --ignored --nocapture
#[test]
#[ignore = "measures"]
fn cost() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store =
        || -> Arc<dyn Store> { Arc::new(TcpStore::connect("127.0.0.1", server.local_addr().port(), &soon()).unwrap()) };
    let method = format!("file://{}/cost-{}", env!("CARGO_TARGET_TMPDIR"), std::process::id());
    let folders = [0, 1].map(|rank| {
        let options = JoinOptions::ranked(rank, 2).init_method(&method).join(Join::New);
        std::thread::spawn(move || World::join("cpu", &options).unwrap())
    });
    let folders = folders.map(|rank| rank.join().unwrap());
    for (name, [world, _other]) in [("a server", worlds([store(), store()])), ("a folder", folders)] {
        let mut times = Vec::new();
        for _ in 0..50 {
            let began = Instant::now();
            let count: i32 = (0..1_000_000).map(|_| world.num_waiting().unwrap()).sum();
            assert_eq!(count, 0);
            times.push(began.elapsed().as_secs_f64() * 1e3);
        }
        times.sort_by(f64::total_cmp);
        println!(
            "over {name}: {:.1} ns a question (median of 50 times 1,000,000; {:.1} at most)",
            times[25], times[49]
        );
    }
}

/// A thread that is blocked in a collective asks whether a recovery has begun. That costs two
/// operations of the store, however often threads ask, and it notices the note of a turn at once.
#[test]
fn asking_for_a_recovery_costs_no_store_operation() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let counted = Counted::before(&server);
    let direct = TcpStore::connect("127.0.0.1", server.local_addr().port(), &soon()).unwrap();
    let other = Arc::new(TcpStore::connect("127.0.0.1", server.local_addr().port(), &soon()).unwrap());
    let [world, _other] = worlds([counted.store(), other]);
    let before = counted.sent();
    assert_eq!(world.begun_recovery(), None);
    let asked = counted.sent();
    assert!(asked > before, "the first question reads the list, and leaves a WAIT");
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(500) {
        assert_eq!(world.begun_recovery(), None);
    }
    assert_eq!(counted.sent(), asked);
    let running = direct.get("devicemesh/0/0/running", &soon()).unwrap();
    let nonce = String::from_utf8(running).unwrap().split(' ').next().unwrap().to_owned();
    let note = |number: i64, text: &str| {
        assert_eq!(direct.add(&format!("devicemesh/0/0/{nonce}/lost"), 1, &soon()).unwrap(), number);
        direct.set(&format!("devicemesh/0/0/{nonce}/lost/{number}"), text.as_bytes(), &soon()).unwrap();
    };
    // A loss is no recovery.
    note(1, "1");
    let end = Instant::now() + Duration::from_secs(20);
    while counted.sent.load(Ordering::SeqCst) == asked {
        assert_eq!(world.begun_recovery(), None);
        assert!(Instant::now() < end, "nobody has read the note");
    }
    assert_eq!(world.begun_recovery(), None);
    note(2, "turn 1 by 1");
    while world.begun_recovery().is_none() {
        assert!(Instant::now() < end, "the recovery was not noticed");
    }
    let (reason, rank) = world.begun_recovery().unwrap();
    assert_eq!((reason.as_str(), rank), ("rank 1 has begun recovery 1 of the job, for which all ranks are needed", 1));
}

/// A folder answers each question at once, so it is asked once a second.
#[test]
fn a_folder_is_asked_for_a_recovery_now_and_then() {
    let path = std::env::temp_dir().join(format!("dm-recovery-watch-{}", std::process::id()));
    let store = || -> Arc<dyn Store> { Arc::new(FileStore::open(&path).unwrap()) };
    let [world, _other] = worlds([store(), store()]);
    assert_eq!(world.begun_recovery(), None);
    let direct = store();
    let running = direct.get("devicemesh/0/0/running", &soon()).unwrap();
    let nonce = String::from_utf8(running).unwrap().split(' ').next().unwrap().to_owned();
    direct.add(&format!("devicemesh/0/0/{nonce}/lost"), 1, &soon()).unwrap();
    direct.set(&format!("devicemesh/0/0/{nonce}/lost/1"), b"turn 1 by 1", &soon()).unwrap();
    let began = Instant::now();
    while world.begun_recovery().is_none() {
        assert!(began.elapsed() < Duration::from_secs(20), "the recovery was not noticed");
    }
    drop((world, _other, direct));
    let _ = std::fs::remove_dir_all(&path);
}
