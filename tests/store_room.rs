//! The number of connections is bounded. Strangers leave descriptors to the process, and room to
//! the connections that a job needs.

#[macro_use]
mod wire;

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use devicemesh::rendezvous::store::{Server, Store};
use socket2::{Domain, Socket, Type};
use wire::{greeted, honest, soon, string};

fn limit_descriptors(limit: u64) {
    let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
    // SAFETY: a valid structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
}

/// Starts clients in a process of their own, so that only the server runs out of descriptors. The
/// clients begin when the input of the returned process ends.
fn clients(server: &Server, program: &str) -> std::process::Child {
    let prelude = "import socket, struct, sys, time\n\
        sys.stdin.read()\n\
        def string(text):\n    return struct.pack('<Q', len(text)) + text\n\
        def connect(source='127.0.0.1'):\n    return socket.create_connection(('127.0.0.1', int(sys.argv[1])), 20, (source, 0))\n\
        def ask(stream, request, length):\n    stream.sendall(request)\n    return stream.recv(length, socket.MSG_WAITALL)\n\
        hello = bytes([0, 0xce, 0xf7, 0x85, 0x3c, 13, 1, 2, 3, 4])\n\
        add = bytes([4]) + string(b'/count') + struct.pack('<q', 1)\n\
        word = bytes([101]) + string(b'/gone') + string(b'1')\n\
        def tries(what):\n\
        \x20   try:\n        return what()\n\
        \x20   except OSError:\n        return None\n\
        def greeted(source='127.0.0.1'):\n\
        \x20   stream = connect(source)\n\
        \x20   return stream if tries(lambda: ask(stream, hello, 4)) == bytes([1, 2, 3, 4]) else None\n";
    let port = server.local_addr().port().to_string();
    let mut command = Command::new("python3");
    command.args(["-c", &format!("{prelude}{program}"), &port]).stdin(Stdio::piped()).stdout(Stdio::piped());
    command.stderr(Stdio::piped()).spawn().unwrap()
}

/// While strangers hold what they can get, this process can still open as many files.
fn opens(files: usize) {
    let opened: Vec<_> = (0..files).map(|_| File::open("/dev/null")).collect();
    assert!(opened.iter().all(Result::is_ok), "the process itself has no descriptors left");
}

#[test]
fn greeted_strangers_starve_neither_the_process_nor_the_ranks() {
    alone!("greeted_strangers_starve_neither_the_process_nor_the_ranks");
    let server = Server::bind("127.0.0.1:0").unwrap();
    let mut crowd = clients(
        &server,
        "rank = greeted()\n\
        assert ask(rank, word, 1) == b'\\0'\n\
        crowd = [connect() for _ in range(500)]\n\
        [tries(lambda: stream.sendall(hello)) for stream in crowd]\n\
        time.sleep(1.2)\n\
        print('full', flush=True)\n\
        for _ in range(10):\n\
        \x20   began = time.monotonic()\n\
        \x20   late = greeted()\n\
        \x20   assert late and len(ask(late, add, 8)) == 8, 'not let in'\n\
        \x20   assert time.monotonic() - began < 8, time.monotonic() - began\n\
        assert len(ask(rank, add, 8)) == 8, 'the rank that was there was dropped'\n",
    );
    limit_descriptors(160);
    drop(crowd.stdin.take());
    crowd.stdout.as_mut().unwrap().read_exact(&mut [0; 4]).unwrap();
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(500) {
        opens(16);
        std::thread::sleep(Duration::from_millis(10));
    }
    let crowd = crowd.wait_with_output().unwrap();
    assert!(crowd.status.success(), "{}", String::from_utf8_lossy(&crowd.stderr));
}

#[test]
fn one_address_leaves_room_for_the_others() {
    alone!("one_address_leaves_room_for_the_others");
    let server = Server::bind("127.0.0.1:0").unwrap();
    // The clients do all that a rank does, so only their number gives them away.
    let mut crowd = clients(
        &server,
        "crowd = [greeted('127.0.0.2') for _ in range(150)]\n\
        crowd = [stream for stream in crowd if stream and tries(lambda: ask(stream, word, 1)) == b'\\0']\n\
        assert len(crowd) > 90, len(crowd)\n\
        ranks = [greeted() for _ in range(16)]\n\
        assert all(len(ask(rank, add, 8)) == 8 for rank in ranks)\n",
    );
    limit_descriptors(160);
    drop(crowd.stdin.take());
    let crowd = crowd.wait_with_output().unwrap();
    assert!(crowd.status.success(), "{}", String::from_utf8_lossy(&crowd.stderr));
}

#[test]
fn a_world_has_as_many_connections_as_its_ranks_can_need() {
    alone!("a_world_has_as_many_connections_as_its_ranks_can_need");
    limit_descriptors(8192);
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = honest(&server);
    server.expect_ranks(4);
    let most = 1024 + 4 * 16;
    let crowd: Vec<TcpStream> = (0..most / 2).map(|_| greeted(&server)).collect();
    // The clients have another address, and all of them have left a last word.
    let mut more = Vec::new();
    for _ in 0..most {
        let address: SocketAddr = server.local_addr();
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 3], 0)).into()).unwrap();
        let mut stream = TcpStream::from(socket.connect(&address.into()).map(|()| socket).unwrap());
        let _ = stream.write_all(&[&[0, 0xce, 0xf7, 0x85, 0x3c, 101][..], &string("/gone"), &string("1")].concat());
        more.push(stream);
    }
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(1500) {
        assert!(server.clients() <= most, "{} clients of {most}", server.clients());
        store.add("count", 1, &soon()).unwrap();
        std::thread::sleep(Duration::from_millis(10));
    }
    // A rank is let in all the same. Connections that have asked for nothing make room.
    honest(&server).set("key", b"value", &soon()).unwrap();
    assert!(server.clients() > most / 2, "{}", server.clients());
    drop(crowd);
}
