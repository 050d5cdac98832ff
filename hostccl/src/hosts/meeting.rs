//! The meeting with which every collective over several hosts begins.
//!
//! The ranks of a host post their calls and, for a small call, their data. Seat 0 waits for them,
//! compares the calls, reduces the data, and gathers with the seats 0 of the other hosts. Then it
//! writes the outcome into its slot, and ends the step as the last rank of its host. So all ranks
//! know whether their calls fit together before they move larger data. With one rank on a host, the
//! meeting ends no step, because the host has nobody else to tell.

use std::sync::Arc;

use super::plan::{Parcels, Small};
use super::small;
use crate::blame::Blame;
use crate::collective::{Call, Descriptor, Ragged, fail_different_calls, keep_difference};
use crate::comm::Comm;
use crate::error::Result;
use crate::flow::wait;
use crate::gathering::{Content, Records, span_of};
use crate::rails::Rails;
use crate::segment::{LINE, SLOTS};
use crate::types::ncclInternalError;

/// The outcome of a meeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Met {
    /// The call is done: its data travelled in the meeting.
    Done,
    /// All ranks make this call. Its data is still to be moved.
    Agreed,
    /// All ranks make this call, in which each rank has a count of its own, and these counts
    /// differ.
    OtherCounts,
    /// The ranks make calls of different names. The seats of this host posted their calls in the
    /// step of that number.
    OtherNames(u64),
}

/// The outcome of a meeting, which seat 0 tells the other seats of its host.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Verdict {
    /// 1 where the calls have different names.
    other_names: u64,
    /// The sums of the fingerprints of the counts that all ranks send and that they expect.
    fingerprints: [u64; 2],
}

const _: () = assert!(size_of::<Verdict>() <= LINE);

/// Returns the address of a seat's slot in a step.
fn slot(comm: &Comm, seat: usize, step: u64) -> *mut u8 {
    comm.segment.data(seat, (step % SLOTS as u64) as usize)
}

/// Waits until all seats of this host have ended the step that this rank ended last.
pub(super) async fn step_over(comm: &Comm) -> Result<()> {
    wait(|| match comm.step_blocked() {
        None => Ok(None),
        Some(blocked) => comm.check_waiting(blocked).map(Some),
    })
    .await
}

/// Seat 0 calls this function to wait until all other seats of its host have ended seat 0's current
/// step.
async fn others_posted(comm: &Comm) -> Result<()> {
    wait(|| match comm.others_blocked() {
        None => Ok(None),
        Some(blocked) => comm.check_waiting(blocked).map(Some),
    })
    .await
}

/// The meeting of one call.
pub(super) struct Meeting<'a> {
    /// The communicator.
    pub(super) comm: &'a Arc<Comm>,
    /// The arguments of the call.
    pub(super) call: &'a Call,
    /// The counts, where each rank has its own.
    pub(super) ragged: Option<&'a Ragged>,
    /// The description of the call.
    pub(super) descriptor: Descriptor,
}

