//! Newcomers: how they are let in, why they are refused, and what they do when a recovery breaks.

use std::time::Duration;

use super::{Job, MESH, all_equal, recover, seats};
use crate::error::{Error, Result, Status};
use crate::rendezvous::agreement::recovery::{Arrival, AtDoor, Made, Outcome, Recovery, Request};
use crate::rendezvous::agreement::tests::soon;
use crate::rendezvous::agreement::{Decision, Replicas, Terms, now};
use crate::rendezvous::incarnation::Incarnation;
use crate::rendezvous::store::Store;
use crate::wait::Wait;

/// A newcomer of the job that asks for the seat of its rank.
struct Newcomer {
    at_door: AtDoor,
    seat: usize,
    mesh: &'static str,
}

impl Newcomer {
    fn of(job: &Job, rank: i32, ticket: u32) -> Newcomer {
        let at_door = AtDoor::new(job.process(Incarnation { rank, ticket }), now() - 100);
        Newcomer { at_door, seat: rank as usize, mesh: MESH }
    }

    /// Comes in, and makes its part of each mesh with `make`.
    fn comes_in_with<T>(&mut self, make: impl FnMut(&Recovery) -> Result<T>, wait: &Wait) -> Result<Option<T>> {
        let request = Request { seat: self.seat, mesh: self.mesh };
        self.at_door.come_in(&request, |_| Ok(()), make, wait)
    }

    /// Comes in, and returns the seats of its epoch.
    fn comes_in(&mut self) -> Result<Option<String>> {
        self.comes_in_with(|recovery| Ok(format!("epoch {}: {}", recovery.epoch_number(), seats(recovery))), &soon())
    }
}

/// Waits until so many newcomers have knocked.
fn await_knock(job: &Job, number: usize) {
    job.store.get(&format!("test/door/{number}"), &soon()).unwrap();
}

#[test]
fn a_newcomer_takes_the_seat_of_its_rank_while_the_others_wait_for_it() {
    let mut job = Job::new(3, 3);
    job.terms.replace = Duration::from_secs(20);
    job.die_first(&[1]);
    std::thread::scope(|threads| {
        let others = threads.spawn(|| all_equal(job.recover(&[0, 2])));
        job.await_here(1, "0");
        job.await_here(1, "2");
        let mut newcomer = Newcomer::of(&job, 1, 1);
        let came = newcomer.comes_in().unwrap();
        let told = others.join().unwrap();
        assert_eq!((came.as_deref(), told.as_str()), (Some(told.as_str()), "epoch 1: seats=0,1:1,2 without="));
        let member = newcomer.at_door.into_recovery();
        assert_eq!(member.epoch().stateless, [Incarnation { rank: 1, ticket: 1 }]);
    });
}

/// The newcomer begins with the newest epoch. Once it is in, it is a member like the others.
#[test]
fn a_newcomer_comes_in_after_earlier_epochs_and_goes_on_as_a_member() {
    let job = Job::new(3, 3);
    job.die_first(&[2]);
    let mut others = job.recover(&[0, 1]);
    let again = |others: &mut Vec<(Recovery, Result<Outcome>)>| {
        std::thread::scope(|threads| {
            for (rank, outcome) in others {
                threads.spawn(|| *outcome = recover(rank, &job.arrival(), &soon()));
            }
        });
    };
    again(&mut others);
    // Nobody but a slow member may need the first decision. A newcomer does not read it.
    job.store.delete("test/decision/1", &soon()).unwrap();
    std::thread::scope(|threads| {
        let newcomer = threads.spawn(|| {
            let mut newcomer = Newcomer::of(&job, 2, 1);
            assert_eq!(newcomer.comes_in().unwrap().as_deref(), Some("epoch 3: seats=0-1,2:1 without="));
            let mut member = newcomer.at_door.into_recovery();
            let outcome = recover(&mut member, &Arrival { has_state: true, ..job.arrival() }, &soon());
            (member, outcome)
        });
        await_knock(&job, 1);
        again(&mut others);
        again(&mut others);
        others.push(newcomer.join().unwrap());
    });
    assert!(others[0].0.epoch().stateless.is_empty());
    assert_eq!(all_equal(others), "epoch 4: seats=0-1,2:1 without=");
    let of_turns: Vec<String> = job.store.keys().into_iter().filter(|key| key.contains("/turn/")).collect();
    assert_eq!(of_turns, Vec::<String>::new());
}

