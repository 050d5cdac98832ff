//! Recoveries with ranks as threads over a store in memory: the cases of docs/recovery.md.
//! tests/deaths.rs has deaths at every moment, tests/turns.rs what a turn ends, tests/telling.rs
//! what ranks tell each other beside their proposals, tests/waiting.rs processes without a place,
//! tests/door.rs newcomers, and tests/restarts.rs processes that die at random and come back.

mod deaths;
mod door;
mod restarts;
mod telling;
mod turns;
mod waiting;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::{Arrival, Made, Outcome, Recovery};
use crate::error::{Error, Result, Status};
use crate::rendezvous::agreement::tests::{membership, soon};
use crate::rendezvous::agreement::{
    Decision, Epoch, Members, Membership, Replicas, ScopeKeys, Terms, WorldKeys, note_key,
};
use crate::rendezvous::incarnation::Incarnation;
use crate::rendezvous::losses::Losses;
use crate::rendezvous::store::{MemoryStore, Store};
use crate::wait::Wait;

/// The mesh of all jobs, as newcomers ask for it.
const MESH: &str = "dm_init(names=(dp))";

/// A job whose ranks are threads.
struct Job {
    store: MemoryStore,
    size: usize,
    /// The ranks that hold the seats.
    seats: Vec<i32>,
    replicas: Replicas,
    terms: Terms,
    /// The keys that the ranks leave for the end of the world.
    leftovers: Arc<WorldKeys>,
    /// The keys that the ranks have left, once all ranks have left the world.
    removed: Arc<Mutex<Vec<String>>>,
}

impl Job {
    /// Returns a job whose mesh has one dimension, with `seats` of its `size` ranks.
    fn new(size: usize, seats: usize) -> Job {
        let (store, seats) = (MemoryStore::new(), (0..seats as i32).collect::<Vec<_>>());
        let replicas = Replicas { sizes: vec![seats.len()], dim: 0 };
        let removed: Arc<Mutex<Vec<String>>> = Arc::default();
        let leftovers = Arc::new(WorldKeys::for_world({
            let removed = Arc::clone(&removed);
            move |keys| removed.lock().unwrap().extend(keys)
        }));
        Job { store, size, seats, replicas, terms: Terms::default(), leftovers, removed }
    }

    fn rank(&self, me: usize) -> Recovery {
        self.process(Incarnation::first(me as i32))
    }

    fn process(&self, me: Incarnation) -> Recovery {
        self.process_over(Arc::new(self.store.clone()), me)
    }

    fn process_over(&self, store: Arc<dyn Store>, me: Incarnation) -> Recovery {
        let losses = Arc::new(Losses::none(Arc::clone(&store), "test"));
        let epoch = Epoch::first(self.size, self.replicas.clone(), &self.seats);
        let rank = me.rank as usize;
        let members = Members::All(self.size.max(rank + 1));
        let left = ScopeKeys::new(&members, &self.leftovers, None);
        let mut recovery = Recovery::new(Membership { left, ..membership(store, losses, members, rank) }, me, epoch);
        recovery.expect_mesh(MESH);
        recovery
    }

