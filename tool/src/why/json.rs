//! The verdict as JSON. docs/why.md describes it: a field may be added, and none is removed or gets
//! another meaning.

use devicemesh::rendezvous::host_name;
use serde::Serialize;

use super::find::Node;
use super::job::Seen;
use super::judge::{Finding, Verdict};
use super::ras::Known;
use super::report::rows;
use super::stack::Stacks;

#[derive(Serialize)]
pub struct JobReport {
    /// The job's name.
    name: String,
    /// Whether something is stuck.
    stuck: bool,
    /// What is wrong, in one sentence.
    summary: String,
    findings: Vec<FindingReport>,
    ranks: Vec<RankReport>,
    groups: Vec<GroupReport>,
    nodes: Vec<NodeReport>,
    /// The answer of NCCL's RAS about the job's communicators.
    nccl: Vec<Known>,
}

/// A node of the job, or a host that was asked.
#[derive(Serialize)]
struct NodeReport {
    name: String,
    ranks: Vec<u32>,
    /// Why nothing is known of its processes; null where they are known.
    silence: Option<String>,
}

#[derive(Serialize)]
struct FindingReport {
    kind: &'static str,
    sentence: String,
    /// The ranks that are the cause; for "slow", "all failed" and "elsewhere" those in the call.
    ranks: Vec<u32>,
    /// The ranks that wait for them directly.
    waiting: Vec<u32>,
    /// How many ranks wait for them, directly or not.
    victims: usize,
    group: String,
    /// The number of the call in the group.
    call: u64,
    /// The longest wait; null where nobody knows.
    seconds: Option<f64>,
}

#[derive(Serialize)]
struct RankReport {
    rank: u32,
    /// Null for a rank that is not seen here.
    pid: Option<u32>,
    host: Option<String>,
    state: &'static str,
    /// Where the rank is, in words.
    whereabouts: String,
    /// The frames of its threads, where they were read.
    threads: Vec<super::stack::Thread>,
}

#[derive(Serialize)]
struct GroupReport {
    name: String,
    scope: bool,
    ranks: Vec<u32>,
    positions: Vec<PositionReport>,
}

#[derive(Serialize)]
struct PositionReport {
    ranks: Vec<u32>,
    /// How many calls they have begun.
    begun: u64,
    /// What the last one does.
    what: String,
    state: String,
    /// The seconds since it began, or since it ended.
    seconds: Option<f64>,
}

impl JobReport {
    pub fn new(verdict: &Verdict<'_>, stacks: &Stacks, after: f64, name: &str, nccl: Vec<Known>) -> JobReport {
        let number = |rank: &usize| verdict.job.ranks[*rank].number;
        let finding = |finding: &Finding| {
            let mut waiting: Vec<u32> = finding.waits.iter().map(|wait| number(&verdict.waits[*wait].rank)).collect();
            waiting.sort_unstable();
            waiting.dedup();
            FindingReport {
                kind: finding.kind.word(),
                sentence: verdict.sentence(finding),
                ranks: finding.ranks.iter().map(number).collect(),
                waiting,
                victims: finding.victims,
                group: verdict.groups[finding.group].name.to_owned(),
                call: finding.number,
                seconds: finding.seconds,
            }
        };
        let rank = |at: usize| {
            let rank = &verdict.job.ranks[at];
            let state = match &rank.seen {
                Seen::Recorded(process) => process.state.word(),
                Seen::Started(..) => "not joined",
                Seen::Gone => "gone",
                Seen::Elsewhere => "elsewhere",
            };
            let (pid, host) = match &rank.seen {
                Seen::Recorded(process) => (Some(process.pid), Some(process.host().to_owned())),
                Seen::Started(pid, host) => (Some(*pid), Some(host.clone().unwrap_or_else(host_name))),
                Seen::Gone | Seen::Elsewhere => (None, None),
            };
            RankReport {
                rank: rank.number,
                pid,
                host,
                state,
                whereabouts: verdict.whereabouts(at),
                threads: stacks.of(at).to_vec(),
            }
        };
        let positions = rows(verdict);
        let group = |at: usize| {
            let own = positions.iter().filter(|row| row.group == at);
            let position = own.map(|row| PositionReport {
                ranks: row.ranks.iter().map(number).collect(),
                begun: row.begun,
                what: row.content.clone(),
                state: row.state.to_owned(),
                seconds: row.seconds,
            });
            GroupReport {
                name: verdict.groups[at].name.to_owned(),
                scope: verdict.groups[at].is_scope,
                ranks: verdict.members(at).iter().map(number).collect(),
                positions: position.collect(),
            }
        };
        let node = |node: &Node| {
            let Node { name, ranks, silence, .. } = node.clone();
            NodeReport { name, ranks, silence }
        };
        JobReport {
            name: name.to_owned(),
            stuck: !verdict.findings.is_empty(),
            summary: verdict.headline(after),
            findings: verdict.findings.iter().map(finding).collect(),
            ranks: (0..verdict.job.ranks.len()).map(rank).collect(),
            groups: (0..verdict.groups.len()).map(group).collect(),
            nodes: verdict.job.nodes.iter().map(node).collect(),
            nccl,
        }
    }
}

#[cfg(test)]
mod tests {
    use devicemesh::rendezvous::launcher::Place;

    use super::super::find::{Found, Started};
    use super::super::job::jobs;
    use super::super::judge::judge;
    use super::super::judge_tests::a_rank_behind;
    use super::*;

    /// Process ids of several hosts are of no use without the hosts.
    #[test]
    fn a_rank_that_has_not_joined_has_a_host() {
        let started = |rank: usize, host: Option<&str>| {
            let place = Place::new("devicemesh run", rank, 8, Some(rank));
            Started { pid: 100 + rank as u32, host: host.map(str::to_owned), place }
        };
        let found = Found {
            processes: a_rank_behind()[..6].iter().map(|rank| rank.process()).collect(),
            started: vec![started(6, Some("gamma")), started(7, None)],
            ..Found::default()
        };
        let jobs = jobs(found);
        let report = JobReport::new(&judge(&jobs[0], 1.0), &Stacks::default(), 1.0, "train", Vec::new());
        let ranks: Vec<_> = report.ranks.iter().skip(5).map(|rank| (rank.pid, rank.host.clone(), rank.state)).collect();
        let expected = [(105, "alpha".to_owned(), "sleeps"), (106, "gamma".to_owned(), "not joined")];
        assert_eq!(ranks[..2], expected.map(|(pid, host, state)| (Some(pid), Some(host), state)));
        assert_eq!(ranks[2], (Some(107), Some(host_name()), "not joined"));
    }
}
