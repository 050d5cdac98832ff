//! Meshes and collectives for Rust programs without pointers: over slices in host memory, on device
//! type cpu.

use std::ffi::c_void;
use std::sync::Arc;

use super::groups::in_group;
use super::operations::Operands;
use super::options::MeshOptions;
use super::root::RootComms;
use super::view::View;
use super::world::World;
use crate::ccl::{Library, NcclResult, RawComm};
use crate::error::{Error, Result};
use crate::mesh::{Mesh, MeshSpec};

mod sealed {
    /// An element type with its `ncclDataType_t` number.
    pub trait Sealed: Copy {
        const DTYPE: i32;
    }
}

/// An element that communicator libraries know: `i8`, `u8`, `i32`, `u32`, `i64`, `u64`, `f32` and
/// `f64`.
pub trait Element: sealed::Sealed {}

macro_rules! elements {
    ($($element:ty = $dtype:literal),+) => {$(
        impl sealed::Sealed for $element {
            const DTYPE: i32 = $dtype;
        }
        impl Element for $element {}
    )+};
}

elements!(i8 = 0, u8 = 1, i32 = 2, u32 = 3, i64 = 4, u64 = 5, f32 = 7, f64 = 8);

/// How elements of several ranks are reduced to one. The numbers are those of `ncclRedOp_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
#[non_exhaustive]
pub enum Operator {
    /// Their sum.
    Sum = 0,
    /// Their product.
    Product = 1,
    /// The largest. The host engine ignores NaNs where another rank has a number.
    Max = 2,
    /// The smallest. The host engine ignores NaNs where another rank has a number.
    Min = 3,
    /// Their sum divided by the number of ranks. For integers the sum is made in the element's own
    /// type, where it can overflow, and the quotient is truncated. NCCL does so too.
    Average = 4,
}

impl View {
    /// A mesh of that shape over the first ranks of the world, row-major, with a ready communicator
    /// along each dimension. **Collective over the world.** [`RootComms::create`] takes ranks of
    /// another order and options.
    pub fn init(world: &Arc<World>, shape: &[usize], names: &[&str]) -> Result<View> {
        let spec = MeshSpec {
            device_type: world.rendezvous().device_type(),
            shape,
            names: Some(names),
            ranks: None,
            world_size: world.size(),
            rank: world.rank(),
        };
        Ok(View::of_root(RootComms::create(world, Mesh::new(&spec)?, &MeshOptions::default())?))
    }

