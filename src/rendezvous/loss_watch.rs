//! Watches for lost ranks of one world, for the events of this process (src/events.rs). While no
//! call of this rank waits, nothing else looks for lost ranks.
//!
//! One WAIT for the next note of a loss is left unanswered at the store, so a look costs one read
//! of a socket. Where the store answers each question at once (a folder, the caller's) or does not
//! know who is lost, it is asked once in [`ASK`].

use std::collections::HashSet;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::current_epoch::CurrentEpoch;
use super::incarnation::Incarnation;
use super::losses::Losses;
use super::store::{KeyWatch, Store};
use crate::error::{Error, Result, Status};
use crate::events::{Event, Kind, Source};
use crate::rank_list::ranges;
use crate::wait::Wait;

/// The time between two questions to a store that cannot leave a question open, and after an
/// error.
const ASK: Duration = Duration::from_secs(1);

/// How long the store may take to answer.
const SHORT: Duration = Duration::from_millis(200);

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
    /// The store that has the notes.
    pub(super) store: Arc<dyn Store>,
    /// Whether rank 0 serves the store.
    pub(super) served: bool,
    /// The processes that are known to be lost.
    pub(super) losses: Arc<Losses>,
    /// The epoch in which this process is.
    pub(super) epoch: Arc<CurrentEpoch>,
    /// Whether losses give events: [`TELLS`], [`QUIET`] or [`OVER`].
    pub(super) state: AtomicU8,
    pub(super) looking: Mutex<Looking>,
}

/// What the looks have found.
#[derive(Default)]
pub(super) struct Looking {
    /// The open question for the next note.
    watch: Option<Box<dyn KeyWatch>>,
    /// When the store may be asked again; `None` where nobody has asked.
    may_ask: Option<Instant>,
    /// The lost processes that were reported.
    told: HashSet<Incarnation>,
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
    fn news(&self) -> Vec<Incarnation> {
        let mut looking = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
        let come = looking.watch.as_mut().map(|watch| watch.has_come());
        let has_news = matches!(come, Some(Ok(true)));
        if matches!(come, Some(Ok(true) | Err(_))) {
            looking.watch = None;
        }
        let is_time = looking.may_ask.is_none_or(|at| Instant::now() >= at);
        let mut store_is_gone = false;
        if has_news || (is_time && (looking.watch.is_none() || !self.store.knows_losses())) {
            looking.may_ask = Some(Instant::now() + ASK);
            let asked = self.ask(&mut looking);
            store_is_gone = asked.is_err_and(|error| error.status() == Status::Store);
        }
        let tickets = &self.epoch.get().tickets;
        let mut lost = self.losses.all(|process| process != self.me && tickets.are_of(process));
        if store_is_gone && self.served && self.me.rank != 0 {
            lost.insert(tickets.holder(0));
            self.losses.noticed(tickets.holder(0), "the store that it serves does not answer");
        }
        // The world may have ended here while the store was asked. Then the other ranks may end,
        // too.
        if !self.is_telling() {
            return Vec::new();
        }
        lost.retain(|process| looking.told.insert(*process));
        lost.into_iter().collect()
    }

    fn ask(&self, looking: &mut Looking) -> Result<()> {
        let wait = Wait::after(SHORT);
        self.losses.refresh(&wait)?;
        if looking.watch.is_none() {
            let (_, next) = self.losses.next();
            looking.watch = self.store.watch_key(&next, &wait)?;
        }
        Ok(())
    }

    fn event(&self, kind: Kind, message: String) -> Event {
        let epoch = self.epoch.get();
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
            self.size,
            self.launcher,
            self.store.name()
        );
        Some(self.event(Kind::Joined, message).about(vec![me]))
    }

    fn look(&self) -> Vec<Event> {
        if !self.is_telling() || self.size < 2 {
            return Vec::new();
        }
        let news = self.news();
        let ranks: Vec<i32> = news.iter().map(|process| process.rank).collect();
        let Some(first) = news.first() else { return Vec::new() };
        let is = if ranks.len() == 1 { "is" } else { "are" };
        let how = self.losses.how(*first);
        let message = format!("rank {}: {} {is} lost ({how})", self.me.rank, ranges(&ranks));
        vec![self.event(Kind::Lost, message).about(ranks)]
    }
}
