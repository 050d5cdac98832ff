//! Ranks that end in the middle of a collective.

use super::data::case;
use super::{Args, Random, Ranks};
use crate::call_name::Name;
use crate::collective::{Call, Kind, Ragged, Reduction};
use crate::comm::Comm;
use crate::hosts::Spanning;
use crate::operation::Operation;
use crate::poll::Poll;
use crate::progress;
use crate::types::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Makes a call on one rank, and polls it `polls` times where that is given, or else until it ends.
fn make(comm: &Arc<Comm>, args: &Args, polls: Option<usize>) -> crate::error::Result<()> {
    let (me, n) = comm.whole();
    let case = case(args, me, n);
    let mut recv = vec![0_u8; (case.recv_len + 1) * args.dtype.size()];
    let Args { kind, count, dtype, reduction, root } = args.clone();
    let call = Call { kind, send: case.send.as_ptr(), recv: recv.as_mut_ptr(), count, dtype, reduction, root };
    let ragged = case.blocks.clone().map(|(sends, recvs)| Ragged::new(sends, recvs));
    // SAFETY: the buffers have the sizes that the case says, and outlive the operation.
    let mut operation = unsafe { Spanning::new(comm.clone(), call, ragged, Name::NONE)? };
    let Some(polls) = polls else { return progress::run(&mut operation) };
    for _ in 0..polls {
        if operation.poll()? == Poll::Done {
            break;
        }
        std::thread::yield_now();
    }
    Ok(())
}

#[test]
fn a_rank_that_ends_in_any_phase_ends_the_call_of_all_others() {
    let sum = Some(Reduction::Plain(ReduceOp::Sum));
    let kinds = [
        (Kind::AllReduce, sum, None),
        (Kind::ReduceScatter, sum, None),
        (Kind::AllGather, None, None),
        (Kind::AllToAllV, None, None),
        (Kind::Broadcast, None, Some(1)),
    ];
    let ended = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let ended = &ended;
        for (index, (kind, reduction, root)) in kinds.into_iter().enumerate() {
            scope.spawn(move || {
                let mut random = Random(index as u64);
                for polls in [0, 1, 3, 9] {
                    let ranks = Ranks::new(&[&[0, 3], &[1, 4], &[2]]);
                    let count = 5_000 + random.next(90_000);
                    let args = Args { kind, count, dtype: DataType::Float32, reduction, root };
                    let victim = 2 + random.next(3);
                    ranks.run(|me, comm| {
                        if me == victim {
                            let _ = make(comm, &args, Some(polls));
                            ranks.wires[me].die();
                            return;
                        }
                        // The call itself may be over on a rank that needs nothing from the victim.
                        let error = (0..2).find_map(|_| make(comm, &args, None).err());
                        let error = error.unwrap_or_else(|| panic!("{kind:?}: rank {me} does not miss rank {victim}"));
                        assert!([ncclRemoteError].contains(&error.code()), "{}", error.message());
                        assert!(error.message().contains(&format!("rank {victim}")), "{}", error.message());
                    });
                    ended.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(ended.into_inner(), 20);
}
