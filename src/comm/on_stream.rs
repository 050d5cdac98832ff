//! Collectives for Rust programs over device memory: cudarc's `CudaSlice`, queued on its
//! `CudaStream` (feature `cudarc`).
//!
//! A call returns when its operation is queued, so the buffers are in use after their borrow has
//! ended. Three things keep that sound:
//!
//! - Before the operation the stream waits for the last use of each buffer, and after it cudarc
//!   records the operation in the buffer's event (`device_ptr_mut`). A later use on another stream
//!   waits for that event, and so does the free of the buffer.
//! - cudarc compares events only within one `CudaContext`, and only while that context counts a
//!   second stream. So buffers of another context are refused, and a stream stays counted while its
//!   work goes on, also when the program drops it (`KEPT_STREAMS`).
//! - Nothing puts the operation on the stream after the call has returned. Inside a group the call
//!   is refused, and when a communicator has not queued the operation by the deadline, the mesh is
//!   aborted. Where cudarc cannot record the operation, the call fails when the work on the stream
//!   is over. When the work is not over at the mesh's timeout, the mesh is aborted, and the call
//!   fails at most 500 ms later. Work that goes on after that may still use the buffers.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, CudaViewMut, DevicePtrMut, DriverError, sys};

use super::communicator::Communicator;
use super::elements::{Element, Operator, block_for_each_rank, block_of_each_rank, root_rank};
use super::groups::in_group;
use super::operations::Operands;
use super::view::View;
use crate::ccl::{Library, NcclResult, RawComm, result};
use crate::error::{Error, Result, Status};
use crate::recorder::{Operation, What};
use crate::wait::Deadline;

mod sealed {
    /// Only the types below implement this, because the library would read and write at a wrong
    /// pointer.
    pub trait Sealed {}
    impl<T> Sealed for cudarc::driver::CudaSlice<T> {}
    impl<T> Sealed for cudarc::driver::CudaViewMut<'_, T> {}
}

/// Device memory that a collective reads or writes: `CudaSlice` or a part of one, `CudaViewMut`.
pub trait DeviceBuffer<T>: sealed::Sealed + DevicePtrMut<T> {}

impl<T> DeviceBuffer<T> for CudaSlice<T> {}
impl<T> DeviceBuffer<T> for CudaViewMut<'_, T> {}

/// The collectives of a mesh over device memory, queued on one CUDA stream. [`View::on_stream`]
/// makes it.
///
/// A call checks its arguments, queues the operation behind the work of the stream and returns.
/// Later work on the stream, or a copy to the host, finds the result. Each buffer is borrowed
/// mutably, also one that is only read: cudarc orders every later use behind the last write of a
/// slice, but a later write only behind the last of several reads.
///
/// Calls of one dimension are made in one order on all ranks. Lengths are those of this rank's own
/// buffers; NCCL does not compare them with the other ranks'.
///
/// ```no_run
/// use std::sync::Arc;
/// use devicemesh::comm::{World, WorldOptions, Operator, View};
/// use devicemesh::cudarc::driver::CudaContext;
///
/// let world = Arc::new(World::join("cuda", &WorldOptions::default())?);
/// // The library has chosen a device for this rank.
/// let device = CudaContext::new(world.device().unwrap_or(0))?;
/// let mesh = View::init(&world, &[world.size()], &["dp"])?;
///
/// let stream = device.new_stream()?;
/// let mut gradients = stream.clone_htod(&vec![1.0f32; 1000])?;
/// mesh.on_stream(&stream)?.all_reduce("dp", &mut gradients, Operator::Average)?;
/// assert_eq!(stream.clone_dtoh(&gradients)?, vec![1.0; 1000]);
/// mesh.root_comms().finalize()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A buffer cannot be sent and received at once, and no other type can stand for device memory:
/// ```compile_fail,E0499
/// use devicemesh::{comm::OnStream, cudarc::driver::CudaSlice};
/// fn gather(on_stream: &OnStream<'_>, values: &mut CudaSlice<f32>) {
///     let _ = on_stream.all_gather("dp", values, values);
/// }
/// ```
/// ```compile_fail,E0277
/// use devicemesh::{comm::{OnStream, Operator}, cudarc::driver::UnifiedSlice};
/// fn sum(on_stream: &OnStream<'_>, values: &mut UnifiedSlice<f32>) {
///     let _ = on_stream.all_reduce("dp", values, Operator::Sum);
/// }
/// ```
pub struct OnStream<'a> {
    view: &'a View,
    stream: &'a Arc<CudaStream>,
}

