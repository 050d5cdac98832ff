//! `ncclCommSplit` of a communicator over several hosts.
//!
//! Every rank makes a segment that it may not need, and all ranks gather their colours, keys and
//! segments in one small all-gather. Then each rank knows which ranks have its colour, which of
//! these ranks are on its host, and where their segments are. The ranks of one colour on one host
//! use the segment of that rank among them which is lowest in the new communicator. When a rank
//! has joined its host's segment, a second all-gather tells it that all others have joined theirs.
//! So nobody uses a communicator that another rank could not make.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{ColorAndKey, members};
use crate::blame::Blame;
use crate::call_name::Name;
use crate::collective::Kind;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::fork::Private;
use crate::host::checksum;
use crate::hosts::SmallGather;
use crate::join::{Join, Source};
use crate::operation::Operation;
use crate::poll::{Blocker, Poll};
use crate::segment;
use crate::setup::ChildOperation;
use crate::span::Span;
use crate::token::random_token;
use crate::turn::Pass;
use crate::types::*;

/// The data that each rank of the parent gives to the others.
#[derive(Debug, Clone, Copy)]
struct Given {
    /// The rank's arguments.
    color_and_key: ColorAndKey,
    /// The token of the rank's segment. The new communicator's number is computed from the token of
    /// its first rank, because that token is random.
    token: [u8; 16],
    /// The segment's descriptor in the rank's process; -1 where the rank could not make a segment.
    fd: i32,
}

/// The length of [`Given`] in bytes.
const GIVEN_BYTES: usize = 28;

impl Given {
    fn to_bytes(self) -> [u8; GIVEN_BYTES] {
        let mut bytes = [0; GIVEN_BYTES];
        bytes[..4].copy_from_slice(&self.color_and_key.color.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.color_and_key.key.to_le_bytes());
        bytes[8..24].copy_from_slice(&self.token);
        bytes[24..].copy_from_slice(&self.fd.to_le_bytes());
        bytes
    }

    /// Reads what a rank gave. Missing bytes count as 0.
    fn of(bytes: &[u8]) -> Given {
        let mut whole = [0; GIVEN_BYTES];
        whole.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        let i32_at = |at: usize| i32::from_le_bytes([whole[at], whole[at + 1], whole[at + 2], whole[at + 3]]);
        let mut token = [0; 16];
        token.copy_from_slice(&whole[8..24]);
        Given { color_and_key: ColorAndKey { color: i32_at(0), key: i32_at(4) }, token, fd: i32_at(24) }
    }
}

/// The stages of a split.
enum Stage {
    /// The ranks gather what they give.
    Gathering(SmallGather),
    /// This rank joins the segment of its host; `None` where the rank is in no new communicator.
    Joining(Option<Box<Join>>),
    /// The ranks tell each other that they have joined.
    Confirming(SmallGather, Option<Box<Join>>),
    /// The split is over, or has failed.
    Over(Option<Box<Join>>),
}

/// A split of a communicator over several hosts under way.
pub(crate) struct SpanSplit {
    /// The communicator that is split.
    parent: Arc<Comm>,
    /// The arguments of this rank.
    color_and_key: ColorAndKey,
    /// The name of the new communicator.
    name: String,
    /// The flag that `ncclCommAbort` raises on the new communicator's handle.
    aborted: Arc<AtomicBool>,
    /// The name of the call.
    call: Name,
    /// The present stage of the split.
    stage: Stage,
    /// The parent's ranks of this colour, in the order of the new communicator.
    members: Vec<usize>,
    /// The segment that this rank offers. It stays open until all ranks have joined.
    segment: Option<Private<OwnedFd>>,
    /// Why this rank could not make a segment.
    no_segment: Option<Error>,
}

