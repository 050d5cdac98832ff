//! Events as a Rust program gets them. tests/test_events.py has ranks that are late or killed.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use devicemesh::comm::{View, World, WorldOptions};
use devicemesh::error::{Error, Status};
use devicemesh::events::{Event, Events, Kind, Options, clear_handler, set_handler};
use devicemesh::rendezvous::JoinOptions;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const LONG: Duration = Duration::from_secs(60);

fn alone() -> Result<Arc<World>, Error> {
    World::join("cpu", &WorldOptions::new(JoinOptions::ranked(0, 1))).map(Arc::new)
}

#[test]
fn a_handler_and_a_queue_get_each_event() {
    let (first, handled) = channel::<Event>();
    set_handler(&Options::default(), move |event| {
        first.send(event.clone()).unwrap();
        panic!("a panic of a handler is dropped");
    })
    .unwrap();
    let events = Events::open(&Options::default().slow(LONG)).unwrap();
    let is_readable = || {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&events.as_fd(), PollFlags::IN)], Some(&now)).unwrap() > 0
    };
    assert!(!is_readable() && events.next_within(Duration::ZERO).unwrap().is_none());

    let mesh = View::init(&alone().unwrap(), &[1, 1], &["dp", "tp"]).unwrap();
    assert!(is_readable());
    let joined = events.next_within(LONG).unwrap().unwrap();
    assert_eq!((joined.kind, joined.rank, joined.world_size, &joined.ranks[..]), (Kind::Joined, 0, 1, &[0][..]));
    mesh.root_comms().abort().unwrap();
    let aborted = events.next_within(LONG).unwrap().unwrap();
    assert_eq!((aborted.kind, aborted.group.as_deref(), aborted.dropped), (Kind::Aborted, Some("mesh"), 0));
    assert!(aborted.message.starts_with("rank 0: dm_abort ends DeviceMesh((dp=1, tp=1)"), "{aborted:?}");
    let kinds = [(); 2].map(|()| handled.recv_timeout(LONG).unwrap().kind);
    assert_eq!(kinds, [Kind::Joined, Kind::Aborted]);

    // Another handler begins with the worlds that are there, and the earlier one is dropped.
    let (second, handled_next) = channel::<Kind>();
    set_handler(&Options::default(), move |event| second.send(event.kind).unwrap()).unwrap();
    assert_eq!(handled_next.recv_timeout(LONG), Ok(Kind::Joined));
    clear_handler().unwrap();
    alone().unwrap().abort().unwrap();
    assert_eq!(events.next_within(LONG).unwrap().map(|event| event.kind), Some(Kind::Joined));
    assert_eq!(events.next_within(LONG).unwrap().map(|event| event.kind), Some(Kind::Aborted));
    assert!(handled.try_recv().is_err() && handled_next.recv_timeout(LONG).is_err(), "nobody sends any more");
}

/// A child of a process that has a queue gets an error from it, and may drop it.
#[test]
fn a_forked_child_gets_nothing_from_a_queue() {
    let events = Events::open(&Options::default().slow(LONG)).unwrap();
    // SAFETY: the child ends with _exit. It allocates, which the C library allows after a fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let refused = events.next_within(LONG).unwrap_err();
            assert_eq!(refused.status(), Status::Unsupported, "{refused}");
            drop(events);
        }));
        // SAFETY: it only ends the process.
        unsafe { libc::_exit(i32::from(outcome.is_err())) };
    }
    let mut status = -1;
    // SAFETY: the child is this process's own, and the status is writable.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
}