#[test]
fn a_newcomer_for_a_rank_that_lives_is_refused_and_told_so_again() {
    let job = Job::new(3, 3);
    std::thread::scope(|threads| {
        let newcomer = threads.spawn(|| {
            let mut newcomer = Newcomer::of(&job, 1, 1);
            let errors = [newcomer.comes_in().unwrap_err(), newcomer.comes_in().unwrap_err()];
            assert_eq!(errors[0].message(), errors[1].message());
            errors[0].clone()
        });
        await_knock(&job, 1);
        assert_eq!(all_equal(job.recover(&[0, 1, 2])), "epoch 1: seats=0-2 without=");
        let error = newcomer.join().unwrap();
        assert_eq!((error.status(), error.ranks()), (Status::Mismatch, &[1][..]));
        assert_eq!(
            error.message(),
            "rank 1 lives, and has taken part in epoch 1 after this process came: end that process first, or start this one under another rank"
        );
    });
}

/// The holder of the seat has died, and nobody knows it when the ranks decide.
#[test]
fn a_newcomer_waits_while_the_holder_of_its_seat_may_be_dead() {
    let job = Job::new(3, 3);
    std::thread::scope(|threads| {
        let newcomer = threads.spawn(|| Newcomer::of(&job, 1, 1).comes_in().unwrap());
        await_knock(&job, 1);
        let dying = threads.spawn(|| {
            let mut dying = job.rank(1);
            assert_eq!(dying.come(&job.arrival(), &soon()).unwrap(), Outcome::Epoch);
            assert_eq!(dying.epoch().taken, [Incarnation { rank: 1, ticket: 1 }]);
        });
        let others = threads.spawn(|| all_equal(job.recover(&[0, 2])));
        dying.join().unwrap();
        job.die_first(&[1]);
        assert_eq!(others.join().unwrap(), "epoch 2: seats=0,1:1,2 without=");
        assert_eq!(newcomer.join().unwrap().as_deref(), Some("epoch 2: seats=0,1:1,2 without="));
    });
}

#[test]
fn of_two_newcomers_for_one_rank_the_second_one_is_refused() {
    let job = Job::new(2, 2);
    job.die_first(&[1]);
    std::thread::scope(|threads| {
        let first = threads.spawn(|| Newcomer::of(&job, 1, 1).comes_in());
        await_knock(&job, 1);
        let second = threads.spawn(|| Newcomer::of(&job, 1, 2).comes_in());
        await_knock(&job, 2);
        assert_eq!(all_equal(job.recover(&[0])), "epoch 1: seats=0,1:1 without=");
        assert_eq!(first.join().unwrap().unwrap().as_deref(), Some("epoch 1: seats=0,1:1 without="));
        let error = second.join().unwrap().unwrap_err();
        assert_eq!(error.status(), Status::Mismatch);
        let start = "another process came back as rank 1 before this one: it is process 1 of that rank";
        assert!(error.message().starts_with(start), "{error}");
    });
}

