//! Recovery: the mesh with which a job goes on after ranks were lost (docs/recovery.md).
//!
//! All living ranks of the world come to a turn, and wait until its decision stands in the store.
//! The decision says who goes on, and where. Each rank of the next mesh then makes its
//! communicators in the scopes of the new epoch, and all get one verdict on that. When a rank was
//! lost meanwhile, all go on to the next turn within the same call.
//!
//! A rank that is not in the mesh, because it is a spare or its replica is not whole, waits in the
//! call until it has a place in a mesh that was made, or until the job has ended.
//!
//! This file has the call and what a rank refuses before it begins. recover_turns.rs goes from turn
//! to turn, and next_mesh.rs makes the mesh of an epoch.

use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use super::create::mesh_text;
use super::next_mesh::{CALL, Job};
use super::options::RecoverOptions;
use super::recovering::{Beginning, Recovering, Way};
use super::refusal::on_refusal;
use super::root::{Life, RootComms};
use super::view::View;
use super::world::World;
use crate::error::{Error, Result};
use crate::rendezvous::{Recovery, note_begun_by_this_thread};
use crate::wait::{Deadline, Wait};

/// How long the store may take to hear of a refusal. The caller waits for that, and for no other
/// rank.
const TELL: Duration = Duration::from_secs(1);

/// How long a rank that knows no reason to recover waits for the news of one.
const NEWS: Duration = Duration::from_millis(200);

/// How often such a rank looks for news meanwhile.
const LOOK: Duration = Duration::from_millis(10);

impl View {
    /// The mesh with which the job goes on after ranks were lost. **Collective over the ranks of
    /// the world that live**, also those that are not in the mesh. Ends all root meshes of the
    /// world on this rank, as [`RootComms::abort`] does, unless this rank refuses the call. This
    /// view is the whole root mesh that the last recovery has given, or before the first recovery
    /// any root mesh. [`RootComms::recovered`] of the result says what the recovery has come to.
    ///
    /// A rank that is not in the mesh waits, without a limit, until it has a place. Where a rank of
    /// the mesh has no place in the next one, because a rank of its replica was lost, it gets a
    /// view that it is no member of.
    pub fn recover(&self, options: &RecoverOptions) -> Result<View> {
        self.tell_recover_if_refused(|| self.recover_or_refuse(options))
    }

