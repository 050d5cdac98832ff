//! Helpers of the tests that speak to the store's server byte by byte.

#![allow(dead_code, reason = "no test program uses all of the helpers")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use devicemesh::rendezvous::store::{Server, TcpStore};
use devicemesh::wait::Wait;

/// Runs the rest of the test in another process, because limits and memory are counted by process;
/// in this one it is already over.
#[macro_export]
macro_rules! alone {
    ($name:literal) => {
        if std::env::var_os("DM_TEST_ALONE").is_none() {
            let output = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", $name, "--nocapture", "--test-threads=1"])
                .env("DM_TEST_ALONE", "1")
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
    };
}

/// The most work of the server between two looks at the sockets: the small turns of 256 clients, a
/// round, and the lists of waits.
pub const LOOK: usize = 3 << 20;

/// A deadline that is far away.
pub fn soon() -> Wait {
    Wait::after(Duration::from_secs(30))
}

/// A connection that has said nothing.
pub fn connect(server: &Server) -> TcpStream {
    connect_at(server.local_addr())
}

/// A connection to a server, or to a relay, that has said nothing.
pub fn connect_at(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

/// A connection that has greeted with VALIDATE and PING in one write.
pub fn greeted(server: &Server) -> TcpStream {
    greeted_at(server.local_addr())
}

/// VALIDATE, and PING with the bytes 1 to 4.
pub const GREETING: [u8; 10] = [0, 0xce, 0xf7, 0x85, 0x3c, 13, 1, 2, 3, 4];

/// A connection to a server, or to a relay, that has greeted.
pub fn greeted_at(address: SocketAddr) -> TcpStream {
    let mut stream = connect_at(address);
    stream.write_all(&GREETING).unwrap();
    let mut echo = [0; 4];
    stream.read_exact(&mut echo).unwrap();
    assert_eq!(echo, [1, 2, 3, 4]);
    stream
}

/// A length and the bytes.
pub fn string(bytes: impl AsRef<[u8]>) -> Vec<u8> {
    let bytes = bytes.as_ref();
    [&(bytes.len() as u64).to_le_bytes()[..], bytes].concat()
}

/// An honest client beside the others.
pub fn honest(server: &Server) -> TcpStore {
    TcpStore::connect("127.0.0.1", server.local_addr().port(), &soon()).unwrap()
}

/// Waits until the condition holds, for 20 s at most.
pub fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Connections at that address that ask for the value under `large` as often as `questions` says,
/// or until the other side takes no more, and never read.
pub fn deaf_clients(address: SocketAddr, clients: usize, questions: usize) -> Vec<TcpStream> {
    let ask = |_| {
        let mut stream = greeted_at(address);
        stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
        let _ = (0..questions).try_for_each(|_| stream.write_all(&get_large()));
        stream
    };
    (0..clients).map(ask).collect()
}

/// Checks that a client that reads late gets everything, in order: the 4 MiB under `large` 20
/// times, and an echo.
pub fn late_reader_gets_everything(address: SocketAddr) {
    let mut slow = greeted_at(address);
    for _ in 0..20 {
        slow.write_all(&get_large()).unwrap();
    }
    slow.write_all(&[13, 9, 9, 9, 9]).unwrap();
    let mut reply = vec![0; 8 + (4 << 20)];
    for _ in 0..20 {
        slow.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..8], (4u64 << 20).to_le_bytes());
    }
    let mut echo = [0; 4];
    slow.read_exact(&mut echo).unwrap();
    assert_eq!(echo, [9; 4]);
}

fn get_large() -> Vec<u8> {
    [&[3][..], &string(b"/large")].concat()
}

/// A number of /proc/self/status, in MiB.
pub fn memory_mib(field: &str) -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() / 1024
}
