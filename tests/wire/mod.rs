//! Helpers of the tests that speak to the store's server byte by byte.

#![allow(dead_code, reason = "no test program uses all of the helpers")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

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

/// A number of /proc/self/status, in MiB.
pub fn memory_mib(field: &str) -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() / 1024
}
