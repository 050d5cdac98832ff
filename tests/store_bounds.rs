//! What hostile clients make the server keep or do is bounded, whichever operation they use. Each
//! case has a process of its own.
//!
//! It takes about 10 s, because three tests fill a store with much of 1 GiB.

#[macro_use]
mod wire;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use devicemesh::error::{Error, Status};
use devicemesh::rendezvous::store::{Secret, Server, Store};
use devicemesh::rendezvous::{JoinOptions, World};
use wire::{LOOK, connect, greeted, honest, memory_mib, soon, string};

/// Whether the server closes the connection.
fn is_dropped(stream: &mut TcpStream) -> bool {
    matches!(stream.read(&mut [0]), Ok(0)) || stream.take_error().is_ok_and(|error| error.is_some())
}

#[test]
fn a_large_value_that_many_wait_for_is_kept_once() {
    alone!("a_large_value_that_many_wait_for_is_kept_once");
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = honest(&server);
    let mut waiting: Vec<TcpStream> = (0..200).map(|_| greeted(&server)).collect();
    for stream in &mut waiting {
        stream.write_all(&[&[100][..], &1u64.to_le_bytes(), &string(b"/large")].concat()).unwrap();
    }
    std::thread::sleep(Duration::from_millis(200));
    let value = vec![1; 8 << 20];
    let before = memory_mib("VmHWM:");
    store.set("large", &value, &soon()).unwrap();
    store.add("count", 1, &soon()).unwrap();
    let grown = memory_mib("VmHWM:") - before;
    // 1600 MiB were asked for.
    assert!(grown < 256 + 64, "{grown} MiB");
}

#[test]
fn last_words_are_bounded() {
    alone!("last_words_are_bounded");
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = honest(&server);
    let before = memory_mib("VmHWM:");
    let word = [&[101][..], &string(b"/gone"), &string(vec![1; 8 << 20])].concat();
    let mut speaking = Vec::new();
    for _ in 0..6 {
        let mut stream = greeted(&server);
        for _ in 0..16 {
            if stream.write_all(&word).is_err() || !stream.read(&mut [0]).is_ok_and(|count| count == 1) {
                break;
            }
        }
        speaking.push(stream);
    }
    store.add("count", 1, &soon()).unwrap();
    let grown = memory_mib("VmHWM:") - before;
    // Twice 768 MiB were left.
    assert!(grown < 1024 + 256, "{grown} MiB");
}

#[test]
fn a_full_store_says_so_and_calls_nobody_lost() {
    alone!("a_full_store_says_so_and_calls_nobody_lost");
    let server = Server::bind("127.0.0.1:0").unwrap();
    let (store, other) = (honest(&server), honest(&server));
    let join = |rank| {
        let method = format!("tcp://127.0.0.1:{}", server.local_addr().port());
        let options = JoinOptions::ranked(rank, 2).init_method(method);
        World::join("cpu", &options).unwrap()
    };
    let refused = std::thread::scope(|threads| {
        // The second rank is a thread, and the server is this process's, which is as good as rank
        // 0's own.
        let second = threads.spawn(|| join(1));
        let (first, second) = (join(0), second.join().unwrap());
        store.leave_last_word("gone", b"1", &soon()).unwrap();
        let value = vec![1; 8 << 20];
        let refused = (0..200).find_map(|number| store.set(&format!("large{number}"), &value, &soon()).err());
        // These leave room for a few bytes only.
        let small = vec![1; 1 << 10];
        (0..8 << 10).find_map(|number| other.set(&format!("small{number}"), &small, &soon()).err()).unwrap();
        let fill = |name: &str| {
            (0..64).find_map(|number| other.set(&format!("{name}{number}"), &[], &soon()).err()).expect("refused")
        };
        let mut refused = vec![refused.unwrap(), fill("a")];
        // A client that is turned away has left its last word again at once, also if it asks for
        // nothing more.
        let leaving = honest(&server);
        leaving.leave_last_word("left", b"word", &soon()).unwrap();
        leaving.set("more", &value, &soon()).unwrap_err();
        drop(leaving);
        assert_eq!(other.get("left/1", &soon()).unwrap(), b"word");
        // A connection that ends for another reason is not told that the store is full.
        let broken = other.add("small0", 1, &soon()).unwrap_err();
        assert!(broken.message().contains("closed the connection during ADD"), "{broken}");
        // The ranks agree all the same.
        std::thread::scope(|threads| {
            threads.spawn(|| second.barrier(Some(Duration::from_secs(20))).unwrap());
            first.barrier(Some(Duration::from_secs(20))).unwrap();
        });
        // It is no loss that a client is turned away.
        assert_eq!(other.try_get("gone", &soon()).unwrap(), None);
        // When there is room again, everything works again.
        (0..200).for_each(|number| other.delete(&format!("large{number}"), &soon()).unwrap());
        store.set("small", b"value", &soon()).unwrap();
        refused.dedup_by(|one, other| one.message() == other.message());
        refused
    });
    for error in &refused {
        assert_eq!(error.status(), Status::Store, "{error}");
        assert!(error.message().contains(" is full and refused ") && error.message().contains(" bytes in "), "{error}");
    }
}

