//! The first use of a communicator that was only planned: it is made then, alone or with the other
//! ranks of its group.

use std::sync::Arc;

use super::call::{Call, run_alone};
use super::communicator::{Communicator, State};
use super::groups::outside_groups;
use super::maker::Maker;
use super::names::named_config;
use super::root::RootComms;
use crate::error::{Error, Result};

impl RootComms {
    /// Makes a planned communicator of this root; `dim` is the name of its dimension. Collective
    /// over the communicator's group, when that has more than one rank.
    pub(super) fn make_at_first_use(&self, communicator: &Arc<Communicator>, dim: &str) -> Result<()> {
        let Some(world) = self.world() else {
            return Err(Error::internal(format!("dimension {dim} of {} has no world", self.mesh().describe())));
        };
        let (library, first_use, group) = (communicator.library(), communicator.first_use(), communicator.group());
        let name = first_use.comm_name.as_deref().unwrap_or(dim);
        let config = named_config(library, first_use.config.as_ref(), name);
        let (wait, timeout) = (self.wait(None), self.timeout());
        if group.size() == 1 {
            let _turn = world.single_turn();
            if communicator.state() != State::Unmade {
                return Ok(());
            }
            return outside_groups(library, || {
                run_alone(world, self, &wait, |work| {
                    world.select_device()?;
                    let maker = Maker { library, peers: work.peers, timeout };
                    // There is nobody to wait for, so the making may block.
                    let raw = maker.meet("comm/single", group, config.blocking(true))?;
                    work.log.made(communicator, raw, timeout);
                    Ok(())
                })
            });
        }
        let Some(scope_id) = &first_use.scope_id else {
            return Err(Error::internal(format!("the communicator of {dim} was planned eagerly but not made")));
        };
        let position = group.local_rank(0)?;
        let scope = communicator.scope(|| world.rendezvous().subscope(scope_id, group.ranks().into(), position))?;
        let call = Call::begin(world, Some(self), wait)?;
        // Another thread, which had the turn before, may have made it.
        if communicator.state() != State::Unmade {
            return Ok(());
        }
        call.agree(&scope, &format!("dm_get_comm(dim={dim})"))?.run(|work| {
            world.select_device()?;
            let raw = Maker { library, peers: work.peers, timeout }.meet_for_use("comm/lazy", group, config)?;
            work.log.made(communicator, raw, timeout);
            Ok(())
        })?;
        communicator.forget_scope();
        Ok(())
    }
}
