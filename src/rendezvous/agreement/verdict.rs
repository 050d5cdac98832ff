//! The verdict that all ranks of a call are told, and its text in the store.

use std::time::Duration;

use crate::error::{Error, Result, Status};
use crate::rank_list::ranges;

/// This character stands between the text of a call and its detail, and between the detail and what
/// a rank offers to share.
pub(super) const DETAIL: char = '\n';
/// This character stands between what a rank compares with the other ranks and the name of the mesh
/// that its call concerns. The name is empty where the call concerns no mesh.
const MESH: char = '\u{1f}';
/// How many different calls a message spells out.
const SHOWN_CALLS: usize = 3;
/// The most ranks of one call that a message names, and the most ranks that differ which an error
/// blames.
const MOST_NAMED: usize = 16;
/// How many characters a message shows of a text that is no verdict.
const SHOWN_CHARACTERS: usize = 40;

/// The two sides of a mismatch, as numbers of ranks.
pub(super) struct Sides {
    /// The ranks that are known to make the call of the first rank, the first rank among them.
    pub(super) agree: usize,
    /// The ranks that are known to make another call, also those whose calls were not read.
    pub(super) differ: usize,
    /// Whether all ranks that differ are known to make one call, although only some calls were
    /// read.
    pub(super) is_one_call: bool,
    /// All ranks of the call.
    pub(super) size: usize,
}

/// Why a call has ended, as far as a rank that comes later must know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reason {
    /// The call has ended in some other way.
    Other,
    /// A rank has given the call up, because some ranks had not called when its deadline passed.
    GivenUp {
        /// The rank that gave the call up.
        by: i32,
        /// How long that rank had waited, in milliseconds.
        waited: u64,
    },
    /// A rank has refused its own call of this function, and took no part in the agreement.
    Refused {
        /// The name of the function, for example `dm_flatten`.
        function: String,
    },
    /// The ranks of this call and of calls in other scopes waited for each other in a ring.
    Deadlock {
        /// The lowest prefix of the calls of the ring, which names the ring. This name is equal in
        /// the verdicts of all calls of the ring.
        id: String,
    },
    /// Ranks of the call have ended its mesh by dm_abort, and may not have begun the call.
    Departed {
        /// The name of the mesh, which is equal on all its ranks.
        mesh: String,
    },
    /// A rank has ended the mesh of the call by dm_abort while it was in the call.
    Aborted {
        /// The name of the mesh, which is equal on all its ranks.
        mesh: String,
    },
    /// A rank has come to a turn (docs/recovery.md), in which all ranks leave their calls.
    Turn {
        /// The number of the turn.
        number: u64,
    },
}

/// The verdict of a call: a status and, when the status is not OK, a message with the codes of the
/// layers below.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    /// The status that all ranks of the call return.
    pub(super) status: Status,
    /// The result code of the communicator library; 0 if there is none.
    ccl: i32,
    /// The error code of the device; 0 if there is none.
    device: i32,
    /// The error code of the operating system; 0 if there is none.
    os: i32,
    /// The world ranks that the error is about ([`Error::ranks`]).
    ranks: Vec<i32>,
    /// The ranks among `ranks` that are lost ([`Error::lost`]).
    lost: Vec<i32>,
    /// Why the call has ended, as far as a rank that comes later must know it.
    pub(super) reason: Reason,
    /// The message of an error, or what the ranks have agreed on when the status is OK.
    message: String,
}

impl Verdict {
    pub(super) fn agreed() -> Verdict {
        Verdict {
            status: Status::Ok,
            ccl: 0,
            device: 0,
            os: 0,
            ranks: Vec::new(),
            lost: Vec::new(),
            reason: Reason::Other,
            message: String::new(),
        }
    }

    /// Makes the verdict that these ranks had not called when the deadline of rank `by` passed, and
    /// that rank `by` gave the call up.
    pub(super) fn of_missing(missing: &[i32], message: String, by: i32, waited: Duration) -> Verdict {
        let waited = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
        let reason = Reason::GivenUp { by, waited };
        Verdict { reason, ..Verdict::of(&Error::timeout(message).with_ranks(missing)) }
    }

