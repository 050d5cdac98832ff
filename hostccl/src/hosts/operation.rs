//! A collective over several hosts under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::broadcast::broadcast;
use super::meeting::{Meeting, Met};
use super::plan::is_flat;
use super::reduction::Reducing;
use super::work::{Work, uniform};
use crate::admission::Admission;
use crate::blocks::Block;
use crate::call_name::Name;
use crate::collective::{Call, Descriptor, Kind, Ragged, Reduction, fail_different_counts};
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::flow::Flow;
use crate::operation::Operation;
use crate::poll::Poll;
use crate::turn::Pass;
use crate::types::{DataType, ncclInternalError};

/// A collective over several hosts under way.
pub(crate) struct Spanning {
    /// The call from its meeting to its end; `None` while the call waits for its turn. It is
    /// dropped before what it borrows.
    flow: Option<Flow<'static, Met>>,
    /// The communicator.
    comm: Arc<Comm>,
    /// The arguments, among them the caller's buffers.
    call: Call,
    /// The counts, where each rank has its own.
    ragged: Option<Arc<Ragged>>,
    /// Whether the ranks have agreed on the call since it had its turn. The flow sets it.
    is_agreed: Arc<AtomicBool>,
    /// The description of the call.
    descriptor: Descriptor,
    /// The call's turn on this rank, and the ranks' agreement that it is this call's turn.
    admission: Admission,
    /// Whether the call has begun. The call may then wait for its turn. A failure that happens
    /// while it waits counts as a failure of this call, and not of an earlier one.
    has_begun: bool,
    /// The timeout that came with the call, if one did.
    pub(crate) call_timeout: Option<Duration>,
}

// SAFETY: the buffers are the caller's, who promises that they are valid while the call is under
// way, on whatever thread.
unsafe impl Send for Spanning {}

impl Spanning {
    /// Returns a collective that has not begun, on a communicator over several hosts. `ragged` has
    /// the counts where each rank has its own. Fails when the communicator takes no more calls.
    ///
    /// # Safety
    /// The buffers hold what the call says, and stay valid until the operation is dropped.
    pub(crate) unsafe fn new(comm: Arc<Comm>, call: Call, ragged: Option<Ragged>, name: Name) -> Result<Spanning> {
        let descriptor = Descriptor::new(&call, name);
        // SAFETY: the caller's promise.
        unsafe { Spanning::described(comm, call, ragged, descriptor) }
    }

    /// Does what [`new`](Spanning::new) does, with a description of its own.
    ///
    /// # Safety
    /// The contract of [`new`](Spanning::new).
    pub(super) unsafe fn described(
        comm: Arc<Comm>,
        call: Call,
        ragged: Option<Ragged>,
        descriptor: Descriptor,
    ) -> Result<Spanning> {
        comm.check_open()?;
        let (ragged, admission) = (ragged.map(Arc::new), Admission::new(descriptor.name));
        let is_agreed = Arc::default();
        Ok(Spanning {
            flow: None,
            comm,
            call,
            ragged,
            is_agreed,
            descriptor,
            admission,
            has_begun: false,
            call_timeout: None,
        })
    }

    /// The name under which the call is issued.
    pub(crate) fn name(&self) -> &Name {
        &self.descriptor.name
    }

    /// The call's turn on this rank.
    pub(crate) fn turn(&mut self) -> &mut Pass {
        &mut self.admission.pass
    }
}

impl Operation for Spanning {
    fn poll(&mut self) -> Result<Poll> {
        loop {
            if self.flow.is_none() {
                match std::mem::replace(&mut self.has_begun, true) {
                    false => self.comm.check_before_call()?,
                    true => self.comm.check()?,
                }
                let descriptor = &self.descriptor;
                if let Some(blocked) = self.admission.poll(&self.comm, || descriptor.call())? {
                    return Ok(blocked);
                }
                let (comm, ragged, is_agreed) = (self.comm.clone(), self.ragged.clone(), self.is_agreed.clone());
                let flow = perform(comm, self.call, ragged, self.descriptor, is_agreed);
                self.flow = Some(Flow::new(flow));
            }
            let Some(flow) = &mut self.flow else { continue };
            match flow.poll()? {
                Err(blocked) => return Ok(blocked),
                Ok(Met::OtherNames(posted)) => {
                    self.flow = None;
                    self.admission.withdraw_from_hosts(&self.comm, posted);
                }
                Ok(_) => return Ok(Poll::Done),
            }
        }
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        Some(&self.comm)
    }

    fn call_timeout(&self) -> Option<Duration> {
        self.call_timeout
    }

    fn is_matched(&self) -> bool {
        self.is_agreed.load(Ordering::Relaxed)
    }

    fn describe(&self) -> String {
        format!("{} on {}", self.descriptor.call(), self.comm.own_label())
    }

    fn pass(&mut self) -> Option<&mut Pass> {
        Some(&mut self.admission.pass)
    }

    fn end(&mut self) -> Result<()> {
        self.admission.pass.leave(&self.comm)
    }
}

impl Drop for Spanning {
    fn drop(&mut self) {
        self.flow = None;
        // A failure of this communicator has been reported already.
        let _ = self.admission.pass.leave(&self.comm);
    }
}

