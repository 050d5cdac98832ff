//! The mesh of the next epoch, as each of its ranks makes it: its layout, its communicators, and
//! what the recovery has come to.

use std::sync::Arc;

use super::call::Call;
use super::create::as_weak;
use super::dims::{SharedComms, WantedDims, make_dims};
use super::names::{names_text, ranks_text};
use super::options::{DimOptions, MeshOptions, RecoverOptions};
use super::path::{from_text, to_text};
use super::recovered::Recovered;
use super::recovering::first_epoch;
use super::root::{RootComms, RootSpec};
use super::view::View;
use super::world::World;
use crate::error::{Error, Result};
use crate::events::{Kind, publish};
use crate::rank_list::ranges;
use crate::rendezvous::Recovery;
use crate::wait::Wait;

/// The name of the call, for messages and for what the ranks agree on.
pub(super) const CALL: &str = "dm_recover";

/// One call of dm_recover, or the dm_init of a process that joins a running job.
pub(super) struct Job<'a> {
    pub(super) world: &'a Arc<World>,
    /// The root mesh that was passed. A newcomer has none, so it has the mesh that its dm_init asks
    /// for, which belongs to no world and has no communicators.
    pub(super) before: &'a Arc<RootComms>,
    /// Whether this process is a newcomer.
    pub(super) is_newcomer: bool,
    /// The number of the dimension of replicas.
    pub(super) index: usize,
    pub(super) options: &'a RecoverOptions,
    /// How long the call may take, and what ends it early.
    pub(super) wait: Wait,
}

impl Job<'_> {
    /// Makes the mesh of the epoch that was entered: its communicators where this rank is in it.
    pub(super) fn make(&self, recovery: &Recovery) -> Result<Arc<RootComms>> {
        let (epoch, number) = (recovery.epoch(), recovery.epoch_number());
        let mut shape = epoch.replicas.sizes.clone();
        shape[epoch.replicas.dim] -= epoch.without.len();
        let seats = epoch.seats.iter().enumerate();
        let in_mesh = seats.filter(|(seat, _)| !epoch.without.contains(&epoch.replicas.replica_of(*seat)));
        let ranks: Vec<i32> = in_mesh.filter_map(|(_, holder)| Some(holder.as_ref()?.rank)).collect();
        let mesh = self.before.mesh().like(&shape, &ranks, self.world.size().max(epoch.size))?;
        let dims = match self.options.dims.is_empty() {
            true => self.before.options_of_dims().to_vec(),
            false => self.options.dims.clone(),
        };
        let root = RootComms::new(RootSpec {
            world: Some(Arc::clone(self.world)),
            library: self.before.library().cloned(),
            mesh,
            id: id_of_epoch(number),
            is_lazy: self.before.is_lazy(),
            timeout: self.before.timeout(),
            outer: None,
            options: dims.clone(),
        })?;
        self.world.register(as_weak(&root));
        let known = || self.before.recovered().members.clone();
        let first = || first_epoch(self.world.rendezvous(), self.before.mesh(), self.index);
        let members_before = (!self.is_newcomer).then(|| known().unwrap_or_else(first));
        let before = members_before.as_ref().map(|members| (self.before.mesh(), self.before.epoch(), members));
        root.set_recovered(Recovered::of((number, epoch), root.mesh(), before));
        match root.mesh().is_member() {
            true => self.make_comms(&root, recovery, &dims)?,
            false => root.set_made(self.before.made()),
        }
        Ok(root)
    }

    /// Makes the communicators of the next mesh, and those of the dimensions that were made on the
    /// mesh before. The communicators of the next mesh come from a fresh id, which always works:
    /// the mesh before may have failed, and ranks may be new. A rank that has joined does not know
    /// which dimensions were made, and a rank whose last call was aborted may lack one. So all
    /// ranks take the list of one rank that has not joined.
    fn make_comms(&self, root: &Arc<RootComms>, recovery: &Recovery, dims: &[DimOptions]) -> Result<()> {
        let (mesh, stateless) = (root.mesh(), &recovery.epoch().stateless);
        let ranks = mesh.root_ranks();
        let has_joined = |rank: i32| stateless.iter().any(|process| process.rank == rank);
        let teller = ranks.iter().copied().find(|rank| !has_joined(*rank)).unwrap_or(ranks[0]);
        let shape: Vec<String> = mesh.shape().iter().map(usize::to_string).collect();
        let text = format!(
            "{CALL}(epoch={}, shape=({}), names=({}), ranks={}{})",
            root.epoch(),
            shape.join(", "),
            names_text(&mesh.dim_names()),
            ranks_text(&ranks),
            MeshOptions { lazy: root.is_lazy(), ..MeshOptions::default().dims(dims.to_vec()) }.agreed()
        );
        log::warn!("rank {}: goes on in epoch {} with {} ranks: {text}", mesh.rank(), root.epoch(), mesh.size());
        let scope = self.world.rendezvous().scope()?;
        let wanted = WantedDims::all_of(mesh, |index| dims.get(index).cloned().unwrap_or_default());
        let wait = self.wait.with_deadline(recovery.deadline(&self.wait));
        let call = Call::begin(self.world, None, wait.clone())?.agree(&scope, &text)?;
        let own = self.before.made();
        let told = call.run(|work| {
            make_dims(work, root, root, &wanted, &SharedComms::none(&wanted))?;
            let (text, wait) = (to_text(&own), work.peers.wait());
            match work.peers.round().filter(|_| ranks.len() > 1) {
                Some(round) if teller == mesh.rank() => round.publish("made", text.as_bytes(), wait)?,
                Some(round) => return round.fetch("made", teller, wait),
                None => {}
            }
            Ok(text.into_bytes())
        })?;
        let made = from_text(&told, &own, stateless.is_empty())
            .ok_or_else(|| Error::store(format!("rank {teller} has told of its dimensions in an unreadable text")))?;
        let view = View::of_root(Arc::clone(root));
        made.iter().try_for_each(|made| view.make_again(made, wait.deadline.left()))?;
        root.set_made(made);
        Ok(())
    }
}

/// Returns the id of the root mesh of an epoch.
pub(super) fn id_of_epoch(number: u64) -> String {
    format!("recovery{number}")
}

/// Publishes the events of the recovery that made this mesh.
pub(super) fn tell_recovered(root: &RootComms) {
    let (mesh, Recovered { epoch, lost_ranks, joined_ranks, .. }) = (root.mesh(), root.recovered());
    let lost = match lost_ranks.len() {
        0 => String::new(),
        1 => format!("; {} was lost", ranges(lost_ranks)),
        _ => format!("; {} were lost", ranges(lost_ranks)),
    };
    let role = if mesh.is_member() { "goes on" } else { "waits for a place" };
    publish(|| {
        let (me, size) = (mesh.rank(), mesh.root_size());
        let message = format!("rank {me}: {role} in epoch {epoch}, whose mesh has {size} ranks{lost}");
        root.event(Kind::Recovered, message).about(lost_ranks.clone())
    });
    if !joined_ranks.is_empty() {
        publish(|| {
            let have = if joined_ranks.len() == 1 { "has" } else { "have" };
            let message = format!("rank {}: {} {have} joined in epoch {epoch}", mesh.rank(), ranges(joined_ranks));
            root.event(Kind::Joined, message).about(joined_ranks.clone())
        });
    }
}
