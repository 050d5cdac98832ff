//! Tells a rank that is blocked in a communicator that another rank has begun a recovery
//! (docs/recovery.md, "Blocked in a collective").
//!
//! A wait in the store reads the notes of turns by itself. A collective of a communicator library
//! asks the store for nothing. So this file asks in its place when the collective has waited for
//! long. The library leaves one WAIT for the next note unanswered at the store, and each look at
//! it is a read of a socket that does not block. The WAIT stays open when the collective has
//! ended. So while nothing is wrong, all waits of a process together cost the store two
//! operations. A store that answers each question at once (a folder, the caller's) is asked once
//! in [`ASK`].

use std::sync::{Arc, Mutex, TryLockError};
use std::time::Instant;

use super::losses::Losses;
use super::open_wait::{ASK, OpenWait, SHORT};
use super::store::Store;
use super::turns::Turn;
use crate::error::Result;
use crate::wait::Wait;

/// Watches the notes of turns of one world for the threads that are blocked in communicators.
pub(super) struct TurnWatch {
    /// The store that has the notes.
    store: Arc<dyn Store>,
    /// The list that has the notes, and what this process has read of it.
    losses: Arc<Losses>,
    /// Held by the thread that looks.
    looking: Mutex<Looking>,
}

/// The findings of the looks.
#[derive(Default)]
struct Looking {
    /// The open question for the next note.
    next: OpenWait,
    /// When the store was last asked without leaving a question open.
    asked: Option<Instant>,
}

impl TurnWatch {
    pub(super) fn new(store: Arc<dyn Store>, losses: Arc<Losses>) -> TurnWatch {
        TurnWatch { store, losses, looking: Mutex::default() }
    }

    /// Returns the turn to which another rank has come and this rank has not, as far as this rank
    /// knows by now. Where the function asks the store, it waits for the answer, [`SHORT`] at most
    /// for each question. It waits for nothing else.
    pub(super) fn begun(&self) -> Option<Turn> {
        let turns = self.losses.turns();
        if turns.next().is_none() {
            match self.looking.try_lock() {
                Ok(mut looking) => self.look(&mut looking),
                Err(TryLockError::Poisoned(poisoned)) => self.look(&mut poisoned.into_inner()),
                // Another thread looks now.
                Err(TryLockError::WouldBlock) => {}
            }
        }
        turns.next()
    }

    fn look(&self, looking: &mut Looking) {
        let has_news = looking.next.has_come();
        let may_ask = looking.asked.is_none_or(|asked| asked.elapsed() >= ASK);
        if has_news || (!looking.next.is_open() && may_ask) {
            looking.asked = Some(Instant::now());
            // A store that does not answer has told nothing. A later look asks again.
            let _ = self.ask(looking);
        }
    }

    /// Reads the notes, and leaves the question for the next one open.
    fn ask(&self, looking: &mut Looking) -> Result<()> {
        self.losses.refresh(&Wait::after(SHORT))?;
        let (_, next) = self.losses.next();
        looking.next.begin(&*self.store, &next, &Wait::after(SHORT))
    }
}
