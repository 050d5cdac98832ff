//! The verdict as text.

use std::collections::{BTreeMap, BTreeSet};

use devicemesh::printable::printable;
use recording::EntryState;

use super::judge::{Finding, Verdict};
use super::stack::Stacks;
use super::words::{content, time};
use crate::columns::table;
use crate::style::Style;
use crate::terminal;
use crate::words::{count, listed, ranges};

/// The most further findings, ranks that are the cause, and rows of the table that are shown.
/// `--json` has all.
const MOST_FINDINGS: usize = 5;
pub const MOST_RANKS: usize = 8;
const MOST_ROWS: usize = 40;
/// The most ranges of ranks that a line names.
const MOST_RANGES: usize = 8;

/// A position in a group: the ranks that are there.
pub struct Row<'a> {
    /// The group, as its place among the groups.
    pub group: usize,
    /// The ranks, as their places in the job.
    pub ranks: Vec<usize>,
    /// How many calls of the group they have begun.
    pub begun: u64,
    /// What the last one does; empty where the ring has lost it, or where there was none.
    pub content: String,
    /// What has become of it.
    pub state: &'a str,
    /// The seconds since the call began, or since it ended.
    pub seconds: Option<f64>,
}

/// The ranks of a row, and the longest time since their calls began or ended.
#[derive(Default)]
struct At {
    ranks: Vec<usize>,
    seconds: Option<f64>,
}

/// The positions of all ranks in all groups. The ranks that are behind come first.
pub fn rows<'a>(verdict: &Verdict<'_>) -> Vec<Row<'a>> {
    let mut rows = Vec::new();
    for (at, group) in verdict.groups.iter().enumerate() {
        let mut found: BTreeMap<(u64, &str, String), At> = BTreeMap::new();
        for member in &group.members {
            let (Some(rank), Some(seat)) = (member.rank, member.seat) else { continue };
            let timeline = &seat.process.timeline;
            let other =
                seat.calls().rfind(|call| !call.call.operation.is_compared() && call.state == EntryState::Running);
            let call = other.or_else(|| seat.last());
            let (state, since) = match call {
                None if seat.channel.calls_begun == 0 => ("no call", None),
                None => ("", None),
                Some(call) => (word(call.state, verdict.job.is_over), call.ended.or(Some(call.begun))),
            };
            let content = call.map_or_else(String::new, |call| content(&seat, call, group, verdict));
            let seconds = since.and_then(|ticks| timeline.seconds_since(ticks));
            let entry = found.entry((seat.channel.calls_begun, state, content)).or_default();
            entry.ranks.push(rank);
            entry.seconds = later(entry.seconds, seconds);
        }
        let row = |((begun, state, content), found): (_, At)| {
            let At { ranks, seconds } = found;
            Row { group: at, ranks, begun, content, state, seconds }
        };
        rows.extend(found.into_iter().map(row));
    }
    rows
}

/// The larger of two times, of which each may be unknown.
fn later(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    one.into_iter().chain(other).reduce(f64::max)
}

fn word(state: EntryState, is_over: bool) -> &'static str {
    match state {
        EntryState::Queued => "queued",
        EntryState::Running if is_over => "waited",
        EntryState::Running => "waits",
        EntryState::Issued => "issued",
        EntryState::Done => "done",
        EntryState::Failed => "failed",
    }
}

/// The verdict as text: the sentence about what is wrong, the ranks that are the cause, and a table
/// of who is where.
pub fn text(
    verdict: &Verdict<'_>,
    stacks: &Stacks,
    after: f64,
    name: &str,
    width: Option<usize>,
    style: Style,
) -> String {
    let name = if name.is_empty() { String::new() } else { format!("{name}: ") };
    let headline = terminal::wrap(&format!("{name}{}\n", verdict.headline(after)), width);
    let mut out = match verdict.findings.is_empty() {
        true => headline,
        false => style.wrong(headline.trim_end()) + "\n",
    };
    for finding in verdict.findings.iter().skip(1).take(MOST_FINDINGS) {
        out += &terminal::wrap(&format!("  also: {}\n", verdict.sentence(finding)), width);
    }
    let more = verdict.findings.len().saturating_sub(1 + MOST_FINDINGS);
    if more > 0 {
        out += &format!("  and {} (--json has all)\n", count(more, "more finding"));
    }
    for node in &verdict.job.nodes {
        if let Some(silence) = &node.silence {
            let numbers = listed(ranges(node.ranks.iter().map(|rank| *rank as usize)), MOST_RANGES);
            let word = if node.ranks.len() == 1 { "rank" } else { "ranks" };
            let ranks = if numbers.is_empty() { String::new() } else { format!(" ({word} {numbers})") };
            out += &terminal::wrap(&format!("  {}{ranks} {}\n", printable(&node.name), printable(silence)), width);
        }
    }
    out += &causes(verdict, stacks, width);
    out += &positions(verdict, width, style);
    out
}

