//! Memory for collectives, without `unsafe` in the program: host memory, or a GPU's with a stream.
//! collective.rs has the collectives over it.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_void;
use std::ptr::{copy_nonoverlapping, null_mut};
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::world::World;
use crate::ccl::{DeviceChoice, Stream, select_device};
use crate::error::{Error, Result};

/// The alignment of every buffer in bytes. GPUs align their memory in this way.
const ALIGNMENT: usize = 256;
/// A wait for a stream asks again without a pause for this long, because most collectives are
/// short.
const EAGER: Duration = Duration::from_millis(2);
/// The pause between two questions to the stream once [`EAGER`] has passed.
const PAUSE: Duration = Duration::from_micros(100);

/// Where the buffers of a world lie: host memory on device type cpu, else a device's memory with a
/// stream of its own. Memory and its buffers stay on the thread that made them.
///
/// ```
/// use std::{sync::Arc, time::Duration};
/// use devicemesh::comm::{Collective, Memory, Operator, View, World, WorldOptions};
///
/// let world = Arc::new(World::join("cpu", &WorldOptions::default())?);
/// let ranks = world.size();
/// let mesh = View::init(&world, &[ranks], &["dp"])?;
/// let memory = Memory::of(&world)?;
/// let (send, recv) = (memory.buffer(12)?, memory.buffer(12)?);
/// send.write(0, &[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])?;
/// let int32 = 2;
/// mesh.collective(0, Collective::AllReduce(Operator::Sum), int32, 3, send.at(0), recv.at(0))?;
/// memory.wait(Duration::from_secs(60), || mesh.check(0))?;
/// let mut sums = [0; 12];
/// recv.read(0, &mut sums)?;
/// assert_eq!(sums[8], 3 * ranks as u8);
/// # mesh.root_comms().finalize()?;
/// # Ok::<(), devicemesh::error::Error>(())
/// ```
#[derive(Clone)]
pub struct Memory {
    place: Rc<Place>,
}

/// The kind of memory.
enum Place {
    Host,
    Device {
        /// The device type of the world, for example "cuda".
        device_type: String,
        /// Where copies and collectives are queued.
        stream: Stream,
    },
}

/// Some bytes of a [`Memory`]. A new buffer holds zeros on the host, and anything on a device.
///
/// The memory is given back when the buffer is dropped. Where a device is still at work then, as
/// after a collective that timed out, the memory is kept until the process ends.
pub struct Buffer {
    place: Rc<Place>,
    /// The first byte: a pointer on the host, else an address of the device.
    address: *mut u8,
    /// The size that the caller asked for.
    len: usize,
    /// The size that was allocated.
    capacity: usize,
}

/// A place in a buffer, where the data of a collective begins.
#[derive(Clone, Copy)]
pub struct BufferAt<'a> {
    buffer: &'a Buffer,
    /// Bytes from the beginning of the buffer.
    offset: usize,
}

impl Memory {
    /// Returns the memory of that world's device type. Where this is a device's memory, this
    /// function selects the device on the calling thread and makes a stream there. The device is
    /// that of the world. If the world has no device, it is the current device of the calling
    /// thread. If the thread has none, it is the device of the local rank.
    pub fn of(world: &World) -> Result<Memory> {
        let place = match world.device_type() {
            "cpu" => Place::Host,
            device_type => {
                // Where the host engine makes the communicators of a world of GPUs, the world has
                // chosen no device. The memory lies on a device all the same.
                match world.device() {
                    Some(_) => world.select_device()?,
                    None => select_device(DeviceChoice::LocalRank(world.local_place().local_rank)).map(drop)?,
                }
                Place::Device { device_type: device_type.to_owned(), stream: Stream::new()? }
            }
        };
        Ok(Memory { place: Rc::new(place) })
    }

    /// Whether this is the memory of a device.
    pub fn is_on_device(&self) -> bool {
        matches!(*self.place, Place::Device { .. })
    }

    /// Returns the name of the device; `None` on the host, and where the driver does not tell the
    /// name.
    pub fn device_name(&self) -> Option<&str> {
        match &*self.place {
            Place::Host => None,
            Place::Device { stream, .. } => stream.device_name(),
        }
    }