    /// Runs `call`, which is a recovery of this mesh. If this rank refuses the call, the other
    /// ranks are told.
    pub(crate) fn tell_recover_if_refused<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let world = self.root_comms().world().filter(|world| !world.rendezvous().is_offline());
        let Some(world) = world.filter(|_| Error::check_fork().is_ok()) else { return call() };
        on_refusal(call, |error| {
            if !Recovering::is_busy(error) && world.alive().is_ok() {
                self.refuse_recovery(world, error);
            }
        })
    }

    /// Tells the other ranks that this one has refused its own call.
    fn refuse_recovery(&self, world: &World, error: &Error) {
        let root = self.root_comms();
        // A recovery of the job cannot begin at such a mesh, so nobody can be told.
        if root.mesh().ndim() == 0 {
            return;
        }
        // Another thread that recovers now is in the turn for this rank.
        let Ok(mut way) = world.recovering().lock() else { return };
        let known = way.as_ref().map_or(0, |way| way.recovery.epoch().replicas.dim);
        let Ok(way) = Way::begin(&mut way, world.rendezvous(), &beginning(root), known) else { return };
        if way.root == root.id() {
            note_begun_by_this_thread();
            way.recovery.refuse(error, &world.wait(TELL));
        }
    }

    fn recover_or_refuse(&self, options: &RecoverOptions) -> Result<View> {
        let root = self.root_comms();
        let Some(world) = root.world() else {
            return Err(Error::unsupported(format!(
                "dm_recover is collective, but {} was made over existing communicators without a world; pass dm_init_options.world",
                self.mesh().describe()
            )));
        };
        let index = self.check_recover(world, options)?;
        let mut way = world.recovering().lock()?;
        let way = Way::begin(&mut way, world.rendezvous(), &beginning(root), index)?;
        self.check_way(way, index, options)?;

        note_begun_by_this_thread();
        let wait = world.wait(options.timeout.unwrap_or(root.timeout()));
        if way.recovery.is_in_mesh() && root.life() == Life::Alive && !self.has_reason(&mut way.recovery, &wait) {
            return Err(Error::invalid_state(format!(
                "there is nothing to recover on {}: this rank knows of no lost rank, of no failed communicator and of nobody who waits to join",
                self.mesh().describe()
            )));
        }
        let mut job = Job { world, before: root, is_newcomer: false, index, options, wait };
        let wait = job.wait.clone();
        wait.outcome(job.go_on(way)).map(View::of_root)
    }

    /// Refuses what this rank alone can find wrong. Returns the number of the dimension of
    /// replicas.
    fn check_recover(&self, world: &World, options: &RecoverOptions) -> Result<usize> {
        let root = self.root_comms();
        if world.rendezvous().is_offline() {
            return Err(Error::unsupported("dm_recover: no rank of an offline world (DM_WORLD_OFFLINE) is ever lost"));
        }
        world.alive()?;
        if matches!(root.life(), Life::Finalized | Life::Shrunk) {
            root.alive()?;
        }
        if !world.rendezvous().can_recover()? {
            return Err(Error::unsupported(
                "dm_recover needs a store in which ranks decide by one operation: give dm_store_callbacks.compare_set, or use a server or a folder",
            ));
        }
        let is_root = Arc::ptr_eq(self.space(), root) && self.mesh().dim_names() == root.mesh().dim_names();
        if !is_root {
            return Err(Error::invalid(format!(
                "{} is a view of {}: pass the root mesh, which dm_root gives",
                self.mesh().describe(),
                root.mesh().describe()
            )));
        }
        root.library().map_or(Ok(()), |library| library.check_no_capture(CALL, None))?;
        if self.mesh().ndim() == 0 {
            return Err(Error::invalid(
                "the mesh has no dimension, so there is nothing along which it could go on without a rank",
            ));
        }
        options.check_dims(self.mesh().ndim())?;
        if options.silent.is_some() && options.min_size == 0 {
            return Err(Error::invalid(
                "silent_ms is given, but min_size is 0: a rank that is impatient could go on alone; say how many indices must be left",
            ));
        }
        let index = options.dim.as_deref().map_or(Ok(0), |dim| self.mesh().dim_index(dim))?;
        if options.max_size.is_some() && index > 0 && !options.any_state {
            return Err(Error::invalid(format!(
                "the mesh grows along its outermost dimension {}, whose new indices have no replica along {}: no rank has their state; pass DM_RECOVER_ANY_STATE, too, or make {} the outermost dimension",
                self.mesh().dim_name(0),
                self.mesh().dim_name(index),
                self.mesh().dim_name(index)
            )));
        }
        Ok(index)
    }

    /// Fails where the mesh or the options do not fit the recoveries before.
    fn check_way(&self, way: &Way, index: usize, options: &RecoverOptions) -> Result<()> {
        let (root, epoch) = (self.root_comms(), way.recovery.epoch());
        if way.root != root.id() {
            if root.is_of_past_epoch() {
                return Err(root.ended_by_recovery());
            }
            return Err(Error::invalid(format!(
                "{} is not the mesh that the last dm_recover gave, and no other mesh of the world is recovered: make it anew by dm_init",
                self.mesh().describe()
            )));
        }
        if epoch.replicas.dim != index {
            return Err(Error::invalid(format!(
                "dim is {}, but earlier recoveries of this job were along {}: pass {1} again, because places that are still empty belong to an index of {1}",
                self.mesh().dim_name(index),
                self.mesh().dim_name(epoch.replicas.dim)
            )));
        }
        let count = epoch.replicas.count();
        if options.min_size > count {
            return Err(Error::invalid(format!(
                "min_size is {}, but dimension {} has size {count} in its full shape",
                options.min_size,
                self.mesh().dim_name(index)
            )));
        }
        Ok(())
    }

    /// Whether this rank knows a reason to recover this mesh, which is alive, or hears of one
    /// within a moment. Other ranks may have learned of a loss some milliseconds before.
    fn has_reason(&self, recovery: &mut Recovery, wait: &Wait) -> bool {
        let root = self.root_comms();
        let until = Deadline::after(NEWS);
        loop {
            let has_failed = root.communicators().iter().any(|communicator| communicator.has_failed());
            // Where the store does not answer, the turn says what is wrong.
            if has_failed || recovery.is_due(wait).unwrap_or(true) || root.has_departures(wait) {
                return true;
            }
            if until.passed() || wait.look_around().is_err() {
                return false;
            }
            sleep(LOOK);
        }
    }
}

/// Returns the beginning of a rank's way at this root mesh.
fn beginning(root: &RootComms) -> Beginning<'_> {
    Beginning { id: root.id(), mesh: root.mesh(), text: mesh_text(root) }
}