impl SpanSplit {
    /// Returns a split that has not begun. Fails when the parent takes no more calls.
    pub(crate) fn new(
        parent: Arc<Comm>,
        (color, key): (i32, i32),
        name: String,
        aborted: Arc<AtomicBool>,
        call: Name,
    ) -> Result<SpanSplit> {
        parent.check_open()?;
        let color_and_key = ColorAndKey { color, key };
        let mut given = Given { color_and_key, token: [0; 16], fd: -1 };
        let (mut segment, mut no_segment) = (None, None);
        if color != NCCL_SPLIT_NOCOLOR {
            // All hosts must have the same number, because they decide by the size of the slots
            // which way the data of a small call takes.
            let most_seats = parent.rails.as_ref().map_or(0, |rails| rails.count as u32);
            let among = most_seats.max(parent.segment.among());
            match random_token().and_then(|token| Ok((token, Private::of(segment::create_split(token, among)?)))) {
                Ok((token, fd)) => {
                    (given.token, given.fd) = (token, fd.as_raw_fd());
                    segment = Some(fd);
                }
                Err(error) => no_segment = Some(error),
            }
        }
        let gather = SmallGather::new(parent.clone(), Kind::Split, &given.to_bytes(), call)?;
        Ok(SpanSplit {
            parent,
            color_and_key,
            name,
            aborted,
            call,
            stage: Stage::Gathering(gather),
            members: Vec::new(),
            segment,
            no_segment,
        })
    }

    /// Returns the join of the new communicator, now that all ranks have given their arguments.
    fn found(&mut self, gather: &SmallGather) -> Result<Option<Box<Join>>> {
        let Some(span) = &self.parent.span else { return Ok(None) };
        if self.color_and_key.color == NCCL_SPLIT_NOCOLOR {
            return Ok(None);
        }
        let given = |rank: usize| Given::of(gather.of(rank));
        self.members =
            members((0..span.nranks).map(|rank| (given(rank).color_and_key, rank)), self.color_and_key.color);
        let members = &self.members;
        let me = members.iter().position(|rank| *rank == span.rank).unwrap_or(0);
        let child = child_span(span, members, me, number(span, &given(members[0])));
        let here: Vec<usize> = match &child {
            Some(child) => child.here().to_vec(),
            None => (0..members.len()).collect(),
        };
        let owner = members[here[0]];
        let offered = given(owner);
        if offered.fd < 0 {
            return Err(self.lacks_segment(owner));
        }
        let process = span.seat_of(owner).and_then(|seat| self.parent.segment.process(seat)).ok_or_else(|| {
            let message = format!("{} has no process on this host", self.parent.labels.rank(owner, None));
            Error::new(ncclInternalError, message).by(Blame::of([owner]))
        })?;
        let source = Source::Child { owner: process, owner_rank: here[0], fd: offered.fd, token: offered.token };
        let join = Join::new(source, members.len() as u32, me as u32, self.name.clone(), self.aborted.clone());
        let join = join.out_of(&self.parent, members);
        Ok(Some(Box::new(match child {
            Some(child) => join.over(child),
            None => join,
        })))
    }

    /// Returns the error that `rank` could make no segment. Only the rank itself knows why.
    fn lacks_segment(&self, rank: usize) -> Error {
        let label = self.parent.labels.rank(rank, None);
        let own = self.no_segment.as_ref().filter(|_| rank == self.parent.whole().0);
        let why = own.map_or_else(|| "its error has the reason".to_owned(), |error| error.message().to_owned());
        let message = format!("{label} could not make shared memory for the new communicator: {why}");
        Error::new(own.map_or(ncclSystemError, Error::code), message).by(Blame::of([rank]))
    }

    /// Fails when the parent has failed. The other ranks of the parent may be past the split and
    /// wait for this rank, while this rank waits for members that never join.
    fn check_parent(&self) -> Result<()> {
        self.parent.check_peers(None, &|| self.describe()).map_err(|error| {
            let missing = self.joined().map_or(Vec::new(), |comm| comm.missing(Blocker::Arrivals));
            let missing: Vec<usize> = missing.iter().filter_map(|&rank| self.members.get(rank).copied()).collect();
            self.parent.add_missing_ranks(error, &missing)
        })
    }