#[test]
fn a_newcomer_whose_seat_a_spare_has_taken_becomes_a_spare() {
    let job = Job::new(4, 3);
    job.die_first(&[1]);
    std::thread::scope(|threads| {
        let spare = threads.spawn(|| job.recover(&[3]));
        job.await_here(1, "3");
        let told = threads.spawn(|| job.recover(&[0, 2])).join().unwrap();
        let members = told.into_iter().chain(spare.join().unwrap());
        let newcomer = threads.spawn(|| Newcomer::of(&job, 1, 1).comes_in().unwrap());
        await_knock(&job, 1);
        let again = members.map(|(mut rank, _)| {
            let job = &job;
            threads.spawn(move || {
                recover(&mut rank, &job.arrival(), &soon()).unwrap();
                (rank.epoch().spares.clone(), rank.epoch().taken.clone())
            })
        });
        for rank in again.collect::<Vec<_>>() {
            assert_eq!(rank.join().unwrap(), (vec![Incarnation { rank: 1, ticket: 1 }], Vec::new()));
        }
        assert_eq!(newcomer.join().unwrap(), None, "a member without a seat");
    });
}

#[test]
fn a_newcomer_that_asks_for_another_mesh_is_refused_and_the_next_one_comes_in() {
    let job = Job::new(2, 2);
    job.die_first(&[1]);
    std::thread::scope(|threads| {
        let other = threads.spawn(|| {
            let mut other = Newcomer { mesh: "dm_init(names=(tp))", ..Newcomer::of(&job, 1, 1) };
            other.comes_in().unwrap_err()
        });
        await_knock(&job, 1);
        let mut others = job.recover(&[0]);
        let error = other.join().unwrap();
        assert_eq!(error.status(), Status::Mismatch);
        assert_eq!(
            error.message(),
            "the mesh of the job is dm_init(names=(dp)), and rank 1 asks for dm_init(names=(tp)): start it with the program and the options of the job"
        );
        // The refused newcomer is out for good, also while its process lives.
        let newcomer = threads.spawn(|| Newcomer::of(&job, 1, 2).comes_in().unwrap());
        await_knock(&job, 2);
        let (rank, _) = &mut others[0];
        recover(rank, &job.arrival(), &soon()).unwrap();
        assert_eq!(newcomer.join().unwrap().as_deref(), Some("epoch 2: seats=0,1:2 without="));
        assert_eq!(rank.epoch().refused, [Incarnation { rank: 1, ticket: 1 }]);
    });
}

#[test]
fn a_newcomer_is_told_that_the_job_has_ended() {
    let ended = |error: &Error| error.message().starts_with("the job that ran here has ended");
    // The job has ended by a decision.
    let mut job = Job::new(2, 2);
    job.terms.ends = true;
    std::thread::scope(|threads| {
        let newcomer = threads.spawn(|| Newcomer::of(&job, 1, 1).comes_in().unwrap_err());
        await_knock(&job, 1);
        assert_eq!(all_equal(job.recover(&[0, 1])), "ended");
        let error = newcomer.join().unwrap();
        assert!(error.status() == Status::InvalidState && ended(&error), "{error}");
    });
    // All members die while the newcomer waits.
    let job = Job::new(2, 2);
    std::thread::scope(|threads| {
        let newcomer = threads.spawn(|| Newcomer::of(&job, 1, 1).comes_in().unwrap_err());
        await_knock(&job, 1);
        job.die_first(&[0, 1]);
        let error = newcomer.join().unwrap();
        assert!(error.status() == Status::InvalidState && ended(&error), "{error}");
    });
    // A spare finds that nobody has the state any more.
    let job = Job::new(3, 2);
    std::thread::scope(|threads| {
        let newcomer = threads.spawn(|| Newcomer::of(&job, 1, 1).comes_in().unwrap_err());
        await_knock(&job, 1);
        job.die_first(&[0, 1]);
        let told = all_equal(job.recover(&[2]));
        assert!(told.contains("all ranks of the mesh are lost"), "{told}");
        let error = newcomer.join().unwrap();
        assert_eq!(error.status(), Status::InvalidState);
        assert!(error.message().starts_with("the job has ended: all ranks of the mesh are lost"), "{error}");
    });
}

