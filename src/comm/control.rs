//! The control plane: barrier, all-gather and broadcast of bytes, along a dimension of a mesh or
//! over the world. These calls go through the store and use no communicator. So these calls work
//! on every device type, and make no communicators on a lazy mesh.
//!
//! The ranks of a group along a dimension have an agreement scope of their own
//! (root/control.rs), so their calls concern no other ranks.

use std::sync::Arc;
use std::time::Duration;

use super::call::Call;
use super::groups::refuse_inside;
use super::names::name_text;
use super::refusal::tell_if_refused;
use super::root::Purpose;
use super::view::View;
use super::world::World;
use crate::error::{Error, Result, Status};
use crate::rendezvous::{Round, Scope, check_len};
use crate::wait::{Wait, Watch};

/// The calls along a dimension, which may be a flattened one. `timeout` bounds the call; `None`
/// stands for the mesh's timeout.
impl View {
    /// Returns when every rank of this rank's group along `dim` has called this function.
    /// **Collective over the group**. The barrier says nothing about work on devices.
    pub fn barrier(&self, dim: &str, timeout: Option<Duration>) -> Result<()> {
        let (view, index) = self.along_for_control(Ok(Some(dim)))?;
        view.barrier_along(index, timeout)
    }

    /// Returns the bytes that each rank of this rank's group along `dim` gives, in rank order.
    /// **Collective over the group**. The lengths may differ and may be 0. Each rank gives at most
    /// 8 MiB, and all of them together at most 64 MiB.
    pub fn all_gather_bytes(&self, dim: &str, data: &[u8], timeout: Option<Duration>) -> Result<Vec<Vec<u8>>> {
        let (view, index) = self.along_for_control(Ok(Some(dim)))?;
        view.all_gather_bytes_along(index, data, timeout)
    }

    /// Returns the bytes that the rank `root` along `dim` gives, 8 MiB at most. **Collective over
    /// this rank's group along `dim`**. `data` counts on the root only.
    pub fn broadcast_bytes(&self, dim: &str, data: &[u8], root: usize, timeout: Option<Duration>) -> Result<Vec<u8>> {
        let (view, index) = self.along_for_control(Ok(Some(dim)))?;
        view.broadcast_bytes_along(index, data, root, timeout)
    }

    /// Does what [`barrier`](View::barrier) does, along dimension `index`.
    pub(crate) fn barrier_along(&self, index: usize, timeout: Option<Duration>) -> Result<()> {
        self.control("dm_barrier", index, "", timeout, || Ok(()), |_, _| Ok(()))
    }

    /// Does what [`all_gather_bytes`](View::all_gather_bytes) does, along dimension `index`.
    pub(crate) fn all_gather_bytes_along(
        &self,
        index: usize,
        data: &[u8],
        timeout: Option<Duration>,
    ) -> Result<Vec<Vec<u8>>> {
        let check = || check_len(data.len());
        self.control("dm_all_gather_bytes", index, "", timeout, check, |round, wait| round.all_gather(data, wait))
    }

    /// Does what [`broadcast_bytes`](View::broadcast_bytes) does, along dimension `index`.
    pub(crate) fn broadcast_bytes_along(
        &self,
        index: usize,
        data: &[u8],
        root: usize,
        timeout: Option<Duration>,
    ) -> Result<Vec<u8>> {
        const NAME: &str = "dm_broadcast_bytes";
        let check = || {
            self.check_peer(NAME, index, "root", i32::try_from(root).unwrap_or(i32::MAX))?;
            if self.mesh().local_rank(index)? == root { check_len(data.len()) } else { Ok(()) }
        };
        let arguments = format!(", root={root}");
        self.control(NAME, index, &arguments, timeout, check, |round, wait| round.broadcast(data, root, wait))
    }

    /// Makes a call of the control plane along dimension `index`.
    fn control<T>(
        &self,
        function: &str,
        index: usize,
        arguments: &str,
        timeout: Option<Duration>,
        check: impl FnOnce() -> Result<()>,
        work: impl FnOnce(&Round, &Wait) -> Result<T>,
    ) -> Result<T> {
        self.tell_group_if_refused(function, index, || {
            let root = self.space();
            let scope = self.control_scope(function, index)?;
            check()?;
            refuse_inside(function, root.library())?;
            let world = root.world().ok_or_else(|| Error::internal("a mesh with a scope has no world"))?;
            let call = Call::begin(world, Some(root), self.wait_for_group(index, timeout)?)?;
            let text = format!("{function}(dim={}{arguments})", name_text(self.mesh().dim_name(index)));
            call.agree_on_mesh(&scope, &text)?.exchange(work)
        })
        .map_err(|error| self.with_dim(error, index))
    }

