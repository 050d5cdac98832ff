//! Judges a job: what is wrong, which ranks are the cause, and who waits for them.

use std::collections::{BTreeMap, BTreeSet};

use recording::EntryState;

use super::groups::{Group, groups};
use super::job::{Job, Seen};
use super::process::State;
use super::roots::Graph;
use super::waits::{Edge, Reason, Wait, edges, waits};

/// What is wrong. The first ones are reported first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The processes of ranks are gone.
    Gone,
    /// Ranks are stopped by a signal or a debugger.
    Stopped,
    /// Ranks make different calls.
    Differs,
    /// Ranks wait for each other in a circle.
    Crossed,
    /// Ranks have queued a call or a message in a group that they have not ended.
    Queued,
    /// A call has failed on ranks, and others still wait in it.
    Failed,
    /// Ranks have not begun a call.
    Behind,
    /// Ranks do not send or receive a message.
    NoMessage,
    /// Ranks have left the group or the world.
    Left,
    /// Ranks have not made the group yet.
    NoGroup,
    /// Ranks have not joined the world yet.
    NotJoined,
    /// A call has failed on all ranks that are known, and nobody is missing.
    AllFailed,
    /// All ranks are in a call, and it does not end.
    Slow,
    /// All ranks that are known are in a call. The others run elsewhere.
    Elsewhere,
}

impl Kind {
    /// The word for the kind in JSON.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Gone => "gone",
            Kind::Stopped => "stopped",
            Kind::Differs => "differs",
            Kind::Crossed => "crossed",
            Kind::Queued => "queued",
            Kind::Failed => "failed",
            Kind::Behind => "behind",
            Kind::NoMessage => "no message",
            Kind::Left => "left",
            Kind::NoGroup => "no group",
            Kind::NotJoined => "not joined",
            Kind::AllFailed => "all failed",
            Kind::Slow => "slow",
            Kind::Elsewhere => "elsewhere",
        }
    }
}

/// One thing that is wrong.
pub struct Finding {
    pub kind: Kind,
    /// The ranks that are the cause, as their places in the job. For [`Kind::Slow`] and
    /// [`Kind::AllFailed`], those that are in the call.
    pub ranks: Vec<usize>,
    /// The group, as its place among the groups.
    pub group: usize,
    /// The number of the call in the group: the one that the ranks have not begun, or in which they
    /// differ.
    pub number: u64,
    /// The waits, as their places among the waits, that end when the ranks come. For
    /// [`Kind::Crossed`] the circle: each one waits for the rank of the next one.
    pub waits: Vec<usize>,
    /// How many ranks wait for the ranks, directly or for ranks that wait.
    pub victims: usize,
    /// The seconds of the longest of these waits. `None` where nobody knows.
    pub seconds: Option<f64>,
}

/// What is known of a job, and what is wrong with it.
pub struct Verdict<'a> {
    pub job: &'a Job,
    pub groups: Vec<Group<'a>>,
    pub waits: Vec<Wait<'a>>,
    /// The most important finding is the first one. There is none where nothing is stuck.
    pub findings: Vec<Finding>,
}

/// Judges a job. A rank that has waited for less than `after` seconds is no reason for a finding.
/// In a job that is gone, every wait is one.
pub fn judge(job: &Job, after: f64) -> Verdict<'_> {
    let groups = groups(job);
    let waits = waits(&groups);
    let edges = edges(job, &groups, &waits);
    let after = if job.is_over { 0.0 } else { after };
    let mut findings = Judge { job, groups: &groups, waits: &waits, edges: &edges, after }.findings();
    findings.sort_by_key(|finding| (finding.kind, std::cmp::Reverse(finding.victims)));
    Verdict { job, groups, waits, findings }
}

/// Ranks that are the cause of waits, and the edges of these waits.
#[derive(Default)]
struct Cause<'a> {
    ranks: Vec<usize>,
    edges: Vec<&'a Edge>,
}

struct Judge<'a> {
    job: &'a Job,
    groups: &'a [Group<'a>],
    waits: &'a [Wait<'a>],
    edges: &'a [Edge],
    after: f64,
}

