//! The text of a decision in the store.
//!
//! ```text
//! epoch size=9 shape=2x4 dim=0 without= seats=0-4,5:1,6-7 spares=8 stateless=5:1 taken= refused= door=2
//! failure timeout
//! 7 0 0 0 0 3
//! rank 3 did not come within 1000 ms
//! end
//! ```
//!
//! Ranks are written in runs, and only tickets other than 0 are written. `-` is an empty seat, and
//! `-*4` stands for four empty seats. After the first line of a failure comes the text of a
//! verdict (verdict.rs). A decision has one text only, and no other text is read.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;

use super::{Decision, Epoch, Failure, Replicas, Why};
use crate::error::Status;
use crate::rendezvous::agreement::verdict::{Reason, Verdict};
use crate::rendezvous::incarnation::Incarnation;

/// The most entries of a list. There is a limit because a run of a few bytes can name any number
/// of ranks.
const MOST: usize = 1 << 20;

const KINDS: [(Why, &str); 5] = [
    (Why::Timeout, "timeout"),
    (Why::Mismatch, "mismatch"),
    (Why::Refused, "refused"),
    (Why::TooFew, "too-few"),
    (Why::NoState, "no-state"),
];

impl Display for Decision {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Decision::Epoch(epoch) => write!(out, "{epoch}"),
            Decision::Failure(Failure { why, error }) => {
                let name = KINDS.iter().find_map(|(kind, name)| (kind == why).then_some(*name));
                let error = error.encode();
                write!(out, "failure {}\n{}", name.unwrap_or_default(), String::from_utf8_lossy(&error))
            }
            Decision::End => write!(out, "end"),
        }
    }
}

impl FromStr for Decision {
    type Err = ();

    /// Reads a text that [`Display`] has written.
    fn from_str(text: &str) -> Result<Decision, ()> {
        let read = match text.split_once(' ') {
            None if text == "end" => Some(Decision::End),
            Some(("epoch", _)) => read_epoch(text).map(Decision::Epoch),
            Some(("failure", rest)) => read_failure(rest).map(Decision::Failure),
            _ => None,
        };
        read.filter(|decision| decision.to_string() == text).ok_or(())
    }
}

impl Display for Epoch {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        let Epoch { size, replicas: Replicas { sizes, dim }, .. } = self;
        let shape = sizes.iter().map(usize::to_string).collect::<Vec<_>>().join("x");
        // Numbers of replicas are written in runs, as ranks are.
        let without = self.without.iter().map(|replica| Some(Incarnation::first(*replica as i32)));
        let list = |list: &[Incarnation]| runs(list.iter().copied().map(Some));
        write!(
            out,
            "epoch size={size} shape={shape} dim={dim} without={} seats={} spares={} stateless={} taken={} refused={} door={}",
            runs(without),
            runs(self.seats.iter().copied()),
            list(&self.spares),
            list(&self.stateless),
            list(&self.taken),
            list(&self.refused),
            self.door
        )
    }
}

/// Reads the line of an epoch whose parts fit together.
fn read_epoch(text: &str) -> Option<Epoch> {
    let mut fields = text.strip_prefix("epoch ")?.split(' ');
    let mut field = |name: &str| fields.next()?.strip_prefix(name)?.strip_prefix('=');
    let size = field("size")?.parse().ok()?;
    let sizes = field("shape")?.split('x').map(|size| size.parse().ok()).collect::<Option<Vec<usize>>>()?;
    let dim = field("dim")?.parse().ok()?;
    let without = processes(field("without")?)?;
    let seats = read_runs(field("seats")?)?;
    let (spares, stateless) = (processes(field("spares")?)?, processes(field("stateless")?)?);
    let (taken, refused) = (processes(field("taken")?)?, processes(field("refused")?)?);
    let door = field("door")?.parse().ok()?;
    let is_index = |replica: &Incarnation| (replica.ticket == 0).then_some(replica.rank as usize);
    let without = without.iter().map(is_index).collect::<Option<Vec<usize>>>()?;
    let replicas = Replicas { sizes, dim };
    let epoch = Epoch { size, replicas, seats, without, spares, stateless, taken, refused, door };
    (fields.next().is_none() && epoch.is_sound()).then_some(epoch)
}

/// Reads what follows the word "failure".
fn read_failure(text: &str) -> Option<Failure> {
    let (name, error) = text.split_once('\n')?;
    let why = KINDS.iter().find_map(|(kind, known)| (*known == name).then_some(*kind))?;
    let error = Verdict::read(error).filter(|error| error.status != Status::Ok && error.reason == Reason::Other)?;
    Some(Failure { why, error })
}

/// Writes processes, and `None` for empty seats, with commas between them.
fn runs(processes: impl Iterator<Item = Option<Incarnation>>) -> String {
    // The first entry of each run, and the number of its entries.
    let mut runs: Vec<(Option<Incarnation>, usize)> = Vec::new();
    for process in processes {
        let goes_on = |(first, count): &(Option<Incarnation>, usize)| match (first, process) {
            (None, None) => true,
            (Some(first), Some(next)) => {
                let expected = i64::from(first.rank) + *count as i64;
                first.ticket == 0 && next.ticket == 0 && i64::from(next.rank) == expected
            }
            _ => false,
        };
        match runs.last_mut().filter(|run| goes_on(run)) {
            Some((_, count)) => *count += 1,
            None => runs.push((process, 1)),
        }
    }
    let text = |(first, count): &(Option<Incarnation>, usize)| match (first, count) {
        (None, 1) => "-".to_owned(),
        (None, count) => format!("-*{count}"),
        (Some(first), 1) => first.to_string(),
        (Some(first), count) => format!("{first}-{}", i64::from(first.rank) + *count as i64 - 1),
    };
    runs.iter().map(text).collect::<Vec<_>>().join(",")
}

/// Reads what [`runs`] has written; `None` where the text has too many entries.
fn read_runs(text: &str) -> Option<Vec<Option<Incarnation>>> {
    let mut read = Vec::new();
    for item in text.split(',').filter(|_| !text.is_empty()) {
        let left = MOST - read.len();
        if let Some(empty) = item.strip_prefix('-') {
            let count = if empty.is_empty() { 1 } else { empty.strip_prefix('*')?.parse().ok()? };
            read.extend((count <= left).then(|| std::iter::repeat_n(None, count))?);
        } else if let Some((first, last)) = item.split_once('-') {
            let (first, last) = (first.parse::<i32>().ok()?, last.parse::<i32>().ok()?);
            let count = usize::try_from(i64::from(last) - i64::from(first) + 1).ok()?;
            read.extend((count <= left).then(|| (first..=last).map(|rank| Some(Incarnation::first(rank))))?);
        } else {
            read.push((left > 0).then_some(Some(item.parse().ok()?))?);
        }
    }
    Some(read)
}

/// Does what [`read_runs`] does, for a list that has no empty seats.
fn processes(text: &str) -> Option<Vec<Incarnation>> {
    read_runs(text)?.into_iter().collect()
}
