//! Processes die at random moments of recoveries, and others are started in their place, which may
//! die as well. In the end all processes that live are in one mesh, in full shape.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::deaths::dying;
use super::{Job, MESH, recover, seats};
use crate::error::{Error, Result};
use crate::rendezvous::agreement::recovery::{Arrival, AtDoor, Recovery, Request};
use crate::rendezvous::agreement::tests::{chance, soon};
use crate::rendezvous::agreement::{Replicas, now};
use crate::rendezvous::incarnation::Incarnation;
use crate::rendezvous::store::Store;

/// The error of a process that is dead.
const DEAD: &str = "this process is dead";

const SIZE: usize = 4;

/// The most processes that join under one rank. The last one does not die.
const TICKETS: u32 = 3;

/// A job whose processes come and go.
struct Elastic {
    job: Job,
    seed: u64,
    /// The epoch, with the seats, that each living process uses; `None` while the process
    /// recovers.
    living: Mutex<BTreeMap<Incarnation, Option<String>>>,
    /// Whether all processes that live use one mesh in full shape.
    is_done: AtomicBool,
    /// Whether the first process has died.
    has_begun: AtomicBool,
}

impl Elastic {
    fn chance(&self, me: Incarnation, salt: u64) -> u64 {
        chance(self.seed, me.rank as usize, u64::from(me.ticket) * 100 + salt)
    }

    /// The store of a process that dies after some operations. Rank 0 and the last process of each
    /// rank live.
    fn store_of(&self, me: Incarnation) -> Arc<dyn Store> {
        let dies = me.rank > 0 && me.ticket + 1 < TICKETS && self.chance(me, 1) % 4 > 0;
        let left = if dies { self.chance(me, 2) % 60 } else { u64::MAX } as usize;
        dying(self.job.store.clone(), left)
    }

    /// Runs a process until it dies, or the job is done. Then the next process of its rank starts.
    fn run(&self, rank: i32) {
        for ticket in 0..TICKETS {
            let me = Incarnation { rank, ticket };
            self.living.lock().unwrap().insert(me, None);
            let ended = self.live(me);
            self.living.lock().unwrap().remove(&me);
            match ended {
                Ok(()) => return,
                Err(error) if error.message() == DEAD => {
                    self.has_begun.store(true, Ordering::SeqCst);
                    // The store notices the death a little later.
                    sleep(Duration::from_micros(self.chance(me, 3) % 2000));
                    self.job.die(me);
                    sleep(Duration::from_micros(self.chance(me, 4) % 3000));
                }
                Err(error) => panic!("seed {}, process {me}: {error}", self.seed),
            }
        }
        panic!("seed {}: the last process of rank {rank} has died", self.seed);
    }

    fn live(&self, me: Incarnation) -> Result<()> {
        let mut recovery = self.job.process_over(self.store_of(me), me);
        let mut has_state = me.ticket == 0;
        if me == Incarnation::first(1 + self.seed as i32 % (SIZE as i32 - 1)) {
            sleep(Duration::from_micros(self.chance(me, 5) % 3000));
            return Err(Error::store(DEAD));
        }
        if me.ticket > 0 {
            let mut at_door = AtDoor::new(recovery, now());
            let request = Request { seat: me.rank as usize, mesh: MESH };
            again(|| at_door.come_in(&request, |_| Ok(()), |_| Ok(()), &soon()))?;
            recovery = at_door.into_recovery();
        }
        loop {
            if recovery.is_in_mesh() {
                // For each position the mesh has a rank with the state, and that rank sends the
                // state.
                has_state = true;
                if self.uses_mesh(me, &recovery) {
                    return Ok(());
                }
            }
            again(|| recover(&mut recovery, &Arrival { has_state, ..self.job.arrival() }, &soon()))?;
        }
    }