    fn arrival(&self) -> Arrival<'_> {
        Arrival { call: "dm_recover()", terms: &self.terms, has_state: false, lost: &[], suspects: &[] }
    }

    /// Adds a process to the list of lost processes, as the server does when that process ends.
    fn die(&self, process: Incarnation) {
        Losses::none(Arc::new(self.store.clone()), "test").announce(process);
    }

    fn die_first(&self, ranks: &[i32]) {
        ranks.iter().for_each(|rank| self.die(Incarnation::first(*rank)));
    }

    fn knock(&self, process: Incarnation, seat: usize) {
        let number = self.store.add("test/door", 1, &soon()).unwrap();
        let note = format!("{process} {seat}\n{MESH}");
        self.store.set(&note_key("test/door", number), note.as_bytes(), &soon()).unwrap();
    }

    /// Waits until that process has come to that turn.
    fn await_here(&self, number: u64, process: &str) {
        self.store.get(&format!("test/turn/{number}/here/{process}"), &soon()).unwrap();
    }

    /// Recovers on these ranks, each on a thread of its own, until a mesh is made or there is an
    /// error.
    fn recover(&self, ranks: &[usize]) -> Vec<(Recovery, Result<Outcome>)> {
        let recover = |me: usize| {
            let mut rank = self.rank(me);
            let outcome = recover(&mut rank, &self.arrival(), &soon());
            (rank, outcome)
        };
        std::thread::scope(|threads| {
            let all: Vec<_> = ranks.iter().map(|me| threads.spawn(move || recover(*me))).collect();
            all.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

/// Comes to turns until a mesh is made of which this rank is a member, as dm_recover does.
fn recover(rank: &mut Recovery, arrival: &Arrival<'_>, wait: &Wait) -> Result<Outcome> {
    loop {
        if rank.come(arrival, wait)? == Outcome::Ended {
            return Ok(Outcome::Ended);
        }
        if rank.make(Ok(()), wait)? == Made::Whole && rank.is_in_mesh() {
            return Ok(Outcome::Epoch);
        }
    }
}

/// Returns the text of the rank's epoch, without the words that are equal in all tests.
fn seats(rank: &Recovery) -> String {
    let text = Decision::Epoch(rank.epoch().clone()).to_string();
    let field = |name: &str| text.split(' ').find(|field| field.starts_with(name)).unwrap_or_default().to_owned();
    format!("{} {}", field("seats="), field("without="))
}

/// Returns the outcome of the ranks, which must be equal on all of them.
fn all_equal(outcomes: Vec<(Recovery, Result<Outcome>)>) -> String {
    let told: Vec<String> = outcomes
        .iter()
        .map(|(rank, outcome)| match outcome {
            Ok(Outcome::Epoch) => format!("epoch {}: {}", rank.epoch_number(), seats(rank)),
            Ok(Outcome::Ended) => "ended".to_owned(),
            Ok(Outcome::Called) => "called".to_owned(),
            Err(error) => format!("{}: {}", error.status().name(), error.message()),
        })
        .collect();
    assert!(told.iter().all(|one| *one == told[0]), "{told:?}");
    told[0].clone()
}

#[test]
fn the_ranks_that_are_left_go_on() {
    let job = Job::new(4, 4);
    job.die_first(&[1, 3]);
    assert_eq!(all_equal(job.recover(&[0, 2])), "epoch 1: seats=0,-,2,- without=1,3");
    // The notes of the turn are gone. The decision, its verdict and the list of losses stay. The
    // list has the note that a rank has come to the turn.
    let stays = [
        "test/decided",
        "test/decision/1",
        "test/decision/1/verdict",
        "test/lost",
        "test/lost/1",
        "test/lost/2",
        "test/lost/3",
    ];
    assert_eq!(job.store.keys(), stays);
    let told = String::from_utf8(job.store.get("test/lost/3", &soon()).unwrap()).unwrap();
    assert!(["turn 1 by 0", "turn 1 by 2"].contains(&told.as_str()), "{told}");
    // These keys go with the world, as the list of losses always does.
    let Job { store, leftovers, removed, .. } = job;
    drop(leftovers);
    let mut removed = removed.lock().unwrap().clone();
    removed.sort();
    removed.dedup();
    assert_eq!(removed, stays[..3], "{:?}", store.keys());
}

#[test]
fn a_loss_that_comes_while_the_others_wait_completes_the_turn() {
    let job = Job::new(3, 3);
    std::thread::scope(|threads| {
        let waiting = threads.spawn(|| all_equal(job.recover(&[0, 1])));
        job.await_here(1, "0");
        job.await_here(1, "1");
        job.die_first(&[2]);
        assert_eq!(waiting.join().unwrap(), "epoch 1: seats=0-1,- without=2");
    });
}

#[test]
fn the_same_members_get_a_new_mesh_when_nobody_is_lost() {
    let job = Job::new(3, 3);
    assert_eq!(all_equal(job.recover(&[0, 1, 2])), "epoch 1: seats=0-2 without=");
}

#[test]
fn a_silent_rank_is_named_on_all_ranks_and_the_next_turn_has_it() {
    let job = Job::new(3, 3);
    let mut ranks = [job.rank(0), job.rank(1)];
    std::thread::scope(|threads| {
        for (me, rank) in ranks.iter_mut().enumerate() {
            let job = &job;
            threads.spawn(move || {
                // The deadline of rank 1 passes first, once rank 0 is here.
                let wait = match me {
                    0 => soon(),
                    _ => {
                        job.await_here(1, "0");
                        Wait::after(Duration::from_millis(100))
                    }
                };
                let error = rank.come(&job.arrival(), &wait).unwrap_err();
                assert_eq!((error.status(), error.ranks()), (Status::Timeout, &[2][..]));
                assert_eq!(error.message(), "rank 2 did not come to the recovery within 100 ms");
            });
        }
    });
    // The slow rank is told once, and then meets the others.
    let mut late = job.rank(2);
    assert_eq!(late.come(&job.arrival(), &soon()).unwrap_err().ranks(), [2]);
    std::thread::scope(|threads| {
        for rank in ranks.iter_mut().chain([&mut late]) {
            threads.spawn(|| {
                assert_eq!(recover(rank, &job.arrival(), &soon()).unwrap(), Outcome::Epoch);
                assert_eq!((rank.epoch_number(), seats(rank).as_str()), (2, "seats=0-2 without="));
            });
        }
    });
}

#[test]
fn a_silent_rank_is_left_out_where_the_terms_say_so_and_is_told() {
    // On a busy machine, one of the ranks that come may be late too, and be left out. Then all get
    // more time.
    let (mut job, mut seconds) = (Job::new(3, 3), 2);
    let mut left = loop {
        job.terms = Terms { silent: Some(Duration::from_secs(seconds)), min_size: 2, ..Terms::default() };
        let left = job.recover(&[0, 1]);
        if seconds > 8 || left.iter().all(|(_, outcome)| *outcome == Ok(Outcome::Epoch)) {
            break left;
        }
        (job, seconds) = (Job::new(3, 3), 4 * seconds);
    };
    job.terms.silent = None;
    // The slow rank comes after two more epochs.
    for _ in 0..2 {
        std::thread::scope(|threads| {
            for (rank, outcome) in &mut left {
                threads.spawn(|| *outcome = recover(rank, &job.arrival(), &soon()));
            }
        });
    }
    assert_eq!(all_equal(left), "epoch 3: seats=0-1,- without=2");
    let mut slow = job.rank(2);
    // From then on the slow rank takes part in no turn and decides nothing, because its own epoch
    // is over.
    for _ in 0..3 {
        let error = slow.come(&job.arrival(), &soon()).unwrap_err();
        assert_eq!((error.status(), error.ranks()), (Status::NotMember, &[2][..]), "{error}");
        slow.refuse(&Error::invalid("a wrong argument"), &soon());
    }
    assert!((2..5).all(|number| job.store.try_get(&format!("test/turn/{number}/here/2"), &soon()).unwrap().is_none()));
    assert_eq!(job.store.try_get("test/decision/4", &soon()).unwrap(), None);
}

#[test]
fn a_rank_that_is_taken_for_lost_and_lives_is_told() {
    let job = Job::new(3, 3);
    job.die_first(&[2]);
    let outcomes = job.recover(&[0, 1, 2]);
    for (me, (_, outcome)) in outcomes.iter().enumerate() {
        match outcome {
            Ok(outcome) => assert!(me < 2 && *outcome == Outcome::Epoch),
            Err(error) => assert_eq!((me, error.status()), (2, Status::NotMember), "{error}"),
        }
    }
}

#[test]
fn different_terms_are_a_mismatch_on_all_ranks() {
    let job = Job::new(3, 3);
    let other = Terms { min_size: 2, ..Terms::default() };
    let errors: Vec<Error> = std::thread::scope(|threads| {
        let come = |me: usize| {
            let terms = if me == 1 { &other } else { &job.terms };
            job.rank(me).come(&Arrival { terms, ..job.arrival() }, &soon()).unwrap_err()
        };
        let all: Vec<_> = (0..3).map(|me| threads.spawn(move || come(me))).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(errors.iter().all(|error| error.message() == errors[0].message()), "{errors:?}");
    assert_eq!(errors[0].status(), Status::Mismatch);
    let words = "called dm_recover() with ends=0 dim=0 replace=0 silent=- min_size=2 max_size=- any_state=0";
    assert!(errors[0].message().contains(&format!("rank 1 {words}")), "{}", errors[0]);
}

#[test]
fn too_few_replicas_and_a_lost_state_are_failures() {
    let mut job = Job::new(3, 3);
    job.terms.min_size = 3;
    job.die_first(&[1]);
    let told = all_equal(job.recover(&[0, 2]));
    assert!(told.contains("2 of 3 replicas along dimension 0 are left, and 3 must be"), "{told}");
    // Each replica has two ranks, and both ranks with position 1 are lost.
    let mut job = Job::new(4, 4);
    job.replicas = Replicas { sizes: vec![2, 2], dim: 0 };
    job.die_first(&[1]);
    job.knock(Incarnation { rank: 1, ticket: 1 }, 1);
    job.die_first(&[3]);
    let told = all_equal(job.recover(&[0, 2]));
    assert!(told.contains("no rank that is left has the state of position 1"), "{told}");
}

#[test]
fn a_spare_takes_a_seat_and_needs_the_state() {
    let job = Job::new(4, 3);
    job.die_first(&[1]);
    std::thread::scope(|threads| {
        let spare = threads.spawn(|| job.recover(&[3]));
        job.await_here(1, "3");
        let others = threads.spawn(|| job.recover(&[0, 2]));
        let all: Vec<_> = spare.join().unwrap().into_iter().chain(others.join().unwrap()).collect();
        assert_eq!(all[0].0.epoch().stateless, [Incarnation::first(3)]);
        assert_eq!(all_equal(all), "epoch 1: seats=0,3,2 without=");
    });
}

/// A spare waits through a failure of the others, and without a deadline.
#[test]
fn a_spare_ends_when_all_ranks_of_the_mesh_are_lost() {
    let job = Job::new(3, 2);
    std::thread::scope(|threads| {
        let spare = threads.spawn(|| {
            let mut spare = job.rank(2);
            recover(&mut spare, &job.arrival(), &Wait::after(Duration::from_millis(1))).unwrap_err()
        });
        job.await_here(1, "2");
        let gives_up = job.rank(0).come(&job.arrival(), &Wait::after(Duration::from_millis(20))).unwrap_err();
        assert_eq!(gives_up.status(), Status::Timeout);
        job.await_here(2, "2");
        job.die_first(&[0, 1]);
        let error = spare.join().unwrap();
        assert_eq!(error.status(), Status::InvalidState);
        assert!(error.message().starts_with("all ranks of the mesh are lost"), "{error}");
    });
}

#[test]
fn a_loss_between_decision_and_verdict_begins_the_next_turn() {
    let job = Job::new(3, 3);
    std::thread::scope(|threads| {
        let others = threads.spawn(|| all_equal(job.recover(&[0, 1])));
        let mut dying = job.rank(2);
        assert_eq!(dying.come(&job.arrival(), &soon()).unwrap(), Outcome::Epoch);
        job.die_first(&[2]);
        assert_eq!(others.join().unwrap(), "epoch 2: seats=0-1,- without=2");
    });
    assert_eq!(job.store.get("test/decision/1/verdict", &soon()).unwrap(), b"broken");
    assert_eq!(job.store.get("test/decision/2/verdict", &soon()).unwrap(), b"made");
    let of_turns: Vec<String> = job.store.keys().into_iter().filter(|key| key.contains("/turn/")).collect();
    assert_eq!(of_turns, Vec::<String>::new());
}

#[test]
fn a_rank_that_cannot_make_its_part_fails_all_and_they_may_try_again() {
    let job = Job::new(2, 2);
    let own = Error::new(Status::Ccl, "out of memory").with_ccl_result(1);
    std::thread::scope(|threads| {
        for me in 0..2 {
            let (job, own) = (&job, &own);
            threads.spawn(move || {
                let mut rank = job.rank(me);
                rank.come(&job.arrival(), &soon()).unwrap();
                let error = rank.make(if me == 1 { Err(own) } else { Ok(()) }, &soon()).unwrap_err();
                assert_eq!(error.message(), "rank 1 failed in epoch 1: out of memory");
                assert_eq!((error.status(), error.ccl_result(), error.ranks()), (Status::Ccl, 1, &[1][..]));
                assert_eq!(recover(&mut rank, &job.arrival(), &soon()).unwrap(), Outcome::Epoch);
                assert_eq!(rank.epoch_number(), 2);
            });
        }
    });
}

#[test]
fn a_rank_that_is_late_with_its_part_is_named() {
    let job = Job::new(2, 2);
    let mut late = job.rank(1);
    std::thread::scope(|threads| {
        let waiting = threads.spawn(|| {
            let mut rank = job.rank(0);
            rank.come(&job.arrival(), &soon()).unwrap();
            rank.make(Ok(()), &Wait::after(Duration::from_millis(50))).unwrap_err()
        });
        late.come(&job.arrival(), &soon()).unwrap();
        let error = waiting.join().unwrap();
        assert_eq!(error.message(), "rank 1 did not make the mesh of epoch 1 within 50 ms");
        assert_eq!(late.make(Ok(()), &soon()).unwrap_err().message(), error.message());
    });
}

/// Rank 2 is blamed by rank 0 and comes; rank 3 is blamed and does not come, so it is left out a
/// second after all others are here. This test takes that second.
#[test]
fn a_suspected_rank_is_lost_only_if_it_stays_silent() {
    let job = Job::new(4, 4);
    let began = Instant::now();
    std::thread::scope(|threads| {
        for me in 0..3 {
            let (job, suspects) = (&job, if me == 0 { &[2, 3][..] } else { &[] });
            threads.spawn(move || {
                let mut rank = job.rank(me);
                if me != 2 {
                    // On a busy machine, rank 2 may come a second later than the others.
                    job.await_here(1, "2");
                }
                recover(&mut rank, &Arrival { suspects, ..job.arrival() }, &soon()).unwrap();
                assert_eq!(seats(&rank), "seats=0-2,- without=3");
            });
        }
    });
    assert!(began.elapsed() > Duration::from_millis(900), "{:?}", began.elapsed());
    // The list has one loss and the note of the turn.
    assert_eq!(job.store.get("test/lost", &soon()).unwrap(), b"2");
}

/// Rank 1 has taken over to tell of the loss of rank 3, and has died before it did so.
#[test]
fn a_loss_is_told_also_when_the_rank_that_was_to_tell_it_is_lost() {
    let job = Job::new(4, 4);
    job.store.set("test/turn/1/tells/3", b"1", &soon()).unwrap();
    std::thread::scope(|threads| {
        for me in [0, 2] {
            let job = &job;
            threads.spawn(move || {
                let mut rank = job.rank(me);
                recover(&mut rank, &Arrival { lost: &[3], ..job.arrival() }, &soon()).unwrap();
                assert_eq!(seats(&rank), "seats=0,-,2,- without=1,3");
            });
        }
        job.await_here(1, "0");
        job.await_here(1, "2");
        job.die_first(&[1]);
    });
}

#[test]
fn nobody_waits_longer_for_a_newcomer_than_the_terms_say() {
    let mut job = Job::new(3, 3);
    job.terms.replace = Duration::from_millis(100);
    job.die_first(&[1]);
    let began = Instant::now();
    assert_eq!(all_equal(job.recover(&[0, 2])), "epoch 1: seats=0,-,2 without=1");
    assert!(began.elapsed() >= Duration::from_millis(100), "{:?}", began.elapsed());
}

#[test]
fn the_job_ends_for_all_members() {
    let mut job = Job::new(3, 2);
    job.terms.ends = true;
    assert_eq!(all_equal(job.recover(&[0, 1, 2])), "ended");
}

#[test]
fn at_the_deadline_the_store_has_a_twentieth_of_the_timeout_to_answer() {
    // A loaded machine may need more than 200 ms for the questions of a rank that gives up.
    let asking = Recovery::soon(&Wait::after(Duration::from_secs(40)));
    assert!(asking.deadline.left() > Duration::from_secs(41), "{:?}", asking.deadline.left());
    let asking = Recovery::soon(&Wait::after(Duration::ZERO));
    assert_ne!(asking.deadline.left(), Duration::ZERO);
}
