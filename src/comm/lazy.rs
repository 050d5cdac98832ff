//! The first use of a communicator that was only planned: it is made then, alone or with the other
//! ranks of its group.

use std::ffi::c_void;
use std::sync::Arc;

use super::call::{Call, run_alone};
use super::communicator::{Communicator, State};
use super::groups::outside_groups;
use super::maker::Maker;
use super::names::{name_text, named_config};
use super::refusal::tell_if_refused;
use super::root::RootComms;
use crate::error::{Error, Result};
use crate::rendezvous::Scope;

impl RootComms {
    /// Makes a planned communicator of this root; `dim` is the name of its dimension. Collective
    /// over the communicator's group, when that has more than one rank.
    pub(super) fn make_at_first_use(&self, communicator: &Arc<Communicator>, dim: &str) -> Result<()> {
        let Some(world) = self.world() else {
            return Err(Error::internal(format!("dimension {dim} of {} has no world", self.mesh().describe())));
        };
        self.check_first_use(communicator, &format!("the first use of dimension {dim}"), None)?;
        let (library, first_use, group) = (communicator.library(), communicator.first_use(), communicator.group());
        let name = first_use.comm_name.as_deref().unwrap_or(dim);
        let config = named_config(library, first_use.config.as_ref(), name);
        let (wait, timeout) = (self.wait(None), self.timeout());
        if group.size() == 1 {
            let _turn = world.take_single_turn(&wait)?;
            if communicator.state() != State::Unmade {
                return Ok(());
            }
            return outside_groups(library, || {
                run_alone(world, self, &wait, |work| {
                    world.select_device()?;
                    let maker = Maker::new(library, work.peers, timeout);
                    // There is nobody to wait for, so the making may block.
                    let raw = maker.meet("comm/single", group, config.blocking(true))?;
                    work.log.made(communicator, raw, timeout);
                    Ok(())
                })
            });
        }
        let scope = self.scope_of_first_use(communicator)?;
        let call = Call::begin(world, Some(self), wait)?;
        // Another thread, which had the turn before, may have made it.
        if communicator.state() != State::Unmade {
            return Ok(());
        }
        call.agree(&scope, &format!("dm_get_comm(dim={})", name_text(dim)))?.run(|work| {
            world.select_device()?;
            let _expected = self.expect(communicator);
            let raw = Maker::new(library, work.peers, timeout).meet_for_use("comm/lazy", group, config)?;
            work.log.made(communicator, raw, timeout);
            Ok(())
        })?;
        communicator.forget_scope();
        Ok(())
    }

    /// Fails where the first use of a planned communicator, by `call` on `stream`, would meet the
    /// capture of a CUDA graph. The other ranks of the group are told.
    pub(super) fn check_first_use(
        &self,
        communicator: &Arc<Communicator>,
        call: &str,
        stream: Option<*mut c_void>,
    ) -> Result<()> {
        let check = || communicator.library().check_no_capture(call, stream);
        if communicator.group().size() == 1 {
            return check();
        }
        let scope = self.scope_of_first_use(communicator)?;
        tell_if_refused(Some(&scope), self.cancel().clone(), "dm_get_comm", check)
    }

    /// Notes that this rank has refused a call that may have been the first use of a communicator.
    /// The other ranks may wait for that use until their deadline.
    pub(super) fn note_refused_first_use(&self) {
        for communicator in self.dim_communicators().iter().filter(|_| self.is_lazy()) {
            if communicator.state() == State::Unmade && communicator.group().size() > 1 {
                // Without a scope this rank cannot make the communicator, and learns of that when
                // it tries.
                let _ = self.scope_of_first_use(communicator).map(|scope| scope.may_be_behind());
            }
        }
    }

    /// The scope in which the ranks of a planned communicator agree on its first use.
    pub(super) fn scope_of_first_use(&self, communicator: &Arc<Communicator>) -> Result<Arc<Scope>> {
        let group = communicator.group();
        let (Some(world), Some(scope_id)) = (self.world(), &communicator.first_use().scope_id) else {
            let what = group.describe();
            return Err(Error::internal(format!("the communicator of {what} was planned eagerly but not made")));
        };
        let position = group.local_rank(0)?;
        let mut is_new = false;
        let scope = communicator.scope(|| {
            is_new = true;
            let scope = world.rendezvous().subscope(scope_id, group.ranks().into(), position)?;
            Ok(self.of_this_mesh(scope))
        })?;
        if is_new {
            world.comms().note_scope(communicator);
        }
        Ok(scope)
    }
}
