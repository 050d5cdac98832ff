//! The scopes in which the groups along a root's dimensions make calls of the control plane, and
//! those in which they compare their collectives before they issue them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::names::name_key;
use crate::error::Result;
use crate::mesh::Mesh;
use crate::rendezvous::{Scope, World};

/// The scopes that the groups of this rank have needed so far. Each group has one, so its calls
/// concern no other ranks.
#[derive(Default)]
pub(in crate::comm) struct ControlScopes(Mutex<Known>);

/// The scopes, and what a new one begins with.
#[derive(Default)]
struct Known {
    /// The scopes. The key has the purpose, the layout of the dimension and the first position of
    /// the group; for [`Purpose::Order`] also the dimension's name.
    scopes: HashMap<String, Arc<Scope>>,
    /// Whether this rank has refused a call without knowing of which group. A scope that is made
    /// later begins with this value.
    may_be_behind: bool,
}

/// The calls for which a group along a dimension has a scope.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum Purpose {
    /// The control plane: barriers and small data.
    Control,
    /// The comparison of collectives. Dimensions over the same ranks have different scopes for it,
    /// because threads may make calls along them in different orders.
    Order,
}

impl ControlScopes {
    /// The scope of this rank's group along a dimension of `mesh`, made at the first call. `root`
    /// is the root's part in the names of its scopes, and `of_root` returns a scope for calls on
    /// the root.
    pub(in crate::comm) fn of_group(
        &self,
        world: &World,
        root: &str,
        of_root: impl Fn(Scope) -> Scope,
        mesh: &Mesh,
        index: usize,
        purpose: Purpose,
    ) -> Result<Arc<Scope>> {
        let (first, position) = mesh.split_color_key(index)?;
        let pairs = mesh.dim_layout(index).pairs().iter();
        let pairs: Vec<String> = pairs.map(|(size, stride)| format!("{size}x{stride}")).collect();
        let name = match purpose {
            Purpose::Control => format!("control/{}/{first}", pairs.join(".")),
            Purpose::Order => format!("order/{}/{first}/{}", pairs.join("."), name_key(mesh.dim_name(index))),
        };
        let mut known = self.lock();
        if let Some(scope) = known.scopes.get(&name) {
            return Ok(Arc::clone(scope));
        }
        let id = format!("{root}/{name}");
        let scope = world.subscope(&id, mesh.group_ranks(index)?.into(), position as usize)?;
        let scope = of_root(if purpose == Purpose::Order { scope.for_order() } else { scope });
        if known.may_be_behind {
            scope.may_be_behind();
        }
        let scope = Arc::new(scope);
        known.scopes.insert(name, Arc::clone(&scope));
        Ok(scope)
    }

    /// Notes that this rank has refused a call of some group, and nobody knows of which. The other
    /// ranks of that group may wait for this rank until their deadline.
    pub(in crate::comm) fn note_refused(&self) {
        let mut known = self.lock();
        known.may_be_behind = true;
        known.scopes.values().for_each(|scope| scope.may_be_behind());
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