/// How long a kernel may take to end after the abort of its communicator.
const AFTER_ABORT: Duration = Duration::from_millis(500);

/// `CU_STREAM_PER_THREAD` of cuda.h, a handle that stands for another stream on each thread.
const PER_THREAD_STREAM: usize = 2;

impl View {
    /// The collectives of this mesh over device memory, queued on `stream`. Local.
    ///
    /// The stream is of the device that the communicators were made on. Fails on device type cpu,
    /// which has no streams, and for the per-thread default stream, because cudarc keeps no order
    /// between the streams that it stands for on different threads.
    pub fn on_stream<'a>(&'a self, stream: &'a Arc<CudaStream>) -> Result<OnStream<'a>> {
        let library = self.library()?;
        if library.is_host_engine() {
            return Err(Error::unsupported(format!(
                "on_stream: device type {} is on {}, which has no streams: View::all_reduce and its neighbours take slices in host memory",
                self.mesh().device_type(),
                library.label()
            )));
        }
        if stream.cu_stream().addr() == PER_THREAD_STREAM {
            return Err(Error::unsupported(
                "on_stream: the per-thread default stream is another stream on each thread: take CudaContext::new_stream or default_stream",
            ));
        }
        Ok(OnStream { view: self, stream })
    }
}

impl OnStream<'_> {
    /// Reduces `values` over this rank's group along `dim`, in place. **Collective over the
    /// group.**
    pub fn all_reduce<T: Element>(&self, dim: &str, values: &mut impl DeviceBuffer<T>, op: Operator) -> Result<()> {
        let count = |[values]: [usize; 1], _| Ok(values);
        self.queue(
            ("all_reduce", What::of(Operation::AllReduce).reducing(op as i32)),
            dim,
            [("values", values)],
            count,
            |library, comm, [values], count, stream| {
                // SAFETY: `queue` does what the module's head says; `values` has `count` elements.
                unsafe { library.all_reduce(values, values, count, T::DTYPE, op as i32, comm, stream) }
            },
        )
    }

    /// Copies `values` of the rank `root` of `dim` to all ranks of the group. **Collective over the
    /// group.**
    pub fn broadcast<T: Element>(&self, dim: &str, values: &mut impl DeviceBuffer<T>, root: usize) -> Result<()> {
        let count = |[values]: [usize; 1], size| root_rank("broadcast", dim, root, size).map(|_| values);
        self.queue(
            ("broadcast", What::of(Operation::Broadcast).with(root as i32)),
            dim,
            [("values", values)],
            count,
            |library, comm, [values], count, stream| {
                // SAFETY: as in `all_reduce`; `root` is a rank of the group, so it fits.
                unsafe { library.broadcast(values, values, count, T::DTYPE, root as i32, comm, stream) }
            },
        )
    }

    /// Puts `send` of every rank of the group into `recv`, in rank order; `recv` is as many times
    /// as long as `dim` has ranks. **Collective over the group.**
    pub fn all_gather<T: Element>(
        &self,
        dim: &str,
        send: &mut impl DeviceBuffer<T>,
        recv: &mut impl DeviceBuffer<T>,
    ) -> Result<()> {
        let count =
            |[send, recv]: [usize; 2], size| block_of_each_rank("all_gather", ("recv", recv), ("send", send), size);
        let buffers: [Named<'_, T>; 2] = [("send", send), ("recv", recv)];
        self.queue(
            ("all_gather", What::of(Operation::AllGather)),
            dim,
            buffers,
            count,
            |library, comm, [send, recv], count, stream| {
                // SAFETY: as in `all_reduce`; `recv` has room for `count` elements of each rank.
                unsafe { library.all_gather(send, recv, count, T::DTYPE, comm, stream) }
            },
        )
    }

    /// Reduces `send` over the group and leaves block `i` of the result on rank `i`; `send` is as
    /// many times as long as `recv` as `dim` has ranks. **Collective over the group.**
    pub fn reduce_scatter<T: Element>(
        &self,
        dim: &str,
        send: &mut impl DeviceBuffer<T>,
        recv: &mut impl DeviceBuffer<T>,
        op: Operator,
    ) -> Result<()> {
        let count =
            |[send, recv]: [usize; 2], size| block_of_each_rank("reduce_scatter", ("send", send), ("recv", recv), size);
        let buffers: [Named<'_, T>; 2] = [("send", send), ("recv", recv)];
        self.queue(
            ("reduce_scatter", What::of(Operation::ReduceScatter).reducing(op as i32)),
            dim,
            buffers,
            count,
            |library, comm, [send, recv], count, stream| {
                // SAFETY: as in `all_reduce`; `send` has `count` elements for each rank.
                unsafe { library.reduce_scatter(send, recv, count, T::DTYPE, op as i32, comm, stream) }
            },
        )
    }

    /// Sends block `i` of `send` to rank `i` of the group and receives block `i` of `recv` from it.
    /// Both have equal blocks for all ranks. **Collective over the group.**
    pub fn all_to_all<T: Element>(
        &self,
        dim: &str,
        send: &mut impl DeviceBuffer<T>,
        recv: &mut impl DeviceBuffer<T>,
    ) -> Result<()> {
        let count = |[send, recv]: [usize; 2], size| block_for_each_rank("all_to_all", send, recv, size);
        let buffers: [Named<'_, T>; 2] = [("send", send), ("recv", recv)];
        self.queue(
            ("all_to_all", What::of(Operation::AllToAll)),
            dim,
            buffers,
            count,
            |library, comm, [send, recv], count, stream| {
                // SAFETY: as in `all_reduce`; both have `count` elements for each rank.
                unsafe { library.all_to_all(send, recv, count, T::DTYPE, comm, stream) }
            },
        )
    }

    /// Returns when all work on the stream is done and no communicator along `dim` has failed.
    /// `None` as `dim` stands for all communicators of the mesh, and `None` as `timeout` for the
    /// mesh's timeout. A lost rank and the deadline end the wait, where [`CudaStream::synchronize`]
    /// would wait for ever. **Local**. See [`View::stream_wait`].
    pub fn wait(&self, dim: Option<&str>, timeout: Option<Duration>) -> Result<()> {
        let bound = self.stream.context().bind_to_thread();
        bound.map_err(|error| failed("wait", "an earlier call of cudarc", error))?;
        // SAFETY: the stream lives as long as this reference to it.
        unsafe { self.view.stream_wait(dim, self.stream.cu_stream().cast(), timeout) }
    }

    /// Checks the buffers, and queues what `issue` calls with their addresses on the stream, in the
    /// order that the module's head describes. `count` gives the operation's count from the lengths
    /// of the buffers and the number of ranks.
    fn queue<T: Element, const N: usize>(
        &self,
        (name, what): (&str, What),
        dim: &str,
        buffers: [Named<'_, T>; N],
        count: impl FnOnce([usize; N], usize) -> Result<usize>,
        issue: impl FnOnce(&Library, RawComm, [*mut c_void; N], usize, *mut c_void) -> NcclResult,
    ) -> Result<()> {
        if in_group(self.view.library()?) {
            return Err(Error::invalid_state(format!(
                "{name}: a group delays its operations until its end, but the buffers are borrowed only for this call: end the group first"
            )));
        }
        let context = self.stream.context();
        for (what, buffer) in &buffers {
            check_context(name, what, buffer.stream().context(), context)?;
        }
        self.view.along_dim(dim, |view, index| {
            let count = count(buffers.each_ref().map(|(_, buffer)| buffer.len()), view.mesh().dim_size(index))?;
            let operands = Operands::new(count, T::DTYPE, self.stream.cu_stream().cast()).of(what);
            view.comm(index)?;
            self.check_device(name, view.communicator(index)?)?;
            context.bind_to_thread().map_err(|error| failed(name, "an earlier call of cudarc", error))?;
            keep(self.stream);
            // The stream waits for the last uses of the buffers.
            let places = buffers.map(|(_, buffer)| buffer.device_ptr_mut(self.stream));
            context.check_err().map_err(|error| failed(name, "waiting for the last use of a buffer", error))?;
            let addresses = places.each_ref().map(|(address, _)| *address as usize as *mut c_void);
            let code = Cell::new(result::SUCCESS);
            let outcome = view.operate(name, index, operands, &[], |library, comm| {
                code.set(issue(library, comm, addresses, count, operands.stream));
                code.get()
            });
            if outcome.is_err() && code.get() == result::IN_PROGRESS {
                // The library could still queue the operation when its buffers are gone. The first
                // error is the one to tell.
                let _ = self.view.root_comms().abort();
            }
            // Each buffer's event has the operation.
            drop(places);
            let recorded = context.check_err().map_err(|error| {
                self.await_end(dim);
                failed(name, "recording the use of a buffer", error)
            });
            outcome.and(recorded)
        })
    }

    /// Waits until the work on the stream is over. It is called when no event marks the end of an
    /// operation, so that later uses of its buffers would not wait for it. The operation may wait
    /// for a peer that never comes, so the mesh is aborted when the work is not over at the mesh's
    /// timeout.
    fn await_end(&self, dim: &str) {
        let _ = self.wait(Some(dim), None);
        let is_busy = || query(self.stream) == sys::CUresult::CUDA_ERROR_NOT_READY;
        if is_busy() {
            // The first error is the one to tell.
            let _ = self.view.root_comms().abort();
        }
        let deadline = Deadline::after(AFTER_ABORT);
        while is_busy() && !deadline.passed() {
            std::thread::sleep(deadline.slice());
        }
    }

    /// Fails where the communicator is of another device than the stream.
    fn check_device(&self, name: &str, communicator: &Communicator) -> Result<()> {
        let (library, ours) = (self.view.library()?, self.stream.context().ordinal());
        let device = communicator.ask_here(|comm| library.device_of(comm))?;
        match device.filter(|device| usize::try_from(*device).ok() != Some(ours)) {
            None => Ok(()),
            Some(device) => Err(Error::invalid(format!(
                "{name}: the stream is of device {ours}, but the communicator was made on device {device}: make the CudaContext of that device before the world is joined, and the stream in it"
            ))),
        }
    }
}

/// A buffer of an operation, and what it is called in messages.
type Named<'a, T> = (&'static str, &'a mut dyn DevicePtrMut<T>);

/// Fails for a buffer of another context, with which cudarc orders nothing.
fn check_context(name: &str, what: &str, buffer: &Arc<CudaContext>, stream: &Arc<CudaContext>) -> Result<()> {
    if Arc::ptr_eq(buffer, stream) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{name}: {what} is of another CudaContext (device {}) than the stream (device {}): cudarc keeps the order of streams within one CudaContext::new",
        buffer.ordinal(),
        stream.ordinal()
    )))
}

