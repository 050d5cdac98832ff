//! Watches for lost ranks of one world, for the events of this process (src/events.rs). While no
//! call of this rank waits, nothing else looks for lost ranks.
//!
//! One WAIT for the next note of a loss is left unanswered at the store, so a look costs one read
//! of a socket. Where the store answers each question at once (a folder, the caller's) or does not
//! know who is lost, it is asked once in [`ASK`].

use std::collections::HashSet;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::current_epoch::CurrentEpoch;
use super::incarnation::Incarnation;
use super::losses::Losses;
use super::open_wait::{ASK, OpenWait, SHORT};
use super::store::Store;
use crate::error::{Error, Result, Status};
use crate::events::{Event, Kind, Source, take_from_source};
use crate::rank_list::ranges;
use crate::wait::Wait;

/// Lost ranks give events.
const TELLS: u8 = 0;
/// The meshes of the world were finalized on this rank. The other ranks may end, and their ends
/// give no events.
const QUIET: u8 = 1;
/// The world has ended on this rank.
const OVER: u8 = 2;

/// The watch of one world.
pub(crate) struct LossWatch {
    /// This process.
    pub(super) me: Incarnation,
    /// The number of ranks with which this process has joined.
    pub(super) size: usize,
    /// The name of the launcher that started this process.
    pub(super) launcher: &'static str,
    /// Where the ranks have met: the name of the store.
    pub(super) met_in: String,
    /// Whether rank 0 serves the store.
    pub(super) served: bool,
    /// Whether losses give events: [`TELLS`], [`QUIET`] or [`OVER`].
    pub(super) state: AtomicU8,
    /// The epoch in which this process is; `None` after the end of the world.
    pub(super) epoch: Mutex<Option<Arc<CurrentEpoch>>>,
    /// A look holds this lock. So the end of the world waits for a look that is in progress, and
    /// then takes the value out.
    pub(super) looking: Mutex<Option<Looking>>,
}

/// The state of the looks: what they use, and what they have found.
pub(super) struct Looking {
    /// The store that has the notes.
    store: Arc<dyn Store>,
    /// The processes that are known to be lost.
    losses: Arc<Losses>,
    /// The epoch in which this process is.
    epoch: Arc<CurrentEpoch>,
    /// The open question for the next note.
    next: OpenWait,
    /// When the store may be asked again; `None` where nobody has asked.
    may_ask: Option<Instant>,
    /// The lost processes that were reported.
    told: HashSet<Incarnation>,
}

impl Looking {
    /// No look was made yet.
    pub(super) fn new(store: Arc<dyn Store>, losses: Arc<Losses>, epoch: Arc<CurrentEpoch>) -> Looking {
        Looking { store, losses, epoch, next: OpenWait::default(), may_ask: None, told: HashSet::new() }
    }

    /// Asks the store for lost processes, and leaves a question for the next one open.
    fn ask(&mut self) -> Result<()> {
        let wait = Wait::after(SHORT);
        self.losses.refresh(&wait)?;
        if self.next.is_open() {
            return Ok(());
        }
        let (_, next) = self.losses.next();
        self.next.begin(&*self.store, &next, &wait)
    }
}

impl LossWatch {
    /// Says whether the other ranks may end now, because no mesh of the world is in use here.
    pub(crate) fn set_quiet(&self, is_quiet: bool) {
        let (from, to) = if is_quiet { (TELLS, QUIET) } else { (QUIET, TELLS) };
        let _ = self.state.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Ends the watch, because the world ends on this rank.
    pub(crate) fn end(&self) {
        self.state.store(OVER, Ordering::SeqCst);
    }

    fn is_telling(&self) -> bool {
        self.state.load(Ordering::SeqCst) == TELLS
    }

    /// Asks the store when the next question is due, and returns the lost processes that were not
    /// reported before.
    fn news(&self, looking: &mut Looking) -> Vec<Incarnation> {
        let has_news = looking.next.has_come();
        let is_time = looking.may_ask.is_none_or(|at| Instant::now() >= at);
        let mut store_is_gone = false;
        if has_news || (is_time && (!looking.next.is_open() || !looking.store.knows_losses())) {
            looking.may_ask = Some(Instant::now() + ASK);
            let asked = looking.ask();
            store_is_gone = asked.is_err_and(|error| error.status() == Status::Store);
        }
        let tickets = &looking.epoch.get().tickets;
        let mut lost = looking.losses.all(|process| process != self.me && tickets.are_of(process));
        if store_is_gone && self.served && self.me.rank != 0 {
            lost.insert(tickets.holder(0));
            looking.losses.noticed(tickets.holder(0), "the store that it serves does not answer");
        }
        // The world may have ended here while the store was asked. Then the other ranks may end,
        // too.
        if !self.is_telling() {
            return Vec::new();
        }
        lost.retain(|process| looking.told.insert(*process));
        lost.into_iter().collect()
    }

    fn event(&self, epoch: &CurrentEpoch, kind: Kind, message: String) -> Event {
        let epoch = epoch.get();
        Event::new(kind, (self.me.rank as usize, epoch.size), epoch.number, message)
    }
}

impl Source for LossWatch {
    fn joined(&self) -> Option<Event> {
        if self.state.load(Ordering::SeqCst) == OVER || Error::check_fork().is_err() {
            return None;
        }
        let me = self.me.rank;
        let again = match self.me.ticket {
            0 => String::new(),
            before => format!(", as process {} of this rank", before + 1),
        };
        let message = format!(
            "rank {me} has joined a world of {} ranks{again}: launcher {}, met in {}",
            self.size, self.launcher, self.met_in
        );
        let epoch = self.epoch.lock().unwrap_or_else(PoisonError::into_inner);
        epoch.as_ref().map(|epoch| self.event(epoch, Kind::Joined, message).about(vec![me]))
    }

    fn look(&self) -> Vec<Event> {
        if !self.is_telling() || self.size < 2 {
            return Vec::new();
        }
        let mut looking = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(looking) = looking.as_mut() else { return Vec::new() };
        let news = self.news(looking);
        let ranks: Vec<i32> = news.iter().map(|process| process.rank).collect();
        let Some(first) = news.first() else { return Vec::new() };
        let is = if ranks.len() == 1 { "is" } else { "are" };
        let how = looking.losses.how(*first);
        let message = format!("rank {}: {} {is} lost ({how})", self.me.rank, ranges(&ranks));
        vec![self.event(&looking.epoch, Kind::Lost, message).about(ranks)]
    }

    fn release(&self) {
        self.end();
        drop(take_from_source(&self.epoch));
        drop(take_from_source(&self.looking));
    }
}