    /// Ends the parent because this rank cannot join the new communicator.
    fn fail(&self, error: &Error) -> Error {
        let (message, blame) = match error.blame().ranks.is_empty() {
            true => {
                let me = self.parent.whole().0;
                let message =
                    format!("{} could not join its split: {}", self.parent.labels.rank(me, None), error.message());
                (message, Blame::of([me]))
            }
            false => (format!("a split failed: {}", error.message()), error.blame().clone()),
        };
        self.parent.fail_whole(error.code(), blame, &message, &self.describe())
    }

    /// Ends the new communicator, because this rank's split has failed or is given up. The other
    /// ranks may have finished their splits, and may already wait for this rank in the new
    /// communicator. `error` has the parent's ranks. `None` where the split is given up.
    fn end_child(&self, error: Option<&Error>) {
        let (Stage::Joining(join) | Stage::Confirming(_, join)) = &self.stage else { return };
        let Some(child) = join.as_ref().and_then(|join| join.joined()) else { return };
        let me = self.parent.whole().0;
        let own = |message: String| Error::new(ncclRemoteError, message).by(Blame::of([me]));
        let is_aborted = self.aborted.load(Ordering::Acquire) || self.parent.check_aborted().is_err();
        let error = match error.cloned().or_else(|| self.parent.check().err()) {
            _ if is_aborted => own(self.parent.told_of_abort()),
            Some(error) => error,
            None => own(format!("{} gave up a split", self.parent.describe(self.parent.rank))),
        };
        let blame = error.blame().renumbered(|rank| self.members.iter().position(|member| *member == rank));
        child.fail_whole(error.code(), blame, error.message(), "");
    }

    fn join(&self) -> Option<&Join> {
        match &self.stage {
            Stage::Gathering(_) => None,
            Stage::Joining(join) | Stage::Confirming(_, join) | Stage::Over(join) => join.as_deref(),
        }
    }

    /// Goes to the next stage if the present one is done. Otherwise returns what to wait for.
    fn advance(&mut self) -> Result<Poll> {
        match &mut self.stage {
            Stage::Gathering(gather) => {
                let polled = gather.poll()?;
                if polled != Poll::Done {
                    return Ok(polled);
                }
                let Stage::Gathering(mut gather) = std::mem::replace(&mut self.stage, Stage::Over(None)) else {
                    return Ok(Poll::Done);
                };
                gather.pass().leave(&self.parent)?;
                let join = self.found(&gather).map_err(|error| self.fail(&error))?;
                self.stage = Stage::Joining(join);
            }
            Stage::Joining(join) => {
                let polled = match join {
                    None => Ok(Poll::Done),
                    Some(join) => join.poll(),
                };
                match polled {
                    Ok(Poll::Done) => {
                        // The second gather fails where this rank has finalized the parent since
                        // the first one. The other ranks wait for this rank to confirm.
                        let confirm = SmallGather::new(self.parent.clone(), Kind::Split, &[1], self.call);
                        let confirm = confirm.map_err(|error| self.fail(&error))?;
                        let Stage::Joining(join) = std::mem::replace(&mut self.stage, Stage::Over(None)) else {
                            return Ok(Poll::Done);
                        };
                        self.stage = Stage::Confirming(confirm, join);
                    }
                    // A member that died before it joined, or that could not map the segment, is
                    // known to the parent only.
                    Ok(blocked) => return self.check_parent().map(|()| blocked),
                    Err(error) => return Err(self.child_failed(error)),
                }
            }
            Stage::Confirming(confirm, _) => {
                let polled = confirm.poll()?;
                if polled != Poll::Done {
                    return Ok(polled);
                }
                // The turn ends here and not with the drop: before the drop the parent's handle
                // says that the split is done, and then the next call may begin.
                confirm.pass().leave(&self.parent)?;
                if let Stage::Confirming(_, join) = std::mem::replace(&mut self.stage, Stage::Over(None)) {
                    self.stage = Stage::Over(join);
                }
                self.segment = None;
            }
            Stage::Over(_) => {}
        }
        Ok(Poll::Done)
    }
}