    /// Makes the verdict that a rank refused its own call of that function with `error`, before it
    /// took part in the agreement.
    pub(super) fn of_refusal(rank: i32, function: &str, number: u64, error: &Error) -> Verdict {
        let message = format!("rank {rank} refused its own {function} as call {number}: {}", error.message());
        let reason = Reason::Refused { function: function.to_owned() };
        Verdict { reason, message, ..Verdict::of(&error.clone().with_ranks(&[rank])) }
    }

    /// Makes the verdict of the calls whose ranks wait for each other in a ring. `id` names the
    /// ring.
    pub(super) fn of_deadlock(id: &str, error: &Error) -> Verdict {
        let reason = Reason::Deadlock { id: id.to_owned() };
        Verdict { reason, ..Verdict::of(error) }
    }

    /// Makes the verdict that ranks of the call have ended the mesh of that name.
    pub(super) fn of_departure(mesh: &str, error: &Error) -> Verdict {
        Verdict::of(error).after_departure(mesh)
    }

    /// Returns this verdict for a call whose mesh, named `mesh`, was ended by ranks of the call.
    pub(super) fn after_departure(self, mesh: &str) -> Verdict {
        Verdict { reason: Reason::Departed { mesh: mesh.to_owned() }, ..self }
    }

    /// Returns this verdict for a call that a rank has ended by dm_abort of the mesh named `mesh`.
    pub(super) fn of_abort(self, mesh: &str) -> Verdict {
        Verdict { reason: Reason::Aborted { mesh: mesh.to_owned() }, ..self }
    }

    /// Makes the verdict that a rank has come to the turn of that number.
    pub(super) fn of_turn(number: u64, error: &Error) -> Verdict {
        Verdict { reason: Reason::Turn { number }, ..Verdict::of(error) }
    }

    /// Makes the verdict that all is well, with what the ranks have agreed on.
    pub(super) fn agreed_on(note: String) -> Verdict {
        Verdict { message: note, ..Verdict::agreed() }
    }

    /// Returns the text on which the ranks have agreed.
    pub(super) fn note(&self) -> &str {
        &self.message
    }

    pub(super) fn of(error: &Error) -> Verdict {
        Verdict {
            status: error.status(),
            ccl: error.ccl_result(),
            device: error.device_error(),
            os: error.os_error(),
            ranks: error.ranks().to_vec(),
            lost: error.lost().to_vec(),
            reason: Reason::Other,
            message: error.message().to_owned(),
        }
    }

    /// Makes the verdict that a rank failed. It blames `rank`, unless `error` names other ranks or
    /// says that some rank was lost or late. An error of a communicator library that names one rank
    /// is about that rank, so the message names it in place of `rank`.
    pub(super) fn of_failure(rank: i32, call: &str, error: &Error) -> Verdict {
        let failed = match error.ranks() {
            [other] if error.status() == Status::Ccl => *other,
            _ => rank,
        };
        let message = format!("rank {failed} failed in {call}: {}", error.message());
        let by_others = matches!(error.status(), Status::PeerLost | Status::Timeout | Status::Mismatch);
        let is_own = error.ranks().is_empty() && !by_others;
        let own = if is_own { &[rank][..] } else { &[] };
        Verdict { message, ..Verdict::of(&error.clone().with_ranks(own)) }
    }

