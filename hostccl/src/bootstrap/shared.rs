//! The state that the thread which serves joins shares with the threads that make and close unique
//! ids.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Error;
use crate::fork::{Closed, Inherited};
use crate::segment::Lobby;
use crate::wire::Token;

/// The thread of this process that serves joins, while there is one.
pub(super) static SERVER: Inherited<Option<Arc<Shared>>> = Inherited::new();

/// The state that the thread shares with the threads that make and close ids.
#[derive(Debug)]
pub(super) struct Shared {
    /// The process to which the thread belongs. A forked child of the process has no such thread.
    pub(super) pid: u32,
    /// Where the thread listens.
    pub(super) address: SocketAddr,
    /// The commands that the thread has not carried out yet.
    pub(super) commands: Mutex<Vec<Command>>,
    /// An event descriptor that the thread polls. It is readable when there is a command.
    pub(super) wake: Closed<OwnedFd>,
    /// Whether the thread takes no more commands.
    pub(super) ended: AtomicBool,
}

/// Something that the thread has to do.
#[derive(Debug)]
pub(super) enum Command {
    /// Serves a new id.
    Open(Token, Lobby),
    /// Ends the join of an id for the ranks that have registered, and forgets the id. The error is
    /// the reason, where a rank of this process has given the join up.
    Close(Token, Option<Box<Error>>),
}

impl Shared {
    /// Gives the thread a command, and wakes it.
    pub(super) fn command(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        let one = 1_u64.to_ne_bytes();
        // SAFETY: the buffer has eight bytes. The write fails only when the counter is full, and
        // then the thread wakes anyway.
        unsafe { libc::write(self.wake.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Ends the thread unless there is a command. Returns whether it has ended.
    pub(super) fn end(self: &Arc<Shared>) -> bool {
        let Some(mut server) = SERVER.try_lock() else { return false };
        let idle = self.commands.try_lock().is_ok_and(|commands| commands.is_empty());
        if idle {
            self.ended.store(true, Ordering::SeqCst);
            // The caller holds another reference, so dropping this one closes no descriptor.
            drop(server.take_if(|shared| Arc::ptr_eq(shared, self)));
        }
        idle
    }
}

/// Returns the thread of this process. In a forked child it forgets the parent's thread.
pub(super) fn current(server: &mut Option<Arc<Shared>>) -> Option<Arc<Shared>> {
    if let Some(theirs) = server.take_if(|shared| shared.pid != std::process::id()) {
        // The descriptors belong to the parent's thread. Their numbers may belong to other files of
        // this child by now, so the child must not close them.
        std::mem::forget(theirs);
    }
    server.clone().filter(|shared| !shared.ended.load(Ordering::SeqCst))
}