/// Performs a call whose turn it is. Returns whether it is done, or has to be withdrawn. Sets
/// `is_agreed` when the ranks have agreed on the call and have data to move.
async fn perform(
    comm: Arc<Comm>,
    call: Call,
    ragged: Option<Arc<Ragged>>,
    descriptor: Descriptor,
    is_agreed: Arc<AtomicBool>,
) -> Result<Met> {
    let meeting = Meeting { comm: &comm, call: &call, ragged: ragged.as_deref(), descriptor };
    // SAFETY: the buffers hold what the call says while the operation lives, which owns this
    // future.
    let met = unsafe { meeting.hold().await? };
    let work = Work { comm: &comm, descriptor, dtype: call.dtype };
    is_agreed.store(matches!(met, Met::Agreed | Met::OtherCounts), Ordering::Relaxed);
    match (met, ragged.as_deref()) {
        (Met::Agreed, _) => {}
        (Met::OtherCounts, Some(ragged)) => return Err(compare_counts(&work, &call, ragged).await?),
        _ => return Ok(met),
    }
    // SAFETY: as above.
    unsafe { move_data(&work, &call, ragged.as_deref()).await? };
    Ok(Met::Done)
}

/// Moves the data of a call on which all ranks have agreed.
///
/// # Safety
/// The buffers hold what the call says.
async unsafe fn move_data(work: &Work<'_>, call: &Call, ragged: Option<&Ragged>) -> Result<()> {
    let (rank, n) = (work.span().rank, work.span().nranks);
    let Call { send, recv, count, .. } = *call;
    let none = Block { start: 0, count: 0 };
    let whole = || uniform(count, n);
    let (sends, recvs) = match ragged {
        Some(ragged) => (ragged.blocks().0.to_vec(), ragged.blocks().1.to_vec()),
        None => (whole(), whole()),
    };
    // The blocks of a rank that exchanges data with `root` alone.
    let with_root = |root: usize| -> Vec<Block> {
        (0..n).map(|other| if other == root { Block { start: 0, count } } else { none }).collect()
    };
    let reducing = |reduction: Reduction| Reducing {
        work: Work { comm: work.comm, descriptor: work.descriptor, dtype: work.dtype },
        reduction,
        is_flat: is_flat(call, work.comm),
    };
    // SAFETY: this function's contract.
    unsafe {
        match (call.kind, call.reduction, call.root) {
            (Kind::AllReduce, Some(reduction), _) => reducing(reduction).all_reduce(send, recv, count, None).await,
            (Kind::Reduce, Some(reduction), root) => reducing(reduction).all_reduce(send, recv, count, root).await,
            (Kind::ReduceScatter | Kind::ReduceScatterV, Some(reduction), _) => {
                reducing(reduction).reduce_scatter(send, recv, &sends).await
            }
            (Kind::AllGather | Kind::AllGatherV, ..) => work.spread(send, recv, &recvs).await,
            (Kind::AllToAll | Kind::AllToAllV, ..) => {
                work.exchange(send, &sends, recv, &recvs, call.kind == Kind::AllToAll && send == recv).await
            }
            (Kind::Broadcast, _, Some(root)) => broadcast(work, send, recv, count, root).await,
            (Kind::Gather, _, Some(root)) => {
                let recvs = if rank == root { whole() } else { vec![none; n] };
                work.exchange(send, &with_root(root), recv, &recvs, false).await
            }
            (Kind::Scatter, _, Some(root)) => {
                let sends = if rank == root { whole() } else { vec![none; n] };
                work.exchange(send, &sends, recv, &with_root(root), false).await
            }
            _ => Err(Error::new(
                ncclInternalError,
                format!("{} cannot run over several hosts: this is a bug in hostccl", work.descriptor.call()),
            )),
        }
    }
}

/// Gathers the counts of all ranks and ends the communicator, because a count that one rank sends
/// is not the count that another one expects.
async fn compare_counts(work: &Work<'_>, call: &Call, ragged: &Ragged) -> Result<Error> {
    let (rank, n) = (work.span().rank, work.span().nranks);
    let (sends, recvs) = ragged.blocks();
    let mine: Vec<u64> = sends.iter().chain(recvs).map(|block| block.count as u64).collect();
    let mut all = vec![0_u64; 2 * n * n];
    let counts = Work { comm: work.comm, descriptor: work.descriptor, dtype: DataType::Uint64 };
    // SAFETY: the list has room for the counts of each rank, and both outlive the exchange.
    unsafe { counts.spread(mine.as_ptr().cast(), all.as_mut_ptr().cast(), &uniform(2 * n, n)).await? };
    let pairs = (0..n).flat_map(|from| (0..n).map(move |to| (from, to)));
    let counts = pairs.map(|(from, to)| (from, to, all[from * 2 * n + to], all[to * 2 * n + n + from]));
    let first = counts.into_iter().find(|(_, _, sent, expected)| sent != expected);
    let (from, to, sent, expected) = first.unwrap_or((rank, rank, 0, 0));
    Ok(fail_different_counts(work.comm, call, (from, sent), (to, expected)))
}
