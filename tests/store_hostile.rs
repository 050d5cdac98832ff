//! Clients that mean harm, or are broken. The others are served as ever, and the server keeps only
//! so much. Each case has a process of its own, because limits and memory are counted by process.

#[macro_use]
mod wire;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use devicemesh::rendezvous::store::{Server, Store, TcpStore};
use wire::{connect, deaf_clients, greeted, honest, late_reader_gets_everything, memory_mib, soon, string, wait_until};

/// Makes a hundred round trips. None of them waits for anybody.
fn is_served(store: &TcpStore) {
    let began = Instant::now();
    for _ in 0..100 {
        store.add("count", 1, &soon()).unwrap();
    }
    assert!(began.elapsed() < Duration::from_secs(3), "{:?} for 100 round trips", began.elapsed());
}

fn descriptor_limit() -> libc::rlimit {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a valid structure to fill.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) }, 0);
    limit
}

fn limit_descriptors(soft: u64, hard: u64) {
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
    // SAFETY: a valid structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
}

#[test]
fn thousands_of_silent_connections_cost_little() {
    alone!("thousands_of_silent_connections_cost_little");
    let hard = descriptor_limit().rlim_max.min(20_000);
    limit_descriptors(hard, hard);
    // Both ends are in this process.
    let many = ((hard as usize - 200) / 2).min(6000);
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = honest(&server);
    is_served(&store);
    let before = memory_mib("VmRSS:");
    let silent: Vec<TcpStream> = (0..many).map(|_| connect(&server)).collect();
    is_served(&store);
    wait_until("all are accepted", || server.clients() == many + 1);
    assert!(memory_mib("VmRSS:") < before + 24, "{} MiB for {many} silent connections", memory_mib("VmRSS:") - before);
    drop(silent);
    is_served(&store);
}

#[test]
fn without_descriptors_those_who_are_there_are_served_and_others_come_later() {
    alone!("without_descriptors_those_who_are_there_are_served_and_others_come_later");
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = honest(&server);
    // The soft limit is raised by the server, the hard one is not.
    limit_descriptors(64, 160);
    let mut crowd = Vec::new();
    while let Ok(stream) = TcpStream::connect(server.local_addr()) {
        crowd.push(stream);
        limit_descriptors(descriptor_limit().rlim_cur.max(crowd.len() as u64 + 70).min(160), 160);
    }
    assert!(crowd.len() > 60, "{}", crowd.len());
    let processor = |server: &Server| {
        let _ = server.clients();
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: a valid structure to fill, and all zeros is one.
        let usage = unsafe {
            libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
            usage.assume_init()
        };
        usage.ru_utime.tv_sec * 1_000_000
            + usage.ru_utime.tv_usec
            + usage.ru_stime.tv_sec * 1_000_000
            + usage.ru_stime.tv_usec
    };
    is_served(&store);
    let (began, used) = (Instant::now(), processor(&server));
    std::thread::sleep(Duration::from_millis(500));
    let (waited, used) = (began.elapsed().as_micros() as i64, processor(&server) - used);
    assert!(used < waited / 4, "{used} us of processor time in {waited} us: it looks again and again");
    crowd.truncate(20);
    let late = honest(&server);
    is_served(&late);
}

#[test]
fn halves_of_large_requests_are_kept_up_to_a_bound() {
    alone!("halves_of_large_requests_are_kept_up_to_a_bound");
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = honest(&server);
    is_served(&store);
    let before = memory_mib("VmRSS:");
    // Values of 8 MiB that lack their last byte.
    let mut half = [&[1][..], &string(b"/half"), &(8u64 << 20).to_le_bytes()].concat();
    half.resize(half.len() + (8 << 20) - 1, 7);
    let mut halves: Vec<TcpStream> = Vec::new();
    for _ in 0..60 {
        let mut stream = greeted(&server);
        stream.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
        let _ = stream.write_all(&half);
        halves.push(stream);
    }
    is_served(&store);
    let grown = memory_mib("VmRSS:").saturating_sub(before);
    // 480 MiB were sent.
    assert!(grown < 256 + 64, "{grown} MiB kept");
    drop(halves);
    wait_until("all of them go", || server.clients() == 1);
    is_served(&store);
}

#[test]
fn a_client_that_never_reads_is_not_listened_to() {
    alone!("a_client_that_never_reads_is_not_listened_to");
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = honest(&server);
    store.set("large", &vec![1; 4 << 20], &soon()).unwrap();
    is_served(&store);
    let before = memory_mib("VmRSS:");
    let _deaf = deaf_clients(server.local_addr(), 8, 1000);
    is_served(&store);
    let grown = memory_mib("VmRSS:").saturating_sub(before);
    // They asked for 4000 MiB each; one reply may be under way to each.
    assert!(grown < 8 * 8 + 32, "{grown} MiB for 8 clients that do not read");

    late_reader_gets_everything(server.local_addr());
}

#[test]
fn requests_that_drip_cost_no_more_than_their_bytes() {
    alone!("requests_that_drip_cost_no_more_than_their_bytes");
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = honest(&server);
    // A WAIT for 100,000 keys of no bytes comes in pieces that end in the middle of a key. To look
    // at all of it for each piece would take minutes.
    let mut request = [&[6][..], &100_000u64.to_le_bytes()].concat();
    request.resize(request.len() + 8 * 99_999, 0);
    let mut dripping: Vec<TcpStream> = (0..8).map(|_| greeted(&server)).collect();
    let began = Instant::now();
    for piece in request.chunks(100) {
        for stream in &mut dripping {
            stream.write_all(piece).unwrap();
        }
    }
    is_served(&store);
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[test]
fn who_does_not_greet_is_dropped_after_a_while() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = honest(&server);
    let mut greeted = greeted(&server);
    let began = Instant::now();
    let mut strangers = [connect(&server), connect(&server)];
    strangers[1].write_all(&[0, 0xce, 0xf7]).unwrap(); // half a greeting
    for stream in &mut strangers {
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "closed without a word");
        let waited = began.elapsed();
        assert!(waited > Duration::from_secs(9) && waited < Duration::from_secs(15), "{waited:?}");
    }
    // A client that has greeted may be silent for as long as it likes.
    greeted.write_all(&[13, 9, 9, 9, 9]).unwrap();
    let mut echo = [0; 4];
    greeted.read_exact(&mut echo).unwrap();
    is_served(&store);
}