    /// The scope in which the ranks of this rank's group along dimension `index` make such calls.
    /// Fails where this rank cannot take part.
    fn control_scope(&self, function: &str, index: usize) -> Result<Arc<Scope>> {
        self.check_index(index)?;
        let root = self.space();
        root.alive()?;
        if root.is_offline() {
            return Err(Error::unsupported(format!(
                "{function}: {} belongs to an offline world (DM_WORLD_OFFLINE), which talks to no other rank",
                self.mesh().describe()
            )));
        }
        self.mesh().local_rank(index)?;
        let (world, _) = root.participants(function)?;
        root.control_scopes().of_group(
            world.rendezvous(),
            root.id(),
            |scope| root.of_this_mesh(scope),
            self.mesh(),
            index,
            Purpose::Control,
        )
    }

    /// Runs `call`, which is a call of `function` that is collective over this rank's group along
    /// dimension `index`. If this rank refuses the call, the other ranks of the group are told.
    pub(crate) fn tell_group_if_refused<T>(
        &self,
        function: &str,
        index: usize,
        call: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let scope = self.control_scope(function, index).ok();
        tell_if_refused(scope.as_deref(), self.space().cancel().clone(), function, call)
    }

    /// The view in which the dimension of that name is, and its index there, for a call of the
    /// control plane. Where there is none, nobody can know which group this rank means. So the
    /// rank notes that it may be behind the others in every group.
    pub(crate) fn along_for_control(&self, name: Result<Option<&str>>) -> Result<(View, usize)> {
        let along = name
            .and_then(|name| self.mesh().along(name))
            .inspect_err(|_| self.space().control_scopes().note_refused())?;
        Ok((self.with(along.0), along.1))
    }

    /// A wait of at most `timeout` for the ranks of this rank's group along dimension `index`. The
    /// wait ends early when a communicator of the root has failed because one of these ranks has
    /// left or was lost. A store that nobody serves would not report such a loss.
    fn wait_for_group(&self, index: usize, timeout: Option<Duration>) -> Result<Wait> {
        let group = self.mesh().group_ranks(index)?;
        let communicators = self.space().communicators();
        let watch: Watch = Arc::new(move || {
            let made = communicators.iter().filter(|communicator| !communicator.raw().is_null());
            let mut failures = made.filter_map(|communicator| communicator.poll().err());
            let ends = |error: &Error| {
                error.status() == Status::PeerLost && error.ranks().iter().any(|rank| group.contains(rank))
            };
            failures.find(ends).map_or(Ok(()), Err)
        });
        Ok(Wait { watch: Some(watch), ..self.space().wait(timeout) })
    }
}

/// The calls over the world. `timeout` bounds the call; `None` stands for the world's timeout.
/// [`World::barrier`] belongs to these calls, too.
impl World {
    /// Returns the bytes that each rank of the world gives, in rank order. **Collective over the
    /// world**. After a recovery the call is collective over the ranks of the mesh that the
    /// recovery gave, and the elements of all other ranks are empty. The lengths may differ and
    /// may be 0. Each rank gives at most 8 MiB, and all of them together at most 64 MiB.
    pub fn all_gather_bytes(&self, data: &[u8], timeout: Option<Duration>) -> Result<Vec<Vec<u8>>> {
        let check = || check_len(data.len());
        let all = self.control("dm_world_all_gather_bytes", "", timeout, check, |scope, round, wait| {
            let all = round.all_gather(data, wait)?;
            Ok(scope.by_rank(all, self.size()))
        })?;
        Ok(all)
    }

    /// Returns the bytes that the rank `root` of the world gives, 8 MiB at most. **Collective over
    /// the world**. `data` counts on the root only.
    pub fn broadcast_bytes(&self, data: &[u8], root: usize, timeout: Option<Duration>) -> Result<Vec<u8>> {
        const NAME: &str = "dm_world_broadcast_bytes";
        let check = || {
            if root >= self.size() {
                return Err(Error::invalid(format!(
                    "{NAME}: root is {root}, but the world has ranks 0 to {}",
                    self.size() - 1
                )));
            }
            self.rendezvous().check_in_epoch([root as i32])?;
            if self.rank() == root { check_len(data.len()) } else { Ok(()) }
        };
        let arguments = format!("root={root}");
        self.control(NAME, &arguments, timeout, check, |scope, round, wait| {
            let position = scope.position_of(root as i32).unwrap_or_default();
            round.broadcast(data, position, wait)
        })
    }

    /// Makes a call of the control plane over the world.
    fn control<T>(
        &self,
        function: &str,
        arguments: &str,
        timeout: Option<Duration>,
        check: impl FnOnce() -> Result<()>,
        work: impl FnOnce(&Scope, &Round, &Wait) -> Result<T>,
    ) -> Result<T> {
        self.alive()?;
        self.tell_if_refused(function, || {
            let scope = self.rendezvous().scope()?;
            check()?;
            refuse_inside(function, self.library().ok())?;
            let call = Call::begin(self, None, self.wait(timeout.unwrap_or(self.rendezvous().timeout())))?;
            let call = call.agree(&scope, &format!("{function}({arguments})"))?;
            call.exchange(|round, wait| work(&scope, round, wait))
        })
    }
}
