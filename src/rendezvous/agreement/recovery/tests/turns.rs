//! A turn ends the calls in which ranks wait, and the scopes of the epoch before.

use std::sync::mpsc::{Receiver, channel};

use super::*;
use crate::rendezvous::agreement::{Scope, TakenForLost};
use crate::rendezvous::store::Hooked;

/// One rank, with a scope in which it makes collective calls.
struct Rank {
    recovery: Recovery,
    losses: Arc<Losses>,
    scope: Scope,
}

impl Rank {
    /// Returns rank `me` of the job, in a scope of these ranks.
    fn new(job: &Job, me: i32, ranks: &[i32]) -> Rank {
        Rank::over(Arc::new(job.store.clone()), job, me, ranks)
    }

    fn over(store: Arc<dyn Store>, job: &Job, me: i32, ranks: &[i32]) -> Rank {
        let losses = Arc::new(Losses::none(Arc::clone(&store), "test"));
        let all = Members::All(job.size);
        let left = ScopeKeys::new(&all, &job.leftovers, None);
        let of_world = membership(Arc::clone(&store), Arc::clone(&losses), all, me as usize);
        let first = Epoch::first(job.size, job.replicas.clone(), &job.seats);
        let recovery = Recovery::new(Membership { left, ..of_world }, Incarnation::first(me), first);
        let members = Members::Listed(ranks.into());
        let left = ScopeKeys::new(&members, &job.leftovers, Some(0));
        let position = members.position(me).unwrap();
        let of_scope = membership(store, Arc::clone(&losses), members, position);
        let scope = Scope::new(Membership { left, ..of_scope }, "test/some".to_owned());
        Rank { recovery, losses, scope }
    }

    /// Makes a call on which all ranks of the scope agree, and ends it.
    fn barrier(&self) -> Result<()> {
        self.scope.agree("dm_barrier()", &soon())?.finish(&soon())
    }
}

/// Waits until the rank at `position` waits in call `number`.
fn await_in_call(job: &Job, number: u64, position: usize) {
    job.store.get(&format!("test/some/{number}/here/{position}"), &soon()).unwrap();
}

fn is_told(error: &Error, by: i32, call: &str) {
    let expected =
        format!("{call} has ended, because rank {by} has begun recovery 1 of the job, for which all ranks are needed");
    assert_eq!((error.status(), error.message()), (Status::PeerLost, expected.as_str()));
    assert_eq!((error.ranks(), error.lost()), (&[by][..], &[][..]));
}

#[test]
fn a_call_that_waits_for_a_rank_ends_when_that_rank_or_another_one_comes_to_the_turn() {
    let job = Job::new(3, 3);
    std::thread::scope(|threads| {
        // Rank 2 has no part in the call, in which ranks 0 and 1 must meet.
        let waiting = threads.spawn(|| {
            let mut rank = Rank::new(&job, 0, &[0, 1]);
            is_told(&rank.barrier().unwrap_err(), 2, "dm_barrier() as call 0");
            // A further call is refused at once, and leaves nothing.
            is_told(&rank.barrier().unwrap_err(), 2, "dm_barrier() as call 1");
            assert!(!job.store.keys().iter().any(|key| key.starts_with("test/some/1/")));
            recover(&mut rank.recovery, &job.arrival(), &soon()).unwrap()
        });
        await_in_call(&job, 0, 0);
        let comes = threads.spawn(|| recover(&mut job.rank(2), &job.arrival(), &soon()).unwrap());
        job.await_here(1, "0");
        // Rank 1 was busy with something else. Rank 1 finds the verdict.
        let mut late = Rank::new(&job, 1, &[0, 1]);
        is_told(&late.barrier().unwrap_err(), 2, "dm_barrier() as call 0");
        recover(&mut late.recovery, &job.arrival(), &soon()).unwrap();
        assert_eq!((waiting.join().unwrap(), comes.join().unwrap()), (Outcome::Epoch, Outcome::Epoch));
    });
}

/// The rank that serves the store would wait in vain for ranks that are not in the call, and hold
/// up the recovery.
#[test]
fn the_rank_that_serves_waits_for_no_reader_of_a_turn() {
    let job = Job::new(3, 3);
    std::thread::scope(|threads| {
        let waiting = [0, 1].map(|me| {
            let mut rank = Rank::new(&job, me, &[0, 1, 2]);
            let membership = Arc::get_mut(&mut rank.scope.membership).unwrap();
            (membership.served, membership.serving) = (true, me == 0);
            threads.spawn(move || is_told(&rank.barrier().unwrap_err(), 2, "dm_barrier() as call 0"))
        });
        await_in_call(&job, 0, 0);
        await_in_call(&job, 0, 1);
        let short = Wait::after(Duration::from_millis(50));
        job.rank(2).come(&job.arrival(), &short).unwrap_err();
        waiting.into_iter().for_each(|rank| rank.join().unwrap());
    });
    assert!(!job.store.keys().iter().any(|key| key.contains("/some/0/read")), "{:?}", job.store.keys());
}