/// The ranks that are the cause, each once, in the order of the findings. The first [`MOST_RANKS`]
/// of them are shown.
pub fn culprits(verdict: &Verdict<'_>) -> Vec<usize> {
    let mut known = BTreeSet::new();
    let ranks = verdict.findings.iter().filter(|finding| has_causes(finding)).flat_map(|finding| &finding.ranks);
    ranks.copied().filter(|rank| known.insert(*rank)).collect()
}

/// Where the ranks are that are the cause, and their stacks.
fn causes(verdict: &Verdict<'_>, stacks: &Stacks, width: Option<usize>) -> String {
    let ranks = culprits(verdict);
    let line = |rank: &usize| {
        let whereabouts = terminal::wrap(&format!("  {}\n", verdict.whereabouts(*rank)), width);
        whereabouts + &stacks.text(*rank)
    };
    let mut out: String = ranks.iter().take(MOST_RANKS).map(line).collect();
    out += &terminal::wrap(&stacks.refusal(), width);
    if ranks.len() > MOST_RANKS {
        out += &format!("  and {} (--json has all)\n", count(ranks.len() - MOST_RANKS, "more rank"));
    }
    out
}

/// Whether the ranks of the finding are its cause, and not those that wait.
fn has_causes(finding: &Finding) -> bool {
    use super::judge::Kind;
    !matches!(finding.kind, Kind::Slow | Kind::AllFailed | Kind::Elsewhere)
}

/// A table of who is where. The groups of one dimension share a row for each call.
fn positions(verdict: &Verdict<'_>, width: Option<usize>, style: Style) -> String {
    let rows = rows(verdict);
    // A name, a number and a content, with the place of its row.
    let mut places: BTreeMap<(&str, u64, &str, &str), usize> = BTreeMap::new();
    let mut merged: Vec<(&Row<'_>, Vec<usize>, Option<f64>)> = Vec::new();
    for row in rows.iter().filter(|row| row.begun > 0 || ["waits", "waited"].contains(&row.state)) {
        let key = (verdict.groups[row.group].name, row.begun, row.content.as_str(), row.state);
        let at = *places.entry(key).or_insert(merged.len());
        match merged.get_mut(at) {
            Some((_, ranks, seconds)) => {
                ranks.extend(&row.ranks);
                *seconds = later(*seconds, row.seconds);
            }
            None => merged.push((row, row.ranks.clone(), row.seconds)),
        }
    }
    if merged.is_empty() {
        return String::new();
    }
    // The names keep their order, and the ranks that are behind come first.
    let mut order: Vec<&str> = Vec::new();
    for (row, _, _) in &merged {
        let name = verdict.groups[row.group].name;
        if !order.contains(&name) {
            order.push(name);
        }
    }
    merged.sort_by_key(|(row, _, _)| {
        let name = verdict.groups[row.group].name;
        (order.iter().position(|other| *other == name), row.begun)
    });
    let more = merged.len().saturating_sub(MOST_ROWS);
    let cells = |(row, ranks, seconds): &(&Row<'_>, Vec<usize>, Option<f64>)| {
        [
            printable(verdict.groups[row.group].name).into_owned(),
            verdict.numbers(ranks),
            row.begun.to_string(),
            row.content.clone(),
            row.state.to_owned(),
            seconds.map_or("-".to_owned(), time),
        ]
    };
    let cells: Vec<[String; 6]> = merged.iter().take(MOST_ROWS).map(cells).collect();
    let heads = ["group", "ranks", "call", "what", "state", "since"];
    let table = table(&heads, &cells, |column| ![2, 5].contains(&column), 2, width, |head| style.dim(head));
    let more = if more > 0 { format!("and {} (--json has all)\n", count(more, "more row")) } else { String::new() };
    format!("\n{table}{more}")
}
