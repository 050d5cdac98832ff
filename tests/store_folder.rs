//! A folder as store, in which others have put something. The thing is refused at once with its
//! name. It is never followed and never waited for.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use devicemesh::error::{Result, Status};
use devicemesh::rendezvous::store::{FileStore, Store};
use devicemesh::rendezvous::{JoinOptions, World};
use devicemesh::wait::Wait;

/// A folder of this test, which is removed when this value is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = PathBuf::from(format!("{}/folder-{}-{name}", env!("CARGO_TARGET_TMPDIR"), std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn soon() -> Wait {
    Wait::after(Duration::from_secs(5))
}

fn fifo(path: &Path) {
    let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: a string that ends.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
}

/// Checks that the call is refused long before the deadline, with these words.
fn refused<T>(what: &str, call: impl FnOnce() -> Result<T>, words: &[&str]) {
    let began = Instant::now();
    let error = call().err().unwrap_or_else(|| panic!("{what} is taken"));
    assert!(began.elapsed() < Duration::from_secs(4), "{what}: {:?}", began.elapsed());
    assert_eq!(error.status(), Status::Store, "{what}: {error}");
    assert!(words.iter().all(|word| error.message().contains(word)), "{what}: {error}");
}

#[test]
fn a_lock_that_is_no_file_is_refused() {
    let home = Folder::new("lock");
    let lock = |kind: &str| home.at(&format!("{kind}.devicemesh/.lock"));
    let make = |kind: &str| {
        let store = FileStore::open(&home.at(kind)).unwrap();
        match kind {
            "FIFO" => fifo(&lock(kind)),
            "symbolic link" => symlink("/dev/null", lock(kind)).unwrap(),
            "folder" => fs::create_dir(lock(kind)).unwrap(),
            _ => drop(UnixListener::bind(lock(kind)).unwrap()),
        }
        store
    };
    for kind in ["FIFO", "symbolic link", "folder", "socket"] {
        let store = make(kind);
        refused(kind, || store.add("count", 1, &soon()), &[".lock", kind]);
    }
}

#[test]
fn a_key_that_is_no_file_is_refused() {
    let home = Folder::new("key");
    let store = FileStore::open(&home.at("store")).unwrap();
    let key = |name: &str| home.at("store.devicemesh").join(format!("k{name}"));
    fs::write(home.at("elsewhere"), "elsewhere").unwrap();
    fifo(&key("fifo"));
    symlink(home.at("elsewhere"), key("link")).unwrap();
    fs::create_dir(key("folder")).unwrap();
    drop(UnixListener::bind(key("socket")).unwrap());
    fs::File::create(key("huge")).unwrap().set_len((8 << 20) + 1).unwrap();
    for (name, word) in [
        ("fifo", "is a FIFO, not a regular file"),
        ("link", "is a symbolic link"),
        ("folder", "is a folder"),
        ("socket", "is a socket"),
        ("huge", "8388609 bytes; at most 8388608"),
    ] {
        refused(name, || store.get(name, &soon()), &[name, word]);
        refused(name, || store.present(&[name.to_owned()], &soon()), &[name, word]);
    }
    // Setting replaces what stood there, and writes nothing through a link.
    store.set("link", b"here", &soon()).unwrap();
    store.set("fifo", b"here", &soon()).unwrap();
    assert_eq!(store.get("link", &soon()).unwrap(), b"here");
    assert_eq!(fs::read(home.at("elsewhere")).unwrap(), b"elsewhere");
    refused("a value of 8 MiB and a byte", || store.set("key", &vec![0; (8 << 20) + 1], &soon()), &["8388609 bytes"]);
}

#[test]
fn a_folder_that_is_not_this_users_alone_is_refused() {
    let home = Folder::new("folder");
    fs::create_dir(home.at("elsewhere")).unwrap();
    symlink(home.at("elsewhere"), home.at("linked.devicemesh")).unwrap();
    refused("a link", || FileStore::open(&home.at("linked")), &["linked.devicemesh", "symbolic link"]);
    assert_eq!(fs::read_dir(home.at("elsewhere")).unwrap().count(), 0, "something was put where the link leads");
    fifo(&home.at("fifo.devicemesh"));
    refused("a FIFO", || FileStore::open(&home.at("fifo")), &["fifo.devicemesh", "FIFO"]);

    let store = FileStore::open(&home.at("own")).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&home.at("own.devicemesh")), 0o700);
    store.set("key", b"value", &soon()).unwrap();
    assert_eq!(mode(&home.at("own.devicemesh/kkey")), 0o600);
    fs::set_permissions(home.at("own.devicemesh"), fs::Permissions::from_mode(0o777)).unwrap();
    refused("a folder for all", || FileStore::open(&home.at("own")), &["mode 777", "chmod 700"]);

    // Only root can give a folder to somebody else.
    // SAFETY: no arguments to get wrong.
    if unsafe { libc::geteuid() } == 0 {
        FileStore::open(&home.at("given")).unwrap();
        std::os::unix::fs::chown(home.at("given.devicemesh"), Some(12_345), None).unwrap();
        refused("another user's folder", || FileStore::open(&home.at("given")), &["belongs to user 12345"]);
        let store = FileStore::open(&home.at("mixed")).unwrap();
        store.set("key", b"value", &soon()).unwrap();
        std::os::unix::fs::chown(home.at("mixed.devicemesh/kkey"), Some(12_345), None).unwrap();
        refused("another user's file", || store.get("key", &soon()), &["key", "belongs to user 12345"]);
    }
    assert!(home.at("own.devicemesh").exists());
}

