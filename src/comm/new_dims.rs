//! The collective calls that give a view new dimensions: flatten, unflatten, reshape and ranges.

use std::sync::Arc;
use std::time::Duration;

use super::call::Call;
use super::dims::{SharedComms, WantedDims, make_dims};
use super::names::{name_text, names_text};
use super::options::{CallOptions, DimOptions};
use super::path::{MadeDims, Step};
use super::view::{View, owned, texts};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::rendezvous::Scope;

impl View {
    /// All dimensions of this view joined into one, with a communicator. **Collective over the
    /// root mesh**, but local when this dimension exists under this name already.
    pub fn flatten(&self, name: Option<&str>, options: &CallOptions) -> Result<View> {
        self.tell_if_refused("dm_flatten", || self.join_dims(name, options))
    }

    fn join_dims(&self, name: Option<&str>, options: &CallOptions) -> Result<View> {
        self.root_comms().alive()?;
        options.check_dims(1)?;
        let flat = self.mesh().flatten(name)?;
        // A single dimension that keeps its name stays as it is: there is nothing to make, and no
        // new name.
        if self.mesh().ndim() == 1 && flat.dim_name(0) == self.mesh().dim_name(0) {
            return self.follow(&[]);
        }
        let wanted = WantedDims { view: flat.clone(), dims: vec![(0, options.dim(0))] };
        let exists = flat.is_known() && wanted.are_known(self.space());
        if !(exists || self.root_comms().is_offline()) {
            self.make_flat(&wanted, options)?;
        }
        flat.publish()?;
        let made = self.taken(flat, |flat| Step::Flatten(flat.dim_name(0).to_owned()));
        self.note_made(&made, &options.dims, exists);
        Ok(made)
    }

    /// Gives the flattened dimension its communicator, unless another thread has made it meanwhile.
    fn make_flat(&self, wanted: &WantedDims, options: &CallOptions) -> Result<()> {
        let text = format!(
            "dm_flatten(dims=({}), name={}{})",
            names_text(&self.mesh().dim_names()),
            name_text(wanted.view.dim_name(0)),
            options.dim(0).agreed_suffix()
        );
        let (call, scope) = self.begin(&text, options)?;
        // The thread that had the turn before may have made the dimension, on all ranks. So no rank
        // makes this call: each rank finds the dimension here, or before it waits for its turn.
        if wanted.are_own(self.space()) {
            return Ok(());
        }
        self.give_comms(call, scope, &text, wanted)
    }

    /// Notes that a call has made dimensions which the next mesh is to have, too.
    fn note_made(&self, made: &View, options: &[DimOptions], existed: bool) {
        if let Some(path) = made.path().filter(|_| !existed) {
            self.root_comms().note_made(MadeDims { path: path.clone(), options: options.to_vec() });
        }
    }

    /// Makes again, on this root mesh, the dimensions that a call has made on the root mesh of the
    /// epoch before. This view has all ranks of its root mesh. **Collective over the root mesh**.
    /// Does nothing where the dimensions do not fit the sizes of this mesh.
    pub(super) fn make_again(&self, made: &MadeDims, timeout: Duration) -> Result<()> {
        let MadeDims { path, options } = made;
        if let Err(error) = self.follow(path) {
            let message = error.message();
            let rank = self.mesh().rank();
            log::warn!("rank {rank}: dimensions that an earlier call made are left out of this mesh: {message}");
            return Ok(());
        }
        let Some((last, before)) = path.split_last() else { return Ok(()) };
        let (view, options) = (self.follow(before)?, CallOptions { dims: options.clone(), timeout: Some(timeout) });
        match last {
            Step::Flatten(name) => view.flatten(Some(name), &options).map(drop),
            Step::Unflatten { dim, sizes, names } => view.unflatten(dim, sizes, &texts(names), &options).map(drop),
            Step::Reshape { sizes, names } => view.reshape(sizes, &texts(names), &options).map(drop),
            // These make nothing.
            Step::Slice(_) | Step::Submesh { .. } | Step::Concatenate(_) => Ok(()),
        }
    }

    /// Dimension `dim` replaced by several, each with a communicator. **Collective over the root
    /// mesh**.
    pub fn unflatten(&self, dim: &str, sizes: &[usize], names: &[&str], options: &CallOptions) -> Result<View> {
        self.tell_if_refused("dm_unflatten", || {
            self.root_comms().alive()?;
            let at = self.mesh().dim_index(dim)?;
            let split = self.mesh().unflatten(dim, sizes, names)?;
            let dims = || names_text(&self.mesh().dim_names());
            let call = || format!("dm_unflatten(dims=({}), dim={}", dims(), name_text(dim));
            let step = || Step::Unflatten { dim: dim.to_owned(), sizes: sizes.to_vec(), names: owned(names) };
            self.replace(call, (split, step), at, sizes, names, options)
        })
    }

    /// All ranks of this view, row-major, under another shape, each dimension with a communicator.
    /// **Collective over the root mesh**.
    pub fn reshape(&self, sizes: &[usize], names: &[&str], options: &CallOptions) -> Result<View> {
        self.tell_if_refused("dm_reshape", || {
            self.root_comms().alive()?;
            let other = self.mesh().reshape(sizes, names)?;
            let call = || format!("dm_reshape(dims=({})", names_text(&self.mesh().dim_names()));
            let step = || Step::Reshape { sizes: sizes.to_vec(), names: owned(names) };
            let made = self.replace(call, (other, step), 0, sizes, names, options)?;
            made.mesh().keep_names();
            Ok(made)
        })
    }