/// Four ranks have a store that takes nothing more. Every rank is told so at once.
#[test]
fn when_nothing_more_fits_all_ranks_learn_at_once_that_the_store_is_full() {
    alone!("when_nothing_more_fits_all_ranks_learn_at_once_that_the_store_is_full");
    let server = Server::bind("127.0.0.1:0").unwrap();
    let method = format!("tcp://127.0.0.1:{}", server.local_addr().port());
    let join = |rank| World::join("cpu", &JoinOptions::ranked(rank, 4).init_method(method.clone())).unwrap();
    let worlds: Vec<World> = std::thread::scope(|threads| {
        let joining: Vec<_> = (0..4).map(|rank| threads.spawn(move || join(rank))).collect();
        joining.into_iter().map(|joining| joining.join().unwrap()).collect()
    });
    let store = honest(&server);
    // The program's values first, then keys that look like the library's own, then less and less.
    let value = vec![1; 8 << 20];
    (0..200).find_map(|number| store.set(&format!("large{number}"), &value, &soon()).err()).unwrap();
    // A stranger without a secret can imitate all of these, and the last words of ranks too.
    let word = [&[101][..], &string("/devicemesh/0/0/lost"), &string("1")].concat();
    let sizes = [(500, 4096), (1, 4096), (1, 0)];
    for (name, (batch, len)) in ["here", "verdict"].into_iter().flat_map(|name| sizes.map(|size| (name, size))) {
        for number in 0.. {
            let key = |at| format!("/devicemesh/fill/{len}/{batch}/{number}/{at}/{name}");
            let pair = |at| [string(key(at)), string(vec![2; len])].concat();
            let pairs = (0..batch).map(pair).collect::<Vec<_>>().concat();
            let mut filling = greeted(&server);
            let set = [&[11][..], &(batch as u64).to_le_bytes(), &pairs, &[13, 9, 9, 9, 9]].concat();
            filling.write_all(&[&word[..], &set].concat()).unwrap();
            if filling.read_exact(&mut [0; 5]).is_err() {
                break;
            }
        }
    }
    let outcomes: Vec<(Error, Duration)> = std::thread::scope(|threads| {
        let barrier = |world: &World| {
            let began = Instant::now();
            (world.barrier(Some(Duration::from_secs(60))).unwrap_err(), began.elapsed())
        };
        let calling: Vec<_> = worlds.iter().map(|world| threads.spawn(move || barrier(world))).collect();
        calling.into_iter().map(|calling| calling.join().unwrap()).collect()
    });
    for (rank, (error, took)) in outcomes.iter().enumerate() {
        println!("rank {rank} after {took:?}: {error}");
        assert_eq!((error.status(), error.os_error()), (Status::Store, libc::ENOSPC), "rank {rank}: {error}");
        assert!(error.message().contains(" is full and refused "), "rank {rank}: {error}");
        // It takes 0.1 s on a machine that does nothing else, and the deadline is 60 s away.
        assert!(*took < Duration::from_secs(10), "rank {rank} learns it after {took:?}");
    }
    // Rank 0 serves the store, so it stays until the others have noted that they read the verdict.
    // Their notes have room too.
    let session = store.get("devicemesh/0/0/session", &soon()).unwrap();
    let nonce = String::from_utf8(session).unwrap().split(' ').next().unwrap().to_owned();
    let notes: Vec<String> = (1..4).map(|rank| format!("devicemesh/0/0/{nonce}/world/1/read/by/{rank}")).collect();
    assert_eq!(store.present(&notes, &soon()).unwrap(), [true; 3], "{notes:?}");
    // Nobody is lost: with room again the ranks agree again.
    (0..200).for_each(|number| store.delete(&format!("large{number}"), &soon()).unwrap());
    std::thread::scope(|threads| {
        worlds.iter().for_each(|world| drop(threads.spawn(|| world.barrier(Some(Duration::from_secs(20))).unwrap())));
    });
}

