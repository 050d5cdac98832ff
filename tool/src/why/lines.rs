//! The other hosts of jobs: how they are asked, and what they say.
//!
//! A line is a way to hosts that answer. The nodes of a `devicemesh run` answer through the store
//! of their job ([`run::ask`](crate::run::ask)). Where srun or mpirun has started one
//! `devicemesh why` on each host, these answer through a store that the first one serves
//! ([`launched`]).
//!
//! [`launched`]: super::launched

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use devicemesh::rendezvous::host_name;

use super::answer::{Answer, Request};
use super::find::{Found, Node};
use super::process::Origin;
use super::stack::Stacks;
use crate::proc::descends;
use crate::run::{Board, Card, Peer, Roster, ask, cards, end_questions, left, roster};
use crate::words::count;

/// How long the first of several processes waits until the others have ended.
const LEAVES: Duration = Duration::from_secs(1);

/// A way to other hosts.
pub struct Line {
    /// The store through which they answer.
    pub board: Board,
    /// Who answers, and this host itself.
    pub peers: Vec<Peer>,
    /// The peers that are on this host, by their arrival numbers.
    pub own: Vec<u32>,
    /// Where the ranks of the job meet. `None` where the hosts may have ranks of every job.
    pub address: Option<(String, u16)>,
}

/// The ways to the other hosts of the jobs that are looked at.
pub struct Lines {
    lines: Vec<Line>,
    /// How long a host may take to answer.
    patience: Duration,
    /// The nodes that are not reached, because their store is not.
    unreached: Vec<Node>,
}

impl Lines {
    /// No way to any host.
    pub fn none() -> Lines {
        Lines { lines: Vec::new(), patience: Duration::ZERO, unreached: Vec::new() }
    }

    /// One way.
    pub fn one(line: Line, patience: Duration) -> Lines {
        Lines { lines: vec![line], patience, unreached: Vec::new() }
    }

    /// Whether no other host was to be asked.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty() && self.unreached.is_empty()
    }

    /// The ways to the nodes of the jobs of `devicemesh run` that have a node here. Where jobs are
    /// named, `named` has their names and processes.
    pub fn of_runs(named: &[&String], patience: Duration) -> Lines {
        let mut jobs = BTreeMap::<_, Vec<(u32, Card)>>::new();
        for (tool, card) in cards() {
            if card.nodes > 1 && (named.is_empty() || named.iter().any(|name| is_meant(tool, &card, name))) {
                jobs.entry((card.host.clone(), card.port, card.job)).or_default().push((tool, card));
            }
        }
        let mut lines = Lines { lines: Vec::new(), patience, unreached: Vec::new() };
        for ((host, port, _), cards) in jobs {
            let (tool, card) = &cards[0];
            let address = Some((host, port));
            match roster(card, *tool, patience) {
                Ok(Roster { board, peers }) => {
                    let own = cards.iter().map(|(_, card)| card.arrival).collect();
                    lines.lines.push(Line { board, peers, own, address });
                }
                Err(error) => {
                    let name = format!("the other {}", count(card.nodes - 1, "node"));
                    let silence = Some(format!("cannot be asked: {}", error.message()));
                    lines.unreached.push(Node { name, address, ranks: Vec::new(), silence });
                }
            }
        }
        lines
    }

    /// Asks all hosts for the recordings of their processes, and adds what they say.
    pub fn gather(&self, found: &mut Found) {
        found.nodes.extend(self.unreached.iter().cloned());
        for (at, line) in self.lines.iter().enumerate() {
            let (own, others): (Vec<usize>, Vec<usize>) =
                (0..line.peers.len()).partition(|peer| line.own.contains(&line.peers[*peer].arrival));
            let node = |peer: usize, silence| {
                let Peer { name, ranks, .. } = line.peers[peer].clone();
                Node { name, address: line.address.clone(), ranks, silence }
            };
            // A process of srun or mpirun has the name of its host, where that is known.
            let named = |node: Node, host: String| match line.address {
                Some(_) => node,
                None => Node { name: host, ..node },
            };
            found.nodes.extend(own.into_iter().map(|peer| named(node(peer, None), host_name())));
            let peers: Vec<Peer> = others.iter().map(|peer| line.peers[*peer].clone()).collect();
            let answers = ask(&line.board, &peers, &Request::recordings().text(), self.patience);
            for (peer, answer) in others.into_iter().zip(answers) {
                match answer.and_then(|bytes| Answer::read(&bytes, Origin::Sent(at, peer))) {
                    Ok(answer) => {
                        found.nodes.push(named(node(peer, None), answer.host));
                        found.processes.extend(answer.found.processes);
                        found.started.extend(answer.found.started);
                        found.unreadable.extend(answer.found.unreadable);
                    }
                    Err(why) => found.nodes.push(node(peer, Some(why))),
                }
            }
        }
    }

    /// Tells those that were started with this process that there are no more questions, and waits
    /// a moment until they have read it.
    pub fn finish(&self) {
        let until = Instant::now() + LEAVES;
        for line in &self.lines {
            end_questions(&line.board);
            while left(&line.board) + 1 < line.peers.len() && Instant::now() < until {
                sleep(Duration::from_millis(5));
            }
        }
    }

    /// Asks hosts for the stacks of processes, each with its rank and where its recording comes
    /// from.
    pub fn look(&self, processes: &[(usize, u32, Origin)], stacks: &mut Stacks) {
        let mut asked: BTreeMap<(usize, usize), Vec<(usize, u32)>> = BTreeMap::new();
        for (rank, pid, origin) in processes {
            if let Origin::Sent(line, peer) = origin {
                asked.entry((*line, *peer)).or_default().push((*rank, *pid));
            }
        }
        for ((line, peer), ranks) in asked {
            let Some(Line { board, peers, .. }) = self.lines.get(line) else { continue };
            let request = Request::stacks(ranks.iter().map(|(_, pid)| *pid).collect()).text();
            let answer = ask(board, &peers[peer..=peer], &request, self.patience).pop();
            let Some(Ok(Ok(answer))) = answer.map(|answer| answer.map(|bytes| Answer::read(&bytes, Origin::File)))
            else {
                continue;
            };
            for (pid, threads) in answer.stacks {
                if let Some((rank, _)) = ranks.iter().find(|(_, known)| *known == pid) {
                    stacks.note(*rank, threads, &answer.refusal);
                }
            }
        }
    }
}

/// Whether the tool may have the job that this name or process number means. A number means it
/// where the number is the tool's, an ancestor's or a descendant's. A name always may, because only
/// the recordings tell the names of jobs.
fn is_meant(tool: u32, card: &Card, name: &str) -> bool {
    let Ok(pid) = name.parse::<u32>() else { return true };
    card.name == name || descends(tool, pid) || descends(pid, tool)
}