#[test]
fn a_newcomer_that_counts_as_lost_is_told() {
    let job = Job::new(2, 2);
    std::thread::scope(|threads| {
        let newcomer = threads.spawn(|| Newcomer::of(&job, 1, 1).comes_in().unwrap_err());
        await_knock(&job, 1);
        job.die(Incarnation { rank: 1, ticket: 1 });
        let error = newcomer.join().unwrap();
        assert_eq!((error.status(), error.ranks()), (Status::NotMember, &[1][..]));
        assert!(error.message().ends_with("its connections had ended; start it again"), "{error}");
    });
}

#[test]
fn a_newcomer_says_at_its_deadline_since_when_the_epoch_stands_and_goes_on_in_the_next_call() {
    let job = Job::new(2, 2);
    let short = || Wait::after(Duration::from_millis(30));
    let mut newcomer = Newcomer::of(&job, 1, 1);
    let mut early = |job: &Job| {
        let error = newcomer.comes_in_with(|_| Ok(()), &short()).unwrap_err();
        assert_eq!((error.status(), job.store.get("test/door", &soon()).unwrap()), (Status::Timeout, b"1".to_vec()));
        error
    };
    let error = early(&job);
    let start = "the running job in this process's memory did not let rank 1 in within 30 ms: epoch 0 has stood for 10";
    assert!(error.message().starts_with(start), "{error}");
    // An epoch without the newcomer: rank 1 has died, and nobody at all makes the mesh.
    job.die_first(&[1]);
    let mut other = job.rank(0);
    job.store.set("test/decided", b"1 1", &soon()).unwrap();
    let decision = "epoch size=2 shape=2 dim=0 without=1 seats=0,- spares= stateless= taken= refused= door=0";
    job.store.set("test/decision/1", decision.as_bytes(), &soon()).unwrap();
    let error = early(&job);
    assert!(error.message().contains(" s. The job lets newcomers in only in a recovery"), "{error}");
    assert!(error.message().contains("epoch 1 has stood for "), "{error}");
    std::thread::scope(|threads| {
        threads.spawn(|| {
            recover(&mut other, &job.arrival(), &soon()).unwrap();
            recover(&mut other, &job.arrival(), &soon()).unwrap();
        });
        assert_eq!(newcomer.comes_in().unwrap().as_deref(), Some("epoch 2: seats=0,1:1 without="));
    });
    // A process in the place of a lost spare asks for no place in the mesh.
    let mut spare = Newcomer::of(&job, 2, 1);
    (spare.seat, spare.mesh) = (usize::MAX, "2 3\nsame\nwhole");
    let error = spare.comes_in_with(|_| Ok(()), &short()).unwrap_err();
    assert_eq!(error.status(), Status::Timeout, "{error}");
    assert!(error.message().contains("(rank 2 asks for no place in the mesh, so it becomes a spare"), "{error}");
    let mut other = Newcomer::of(&job, 1, 2);
    assert_eq!(other.comes_in_with(|_| Ok(()), &short()).unwrap_err().status(), Status::Timeout);
    other.mesh = "dm_init(names=(tp))";
    assert_eq!(other.comes_in_with(|_| Ok(()), &short()).unwrap_err().status(), Status::InvalidState);
}

/// Rank 2 dies when the newcomer is let in. The newcomer comes to the next turn without options of
/// its own, because these would not be equal to the options of the others.
#[test]
fn a_newcomer_takes_part_in_the_next_turn_when_a_mesh_breaks() {
    let mut job = Job::new(4, 4);
    job.terms = Terms { min_size: 2, replace: Duration::from_millis(1), ..Terms::default() };
    job.die_first(&[1]);
    std::thread::scope(|threads| {
        let newcomer = threads.spawn(|| {
            let mut made = Vec::new();
            let mut newcomer = Newcomer::of(&job, 1, 1);
            let mut make = |recovery: &Recovery| {
                made.push(recovery.epoch_number());
                Ok(seats(recovery))
            };
            let seats = newcomer.comes_in_with(&mut make, &soon()).unwrap();
            assert_eq!((seats.as_deref(), made), (Some("seats=0,1:1,-,3 without=2"), vec![1, 2]));
        });
        await_knock(&job, 1);
        let others = threads.spawn(|| all_equal(job.recover(&[0, 3])));
        let mut dying = job.rank(2);
        assert_eq!(dying.come(&job.arrival(), &soon()).unwrap(), Outcome::Epoch);
        job.die_first(&[2]);
        assert_eq!(others.join().unwrap(), "epoch 2: seats=0,1:1,-,3 without=2");
        newcomer.join().unwrap();
    });
}

