//! Losses that ranks announce to each other through a store.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;
use crate::error::Error;
use crate::rendezvous::incarnation::Tickets;
use crate::rendezvous::store::{Hooked, MemoryStore, Server, TcpStore};

fn soon() -> Wait {
    Wait::after(Duration::from_secs(20))
}

/// The processes that a rank knows to be lost, in ascending order, once it has read the store.
fn known(losses: &Losses) -> Vec<String> {
    losses.refresh(&soon()).unwrap();
    losses.all(|_| true).iter().map(Incarnation::to_string).collect()
}

fn first(rank: i32) -> Incarnation {
    Incarnation::first(rank)
}

/// A rank has taken the first number and has died. The loss that has the second number is read all
/// the same, also by a rank that joins later.
#[test]
fn a_rank_that_dies_while_it_announces_a_loss_does_not_hide_later_losses() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let early = Losses::none(Arc::clone(&store), "test");
    assert!(known(&early).is_empty());
    store.add("test/lost", 1, &soon()).unwrap();
    Losses::none(Arc::clone(&store), "test").announce(first(3));
    assert_eq!(known(&early), ["3"]);
    assert_eq!(known(&Losses::none(Arc::clone(&store), "test")), ["3"]);
    // A rank that was slow finds its number filled, and takes another one.
    store.set("test/lost/3", b"-", &soon()).unwrap();
    early.announce(first(5));
    assert_eq!(store.get("test/lost/4", &soon()).unwrap(), b"5");
    assert_eq!(known(&Losses::none(store, "test")), ["3", "5"]);
}

/// A rank that lives has taken a number, and could not write its note. The server fills the gaps of
/// ranks that have died.
#[test]
fn a_rank_that_could_not_write_its_note_at_a_server_does_not_hide_later_losses() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store: Arc<dyn Store> = Arc::new(TcpStore::connect("127.0.0.1", server.local_addr().port(), &soon()).unwrap());
    store.add("test/lost", 1, &soon()).unwrap();
    let [finder, other] = [0, 1].map(|rank| {
        let store = Arc::clone(&store);
        Losses::begin(store, "test", &WorldKeys::for_world(|_| {}), (first(rank), 3), &soon()).unwrap()
    });
    finder.announce(first(2));
    assert_eq!(known(&other), ["2"]);
}

/// Other ranks have added notes that this rank has not read. There is no gap to look for.
#[test]
fn a_rank_looks_for_gaps_only_among_notes_that_it_cannot_read() {
    let looks = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&looks);
    let before = move |operation: &str, _: usize, _: &Wait| {
        seen.fetch_add(usize::from(operation == "present"), Ordering::SeqCst);
        Ok(())
    };
    let store: Arc<dyn Store> = Arc::new(Hooked { store: MemoryStore::new(), before });
    let [finder, other] = [(); 2].map(|()| Losses::none(Arc::clone(&store), "test"));
    [3, 4].into_iter().for_each(|rank| finder.announce(first(rank)));
    other.announce(first(5));
    assert_eq!(looks.load(Ordering::SeqCst), 0);
    store.add("test/lost", 1, &soon()).unwrap();
    other.announce(first(6));
    assert_eq!(looks.load(Ordering::SeqCst), 1);
    assert_eq!(known(&finder), ["3", "4", "5", "6"]);
}

#[test]
fn a_loss_of_a_silent_host_is_a_loss() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let losses = Losses::none(Arc::clone(&store), "test");
    for (number, note) in [(1, "3 silent"), (2, "5:1 silent"), (3, "4")] {
        store.set(&note_key("test/lost", number), note.as_bytes(), &soon()).unwrap();
    }
    assert_eq!(known(&losses), ["3", "4", "5:1"]);
    let how = losses.known().noticed.get(&first(3)).copied();
    assert_eq!(how, Some("the store says so: its host is down or out of reach"));
    assert!(!losses.known().noticed.contains_key(&first(4)));
}