    /// Makes the verdict that ranks asked for something else than `theirs`, which rank `first`
    /// asked for. `dissenters` are some of these ranks, with what each asked for; `sides` counts
    /// all of them.
    pub(super) fn of_mismatch(
        dissenters: &[(i32, String)],
        sides: &Sides,
        first: i32,
        theirs: &str,
        number: u64,
    ) -> Verdict {
        let (their_call, their_detail) = split(theirs);
        let mut groups: Vec<(&str, Vec<i32>)> = Vec::new();
        for (rank, text) in dissenters {
            match groups.iter_mut().find(|(known, _)| known == text) {
                Some((_, ranks)) => ranks.push(*rank),
                None => groups.push((text, vec![*rank])),
            }
        }
        let ranks = outvoted(&groups, sides, first);
        groups.truncate(SHOWN_CALLS);
        groups.iter_mut().for_each(|(_, ranks)| ranks.truncate(MOST_NAMED));
        let shown: usize = groups.iter().map(|(_, ranks)| ranks.len()).sum();
        // The detail is shown only when the calls are equal.
        let same_call = groups.iter().any(|(text, _)| split(text).0 == their_call);
        let mut message = String::new();
        for (index, (text, ranks)) in groups.iter().enumerate() {
            let (call, detail) = split(text);
            let detail = if call == their_call { format!(" {detail}") } else { String::new() };
            let number = if index == 0 { format!(" as call {number}") } else { String::new() };
            message.push_str(&format!("{} called {call}{detail}{number}, ", ranges(ranks)));
        }
        let theirs = match (same_call, groups.len()) {
            (true, 1) => format!("it {their_detail}"),
            (true, _) => format!("{their_call} {their_detail}"),
            (false, _) => their_call.to_owned(),
        };
        message.push_str(&format!("rank {first} called {theirs}"));
        if sides.differ > shown {
            let all = sides.differ;
            message.push_str(&format!("; {all} ranks in all differ from rank {first}"));
        }
        Verdict { status: Status::Mismatch, message, ranks, ..Verdict::agreed() }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, more) = match &self.reason {
            Reason::Other => (0, String::new()),
            Reason::GivenUp { by, waited } => (1, format!("{by} {waited}\n")),
            Reason::Refused { function } => (2, format!("{function}\n")),
            Reason::Deadlock { id } => (3, format!("{id}\n")),
            Reason::Departed { mesh } => (4, format!("{mesh}\n")),
            Reason::Aborted { mesh } => (5, format!("{mesh}\n")),
            Reason::Turn { number } => (6, format!("{number}\n")),
        };
        let codes = [self.status as i32, self.ccl, self.device, self.os, kind];
        // A lost rank r is written as -1 - r.
        let ranks = self.ranks.iter().map(|rank| if self.lost.contains(rank) { -1 - rank } else { *rank });
        let numbers: Vec<String> = codes.into_iter().chain(ranks).map(|number| number.to_string()).collect();
        format!("{}\n{more}{}", numbers.join(" "), self.message).into_bytes()
    }

    /// Decodes the verdict that the store of that name has under `key`. A text that no rank can
    /// have written is a failure of the store.
    pub(super) fn decode(bytes: &[u8], key: &str, store: &str) -> Verdict {
        let text = String::from_utf8_lossy(bytes);
        Verdict::read(&text).unwrap_or_else(|| {
            let start: String = text.chars().take(SHOWN_CHARACTERS).collect();
            let more = if start.len() < text.len() { " ..." } else { "" };
            Verdict::of(&Error::store(format!(
                "the store at {store} gave an empty or unreadable verdict ({start:?}{more}) under the key {key}: it must give the values back as they were set"
            )))
        })
    }

    /// Decodes a verdict; `None` when the text is no verdict.
    pub(super) fn read(text: &str) -> Option<Verdict> {
        let (codes, rest) = text.split_once('\n')?;
        let codes = codes.split(' ').map(|code| code.parse().ok()).collect::<Option<Vec<i32>>>()?;
        let ([status, ccl, device, os, kind], ranks) = codes.split_first_chunk::<5>()?;
        let (reason, message) = match kind {
            0 => (Reason::Other, rest),
            1 => {
                let (numbers, message) = rest.split_once('\n')?;
                let (by, waited) = numbers.split_once(' ')?;
                (Reason::GivenUp { by: by.parse().ok()?, waited: waited.parse().ok()? }, message)
            }
            2 => {
                let (function, message) = rest.split_once('\n')?;
                (Reason::Refused { function: function.to_owned() }, message)
            }
            3 => {
                let (id, message) = rest.split_once('\n')?;
                (Reason::Deadlock { id: id.to_owned() }, message)
            }
            4 => {
                let (mesh, message) = rest.split_once('\n')?;
                (Reason::Departed { mesh: mesh.to_owned() }, message)
            }
            5 => {
                let (mesh, message) = rest.split_once('\n')?;
                (Reason::Aborted { mesh: mesh.to_owned() }, message)
            }
            6 => {
                let (number, message) = rest.split_once('\n')?;
                (Reason::Turn { number: number.parse().ok()? }, message)
            }
            _ => return None,
        };
        let status = Status::from_code(*status)?;
        // An error drops the line breaks at its end, so a message of line breaks says nothing.
        let silent = status != Status::Ok && message.trim_end_matches(['\n', '\r']).is_empty();
        let lost: Vec<i32> = ranks.iter().filter(|rank| **rank < 0).map(|rank| -1 - rank).collect();
        let ranks = ranks.iter().map(|rank| if *rank < 0 { -1 - rank } else { *rank }).collect();
        let (ccl, device, os, message) = (*ccl, *device, *os, message.to_owned());
        (!silent).then_some(Verdict { status, ccl, device, os, ranks, lost, reason, message })
    }

    /// Whether a rank refused its own call of another function than this one.
    pub(super) fn is_of_another(&self, function: &str) -> bool {
        matches!(&self.reason, Reason::Refused { function: refused } if refused != function)
    }

    /// Returns the world ranks that the verdict names.
    pub(super) fn ranks(&self) -> &[i32] {
        &self.ranks
    }

    /// Returns the verdict with another message.
    pub(super) fn with_message(self, message: String) -> Verdict {
        Verdict { message, ..self }
    }

    pub(super) fn into_result(self) -> Result<()> {
        match self.status {
            Status::Ok => Ok(()),
            status => Err(Error::new(status, self.message)
                .with_ccl_result(self.ccl)
                .with_device_error(self.device)
                .with_os_error(self.os)
                .with_ranks(&self.ranks)
                .with_lost(&self.lost)),
        }
    }
}

