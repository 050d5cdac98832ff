//! When a rank cannot reach the maker of the unique id, the error gives the maker's address and the
//! reason. A maker that does not do its part is named, too.

use std::net::TcpListener;
use std::sync::Arc;

use super::*;
use crate::bootstrap::tests::{client::serve, member};
use crate::bootstrap::{Message, Stage};
use crate::config::Config;
use crate::handle::Handle;
use crate::process::ProcessId;
use crate::setup::Init;

/// Makes an id that is served at that address.
fn id_of(maker: SocketAddr) -> Id {
    let mut id = Id::create(Some(true)).unwrap();
    id.address = Some(maker);
    id
}

/// The timeout of a join whose maker does nothing.
const SHORT: Duration = Duration::from_millis(200);

/// The timeout of a join whose maker does something. On a busy machine, the maker's thread may
/// stand still for a second.
const LONGER: Duration = Duration::from_secs(2);

/// Joins as one of two ranks by this id with this timeout, and returns the error of the join.
fn failure(id: Id, timeout: Duration) -> Error {
    let mut join = Join::new(Source::Id(id), 2, 0, "test".to_owned(), Arc::default());
    join.wait_at_most(Some(timeout));
    error_of(&mut join)
}

/// Polls a join until it fails, and returns the error.
fn error_of(join: &mut Join) -> Error {
    let began = Instant::now();
    loop {
        match join.poll() {
            Err(error) => return error,
            Ok(polled) => assert!(polled != Poll::Done && began.elapsed() < Duration::from_secs(60), "{polled:?}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[track_caller]
fn cannot_reach(maker: SocketAddr, timeout: Duration, why: &str) {
    let error = failure(id_of(maker), timeout);
    let millis = timeout.as_millis();
    let start = format!("the maker of the unique id could not be reached at {maker} within {millis} ms: ");
    let said = error.message().strip_prefix(&start);
    assert!(said.is_some_and(|said| said.contains(why)), "{}", error.message());
    assert_eq!(error.code(), ncclTimeout);
}

#[test]
fn a_maker_that_does_not_answer() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    cannot_reach(silent.local_addr().unwrap(), SHORT, "it does not answer");
}

#[test]
fn a_maker_to_which_no_network_leads() {
    // No connection can be made to a broadcast address.
    let broadcast = SocketAddr::from(([255, 255, 255, 255], 7));
    cannot_reach(broadcast, SHORT, "255.255.255.255:7: Network is unreachable");
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
        cannot_reach(maker, LONGER, &maker.to_string());
        is_over.store(true, Ordering::Release);
    });
}

#[test]
fn nobody_listens_at_the_makers_address() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = failure(id_of(free), LONGER);
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

#[test]
fn a_rank_that_is_stopped_when_it_has_its_seat_is_not_known() {
    let id = Id::create(Some(false)).unwrap();
    let mut first = Join::new(Source::Id(id), 2, 0, "test".to_owned(), Arc::default());
    first.wait_at_most(Some(SHORT));
    assert!(first.poll().is_ok());
    // Rank 1 does not count itself in.
    first.joined().unwrap().segment.seat(1).take(ProcessId::current()).unwrap();
    let error = error_of(&mut first);
    let said = "all ranks came, but one of them did not do its part within 200 ms: it may be stopped";
    assert_eq!((error.code(), error.message(), error.blame()), (ncclTimeout, said, &Blame::none()));
}

/// Polls rank 1 of 2 until it fails, and expects that rank 0 has given up.
#[track_caller]
fn expect_rank_0_missing(mut second: Join) {
    let error = error_of(&mut second);
    assert!(error.message().contains("rank 0 (pid"), "{}", error.message());
    assert!(error.message().ends_with("gave up joining"), "{}", error.message());
    assert_eq!((error.code(), &error.blame().ranks[..]), (ncclRemoteError, &[0][..]));
}

#[test]
fn a_rank_that_is_dropped_before_its_first_poll_ends_the_join() {
    for (hosts, is_maker) in [(false, true), (false, false), (true, true), (true, false)] {
        let id = Id::create(Some(hosts)).unwrap();
        let join = |rank| Join::new(Source::Id(id), 2, rank, "test".to_owned(), Arc::default());
        let (first, mut second) = (join(0), join(1));
        let _kept = (!is_maker).then(|| id.forget());
        // Rank 1 waits in the segment or at the maker.
        let began = Instant::now();
        let is_waiting = |second: &Join| match &second.state {
            State::AtMaker(registration) => registration.is_registered(),
            state => matches!(state, State::InSegment),
        };
        while !is_waiting(&second) {
            assert!(second.poll().is_ok() && began.elapsed() < Duration::from_secs(60));
        }
        drop(first);
        expect_rank_0_missing(second);
    }
}

#[test]
fn a_rank_for_which_there_is_no_thread_tells_a_maker_on_another_host() {
    let id = Id::create(Some(true)).unwrap();
    let _kept = id.forget();
    let join = |rank| Join::new(Source::Id(id), 2, rank, "test".to_owned(), Arc::default());
    join(0).refuse(&Error::new(ncclSystemError, "no thread"));
    let error = error_of(&mut join(1));
    assert!(error.message().ends_with("no thread"), "{}", error.message());
    assert_eq!((error.code(), &error.blame().ranks[..]), (ncclSystemError, &[0][..]));
}

/// Polls a join over the maker of its id until rank 1 has registered with the maker.
fn poll_until_registered(join: &mut Join) {
    let began = Instant::now();
    while !matches!(&join.state, State::AtMaker(registration) if registration.is_registered()) {
        assert!(join.poll().is_ok() && began.elapsed() < Duration::from_secs(60));
    }
}

#[test]
fn a_maker_that_leaves_before_its_own_rank_is_connected_gives_the_reason() {
    let id = Id::create(Some(true)).unwrap();
    let join = |rank| Join::new(Source::Id(id), 2, rank, "test".to_owned(), Arc::default());
    let (mut first, mut second) = (join(0), join(1));
    poll_until_registered(&mut second);
    assert_eq!(first.poll(), Ok(Poll::Outside));
    drop(first);
    expect_rank_0_missing(second);
}

#[test]
fn a_maker_that_leaves_before_its_first_poll_keeps_its_id_open_for_those_that_come_later() {
    for hosts in [false, true] {
        let id = Id::create(Some(hosts)).unwrap();
        let mut first = Join::new(Source::Id(id), 2, 0, "test".to_owned(), Arc::default());
        first.leave();
        // The id itself cannot be checked here, because each id of another test closes it.
        assert!(first.gave_up, "the id is closed, so nobody can read the reason");
    }
}

/// Rank 1 of 2 has registered, and rank 0, whose process made the id, cannot register.
#[test]
fn a_maker_whose_own_rank_cannot_join_gives_the_reason() {
    for is_told in [false, true] {
        let id = Id::create(Some(true)).unwrap();
        let join = |rank| Join::new(Source::Id(id), 2, rank, "test".to_owned(), Arc::default());
        let (mut first, mut second) = (join(0), join(1));
        poll_until_registered(&mut second);
        let error = Error::new(ncclSystemError, "no memory");
        first.state = first.refusing(id.address.unwrap(), id.token, error);
        if is_told {
            assert!(error_of(&mut first).message().ends_with("no memory"));
        }
        drop(first);
        let error = error_of(&mut second);
        assert!(error.message().ends_with("no memory"), "{}", error.message());
        assert_eq!((error.code(), &error.blame().ranks[..]), (ncclSystemError, &[0][..]));
    }
}

#[test]
fn a_join_that_fails_before_it_is_connected_tells_a_maker_on_another_host() {
    for is_refusing in [false, true] {
        let id = Id::create(Some(true)).unwrap();
        let _kept = id.forget();
        let join = |rank| Join::new(Source::Id(id), 2, rank, "test".to_owned(), Arc::default());
        let mut first = join(0);
        if is_refusing {
            first.state =
                first.refusing(id.address.unwrap(), id.token, Error::new(ncclSystemError, "the parent ended"));
        }
        first.fail(&Error::new(ncclSystemError, "the parent ended").by(Blame::of([0])));
        let error = error_of(&mut join(1));
        assert!(error.message().ends_with("the parent ended"), "{}", error.message());
        assert_eq!((error.code(), &error.blame().ranks[..]), (ncclSystemError, &[0][..]));
    }
}

/// The process may end as soon as the handle says that the join is over.
#[test]
fn the_others_are_told_before_the_handle_has_the_error() {
    let (id, handle) = (Id::create(Some(true)).unwrap(), Arc::new(Handle::new(0, 2, 0, Config::default())));
    let _kept = id.forget();
    let join = |rank, aborted| Join::new(Source::Id(id), 2, rank, "test".to_owned(), aborted);
    let mut out = std::ptr::null_mut();
    // SAFETY: the place outlives the call.
    let init = unsafe { Init::new(Box::new(join(0, handle.aborted.clone())), handle.clone(), &raw mut out) };
    let mut init = init.unwrap();
    assert_eq!(init.poll(), Ok(Poll::Outside));
    handle.aborted.store(true, Ordering::SeqCst);
    init.poll().unwrap_err();
    assert!(!handle.in_progress());
    // The call is not dropped yet.
    let error = error_of(&mut join(1, Arc::default()));
    assert!(error.message().ends_with("gave up joining"), "{}", error.message());
}

/// The error of a join as rank 0 of 2 whose maker sends these messages and nothing more.
fn failure_after(messages: &[Message]) -> Error {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let id = id_of(listener.local_addr().unwrap());
    let token = id.token;
    std::thread::scope(|threads| {
        let maker = threads.spawn(|| serve(&listener, token, messages));
        let error = failure(id, LONGER);
        drop(maker.join().unwrap());
        error
    })
}

#[test]
fn a_maker_that_does_not_complete_the_join() {
    let error = failure_after(&[Message::StageDone(Stage::Registering, vec![0, 1])]);
    assert_eq!(error.message(), "the maker of the unique id did not complete the join within 2000 ms");
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
