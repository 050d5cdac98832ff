//! Meshes and collectives for Rust programs without pointers: over slices in host memory, on device
//! type cpu.

use std::ffi::c_void;
use std::sync::Arc;

use ndarray::{ArrayView, Dimension};

use super::elements::{Element, Operator, block_for_each_rank, block_of_each_rank, root_rank};
use super::groups::in_group;
use super::operations::Operands;
use super::options::MeshOptions;
use super::ragged::{Counts, Exchange};
use super::root::RootComms;
use super::view::View;
use super::world::World;
use crate::ccl::{Library, NcclResult, RawComm};
use crate::error::{Error, Result};
use crate::mesh::{Mesh, MeshSpec};
use crate::recorder::{Operation, What};

impl View {
    /// A mesh of that shape over the first ranks of the world, row-major, with a ready communicator
    /// along each dimension. **Collective over the world.** [`RootComms::create`] takes ranks of
    /// another order and options.
    pub fn init(world: &Arc<World>, shape: &[usize], names: &[&str]) -> Result<View> {
        let place = world.rendezvous();
        let spec = MeshSpec {
            device_type: place.device_type(),
            shape,
            names: Some(names),
            ranks: None,
            world_size: place.size(),
            rank: place.rank(),
        };
        Ok(View::of_root(RootComms::create(world, Mesh::new(&spec)?, &MeshOptions::default())?))
    }

    /// A mesh of the array's shape, in which the rank at each coordinate is the array's element
    /// there, with a ready communicator along each dimension: PyTorch's `DeviceMesh(device_type,
    /// mesh)`. The array has any number of dimensions, and its elements are distinct ranks of the
    /// world. **Collective over the world**, also for the ranks that are not in the array. The
    /// ranks agree on the array as on every other argument: if one rank gives another array, all
    /// ranks get an error that says so.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use devicemesh::comm::{World, WorldOptions, View};
    /// use devicemesh::ndarray::Array;
    ///
    /// let world = Arc::new(World::join("cpu", &WorldOptions::default())?);
    /// let size = world.size() as i32;
    /// // The last rank comes first.
    /// let ranks = Array::from_iter((0..size).rev());
    /// let ranks = ranks.into_shape_with_order((1, size as usize)).unwrap();
    /// let mesh = View::from_rank_array(&world, ranks.view(), &["dp", "tp"])?;
    /// assert_eq!(mesh.mesh().rank_array(), ranks.into_dyn());
    /// mesh.root_comms().finalize()?;
    /// # Ok::<(), devicemesh::error::Error>(())
    /// ```
    pub fn from_rank_array<D: Dimension>(
        world: &Arc<World>,
        ranks: ArrayView<'_, i32, D>,
        names: &[&str],
    ) -> Result<View> {
        let place = world.rendezvous();
        let mesh = Mesh::from_rank_array(place.device_type(), ranks, Some(names), place.size(), place.rank())?;
        Ok(View::of_root(RootComms::create(world, mesh, &MeshOptions::default())?))
    }

    /// Reduces `values` over this rank's group along `dim`, in place; every rank gets the same
    /// result, bitwise. **Collective over the group.**
    pub fn all_reduce<T: Element>(&self, dim: &str, values: &mut [T], op: Operator) -> Result<()> {
        let at = values.as_mut_ptr().cast::<c_void>();
        self.over_slices::<T>(
            ("all_reduce", What::of(Operation::AllReduce).reducing(op as i32)),
            dim,
            |_| Ok(values.len()),
            |library, comm, count| {
                // SAFETY: `over_slices` runs this on the host engine and outside a group, so the
                // work is done when it returns; `at` has `count` elements.
                unsafe { library.all_reduce(at, at, count, T::DTYPE, op as i32, comm, std::ptr::null_mut()) }
            },
        )
    }

    /// Copies `values` of the rank `root` of `dim` to all ranks of the group. **Collective over the
    /// group.**
    pub fn broadcast<T: Element>(&self, dim: &str, values: &mut [T], root: usize) -> Result<()> {
        let at = values.as_mut_ptr().cast::<c_void>();
        let count = |size: usize| root_rank("broadcast", dim, root, size).map(|_| values.len());
        self.over_slices::<T>(
            ("broadcast", What::of(Operation::Broadcast).with(root as i32)),
            dim,
            count,
            |library, comm, count| {
                // SAFETY: as in `all_reduce`; `root` is a rank of the group, so it fits.
                unsafe { library.broadcast(at, at, count, T::DTYPE, root as i32, comm, std::ptr::null_mut()) }
            },
        )
    }