impl Judge<'_> {
    fn findings(&self) -> Vec<Finding> {
        let differing: BTreeSet<usize> =
            self.edges.iter().filter(|edge| is_differing(edge)).map(|edge| edge.from).collect();
        let halted = (0..self.job.ranks.len()).filter(|rank| self.job.is_halted(*rank));
        let ends: BTreeSet<usize> = halted.chain(differing.iter().copied()).collect();
        // A wait for ranks of other hosts says nothing where it also waits for a rank that is seen.
        let is_seen = |edge: &&Edge| !matches!(self.job.ranks[edge.to].seen, Seen::Elsewhere);
        let seen: Vec<&Edge> = self.edges.iter().filter(is_seen).collect();
        let graph = Graph::new(seen.iter().copied(), &ends);
        let mut findings = self.unexplained(&graph);
        // A rank that is held in a call in which nobody is missing is late in other groups because
        // of that, so it is no cause there.
        let held = findings.iter().filter(|finding| finding.kind != Kind::AllFailed);
        let held: BTreeSet<usize> = held.flat_map(|finding| &finding.ranks).copied().collect();
        findings.extend(self.differences(&graph));
        let roots = graph.roots();
        let causes = roots.iter().filter(|root| !differing.contains(root) && !held.contains(root));
        findings.extend(self.causes(&graph, causes));
        let mut explained = graph.behind(roots.iter().chain(&differing).copied());
        while let Some(circle) = graph.circle(&explained) {
            explained.extend(graph.behind(circle.iter().map(|edge| edge.from)));
            findings.extend(self.circle(&graph, &circle));
        }
        findings
    }

    /// The groups in which ranks make different calls.
    fn differences(&self, graph: &Graph<'_>) -> Vec<Finding> {
        let mut found: BTreeMap<(usize, u64), Vec<&Edge>> = BTreeMap::new();
        for edge in self.edges {
            if let Reason::Differs(number) = edge.reason {
                found.entry((self.waits[edge.wait].group, number)).or_default().push(edge);
            }
        }
        // Two pairs of ranks may differ first at different calls. The earliest difference is the
        // cause of the later ones.
        let mut first: BTreeMap<usize, u64> = BTreeMap::new();
        found.keys().for_each(|(group, number)| {
            first.entry(*group).or_insert(*number);
        });
        found.retain(|(group, number), _| first[group] == *number);
        let finding = |((group, number), edges): ((usize, u64), Vec<&Edge>)| {
            let parts = self.groups[group].calls(number);
            let smallest = parts.iter().map(|(_, ranks)| ranks.len()).min().unwrap_or(0);
            // Fewer ranks are the likelier cause. Where there are as many of each kind, all are.
            let is_cause = |ranks: &[usize]| ranks.len() == smallest;
            let ranks =
                parts.iter().filter(|(_, ranks)| is_cause(ranks)).flat_map(|(_, ranks)| ranks.clone()).collect();
            self.finding(Kind::Differs, ranks, group, number, &edges, graph)
        };
        found.into_iter().filter_map(finding).collect()
    }

    /// What is wrong with the ranks for which the others wait in the end. Ranks with one cause are
    /// one finding.
    fn causes<'r>(&self, graph: &Graph<'_>, roots: impl Iterator<Item = &'r usize>) -> Vec<Finding> {
        let mut found: BTreeMap<(Kind, Place), Cause> = BTreeMap::new();
        for root in roots {
            let mut by_call: BTreeMap<Place, Vec<&Edge>> = BTreeMap::new();
            for edge in graph.into(*root) {
                let wait = &self.waits[edge.wait];
                by_call.entry(place(wait, number(edge, wait))).or_default().push(edge);
            }
            let longest = |edges: &[&Edge]| self.longest(edges).unwrap_or(f64::MAX);
            let most = by_call.iter().max_by(|(_, one), (_, other)| {
                one.len().cmp(&other.len()).then(longest(one).total_cmp(&longest(other)))
            });
            let Some((place, edges)) = most else { continue };
            let kind = self.kind(*root, edges[0].reason);
            let entry = found.entry((kind, *place)).or_default();
            entry.ranks.push(*root);
            entry.edges.extend(edges.iter().copied());
        }
        let finding = |((kind, (group, _, number)), cause): ((Kind, Place), Cause)| {
            self.finding(kind, cause.ranks, group, number, &cause.edges, graph)
        };
        found.into_iter().filter_map(finding).collect()
    }

    fn kind(&self, rank: usize, reason: Reason) -> Kind {
        match &self.job.ranks[rank].seen {
            Seen::Gone => Kind::Gone,
            Seen::Started(..) => Kind::NotJoined,
            Seen::Recorded(process) if process.state == State::Gone && !self.job.is_over => Kind::Gone,
            Seen::Recorded(process) if process.state.is_halted() && !self.job.is_over => Kind::Stopped,
            _ => match reason {
                Reason::Queued(_) | Reason::QueuedMessage => Kind::Queued,
                Reason::Failed(_) => Kind::Failed,
                Reason::Left => Kind::Left,
                Reason::NoGroup => Kind::NoGroup,
                Reason::NoMessage => Kind::NoMessage,
                Reason::Behind(_) | Reason::Differs(_) | Reason::Absent => Kind::Behind,
            },
        }
    }

    /// Ranks that wait for each other.
    fn circle(&self, graph: &Graph<'_>, circle: &[&Edge]) -> Option<Finding> {
        let ranks = circle.iter().map(|edge| edge.from).collect();
        let first = &self.waits[circle[0].wait];
        let found = self.finding(Kind::Crossed, ranks, first.group, first.call.in_channel, circle, graph)?;
        Some(Finding { waits: circle.iter().map(|edge| edge.wait).collect(), ..found })
    }

    /// The waits that wait for no rank that is seen.
    fn unexplained(&self, graph: &Graph<'_>) -> Vec<Finding> {
        // For each wait with edges: whether they all end at ranks of other hosts.
        let mut is_elsewhere: BTreeMap<usize, bool> = BTreeMap::new();
        for edge in self.edges {
            let is_to_elsewhere = matches!(self.job.ranks[edge.to].seen, Seen::Elsewhere);
            is_elsewhere.entry(edge.wait).and_modify(|all| *all &= is_to_elsewhere).or_insert(is_to_elsewhere);
        }
        let mut found: BTreeMap<(Kind, Place), Vec<usize>> = BTreeMap::new();
        for (at, wait) in self.waits.iter().enumerate().filter(|(_, wait)| !self.job.is_halted(wait.rank)) {
            // A group may have very many members, so they are looked at only where it matters.
            let has_unknown = || self.groups[wait.group].members.iter().any(|member| member.rank.is_none());
            let kind = match (is_elsewhere.get(&at), wait.call.state) {
                (Some(true), _) => Kind::Elsewhere,
                (Some(false), _) => continue,
                (None, EntryState::Failed) => Kind::AllFailed,
                (None, _) if has_unknown() => Kind::Elsewhere,
                // Nobody records when a stream ends a call.
                (None, EntryState::Issued) => continue,
                (None, _) => Kind::Slow,
            };
            found.entry((kind, place(wait, wait.call.in_channel))).or_default().push(at);
        }
        let finding = |((kind, (group, _, number)), waits): ((Kind, Place), Vec<usize>)| {
            let ranks: BTreeSet<usize> = waits.iter().map(|wait| self.waits[*wait].rank).collect();
            let seconds = longest(waits.iter().map(|wait| self.waits[*wait].seconds));
            let is_long = seconds.is_none_or(|seconds| seconds >= self.after);
            let victims = graph.behind(ranks.iter().copied()).len() - ranks.len();
            let ranks = ranks.into_iter().collect();
            is_long.then_some(Finding { kind, ranks, group, number, waits, victims, seconds })
        };
        found.into_iter().filter_map(finding).collect()
    }

    /// The finding about these ranks, for which `edges` wait directly. `None` where nobody waits
    /// for long.
    fn finding(
        &self,
        kind: Kind,
        ranks: Vec<usize>,
        group: usize,
        number: u64,
        edges: &[&Edge],
        graph: &Graph<'_>,
    ) -> Option<Finding> {
        // A job may have very many ranks, so each of them is looked up in a set.
        let causes: BTreeSet<usize> = ranks.iter().copied().collect();
        let behind = graph.behind(causes.iter().copied());
        let of_behind = self.waits.iter().filter(|wait| behind.contains(&wait.rank) && !causes.contains(&wait.rank));
        let all = edges.iter().map(|edge| self.waits[edge.wait].seconds).chain(of_behind.map(|wait| wait.seconds));
        if longest(all).is_some_and(|seconds| seconds < self.after) {
            return None;
        }
        let waits: BTreeSet<usize> = edges.iter().map(|edge| edge.wait).collect();
        let victims = behind.difference(&causes).count();
        let seconds = self.longest(edges);
        Some(Finding { kind, ranks, group, number, waits: waits.into_iter().collect(), victims, seconds })
    }

    fn longest(&self, edges: &[&Edge]) -> Option<f64> {
        longest(edges.iter().map(|edge| self.waits[edge.wait].seconds))
    }
}

fn is_differing(edge: &Edge) -> bool {
    matches!(edge.reason, Reason::Differs(_))
}

/// The place of a call: its group, the operation where ranks may leave it out, and its number.
type Place = (usize, Option<u8>, u64);

/// Returns the place of a wait's call, of which the number is `number`. The collectives of a group
/// have one row of numbers. Sends, receives and a program's own operations have another one.
fn place(wait: &Wait<'_>, number: u64) -> Place {
    let operation = wait.call.call.operation;
    (wait.group, (!operation.is_compared()).then_some(operation as u8), number)
}

/// The number of the call for which an edge waits.
fn number(edge: &Edge, wait: &Wait<'_>) -> u64 {
    match edge.reason {
        Reason::Behind(number) | Reason::Queued(number) | Reason::Failed(number) | Reason::Differs(number) => number,
        Reason::Absent | Reason::Left | Reason::NoGroup | Reason::NoMessage | Reason::QueuedMessage => {
            wait.call.in_channel
        }
    }
}

/// The longest of times. `None` where one of them is not known.
fn longest(mut seconds: impl Iterator<Item = Option<f64>>) -> Option<f64> {
    seconds.try_fold(0.0, |longest: f64, seconds| Some(longest.max(seconds?)))
}
