//! Joining a world: with ranks as threads, over every kind of store, and the ways in which it goes
//! wrong.

mod faulty_store;
mod ports;
#[path = "../src/starved.rs"]
mod starved;

use std::net::TcpListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use devicemesh::error::{Error, Result, Status};
use devicemesh::rendezvous::store::{FileStore, MemoryStore, Server, Store, TcpStore};
use devicemesh::rendezvous::{JoinOptions, LocalPlace, World};
use devicemesh::wait::Wait;
use faulty_store::{Faulty, Wrong};
use ports::free_port;
use starved::timed;

fn options(rank: usize, size: usize) -> JoinOptions {
    JoinOptions::ranked(rank, size).timeout(Duration::from_secs(30))
}

/// Returns what each of these ranks gets. Each rank has a thread of its own.
fn join_all<T: Send>(ranks: &[usize], join: impl Fn(usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let join = &join;
        let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || join(*rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn barriers(world: &World) -> Result<()> {
    (0..3).try_for_each(|_| world.barrier(None))
}

#[test]
fn ranks_meet_at_an_address_and_again_at_the_same_one() {
    let method = format!("tcp://127.0.0.1:{}", free_port());
    for _ in 0..2 {
        let sizes = join_all(&[0, 1, 2, 3], |rank| {
            let world = World::join("cpu", &options(rank, 4).init_method(method.clone())).unwrap();
            assert_eq!((world.rank(), world.local_rank(), world.device_type()), (rank, rank, "cpu"));
            barriers(&world).unwrap();
            world.size()
        });
        assert_eq!(sizes, [4; 4]);
    }
}

#[test]
fn two_worlds_side_by_side_share_the_server_of_rank_0() {
    let method = format!("tcp://localhost:{}", free_port());
    join_all(&[0, 1], |rank| {
        let join = || World::join("cpu", &options(rank, 2).init_method(method.clone())).unwrap();
        let (first, second) = (join(), join());
        barriers(&second).unwrap();
        barriers(&first).unwrap();
    });
}

#[test]
fn what_an_earlier_run_left_in_a_store_is_not_believed() {
    let path = format!("{}/world-{}", env!("CARGO_TARGET_TMPDIR"), std::process::id());
    let left = FileStore::open(Path::new(&path)).unwrap();
    let soon = Wait::after(Duration::from_secs(5));
    // A rank that crashed in its handshake leaves such a token, and such an answer to it.
    left.add("devicemesh/0/0/tokens", 2, &soon).unwrap(); // the second one's rank died before it left its token
    left.set("devicemesh/0/0/token/1", b"stale", &soon).unwrap();
    left.set("devicemesh/0/0/nonce/stale", b"gone", &soon).unwrap();
    left.set("devicemesh/0/0/gone/world/0/verdict", b"7 0 0 0\nlong ago", &soon).unwrap();
    let outcomes = join_all(&[0, 1, 2], |rank| {
        // Rank 1 is late, so that rank 0 meets the stale token first.
        std::thread::sleep(Duration::from_millis(if rank == 1 { 150 } else { 0 }));
        let world = World::join("cpu", &options(rank, 3).init_method(format!("file://{path}")))?;
        barriers(&world)
    });
    left.remove();
    assert_eq!(outcomes, [Ok(()), Ok(()), Ok(())]);
}

#[test]
fn a_store_of_the_callers_is_used_as_it_is() {
    let store = MemoryStore::new();
    join_all(&[0, 1, 2], |rank| {
        let world = World::join("cpu", &options(rank, 3).store(Arc::new(store.clone()))).unwrap();
        barriers(&world).unwrap();
    });
}

/// Returns how the join of two ranks ends on each; `None` is a panic. The ranks are threads that
/// nobody joins, so that a rank that hangs fails the test.
fn join_with(wrong: Wrong, timeout: Duration) -> Vec<Option<Result<()>>> {
    let (memory, (ended, end)) = (MemoryStore::new(), channel());
    for rank in 0..2 {
        let (store, ended) = (Arc::new(Faulty(memory.clone(), wrong)), ended.clone());
        std::thread::spawn(move || {
            let join = || World::join("cpu", &options(rank, 2).timeout(timeout).store(store)).map(drop);
            let _ = ended.send(catch_unwind(AssertUnwindSafe(join)).ok());
        });
    }
    (0..2).map(|_| end.recv_timeout(Duration::from_secs(60)).unwrap_or_else(|_| panic!("{wrong:?}: a hang"))).collect()
}

#[test]
fn a_store_of_the_callers_that_panics_or_never_stops_does_not_hang_the_join() {
    for wrong in [Wrong::SetOncePanics, Wrong::LookPanics] {
        let outcomes = join_with(wrong, Duration::from_millis(500));
        assert!(outcomes.contains(&None), "{wrong:?}: {outcomes:?}");
    }
    for outcome in join_with(Wrong::LossesWithoutEnd, Duration::from_millis(500)) {
        assert_eq!(outcome.unwrap().unwrap_err().status(), Status::Timeout);
    }
}

#[test]
fn a_store_of_the_callers_that_gives_nonsense_is_named() {
    let long = "x".repeat(200).leak();
    for text in ["", "0", "0 0 0 0", "9999 0 0 0\nwell", "10 0 0 0\n", "0 0 0\n", long] {
        for outcome in join_with(Wrong::Verdict(text), Duration::from_secs(30)) {
            let error = outcome.unwrap().unwrap_err();
            assert_eq!(error.status(), Status::Store, "{text:?}: {error}");
            let start = "the store at a faulty store gave an empty or unreadable verdict (\"";
            assert!(error.message().contains(start) && error.message().len() < 300, "{text:?}: {error}");
        }
    }
    for index in [3, 99, usize::MAX] {
        for outcome in join_with(Wrong::Index(index), Duration::from_secs(30)) {
            let error = outcome.unwrap().unwrap_err();
            assert_eq!(error.status(), Status::Store, "{error}");
            let told = format!("the store at a faulty store gave index {index} in get_any");
            assert!(error.message().contains(&told), "{error}");
        }
    }
}

fn join_tcp(method: &str, rank: usize, size: usize, timeout: Duration) -> Result<()> {
    let options = options(rank, size).init_method(method).timeout(timeout);
    World::join("cpu", &options).map(drop)
}

#[test]
fn a_rank_that_never_comes_is_named_at_the_deadline() {
    // On a busy machine, one of the other ranks may come later than the deadline, and is named too
    // or finds no store any more. Then the ranks get more time.
    for seconds in [2, 8, 32] {
        let method = format!("tcp://127.0.0.1:{}", free_port());
        let timeout = Duration::from_secs(seconds);
        let errors = join_all(&[0, 1, 3], |rank| {
            let (error, took) = timed(|| join_tcp(&method, rank, 5, timeout).unwrap_err());
            assert!(took.keeps_to(timeout), "rank {rank}: {took:?}");
            error
        });
        let is_late = |error: &Error| {
            error.ranks().iter().any(|rank| [0, 1, 3].contains(rank)) || error.message().contains("no store at")
        };
        if seconds < 32 && errors.iter().any(is_late) {
            continue;
        }
        for error in errors {
            assert_eq!(error.status(), Status::Timeout);
            assert!(error.message().starts_with("ranks 2, 4 never called dm_world_init("), "{error}");
        }
        return;
    }
}

#[test]
fn different_world_sizes_are_a_mismatch_on_both_sides() {
    let method = format!("tcp://127.0.0.1:{}", free_port());
    let errors: Vec<Error> = join_all(&[0, 1], |rank| {
        join_tcp(&method, rank, if rank == 1 { 2 } else { 3 }, Duration::from_secs(20)).unwrap_err()
    });
    for error in errors {
        assert_eq!(error.status(), Status::Mismatch);
        let message = error.message();
        assert!(
            message.contains("rank 1 called") && message.contains("world_size=2") && message.contains("world_size=3"),
            "{message}"
        );
    }
}

#[test]
fn different_world_sizes_in_a_shared_folder_are_a_mismatch_too() {
    let path = format!("{}/sizes-{}", env!("CARGO_TARGET_TMPDIR"), std::process::id());
    let began = Instant::now();
    // For rank 0 the world would be whole with ranks 1 and 2. For rank 3 it is larger.
    let errors: Vec<Error> = join_all(&[0, 1, 3], |rank| {
        let size = if rank == 3 { 4 } else { 3 };
        let join = options(rank, size).init_method(format!("file://{path}"));
        World::join("cpu", &join).map(drop).unwrap_err()
    });
    FileStore::open(Path::new(&path)).unwrap().remove();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    for error in errors {
        assert_eq!(error.status(), Status::Mismatch);
        assert!(error.message().contains("rank 3 called dm_world_init("), "{error}");
    }
}

#[test]
fn a_rank_that_leaves_is_not_waited_for() {
    for leaving in [2, 0] {
        let method = format!("tcp://127.0.0.1:{}", free_port());
        let errors = join_all(&[0, 1, 2, 3], |rank| {
            let join = options(rank, 4).init_method(method.clone());
            let world = World::join("cpu", &join).unwrap();
            barriers(&world).unwrap();
            if rank == leaving {
                return None;
            }
            let (error, took) = timed(|| world.barrier(None).unwrap_err());
            assert!(took.own() < Duration::from_secs(2), "rank {rank}: {took:?}");
            Some(error)
        });
        for error in errors.into_iter().flatten() {
            assert_eq!(error.status(), Status::PeerLost, "{error}");
            assert!(error.message().contains(&format!("rank {leaving}")), "{error}");
            assert!(error.message().contains("was lost"), "{error}");
        }
    }
}

#[test]
fn two_processes_cannot_be_one_rank() {
    let method = format!("tcp://127.0.0.1:{}", free_port());
    // The count of joins is by rank, so the same process stands for two here only through a second
    // name of the address.
    let twin = method.replace("127.0.0.1", "localhost");
    let outcomes = join_all(&[0, 1, 2], |number| match number {
        2 => {
            std::thread::sleep(Duration::from_millis(300));
            join_tcp(&twin, 1, 3, Duration::from_secs(6))
        }
        rank => join_tcp(&method, rank, 3, Duration::from_secs(6)),
    });
    let late = outcomes[2].as_ref().unwrap_err();
    assert_eq!(late.status(), Status::Mismatch, "{late}");
    assert!(late.message().contains("two processes joined") && late.message().contains("as rank 1 of 3"), "{late}");
    for outcome in &outcomes[..2] {
        let error = outcome.as_ref().unwrap_err();
        assert_eq!((error.status(), error.message()), (Status::Mismatch, late.message()), "all are told");
    }
}

#[test]
fn another_job_of_another_size_is_said_to_be_there() {
    let method = format!("tcp://127.0.0.1:{}", free_port());
    // A process has one name for each address, so the other job comes by another name of the
    // address.
    let other = method.replace("127.0.0.1", "localhost");
    let worlds = join_all(&[0, 1, 2], |rank| join_method(&method, rank, 3, Duration::from_secs(30)).unwrap());
    // The keys of its first call are removed by then.
    assert!(join_all(&[0, 1, 2], |rank| barriers(&worlds[rank])).iter().all(Result::is_ok));
    let error = join_tcp(&other, 1, 2, Duration::from_secs(30)).unwrap_err();
    assert_eq!(error.status(), Status::Mismatch, "{error}");
    assert!(error.message().contains("where rank 1 of another job with 3 ranks is"), "{error}");
    let error = join_tcp(&other, 3, 4, Duration::from_secs(2)).unwrap_err();
    assert!(error.message().contains("rank 0 there has a world of 3 ranks and this rank one of 4"), "{error}");
    // The job that was there first does not notice.
    assert!(join_all(&[0, 1, 2], |rank| barriers(&worlds[rank])).iter().all(Result::is_ok));
}

#[test]
fn what_listens_but_is_no_store_is_said_so() {
    // This listener does not answer.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let method = format!("tcp://127.0.0.1:{}", taken.local_addr().unwrap().port());
    let error = join_tcp(&method, 1, 2, Duration::from_millis(500)).unwrap_err();
    assert_eq!(error.status(), Status::Store, "{error}");
}

#[test]
fn a_store_that_rank_0s_process_serves_already_is_used() {
    let pytorchs = Server::bind("127.0.0.1:0").unwrap();
    let method = format!("tcp://127.0.0.1:{}", pytorchs.local_addr().port());
    join_all(&[0, 1, 2], |rank| join_tcp(&method, rank, 3, Duration::from_secs(20)).unwrap());
}

#[test]
fn an_offline_world_answers_but_meets_nobody() {
    let world = World::join("cuda", &options(7, 1 << 20).offline()).unwrap();
    assert_eq!((world.rank(), world.size(), world.is_offline()), (7, 1 << 20, true));
    assert_eq!(world.barrier(None).unwrap_err().status(), Status::Unsupported);
}

fn join_method(method: &str, rank: usize, size: usize, timeout: Duration) -> Result<World> {
    let options = options(rank, size).init_method(method).timeout(timeout);
    World::join("cpu", &options)
}

#[test]
fn ranks_that_joined_elsewhere_or_in_vain_before_find_each_other() {
    // Ranks 0 and 1 have met in another store of the same name.
    let (earlier, store) = (MemoryStore::new(), MemoryStore::new());
    let join = |store: &MemoryStore, rank: usize, size: usize| {
        World::join("cpu", &options(rank, size).store(Arc::new(store.clone()))).map(drop)
    };
    assert_eq!(join_all(&[0, 1], |rank| join(&earlier, rank, 2)), [Ok(()), Ok(())]);
    assert_eq!(join_all(&[0, 1, 2], |rank| join(&store, rank, 3)), [Ok(()), Ok(()), Ok(())]);
    // Rank 0 alone waits in vain. Then all ranks come.
    let method = format!("tcp://127.0.0.1:{}", free_port());
    assert_eq!(join_tcp(&method, 0, 2, Duration::from_secs(2)).unwrap_err().status(), Status::Timeout);
    assert_eq!(join_all(&[0, 1], |rank| join_tcp(&method, rank, 2, Duration::from_secs(30))), [Ok(()), Ok(())]);
}

#[test]
fn a_world_may_be_joined_again_while_slower_ranks_still_free_the_last() {
    for slow in [0, 1] {
        let method = format!("tcp://127.0.0.1:{}", free_port());
        let outcomes = join_all(&[0, 1], |rank| {
            let first = join_method(&method, rank, 2, Duration::from_secs(10))?;
            barriers(&first)?;
            if rank == slow {
                std::thread::sleep(Duration::from_millis(400));
            }
            drop(first);
            barriers(&join_method(&method, rank, 2, Duration::from_secs(10))?)
        });
        assert_eq!(outcomes, [Ok(()), Ok(())], "slow: {slow}");
    }
}

#[test]
fn what_is_left_of_an_earlier_run_does_not_disturb_the_next_at_the_same_port() {
    let method = format!("tcp://127.0.0.1:{}", free_port());
    let worlds = join_all(&[0, 1], |rank| join_method(&method, rank, 2, Duration::from_secs(10)).unwrap());
    let mut worlds = worlds.into_iter();
    let (first, left) = (worlds.next().unwrap(), worlds.next().unwrap());
    drop(first);
    assert_eq!(left.barrier(None).unwrap_err().status(), Status::PeerLost);
    // Rank 0 comes again, and so does a new rank 1. The old rank 1 goes on for a while.
    join_all(&[0, 1, 2], |rank| {
        if rank == 2 {
            for _ in 0..3 {
                let _ = left.barrier(Some(Duration::from_millis(100)));
            }
            return;
        }
        let world = join_method(&method, rank, 2, Duration::from_secs(10)).unwrap();
        std::thread::sleep(Duration::from_millis(600));
        barriers(&world).unwrap();
    });
}

#[test]
fn the_loss_of_the_rank_that_serves_is_named_to_sets_without_it() {
    let method = format!("tcp://127.0.0.1:{}", free_port());
    let errors = join_all(&[0, 1, 2], |rank| {
        let world = join_method(&method, rank, 3, Duration::from_secs(10)).unwrap();
        barriers(&world).unwrap();
        if rank == 1 {
            let scope = world.subscope("some", Arc::new([1, 2]), 0).unwrap();
            return Some(scope.agree("call", &Wait::after(Duration::from_secs(10))).map(drop).unwrap_err());
        }
        if rank == 2 {
            std::thread::sleep(Duration::from_millis(1000));
        }
        None
    });
    let error = errors[1].as_ref().unwrap();
    assert_eq!(error.status(), Status::PeerLost, "{error}");
}

#[test]
fn why_a_rank_cannot_take_part_is_told_also_to_ranks_that_come_after_it_has_given_up() {
    let port = free_port();
    let method = format!("tcp://127.0.0.1:{port}");
    let (giving_up, given_up) = channel::<()>();
    let (giving_up, given_up) = (Mutex::new(Some(giving_up)), Mutex::new(given_up));
    let errors = join_all(&[0, 1, 2], |rank| {
        let _giving_up = if rank == 1 { giving_up.lock().unwrap().take() } else { None };
        if rank == 1 {
            // Its short time begins when rank 0 serves the store.
            TcpStore::connect("127.0.0.1", port, &Wait::after(Duration::from_secs(20))).unwrap();
        }
        let timeout = Duration::from_secs(if rank == 1 { 2 } else { 20 });
        if rank == 2 {
            assert!(given_up.lock().unwrap().recv().is_err(), "rank 1 sends nothing");
        }
        let options = options(rank, 3).init_method(method.clone()).timeout(timeout);
        let prepare = |_| if rank == 1 { Err(Error::new(Status::Library, "no such library")) } else { Ok(()) };
        World::join_with("cpu", &options, prepare, |(), _| Ok(None)).map(drop).unwrap_err()
    });
    for error in &errors[..2] {
        assert_eq!(error.status(), Status::Library, "{error}");
        assert!(error.message().contains("no such library"), "{error}");
    }
}

#[test]
fn a_rank_that_cannot_be_equipped_on_its_place_tells_the_others() {
    let method = format!("tcp://127.0.0.1:{}", free_port());
    let errors = join_all(&[0, 1, 2], |rank| {
        let options = options(rank, 3).init_method(method.clone());
        let equip = |local: &mut usize, place: LocalPlace| {
            *local = place.local_rank;
            assert_eq!((place.local_size, place.host, place.num_hosts), (3, 0, 1));
            if rank == 2 { Err(Error::new(Status::Device, "no such device")) } else { Ok(None) }
        };
        World::join_with("cuda", &options, |_| Ok(0), equip).map(drop).unwrap_err()
    });
    for error in &errors {
        assert_eq!(error.status(), Status::Device, "{error}");
        assert!(error.message().contains("no such device"), "{error}");
    }
}

#[test]
fn local_ranks_are_those_that_were_told_and_free_numbers() {
    let method = format!("tcp://127.0.0.1:{}", free_port());
    let places = join_all(&[0, 1, 2, 3], |rank| {
        let mut options = options(rank, 4).init_method(method.clone());
        if rank == 2 {
            options = options.local_rank(0);
        }
        World::join("cuda", &options).unwrap().local_place()
    });
    let seen: Vec<_> = places.iter().map(|place| (place.local_rank, place.local_size, place.host)).collect();
    assert_eq!(seen, [(1, 4, 0), (2, 4, 0), (0, 4, 0), (3, 4, 0)]);
}
