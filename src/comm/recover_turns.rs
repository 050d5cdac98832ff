//! The turns of one recovery: this rank ends its part of the mesh, comes to a turn, enters the
//! epoch of its decision, and comes to the next turn where a rank was lost meanwhile.
//! docs/recovery.md says what a turn is; the turns of threads (turn.rs) are something else.

use std::sync::Arc;
use std::time::Duration;

use super::call::Call;
use super::names::{name_text, names_text};
use super::next_mesh::{CALL, Job, tell_recovered};
use super::options::{MeshOptions, RecoverOptions};
use super::recovering::Way;
use super::root::RootComms;
use super::world_end::ends_world;
use crate::error::{Error, Result};
use crate::rendezvous::{Arrival, Made, Outcome, Recovery, Terms};

/// The outcome of making the mesh of an epoch.
enum Entered {
    /// All ranks of the mesh have made it.
    Mesh(Arc<RootComms>),
    /// A rank of the mesh was lost meanwhile, so the next turn is due. The value holds the ranks
    /// that the communicators of the mesh blame.
    Broken(Vec<i32>),
}

impl Job<'_> {
    /// Ends the meshes of the epoch, and comes to one turn after another until a mesh was made. A
    /// rank that was not in the mesh before continues until a mesh was made in which it has a
    /// place. Returns that mesh. Fails with the error of a decision, and when the job has ended.
    /// The caller holds the lock of [`Recovering`](super::recovering::Recovering).
    pub(super) fn go_on(&mut self, way: &mut Way) -> Result<Arc<RootComms>> {
        let recovery = &mut way.recovery;
        let was_in_mesh = recovery.is_in_mesh();
        // While a rank is not in the mesh, the others train on. So such a rank has no state when it
        // gets a place.
        let mut has_state = recovery.is_stateful() || (was_in_mesh && self.options.has_state);
        // After a recovery that failed this process may be in a later epoch than the mesh. Then
        // other processes hold the places of the ranks that the communicators of the mesh blame.
        let is_of_past = self.before.is_of_past_epoch();
        let mut blamed = if is_of_past { Vec::new() } else { self.before.lost_in_communicators() };
        let terms = terms_of(self.index, self.options);
        self.world.end_epoch();
        loop {
            // The full shape, which the text has, may have grown since the turn before.
            let call = self.text(recovery);
            let (lost, suspects) = self.facts_and_suspicions(&blamed);
            let arrival = Arrival { call: &call, terms: &terms, has_state, lost, suspects };
            recovery.watch_call(self.keys_of_call(recovery)?);
            match recovery.come(&arrival, &self.wait)? {
                Outcome::Epoch => {}
                Outcome::Ended => return Err(self.ended()),
                Outcome::Called => {
                    self.answer(recovery, &call)?;
                    continue;
                }
            }
            match self.enter(recovery)? {
                Entered::Mesh(root) if was_in_mesh || recovery.is_in_mesh() => {
                    root.id().clone_into(&mut way.root);
                    tell_recovered(&root);
                    return Ok(root);
                }
                Entered::Mesh(_) => has_state = false,
                Entered::Broken(ranks) => blamed = ranks,
            }
        }
    }

    /// Enters the epoch to which this rank has come, and makes its mesh together with the others. A
    /// waiting rank that got a seat in this epoch calls this, too. A newcomer does not:
    /// `Rendezvous::come_in` does this work for it.
    fn enter(&self, recovery: &mut Recovery) -> Result<Entered> {
        self.world.rendezvous().enter_epoch(recovery)?;
        let made = self.make(recovery);
        match recovery.make(made.as_ref().map(|_| ()), &self.wait) {
            Ok(Made::Whole) => made.map(Entered::Mesh),
            Ok(Made::Broken) => {
                let blamed = made.map_or_else(|_| Vec::new(), |root| root.lost_in_communicators());
                self.world.end_epoch();
                Ok(Entered::Broken(blamed))
            }
            Err(error) => {
                self.world.end_epoch();
                Err(error)
            }
        }
    }

    /// Splits the ranks that communicators blame into those that are lost for certain and those
    /// that may be lost. On one host the engine sees that a process has ended. On several hosts it
    /// may only be unable to reach a rank that lives.
    fn facts_and_suspicions<'a>(&self, blamed: &'a [i32]) -> (&'a [i32], &'a [i32]) {
        match self.world.rendezvous().shares_memory() {
            Some(true) => (blamed, &[]),
            _ => (&[], blamed),
        }
    }

    /// Returns the text on which the ranks of the mesh must agree, beside the terms. The shape is
    /// the full one: a rank that has waited may have the handle of an earlier mesh, and may be in
    /// the mesh of an epoch whose making broke.
    fn text(&self, recovery: &Recovery) -> String {
        let mesh = self.before.mesh();
        let shape: Vec<String> = recovery.epoch().replicas.sizes.iter().map(usize::to_string).collect();
        format!(
            "{CALL}(shape=({}), names=({}), dim={}{})",
            shape.join(", "),
            names_text(&mesh.dim_names()),
            name_text(mesh.dim_name(self.index)),
            MeshOptions::default().dims(self.options.dims.clone()).agreed()
        )
    }

    /// The keys that say that the mesh has made a call of the whole world, which waits for this
    /// rank, or that such a call has ended without this rank. A rank that is not in the mesh is
    /// needed only in epoch 0. Other ranks that wait for a place begin no call by themselves, so
    /// this rank looks for a rank of the mesh.
    fn keys_of_call(&self, recovery: &Recovery) -> Result<Vec<String>> {
        match recovery.epoch_number() == 0 && !recovery.is_in_mesh() {
            true => Ok(self.world.rendezvous().scope()?.keys_of_next_call(first_of_mesh(recovery)).into()),
            false => Ok(Vec::new()),
        }
    }

    /// The ranks of the mesh have made a call of the world while this rank waits for a place. If
    /// the call is dm_world_finalize, which ends the job, this rank takes part in it. Any other
    /// call fails on its callers with a mismatch, and this rank goes on waiting. This rank also
    /// goes on waiting where the call has ended without it.
    fn answer(&self, recovery: &Recovery, call: &str) -> Result<()> {
        let wait = self.world.wait(self.world.rendezvous().timeout());
        let scope = self.world.rendezvous().scope()?;
        let answered = match scope.next_call(first_of_mesh(recovery), &wait)? {
            None => return Ok(()),
            Some(text) if ends_world(&text) => match self.world.end_with_others(&wait) {
                Ok(()) => return Err(self.ended()),
                Err(error) => Err(error),
            },
            Some(_) => Call::begin(self.world, None, wait)?.agree(&scope, call).map(drop),
        };
        if let Err(error) = answered {
            self.world.alive()?;
            log::warn!("rank {}: goes on waiting for a place: {}", self.world.rank(), error.message());
        }
        self.world.alive()
    }

    /// Ends the world on this rank, because the job has ended.
    fn ended(&self) -> Error {
        self.world.end_alone();
        Error::aborted("the job has ended: its ranks have called dm_world_finalize while this rank waited for a place")
    }
}