#[test]
fn the_work_of_a_call_ends_when_a_rank_comes_to_the_turn() {
    let job = Job::new(2, 2);
    std::thread::scope(|threads| {
        let waiting = threads.spawn(|| {
            let rank = Rank::new(&job, 0, &[0, 1]);
            let round = rank.scope.agree("dm_flatten()", &soon()).unwrap();
            is_told(&round.fetch("id", 1, &soon()).unwrap_err(), 1, "dm_flatten() as call 0");
            // A rank that makes a communicator asks this now and then.
            is_told(&round.failed(&soon()).unwrap().unwrap(), 1, "dm_flatten() as call 0");
        });
        let mut rank = Rank::new(&job, 1, &[0, 1]);
        drop(rank.scope.agree("dm_flatten()", &soon()).unwrap());
        let short = Wait::after(Duration::from_millis(50));
        let error = rank.recovery.come(&job.arrival(), &short).unwrap_err();
        assert_eq!((error.status(), error.ranks()), (Status::Timeout, &[0][..]));
        waiting.join().unwrap();
    });
}

/// A recovery that fails leaves the epoch as it was. The next calls of the ranks meet, although
/// some of them were in a call when the turn began, and others were not.
#[test]
fn calls_meet_after_a_recovery_that_has_failed() {
    let job = Job::new(3, 3);
    let other = Terms { min_size: 2, ..Terms::default() };
    std::thread::scope(|threads| {
        let (told, news) = channel();
        let rank = |me: i32, terms: Terms, news: Option<Receiver<()>>| {
            let (job, told) = (&job, told.clone());
            threads.spawn(move || {
                let mut rank = Rank::new(job, me, &[0, 1, 2]);
                if me == 0 {
                    is_told(&rank.barrier().unwrap_err(), 1, "dm_barrier() as call 0");
                    told.send(()).unwrap();
                }
                if let Some(news) = news {
                    // This rank learns of the turn without being in a call.
                    news.recv_timeout(Duration::from_secs(20)).unwrap();
                    rank.losses.refresh(&soon()).unwrap();
                    is_told(&rank.barrier().unwrap_err(), 1, "dm_barrier() as call 0");
                }
                let error = rank.recovery.come(&Arrival { terms: &terms, ..job.arrival() }, &soon()).unwrap_err();
                assert_eq!(error.status(), Status::Mismatch, "{error}");
                rank.barrier().unwrap();
                rank.barrier().unwrap();
                rank.scope.calls_begun()
            })
        };
        let first = rank(0, Terms::default(), None);
        await_in_call(&job, 0, 0);
        let second = rank(1, Terms::default(), None);
        let third = rank(2, other.clone(), Some(news));
        let begun = [first, second, third].map(|rank| rank.join().unwrap());
        assert_eq!(begun, [3, 3, 3]);
    });
}

/// Rank 1 was the first to come, and hangs before it tells the others.
#[test]
fn a_rank_that_waits_tells_of_the_turn_where_the_first_one_has_not() {
    let job = Job::new(3, 3);
    let options = "1\nends=0 dim=0 replace=0 silent=- min_size=0 max_size=- any_state=0\n0\n\ndm_recover()";
    job.store.set("test/turn/1/options", options.as_bytes(), &soon()).unwrap();
    std::thread::scope(|threads| {
        let waiting = threads.spawn(|| {
            let mut rank = Rank::new(&job, 0, &[0, 1]);
            is_told(&rank.barrier().unwrap_err(), 2, "dm_barrier() as call 0");
            recover(&mut rank.recovery, &job.arrival(), &soon()).unwrap()
        });
        await_in_call(&job, 0, 0);
        let comes = threads.spawn(|| recover(&mut job.rank(2), &job.arrival(), &soon()).unwrap());
        job.await_here(1, "0");
        recover(&mut job.rank(1), &job.arrival(), &soon()).unwrap();
        assert_eq!((waiting.join().unwrap(), comes.join().unwrap()), (Outcome::Epoch, Outcome::Epoch));
    });
}