    /// Uses the mesh until there is a reason to recover. Returns whether the job is done. This
    /// function asks the store itself, so no process dies in this function.
    fn uses_mesh(&self, me: Incarnation, recovery: &Recovery) -> bool {
        let used = format!("epoch {}: {}", recovery.epoch_number(), seats(recovery));
        self.living.lock().unwrap().insert(me, Some(used));
        let store = &self.job.store;
        let known = |key: &str| store.try_get(key, &soon()).unwrap();
        let end = Instant::now() + Duration::from_secs(40);
        let is_done = loop {
            assert!(Instant::now() < end, "seed {}: {:?}", self.seed, self.living.lock().unwrap());
            if self.is_done.load(Ordering::SeqCst) {
                break true;
            }
            let in_mesh = recovery.epoch().in_mesh();
            let notes: Vec<String> = (1..)
                .map_while(|number| known(&format!("test/lost/{number}")))
                .map(|note| String::from_utf8(note).unwrap())
                .collect();
            let is_lost = |process: &Incarnation| notes.iter().any(|note| *note == process.to_string());
            let is_begun = notes.iter().any(|note| {
                let turn = note.strip_prefix("turn ").and_then(|rest| rest.split(' ').next()?.parse::<u64>().ok());
                turn.is_some_and(|turn| turn > recovery.epoch_number())
            });
            let somebody_waits = (recovery.epoch().door + 1..)
                .map_while(|number| known(&format!("test/door/{number}")))
                .filter_map(|note| String::from_utf8(note).unwrap().split(' ').next()?.parse().ok())
                .any(|process: Incarnation| !is_lost(&process));
            if is_begun || somebody_waits || in_mesh.iter().any(is_lost) {
                break false;
            }
            sleep(Duration::from_micros(300));
        };
        if !is_done {
            self.living.lock().unwrap().insert(me, None);
        }
        is_done
    }

    /// Waits until every rank has a process, and all of them use one mesh in full shape.
    fn await_done(&self) {
        let end = Instant::now() + Duration::from_secs(40);
        loop {
            assert!(Instant::now() < end, "seed {}: {:?}", self.seed, self.living.lock().unwrap());
            let living = self.living.lock().unwrap();
            let used: Vec<_> = living.values().collect();
            let is_one = used.iter().all(|one| one.is_some() && *one == used[0]);
            let is_whole = used.first().is_some_and(|one| one.as_ref().is_some_and(|one| one.ends_with("without=")));
            if living.len() == SIZE && is_one && is_whole && self.has_begun.load(Ordering::SeqCst) {
                self.is_done.store(true, Ordering::SeqCst);
                return;
            }
            drop(living);
            sleep(Duration::from_millis(1));
        }
    }
}

/// Repeats the call until enough replicas are there.
fn again<T>(mut call: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match call() {
            Err(error) if error.message().contains(" replicas along dimension ") => sleep(Duration::from_millis(2)),
            outcome => return outcome,
        }
    }
}

fn comes_to_one_mesh(seed: u64) {
    let mut job = Job::new(SIZE, SIZE);
    if seed % 3 == 1 {
        job.replicas = Replicas { sizes: vec![2, 2], dim: 0 };
    }
    // In every second job the ranks go on without those that are lost, and let them in later.
    job.terms.replace = Duration::from_millis(if seed % 2 == 0 { 20_000 } else { 0 });
    job.terms.any_state = true;
    let elastic = Elastic {
        job,
        seed,
        living: Mutex::default(),
        is_done: AtomicBool::default(),
        has_begun: AtomicBool::default(),
    };
    std::thread::scope(|threads| {
        for rank in 0..SIZE as i32 {
            let elastic = &elastic;
            threads.spawn(move || elastic.run(rank));
        }
        elastic.await_done();
    });
}

#[test]
fn processes_that_die_at_any_moment_are_replaced() {
    for seeds in (0..60).collect::<Vec<u64>>().chunks(6) {
        std::thread::scope(|threads| seeds.iter().for_each(|seed| drop(threads.spawn(|| comes_to_one_mesh(*seed)))));
    }
}