    /// Puts `send` of every rank of the group into `recv`, in rank order; `recv` is as many times
    /// as long as `dim` has ranks. **Collective over the group.**
    pub fn all_gather<T: Element>(&self, dim: &str, send: &[T], recv: &mut [T]) -> Result<()> {
        let (from, to) = (send.as_ptr().cast::<c_void>(), recv.as_mut_ptr().cast::<c_void>());
        let count = |size| block_of_each_rank("all_gather", ("recv", recv.len()), ("send", send.len()), size);
        self.over_slices::<T>(("all_gather", What::of(Operation::AllGather)), dim, count, |library, comm, count| {
            // SAFETY: as in `all_reduce`; `recv` has room for `count` elements of each rank.
            unsafe { library.all_gather(from, to, count, T::DTYPE, comm, std::ptr::null_mut()) }
        })
    }

    /// Reduces `send` over the group and leaves block `i` of the result on rank `i`; `send` is as
    /// many times as long as `recv` as `dim` has ranks. **Collective over the group.**
    pub fn reduce_scatter<T: Element>(&self, dim: &str, send: &[T], recv: &mut [T], op: Operator) -> Result<()> {
        let (from, to) = (send.as_ptr().cast::<c_void>(), recv.as_mut_ptr().cast::<c_void>());
        let count = |size| block_of_each_rank("reduce_scatter", ("send", send.len()), ("recv", recv.len()), size);
        self.over_slices::<T>(
            ("reduce_scatter", What::of(Operation::ReduceScatter).reducing(op as i32)),
            dim,
            count,
            |library, comm, count| {
                // SAFETY: as in `all_reduce`; `send` has `count` elements for each rank.
                unsafe { library.reduce_scatter(from, to, count, T::DTYPE, op as i32, comm, std::ptr::null_mut()) }
            },
        )
    }

    /// Sends block `i` of `send` to rank `i` of the group and receives block `i` of `recv` from it.
    /// Both have equal blocks for all ranks. **Collective over the group.**
    pub fn all_to_all<T: Element>(&self, dim: &str, send: &[T], recv: &mut [T]) -> Result<()> {
        let (from, to) = (send.as_ptr().cast::<c_void>(), recv.as_mut_ptr().cast::<c_void>());
        let count = |size| block_for_each_rank("all_to_all", send.len(), recv.len(), size);
        self.over_slices::<T>(("all_to_all", What::of(Operation::AllToAll)), dim, count, |library, comm, count| {
            // SAFETY: as in `all_reduce`; both have `count` elements for each rank.
            unsafe { library.all_to_all(from, to, count, T::DTYPE, comm, std::ptr::null_mut()) }
        })
    }

