//! The part of the wire that its thread shares with the threads of the program: the worker behind
//! a lock, and the functions that let the worker make progress.

use std::cell::UnsafeCell;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::driver::Driver;
use super::greeting::worker_ended;
use super::library::Library;
use super::state::Core;
use super::worker::{GREETINGS, MESSAGES, Worker};
use super::{arrival, frame};
use crate::error::{Error, Result};
use crate::event::Event;
use crate::fork::{self, Own, Private};
use crate::token::random_token;
use crate::types::ncclSystemError;
use crate::wire::{Contact, address};

/// The most times that one call lets UCX make progress before the call returns.
const TURNS: u32 = 64;

/// The part of the wire that its thread shares.
pub(super) struct Shared {
    /// How other processes reach this one.
    pub(super) contact: Contact,
    /// Keeps the threads that use `core` apart.
    pub(super) lock: Mutex<()>,
    /// The state of the wire, and UCX's worker. The core is reached by its address, because UCX's
    /// callbacks use it while a function of this file is inside UCX. A forked child never drops the
    /// core, because that would break the parent's connections.
    pub(super) core: Own<Box<UnsafeCell<Core>>>,
    /// The word of `Wire::moved`.
    pub(super) moved: Box<Event>,
    /// The worker's descriptor.
    pub(super) worker_fd: Private<OwnedFd>,
    /// The silence after which a peer is lost.
    pub(super) limit: Duration,
    /// The state by which the threads agree which of them drives the wire.
    pub(super) driver: Driver,
    /// The function that the wire's thread calls about ten times a second.
    pub(super) tick: fn(),
}

// SAFETY: `core` and what it points to, UCX's worker among it, are used only by the thread that
// holds `lock`. The worker is made for threads that take turns.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Shared");
        shown.field("contact", &self.contact.id);
        let alone = if fork::is_child() { None } else { self.lock.try_lock().ok() };
        if alone.is_some() {
            // SAFETY: this thread holds the lock.
            let core = unsafe { &*self.core.get() };
            shown.field("peers", &core.peers).field("requests", &core.requests);
            shown.field("flights", &core.worker.flights.len());
        }
        shown.finish_non_exhaustive()
    }
}

impl Shared {
    /// Makes the wire over the library that `open` returns.
    pub(super) fn new(
        open: fn() -> std::result::Result<&'static Library, String>,
        limit: Duration,
        tick: fn(),
    ) -> Result<Shared> {
        let failed = |why: String| Error::new(ncclSystemError, why);
        let library = open().map_err(failed)?;
        let worker = Worker::new(library).map_err(failed)?;
        let address = worker.address().and_then(|worker| frame::address(&place(), &worker)).map_err(failed)?;
        let worker_fd = worker.descriptor().map_err(failed)?;
        let contact = Contact { id: random_token()?, address };
        log::debug!("the wire uses {library}; its address has {} bytes", contact.address.len());
        let core = Box::new(UnsafeCell::new(Core::new(worker, contact.clone())));
        let argument = core.get().cast();
        // SAFETY: nobody else has the core yet.
        let worker = unsafe { &(*core.get()).worker };
        worker.set_handler(MESSAGES, arrival::on_message, argument).map_err(failed)?;
        worker.set_handler(GREETINGS, arrival::on_greeting, argument).map_err(failed)?;
        Ok(Shared {
            contact,
            lock: Mutex::default(),
            core: Own::new(core),
            moved: Box::default(),
            worker_fd,
            limit: limit.max(Duration::from_millis(100)),
            driver: Driver::new().map_err(|error| Error::system("eventfd", error))?,
            tick,
        })
    }

    /// Runs `work` on the core, alone. Returns `None` in a forked child, where the worker must not
    /// be touched.
    pub(super) fn with<R>(&self, work: impl FnOnce(*mut Core) -> R) -> Option<R> {
        if fork::is_child() {
            return None;
        }
        let _alone = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        Some(work(self.core.get()))
    }

    /// Runs `work` on the core, alone, and tells the threads that sleep what has changed. `work`
    /// does not make progress.
    pub(super) fn edit<R>(&self, work: impl FnOnce(&mut Core) -> R) -> Option<R> {
        self.with(|core| {
            // SAFETY: this thread holds the lock, so it has the only reference. UCX calls back
            // into the core only while it makes progress.
            let core = unsafe { &mut *core };
            let result = work(core);
            core.connect_all();
            self.tell(core);
            result
        })
    }

    /// Changes the wire's word, if a request has ended, a notice has come or a peer was lost.
    pub(super) fn tell(&self, core: &mut Core) {
        if std::mem::take(&mut core.changed) {
            self.moved.change();
            self.driver.changed();
        }
    }

    /// Makes progress. Returns whether anything has moved.
    ///
    /// # Safety
    /// The calling thread holds the lock, and no reference to the core exists.
    pub(super) unsafe fn advance(&self, core: *mut Core) -> bool {
        let mut any = false;
        for _ in 0..TURNS {
            // SAFETY: the caller's contract. The callbacks inside `progress` use the core.
            let moved = unsafe {
                let (progress, worker) = ((*core).worker.library.functions.progress, (*core).worker.worker);
                !worker.is_null() && progress(worker) != 0
            };
            // SAFETY: the caller's contract, and no callback runs now.
            let core = unsafe { &mut *core };
            let any_report = core.handle_reports();
            self.tell(core);
            if !moved && !any_report {
                break;
            }
            any = true;
        }
        any
    }

    /// Makes progress, if no other thread does.
    pub(super) fn turn(&self) -> bool {
        if fork::is_child() {
            return false;
        }
        let Ok(_alone) = self.lock.try_lock() else { return false };
        // SAFETY: this thread holds the lock, and has no reference to the core.
        unsafe { self.advance(self.core.get()) }
    }

    /// Ends UCX's worker, and with it the connections to all peers. This is the last resort if UCX
    /// keeps a caller's buffer: afterwards UCX does not touch memory of this process.
    pub(super) fn end_worker(&self) {
        let lost = worker_ended();
        self.with(|core| {
            // SAFETY: this thread holds the lock. No reference to the core exists while UCX ends
            // the worker, because UCX's callbacks may use the core.
            unsafe {
                (*core).lose_all(&lost);
                let (end, worker) = (*core).worker.take();
                if !worker.is_null() {
                    end(worker);
                }
                (*core).handle_reports();
                (*core).release_all(&lost);
                self.tell(&mut *core);
            }
        });
    }

    /// Sends signs of life, and loses silent peers.
    pub(super) fn beat(&self, own_pause: bool) {
        self.with(|core| {
            // SAFETY: this thread holds the lock, and keeps no reference over `advance`. Signs of
            // life that have come already are looked at first.
            unsafe {
                self.advance(core);
                (*core).beat(self.limit, own_pause);
                self.advance(core);
            }
        });
    }
}

/// Says where this process is, for the messages of others.
fn place() -> String {
    format!("process {} on {}", std::process::id(), address::host_name())
}