/// The model has found this case: the others would go on to use a mesh that two ranks have left.
#[test]
fn a_rank_that_proposes_a_failure_tells_of_the_turn() {
    let job = Job::new(3, 3);
    let options = "1\nends=0 dim=0 replace=0 silent=- min_size=2 max_size=- any_state=0\n0\n\ndm_recover()";
    job.store.set("test/turn/1/options", options.as_bytes(), &soon()).unwrap();
    std::thread::scope(|threads| {
        let waiting = threads.spawn(|| Rank::new(&job, 0, &[0, 1]).barrier().unwrap_err());
        await_in_call(&job, 0, 0);
        let error = job.rank(2).come(&job.arrival(), &soon()).unwrap_err();
        assert_eq!(error.status(), Status::Mismatch);
        is_told(&waiting.join().unwrap(), 2, "dm_barrier() as call 0");
    });
}

#[test]
fn no_call_goes_on_in_a_scope_of_an_earlier_epoch() {
    let job = Job::new(2, 2);
    let ranks = [0, 1].map(|me| Rank::new(&job, me, &[0, 1]));
    let left = std::thread::scope(|threads| {
        let recover = |mut rank: Rank| {
            let arrival = job.arrival();
            threads.spawn(move || {
                recover(&mut rank.recovery, &arrival, &soon()).unwrap();
                rank.losses.turns().enter(1);
                rank
            })
        };
        ranks.map(recover).map(|rank| rank.join().unwrap())
    });
    let keys = job.store.keys();
    for rank in left {
        let errors = [
            rank.barrier().unwrap_err(),
            rank.scope.agree_on_lost("dm_shrink()", TakenForLost::default(), &soon()).map(drop).unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.status(), Status::Aborted);
            let message = "this mesh belongs to epoch 0, and the job is in epoch 1: use the mesh of epoch 1";
            assert_eq!(error.message(), message);
        }
        rank.scope.tell_refusal("dm_barrier", &Error::invalid("a wrong argument"), &soon());
    }
    assert_eq!(job.store.keys(), keys, "such calls leave nothing");
}

/// Once the mesh of an epoch is made, all keys of the earlier epochs are removed: those of scopes
/// that are in use, of scopes that were dropped, and of calls that have failed.
#[test]
fn the_keys_of_ended_epochs_go() {
    let job = Job::new(2, 2);
    std::thread::scope(|threads| {
        let other = threads.spawn(|| {
            let mut rank = Rank::new(&job, 1, &[0, 1]);
            rank.barrier().unwrap();
            is_told(&rank.barrier().unwrap_err(), 0, "dm_barrier() as call 1");
            drop(std::mem::replace(&mut rank.scope, Rank::new(&job, 1, &[1]).scope));
            recover(&mut rank.recovery, &job.arrival(), &soon()).unwrap();
        });
        let mut rank = Rank::new(&job, 0, &[0, 1]);
        rank.barrier().unwrap();
        await_in_call(&job, 1, 1);
        recover(&mut rank.recovery, &job.arrival(), &soon()).unwrap();
        other.join().unwrap();
    });
    let stays = ["test/decided", "test/decision/1", "test/decision/1/verdict", "test/lost", "test/lost/1"];
    assert_eq!(job.store.keys(), stays);
}

/// Recoveries cost nothing while nothing is wrong: a wait asks for its value, the verdict and the
/// next loss, as before there were recoveries. A store that is polled is asked for each key again
/// and again.
///
/// A call that has waited for 250 ms looks for deadlocks, which costs further operations. On a busy
/// machine this call may wait so long. The operations of such a look have a wait without a watch.
#[test]
fn a_call_costs_as_many_operations_as_before() {
    let job = Job::new(2, 2);
    let log: Arc<Mutex<Vec<String>>> = Arc::default();
    let noted = Arc::clone(&log);
    std::thread::scope(|threads| {
        threads.spawn(|| Rank::new(&job, 0, &[0, 1]).barrier().unwrap());
        let before = move |operation: &str, keys: usize, wait: &Wait| {
            if operation != "delete" && wait.watch.is_some() {
                noted.lock().unwrap().push(format!("{operation} {keys}"));
            }
            Ok(())
        };
        let store = Hooked { store: job.store.clone(), before };
        let watched = Wait { watch: Some(Arc::new(|| Ok(()))), ..soon() };
        let rank = Rank::over(Arc::new(store), &job, 1, &[0, 1]);
        rank.scope.agree("dm_barrier()", &watched).unwrap().finish(&watched).unwrap();
    });
    // There are two phases. Each has `here`, the count and the verdict, and the first one also has
    // the text of rank 0. The last rank to be counted writes the verdict, and the other one waits
    // for it.
    let log: Vec<String> = log.lock().unwrap().iter().map(|one| one.replace("set_once 1", "wait 2")).collect();
    assert_eq!(log, ["set 1", "wait 3", "add 1", "wait 2", "set 1", "add 1", "wait 2"]);
}