#[test]
fn a_newcomer_that_dies_after_the_decision_is_left_out_and_another_one_comes() {
    let mut job = Job::new(3, 3);
    job.terms.replace = Duration::from_secs(20);
    job.die_first(&[1]);
    let first = Incarnation { rank: 1, ticket: 1 };
    job.knock(first, 1);
    std::thread::scope(|threads| {
        let others = threads.spawn(|| all_equal(job.recover(&[0, 2])));
        job.store.get("test/decision/1", &soon()).unwrap();
        job.die(first);
        assert_eq!(Newcomer::of(&job, 1, 2).comes_in().unwrap().as_deref(), Some("epoch 2: seats=0,1:2,2 without="));
        assert_eq!(others.join().unwrap(), "epoch 2: seats=0,1:2,2 without=");
    });
}

#[test]
fn a_newcomer_that_dies_at_the_door_is_not_let_in() {
    let mut job = Job::new(3, 3);
    job.terms.replace = Duration::from_millis(100);
    job.die_first(&[1]);
    job.knock(Incarnation { rank: 1, ticket: 1 }, 1);
    job.die(Incarnation { rank: 1, ticket: 1 });
    // A newcomer that has died after it took its number and before it wrote its note hides nobody.
    job.store.add("test/door", 1, &soon()).unwrap();
    let mut others = job.recover(&[0, 2]);
    assert!(others.iter().all(|(rank, _)| seats(rank) == "seats=0,-,2 without=1"));
    std::thread::scope(|threads| {
        let newcomer = threads.spawn(|| Newcomer::of(&job, 1, 3).comes_in().unwrap());
        await_knock(&job, 3);
        // The newcomer fills the gap after a moment.
        assert_eq!(job.store.get("test/door/2", &soon()).unwrap(), b"-");
        for (rank, outcome) in &mut others {
            threads.spawn(|| *outcome = recover(rank, &job.arrival(), &soon()));
        }
        assert_eq!(newcomer.join().unwrap().as_deref(), Some("epoch 2: seats=0,1:3,2 without="));
    });
}

/// How long the call of a benched rank may take once the rank has a seat.
const BENCHED: Duration = Duration::from_millis(1500);

/// Each replica has two ranks. Both ranks of replica 1 are lost, and one comes back: it is
/// benched, and waits in its dm_recover until the other one comes back, too.
#[test]
fn a_newcomer_whose_replica_stays_incomplete_is_a_member_that_waits() {
    let mut job = Job::new(4, 4);
    job.replicas = Replicas { sizes: vec![2, 2], dim: 0 };
    job.die_first(&[2, 3]);
    std::thread::scope(|threads| {
        let benched = threads.spawn(|| {
            let mut newcomer = Newcomer::of(&job, 2, 1);
            assert_eq!(newcomer.comes_in().unwrap(), None);
            let mut benched = newcomer.at_door.into_recovery();
            assert_eq!((benched.epoch_number(), seats(&benched).as_str()), (1, "seats=0-1,2:1,- without=1"));
            // This is dm_recover of a process without a place: the time of the process begins when
            // it gets a place.
            let outcome = recover(&mut benched, &job.arrival(), &Wait::after(BENCHED));
            (benched, outcome)
        });
        await_knock(&job, 1);
        let mut members = job.recover(&[0, 1]);
        let last = threads.spawn(|| Newcomer::of(&job, 3, 1).comes_in().unwrap());
        await_knock(&job, 2);
        job.await_here(2, "2:1");
        std::thread::sleep(BENCHED + Duration::from_millis(20));
        std::thread::scope(|threads| {
            for (rank, outcome) in &mut members {
                threads.spawn(|| *outcome = recover(rank, &job.arrival(), &soon()));
            }
        });
        members.push(benched.join().unwrap());
        assert_eq!(all_equal(members), "epoch 2: seats=0-1,2:1,3:1 without=");
        assert_eq!(last.join().unwrap().as_deref(), Some("epoch 2: seats=0-1,2:1,3:1 without="));
    });
}

