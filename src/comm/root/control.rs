//! The scopes in which the groups along a root's dimensions make calls of the control plane.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::RootComms;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::rendezvous::Scope;

/// The scopes that the groups of this rank have needed so far.
#[derive(Default)]
pub(super) struct ControlScopes(Mutex<Known>);

/// The scopes, by the layout of the dimension and the group's first position.
#[derive(Default)]
struct Known {
    /// The scopes by their part in the name of their keys.
    scopes: HashMap<String, Arc<Scope>>,
    /// Whether this rank has refused a call of which the ranks of any group may not have heard. A
    /// scope that is made later begins with that.
    may_be_behind: bool,
}

impl RootComms {
    /// The scope of this rank's group along a dimension of `mesh`, a view over this root's
    /// positions. The scope is made at the first call.
    pub(in crate::comm) fn control_scope(&self, mesh: &Mesh, index: usize) -> Result<Arc<Scope>> {
        let (first, position) = mesh.split_color_key(index)?;
        let pairs: Vec<String> =
            mesh.dim_layout(index).pairs().iter().map(|(size, stride)| format!("{size}x{stride}")).collect();
        let name = format!("control/{}/{first}", pairs.join("."));
        let mut known = self.control.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(scope) = known.scopes.get(&name) {
            return Ok(Arc::clone(scope));
        }
        let world = self.world().ok_or_else(|| Error::internal("control calls of a mesh without a world"))?;
        let id = format!("{}/{name}", self.id());
        let scope = world.rendezvous().subscope(&id, mesh.group_ranks(index)?.into(), position as usize)?;
        if known.may_be_behind {
            scope.may_be_behind();
        }
        let scope = Arc::new(scope);
        known.scopes.insert(name, Arc::clone(&scope));
        Ok(scope)
    }

    /// Notes that this rank has refused a call of some group, and nobody knows of which. The other
    /// ranks of that group may wait for this rank until their deadline.
    pub(in crate::comm) fn note_refused_control(&self) {
        let mut known = self.control.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.may_be_behind = true;
        known.scopes.values().for_each(|scope| scope.may_be_behind());
    }
}
