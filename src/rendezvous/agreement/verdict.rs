//! What stands for all ranks of a call, and how it is put into words.

use crate::error::{Error, Result, Status};

/// Between a call's text and its detail.
pub(super) const DETAIL: char = '\n';
/// How many different calls a message spells out.
const SHOWN_CALLS: usize = 3;
/// How much a message shows of a text that is no verdict.
const SHOWN_CHARACTERS: usize = 40;

/// A status and, unless it is well, a message with the codes of the layers below.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) status: Status,
    ccl: i32,
    device: i32,
    os: i32,
    /// The ranks that the error is about ([`Error::ranks`]).
    ranks: Vec<i32>,
    message: String,
}

impl Verdict {
    pub(super) fn agreed() -> Verdict {
        Verdict { status: Status::Ok, ccl: 0, device: 0, os: 0, ranks: Vec::new(), message: String::new() }
    }

    /// The same, with what was agreed on.
    pub(super) fn agreed_on(note: String) -> Verdict {
        Verdict { message: note, ..Verdict::agreed() }
    }

    /// What was agreed on, in a verdict that all is well.
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
            message: error.message().to_owned(),
        }
    }

    /// Of a rank that failed by itself.
    pub(super) fn of_failure(rank: i32, call: &str, error: &Error) -> Verdict {
        let message = format!("rank {rank} failed in {call}: {}", error.message());
        Verdict { message, ..Verdict::of(&error.clone().with_ranks(&[rank])) }
    }

    /// Of ranks that asked for something else than `theirs`, which rank `first` asked for: some of them with what each asked, and how many
    /// they are in all.
    pub(super) fn of_mismatch(
        dissenters: &[(i32, String)],
        all: usize,
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
        groups.truncate(SHOWN_CALLS);
        let shown: usize = groups.iter().map(|(_, ranks)| ranks.len()).sum();
        // The detail is spelled out where the call alone does not tell the difference.
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
        if all > shown {
            message.push_str(&format!("; {all} ranks in all differ from rank {first}"));
        }
        Verdict { status: Status::Mismatch, message, ..Verdict::agreed() }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let ranks: String = self.ranks.iter().map(|rank| format!(" {rank}")).collect();
        format!("{} {} {} {}{ranks}\n{}", self.status as i32, self.ccl, self.device, self.os, self.message).into_bytes()
    }

    /// The verdict that the store of that name gives under `key`. What no rank can have written is a failure of the store.
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

    /// `None` where the text is no verdict.
    pub(super) fn read(text: &str) -> Option<Verdict> {
        let (codes, message) = text.split_once('\n')?;
        let codes = codes.split(' ').map(|code| code.parse().ok()).collect::<Option<Vec<i32>>>()?;
        let [status, ccl, device, os, ref ranks @ ..] = codes[..] else { return None };
        let status = Status::from_code(status)?;
        let silent = status != Status::Ok && message.is_empty();
        (!silent).then(|| Verdict { status, ccl, device, os, ranks: ranks.to_vec(), message: message.to_owned() })
    }

    pub(super) fn into_result(self) -> Result<()> {
        match self.status {
            Status::Ok => Ok(()),
            status => Err(Error::new(status, self.message)
                .with_ccl_result(self.ccl)
                .with_device_error(self.device)
                .with_os_error(self.os)
                .with_ranks(&self.ranks)),
        }
    }
}

fn split(text: &str) -> (&str, &str) {
    text.split_once(DETAIL).unwrap_or((text, ""))
}

/// Ranks as people write them: "rank 5", "ranks 5, 17-31 and 40 more".
pub(in crate::rendezvous) fn ranges(ranks: &[i32]) -> String {
    const SHOWN: usize = 8;
    let mut sorted = ranks.to_vec();
    sorted.sort_unstable();
    let mut runs: Vec<(i32, i32)> = Vec::new();
    for rank in sorted {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let text = |(first, last): &(i32, i32)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}-{last}"),
    };
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    let shown: Vec<String> = runs.iter().take(SHOWN).map(text).collect();
    let more: i32 = runs.iter().skip(SHOWN).map(|(first, last)| last - first + 1).sum();
    match more {
        0 => format!("{noun} {}", shown.join(", ")),
        more => format!("{noun} {} and {more} more", shown.join(", ")),
    }
}