    /// Reduces `values` over this rank's group along `dim`, in place; every rank gets the same
    /// result, bitwise. **Collective over the group.**
    pub fn all_reduce<T: Element>(&self, dim: &str, values: &mut [T], op: Operator) -> Result<()> {
        let at = values.as_mut_ptr().cast::<c_void>();
        self.over_slices::<T>(
            "all_reduce",
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
        let count = |size: usize| match root < size {
            true => Ok(values.len()),
            false => Err(Error::invalid(format!(
                "broadcast: root is {root}, but dimension {dim} has ranks 0 to {}",
                size - 1
            ))),
        };
        self.over_slices::<T>("broadcast", dim, count, |library, comm, count| {
            // SAFETY: as in `all_reduce`; `root` is a rank of the group, so it fits.
            unsafe { library.broadcast(at, at, count, T::DTYPE, root as i32, comm, std::ptr::null_mut()) }
        })
    }

    /// Puts `send` of every rank of the group into `recv`, in rank order; `recv` is as many times
    /// as long as `dim` has ranks. **Collective over the group.**
    pub fn all_gather<T: Element>(&self, dim: &str, send: &[T], recv: &mut [T]) -> Result<()> {
        let (from, to) = (send.as_ptr().cast::<c_void>(), recv.as_mut_ptr().cast::<c_void>());
        let count = |size| fits("all_gather", "recv", recv.len(), "send", send.len(), size);
        self.over_slices::<T>("all_gather", dim, count, |library, comm, count| {
            // SAFETY: as in `all_reduce`; `recv` has room for `count` elements of each rank.
            unsafe { library.all_gather(from, to, count, T::DTYPE, comm, std::ptr::null_mut()) }
        })
    }

    /// Reduces `send` over the group and leaves block `i` of the result on rank `i`; `send` is as
    /// many times as long as `recv` as `dim` has ranks. **Collective over the group.**
    pub fn reduce_scatter<T: Element>(&self, dim: &str, send: &[T], recv: &mut [T], op: Operator) -> Result<()> {
        let (from, to) = (send.as_ptr().cast::<c_void>(), recv.as_mut_ptr().cast::<c_void>());
        let count = |size| fits("reduce_scatter", "send", send.len(), "recv", recv.len(), size);
        self.over_slices::<T>("reduce_scatter", dim, count, |library, comm, count| {
            // SAFETY: as in `all_reduce`; `send` has `count` elements for each rank.
            unsafe { library.reduce_scatter(from, to, count, T::DTYPE, op as i32, comm, std::ptr::null_mut()) }
        })
    }

    /// Sends block `i` of `send` to rank `i` of the group and receives block `i` of `recv` from it.
    /// Both have equal blocks for all ranks. **Collective over the group.**
    pub fn all_to_all<T: Element>(&self, dim: &str, send: &[T], recv: &mut [T]) -> Result<()> {
        let (from, to) = (send.as_ptr().cast::<c_void>(), recv.as_mut_ptr().cast::<c_void>());
        let count = |size: usize| match send.len() == recv.len() && send.len() % size == 0 {
            true => Ok(send.len() / size),
            false => Err(Error::invalid(format!(
                "all_to_all: send has {} elements and recv {}, expected the same multiple of {size}",
                send.len(),
                recv.len()
            ))),
        };
        self.over_slices::<T>("all_to_all", dim, count, |library, comm, count| {
            // SAFETY: as in `all_reduce`; both have `count` elements for each rank.
            unsafe { library.all_to_all(from, to, count, T::DTYPE, comm, std::ptr::null_mut()) }
        })
    }

    /// Runs `issue` with the communicator along `dim`. `count` gives the element count from the
    /// size of the dimension. Fails on a library that works on device memory, and inside a group,
    /// where the work would outlast the borrow of the slices.
    fn over_slices<T: Element>(
        &self,
        name: &str,
        dim: &str,
        count: impl FnOnce(usize) -> Result<usize>,
        issue: impl FnOnce(&Library, RawComm, usize) -> NcclResult,
    ) -> Result<()> {
        let library = self.library()?;
        if !library.is_host_engine() {
            return Err(Error::unsupported(format!(
                "{name}: slices lie in host memory, but device type {} is on {}: View::operate takes device memory",
                self.mesh().device_type(),
                library.label()
            )));
        }
        if in_group(library) {
            return Err(Error::unsupported(format!(
                "{name}: a group puts its work off, but slices are borrowed for the call alone: end the group first"
            )));
        }
        let flattened;
        let (view, index) = match self.mesh().dim_index(dim) {
            Ok(index) => (self, index),
            Err(_) => {
                let (mesh, index) = self.mesh().along(Some(dim))?;
                flattened = self.with(mesh);
                (&flattened, index)
            }
        };
        let count = count(view.mesh().dim_size(index))?;
        let operands = Operands { count, dtype: T::DTYPE, stream: std::ptr::null_mut() };
        view.operate(name, index, operands, &[], |library, comm| issue(library, comm, count))
    }
}

/// The length of the short slice. Fails when the long slice has another length than the short one
/// times the number of ranks.
fn fits(name: &str, long: &str, elements: usize, short: &str, each: usize, size: usize) -> Result<usize> {
    if each.checked_mul(size) == Some(elements) {
        return Ok(each);
    }
    Err(Error::invalid(format!("{name}: {long} has {elements} elements, expected {size} times the {each} of {short}")))
}