fn failed(name: &str, what: &str, error: DriverError) -> Error {
    Error::new(Status::Device, format!("{name}: {what}: {error}")).with_device_error(error.0 as i32)
}

/// Asks the driver whether the work on the stream is done.
fn query(stream: &CudaStream) -> sys::CUresult {
    // SAFETY: the stream lives as long as the reference.
    unsafe { sys::cuStreamQuery(stream.cu_stream()) }
}

/// The streams on which operations were queued, and which may be at work.
///
/// cudarc orders the uses of a buffer only while its context counts more than one stream, and a
/// stream that is dropped counts no longer, though its work goes on. So a stream is kept here until
/// the program has dropped it and its work is done.
static KEPT_STREAMS: Mutex<Vec<Arc<CudaStream>>> = Mutex::new(Vec::new());

fn keep(stream: &Arc<CudaStream>) {
    let mut done = Vec::new();
    let mut kept = KEPT_STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    for index in (0..kept.len()).rev() {
        if Arc::strong_count(&kept[index]) == 1 && query(&kept[index]) == sys::CUresult::CUDA_SUCCESS {
            done.push(kept.swap_remove(index));
        }
    }
    // The default stream is never dropped, and not counted.
    if !stream.cu_stream().is_null() && !kept.iter().any(|known| Arc::ptr_eq(known, stream)) {
        kept.push(Arc::clone(stream));
    }
    drop(kept);
    // Dropping a stream calls the driver, which need not be done under the lock.
    drop(done);
}