/// Returns the terms of these options, for replicas along the dimension with this index.
fn terms_of(dim: usize, options: &RecoverOptions) -> Terms {
    let RecoverOptions { replace, silent, min_size, max_size, any_state, .. } = *options;
    let (replace, silent) = (whole_millis(replace), silent.map(whole_millis));
    Terms { ends: false, dim, replace, silent, min_size, max_size, any_state }
}

/// Returns this time in whole milliseconds, rounded up: the ranks compare their terms as texts,
/// which have the milliseconds as numbers of 64 bits.
fn whole_millis(time: Duration) -> Duration {
    let millis = time.as_nanos().div_ceil(1_000_000);
    Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX))
}

/// Returns the first rank of the mesh of the recovery's epoch.
fn first_of_mesh(recovery: &Recovery) -> i32 {
    recovery.epoch().in_mesh().first().map_or(0, |process| process.rank)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use ndarray::arr1;

    use super::*;
    use crate::comm::two_ranks::ranks_over;
    use crate::comm::view::View;
    use crate::comm::world::World;
    use crate::comm::world_options::WorldOptions;
    use crate::error::Status;
    use crate::rendezvous::store::MemoryStore;
    use crate::rendezvous::{Join, JoinOptions};
    use crate::wait::{Deadline, Wait};

    /// A rank compares its own terms with those that it reads in the store.
    #[test]
    fn terms_of_any_times_are_read_as_they_are_written() {
        for (time, millis) in [
            (Duration::from_micros(1), 1),
            (Duration::from_micros(2500), 3),
            (Duration::from_millis(7), 7),
            (Duration::MAX, u64::MAX),
        ] {
            let terms = terms_of(0, &RecoverOptions::default().replace(time).silent(time, 1));
            assert_eq!(terms.to_string().parse(), Ok(terms.clone()), "{time:?}");
            assert_eq!((terms.replace, terms.silent), (Duration::from_millis(millis), Some(terms.replace)), "{time:?}");
        }
    }

    /// Ranks 0 and 1 are spares, and rank 0 comes after the mesh has given up two calls for want of
    /// it.
    #[test]
    fn spares_of_any_rank_take_part_in_the_end_also_after_they_were_late() {
        let given_up = AtomicUsize::new(0);
        ranks_over(4, Arc::new(MemoryStore::new()), |world| {
            let mesh = View::from_rank_array(world, arr1(&[2, 3]).view(), &["dp"]).unwrap();
            if world.rank() < 2 {
                let patience = Deadline::after(Duration::from_secs(20));
                while world.rank() == 0 && given_up.load(Ordering::SeqCst) < 4 && !patience.passed() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let ended = mesh.recover(&RecoverOptions::default()).map(drop).unwrap_err();
                return assert_eq!(ended.status(), Status::Aborted, "{ended}");
            }
            let late = [(); 2].map(|()| {
                let late = world.finalize(Some(Duration::from_millis(200))).map_err(|error| error.ranks().to_vec());
                given_up.fetch_add(1, Ordering::SeqCst);
                late
            });
            let ended = world.finalize(Some(Duration::from_secs(10)));
            if ended.is_err() {
                // The spares wait for as long as a rank of the mesh is there.
                let _ = world.abort();
            }
            assert_eq!(late, [(); 2].map(|()| Err(vec![0])));
            ended.unwrap();
        });
    }

    /// Waits until the store has a key that ends so.
    fn await_key(store: &MemoryStore, end: &str) {
        let patience = Deadline::after(Duration::from_secs(20));
        while !store.keys().iter().any(|key| key.ends_with(end)) {
            assert!(!patience.passed(), "the store has no key that ends with {end}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Rank 2 is a spare that waits while the mesh grows by rank 3. It gets the place of rank 1 in
    /// a mesh whose making breaks, because rank 3 is lost.
    #[test]
    fn a_spare_that_has_waited_while_the_mesh_grew_names_the_shape_of_the_others() {
        let store = MemoryStore::new();
        let options = RecoverOptions::default().replace(Duration::from_millis(1)).grow(3);
        let run = |rank: usize, size: usize, how: Join, ranks: &[i32]| {
            let join = JoinOptions::ranked(rank, size).store(Arc::new(store.clone())).join(how);
            let join = join.timeout(Duration::from_secs(30));
            let world = Arc::new(World::join("cpu", &WorldOptions::new(join)).unwrap());
            let mesh = View::from_rank_array(&world, arr1(ranks).view(), &["dp"]).unwrap();
            (world, mesh)
        };
        std::thread::scope(|threads| {
            let first = [0, 1].map(|rank| {
                let (run, store, options) = (&run, &store, &options);
                threads.spawn(move || {
                    let (world, mesh) = run(rank, 3, Join::New, &[0, 1]);
                    await_key(store, "/door/1");
                    let grown = mesh.recover(options).unwrap();
                    assert_eq!(grown.mesh().root_ranks(), [0, 1, 3]);
                    if rank == 1 {
                        return world.abort().unwrap();
                    }
                    await_key(store, "/turn/2/here/2");
                    let left = grown.recover(options).unwrap();
                    assert_eq!(left.mesh().root_ranks(), [0, 2]);
                })
            });
            let spare = threads.spawn(|| {
                let (_world, mesh) = run(2, 3, Join::New, &[0, 1]);
                let left = mesh.recover(&options).unwrap();
                assert_eq!(left.mesh().root_ranks(), [0, 2]);
            });
            let newcomer = threads.spawn(|| {
                await_key(&store, "/running");
                let (world, mesh) = run(3, 4, Join::Running, &[0, 1, 3]);
                await_key(&store, "/turn/2/here/2");
                let (before, wait) = (mesh.root_comms(), Wait::after(Duration::from_secs(20)));
                let job = Job { world: &world, before, is_newcomer: false, index: 0, options: &options, wait };
                let mut way = world.recovering().lock().unwrap();
                let recovery = &mut way.as_mut().unwrap().recovery;
                let (call, terms) = (job.text(recovery), terms_of(0, &options));
                let arrival = Arrival { call: &call, terms: &terms, has_state: true, lost: &[], suspects: &[] };
                assert_eq!(recovery.come(&arrival, &job.wait).unwrap(), Outcome::Epoch);
                world.rendezvous().leave();
            });
            first.into_iter().for_each(|rank| rank.join().unwrap());
            spare.join().unwrap();
            newcomer.join().unwrap();
        });
    }
}