    /// `mesh` with communicators for the new dimensions from index `at`. `step` leads from this
    /// view to `mesh`.
    fn replace(
        &self,
        call: impl FnOnce() -> String,
        (mesh, step): (Mesh, impl FnOnce() -> Step),
        at: usize,
        sizes: &[usize],
        names: &[&str],
        options: &CallOptions,
    ) -> Result<View> {
        options.check_dims(sizes.len())?;
        if !self.root_comms().is_offline() {
            let dims: Vec<(usize, DimOptions)> =
                (0..sizes.len()).map(|index| (at + index, options.dim(index))).collect();
            let suffix: String = dims.iter().map(|(_, options)| options.agreed_suffix()).collect();
            let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
            let text = format!("{}, sizes=({}), names=({}){suffix})", call(), sizes.join(", "), names_text(names));
            let (call, scope) = self.begin(&text, options)?;
            self.give_comms(call, scope, &text, &WantedDims { view: mesh.clone(), dims })?;
        }
        let made = self.taken(mesh, |_| step());
        self.note_made(&made, &options.dims, false);
        Ok(made)
    }

    /// The view with a dimension restricted to its indices `start`, `start + step` ... (`len` of
    /// them), and a communicator for what is left of it. **Collective over the root mesh**, also
    /// for the ranks at the other indices.
    pub fn slice_range(
        &self,
        dim: Option<&str>,
        start: usize,
        len: usize,
        step: usize,
        options: &CallOptions,
    ) -> Result<View> {
        self.tell_if_refused("dm_slice_range", || self.cut(dim, start, len, step, options))
    }

    fn cut(&self, dim: Option<&str>, start: usize, len: usize, step: usize, options: &CallOptions) -> Result<View> {
        self.root_comms().alive()?;
        options.check_dims(1)?;
        let (along, index) = self.mesh().along(dim)?;
        let name = along.dim_name(index);
        let cut = along.slice_range(name, start, len, step)?;
        if self.root_comms().is_offline() {
            return if cut.same_root(&along) { self.whole(dim, name) } else { Ok(self.with(cut)) };
        }
        let text = format!(
            "dm_slice_range(dims=({}), dim={}, start={start}, len={len}, step={step}{})",
            names_text(&along.dim_names()),
            name_text(name),
            options.dim(0).agreed_suffix()
        );
        // A range of all indices is the view itself: there is nothing to make, but all ranks agree
        // on that.
        let is_all = cut.same_root(&along);
        let dims = if is_all { Vec::new() } else { vec![(index, options.dim(0))] };
        let wanted = WantedDims { view: cut.clone(), dims };
        let space = self.space();
        let (call, scope) = self.begin(&text, options)?;
        let known = space.known_range(&cut, index).filter(|_| !is_all);
        let (call, shared) = SharedComms::candidates(space, known.as_deref(), &wanted).agree(call, scope, &text)?;
        if is_all {
            return call.run(|_| self.whole(dim, name));
        }
        let known = known.filter(|_| shared.has(0));
        let number = call.number();
        let made = call.run(|work| {
            let range = match known {
                Some(known) => known,
                None => work.log.add_range(space, &cut, number)?,
            };
            make_dims(work, space, &range, &wanted, &shared).map(|()| range)
        });
        space.drop_failed_ranges();
        made.map(|range| View::new(cut, range, Arc::clone(self.root_comms())))
    }

    /// Returns the view that a range of all indices of the dimension `name` gives. `dim` is the
    /// name that the caller gave. The result is this view, or the view of a flattened dimension.
    fn whole(&self, dim: Option<&str>, name: &str) -> Result<View> {
        match self.mesh().dim_index_or_only(dim) {
            Ok(_) => self.follow(&[]),
            Err(_) => self.slice(&[name]),
        }
    }

    /// Gives dimensions of a view of this one's root their communicators in that call. Collective
    /// over the root mesh.
    fn give_comms(&self, call: Call<'_>, scope: &Scope, text: &str, wanted: &WantedDims) -> Result<()> {
        let space = self.space();
        let (call, shared) = SharedComms::candidates(space, None, wanted).agree(call, scope, text)?;
        call.run(|work| make_dims(work, space, space, wanted, &shared))
    }

    /// Begins a collective call of the ranks of this view's root.
    fn begin(&self, text: &str, options: &CallOptions) -> Result<(Call<'_>, &Scope)> {
        if !self.mesh().is_member() {
            return Err(Error::not_member(format!(
                "{text}: rank {} is not in {}",
                self.mesh().rank(),
                self.mesh().describe()
            )));
        }
        let (world, scope) = self.space().participants(text)?;
        if !self.space().is_lazy() {
            self.space().library().map_or(Ok(()), |library| library.check_no_capture(text, None))?;
        }
        Ok((Call::begin(world, Some(self.space()), self.space().wait_for_peers(options.timeout))?, scope))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::two_ranks::two_ranks;

    /// Two threads of each rank make the same dimension. The second thread of rank 0 has looked
    /// before the dimension was there, and the second thread of rank 1 looks afterwards.
    #[test]
    fn a_dimension_that_another_thread_has_made_before_the_turn_is_not_made_again() {
        two_ranks(|world| {
            let view = View::init(world, &[2, 1], &["dp", "tp"]).unwrap();
            let options = CallOptions::default();
            let flat = view.flatten(Some("flat"), &options).unwrap();
            if world.rank() == 0 {
                let wanted = WantedDims { view: flat.mesh().clone(), dims: vec![(0, options.dim(0))] };
                view.make_flat(&wanted, &options).unwrap();
            }
            view.root_comms().finalize().unwrap();
        });
    }
}