/// Returns the number of the new communicator: random, and equal on all of its ranks.
fn number(parent: &Span, first: &Given) -> u64 {
    let color = first.color_and_key.color.to_le_bytes();
    checksum(&[&parent.comm.to_le_bytes()[..], &first.token, &color].concat())
}

/// Returns the span of a communicator that consists of these ranks of `parent`, in this order; or
/// `None` where all of them are on one host. `rank` is this rank's number in the new communicator.
pub(crate) fn child_span(parent: &Span, members: &[usize], rank: usize, number: u64) -> Option<Span> {
    let mut hosts: Vec<Vec<usize>> = Vec::new();
    let mut child_host: Vec<Option<usize>> = vec![None; parent.hosts.len()];
    let mut host_of = Vec::with_capacity(members.len());
    for (child, member) in members.iter().enumerate() {
        let host = *child_host[parent.host_of[*member]].get_or_insert_with(|| {
            hosts.push(Vec::new());
            hosts.len() - 1
        });
        hosts[host].push(child);
        host_of.push(host);
    }
    let contacts = || members.iter().map(|member| parent.contacts[*member].clone()).collect();
    let wire = || parent.wire.clone();
    (hosts.len() > 1).then(|| Span::new(rank, hosts, host_of, number, wire(), parent.token, contacts()))
}

impl ChildOperation for SpanSplit {
    fn name(&self) -> Option<Name> {
        Some(self.call)
    }

    fn joined(&self) -> Option<Arc<Comm>> {
        self.join().and_then(Join::joined)
    }

    /// Returns the parent's error rather than the new communicator's. A member that has died fails
    /// the parent, too, and the parent's error names that member. In the new communicator the
    /// other members only write that they gave up.
    fn for_parent(&self, error: Error) -> Error {
        if let Err(error) = self.check_parent() {
            return error;
        }
        let blame = error.blame().renumbered(|rank| self.members.get(rank).copied());
        error.by(blame)
    }

    /// The other ranks of the parent wait for this one to confirm, whatever their colours.
    fn child_failed(&mut self, error: Error) -> Error {
        self.fail(&self.for_parent(error))
    }

    fn withdraw(&mut self) {
        self.end_child(None);
    }
}

impl Operation for SpanSplit {
    fn poll(&mut self) -> Result<Poll> {
        loop {
            let polled = self.advance().inspect_err(|error| self.end_child(Some(error)))?;
            if polled != Poll::Done || matches!(self.stage, Stage::Over(_)) {
                return Ok(polled);
            }
        }
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        match &self.stage {
            Stage::Joining(Some(join)) => join.comm().or(Some(&self.parent)),
            _ => Some(&self.parent),
        }
    }

    fn pass(&mut self) -> Option<&mut Pass> {
        match &mut self.stage {
            Stage::Gathering(gather) | Stage::Confirming(gather, _) => Some(gather.pass()),
            _ => None,
        }
    }

    fn is_matched(&self) -> bool {
        match &self.stage {
            Stage::Gathering(gather) | Stage::Confirming(gather, _) => gather.is_matched(),
            Stage::Joining(_) | Stage::Over(_) => true,
        }
    }

    fn describe(&self) -> String {
        let ColorAndKey { color, key } = self.color_and_key;
        format!("ncclCommSplit(color {color}, key {key}) on {}", self.parent.own_label())
    }
}

impl Drop for SpanSplit {
    fn drop(&mut self) {
        if let Stage::Gathering(gather) | Stage::Confirming(gather, _) = &mut self.stage {
            // A failure of the parent has been reported already.
            let _ = gather.pass().leave(&self.parent);
        }
        self.end_child(None);
    }
}

#[cfg(test)]
mod tests;
