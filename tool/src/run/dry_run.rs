//! `devicemesh run --dry-run`: shows what would be started, and starts nothing. It opens no port
//! and meets no node.

use std::io;

use devicemesh::printable::printable;
use devicemesh::rendezvous::host_name;
use devicemesh::rendezvous::launcher::STARTED_BY_RUN;

use super::assignment::Assignment;
use super::binding::Binding;
use super::environment::variables;
use super::identity::{shell_line, shell_word};
use super::options::Options;
use super::rendezvous::Rendezvous;
use crate::columns::table;
use crate::failure::Failure;
use crate::labelled::{Labelled, PLAIN};
use crate::stdio::print;
use crate::style::Style;
use crate::terminal;
use crate::words::count;

/// Stands for a value that is known only at the start.
const FREE_PORT: &str = "(a free one)";

/// Prints what this node would start.
pub fn show(options: &Options, rendezvous: Rendezvous, binding: &Binding) -> Result<u8, Failure> {
    let stdout = io::stdout();
    print(describe(options, rendezvous, binding, terminal::width(), Style::new(options.color, &stdout)))?;
    Ok(0)
}

fn describe(
    options: &Options,
    rendezvous: Rendezvous,
    binding: &Binding,
    width: Option<usize>,
    style: Style,
) -> String {
    let port_is_free = rendezvous.is_private();
    let (nodes, here, store) = (rendezvous.nodes, rendezvous.ranks, rendezvous.store());
    let who = if rendezvous.has_service() { ", which a devicemesh store serves" } else { "" };
    let id_is_named = rendezvous.id.is_some();
    let node = rendezvous.node;
    let assignment = assumed(rendezvous);
    let mut lines = Labelled::new(style, Some(width.unwrap_or(PLAIN)));
    let mut line = |label: &str, text: &str| lines.line(label, text);
    let restart = options.restart.standing();
    let ranks = format!("{}{}", count(here, "rank"), restart.told_spares());
    let what = match nodes {
        1 => format!("would start {ranks} on {}", host_name()),
        _ => format!("would start {ranks} on {}, as node {} of {nodes}", host_name(), assignment.node),
    };
    line("dry run", &what);
    if nodes > 1 {
        let unnumbered = match node {
            None => " this node is node 0 (without --node-rank, nodes are numbered as they come), and that",
            Some(_) => "",
        };
        line(
            "assumed",
            &format!(
                "that{unnumbered} every node starts {} too, which the nodes know when they have met",
                count(here, "rank")
            ),
        );
    }
    line("command", &printable(&shell_line(&options.command)));
    let folder = std::env::current_dir().map(|folder| folder.display().to_string());
    line("folder", &printable(&folder.unwrap_or_else(|error| error.to_string())));
    let place = if port_is_free { "on this host, at a free port".to_owned() } else { format!("at {store}{who}") };
    line("store", &place);
    if nodes > 1 {
        line("nodes", &format!("have {} s to come (--rdzv-timeout)", options.meeting.rdzv_timeout.as_secs_f64()));
    }
    line("binding", &binding.describe());
    let chosen = &options.output;
    line("stdin", &chosen.stdin.0.map_or("/dev/null".to_owned(), |rank| format!("the tool's own for rank {rank}")));
    let output = match (&chosen.log_dir, chosen.tee) {
        (Some(folder), tee) => {
            let shown = if tee { ", and the tool's own" } else { "" };
            format!("rank-R.out and rank-R.err for rank R, in a new folder of {}{shown}", folder.display())
        }
        (None, _) => "the tool's own".to_owned(),
    };
    let before = match (chosen.timestamps, chosen.prefix) {
        (false, false) => "",
        (true, false) => ", with the time before each line",
        (false, true) => ", with the rank before each line",
        (true, true) => ", with the time and the rank before each line",
    };
    line("output", &printable(&format!("{output}{before}")));
    if let Some(restarts) = restart.describe() {
        line("restarts", &restarts);
    }
    let failure = restart.when_it_ends();
    let timeout = match options.ending.timeout {
        Some(limit) => format!("after {} s (--timeout), or {failure}", limit.as_secs_f64()),
        None => failure,
    };
    line(
        "ends",
        &format!("{timeout}; the others then have {} s (--failure-grace)", options.ending.failure_grace.as_secs_f64()),
    );

    let of_rank = |local_rank: u32| {
        let mut variables = variables(local_rank, 0, &assignment, binding.own_cores(local_rank));
        for (name, value) in &mut variables {
            match *name {
                "MASTER_PORT" if port_is_free => *value = FREE_PORT.to_owned(),
                STARTED_BY_RUN if port_is_free => *value = "(127.0.0.1 and that port)".to_owned(),
                "TORCHELASTIC_RUN_ID" if !id_is_named => *value = "(made at the start)".to_owned(),
                _ => {}
            }
        }
        variables
    };
    let all: Vec<Vec<(&str, String)>> = (0..here).map(of_rank).collect();
    // RANK is always shown by rank, so that the table has a key.
    let differs = |at: usize| at == 0 || all.iter().any(|of_rank| of_rank[at].1 != all[0][at].1);
    let (own, common): (Vec<usize>, Vec<usize>) = (0..all[0].len()).partition(|at| differs(*at));
    let common: Vec<String> = common.iter().map(|at| assigned(all[0][*at].0, &all[0][*at].1)).collect();
    line("variables", &common.join(" "));
    line("", "and those of the tool; the table has those that differ from rank to rank");

    let mut heads: Vec<&str> = own.iter().map(|at| all[0][*at].0).collect();
    heads.extend(["CPUs", "memory", "GPU"].iter().filter(|_| binding.share(0).is_some()));
    let cells = |local_rank: u32| {
        let mut cells: Vec<String> = own.iter().map(|at| all[local_rank as usize][*at].1.clone()).collect();
        if let Some(share) = binding.share(local_rank) {
            let memory = share.memory.map_or("any node".to_owned(), |node| format!("node {node}"));
            let gpu = binding.gpu(local_rank).unwrap_or("-".to_owned());
            cells.extend([share.cpus.to_string(), memory, gpu]);
        }
        cells
    };
    let rows: Vec<Vec<String>> = (0..here).map(cells).collect();
    let table = table(&heads, &rows, |_| false, 1, width, |head| style.dim(head));
    format!("{}\n{table}", lines.into_text())
}

/// This node's share of the job, as far as it is known before the nodes have met: every node is
/// taken to start as many ranks as this one.
fn assumed(rendezvous: Rendezvous) -> Assignment {
    let (nodes, node, port) = (rendezvous.nodes, rendezvous.node.unwrap_or(0), rendezvous.port);
    let mut assignment = Assignment::whole_job(&rendezvous, port);
    let others = assignment.ranks - assignment.spares;
    assignment.nodes = nodes;
    assignment.node = node;
    assignment.first_rank = node * others;
    assignment.mesh_size = nodes * others;
    assignment.first_spare = assignment.mesh_size + node * assignment.spares;
    assignment.world_size = nodes * assignment.ranks;
    assignment
}

/// A variable as a shell would take it. A value that is known only at the start is in parentheses.
fn assigned(name: &str, value: &str) -> String {
    match value.starts_with('(') {
        true => format!("{name}={value}"),
        false => format!("{name}={}", printable(&shell_word(value))),
    }
}