impl Meeting<'_> {
    /// Holds the meeting. Ends the communicator when the ranks' calls differ.
    ///
    /// # Safety
    /// The buffers hold what the call says.
    pub(super) async unsafe fn hold(&self) -> Result<Met> {
        let (comm, call) = (self.comm, self.call);
        let _stay = comm.rails.as_deref().map(Rails::meet);
        let span = span_of(comm);
        let (seat, seats, posted) = (comm.rank, comm.nranks, comm.step());
        let small = Small::of(call, comm);
        let gives = small.filter(|_| Small::gives(call, span.rank));
        if seats > 1 {
            self.descriptor.post(comm);
            let mine = slot(comm, seat, posted);
            match (&gives, self.ragged) {
                // SAFETY: the slot has room for a contribution, and belongs to this rank in this
                // step.
                (Some(small), _) => unsafe { small::contribute(call, small, mine) },
                // SAFETY: as above.
                (None, Some(ragged)) => unsafe { mine.cast::<[u64; 2]>().write(ragged.fingerprints(span.rank)) },
                _ => {}
            }
            if seat != 0 {
                // Seat 0 ends this step after it has written the outcome.
                comm.end_step();
                step_over(comm).await?;
                // SAFETY: seat 0 has ended the step in which it wrote this.
                return unsafe { self.read_verdict(small.as_ref(), posted) };
            }
            comm.note_posted();
            others_posted(comm).await?;
        }
        let differ = self.different_calls(posted);
        let mut records = Records::new(comm, differ.is_none() && small.is_some_and(|small| small.is_direct));
        let mut parcels = None;
        let (content, bytes) = match differ {
            Some(calls) => {
                // SAFETY: a descriptor is plain numbers.
                let bytes = unsafe { std::slice::from_raw_parts(calls.as_ptr().cast::<u8>(), size_of_val(&calls[..])) };
                records.write_payload(bytes);
                (Content::Calls, bytes.len())
            }
            // SAFETY: all other seats have ended the step in which they wrote their contributions.
            None => (Content::Data, unsafe { self.pack(small.as_ref(), posted, &records, &mut parcels) }),
        };
        records.gather(content, self.descriptor, bytes, parcels.as_deref()).await?;
        // SAFETY: the records are complete.
        let met = unsafe { self.conclude(small.as_ref(), posted, &records).await? };
        if seats > 1 {
            comm.end_step();
        }
        Ok(met)
    }

    /// Returns the calls of this host's ranks where they differ.
    fn different_calls(&self, posted: u64) -> Option<Vec<Descriptor>> {
        let calls = || (0..self.comm.nranks).map(|seat| Descriptor::read(self.comm, seat, posted));
        (self.comm.nranks > 1 && !calls().all(|other| other.is_same(&self.descriptor))).then(|| calls().collect())
    }

    /// Writes this host's payload and returns its length. Where each host gets another payload, the
    /// lengths of all of them are written to `parcels`.
    ///
    /// # Safety
    /// All seats have written their contributions.
    unsafe fn pack(
        &self,
        small: Option<&Small>,
        posted: u64,
        records: &Records,
        parcels: &mut Option<Vec<usize>>,
    ) -> usize {
        let (comm, call, to) = (self.comm, self.call, records.own_payload());
        let span = span_of(comm);
        let (here, me) = (span.here(), span.host());
        // SAFETY: this function's contract. There is room for a payload.
        unsafe {
            match (small, self.ragged) {
                (Some(small), _) => {
                    let givers = (0..comm.nranks).filter(|seat| Small::gives(call, here[*seat]));
                    let mut contributions: Vec<*const u8> =
                        givers.map(|seat| slot(comm, seat, posted).cast_const()).collect();
                    let mut scaled = Vec::new();
                    if comm.nranks == 1 && !contributions.is_empty() {
                        contributions[0] = call.send;
                        if !call.own_from_send() {
                            scaled = vec![0_u8; small.contribution];
                            small::contribute(call, small, scaled.as_mut_ptr());
                            contributions[0] = scaled.as_ptr();
                        }
                    }
                    small::pack(call, small, comm, &contributions, me, to);
                    if small.parcels != Parcels::Same {
                        let hosts = span.hosts.len();
                        for host in (0..hosts).filter(|host| *host != me) {
                            small::pack(call, small, comm, &contributions, host, records.payload_for(host));
                        }
                        *parcels = Some((0..hosts).map(|host| small.payload(call, comm, me, host)).collect());
                    }
                    drop(scaled);
                    small.payload(call, comm, me, me)
                }
                (None, Some(ragged)) => {
                    let mut sums = ragged.fingerprints(here[comm.rank]);
                    for seat in 1..comm.nranks {
                        let theirs = slot(comm, seat, posted).cast::<[u64; 2]>().read();
                        sums = [sums[0].wrapping_add(theirs[0]), sums[1].wrapping_add(theirs[1])];
                    }
                    to.cast::<[u64; 2]>().write_unaligned(sums);
                    size_of_val(&sums)
                }
                (None, None) => 0,
            }
        }
    }

    /// Compares the records of all hosts, and tells the other seats of this host the outcome.
    ///
    /// # Safety
    /// The buffers hold what the call says.
    async unsafe fn conclude(&self, small: Option<&Small>, posted: u64, records: &Records) -> Result<Met> {
        let (comm, call) = (self.comm, self.call);
        let span = span_of(comm);
        let verdict = slot(comm, 0, posted);
        let tell = |other_names: u64, fingerprints: [u64; 2]| {
            // SAFETY: in this step the slot belongs to this rank.
            unsafe { verdict.cast::<Verdict>().write(Verdict { other_names, fingerprints }) };
        };
        if !records.agree(&self.descriptor) {
            let calls = records.calls()?;
            if calls.iter().all(|other| other.has_name_of(&calls[0])) {
                return Err(fail_different_calls(comm, &calls));
            }
            tell(1, [0; 2]);
            keep_difference(comm, posted, &calls);
            return Ok(Met::OtherNames(posted));
        }
        if self.ragged.is_some() {
            let mut sums = [0_u64; 2];
            for host in 0..span.hosts.len() {
                let (_, payload) = records.of(host);
                for (sum, bytes) in sums.iter_mut().zip(payload.chunks_exact(8)) {
                    *sum = sum.wrapping_add(u64::from_ne_bytes(bytes.try_into().unwrap_or_default()));
                }
            }
            tell(0, sums);
            return Ok(self.counts_met(sums));
        }
        tell(0, [0; 2]);
        let Some(small) = small else { return Ok(Met::Agreed) };
        if let Some(rank) = small::wrong_length(call, small, comm, records) {
            let message = format!("{} sent a record of a wrong length", comm.labels.rank(rank, None));
            return Err(comm.fail_whole(ncclInternalError, Blame::of([rank]), &message, ""));
        }
        let here = span.here();
        let results = verdict.wrapping_add(LINE);
        let mut shared = None;
        if small.parcels == Parcels::Pieces {
            let to = if comm.nranks == 1 { call.recv } else { results };
            // SAFETY: the payloads are complete. There is room for the result.
            unsafe { small::finish_pieces(call, comm, self.descriptor, records, to).await? };
            shared = Some(to);
        }
        // SAFETY: the payloads are complete. The slot has room for the results of all seats, and
        // the receive buffer for this rank's.
        unsafe {
            for seat in (0..comm.nranks).filter(|seat| Small::gets(call, here[*seat])) {
                let to = match (seat, comm.nranks) {
                    (0, _) => call.recv,
                    _ if small.is_shared => results,
                    _ => results.add(seat * small.result),
                };
                match shared {
                    Some(from) if small.is_shared => {
                        if to != from {
                            std::ptr::copy(from, to, small.result);
                        }
                    }
                    _ => small::finish(call, small, comm, records, here[seat], to),
                }
                shared = Some(to);
            }
        }
        Ok(Met::Done)
    }

    /// Returns the outcome of a meeting about counts: whether the counts that are sent are the
    /// counts that are expected.
    fn counts_met(&self, [sent, expected]: [u64; 2]) -> Met {
        if sent == expected { Met::Agreed } else { Met::OtherCounts }
    }

    /// Reads what seat 0 tells, and takes this rank's result.
    ///
    /// # Safety
    /// Seat 0 has ended the step `posted`, and the buffers hold what the call says.
    unsafe fn read_verdict(&self, small: Option<&Small>, posted: u64) -> Result<Met> {
        let (comm, call) = (self.comm, self.call);
        let at = slot(comm, 0, posted);
        // SAFETY: this function's contract; seat 0 has written a verdict, and the results behind
        // it.
        unsafe {
            let verdict = at.cast::<Verdict>().read();
            if verdict.other_names != 0 {
                return Ok(Met::OtherNames(posted));
            }
            if self.ragged.is_some() {
                return Ok(self.counts_met(verdict.fingerprints));
            }
            let Some(small) = small else { return Ok(Met::Agreed) };
            if Small::gets(call, span_of(comm).rank) {
                let offset = if small.is_shared { 0 } else { comm.rank * small.result };
                std::ptr::copy(at.add(LINE + offset), call.recv, small.result);
            }
        }
        Ok(Met::Done)
    }
}