/// glibc keeps what was freed. The server gives it back.
#[cfg(target_env = "gnu")]
#[test]
fn memory_comes_back_when_the_store_is_emptied() {
    alone!("memory_comes_back_when_the_store_is_emptied");
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = honest(&server);
    store.add("count", 1, &soon()).unwrap();
    let before = memory_mib("VmRSS:");
    let value = vec![1; 8 << 20];
    (0..40).for_each(|number| store.set(&format!("large{number}"), &value, &soon()).unwrap());
    // One of every 16 small values stays, so the free memory is in pieces.
    let mut filling = greeted(&server);
    for number in 0..100 {
        let pair = |at| [string(format!("/{number}/{at}")), string(vec![2; 8192])].concat();
        let pairs = (0..200).map(pair).collect::<Vec<_>>().concat();
        filling.write_all(&[&[11][..], &200u64.to_le_bytes(), &pairs, &[13, 9, 9, 9, 9]].concat()).unwrap();
        filling.read_exact(&mut [0; 4]).unwrap();
    }
    let filled = memory_mib("VmRSS:");
    assert!(filled > before + 400, "{before} and {filled} MiB");
    (0..40).for_each(|number| store.delete(&format!("large{number}"), &soon()).unwrap());
    let gone = (0..100).flat_map(|number| (0..200).map(move |at| (number, at))).filter(|(_, at)| at % 16 > 0);
    store.forget(gone.map(|(number, at)| format!("{number}/{at}")).collect(), &soon());
    let (mut slowest, began) = (Duration::ZERO, Instant::now());
    while memory_mib("VmRSS:") > before + 100 {
        let asked = Instant::now();
        store.add("count", 1, &soon()).unwrap();
        slowest = slowest.max(asked.elapsed());
        assert!(began.elapsed() < Duration::from_secs(20), "{before}, {filled} and {} MiB", memory_mib("VmRSS:"));
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("{before}, {filled} and {} MiB; the slowest answer took {slowest:?}", memory_mib("VmRSS:"));
}

#[test]
fn full_buffers_are_no_matter_for_others() {
    alone!("full_buffers_are_no_matter_for_others");
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = honest(&server);
    store.set("some", &vec![1; 100_000], &soon()).unwrap();
    // Halves of all sizes, until there is no room for one of 17 bytes.
    let mut halves: Vec<TcpStream> = Vec::new();
    for (bytes, count) in [(8 << 20, 60), (1 << 20, 20), (100_000, 20), (10_000, 20), (1000, 20), (60, 100), (10, 300)]
    {
        let half = [&[1][..], &string(b"/half"), &(8u64 << 20).to_le_bytes(), &vec![7; bytes - 10]].concat();
        for _ in 0..count {
            let mut stream = greeted(&server);
            let _ = stream.write_all(&half[..bytes]);
            halves.push(stream);
            if bytes > 100_000 {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
    for _ in 0..20 {
        let late = honest(&server);
        late.set("key", &[1; 1000], &soon()).unwrap();
        assert_eq!(late.get("key", &soon()).unwrap().len(), 1000);
        assert_eq!(late.get("some", &soon()).unwrap().len(), 100_000);
    }
    store.add("count", 1, &soon()).unwrap();
}

#[test]
fn strangers_leave_nothing_but_a_greeting() {
    alone!("strangers_leave_nothing_but_a_greeting");
    let server = Server::guarded("127.0.0.1:0", Secret::new(b"secret")).unwrap();
    for greeting in [&[][..], &[0, 0xce, 0xf7, 0x85, 0x3c][..]] {
        let mut stranger = connect(&server);
        stranger.write_all(greeting).unwrap();
        stranger.write_all(&[&[1][..], &string(b"/half"), &(8u64 << 20).to_le_bytes()].concat()).unwrap();
        let began = Instant::now();
        assert!(is_dropped(&mut stranger));
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    }
}

#[test]
fn much_work_in_few_bytes_is_done_in_turns() {
    alone!("much_work_in_few_bytes_is_done_in_turns");
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = honest(&server);
    for number in 0..250 {
        store.set(&format!("{number}{}", "x".repeat(1000)), b"", &soon()).unwrap();
    }
    // 250 KB for every byte.
    let mut greedy = greeted(&server);
    let mut reading = greedy.try_clone().unwrap();
    std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 20];
        while reading.read(&mut buffer).is_ok_and(|count| count > 0) {}
    });
    greedy.write_all(&vec![17; 20_000]).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    server.most_work();
    for _ in 0..50 {
        store.add("count", 1, &soon()).unwrap();
    }
    let (small, round, look) = server.most_work();
    assert!(round > 100_000, "the greedy client's requests are done meanwhile: {round}");
    assert!(look < LOOK, "{small}, {round} and {look}");
}

#[test]
fn silent_strangers_that_take_all_descriptors_make_room_at_once() {
    alone!("silent_strangers_that_take_all_descriptors_make_room_at_once");
    let server = Server::bind("127.0.0.1:0").unwrap();
    // Clients have a process of their own, so that only the server runs out.
    let clients_do = "import socket, sys, time\n\
        sys.stdin.read()\n\
        connect = lambda: socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n\
        silent = [connect() for _ in range(400)]\n\
        began = time.monotonic()\n\
        late = connect()\n\
        late.sendall(bytes([0, 0xce, 0xf7, 0x85, 0x3c, 13, 1, 2, 3, 4]))\n\
        assert late.recv(4) == bytes([1, 2, 3, 4])\n\
        assert time.monotonic() - began < 8, time.monotonic() - began\n";
    let port = server.local_addr().port().to_string();
    let mut clients = Command::new("python3");
    clients.args(["-c", clients_do, &port]).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut clients = clients.spawn().unwrap();
    let limit = libc::rlimit { rlim_cur: 100, rlim_max: 100 };
    // SAFETY: a valid structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    drop(clients.stdin.take());
    let clients = clients.wait_with_output().unwrap();
    assert!(clients.status.success(), "{}", String::from_utf8_lossy(&clients.stderr));
}
