//! Starts the node of a lost host again (`--restart rank`). The host may come back at any time, for
//! example after it has booted, so the starter tries it again and again, with pauses that grow. A
//! node counts as back when it has met the others, whose ranks then let its ranks in.

use std::time::Instant;

use super::job::Starter;
use super::node::{Node, State};
use crate::run::restart::{after, pause};
use crate::words::count;

impl Starter<'_> {
    /// Plans another start of the node of a host that was just left behind. Returns the end of the
    /// message about the loss.
    pub fn plan_return(&mut self, index: usize) -> String {
        let most = self.options.restart.standing().most;
        let node = &mut self.nodes[index];
        node.tries = 0;
        if node.restarts == most {
            return match most {
                0 => String::new(),
                most => format!("; the host has had {}", count(most, "restart")),
            };
        }
        node.restarts += 1;
        let pause = pause(node.restarts);
        node.again = Some(Instant::now() + pause);
        format!(" until they start again there{} (restart {} of {most})", after(pause), node.restarts)
    }

    /// Starts again each host whose pause is over, and ends tries that have hung for too long.
    pub fn start_due_hosts(&mut self, now: Instant) {
        let is_ending = self.is_ending();
        // The agent has this time to say hello, and then the node has it to meet the others.
        let patience = self.options.meeting.rdzv_timeout;
        let hangs = |node: &Node| {
            let parts = if node.has_orders() { 2 } else { 1 };
            let is_try = node.is_left_behind && node.tries > 0 && node.process.is_some();
            is_try && now.duration_since(node.began) / parts >= patience
        };
        for index in (0..self.nodes.len()).filter(|index| hangs(&self.nodes[*index])).collect::<Vec<usize>>() {
            let seconds = patience.as_secs_f64();
            self.try_has_failed(index, &format!("has not met the others within {seconds} s (--rdzv-timeout)"));
        }
        for node in self.nodes.iter_mut().filter(|node| node.again.is_some_and(|again| is_ending || now >= again)) {
            node.again = None;
            if !is_ending {
                // The end of a process that was killed is awaited here.
                (node.process, node.state) = (None, State::Planned);
                node.tries += 1;
            }
        }
    }

    /// Handles a try that has failed: the host is out of reach, or its node has not met the others.
    pub fn try_has_failed(&mut self, index: usize, why: &str) {
        let node = &mut self.nodes[index];
        (node.process, node.state) = (None, State::Lost);
        // The process that was killed when the host was left behind ends before the first try.
        if node.tries == 0 || self.is_ending() {
            return;
        }
        let node = &mut self.nodes[index];
        let pause = pause(node.tries + 1);
        node.again = Some(Instant::now() + pause);
        let told = format!("{}: {why}", node.numbered(index));
        // One reason is told once.
        if self.passed_on.insert(told.clone(), index).is_none() {
            self.say(&format!("{told}; the next try follows{}", after(pause)));
        }
    }

    /// Handles that a node has met the others. `arrival` is its number among all nodes that have
    /// come to the job's store.
    pub fn node_has_met(&mut self, index: usize, arrival: Option<u32>) {
        self.has_met = true;
        self.nodes[index].arrival = arrival;
        if std::mem::take(&mut self.nodes[index].is_left_behind) {
            self.losses.forget(index);
        }
    }

    /// Whether the job ends, so that no host is started again.
    pub fn is_ending(&self) -> bool {
        self.reason.is_some() || self.code.is_some() || self.limit.is_some()
    }

    /// Whether the starter has to wait for a host: its node may still do something for the job. The
    /// job does not wait for a lost host that may come back.
    pub fn has_more(&self) -> bool {
        self.nodes.iter().any(|node| {
            let is_needed = !node.is_left_behind || node.tries == 0;
            is_needed && (node.process.is_some() || node.state == State::Planned)
        })
    }
}
