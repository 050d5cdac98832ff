//! When a rank cannot reach the maker of the unique id, the error gives the maker's address and the
//! reason. A maker that does not do its part is named, too.

use std::net::TcpListener;
use std::sync::Arc;

use super::*;
use crate::bootstrap::tests::{client::serve, member};
use crate::bootstrap::{Message, Stage};

/// Makes an id that is served at that address.
fn id_of(maker: SocketAddr) -> Id {
    let mut id = Id::create(Some(true)).unwrap();
    id.address = Some(maker);
    id
}

/// Joins by an id with this maker and a timeout of 200 ms, and returns the error of the join.
fn failure(maker: SocketAddr) -> Error {
    failure_by(id_of(maker))
}

/// Joins as one of two ranks by this id with a timeout of 200 ms, and returns the error of the
/// join.
fn failure_by(id: Id) -> Error {
    let mut join = Join::new(Source::Id(id), 2, 0, "test".to_owned(), Arc::default());
    join.wait_at_most(Some(Duration::from_millis(200)));
    let began = Instant::now();
    loop {
        match join.poll() {
            Err(error) => return error,
            Ok(polled) => assert!(polled == Poll::Outside && began.elapsed() < Duration::from_secs(60), "{polled:?}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[track_caller]
fn cannot_reach(maker: SocketAddr, why: &str) {
    let error = failure(maker);
    let start = format!("the maker of the unique id could not be reached at {maker} within 200 ms: ");
    let said = error.message().strip_prefix(&start);
    assert!(said.is_some_and(|said| said.contains(why)), "{}", error.message());
    assert_eq!(error.code(), ncclTimeout);
}

#[test]
fn a_maker_that_does_not_answer() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    cannot_reach(silent.local_addr().unwrap(), "it does not answer");
}

#[test]
fn a_maker_to_which_no_network_leads() {
    // No connection can be made to a broadcast address.
    cannot_reach(SocketAddr::from(([255, 255, 255, 255], 7)), "255.255.255.255:7: Network is unreachable");
}

#[test]
fn a_maker_that_closes_each_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let maker = listener.local_addr().unwrap();
    listener.set_nonblocking(true).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                drop(listener.accept());
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        cannot_reach(maker, &maker.to_string());
        is_over.store(true, Ordering::Release);
    });
}

#[test]
fn nobody_listens_at_the_makers_address() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = failure(free);
    assert_eq!(error.code(), ncclRemoteError);
    assert!(error.message().contains(&format!("nobody listens at {free}")), "{}", error.message());
}

#[test]
fn a_rank_that_gives_up_when_all_have_arrived_ends_the_communicator() {
    let id = Id::create(Some(false)).unwrap();
    let join = |rank| Join::new(Source::Id(id), 2, rank, "test".to_owned(), Arc::default());
    let (mut first, mut second) = (join(0), join(1));
    assert!(matches!(first.poll(), Ok(Poll::Blocked { blocker: Blocker::Arrivals, .. })));
    assert_eq!(second.poll(), Ok(Poll::Done));
    // Rank 0 gives up before it sees that rank 1 has arrived.
    drop(first);
    let error = second.joined().unwrap().check().unwrap_err();
    assert!(error.message().ends_with("gave up joining"), "{}", error.message());
    assert_eq!((error.code(), &error.blame().ranks[..]), (ncclRemoteError, &[0][..]));
}

/// The error of a join as rank 0 of 2 whose maker sends these messages and nothing more.
fn failure_after(messages: &[Message]) -> Error {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let id = id_of(listener.local_addr().unwrap());
    let token = id.token;
    std::thread::scope(|threads| {
        let maker = threads.spawn(|| serve(&listener, token, messages));
        let error = failure_by(id);
        drop(maker.join().unwrap());
        error
    })
}

#[test]
fn a_maker_that_does_not_complete_the_join() {
    let error = failure_after(&[Message::StageDone(Stage::Registering, vec![0, 1])]);
    assert_eq!(error.message(), "the maker of the unique id did not complete the join within 200 ms");
    assert_eq!(error.code(), ncclTimeout);
}

#[test]
fn a_maker_whose_messages_do_not_fit_the_join() {
    let of_three = Message::Table { comm: 1, members: (0..3).map(|rank| member(rank, 3)).collect() };
    for message in [Message::Go, Message::Groups(vec![0, 0]), Message::Opened(0), of_three] {
        let error = failure_after(std::slice::from_ref(&message));
        assert_eq!(
            error.message(),
            "the maker of the unique id sent a message that does not fit this join",
            "{message:?}"
        );
        assert_eq!(error.code(), ncclRemoteError);
    }
}