/// Rank 3 is benched, and comes too late to the turn that lets the other rank of its replica in.
/// Then the replica of these two ranks is whole, and nobody else has a reason to recover. So these
/// two ranks knock.
#[test]
fn benched_ranks_knock_when_they_are_whole_after_the_decision() {
    let mut job = Job::new(4, 4);
    job.replicas = Replicas { sizes: vec![2, 2], dim: 0 };
    job.die_first(&[2]);
    let (mut members, mut benched) = std::thread::scope(|threads| {
        let benched = threads.spawn(|| {
            let mut benched = job.rank(3);
            assert_eq!(benched.come(&job.arrival(), &soon()).unwrap(), Outcome::Epoch);
            assert_eq!(benched.make(Ok(()), &soon()).unwrap(), Made::Whole);
            benched
        });
        (job.recover(&[0, 1]), benched.join().unwrap())
    });
    assert_eq!(seats(&benched), "seats=0-1,-,3 without=1");
    std::thread::scope(|threads| {
        let newcomer = threads.spawn(|| {
            let mut newcomer = Newcomer::of(&job, 2, 1);
            assert_eq!(newcomer.comes_in().unwrap(), None);
            let mut newcomer = newcomer.at_door.into_recovery();
            recover(&mut newcomer, &job.arrival(), &soon()).unwrap();
            assert_eq!(seats(&newcomer), "seats=0-1,2:1,3 without=");
        });
        await_knock(&job, 1);
        let again = |members: &mut Vec<(Recovery, Result<Outcome>)>| {
            std::thread::scope(|threads| {
                for (rank, outcome) in members {
                    threads.spawn(|| *outcome = recover(rank, &job.arrival(), &soon()));
                }
            });
        };
        again(&mut members);
        assert_eq!(seats(&members[0].0), "seats=0-1,2:1,3 without=1");
        job.await_here(3, "2:1");
        assert_eq!(job.store.get("test/door", &soon()).unwrap(), b"1");
        assert!(!members[0].0.somebody_waits(&soon()).unwrap());
        let benched = threads.spawn(|| {
            recover(&mut benched, &job.arrival(), &soon()).unwrap();
            seats(&benched)
        });
        let note = String::from_utf8(job.store.get("test/door/2", &soon()).unwrap()).unwrap();
        assert!(note.starts_with("3 3\n") || note.starts_with("2:1 2\n"), "{note}");
        // The note is a reason to recover on the ranks of the mesh. The first note is no reason
        // any more.
        assert_eq!(members[0].0.epoch().door, 1);
        assert!(members[0].0.somebody_waits(&soon()).unwrap());
        again(&mut members);
        assert_eq!(benched.join().unwrap(), "seats=0-1,2:1,3 without=");
        newcomer.join().unwrap();
        // Both ranks may have knocked, and one of them after the rank that decided had read the
        // notes. Nobody who is in the mesh waits.
        let next = members[0].0.next_at_door();
        job.store.set(&next, note.as_bytes(), &soon()).unwrap();
        assert!(!members[0].0.somebody_waits(&soon()).unwrap());
    });
}