/// This test takes 2 s, because that is the pause before the second announcement.
#[test]
fn a_loss_that_could_not_be_announced_is_announced_later() {
    let (memory, is_ill) = (MemoryStore::new(), Arc::new(AtomicBool::new(true)));
    let ill = Arc::clone(&is_ill);
    let before = move |operation: &str, _: usize, _: &Wait| match operation == "add" && ill.load(Ordering::SeqCst) {
        true => Err(Error::store("the store is ill")),
        false => Ok(()),
    };
    let unwell = Arc::new(Hooked { store: memory.clone(), before });
    let [finder, other] = [(); 2].map(|()| Losses::none(Arc::clone(&unwell) as Arc<dyn Store>, "test"));
    finder.announce(first(3));
    finder.look(&soon());
    assert_eq!((known(&finder), known(&other)), (vec!["3".to_owned()], vec![]));
    is_ill.store(false, Ordering::SeqCst);
    let began = Instant::now();
    while known(&other).is_empty() {
        assert!(began.elapsed() < Duration::from_secs(20), "nobody has announced the loss again");
        finder.look(&soon());
        let _ = unwell.get("test/lost/1", &Wait::after(Duration::from_millis(50)));
    }
    assert_eq!((known(&finder), known(&other)), (vec!["3".to_owned()], vec!["3".to_owned()]));
    finder.look(&soon());
    assert_eq!(memory.get("test/lost", &soon()).unwrap(), b"1", "the loss is announced once");
}

/// Another process has joined under the name of rank 1, which lives, and ends. A rank that waits
/// for rank 1 has lost nobody then. When the first process of rank 1 ends, rank 1 is lost.
#[test]
fn the_end_of_another_process_of_a_rank_is_no_loss_of_the_rank() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let join = |rank, ticket| {
        let store: Arc<dyn Store> =
            Arc::new(TcpStore::connect("127.0.0.1", server.local_addr().port(), &soon()).unwrap());
        let me = Incarnation { rank, ticket };
        Losses::begin(store, "test", &WorldKeys::for_world(|_| {}), (me, 2), &soon()).unwrap()
    };
    let (watching, living, other) = (join(0, 0), join(1, 0), join(1, 1));
    drop(other);
    watching.store.get("test/lost/1", &soon()).unwrap();
    assert_eq!(known(&watching), ["1:1"]);
    let first_processes = Tickets::default();
    assert!(!watching.any(|process| first_processes.are_of(process)));
    drop(living);
    watching.store.get("test/lost/2", &soon()).unwrap();
    assert_eq!(known(&watching), ["1", "1:1"]);
    assert!(watching.any(|process| first_processes.are_of(process)));
}

/// A rank has died between taking its number in the list of its host and writing its line. The
/// ranks with later numbers are watched all the same.
#[test]
fn a_rank_that_dies_while_it_joins_hides_no_other_rank_of_its_host() {
    let memory = Arc::new(MemoryStore::new());
    let begin = |rank| {
        let store = Arc::clone(&memory) as Arc<dyn Store>;
        Losses::begin(store, "test", &WorldKeys::for_world(|_| {}), (first(rank), 4), &soon()).unwrap()
    };
    let watching = begin(0);
    let list = memory.keys().into_iter().find_map(|key| key.strip_suffix("/1").map(str::to_owned)).unwrap();
    memory.add(&list, 1, &soon()).unwrap();
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let number = memory.add(&list, 1, &soon()).unwrap();
    memory.set(&format!("{list}/{number}"), format!("2 {} 1", child.id()).as_bytes(), &soon()).unwrap();
    child.wait().unwrap();
    watching.look(&soon());
    assert_eq!(known(&watching), ["2"]);
    // The rank was only slow.
    memory.set(&format!("{list}/2"), format!("1 {} 1", child.id()).as_bytes(), &soon()).unwrap();
    watching.look(&soon());
    assert_eq!(known(&watching), ["1", "2"]);
}
