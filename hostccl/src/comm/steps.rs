//! The steps of a communicator's collectives: how a rank ends a step, and whether the other ranks
//! have ended theirs.

use super::Comm;
use crate::poll::{Blocker, Poll};
use crate::sync::Ordering;

impl Comm {
    /// How many steps this rank has ended.
    pub(crate) fn step(&self) -> u64 {
        self.step.load(Ordering::Relaxed)
    }

    /// Notes that this rank, which is seat 0 of a communicator over several hosts, has posted its
    /// call of the current step.
    pub(crate) fn note_posted(&self) {
        self.segment.seat(self.rank).posted.store((self.step() + 1) as u32, Ordering::Release);
    }

    /// Whether another rank of this host has begun `step`, this rank's current step.
    pub(crate) fn has_begun(&self, seat: usize, step: u64) -> bool {
        let seat = self.segment.seat(seat);
        let has_ended = (seat.step.value().wrapping_sub(step as u32) as i32) > 0;
        has_ended || seat.posted.load(Ordering::Acquire) == (step + 1) as u32
    }

    /// Ends this rank's current step. The peers see what this rank wrote in the step once all ranks
    /// have ended it.
    pub(crate) fn end_step(&self) {
        // SAFETY: the address is that of 8 aligned bytes, which only this rank touches in this
        // step.
        self.end_step_handing_over(|to| unsafe { to.cast::<u64>().write(0) });
    }

    /// Ends the step as [`end_step`](Comm::end_step) does. In a communicator of two ranks on one
    /// host, it first calls `write` with the address of the bytes that go to the other rank
    /// ([`handed_over`](Comm::handed_over)). `write` puts 0 into the first 8 bytes if the step
    /// hands over nothing.
    #[inline]
    pub(crate) fn end_step_handing_over(&self, write: impl FnOnce(*mut u8)) {
        let step = self.step() + 1;
        self.step.store(step, Ordering::Relaxed);
        let seat = self.segment.seat(self.rank);
        seat.step.store(step as u32);
        if self.other_of_two().is_some() {
            // The other rank polls this cache line. So the writes to it follow each other without
            // other work between them. Otherwise the line could move to the other rank and back
            // between two writes.
            let end = seat.end_of(step);
            write(end.beside());
            end.set(step as u32);
            return;
        }
        // Seat 0 may wait for the other seats before it ends the step.
        self.segment.header().steps.end(step as u32, self.nranks, self.span.is_some());
    }

    /// Returns the address of the [`BESIDE`](crate::event::BESIDE) bytes that `rank` hands over at
    /// the end of a step, in a communicator of two ranks. `ended` is the number of steps that
    /// `rank` has ended then.
    #[inline]
    pub(crate) fn handed_over(&self, rank: usize, ended: u64) -> *mut u8 {
        self.segment.seat(rank).end_of(ended).beside()
    }

    /// Returns the event to wait for while another rank of this host has not ended this rank's
    /// step, and `None` once all other ranks have ended it.
    pub(crate) fn others_blocked(&self) -> Option<Poll> {
        let seen = self.segment.header().steps.count.value();
        let blocker = Blocker::OtherSeats(self.step() + 1);
        (seen as usize + 1 != self.nranks).then_some(Poll::Blocked { seen, blocker })
    }

    /// Returns what to wait for while some rank has not ended the step that this rank ended last,
    /// and `None` once all have.
    pub(crate) fn step_blocked(&self) -> Option<Poll> {
        let step = self.step();
        // With three or more ranks, the word stops at this rank's step. With two, the other rank
        // may be one step ahead, but uses its other word for that. So a comparison for equality is
        // enough, and the 32 bits may wrap.
        let seen = self.step_event(step).value();
        (seen != step as u32).then_some(Poll::Blocked { seen, blocker: Blocker::Step(step) })
    }

    /// Fetches the cache line to which this rank writes when it ends its next step. Does nothing
    /// unless there are two ranks on one host. The other rank has read what is there. It polls the
    /// line again only after it has ended that next step itself.
    #[inline]
    pub(crate) fn fetch_next_end(&self) {
        if self.other_of_two().is_some() {
            self.segment.seat(self.rank).end_of(self.step() + 1).fetch();
        }
    }
}