    /// Sends the next `send_counts[i]` elements of `send` to each rank `i` of the group, and
    /// receives the next `recv_counts[i]` elements of `recv` from it. Each list has a count for
    /// each rank, and its counts add up to the length of its slice. If a rank sends another number
    /// of elements than the receiving rank expects, all ranks get `Status::Mismatch`.
    /// **Collective over the group.**
    pub fn all_to_allv<T: Element>(
        &self,
        dim: &str,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<()> {
        let exchange = Exchange::AllToAll { send: all("send", send_counts), recv: all("recv", recv_counts) };
        let lists = [("send", send.len(), send_counts), ("recv", recv.len(), recv_counts)];
        self.exchange_slices("all_to_allv", dim, exchange, lists, send, recv)
    }

    /// Puts `send` of every rank of the group into `recv`, in rank order. All ranks give the same
    /// `recv_counts`, which has the length of each rank's `send`. **Collective over the group.**
    pub fn all_gatherv<T: Element>(&self, dim: &str, send: &[T], recv: &mut [T], recv_counts: &[usize]) -> Result<()> {
        let exchange = Exchange::AllGather { recv: all("recv", recv_counts) };
        let lists = [("recv", recv.len(), recv_counts)];
        self.along_dim(dim, |view, index| view.check_own("all_gatherv", index, "send", send.len(), recv_counts))?;
        self.exchange_slices("all_gatherv", dim, exchange, lists, send, recv)
    }

    /// Reduces `send` over the group, and leaves the next `send_counts[i]` elements of the result
    /// on each rank `i`. All ranks give the same `send_counts`, which has the length of each rank's
    /// `recv`. **Collective over the group.**
    pub fn reduce_scatterv<T: Element>(
        &self,
        dim: &str,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        op: Operator,
    ) -> Result<()> {
        let exchange = Exchange::ReduceScatter { send: all("send", send_counts), op: op as i32 };
        let lists = [("send", send.len(), send_counts)];
        self.along_dim(dim, |view, index| view.check_own("reduce_scatterv", index, "recv", recv.len(), send_counts))?;
        self.exchange_slices("reduce_scatterv", dim, exchange, lists, send, recv)
    }

    /// Fails unless the slice of this rank's own block has as many elements as its count says.
    fn check_own(&self, name: &str, index: usize, what: &str, len: usize, counts: &[usize]) -> Result<()> {
        match counts.get(self.mesh().local_rank(index)?) {
            Some(count) if *count != len => {
                Err(Error::invalid(format!("{name}: {what} has {len} elements, but the count of this rank is {count}")))
            }
            _ => Ok(()),
        }
    }

    /// Makes an exchange over slices. Each of `lists` has the name and the length of a slice, and
    /// the counts that have to add up to it.
    fn exchange_slices<T: Element, const N: usize>(
        &self,
        name: &str,
        dim: &str,
        exchange: Exchange<'_>,
        lists: [(&str, usize, &[usize]); N],
        send: &[T],
        recv: &mut [T],
    ) -> Result<()> {
        self.check_slices(name)?;
        for (what, len, counts) in lists {
            let sum = counts.iter().try_fold(0_usize, |sum, count| sum.checked_add(*count));
            if sum != Some(len) {
                return Err(Error::invalid(format!(
                    "{name}: {what} has {len} elements, which is not the sum of its counts {counts:?}"
                )));
            }
        }
        let buffers = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
        self.along_dim(dim, |view, index| {
            // SAFETY: the slices hold the blocks, as the sums of the counts show. The host engine
            // is done when it returns, as in `all_reduce`.
            unsafe { view.exchange(name, index, exchange, buffers, (T::DTYPE, std::ptr::null_mut())) }
        })
    }

    /// Runs `issue` with the communicator along `dim`. `count` gives the element count from the
    /// size of the dimension. Fails on a library that works on device memory, and inside a group,
    /// where the work would outlast the borrow of the slices.
    fn over_slices<T: Element>(
        &self,
        (name, what): (&str, What),
        dim: &str,
        count: impl FnOnce(usize) -> Result<usize>,
        issue: impl FnOnce(&Library, RawComm, usize) -> NcclResult,
    ) -> Result<()> {
        self.check_slices(name)?;
        self.along_dim(dim, |view, index| {
            let count = count(view.mesh().dim_size(index))?;
            let operands = Operands::new(count, T::DTYPE, std::ptr::null_mut()).of(what);
            view.operate(name, index, operands, &[], |library, comm| issue(library, comm, count))
        })
    }

    /// Fails where slices cannot be operands: on a library that works on device memory, and inside
    /// a group.
    fn check_slices(&self, name: &str) -> Result<()> {
        let library = self.library()?;
        if !library.is_host_engine() {
            return Err(Error::unsupported(format!(
                "{name}: slices lie in host memory, but device type {} is on {}: View::operate takes device memory",
                self.mesh().device_type(),
                library.label()
            )));
        }
        if in_group(library) {
            return Err(Error::invalid_state(format!(
                "{name}: a group delays its operations until its end, but the slices are borrowed only for this call: end the group first"
            )));
        }
        Ok(())
    }

    /// Runs `work` with the view that has the dimension `dim` and the dimension's index there: this
    /// view, or for a flattened dimension the view of it.
    pub(super) fn along_dim(&self, dim: &str, work: impl FnOnce(&View, usize) -> Result<()>) -> Result<()> {
        match self.mesh().dim_index(dim) {
            Ok(index) => work(self, index),
            Err(_) => {
                let (mesh, index) = self.mesh().along(Some(dim))?;
                work(&self.with(mesh), index)
            }
        }
    }
}

/// Counts of blocks that follow each other.
fn all<'a>(name: &'static str, counts: &'a [usize]) -> Counts<'a> {
    Counts { name, counts, displs: None }
}