/// Runs both ranks of a job, which meet in this folder.
fn job(path: &Path) -> [World; 2] {
    let join = |rank| {
        let options = JoinOptions::ranked(rank, 2).init_method(format!("file://{}", path.display()));
        World::join("cpu", &options.timeout(Duration::from_secs(30))).unwrap()
    };
    std::thread::scope(|threads| {
        let second = threads.spawn(|| join(1));
        [join(0), second.join().unwrap()]
    })
}

/// Returns the names of the library's own keys in a folder, sorted.
fn keys_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut keys: Vec<String> = entries.filter(|name| name.starts_with("kdevicemesh")).collect();
    keys.sort();
    keys
}

#[test]
fn the_last_rank_that_leaves_removes_the_folder() {
    let home = Folder::new("leave");
    let [first, second] = job(&home.at("job"));
    drop(first);
    assert!(home.at("job.devicemesh").exists(), "a rank is still there");
    drop(second);
    assert_eq!(fs::read_dir(&home.0).unwrap().count(), 0, "something is left");
}

/// A rank that leaves at once joins again while the other one still removes the folder.
#[test]
fn ranks_that_leave_and_join_again_at_once_find_each_other() {
    let home = Folder::new("again");
    let method = format!("file://{}", home.at("job").display());
    let lives = |rank| {
        for _ in 0..30 {
            let options = JoinOptions::ranked(rank, 2).init_method(method.clone());
            let world = World::join("cpu", &options.timeout(Duration::from_secs(30))).unwrap();
            world.barrier(None).unwrap();
        }
    };
    std::thread::scope(|threads| {
        threads.spawn(|| lives(1));
        lives(0);
    });
    assert_eq!(fs::read_dir(&home.0).unwrap().count(), 0, "something is left");
}

/// The last rank of a world may remove the folder at each moment of another rank's opening.
#[test]
fn a_folder_that_goes_while_it_is_opened_is_made_again() {
    let home = Folder::new("goes");
    let is_done = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                let _ = fs::remove_dir(home.at("job.devicemesh"));
            }
        });
        let failure = (0..2_000).find_map(|_| FileStore::open(&home.at("job")).err());
        is_done.store(true, Ordering::Relaxed);
        assert_eq!(failure.map(|error| error.to_string()), None);
    });
}

#[test]
fn what_the_job_did_not_make_stays() {
    let home = Folder::new("others");
    let store = FileStore::open(&home.at("job")).unwrap();
    store.set("mine", b"value", &soon()).unwrap();
    drop(job(&home.at("job")));
    assert_eq!(store.get("mine", &soon()).unwrap(), b"value");
    assert_eq!(keys_in(&home.at("job.devicemesh")), [""; 0]);
}

/// A crashed job leaves its keys. The next job there works, and removes its own keys only.
#[test]
fn a_job_meets_in_the_folder_of_a_crashed_one() {
    if let Some(path) = std::env::var_os("DM_TEST_CRASHES") {
        let _worlds = job(Path::new(&path));
        // SAFETY: nothing of this process is used afterwards.
        unsafe { libc::_exit(3) };
    }
    let home = Folder::new("crashed");
    let mut crashing = Command::new(std::env::current_exe().unwrap());
    crashing.args(["--exact", "a_job_meets_in_the_folder_of_a_crashed_one"]).env("DM_TEST_CRASHES", home.at("job"));
    assert_eq!(crashing.output().unwrap().status.code(), Some(3));
    let mut left = keys_in(&home.at("job.devicemesh"));
    assert!(!left.is_empty());
    // The key says which world runs at this place, so the next job replaces it.
    left.retain(|key| !key.ends_with("%2Frunning"));
    let worlds = job(&home.at("job"));
    std::thread::scope(|threads| {
        worlds.iter().for_each(|world| drop(threads.spawn(|| world.barrier(None).unwrap())));
    });
    drop(worlds);
    assert_eq!(keys_in(&home.at("job.devicemesh")), left);
}
