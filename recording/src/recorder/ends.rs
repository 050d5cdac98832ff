//! The ends of calls, and the times of brief ones.
//!
//! A look at the clock takes as long as all the rest of a record: 21 ns on an AMD EPYC. While a
//! rank looks, the ranks that wait for it lose this time, too. So a brief call has one look, which
//! comes when the rank itself waits, when the other ranks can see its call, or when the call ends.

use std::sync::atomic::Ordering::Relaxed;

use super::{Entry, NOT_LOOKED, Recorder, channel_base, slot_base};
use crate::clock::Clock;
use crate::layout::{call, channel};
use crate::snapshot::EntryState;

/// Whether a call has waited for another rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// The call has not waited.
    None,
    /// The last wait of the call was over at these ticks, or some hundred nanoseconds later.
    Until(u64),
    /// The call may have waited, and nobody knows until when.
    Unknown,
}

impl Recorder {
    /// The clock, where a look at it takes about as long as one poll of a word in memory.
    #[inline]
    pub fn quick_clock(&self) -> Option<Clock> {
        (self.clock == Clock::Counter).then_some(self.clock)
    }

    /// Records that the brief call with that number in the process begins now, unless its beginning
    /// has a time already. Returns the time, in ticks; 0 where later calls have taken the place of
    /// the call.
    #[inline]
    pub fn set_begun(&self, number: u64) -> u64 {
        let begun = slot_base(number) + call::BEGUN;
        if !self.stands_at(number) {
            return 0;
        }
        match self.get(begun) {
            NOT_LOOKED => {
                let ticks = self.clock.ticks();
                self.set(begun, ticks);
                self.renew_after(ticks);
                ticks
            }
            known => known,
        }
    }

    /// Records the end of a call that has waited as `wait` says.
    #[inline]
    pub fn end_after(&self, entry: Entry, state: EntryState, wait: Wait) {
        match wait {
            Wait::None => self.end_at_once(entry, state),
            Wait::Until(ticks) if entry.is_brief() => self.end_at(entry, state, ticks),
            Wait::Until(_) | Wait::Unknown => self.end(entry, state),
        }
    }

    /// Records the end of a call: [`EntryState::Done`], [`EntryState::Failed`], or
    /// [`EntryState::Issued`] where the call was handed to a stream and nobody waits for it here.
    #[inline]
    pub fn end(&self, entry: Entry, state: EntryState) {
        // Reading the clock takes most of the time here.
        if entry.is_none() {
            return;
        }
        let ticks = self.clock.ticks();
        self.end_at(entry, state, ticks);
        self.renew_after(ticks);
    }

    /// Records the end of a call that did not wait for another rank. Its beginning and its end get
    /// one time.
    #[inline]
    pub fn end_at_once(&self, entry: Entry, state: EntryState) {
        if entry.is_none() {
            return;
        }
        match self.get(slot_base(entry.number) + call::BEGUN) {
            NOT_LOOKED => self.end(entry, state),
            begun => self.end_at(entry, state, begun),
        }
    }

    #[inline(always)]
    fn end_at(&self, entry: Entry, state: EntryState, ticks: u64) {
        self.change(entry, state, Some(ticks));
        if !entry.is_collective() {
            return;
        }
        if state == EntryState::Failed {
            self.count_failed(entry);
            return;
        }
        let base = channel_base(entry.place());
        // Another group may have got the place while the call ran, and a later call may have ended
        // before this one.
        if entry.number >= self.get(base + channel::FIRST_CALL)
            && entry.in_channel() > self.get(base + channel::CALLS_ENDED)
        {
            self.set(base + channel::CALLS_ENDED, entry.in_channel());
        }
    }

    /// Counts a collective call that has failed, unless another group has got the place meanwhile.
    #[cold]
    fn count_failed(&self, entry: Entry) {
        let base = channel_base(entry.place());
        if entry.number >= self.get(base + channel::FIRST_CALL) {
            self.words[base + channel::CALLS_FAILED].fetch_add(1, Relaxed);
        }
    }
}