/// Returns the ranks that are to blame for a mismatch. `groups` are the ranks that differ from rank
/// `first`, by their calls. A call is right when more than half of all ranks are known to make it,
/// and the ranks that make another call are to blame. When no call is right, nobody knows who is
/// wrong, and the error is about all of them. Only the number of the ranks that agree with
/// rank `first` is known. Where they may be wrong, rank `first` is named for all of them.
fn outvoted(groups: &[(&str, Vec<i32>)], sides: &Sides, first: i32) -> Vec<i32> {
    let is_right = |ranks: usize| 2 * ranks > sides.size;
    let differ = |ranks: &[i32]| if groups.len() == 1 && sides.is_one_call { sides.differ } else { ranks.len() };
    let wrong = groups.iter().filter(|(_, ranks)| !is_right(differ(ranks)));
    let mut to_blame: Vec<i32> = wrong.flat_map(|(_, ranks)| ranks.clone()).take(MOST_NAMED).collect();
    if !is_right(sides.agree) {
        to_blame.push(first);
    }
    to_blame.sort_unstable();
    to_blame
}

/// Returns the call and the detail of a rank's text.
pub(super) fn split(text: &str) -> (&str, &str) {
    let mut parts = text.splitn(3, DETAIL);
    (parts.next().unwrap_or_default(), parts.next().unwrap_or_default())
}

/// Returns what a rank leaves in the store when it comes to a call: its text, and the name of the
/// mesh that the call concerns.
pub(super) fn with_mesh(text: &str, mesh: &str) -> String {
    format!("{text}{MESH}{mesh}")
}

/// Splits a value that [`with_mesh`] has made into the text and the name of the mesh.
pub(super) fn split_mesh(value: &[u8]) -> (String, String) {
    let value = String::from_utf8_lossy(value);
    let (text, mesh) = value.rsplit_once(MESH).unwrap_or((&value, ""));
    (text.to_owned(), mesh.to_owned())
}

/// Returns the name of the function that the text of a call begins with.
pub(super) fn function_of(call: &str) -> &str {
    call.split('(').next().unwrap_or(call)
}