#[test]
fn what_a_newcomer_cannot_make_fails_on_all_ranks_and_its_next_call_meets_them() {
    let job = Job::new(2, 2);
    job.die_first(&[1]);
    std::thread::scope(|threads| {
        let newcomer = threads.spawn(|| {
            let mut newcomer = Newcomer::of(&job, 1, 1);
            let failure = Error::new(Status::Ccl, "out of memory");
            let error = newcomer.comes_in_with(|_| Err::<(), _>(failure.clone()), &soon()).unwrap_err();
            assert_eq!(error.message(), "rank 1 failed in epoch 1: out of memory");
            newcomer.comes_in().unwrap()
        });
        await_knock(&job, 1);
        let mut rank = job.rank(0);
        let error = recover(&mut rank, &job.arrival(), &soon()).unwrap_err();
        assert_eq!((error.status(), error.message()), (Status::Ccl, "rank 1 failed in epoch 1: out of memory"));
        // This rank calls with other options, of which the newcomer knows nothing.
        let terms = Terms { min_size: 2, ..Terms::default() };
        recover(&mut rank, &Arrival { terms: &terms, ..job.arrival() }, &soon()).unwrap();
        assert_eq!(seats(&rank), "seats=0,1:1 without=");
        assert_eq!(newcomer.join().unwrap().as_deref(), Some("epoch 2: seats=0,1:1 without="));
    });
}

/// A newcomer has waited at the door until its deadline, and is let in then. Its time for the mesh
/// begins with its seat, so it waits for the others, which are not done yet.
#[test]
fn a_newcomer_has_its_whole_time_for_the_mesh() {
    let mut job = Job::new(2, 2);
    job.terms.replace = Duration::from_secs(20);
    job.die_first(&[1]);
    let own = Wait::after(Duration::from_secs(2));
    let mut newcomer = Newcomer::of(&job, 1, 1);
    let late = newcomer.comes_in_with(|_| Ok(()), &Wait::after(Duration::from_millis(200))).unwrap_err();
    assert_eq!(late.status(), Status::Timeout);
    await_knock(&job, 1);
    std::thread::scope(|threads| {
        let other = threads.spawn(|| {
            let mut rank = job.rank(0);
            assert_eq!(rank.come(&job.arrival(), &soon()).unwrap(), Outcome::Epoch);
            // The newcomer is done first.
            job.store.get("test/turn/1/made/1:1", &soon()).unwrap();
            rank.make(Ok(()), &soon())
        });
        job.store.get("test/decision/1", &soon()).unwrap();
        std::thread::sleep(own.deadline.left() + Duration::from_millis(1));
        newcomer.comes_in_with(|_| Ok(()), &own).unwrap();
        assert_eq!(other.join().unwrap().unwrap(), Made::Whole);
    });
}

#[test]
fn a_mesh_grows_by_newcomers_beyond_it() {
    let mut job = Job::new(2, 2);
    job.terms.max_size = Some(4);
    let newcomers = |job: &Job, rank: i32| Newcomer::of(job, rank, 0).comes_in().unwrap();
    std::thread::scope(|threads| {
        let third = threads.spawn(|| newcomers(&job, 2));
        await_knock(&job, 1);
        let fourth = threads.spawn(|| newcomers(&job, 3));
        await_knock(&job, 2);
        let told = all_equal(job.recover(&[0, 1]));
        assert_eq!(told, "epoch 1: seats=0-3 without=");
        assert_eq!((third.join().unwrap(), fourth.join().unwrap()), (Some(told.clone()), Some(told)));
    });
    let text = String::from_utf8(job.store.get("test/decision/1", &soon()).unwrap()).unwrap();
    let Ok(Decision::Epoch(epoch)) = text.parse() else { panic!("{text}") };
    assert_eq!((epoch.size, epoch.replicas.sizes.as_slice(), epoch.stateless.len()), (4, &[4][..], 2));
}