    /// Returns a buffer of that many bytes. On a device it lies on the device of this memory, also
    /// where another one is current on the thread by now. Fails with `DM_STATUS_DEVICE` where there
    /// is no memory for it.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer> {
        let too_large = || Error::no_memory(bytes);
        let capacity = bytes.max(1).checked_next_multiple_of(ALIGNMENT).ok_or_else(too_large)?;
        let address = match &*self.place {
            Place::Host => {
                let layout = Layout::from_size_align(capacity, ALIGNMENT).map_err(|_| too_large())?;
                // SAFETY: the layout has a size, because the capacity is at least 1.
                let address = unsafe { alloc_zeroed(layout) };
                if address.is_null() {
                    return Err(too_large());
                }
                address
            }
            Place::Device { stream, .. } => stream.allocate(capacity)?,
        };
        Ok(Buffer { place: Rc::clone(&self.place), address, len: bytes, capacity })
    }

    /// Returns when everything on the stream is done. In host memory this function returns at
    /// once, because each call there is done when it returns. `check` is asked now and then
    /// whether the wait still makes sense: [`View::check`](crate::comm::View::check) tells of a
    /// communicator that has failed.
    pub fn wait(&self, timeout: Duration, check: impl Fn() -> Result<()>) -> Result<()> {
        let Place::Device { stream, .. } = &*self.place else { return Ok(()) };
        let began = Instant::now();
        while !stream.is_idle()? {
            let waited = began.elapsed();
            if waited > timeout {
                return Err(Error::timeout(format!(
                    "the work on the stream was not done after {} s",
                    timeout.as_secs_f64()
                )));
            }
            if waited > EAGER {
                check()?;
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }
}

impl Place {
    /// Waits for a copy, which needs no other rank.
    fn finish_copy(self: &Rc<Place>) -> Result<()> {
        Memory { place: Rc::clone(self) }.wait(Duration::from_secs(60), || Ok(()))
    }
}

impl Buffer {
    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the place `offset` bytes from the beginning.
    pub fn at(&self, offset: usize) -> BufferAt<'_> {
        BufferAt { buffer: self, offset }
    }

    /// Copies `from` to the bytes from `offset` on, after everything that is on the stream.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        let to = self.at(offset).checked("write", from.len())?;
        match &*self.place {
            // SAFETY: the bytes lie inside this buffer, which `from` cannot be a part of. No call
            // works on it, because calls on the host are done when they return, and a buffer stays
            // on its thread.
            Place::Host => unsafe { copy_nonoverlapping(from.as_ptr(), to, from.len()) },
            Place::Device { stream, .. } => {
                let staged = from.to_vec();
                let copied = stream.upload(to, &staged).and_then(|()| self.place.finish_copy());
                keep_unless_done(staged, &copied);
                copied?;
            }
        }
        Ok(())
    }

    /// Copies the bytes from `offset` on into `to`, after everything that is on the stream. After a
    /// failure `to` is as it was.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let from = self.at(offset).checked("read", to.len())?;
        match &*self.place {
            // SAFETY: as in `write`.
            Place::Host => unsafe { copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) },
            Place::Device { stream, .. } => {
                let mut staged = vec![0; to.len()];
                let copied = stream.download(&mut staged, from).and_then(|()| self.place.finish_copy());
                if copied.is_ok() {
                    to.copy_from_slice(&staged);
                }
                keep_unless_done(staged, &copied);
                copied?;
            }
        }
        Ok(())
    }

    /// Copies the first `bytes` of `from` to the beginning of this buffer, `times` times. Returns
    /// when the last copy is done. Programs measure the speed of the memory with this function.
    pub fn copy_from(&self, from: &Buffer, bytes: usize, times: usize) -> Result<()> {
        if !Rc::ptr_eq(&self.place, &from.place) || std::ptr::eq(self, from) {
            return Err(Error::invalid("copy_from: the buffers are not two buffers of one memory"));
        }
        let (to, from) = (self.at(0).checked("copy_from", bytes)?, from.at(0).checked("copy_from", bytes)?);
        for _ in 0..times {
            match &*self.place {
                // SAFETY: both hold that many bytes, two buffers never overlap, and no call works
                // on them.
                Place::Host => unsafe { copy_nonoverlapping(from, to, bytes) },
                Place::Device { stream, .. } => stream.copy(to, from, bytes)?,
            }
            // Without `black_box` the compiler may leave out a copy that the next copy repeats.
            std::hint::black_box(to);
        }
        self.place.finish_copy()
    }
}

/// Keeps the host's side of a copy until the process ends where the device may still be at work on
/// it.
fn keep_unless_done(staged: Vec<u8>, copied: &Result<()>) {
    if copied.is_err() {
        std::mem::forget(staged);
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        match &*self.place {
            Place::Host => {
                if let Ok(layout) = Layout::from_size_align(self.capacity, ALIGNMENT) {
                    // SAFETY: `Memory::buffer` allocated it with this layout, and no call works on
                    // it.
                    unsafe { dealloc(self.address, layout) }
                }
            }
            Place::Device { stream, .. } => {
                if matches!(stream.is_idle(), Ok(true)) {
                    stream.free(self.address);
                }
            }
        }
    }
}

impl BufferAt<'_> {
    /// The device type of the memory, and the stream on which its collectives are queued: NULL in
    /// host memory.
    pub(super) fn place(&self) -> (&str, *mut c_void) {
        match &*self.buffer.place {
            Place::Host => ("cpu", null_mut()),
            Place::Device { device_type, stream } => (device_type.as_str(), stream.raw()),
        }
    }

    /// Whether both places are in buffers of one memory.
    pub(super) fn is_beside(&self, other: &BufferAt<'_>) -> bool {
        Rc::ptr_eq(&self.buffer.place, &other.buffer.place)
    }

    /// The address, when that many bytes follow it in the buffer.
    pub(super) fn checked(self, call: &str, bytes: usize) -> Result<*mut u8> {
        let BufferAt { buffer, offset } = self;
        match offset.checked_add(bytes) {
            Some(end) if end <= buffer.len => Ok(buffer.address.wrapping_add(offset)),
            _ => Err(Error::invalid(format!(
                "{call}: {bytes} bytes from offset {offset} on are not inside a buffer of {} bytes",
                buffer.len
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_buffers_hold_what_is_written() {
        let memory = Memory { place: Rc::new(Place::Host) };
        let (one, other) = (memory.buffer(1000).unwrap(), memory.buffer(1000).unwrap());
        one.write(3, &[1, 2, 3]).unwrap();
        other.copy_from(&one, 1000, 2).unwrap();
        let mut got = [9; 5];
        other.read(2, &mut got).unwrap();
        assert_eq!(got, [0, 1, 2, 3, 0]);
        assert_eq!(other.address as usize % ALIGNMENT, 0);
        assert!(other.read(996, &mut got).is_err() && other.write(usize::MAX, &got).is_err());
        assert!(one.copy_from(&one, 1, 1).is_err() && one.copy_from(&other, 1001, 1).is_err());
        assert!(memory.buffer(usize::MAX).is_err());
    }
}
