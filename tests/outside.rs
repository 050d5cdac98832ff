//! Input from outside: names on which a rank listens, a secret that is to be kept, and text that
//! would move a terminal's cursor.

#[macro_use]
mod wire;

use std::io::ErrorKind;
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use devicemesh::error::{Error, Status};
use devicemesh::rendezvous::store::{MemoryStore, Secret, Server, Store, TcpStore};
use devicemesh::rendezvous::{JoinOptions, World};
use devicemesh::wait::Wait;

#[test]
fn the_store_listens_on_what_the_name_means_and_on_nothing_else() {
    let own = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    for name in ["localhost", "LOCALHOST", "127.1", "0x7f000001", "127.0.0.1", own.trim()] {
        let Ok(addresses) = (name, 0).to_socket_addrs() else { continue };
        let addresses: Vec<_> = addresses.map(|address| address.ip()).collect();
        let server = match Server::at(name, 0, None) {
            Ok(server) => server,
            // The name of this machine may lead elsewhere.
            Err(error) if error.os_error() == libc::EADDRNOTAVAIL => continue,
            Err(error) => panic!("{name}: {error}"),
        };
        assert!(addresses.contains(&server.local_addr().ip()), "{name} is {addresses:?}, not {}", server.local_addr());
        assert_eq!(server.is_local(), addresses.iter().all(|address| address.is_loopback()), "{name}: {addresses:?}");
        let port = server.local_addr().port();
        assert!(TcpStore::connect(name, port, &Wait::after(Duration::from_secs(20))).is_ok(), "{name}");
        // Every machine has this address, and no name here means it.
        let elsewhere = TcpStream::connect(("127.0.0.9", port)).map(drop);
        assert_eq!(
            elsewhere.map_err(|error| error.kind()),
            Err(ErrorKind::ConnectionRefused),
            "{name} is {addresses:?}"
        );
    }
}

#[test]
fn a_secret_that_would_keep_nobody_out_is_refused() {
    alone!("a_secret_that_would_keep_nobody_out_is_refused");
    let join = |method: Option<&str>, size: usize, store: Option<Arc<dyn Store>>| -> Result<World, Error> {
        let mut options = JoinOptions::ranked(0, size).timeout(Duration::from_secs(5));
        options.init_method = method.map(str::to_owned);
        options.store = store;
        World::join("cpu", &options)
    };
    let folder = format!("{}/secret-{}", env!("CARGO_TARGET_TMPDIR"), std::process::id());
    let file = format!("file://{folder}");
    let set = |value: &str| {
        // SAFETY: this process runs one test. No other thread of it reads or writes the
        // environment now.
        unsafe { std::env::set_var("DM_STORE_SECRET", value) };
    };
    let refused = |world: Result<World, Error>, words: &[&str]| {
        let error = world.err().expect("refused");
        assert_eq!(error.status(), Status::InvalidArgument, "{error}");
        assert!(words.iter().all(|word| error.message().contains(word)), "{error}");
    };
    set("");
    let empty = &["DM_STORE_SECRET", "empty", "unset it"];
    refused(join(None, 1, None), empty);
    refused(join(Some("tcp://127.0.0.1:1"), 2, None), empty);
    refused(join(Some(&file), 2, None), empty);
    refused(join(None, 2, Some(Arc::new(MemoryStore::new()))), empty);
    assert!(Secret::from_environment().is_err());
    set("hush");
    let ignored = |store| ["DM_STORE_SECRET", "does not ask for it", store];
    refused(join(Some(&file), 2, None), &ignored("file://"));
    refused(join(None, 2, Some(Arc::new(MemoryStore::new()))), &ignored("the caller's store"));
    assert!(!std::path::Path::new(&format!("{folder}.devicemesh")).exists(), "a folder was made");
    // A rank alone meets nobody.
    assert!(join(None, 1, None).is_ok());
    // SAFETY: as above.
    unsafe { std::env::remove_var("DM_STORE_SECRET") };
    assert_eq!(Secret::from_environment().unwrap(), None);
}

#[test]
fn nothing_from_outside_moves_a_terminals_cursor() {
    let hostile = "\x1b[31mred\nline\u{9b}2J\u{202e}";
    let is_plain = |text: &str| !text.chars().any(|c| c != '\n' && (c.is_control() || c == '\u{202e}'));
    let error = Error::store(format!("key {hostile} of rank 1")).within(hostile);
    assert!(is_plain(error.message()) && !error.message().contains('\n'), "{error:?}");
    assert!(error.message().contains(r"\x1b[31mred\nline\u{9b}2J\u{202e}"), "{error}");
    let world = World::join("cpu", &JoinOptions::ranked(0, 1)).unwrap();
    assert_eq!(world.size(), 1);
    let names = ["tp\x1b[31m"];
    let spec = devicemesh::mesh::MeshSpec::new("cpu", &[1], 1, 0).names(&names);
    let mesh = devicemesh::mesh::Mesh::new(&spec).unwrap();
    assert!(is_plain(&mesh.describe()), "{:?}", mesh.describe());
    assert!(is_plain(mesh.slice(&["no\x1bsuch"]).unwrap_err().message()));
}
